"""The table of instance types: what each has and costs, read from a CSV file that a user may replace. No network.

The columns, in any order; `instance_type` and `gpus` are needed, lines that begin with # are comments:

    instance_type    its name
    gpus             GPUs of one instance, at least 1
    gpu              their model; profiles measured on one model hold for types with the same model and memory
    gpu_memory_gib   memory of one GPU
    vcpus, memory_gib, network_gbps    of the instance; nothing reckons with them yet
    spot_share       spot price over on-demand price, indicative, in (0, 1]
    priced_on        when the prices held, such as 2026-01-19
    <region>         on-demand price in USD per hour in that region, such as us-east-1; with a ~ in front where it is
                     approximate, empty where it is not known
"""

from __future__ import annotations

import csv
import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

from rubberband.cloud.side_costs import SideFacts
from rubberband.errors import InputError
from rubberband.units import nearest, shown

MAX_BYTES = 4 << 20
"""Largest table that is read."""

_TEXTS = ("instance_type", "gpu", "priced_on")
_NUMBERS = ("gpus", "gpu_memory_gib", "vcpus", "memory_gib", "network_gbps", "spot_share")
_REGION = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+", re.ASCII)
_NAME = re.compile(r"[^\s,]{1,100}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """What AWS told of a type in one region, and when (Unix time; None: it did not)."""

    offered: bool = True
    """Whether the type can be had in the region at all."""
    on_demand_at: float | None = None
    spot_usd_per_hour: Mapping[str, float] = field(default_factory=dict)
    """Zone -> price; empty where it is not sold on spot, or not asked for."""
    spot_at: float | None = None
    beside: SideFacts | None = None
    """What an instance of it has beside itself; None: AWS was not asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceType:
    """A row of the table; None is not known."""

    instance_type: str
    gpus: int
    """0 only of types that AWS told of: a table of the user's has types with GPUs."""
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
    """Region -> what AWS told; its price on demand is then the one above. Empty in what was read from a file."""

    @property
    def gpu_model(self) -> str:
        """Model and memory of its GPUs, such as `A100 (40 GiB)`; empty if not known."""
        memory = f" ({self.gpu_memory_gib:g} GiB)" if self.gpu_memory_gib is not None else ""
        return f"{self.gpu}{memory}" if self.gpu else ""

    def live_spot_usd_per_hour(self, region: str) -> float | None:
        """The price on spot that AWS told, in the region's cheapest zone; None if it told none."""
        live = self.live.get(region)
        return min(live.spot_usd_per_hour.values(), default=None) if live is not None else None


@cache
def catalogue() -> Mapping[str, InstanceType]:
    """The table that comes with rubberband: GPU instance types of EC2, under their names."""
    text = files("rubberband.cloud").joinpath("catalogue.csv").read_text(encoding="utf-8")
    return parse_table(text.splitlines(), "catalogue.csv")


def load_table(path: str | os.PathLike[str]) -> Mapping[str, InstanceType]:
    """The table of a file. Raises InputError (one line, with file and line) if there is none or it does not fit."""
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
    """The table of CSV lines; `source` is its name in errors. Raises InputError as `load_table` does."""
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


def nearest_types(name: str, table: Mapping[str, InstanceType]) -> str:
    """What an error adds about a type that is not in the table: up to three near ones, or how to see them all."""
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
