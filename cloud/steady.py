"""One clock for an experiment: Unix time when its driver began, and from there on the time that has passed.

A step of this machine's clock (NTP, or by hand) does not move it. This machine's sleep does: what is rented goes on
meanwhile. Drivers, instances on this machine, and who looks on read the same clock, by the file in which the first
driver since the machine booted wrote it down.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rubberband.atomic import write_atomically

FILE = "clock"
"""Name of the file, in the folder of an experiment's instances."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PASSING = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Goes on while the machine sleeps, and does not move when its clock is set."""


def elapsed_s() -> float:
    """Seconds since this machine booted, its sleep included."""
    return time.clock_gettime(_PASSING)


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyClock:
    """Gives Unix time in seconds when called."""

    boot: str
    """Which boot of which machine it holds for; empty where the system does not tell."""
    booted_at: float
    """Unix time of that, as it looked when the clock was made."""

    def __call__(self) -> float:
        """Unix time, as far as is known."""
        return self.booted_at + elapsed_s()


def steady_clock(directory: Path, *, not_before: float = 0.0) -> SteadyClock:
    """The clock kept in `directory`; where none is of this boot, a new one, which goes on from `not_before` at least.

    For the driver that holds the directory. Raises OSError if it cannot be written.
    """
    boot = _boot()
    found = _read(directory)
    if found is not None and boot and found.boot == boot:
        return found
    clock = SteadyClock(boot=boot, booted_at=max(time.time(), not_before) - elapsed_s())
    write_atomically(directory / FILE, json.dumps(asdict(clock)).encode(), durable=False, mode=0o600)
    return clock


def time_of(directory: Path) -> float:
    """Now, by the clock kept in `directory`; by the machine's where none is of this boot."""
    found = _read(directory)
    return found() if found is not None and found.boot and found.boot == _boot() else time.time()


def _read(directory: Path) -> SteadyClock | None:
    try:
        return SteadyClock(**json.loads((directory / FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _boot() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
