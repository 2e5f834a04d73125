"""Start times of instances on this machine, as runs measured them: kept in the home, for plans.

They depend on the number of instances that start at once, and on the imports of their workers. Each start adds a line
to `starts.jsonl`; a line that is damaged, or of another version of rubberband, is ignored.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import rubberband
from rubberband.files import make_directories, private
from rubberband.units import format_duration
from rubberband.values.profile import FIXED, Spread

FILE = "starts.jsonl"
MOST_BYTES = 128 * 1024
"""Limit of the file; then the older half is deleted."""
LATEST = 5
"""Number of latest starts that are used: a machine changes."""
_LONGEST_S = 3600.0
_FIXED_CV = 0.05
"""Times that vary by less are planned as fixed ones."""
_AT_ONCE_S = 1.0
ASSUMED_JOIN_S = 120.0
"""Time until a node joins a Ray cluster, where none was seen to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRecord:
    """A start of several instances at once."""

    entrypoint: str
    """The experiment's, which its workers import."""
    instances: int
    provision_s: float
    """From the request until an instance ran; the mean."""
    init_s: float
    """From then until the last one's workers were warm; the others are paid for meanwhile, without training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTimes:
    """Measured start times of an experiment's instances on this machine."""

    starts: int
    """Number of starts that were measured."""
    instances: int
    """Number of instances that started at once."""
    provision_s: float
    provision_spread: Spread
    """Spread of the start as a whole: instances share the machine and its delays."""
    init_s: float


def start_of(entrypoint: str, instants: Sequence[tuple[float, float, float]]) -> StartRecord:
    """Return the record of instances that were requested, ran and were ready at these instants (Unix time)."""
    provision_s = fmean(running_at - asked_at for asked_at, running_at, _ in instants)
    ready_s = max(ready_at - asked_at for asked_at, _, ready_at in instants)
    return StartRecord(
        entrypoint=entrypoint, instances=len(instants), provision_s=provision_s, init_s=max(0.0, ready_s - provision_s)
    )


def starts_of(entrypoint: str, instants: Sequence[tuple[float, float, float]]) -> list[StartRecord]:
    """Return the records of instances that were not all requested at once."""
    first_at = 0.0

    def asked_at(each: tuple[float, float, float]) -> float:
        nonlocal first_at
        first_at = first_at if each[0] - first_at < _AT_ONCE_S else each[0]
        return first_at

    return [start_of(entrypoint, list(group)) for _, group in groupby(sorted(instants), asked_at)]


def record_join(home: Path, cluster: str, waited_s: float) -> None:
    """Record that a node joined a Ray cluster (by its address) for an instance that waited for it."""
    joined = StartRecord(entrypoint=f"ray {cluster}", instances=1, provision_s=waited_s, init_s=0.0)
    with suppress(OSError):  # a full disk
        record(home, [joined], time.time())


def join_times(home: Path, cluster: str) -> StartTimes:
    """Return the latest times until nodes joined a Ray cluster; an assumed one if none did."""
    assumed = StartTimes(starts=0, instances=1, provision_s=ASSUMED_JOIN_S, provision_spread=FIXED, init_s=0.0)
    return start_times(home, f"ray {cluster}", 1) or assumed


def record(home: Path, starts: Sequence[StartRecord], at: float) -> None:
    """Record starts that were seen at Unix time `at`. Others may write at the same time. Raises OSError."""
    if not starts:
        return
    lines = b"".join(
        json.dumps({"version": rubberband.__version__, "at": round(at), **asdict(start)}).encode() + b"\n"
        for start in starts
    )[-MOST_BYTES // 2 :]
    make_directories(home)
    import fcntl  # here, so that an estimate needs none

    with open(home / FILE, "a+b", opener=private) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        size = file.seek(0, os.SEEK_END)
        if size + len(lines) > MOST_BYTES:
            file.seek(max(size // 2, size + len(lines) - MOST_BYTES))
            newer = file.read().partition(b"\n")[2]
            file.truncate(0)
            file.write(newer + lines)
        elif size:
            file.seek(size - 1)
            is_whole = file.read(1) == b"\n"
            file.write(lines if is_whole else b"\n" + lines)  # what was cut off stays a line of its own
        else:
            file.write(lines)


def start_times(home: Path, entrypoint: str, instances: int) -> StartTimes | None:
    """Return the latest start times of `entrypoint` with about this number of instances at once; None without any."""
    found = [start for start in _read(home / FILE) if start.entrypoint == entrypoint]
    if not found:
        return None
    nearest = min({start.instances for start in found}, key=lambda number: (abs(number - instances), number))
    latest = [start for start in found if start.instances == nearest][-LATEST:]
    provision_s, ready_s = fmean(start.provision_s for start in latest), [s.provision_s + s.init_s for s in latest]
    mean_s = fmean(ready_s)
    spread_s = math.sqrt(math.fsum((each_s - mean_s) ** 2 for each_s in ready_s) / max(1, len(ready_s) - 1))
    varies = provision_s > 0.0 and spread_s > _FIXED_CV * mean_s
    return StartTimes(
        starts=len(latest),
        instances=nearest,
        provision_s=provision_s,
        provision_spread=Spread(cv=spread_s / provision_s) if varies else FIXED,
        init_s=fmean(start.init_s for start in latest),
    )


def remark(key: str, written_s: float, seen_s: float, times: StartTimes) -> str:
    """Return the warning about a delay that the file gives as `written_s` under `key`, where `seen_s` were measured."""
    starts = "start" if times.starts == 1 else f"{times.starts} starts"
    at_once = "one instance" if times.instances == 1 else f"{times.instances} instances at once"
    word, seen = key.rpartition(".")[2], format_duration(seen_s)
    return (
        f"{key}: the file says {format_duration(written_s)}, and the last {starts} of {at_once} on this machine took "
        f"{seen}, which is assumed; write {word}: {seen}, or leave it out."
    )


def _read(path: Path) -> Sequence[StartRecord]:
    try:
        seen = path.stat()
        return _parsed(path, seen.st_mtime_ns, seen.st_size)
    except OSError:
        return ()


@lru_cache(maxsize=4)
def _parsed(path: Path, mtime_ns: int, size: int) -> Sequence[StartRecord]:
    """Return the records of the file; it is read again after a change."""
    with open(path, "rb") as file:
        lines = file.read(2 * MOST_BYTES).split(b"\n")
    found = []
    for line in lines:
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            plain: Mapping[str, Any] = json.loads(line)
            if plain["version"] == rubberband.__version__:
                found.append(_start(plain))
    return tuple(found)


def _start(plain: Mapping[str, Any]) -> StartRecord:
    """Return the record in a line. Raises ValueError, KeyError or TypeError if it has none."""
    provision_s, init_s, instances = float(plain["provision_s"]), float(plain["init_s"]), plain["instances"]
    if not (0.0 <= provision_s < _LONGEST_S and 0.0 <= init_s < _LONGEST_S):  # nan is not, either
        raise ValueError("no delays")
    if type(instances) is not int or instances < 1:
        raise ValueError("no number of instances")
    return StartRecord(entrypoint=str(plain["entrypoint"]), instances=instances, provision_s=provision_s, init_s=init_s)
