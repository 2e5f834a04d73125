"""Deletes an experiment that has ended: refused while it may hold machines, or while its bill counts this month."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rubberband.errors import InputError
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.run.allowance import is_rented
from rubberband.executor.run.follower import JournalFollower, at_work, outcome_of
from rubberband.units import counted, format_bytes, format_usd, month_begin, month_end

_REMOVED = ".removed-"
"""Beginning of a folder's name in the home that is being deleted. One that a crash left goes with the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """Files that go with an experiment, and checkpoints that stay."""

    name: str
    place: Path
    checkpoints: int
    """Files of checkpoints below `place`."""
    size_bytes: int
    elsewhere: str
    """Place of checkpoints that stay; empty if there are none elsewhere."""

    @property
    def text(self) -> str:
        """Return what goes and what stays, in a line."""
        kept = f"; its checkpoints in {self.elsewhere} stay" if self.elsewhere else ""
        what = f"its journal, logs and {counted(self.checkpoints, 'checkpoint file')}"
        return f"{self.name}: deletes {what} ({format_bytes(self.size_bytes)}) in {self.place}{kept}"


def removal(folder: ExperimentFolder, follower: JournalFollower) -> Removal:
    """Return the effect of deleting an experiment, which `remove` does. Raises InputError if it must stay for now."""
    busy = at_work(folder)
    follower.refresh(live=busy)
    if why := _obstacle(folder, follower, busy=busy):
        raise InputError(f"experiment {folder.name!r} cannot be deleted: {why}")
    files = [path for path in folder.path.rglob("*") if path.is_file() and not path.is_symlink()]
    stored = follower.header.setup["experiment"].get("resources", {}).get("checkpoints") or ""
    return Removal(
        name=folder.name,
        place=folder.path,
        checkpoints=sum(path.suffix == ".ckpt" for path in files),
        size_bytes=sum(path.stat().st_size for path in files),
        elsewhere=stored,
    )


def remove(folder: ExperimentFolder) -> None:
    """Delete the folder of an experiment that `removal` allows. Its name is free at once. Raises InputError."""
    going = folder.home / f"{_REMOVED}{os.urandom(4).hex()}"
    try:
        with folder.driving():
            folder.path.rename(going)
        for left in folder.home.glob(f"{_REMOVED}*"):
            shutil.rmtree(left)
    except OSError as error:
        raise InputError(f"{folder.path} cannot be deleted ({error.strerror or error}); give access") from error


def _obstacle(folder: ExperimentFolder, follower: JournalFollower, *, busy: bool) -> str:
    """Return the reason why an experiment must stay, with the remedy; empty if it may go."""
    name = folder.name
    if folder.store is not None:
        return "its journal is in a store, from which nothing is deleted; only those in a file of the home are"
    if busy:
        return f"it is running; end it with `rubberband cancel {name}` first"
    state = follower.controller.state
    if outcome_of(follower.controller)[0] is None or state.fleet.live() or state.fleet.leaving():
        return f"it may still hold instances; run `rubberband resume {name}`, and cancel or await it, first"
    now, summary = time.time(), follower.summary()
    spent_usd = summary.month_cost_usd if (summary.month_at or 0.0) >= month_begin(now) else 0.0
    if is_rented(follower.header.setup["experiment"]) and spent_usd:
        free = datetime.fromtimestamp(month_end(now), UTC)
        return f"its {format_usd(spent_usd)} count in this month's budget; delete it from {free:%Y-%m-%d} on"
    return ""
