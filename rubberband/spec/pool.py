"""Pools: the file of one, the folder of one that is up, and the words of an experiment on one.

A pool is instances that several experiments share, with limits of what these may cost together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from rubberband.errors import InputError
from rubberband.features import part
from rubberband.files import make_directories, write_atomically
from rubberband.spec.fields import WHOLE, Delay, Duration, Gpus, Name, Usd, WordError, Words, fault
from rubberband.spec.resources import Aws, Resources, SpotMarket
from rubberband.units import counted, format_usd, shown
from rubberband.values.kinds import KINDS, OwnProvider, ProviderKind
from rubberband.values.plan import Market

CAP_SLACK_USD = 1e-9
"""Tolerance of a comparison with a cap."""
LENT_LEASE_S = 60.0
"""Default lease of what an experiment holds of a pool. The leases of the instances themselves are the broker's."""


Efficiency = Annotated[float, Field(strict=True, gt=0, lt=1)]


class Autoscale(Words):
    """The size of a pool by the efficiency of its GPUs: the speed-ups of its experiments over its GPUs."""

    lower: Efficiency
    """Below it the pool shrinks, to the largest size that keeps it."""
    upper: Efficiency
    """Above it the pool grows, to the largest size that keeps `lower`."""

    @model_validator(mode="after")
    def _ordered(self) -> Autoscale:
        if self.lower >= self.upper:
            raise fault(f"lower={self.lower:g} must be less than upper={self.upper:g}; lower it, or raise upper")
        return self


class PoolFile(Words):
    """A pool: how many instances of which kind, what they may cost, and how they are shared.

    `{instances: 16, gpus_per_instance: 4}` is enough for a simulation and for this machine.
    """

    name: Name = "pool"
    """Name of the pool, as experiments give it in `resources.pool`; by default it is made of the file's name."""
    instances: Annotated[int, Field(strict=True, ge=1, le=10_000), WHOLE]
    """Most instances at any moment."""
    gpus_per_instance: Gpus | None = None
    """GPUs of an instance; by default those of `instance_type`."""
    instance_type: Annotated[str, Field(min_length=1)] | None = None
    provider: OwnProvider = "local"
    region: Annotated[str, Field(min_length=1)] = "us-east-1"
    market: Market = "on_demand"
    """With `spot`, experiments plan with both markets, and the pool rents on the one that they ask for."""
    spot: SpotMarket = Field(default_factory=SpotMarket.defaults)
    price_usd_per_hour: Usd | None = Field(None, alias="price_per_hour")
    """Price of one instance on demand; by default EC2's or the catalogue's, and 0 on this machine."""
    side_usd_per_hour: Usd | None = Field(None, alias="side_price_per_hour")
    """Price of an instance's volume and address; by default EC2's, and 0 on this machine."""
    minimum_billed_s: Duration = Field(60.0, alias="minimum_billed")
    """The provider bills an instance for at least this long."""
    max_usd_per_hour: Usd | None = None
    """Cap on the prices of all instances together."""
    max_usd_per_month: Usd | None = None
    """Cap on the bill of a calendar month (UTC)."""
    policy: Annotated[str, Field(min_length=1)] = "default"
    """Sharing policy of `rubberband serve --pool` and of a simulation, by its name. Without a service, requests for
    instances are met in their order."""
    autoscale: Autoscale | None = None
    """The number of instances that `rubberband serve --pool` and a simulation divide follows the efficiency of their
    GPUs, from none to `instances`. By default it is `instances`."""
    idle_s: Duration = Field(300.0, alias="idle")
    """An idle instance is released after this time, and not before its minimum is used up."""
    lease_s: Annotated[Duration, Field(ge=2)] | None = Field(None, alias="lease")
    """Time that an instance outlives a broker that died; by default a minute, or 10 on EC2."""
    init_delay: Delay | None = None
    """From a running instance until trials can start on it, at its first start."""
    checkpoints: Annotated[str, Field(min_length=1)] | None = None
    """Bucket (`s3://bucket/prefix`) through which instances on EC2 get their packages, and the default checkpoint store
    of the experiments."""
    aws: Aws = Field(default_factory=Aws.defaults)

    @property
    def kind(self) -> ProviderKind:
        """The record of the provider."""
        return KINDS[self.provider]

    def instances_at_once(self) -> int:
        """Return the most instances at any moment, as far as `max_usd_per_hour` pays for them at the file's prices.

        Raises InputError if it does not pay for one.
        """
        price_usd, cap_usd = (self.price_usd_per_hour or 0.0) + (self.side_usd_per_hour or 0.0), self.max_usd_per_hour
        if cap_usd is None or price_usd == 0.0:
            return self.instances
        if cap_usd + CAP_SLACK_USD < price_usd:
            raise too_low("max_usd_per_hour", cap_usd, price_usd)
        return min(self.instances, int((cap_usd + CAP_SLACK_USD) / price_usd))

    def slices_at_once(self, gpus: int) -> int:
        """Return the most instances of `gpus` GPUs that an experiment may have. Raises InputError as above."""
        assert self.gpus_per_instance is not None, "a pool that was brought up knows its GPUs"
        return self.instances_at_once() * (self.gpus_per_instance // gpus)

    @model_validator(mode="after")
    def _agrees(self) -> PoolFile:
        if self.kind.is_borrowed:
            raise fault(
                "a Ray cluster shares its nodes by itself; run experiments with provider: ray, without a pool",
                at="provider",
            )
        if self.gpus_per_instance is None and self.instance_type is None:
            raise fault("is required; add it, or instance_type", at="gpus_per_instance")
        if self.aws.reservation is not None and self.market == "spot":
            raise fault("spot instances are not launched in a reservation; set market: on_demand", at="market")
        return self


def resources_of(pool: PoolFile) -> Resources:
    """Return the pool's machines in an experiment's words."""
    given = {
        "provider": pool.provider,
        "region": pool.region,
        "instance_type": pool.instance_type,
        "gpus_per_instance": pool.gpus_per_instance,
        "price_per_hour": pool.price_usd_per_hour,
        "side_price_per_hour": pool.side_usd_per_hour,
        "minimum_billed": pool.minimum_billed_s,
        "max_instances": pool.instances,
        "market": pool.market,
        "spot": pool.spot,
        "init_delay": pool.init_delay,
        "lease": pool.lease_s,
        "checkpoints": pool.checkpoints,
        "aws": pool.aws,
    }
    return Resources(**{key: value for key, value in given.items() if value is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFolder:
    """Paths of one pool. Constructing it touches nothing."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def file(self) -> Path:
        """The pool file as it was brought up, with prices and GPUs filled in."""
        return self.path / "pool.json"

    @property
    def machines(self) -> Path:
        """Folder of the provider's records of the machines and the head."""
        return self.path / "local"

    @property
    def lock(self) -> Path:
        """Locked while a broker runs."""
        return self.path / "broker.lock"

    @property
    def log(self) -> Path:
        """Output of the broker's process."""
        return self.path / "broker.log"

    @property
    def address(self) -> Path:
        """File with the path of the broker's socket."""
        return self.path / "address"

    @property
    def closed(self) -> Path:
        """Exists once the pool was closed, until it is brought up again."""
        return self.path / "closed"

    @property
    def is_up(self) -> bool:
        """Whether the pool was brought up, and not closed since; its broker may have died."""
        return self.file.exists() and not self.closed.exists()

    def broker(self) -> Any:
        """Return requests to the process that lends its instances: a `rubberband.cloud.pool.RemotePool`."""
        return part("broker")(self)

    def write(self, words: Mapping[str, Any]) -> None:
        """Keep the pool file, and let brokers start. Raises InputError if it cannot be written."""
        try:
            make_directories(self.path)
            write_atomically(self.file, json.dumps(words, indent=1).encode(), durable=True)
            self.closed.unlink(missing_ok=True)
        except OSError as error:
            reason = error.strerror or str(error)
            raise InputError(f"{self.path} cannot be written ({reason}); make room or give access") from None

    def read(self) -> dict[str, Any]:
        """Return the pool file's words. Raises InputError if it was never up."""
        try:
            found: dict[str, Any] = json.loads(self.file.read_text())
        except (OSError, ValueError):
            known = ", ".join(sorted(path.parent.name for path in self.path.parent.glob("*/pool.json"))) or "none"
            raise InputError(
                f"pool {self.name!r} not found in {self.path.parent}; known: {known}; start one with `rubberband pool "
                "up FILE`"
            ) from None
        return found

    def note_closed(self) -> None:
        """Note that the pool was closed: no broker starts by itself."""
        with suppress(OSError):
            self.closed.touch()
            self.address.unlink(missing_ok=True)


def pools_up(home: Path) -> list[PoolFolder]:
    """Return the folders of the pools below `home` that are up, by name."""
    found = (PoolFolder(path=path.parent) for path in sorted((home / "pools").glob("*/pool.json")))
    return [folder for folder in found if folder.is_up]


def pool_folder(name: str, home: Path) -> PoolFolder:
    """Return the folder of the pool `name` below `home`, or the folder itself if a path is given."""
    return PoolFolder(path=Path(name).expanduser().absolute() if "/" in name else home / "pools" / name)


def on_pool(
    words: Mapping[Any, Any], home: Path, announce: Callable[[str], None] = lambda line: None
) -> dict[Any, Any]:
    """Return an experiment's words with what its pool sets: provider, instance type, price and number of instances.

    `resources.pool` becomes the path of the pool's folder. `resources.gpus_per_instance` below the pool's asks for
    slices of its instances, at their share of the price. `announce` gets a remark if the pool has fewer instances than
    are asked for. Words without a pool are returned as they are. Raises InputError for a pool that was never up, and
    for words that contradict it.
    """
    resources = words.get("resources")
    name = resources.get("pool") if isinstance(resources, Mapping) else None
    if not isinstance(name, str) or not isinstance(resources, Mapping):
        return dict(words)
    resources = {key: value for key, value in resources.items() if value is not None}  # null: left out
    folder = pool_folder(name, home)
    pool = PoolFile(**folder.read())
    assert pool.gpus_per_instance is not None, "a pool that was brought up knows its GPUs"
    slice_gpus = _slice_gpus(resources, pool, pool.gpus_per_instance)
    most = pool.slices_at_once(slice_gpus)
    fixed = {"pool": str(folder.path), **_fixed(pool, slice_gpus / pool.gpus_per_instance)}
    for key, value in fixed.items():
        if key != "pool" and resources.get(key, value) != value:
            raise WordError(
                ("resources", key),
                f"{shown(resources[key])} contradicts pool {pool.name} ({shown(value)}); leave it out",
            )
    asked = resources.get("max_instances")
    if asked is None or (isinstance(asked, int) and asked > most):
        if asked is not None or pool.instances_at_once() < pool.instances:
            announce(lowered(_size_words(pool, slice_gpus), asked, most))
        asked = most
    sized = {"gpus_per_instance": slice_gpus, "max_instances": asked}
    return {**words, "resources": {**_usual(pool), **resources, **fixed, **sized}}


def _slice_gpus(resources: Mapping[str, Any], pool: PoolFile, each: int) -> int:
    """Return the GPUs of a slice of an instance that has `each`. Raises InputError for a number that it cannot have."""
    asked = resources.get("gpus_per_instance", each)
    if isinstance(asked, int) and 1 <= asked <= each:
        return asked
    must, has = ("1", "1 GPU") if each == 1 else (f"1 to {each}", counted(each, "GPU"))
    raise WordError(
        ("resources", "gpus_per_instance"), f"{shown(asked)} must be {must}: an instance of pool {pool.name} has {has}"
    )


def without_pool(words: Mapping[str, Any], folder: PoolFolder) -> dict[str, Any]:
    """Return an experiment's words without what its pool has set (`on_pool`): the rest is the user's own.

    Raises InputError if the pool was never up.
    """
    pool = PoolFile(**folder.read())
    fixed, usual = set(_fixed(pool, 1.0)) - {"provider"}, _usual(pool)
    own = {key: value for key, value in words["resources"].items() if key not in fixed and value != usual.get(key)}
    return {**words, "resources": own}


def too_low(key: str, cap_usd: float, needed_usd: float) -> InputError:
    """Return the error of a cap that is too low for any instance."""
    return InputError(f"{key}: {format_usd(cap_usd)} does not cover one instance ({format_usd(needed_usd)}); raise it")


def size_words(instances: int, gpus_per_instance: int, gpus: int) -> str:
    """Return a pool's size in words, also in parts of `gpus` GPUs: `2 instances of 4 GPUs (8 of 1 GPU)`."""
    parts = instances * (gpus_per_instance // gpus)
    in_parts = "" if gpus == gpus_per_instance else f" ({parts} of {counted(gpus, 'GPU')})"
    whole = f"{counted(instances, 'instance')} of {counted(gpus_per_instance, 'GPU')}"
    return f"{whole}{in_parts}"


def lowered(pool: str, asked: int | None, most: int) -> str:
    """Return the remark that an experiment gets `most` instances, not as many as it asked for; `pool` says why."""
    return f"pool: {pool}; max_instances is {most}{'' if asked is None else f' instead of {asked}'}."


def _size_words(pool: PoolFile, slice_gpus: int) -> str:
    has = f"{pool.name} has {size_words(pool.instances, pool.gpus_per_instance or slice_gpus, slice_gpus)}"
    if pool.instances_at_once() == pool.instances or pool.max_usd_per_hour is None:
        return has
    cap = format_usd(pool.max_usd_per_hour)
    return f"{has}, and its max_usd_per_hour={cap} pays for {counted(pool.instances_at_once(), 'instance')} at once"


def _fixed(pool: PoolFile, share: float) -> dict[str, Any]:
    """Return the words that a pool sets for instances that are this share of its own."""
    side_usd = pool.side_usd_per_hour or 0.0
    fixed: dict[str, Any] = {
        "provider": pool.provider,
        "region": pool.region,
        "instance_type": pool.instance_type,
        "price_per_hour": ((pool.price_usd_per_hour or 0.0) + side_usd) * share,
        "minimum_billed": 0.0,  # the pool pays for minima that are not used up
    }
    if not pool.kind.is_rented:
        return fixed
    spot = pool.spot.model_dump(mode="json", by_alias=True, exclude_none=True)
    spot_usd = pool.spot.price_usd_per_hour
    return {
        **fixed,
        "side_price_per_hour": 0.0,  # it is in the price
        "head_price_per_hour": 0.0,
        "market": pool.market,
        "spot": spot if spot_usd is None else {**spot, "price_per_hour": (spot_usd + side_usd) * share},
        "aws": pool.aws.model_dump(mode="json", by_alias=True, exclude_none=True),
    }


def _usual(pool: PoolFile) -> dict[str, Any]:
    """Return the words that a pool sets where an experiment says nothing else."""
    if not pool.kind.is_rented:
        return {}
    return {"lease": LENT_LEASE_S, **({} if pool.checkpoints is None else {"checkpoints": pool.checkpoints})}
