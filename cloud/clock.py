"""One clock for an experiment: Unix time when its driver began, plus the time that has passed since.

A step of this machine's clock (NTP, or by hand) does not move it. Suspending this machine does, as rented instances
keep running. Drivers, instances on this machine and viewers read the same clock from a file, which the first driver
since boot wrote.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rubberband.files import write_atomically

FILE = "clock"
"""File name, in the folder of an experiment's instances."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PASSING = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Counts suspended time too, and does not move when the clock is set."""


def elapsed_s() -> float:
    """Return the seconds since this machine booted, suspended time included."""
    return time.clock_gettime(_PASSING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Clock and sleep of a wait, which tests replace."""

    clock: Callable[[], float] = elapsed_s
    sleep: Callable[[float], None] = time.sleep

    def polls(self, within_s: float, *, every_s: float) -> Iterator[None]:
        """Yield once per poll until `within_s` have passed, and sleep `every_s` after each."""
        before = self.clock() + within_s
        while self.clock() < before:
            yield
            self.sleep(every_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentClock:
    """Clock that returns Unix time in seconds when called."""

    boot: str
    """Boot id for which it holds; empty where the system has none."""
    booted_at: float
    """Unix time of the boot, as seen when the clock was made."""

    def __call__(self) -> float:
        """Return Unix time."""
        return self.booted_at + elapsed_s()


def experiment_clock(directory: Path, *, not_before: float = 0.0) -> ExperimentClock:
    """Return the clock kept in `directory`, or a new one that starts at `not_before` or later if none is of this boot.

    For the driver that holds the directory. Raises OSError if it cannot be written.
    """
    boot = _boot()
    kept = _read(directory)
    if kept is not None and boot and kept.boot == boot:
        return kept
    clock = ExperimentClock(boot=boot, booted_at=max(time.time(), not_before) - elapsed_s())
    write_atomically(directory / FILE, json.dumps(asdict(clock)).encode(), durable=False, mode=0o600)
    return clock


def time_of(directory: Path) -> float:
    """Return the time by the clock kept in `directory`, or by the machine's if none is of this boot."""
    kept = _read(directory)
    return kept() if kept is not None and kept.boot and kept.boot == _boot() else time.time()


def _read(directory: Path) -> ExperimentClock | None:
    try:
        return ExperimentClock(**json.loads((directory / FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _boot() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
