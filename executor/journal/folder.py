"""Where an experiment lives: `HOME/experiments/NAME`, with its journal, checkpoints, logs and instances.

The journal may be in a store instead, a database that holds those of many experiments.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import sqlalchemy as sql

from rubberband.errors import InputError, NameTakenError
from rubberband.executor.journal.database import shown_url
from rubberband.executor.journal.journal import journalled, sqlite_url
from rubberband.home import default_home, default_store

# Locks on files (flock), which end with whoever holds them, however that ends.


SHARED, EXCLUSIVE = fcntl.LOCK_SH, fcntl.LOCK_EX
_GLANCE_S = 20.0
"""Who only looks is waited for as long: it holds a shared lock for an instant, but may be stopped right then."""


def locked(file: IO[str] | int, kind: int, wait_s: float = 0.0) -> bool:
    """Lock `file` (or the file of a descriptor) until it is closed.

    False if somebody has it to himself and does not let it go within `wait_s`, or if it is shared for very long.
    """
    begun_at = time.monotonic()
    while not _is_had(file, kind):
        is_shared = _is_had(file, SHARED)
        if is_shared:
            fcntl.flock(file, fcntl.LOCK_UN)
        if time.monotonic() - begun_at >= (_GLANCE_S if is_shared else wait_s):
            return False
        time.sleep(0.01)
    return True


def _is_had(file: IO[str] | int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentFolder:
    """The paths of one experiment below `home`. Making one touches nothing."""

    home: Path
    name: str
    store: str | None = field(default=None, repr=False)
    """SQLAlchemy URL of the database that holds its journal; None: a SQLite file in the folder."""

    @property
    def path(self) -> Path:
        """The experiment's own folder."""
        return self.home / "experiments" / self.name

    @property
    def journal(self) -> Path:
        """The SQLite file of the journal, where it is not in a store."""
        return self.path / "journal.db"

    @property
    def journal_url(self) -> str | sql.URL:
        """Where the journal is."""
        return sqlite_url(self.journal) if self.store is None else self.store

    @property
    def _place(self) -> str:
        """Where the journal is, as people may see it."""
        return str(self.path) if self.store is None else shown_url(self.store)

    @property
    def checkpoints(self) -> Path:
        """The default checkpoint store."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """What trials print: `trial-NNN.log`."""
        return self.path / "logs"

    @property
    def instances(self) -> Path:
        """What the provider writes down of the instances and the head."""
        return self.path / "local"

    @property
    def inbox(self) -> Path:
        """What the user asks of the driver while it runs: `ID.json` (rubberband.executor.journal.inbox)."""
        return self.path / "inbox"

    @property
    def order(self) -> Path:
        """What the service asked a process to run: the experiment's words, where its code is, and so on, as JSON."""
        return self.path / "order.json"

    @property
    def process_lock(self) -> Path:
        """Locked (flock) for as long as a process that the service started is at work, planning included."""
        return self.path / "process.lock"

    @property
    def process_log(self) -> Path:
        """What that process printed."""
        return self.path / "process.log"

    @property
    def ending(self) -> Path:
        """How that process ended, as JSON: exit code, and the error in one line."""
        return self.path / "ending.json"

    @property
    def exists(self) -> bool:
        """Whether the experiment was created. Raises JournalError if the store does not tell."""
        return self.journal.exists() if self.store is None else bool(journalled(self.store, self.name))

    @property
    def is_here(self) -> bool:
        """Whether a driver was ever at work on it in this home: its instances are written down here then."""
        return self._lock.exists()

    def require_free(self) -> None:
        """Raise NameTakenError, naming the ways out, if the experiment is here.

        A folder whose journal is a file is not free for an experiment whose journal is in a store.
        """
        if self.store is not None and self.journal.exists():
            raise NameTakenError(
                f"{self.path} is the folder of an experiment whose journal is a file there, not in {self._place}; run "
                f"this one under another name: -s name={self.name}-2"
            )
        if self.exists:
            raise NameTakenError(
                f"the name {self.name!r} is taken by another experiment ({self._place}); continue it with `rubberband "
                f"resume {self.name}`, or run this one under another name: -s name={self.name}-2"
            )

    def make(self) -> None:
        """Make the folder. Raises NameTakenError if the experiment is here, InputError if it cannot be made."""
        self.require_free()
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(_unwritable(self.path, error)) from None

    def require(self) -> None:
        """Raise InputError, naming the experiments that exist, unless this one does."""
        if not self.exists:
            known = ", ".join(folder.name for folder in folders(self.home, self.store)) or "none"
            place = self.home if self.store is None else self._place
            raise InputError(f"experiment {self.name!r} not found in {place}; known: {known}")

    @property
    def driven(self) -> bool:
        """Whether a living driver is at work on it. Looking is harmless: it writes nothing and keeps no driver out."""
        if not self._lock.exists():
            return False
        with open(self._lock) as file:
            return not locked(file, SHARED)

    @contextmanager
    def driving(self) -> Iterator[None]:
        """Be its one driver. Raises InputError if there is another, or the folder cannot be written."""
        try:
            self._lock.touch()
        except OSError as error:
            if self.store is not None and not self.path.exists():
                raise InputError(
                    f"experiment {self.name!r} was started in another home: {self.path} is missing here; resume it "
                    "there, or set RUBBERBAND_HOME to that folder"
                ) from None
            raise InputError(_unwritable(self.path, error)) from None
        with open(self._lock, "a") as file:
            if not locked(file, EXCLUSIVE, wait_s=_LAST_S):
                raise InputError(f"another driver is running experiment {self.name!r}; wait for it, or stop it")
            yield

    @property
    def _lock(self) -> Path:
        return self.path / "driver.lock"


_LAST_S = 0.5
"""Who ends just now is waited for."""


def _unwritable(path: Path, error: OSError) -> str:
    told = error.strerror or str(error)
    return f"{path} cannot be written ({told}); make room or give access, or set RUBBERBAND_HOME to another folder"


def open_folder(name: str, home: Path | None = None) -> ExperimentFolder:
    """The experiment of that name where the environment keeps experiments: RUBBERBAND_HOME and RUBBERBAND_STORE.

    Making one touches nothing. Raises InputError where there is no home folder.
    """
    return ExperimentFolder(home=home or default_home(), name=name, store=default_store())


def folders(home: Path, store: str | None = None) -> list[ExperimentFolder]:
    """The experiments whose journals are in the store, or without one below `home`, by name. Raises JournalError."""
    found = (journal.parent.name for journal in (home / "experiments").glob("*/journal.db"))
    names = sorted(found) if store is None else journalled(store)
    return [ExperimentFolder(home=home, name=name, store=store) for name in names]
