"""What AWS told of instance types, kept in a file for each region, with the time of every price. No network."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Amount = Annotated[float, Field(ge=0.0, le=1e9)]
Instant = Annotated[float, Field(ge=0.0, le=1e12)]
"""Unix time."""
Part = Literal["facts", "on_demand", "spot"]
ALL_PARTS: frozenset[Part] = frozenset({"facts", "on_demand", "spot"})
"""What AWS can be asked for of a type, each on its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What an instance type has."""

    gpus: Annotated[int, Field(ge=0, le=1024)]
    gpu: str = ""
    gpu_memory_gib: Amount | None = None
    """Of one GPU."""
    vcpus: Amount
    memory_gib: Amount
    network_gbps: Amount | None = None
    """Sustained."""
    architectures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """What AWS told of one type in one region, and when each part was told; an instant of None: never."""

    facts: Facts | None = None
    """None with an instant: the type cannot be had in the region."""
    facts_at: Instant | None = None
    on_demand_usd_per_hour: Amount | None = None
    """None with an instant: no such price."""
    on_demand_at: Instant | None = None
    spot_usd_per_hour: Mapping[str, Amount] = field(default_factory=dict)
    """Zone -> price."""
    spot_at: Instant | None = None


class Book(BaseModel):
    """All quotes of one region."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    version: Literal[1] = 1
    region: str
    gpu_types_at: Instant | None = None
    """When AWS was asked for all types with GPUs; each of them then has a quote."""
    quotes: Mapping[str, Quote] = Field(default_factory=dict)


def read_book(home: Path, region: str) -> Book:
    """The quotes that are kept of a region: none where there is no file, or one that cannot be read."""
    try:
        book = Book.model_validate_json(_path(home, region).read_bytes())
    except (OSError, ValidationError):
        return Book(region=region)
    return book if book.region == region else Book(region=region)


def write_book(home: Path, book: Book) -> None:
    """Keep the quotes, whole or not at all. Where the home cannot be written to they are asked for again next time."""
    path = _path(home, book.region)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(book.model_dump_json(indent=1))
            os.replace(draft, path)
        except OSError:
            os.unlink(draft)
            raise


def _path(home: Path, region: str) -> Path:
    safe = "".join(letter if letter.isalnum() or letter == "-" else "_" for letter in region)
    return home / "prices" / f"{safe}.json"
