"""Deletes an experiment that has ended: refused while it may hold machines. Its bill counts on."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rubberband.errors import InputError
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.journal.journal import erase
from rubberband.executor.run.allowance import keep_spent, spent_this_month_usd
from rubberband.executor.run.follower import JournalFollower, at_work, outcome_of
from rubberband.units import counted, format_bytes

_PATIENCE_S = 5.0
"""Longest wait for a process whose run is over."""
_REMOVED = ".removed-"
"""Beginning of a folder's name in the home that is being deleted. One that a crash left goes with the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """Files that go with an experiment, and checkpoints that stay."""

    name: str
    checkpoints: int
    """Files of checkpoints in its folder."""
    size_bytes: int
    """Size of all files of its folder."""
    elsewhere: str
    """Place of checkpoints that stay; empty if there are none elsewhere."""
    created_at: float
    spent_usd: float
    """Money of this month, which counts on."""

    @property
    def text(self) -> str:
        """Return what goes and what stays, in a line."""
        kept = f"; its checkpoints in {self.elsewhere} stay" if self.elsewhere else ""
        what = f"its journal, logs, report and {counted(self.checkpoints, 'checkpoint file')}"
        return f"{self.name}: deletes {what} ({format_bytes(self.size_bytes)}){kept}"


def removal(folder: ExperimentFolder, follower: JournalFollower | None) -> Removal:
    """Return the effect of deleting an experiment, which `remove` does; without `follower`, it has no journal.

    Raises InputError if it must stay for now.
    """
    busy, elsewhere, created_at, spent_usd = at_work(folder), "", 0.0, 0.0
    if follower is not None:
        follower.refresh(live=busy)
        elsewhere = follower.header.setup["experiment"].get("resources", {}).get("checkpoints") or ""
        created_at, spent_usd = follower.header.created_at, spent_this_month_usd(follower)
        busy = busy and (outcome_of(follower.controller)[0] is None or not _has_ended(folder))
    if why := _obstacle(folder, follower, busy=busy):
        raise InputError(f"experiment {folder.name!r} cannot be deleted: {why}")
    files = [path for path in folder.path.rglob("*") if path.is_file() and not path.is_symlink()]
    return Removal(
        name=folder.name,
        checkpoints=sum(path.suffix == ".ckpt" for path in files),
        size_bytes=sum(path.stat().st_size for path in files),
        elsewhere=elsewhere,
        created_at=created_at,
        spent_usd=spent_usd,
    )


def _has_ended(folder: ExperimentFolder) -> bool:
    """Wait for a process that is just ending, and return whether it has."""
    until = time.monotonic() + _PATIENCE_S
    while at_work(folder):
        if time.monotonic() >= until:
            return False
        time.sleep(0.05)
    return True


def remove(folder: ExperimentFolder, going: Removal) -> None:
    """Delete an experiment as `removal` said; its name is free at once. Its bill of this month counts on.

    Raises InputError or JournalError.
    """
    if not folder.path.exists():
        return
    try:
        with folder.driving():
            if going.spent_usd:
                keep_spent(folder, going.created_at, going.spent_usd)
            _take_away(folder, folder.home / f"{_REMOVED}{os.urandom(4).hex()}")
        for leftover in folder.home.glob(f"{_REMOVED}*"):
            while leftover.exists():
                with suppress(FileNotFoundError):  # another one deletes it, too
                    shutil.rmtree(leftover)
    except OSError as error:
        raise InputError(f"{folder.path} cannot be deleted ({error.strerror or error}); give access") from error


def _take_away(folder: ExperimentFolder, trash: Path) -> None:
    """Move the folder away, and delete a journal in a store. After a crash between the two, it is deleted again."""
    if folder.store is not None:
        trash.mkdir(0o700)
        for path in [*folder.path.iterdir()]:
            if path != folder.driver_lock:  # which says that it is an experiment of this home
                path.rename(trash / path.name)
        erase(folder.store, folder.name)
        trash /= folder.name
    folder.path.rename(trash)


def _obstacle(folder: ExperimentFolder, follower: JournalFollower | None, *, busy: bool) -> str:
    """Return the reason why an experiment must stay, with the remedy; empty if it may go."""
    name = folder.name
    if busy:
        return f"it is running; end it with `rubberband cancel {name}` first"
    if follower is None:
        return ""
    if folder.store is not None and not folder.is_here:
        return "it was started in another home; delete it there, or set RUBBERBAND_HOME to that folder"
    state = follower.controller.state
    if outcome_of(follower.controller)[0] is None or state.fleet.live() or state.fleet.leaving():
        return f"it may still hold instances; run `rubberband resume {name}`, and cancel or await it, first"
    return ""
