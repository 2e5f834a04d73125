"""The pool file: the instances that several experiments share, and the limits of what they may cost together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError, model_validator

from rubberband.errors import InputError
from rubberband.spec.fields import Duration, Gpus, Name, Usd, Words, fault, name_like, word_error
from rubberband.spec.loading import read_document
from rubberband.spec.resources import Aws
from rubberband.values.kinds import KINDS, ProviderKind, ProviderName
from rubberband.values.plan import Market

_KEYS = "a pool: instances, gpus_per_instance, provider"


class PoolFile(Words):
    """A pool: how many instances of which kind, what they may cost, and how they are shared.

    `{instances: 16, gpus_per_instance: 4}` is enough for a simulation and for this machine.
    """

    name: Name = "pool"
    """Name of the pool, as experiments give it in `resources.pool`; by default it is made of the file's name."""
    instances: Annotated[int, Field(strict=True, ge=1, le=10_000)]
    """Most instances at any moment."""
    gpus_per_instance: Gpus | None = None
    """GPUs of an instance; by default those of `instance_type`."""
    instance_type: Annotated[str, Field(min_length=1)] | None = None
    provider: ProviderName = "local"
    region: Annotated[str, Field(min_length=1)] = "us-east-1"
    market: Market = "on_demand"
    price_usd_per_hour: Usd | None = Field(None, alias="price_per_hour")
    """Price of one instance; by default the catalogue's, and 0 on this machine."""
    minimum_billed_s: Duration = Field(60.0, alias="minimum_billed")
    """The provider bills an instance for at least this long."""
    max_usd_per_hour: Usd | None = None
    """Cap on the prices of all instances together."""
    max_usd_per_month: Usd | None = None
    """Cap on the bill of a calendar month (UTC)."""
    policy: Annotated[str, Field(min_length=1)] = "default"
    """Sharing policy, by its name."""
    idle_s: Duration = Field(300.0, alias="idle")
    """An instance that nobody holds is released after this time, and not before its minimum is used up."""
    lease_s: Annotated[Duration, Field(ge=2)] | None = Field(None, alias="lease")
    """Time that an instance outlives a broker that died; by default a minute, or 10 on EC2."""
    aws: Aws = Field(default_factory=Aws.model_construct)

    @property
    def kind(self) -> ProviderKind:
        """The record of the provider."""
        return KINDS[self.provider]

    @model_validator(mode="after")
    def _has_gpus(self) -> PoolFile:
        if self.gpus_per_instance is None and self.instance_type is None:
            raise fault("is required; add it, or instance_type", at="gpus_per_instance")
        return self


def load_pool(path: str | os.PathLike[str]) -> PoolFile:
    """Read a pool file; a pool without a name takes that of the file. Raises InputError in one line."""
    where = Path(path)
    words, origins = read_document(where, "pool", _KEYS)
    try:
        return PoolFile.model_validate({"name": name_like(where.stem) or "pool", **words})
    except ValidationError as error:
        wrong = word_error(error)
        place = next((origins[key] for key in (wrong.path, wrong.path[:1]) if key in origins), where.name)
        raise InputError(f"{place}: {wrong}") from None
