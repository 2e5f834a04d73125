"""Instance types: the table with their prices, accelerators that torch cannot use, and the longest times of their boot.

The table is `resources.catalogue`, or the file in the environment's RUBBERBAND_CATALOGUE, or the one that comes with
rubberband. The caller may pass the last one with live prices of AWS (`rubberband.cloud.aws.prices`).
"""

from __future__ import annotations

import csv
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files

from rubberband.errors import InputError
from rubberband.spec.resources import Resources
from rubberband.units import format_instant, near, nearest, shown
from rubberband.values.kinds import OWN, part_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SideFacts:
    """Billed resources of an instance, as AWS describes the image and the subnets."""

    volume_gb: int
    """Size of its root volume."""
    public_address: bool
    """Whether one of its possible subnets gives it one."""
    nat: bool
    """Whether one of its possible subnets reaches the Internet through a NAT gateway."""
    s3_endpoint: bool = False
    """Whether traffic to S3 bypasses that gateway."""
    installed: bool = True
    """Whether it installs its packages at boot. Else it loads only the driver's wheel, one MB: at most 0.0001 USD."""


# The table is a CSV file that users may replace. Columns, in any order; `instance_type` and `gpus` are required, lines
# that begin with # are comments:
#
#     instance_type        its name
#     gpus                 GPUs of one instance; 0 for types on whose CPUs trials train
#     gpu                  their model; profiles measured on one model hold for types with the same model and memory
#     gpu_memory_gib       memory of one GPU
#     vcpus, memory_gib, network_gbps   of the instance; for display only
#     efa                  1 where it can have an Elastic Fabric Adapter, 0 where not
#     spot_share           spot price over on-demand price, indicative, in (0, 1]
#     priced_on            date of the prices, such as 2026-01-19
#     <region>             on-demand price in USD per hour in that region, such as us-east-1; with a ~ in front if
#                          approximate, empty if unknown


MAX_BYTES = 4 << 20
"""Largest table that is read."""

_TEXTS = ("instance_type", "gpu", "priced_on")
_NUMBERS = ("gpus", "gpu_memory_gib", "vcpus", "memory_gib", "network_gbps", "efa", "spot_share")
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
    """0 for types on whose CPUs trials train."""
    gpu: str = ""
    gpu_memory_gib: float | None = None
    """Memory of one GPU."""
    vcpus: float | None = None
    memory_gib: float | None = None
    network_gbps: float | None = None
    """Sustained."""
    has_efa: bool | None = None
    """Whether it can have an Elastic Fabric Adapter."""
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


class LiveTable(dict[str, InstanceType]):
    """A table with notes on its prices."""

    def __init__(self, rows: Mapping[str, InstanceType], notes: Sequence[str] = ()) -> None:
        super().__init__(rows)
        self.notes = tuple(dict.fromkeys(notes))
        """Reasons why the cloud could not be asked, or not for all; a line each, with the remedy."""


@cache
def catalogue() -> Mapping[str, InstanceType]:
    """Return the table that comes with rubberband: instance types of EC2, by name."""
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
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        cells = _cells(line, f"{source}:{number}")
        if header is None:
            header = _header(cells, f"{source}:{number}")
            continue
        row = _row(header, cells, f"{source}:{number}")
        if row.instance_type in table:
            first = line_of[row.instance_type]
            raise InputError(f"{source}:{number}: {row.instance_type} occurs twice (first in line {first}); remove one")
        table[row.instance_type], line_of[row.instance_type] = row, number
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
        without = {other: row for other, row in table.items() if not row.gpus}
        remedy = "give slots (2: train 2 trials at a time on one) and price_per_hour as well"
        return f"{_nearest(name, without)} or {remedy}" if without else remedy
    return f"{_nearest(name, {other: row for other, row in table.items() if row.gpus} or table)} {remedy}"


def _nearest(name: str, table: Mapping[str, InstanceType]) -> str:
    if close := near(name, table, 3):
        return f"did you mean {' or '.join(shown(other) for other in close)}?"
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
    gpus, share, efa = numbers.pop("gpus"), numbers.pop("spot_share", None), numbers.pop("efa", None)
    if gpus is None or gpus != int(gpus):
        raise InputError(f"{where}: gpus: {shown(texts['gpus'])} is not a whole number; write one, 0 for a CPU type")
    if share is not None and not 0.0 < share <= 1.0:
        raise InputError(f"{where}: spot_share: {share:g} is not in (0, 1]; write the spot price over the other price")
    if efa not in (None, 0.0, 1.0):
        raise InputError(f"{where}: efa: {efa:g} is neither 0 nor 1; write 1 for a type with EFA, or leave it empty")
    return InstanceType(
        instance_type=name,
        gpus=int(gpus),
        gpu=gpu,
        gpu_memory_gib=numbers.pop("gpu_memory_gib", None),
        vcpus=numbers.pop("vcpus", None),
        memory_gib=numbers.pop("memory_gib", None),
        network_gbps=numbers.pop("network_gbps", None),
        has_efa=None if efa is None else efa == 1.0,
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


ENVIRONMENT_VARIABLE = "RUBBERBAND_CATALOGUE"

Table = Mapping[str, InstanceType]


def table_of(resources: Resources, environment: Mapping[str, str] = os.environ, table: Table | None = None) -> Table:
    """Return `table`, or else the table of the file or the provider. Raises InputError if it cannot be read."""
    if table is not None:
        return table
    if resources.catalogue:
        return load_table(resources.catalogue)
    if resources.kind.instance_types is None:
        return {}
    types: Table = part_of(resources.provider, "instance_types")(resources, environment)
    return types


def usual_table(_resources: Resources, environment: Mapping[str, str]) -> Table:
    """Return the table of the environment, or the catalogue of EC2. Raises InputError if it cannot be read."""
    path = environment.get(ENVIRONMENT_VARIABLE)
    return load_table(path) if path else catalogue()


def row_source(row: InstanceType, region: str) -> str:
    """Return the source of a row's on-demand price: AWS with the time, or the catalogue with its date."""
    if (on_demand_at := row.live_in(region).on_demand_at) is not None:
        return f"AWS, {region}, {instant(on_demand_at)}"
    dated = f" of {row.priced_on}" if row.priced_on else ""
    return f"the catalogue{dated}, {region}{', approximate' if region in row.approximate else ''}"


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
    if kind.default_type is not None and (resources.is_free or resources.price_usd_per_hour is not None):
        return (kind.default_type,)
    example = "p3.8xlarge" if resources.provider in OWN else next(iter(table_of(resources)), "NAME")
    sized = "" if resources.gpus_per_instance is not None else "gpus_per_instance and "
    raise InputError(
        f"resources.instance_type: provider {resources.provider} needs one; add it, such as instance_type: {example}"
        + (f", or give {sized}price_per_hour" if kind.default_type is not None else "")
    )


def similar_types(resources: Resources, name: str, table: Table) -> list[str]:
    """Return the experiment's other types with as many GPUs as `name`, each with as much memory or more.

    Types without GPUs need as many vCPUs and as much memory of the instance.
    """
    row = table.get(name)
    rows = {other: table[other] for other in types_of(resources) if other != name and other in table}
    if row is None:
        return []
    return [other for other, candidate in rows.items() if is_similar(candidate, row)]


def is_similar(other: InstanceType, row: InstanceType) -> bool:
    """Return whether a type may replace another: as many GPUs (or vCPUs) with as much memory or more."""
    if row.gpus:
        return other.gpus == row.gpus and (other.gpu_memory_gib or 0.0) >= (row.gpu_memory_gib or 0.0)
    return not other.gpus and other.vcpus == row.vcpus and (other.memory_gib or 0.0) >= (row.memory_gib or 0.0)


LEASE_SHARE = 0.95
"""Share of the budget's reach that is armed as a lease: during the rest, the same request may be repeated."""

_FIRMWARE_S = 60.0
_SLOW_FIRMWARE_S = ((re.compile(r".*\.metal(-.*)?"), 1500.0), (re.compile(r"p([4-9]|\d\d)[a-z]*(-.*)?\..*"), 600.0))
"""Metal: Canonical saw "over 20 minutes" until commands ran (canonical/pycloudlib#192). P4 and later: AWS's own
ParallelCluster gives its nodes 30 minutes (ResumeTimeout, aws-parallelcluster-cookbook#960), and Karpenter's 15 were
too few for some nodes (kubernetes-sigs/karpenter#357); with the 15 minutes to install, 10 are left."""
_INSTALL_S = 900.0
_INSTALL_SHARE = 1.5
"""Limit of an installation over the file's estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BootTimeouts:
    """Limits of one type, or the longest of several."""

    firmware_s: float
    """From `running` until the boot script arms the lease, and from its end until the machine is off."""
    install_s: float
    """From there until the instance has joined; meanwhile it may renew its lease itself."""

    @property
    def ready_s(self) -> float:
        """From `running` until an instance that is not ready is given up."""
        return self.firmware_s + self.install_s

    @property
    def lease_s(self) -> float:
        """Time that the budget covers for an instance whose driver dies while it starts."""
        return reach_s(self.install_s, self.firmware_s)


def boot_timeouts(types: Iterable[str], init_delay_s: float | None = None) -> BootTimeouts:
    """Return the longest limits of some types of EC2. `init_delay_s`: the file's estimate of the installation."""
    return BootTimeouts(
        firmware_s=max(map(firmware_s, types), default=_FIRMWARE_S),
        install_s=max(_INSTALL_S, _INSTALL_SHARE * (init_delay_s or 0.0)),
    )


def firmware_s(instance_type: str) -> float:
    """Return the longest time from `running` until an instance of the type runs its boot script."""
    return next((limit for names, limit in _SLOW_FIRMWARE_S if names.fullmatch(instance_type)), _FIRMWARE_S)


def usual_firmware_s(instance_type: str) -> float:
    """Return an estimate of the type's firmware time beyond that of an ordinary type: half of its limit."""
    return (firmware_s(instance_type) - _FIRMWARE_S) / 2.0


def reach_s(lease_s: float, firmware_s: float = _FIRMWARE_S) -> float:
    """Return how far ahead the budget must reach for an instance to live `lease_s` after its boot script began."""
    return float(math.ceil((lease_s + firmware_s) / LEASE_SHARE))


def armed_s(reach_s: float, firmware_s: float = _FIRMWARE_S) -> float:
    """Return the lease that is armed for a budget that reaches `reach_s` ahead; the inverse of the function."""
    return float(math.floor(LEASE_SHARE * reach_s - firmware_s))
