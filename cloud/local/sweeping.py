"""Find and end what drivers that died left behind on this machine."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from rubberband.cloud.local.instance import DIRECTORY_TAG, EXPERIMENT_TAG, INSTANCE_TAG, end_tagged, lock
from rubberband.cloud.local.records import end, observe


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """An instance (or a head) that was found without a driver, and ended."""

    experiment: str
    instance: str
    directory: Path
    processes: int
    """How many of its processes were running."""


def sweep(home: Path, experiment: str | None = None) -> list[Swept]:
    """End every instance of `experiment` (None: of all) below `home` whose driver is dead, and tell which those were.

    What a living driver holds is left alone.
    """
    swept = []
    for (directory, name, owner), processes in sorted(_running(home.resolve()).items()):
        if experiment in (None, owner) and (processes := _sweep_instance(directory, name, processes)):
            swept.append(Swept(experiment=owner, instance=name, directory=directory, processes=processes))
    return swept


def _running(home: Path) -> dict[tuple[Path, str, str], int]:
    """(directory, instance, experiment) -> number of processes that carry these tags."""
    import psutil

    counts: defaultdict[tuple[Path, str, str], int] = defaultdict(int)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError, KeyError):
            environment = process.environ()
            directory = Path(environment[DIRECTORY_TAG])
            if directory.is_relative_to(home):
                counts[directory, environment[INSTANCE_TAG], environment[EXPERIMENT_TAG]] += 1
    return counts


def _sweep_instance(directory: Path, name: str, processes: int) -> int:
    if not directory.exists():
        return len(end_tagged(str(directory), name))
    with lock(directory / "driver") as dead:
        if not dead:
            return 0
        for folder in ("instances", "heads"):
            path = directory / folder / f"{name}.json"
            if path.exists():
                observe(path)
                end(path, "swept")
        end_tagged(str(directory), name)
        return processes
