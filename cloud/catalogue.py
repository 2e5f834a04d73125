"""The table of instance types, and the offers that an experiment can rent.

Values of the experiment file come first, then the profile's measurements, then the table. The table is
`resources.catalogue`, or the file in the environment's RUBBERBAND_CATALOGUE, or the one that comes with rubberband. The
caller may pass the last one with live prices of AWS (`rubberband.cloud.prices`).
"""

from __future__ import annotations

import csv
import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files

from rubberband.cloud.boot_timeouts import usual_firmware_s
from rubberband.cloud.side_costs import SideFacts, given_side_cost, side_costs
from rubberband.errors import InputError, ProfileMissingError
from rubberband.spec.fields import Delay, delay_of
from rubberband.spec.resources import Resources
from rubberband.units import format_instant, nearest, shown
from rubberband.values.offer import Offer, SideCost, Spot
from rubberband.values.profile import FIXED, Profile, Spread

# The table is a CSV file that users may replace. Columns, in any order; `instance_type` and `gpus` are required, lines
# that begin with # are comments:
#
#     instance_type        its name
#     gpus                 GPUs of one instance, at least 1
#     gpu                  their model; profiles measured on one model hold for types with the same model and memory
#     gpu_memory_gib       memory of one GPU
#     vcpus, memory_gib, network_gbps   of the instance; for display only
#     spot_share           spot price over on-demand price, indicative, in (0, 1]
#     priced_on            date of the prices, such as 2026-01-19
#     <region>             on-demand price in USD per hour in that region, such as us-east-1; with a ~ in front if
#                          approximate, empty if unknown


MAX_BYTES = 4 << 20
"""Largest table that is read."""

_TEXTS = ("instance_type", "gpu", "priced_on")
_NUMBERS = ("gpus", "gpu_memory_gib", "vcpus", "memory_gib", "network_gbps", "spot_share")
_REGION = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+", re.ASCII)
_NAME = re.compile(r"[^\s,]{1,100}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Answers of AWS about a type in one region, with their Unix times (None: no answer)."""

    offered: bool = True
    """Whether the region has the type."""
    on_demand_at: float | None = None
    spot_usd_per_hour: Mapping[str, float] = field(default_factory=dict)
    """Zone -> price; empty if it is not sold on spot, or AWS was not asked."""
    spot_at: float | None = None
    beside: SideFacts | None = None
    """Its volume, address and traffic; None: AWS was not asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceType:
    """A row of the table; None stands for unknown."""

    instance_type: str
    gpus: int
    """0 only for types that AWS described: a user's table has types with GPUs."""
    gpu: str = ""
    gpu_memory_gib: float | None = None
    """Memory of one GPU."""
    vcpus: float | None = None
    memory_gib: float | None = None
    network_gbps: float | None = None
    """Sustained."""
    spot_share: float | None = None
    """Indicative spot price over the on-demand price."""
    priced_on: str = ""
    prices_usd_per_hour: Mapping[str, float]
    """Region -> on-demand price; only known ones."""
    approximate: frozenset[str] = frozenset()
    """Regions whose price is approximate."""
    live: Mapping[str, Live] = field(default_factory=dict)
    """Region -> answers of AWS, whose price on demand is then the one above. Empty in a table from a file."""

    @property
    def gpu_model(self) -> str:
        """Model and memory of its GPUs, such as `A100 (40 GiB)`; empty if unknown."""
        memory = f" ({self.gpu_memory_gib:g} GiB)" if self.gpu_memory_gib is not None else ""
        return f"{self.gpu}{memory}" if self.gpu else ""

    def live_in(self, region: str) -> Live:
        """Return the answers of AWS for a region, which are empty if it was not asked."""
        return self.live.get(region, Live())

    def live_spot_usd_per_hour(self, region: str) -> float | None:
        """Return AWS's spot price in the region's cheapest zone; None if there is none."""
        return min(self.live_in(region).spot_usd_per_hour.values(), default=None)


@cache
def catalogue() -> Mapping[str, InstanceType]:
    """Return the table that comes with rubberband: GPU instance types of EC2, by name."""
    text = files("rubberband.cloud").joinpath("catalogue.csv").read_text(encoding="utf-8")
    return parse_table(text.splitlines(), "catalogue.csv")


def load_table(path: str | os.PathLike[str]) -> Mapping[str, InstanceType]:
    """Return the table of a file. Raises InputError (one line, with file and line) if it is missing or wrong."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"catalogue {shown(str(path))} cannot be read ({reason}); give a CSV file") from None
    if len(content) > MAX_BYTES:
        raise InputError(f"{path} is larger than {MAX_BYTES >> 20} MiB: no table of instance types; shorten it")
    try:
        return parse_table(content.decode("utf-8-sig").splitlines(), str(path))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}:{line}: not UTF-8; save the file as UTF-8") from None


def parse_table(lines: Iterable[str], source: str) -> Mapping[str, InstanceType]:
    """Return the table of CSV lines; `source` is its name in errors. Raises InputError as `load_table` does."""
    header: list[str] | None = None
    table: dict[str, InstanceType] = {}
    found: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        cells = _cells(line, f"{source}:{number}")
        if header is None:
            header = _header(cells, f"{source}:{number}")
            continue
        row = _row(header, cells, f"{source}:{number}")
        if row.instance_type in table:
            first = found[row.instance_type]
            raise InputError(f"{source}:{number}: {row.instance_type} occurs twice (first in line {first}); remove one")
        table[row.instance_type], found[row.instance_type] = row, number
    if not table:
        raise InputError(f"{source} has no instance types; write a header line and one line for each type")
    return table


def is_cpu_type(name: str) -> bool:
    """Return whether this is a name of EC2's types without GPUs, such as c5.xlarge."""
    return re.fullmatch(r"(?:a|c|d|h|hpc|i|im|is|m|r|t|u|x|z)\d[a-z0-9-]*\.[a-z0-9-]+", name[:100]) is not None


def nearest_types(name: str, table: Mapping[str, InstanceType], remedy: str) -> str:
    """Return a hint for errors about an unknown type: up to three near ones, or the extent of the table, and a remedy.

    A type without GPUs is not taken for a slip.
    """
    if is_cpu_type(name):
        return (
            "it has no CPU instances: write gpus_per_instance (2: train 2 trials at a time on one) and price_per_hour "
            "as well"
        )
    return f"{_nearest(name, table)} {remedy}"


def _nearest(name: str, table: Mapping[str, InstanceType]) -> str:
    close = difflib.get_close_matches(name[:100], table, n=3, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(shown(near) for near in close)}?"
    return f"it has {len(table)} types, from {min(table)} to {max(table)}:"


def _cells(line: str, where: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line], strict=True))]
    except csv.Error as error:
        raise InputError(f"{where}: not CSV ({error}); separate cells by commas and check the quotes") from None


def _header(names: list[str], where: str) -> list[str]:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InputError(f"{where}: column {shown(name)} occurs twice; remove one")
        if name not in (*_TEXTS, *_NUMBERS) and not _REGION.fullmatch(name):
            hint = nearest(name, (*_TEXTS, *_NUMBERS))
            raise InputError(f"{where}: column {shown(name)} is neither known nor a region such as us-east-1; {hint}")
    for name in ("instance_type", "gpus"):
        if name not in names:
            raise InputError(f"{where}: column {name} is missing; the first line names the columns, add it")
    return names


def _row(header: list[str], cells: list[str], where: str) -> InstanceType:
    if len(cells) != len(header):
        raise InputError(f"{where}: {len(cells)} cells, and the header has {len(header)}; leave what is unknown empty")
    texts = dict(zip(header, cells, strict=True))
    name = texts.pop("instance_type")
    if not _NAME.fullmatch(name):
        raise InputError(f"{where}: {shown(name)} is not the name of an instance type; write one, such as p3.8xlarge")
    gpu, priced_on = texts.pop("gpu", ""), texts.pop("priced_on", "")
    approximate = [key for key, text in texts.items() if key not in _NUMBERS and text.startswith("~")]
    for region in approximate:
        texts[region] = texts[region].removeprefix("~").strip()
        if not texts[region]:
            raise InputError(f"{where}: {region}: '~' is no price; write one after the ~, or leave it empty")
    numbers = {key: _number(text, f"{where}: {key}") for key, text in texts.items()}
    gpus, share = numbers.pop("gpus"), numbers.pop("spot_share", None)
    if gpus is None or gpus < 1 or gpus != int(gpus):
        raise InputError(f"{where}: gpus: {shown(texts['gpus'])} is not a whole number of at least 1; write one")
    if share is not None and not 0.0 < share <= 1.0:
        raise InputError(f"{where}: spot_share: {share:g} is not in (0, 1]; write the spot price over the other price")
    return InstanceType(
        instance_type=name,
        gpus=int(gpus),
        gpu=gpu,
        gpu_memory_gib=numbers.pop("gpu_memory_gib", None),
        vcpus=numbers.pop("vcpus", None),
        memory_gib=numbers.pop("memory_gib", None),
        network_gbps=numbers.pop("network_gbps", None),
        spot_share=share,
        priced_on=priced_on,
        prices_usd_per_hour={region: price for region, price in numbers.items() if price is not None},
        approximate=frozenset(approximate),
    )


def _number(text: str, where: str) -> float | None:
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value <= 1e9:
        raise InputError(f"{where}: {shown(text)} is not a number from 0 to 1e9; write one, or leave it empty")
    return value


_FAMILIES = {
    "g5g": "NVIDIA T4G on an Arm CPU (PyPI's torch for Arm has no CUDA, and PyTorch's CUDA builds for Arm no T4G)",
    "g4ad": "AMD Radeon Pro V520",
    "dl1": "Intel Gaudi",
    "dl2q": "Qualcomm AI 100",
    "inf1": "AWS Inferentia",
    "inf2": "AWS Inferentia2",
    "trn1": "AWS Trainium",
    "trn1n": "AWS Trainium",
    "trn2": "AWS Trainium2",
    "trn2u": "AWS Trainium2",
    "vt1": "AMD Alveo U30",
    "f1": "AMD FPGAs",
    "f2": "AMD FPGAs",
    "p2": "NVIDIA K80 (no current build of torch knows it)",
}
"""Family -> its accelerator, which the published wheels of PyTorch cannot use. For Arm see pytorch/pytorch#160162."""


def check_accelerator(resources: Resources, instance_type: str) -> None:
    """Raise InputError for a type of EC2 whose accelerator torch cannot use, unless an image has suitable software."""
    accelerator = _FAMILIES.get(instance_type.partition(".")[0])
    brings_its_own = resources.aws.image is not None and (resources.aws.install or "").strip() == "none"
    if resources.kind.is_rented and accelerator and not brings_its_own:
        raise InputError(
            f"resources.instance_type: {shown(instance_type)} has {accelerator}, which the published builds of PyTorch "
            "cannot use; choose a type with an NVIDIA GPU, such as g4dn.xlarge or g5.xlarge, or give an image with "
            "everything (resources.aws: image, and install: none)"
        )


ENVIRONMENT_VARIABLE = "RUBBERBAND_CATALOGUE"

Table = Mapping[str, InstanceType]


def offer(
    resources: Resources,
    profile: Profile | None = None,
    *,
    instance_type: str | None = None,
    environment: Mapping[str, str] = os.environ,
    table: Table | None = None,
) -> Offer:
    """Return the offer of the one type that `resources` names, or of `instance_type` among several.

    `table` is the one with live prices (`rubberband.cloud.prices`), if there is one.

    Raises InputError for a type that neither table nor file describes, for an unknown price in the region, and if
    `instance_type` is missing with several types.
    """
    types = types_of(resources)
    if instance_type is None and len(types) > 1:
        raise InputError(
            f"resources.instance_types: one type is needed here and {len(types)} are given; choose one of "
            f"{', '.join(types)} as instance_type"
        )
    name = types[0] if instance_type is None else instance_type
    if name not in types:
        raise InputError(f"resources.instance_type: {shown(name)} is not asked for; {nearest(name, types)}")
    return _offer(resources, profile, name, table_of(resources, environment, table))


def offers(
    resources: Resources,
    profiles: Profile | Mapping[str, Profile] | None = None,
    *,
    environment: Mapping[str, str] = os.environ,
    table: Table | None = None,
) -> tuple[Offer, ...]:
    """Return the offer of every type that `resources` names, in that order; `profiles` is one, or type -> profile.

    Raises InputError as `offer` does, and if one profile cannot hold for all types, as their GPUs differ or are
    unknown; ProfileMissingError for a type without a profile.
    """
    types, table = types_of(resources), table_of(resources, environment, table)
    if isinstance(profiles, Profile) and len(types) > 1:
        _check_same_gpus(types, table)
    return tuple(_offer(resources, _profile_of(profiles, name), name, table) for name in types)


def table_of(resources: Resources, environment: Mapping[str, str] = os.environ, table: Table | None = None) -> Table:
    """Return `table`, or else the table of the file or the environment. Raises InputError if it cannot be read."""
    if table is not None:
        return table
    path = resources.catalogue or environment.get(ENVIRONMENT_VARIABLE)
    return load_table(path) if path else catalogue()


def price_source(resources: Resources, instance_type: str, *, table: Table | None = None) -> str:
    """Return the source of a type's on-demand price, for a report: the file, or the table (see `row_source`)."""
    row = table_of(resources, table=table).get(instance_type)
    if resources.price_usd_per_hour is not None:
        return "the file"
    if row is None:
        return "free of charge"
    return row_source(row, resources.region)


def row_source(row: InstanceType, region: str) -> str:
    """Return the source of a row's on-demand price: AWS with the time, or the catalogue with its date."""
    if (on_demand_at := row.live_in(region).on_demand_at) is not None:
        return f"AWS, {region}, {instant(on_demand_at)}"
    dated = f" of {row.priced_on}" if row.priced_on else ""
    return f"the catalogue{dated}, {region}{', approximate' if region in row.approximate else ''}"


def spot_source(resources: Resources, instance_type: str, *, table: Table | None = None) -> str:
    """Return the source of a type's spot price, for a report: the file, AWS with zone and time, or the table."""
    row = table_of(resources, table=table).get(instance_type)
    live = row.live_in(resources.region) if row is not None else Live()
    if resources.spot.price_usd_per_hour is not None:
        return "the file"
    if not live.spot_usd_per_hour or live.spot_at is None:
        return "the catalogue, indicative"
    zone = min(live.spot_usd_per_hour, key=lambda zone: live.spot_usd_per_hour[zone])
    return f"AWS, {zone} (the lowest of {len(live.spot_usd_per_hour)} zones), {instant(live.spot_at)}"


def instant(at: float) -> str:
    """Format a Unix time to the minute: 2026-11-21T20:00Z."""
    return format_instant(datetime.fromtimestamp(at // 60 * 60, UTC)).replace(":00Z", "Z")


def types_of(resources: Resources) -> tuple[str, ...]:
    """Return the types that an experiment names. Raises InputError if its provider needs one and it names none."""
    if resources.instance_types is not None:
        return resources.instance_types
    if resources.instance_type is not None:
        return (resources.instance_type,)
    kind = resources.kind
    if kind.default_type is not None and (kind.is_this_machine or resources.price_usd_per_hour is not None):
        return (kind.default_type,)
    raise InputError(
        f"resources.instance_type: provider {resources.provider} needs one; add it, such as instance_type: p3.8xlarge"
        + (", or give gpus_per_instance and price_per_hour" if kind.default_type is not None else "")
    )


def similar_types(resources: Resources, name: str, table: Table) -> list[str]:
    """Return the experiment's other types with as many GPUs as `name`, each with as much memory or more."""
    row = table.get(name)
    rows = {other: table[other] for other in types_of(resources) if other != name and other in table}
    if row is None:
        return []
    memory_gib = row.gpu_memory_gib or 0.0
    return [o for o, found in rows.items() if found.gpus == row.gpus and (found.gpu_memory_gib or 0.0) >= memory_gib]


def _profile_of(profiles: Profile | Mapping[str, Profile] | None, name: str) -> Profile | None:
    if profiles is None or isinstance(profiles, Profile):
        return profiles
    if name not in profiles:
        raise ProfileMissingError(f"profile.by_instance_type: {shown(name)} has none; {nearest(name, profiles)}")
    return profiles[name]


def _check_same_gpus(types: tuple[str, ...], table: Table) -> None:
    models = [(name, table[name].gpu_model or "unknown ones") for name in types if name in table]
    for name, model in models[1:]:
        first, of_first = models[0]
        if model != of_first or model == "unknown ones":
            raise InputError(
                f"profile: one profile holds for one kind of GPU, and {first} has {of_first}, {name} {model}; write "
                f"profile: {{by_instance_type: {{{first}: ..., {name}: ...}}}}"
            )


def _offer(resources: Resources, profile: Profile | None, name: str, table: Table) -> Offer:
    check_accelerator(resources, name)
    row = table.get(name)
    kind = resources.kind
    default_init_s = kind.init_s + (usual_firmware_s(name) if kind.is_rented else 0.0)
    provision_delay_s, provision_spread = _delay(
        resources.provision_delay,
        (profile.provision_delay_s, profile.provision_spread) if profile else (None, FIXED),
        kind.provision_s,
    )
    init_delay_s, init_spread = _delay(
        resources.init_delay, (profile.init_delay_s, profile.init_spread) if profile else (None, FIXED), default_init_s
    )
    gpus = _gpus(resources, name, row, table)
    price_usd_per_hour = _price_usd_per_hour(resources, name, row, table)
    restart_s = provision_delay_s + init_delay_s + (profile.trial_startup_s if profile else 0.0)
    head_usd_per_hour, head_side_usd_per_hour = _head_usd_per_hour(resources, table)
    return Offer(
        instance_type=name,
        gpus=gpus,
        price_usd_per_hour=price_usd_per_hour,
        max_instances=resources.max_instances,
        provision_delay_s=provision_delay_s,
        provision_spread=provision_spread,
        init_delay_s=init_delay_s,
        init_spread=init_spread,
        billing=resources.billing,
        minimum_billed_s=resources.minimum_billed_s,
        data_usd_per_instance=resources.dataset_gb * resources.data_price_usd_per_gb,
        head_price_usd_per_hour=head_usd_per_hour,
        head_side_usd_per_hour=head_side_usd_per_hour,
        spot=_spot(resources, name, row, price_usd_per_hour, restart_s) if resources.market == "spot" else None,
        side_costs=_side_costs(resources, name, row, provision_delay_s),
    )


def _side_costs(
    resources: Resources, name: str, row: InstanceType | None, provision_delay_s: float
) -> tuple[SideCost, ...]:
    if not resources.kind.is_rented or resources.billing == "per_function":
        return ()
    if resources.side_usd_per_hour is not None:
        return (given_side_cost(resources.side_usd_per_hour, provision_delay_s),)
    gpus = row is None or row.gpus > 0
    beside = row.live_in(resources.region).beside if row is not None else None
    return side_costs(resources, beside, gpus=gpus, provision_delay_s=provision_delay_s)


def _delay(asked: Delay | None, measured: tuple[float | None, Spread], default_s: float) -> tuple[float, Spread]:
    if asked is not None:
        return delay_of(asked)
    measured_s, spread = measured
    return (default_s, FIXED) if measured_s is None else (measured_s, spread)


def _gpus(resources: Resources, name: str, row: InstanceType | None, table: Table) -> int:
    if resources.gpus_per_instance is not None:
        return resources.gpus_per_instance
    if row is not None and row.gpus:
        return row.gpus
    if row is not None:
        raise InputError(
            f"resources.instance_type: {name} has no GPUs; give gpus_per_instance (how many workers train on one's "
            "CPUs), or choose a type with GPUs (`rubberband cloud prices` lists them)"
        )
    if name == resources.kind.default_type:
        return 1
    raise InputError(
        f"resources.instance_type: {shown(name)} is not in the catalogue; "
        + nearest_types(name, table, "or give gpus_per_instance and price_per_hour")
    )


def _price_usd_per_hour(resources: Resources, name: str, row: InstanceType | None, table: Table) -> float:
    if resources.price_usd_per_hour is not None:
        return resources.price_usd_per_hour
    if row is None:
        if resources.kind.is_this_machine:
            return 0.0
        raise InputError(f"resources.price_per_hour: {shown(name)} is not in the catalogue; give its price per hour")
    if not row.live_in(resources.region).offered:
        others = _others(resources.region, row, table)
        raise InputError(
            f"resources.instance_type: AWS has no {name} in {resources.region}; choose another type or region{others}"
        )
    if resources.region not in row.prices_usd_per_hour:
        known = ", ".join(row.prices_usd_per_hour) or "no region"
        raise InputError(
            f"resources.region: the catalogue has a price of {name} for {known}, not for {resources.region}; give "
            "price_per_hour, or a table that has it as resources.catalogue"
        )
    return row.prices_usd_per_hour[resources.region]


def _others(region: str, row: InstanceType, table: Table) -> str:
    """Return, in words, types of a region with as many GPUs and memory, and other regions that have a type.

    Types of the same model come first, then cheap ones.
    """
    memory_gib = row.gpu_memory_gib or 0.0
    fit = [one for one in table.values() if one.gpus == row.gpus and (one.gpu_memory_gib or 0.0) >= memory_gib]
    priced = [one for one in fit if region in one.prices_usd_per_hour]
    cheapest = sorted(priced, key=lambda one: (one.gpu != row.gpu, one.prices_usd_per_hour[region]))[:3]
    types = ", ".join(one.instance_type for one in cheapest)
    regions = ", ".join(list(row.prices_usd_per_hour)[:3])
    told = [f"here there is {types}"] * bool(types) + [f"it is in {regions}"] * bool(regions)
    return f" ({'; '.join(told)})" if told else ""


def _head_usd_per_hour(resources: Resources, table: Table) -> tuple[float, float]:
    """Return the head's price, and its share for volume and address.

    It is the file's, or AWS's for the head's type; a price that is only in the shipped table does not count.
    """
    asked = not resources.kind.is_rented or "head_price_usd_per_hour" in resources.model_fields_set
    row = None if asked else table.get(resources.aws.head_instance_type)
    if row is None or row.live_in(resources.region).on_demand_at is None:
        return resources.head_price_usd_per_hour, 0.0
    costs = side_costs(resources, row.live_in(resources.region).beside, gpus=row.gpus > 0)
    beside = sum(cost.usd_per_hour for cost in costs)
    return row.prices_usd_per_hour[resources.region] + beside, beside


def _spot(resources: Resources, name: str, row: InstanceType | None, on_demand: float, restart_s: float) -> Spot:
    asked = resources.spot
    price_usd_per_hour = asked.price_usd_per_hour
    if price_usd_per_hour is None and row is not None:
        price_usd_per_hour = row.live_spot_usd_per_hour(resources.region)
    if price_usd_per_hour is None:
        if row is not None and row.live_in(resources.region).spot_at is not None:
            raise InputError(
                f"resources.market: AWS has no {name} on spot in {resources.region}; set market: on_demand, give "
                "resources.spot.price_per_hour, or choose another type or region"
            )
        if row is None or row.spot_share is None:
            raise InputError(
                f"resources.spot.price_per_hour: the catalogue has no spot price of {name}; give it (or, for "
                "several types, a table with spot_share as resources.catalogue), ask AWS by `rubberband estimate "
                "--live`, or set market: on_demand"
            )
        price_usd_per_hour = row.spot_share * on_demand
    return Spot(
        price_usd_per_hour=price_usd_per_hour,
        interruptions_per_hour=asked.interruptions_per_hour,
        checkpoint_iterations=asked.checkpoint_iterations,
        restart_s=restart_s if asked.restart_s is None else asked.restart_s,
    )
