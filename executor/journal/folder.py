"""The folder of an experiment: `HOME/experiments/NAME`, with its journal, labels, checkpoints, logs and instances.

The journal may be in a store instead, a database with those of many experiments.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import sqlalchemy as sql

from rubberband.errors import InputError, NameTakenError
from rubberband.executor.journal.database import shown_url
from rubberband.executor.journal.journal import journalled, sqlite_url
from rubberband.files import EXCLUSIVE, SHARED, locked, make_directories, private, require_home, write_atomically
from rubberband.installation import default_home, default_store
from rubberband.units import did_you_mean
from rubberband.values.submission import LabelChange, Labels


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentFolder:
    """Paths of one experiment below `home`. Constructing it touches nothing."""

    home: Path
    name: str
    store: str | None = field(default=None, repr=False)
    """SQLAlchemy URL of the database that holds its journal; None: a SQLite file in the folder."""

    @property
    def path(self) -> Path:
        return self.home / "experiments" / self.name

    @property
    def journal(self) -> Path:
        """The SQLite file of the journal, unless it is in a store."""
        return self.path / "journal.db"

    @property
    def journal_url(self) -> str | sql.URL:
        return sqlite_url(self.journal) if self.store is None else self.store

    @property
    def _place(self) -> str:
        """Place of the journal, for messages."""
        return str(self.path) if self.store is None else shown_url(self.store)

    @property
    def checkpoints(self) -> Path:
        """The default checkpoint store."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Folder of the trials' output: `trial-NNN.log`."""
        return self.path / "logs"

    @property
    def instances(self) -> Path:
        """Folder of the provider's records of the instances and the head."""
        return self.path / "local"

    @property
    def inbox(self) -> Path:
        """Folder of requests to the running driver: `ID.json` (rubberband.executor.journal.inbox)."""
        return self.path / "inbox"

    @property
    def order(self) -> Path:
        """The service's order to a process, as JSON: the experiment's words, its code, and so on."""
        return self.path / "order.json"

    @property
    def process_lock(self) -> Path:
        """Locked (flock) while a process that the service started runs, planning included."""
        return self.path / "process.lock"

    @property
    def process_log(self) -> Path:
        """Output of that process."""
        return self.path / "process.log"

    @property
    def ending(self) -> Path:
        """End of that process, as JSON: exit code, and the error in one line."""
        return self.path / "ending.json"

    @property
    def exists(self) -> bool:
        """Whether the experiment was created. Raises JournalError if the store does not answer."""
        return self.journal.exists() if self.store is None else bool(journalled(self.store, self.name))

    @property
    def is_here(self) -> bool:
        """Whether a driver ever ran it in this home, so that its instances are recorded here."""
        return self.driver_lock.exists()

    def require_free(self, way_out: str = "") -> None:
        """Raise NameTakenError, naming the ways out, if the experiment exists, or another one has its folder.

        `way_out` names the caller's way to another name, by default that of `rubberband run`.
        """
        if self.store is not None and self.journal.exists():
            raise NameTakenError(
                f"the name {self.name!r} is taken by an experiment whose journal is a file of the home, not in the "
                "store; " + (way_out or f"run this one under another name: -s name={self.name}-2")
            )
        if self.exists:
            raise NameTakenError(
                f"the name {self.name!r} is taken by another experiment; continue it with `rubberband resume "
                f"{self.name}`, or "
                + (way_out or f"run this one under another name: --new (the next free one), or -s name={self.name}-2")
            )

    def next_free(self) -> ExperimentFolder:
        """Return the folder of the first free name: its own, else with -2, -3 and so on; names stay within 63 letters.

        Raises JournalError if the store does not answer.
        """

        def is_taken(name: str) -> bool:
            other = replace(self, name=name)
            if name == self.name:
                return other.exists or (self.store is not None and other.journal.exists())
            return other.path.exists() or other.exists

        return replace(self, name=free_name(self.name, is_taken))

    def make(self) -> None:
        """Make the folder. Raises NameTakenError if the experiment exists, InputError if it cannot be made."""
        self.require_free()
        require_home(self.home)
        try:
            make_directories(self.logs)
            make_directories(self.checkpoints)
        except OSError as error:
            raise InputError(_unwritable(self.path, error)) from None

    def require(self) -> None:
        """Raise InputError, naming the known experiments, unless this one exists."""
        if not self.exists:
            known = [folder.name for folder in folders(self.home, self.store)]
            place = self.home if self.store is None else self._place
            hint = did_you_mean(self.name, known) or f"; known: {', '.join(known) or 'none'}"
            raise InputError(f"experiment {self.name!r} not found in {place}{hint}")

    @property
    def driven(self) -> bool:
        """Whether a driver runs it now. The check writes nothing and keeps no driver out."""
        if not self.driver_lock.exists():
            return False
        with open(self.driver_lock) as file:
            return not locked(file, SHARED)

    @contextmanager
    def driving(self) -> Iterator[None]:
        """Hold the driver's lock. Raises InputError if another driver does, or the folder cannot be written.

        Likewise, whether a user or a service asks, for an experiment of another home, and JournalError.
        """
        if self.store is not None and not self.is_here and self.exists:
            raise InputError(
                f"experiment {self.name!r} was started in another home: no driver of it ran in {self.path}; resume it "
                "there, or set RUBBERBAND_HOME to that folder"
            )
        try:
            self.driver_lock.touch(0o600)
        except OSError as error:
            raise InputError(_unwritable(self.path, error)) from None
        with open(self.driver_lock, "a", opener=private) as file:
            if not locked(file, EXCLUSIVE, wait_s=_LAST_S):
                raise InputError(f"another driver is running experiment {self.name!r}; wait for it, or stop it")
            yield

    @property
    def driver_lock(self) -> Path:
        """Locked (flock) while a driver runs. It stays, and says that one ran in this home."""
        return self.path / "driver.lock"

    @property
    def listed(self) -> Path:
        """Its line in a list, as JSON, with the stamp of the journal that it was read from."""
        return self.path / "listed.json"

    @property
    def labels(self) -> Path:
        """Its tags, note and archive, as JSON: the journal stays pure."""
        return self.path / "labels.json"


_LONGEST_NAME = 63


def free_name(name: str, is_taken: Callable[[str], bool]) -> str:
    """Return a name if it is free, else the first free one with -2, -3 and so on."""
    ends = (f"-{number}" for number in itertools.count(2))
    names = itertools.chain([name], (f"{name[: _LONGEST_NAME - len(end)]}{end}" for end in ends))
    return next(one for one in names if not is_taken(one))


_LAST_S = 0.5
"""The wait for a driver that is just ending."""


def _unwritable(path: Path, error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{path} cannot be written ({reason}); make room or give access, or set RUBBERBAND_HOME to another folder"


Stamp = tuple[tuple[int, int], ...] | None
"""Times of the last write and sizes of the files of a journal, and those of requests that wait; None for a journal in
a store.
"""


def stamp_of(folder: ExperimentFolder) -> Stamp:
    """Return the stamp of an experiment's journal and inbox."""
    if folder.store is not None:
        return None
    found = []
    for path in (folder.journal, folder.journal.with_name("journal.db-wal")):
        try:
            stat = os.stat(path)
        except OSError:
            continue
        if stat.st_size:
            found.append((stat.st_mtime_ns, stat.st_size))
    with suppress(OSError), os.scandir(folder.inbox) as waiting:
        found += sorted((stat.st_mtime_ns, stat.st_size) for stat in [request.stat() for request in waiting])
    return tuple(found)


def open_folder(name: str, home: Path | None = None) -> ExperimentFolder:
    """Return the folder by RUBBERBAND_HOME and RUBBERBAND_STORE. Raises InputError without a home folder."""
    return ExperimentFolder(home=home or default_home(), name=name, store=default_store())


def folders(home: Path, store: str | None = None) -> list[ExperimentFolder]:
    """Return the experiments in the store, or without one those below `home`, by name. Raises JournalError."""
    found = (journal.parent.name for journal in (home / "experiments").glob("*/journal.db"))
    names = sorted(found) if store is None else journalled(store)
    return [ExperimentFolder(home=home, name=name, store=store) for name in names]


_LABELLING_S = 10.0
"""Patience with another process that changes the labels."""


def read_labels(folder: ExperimentFolder) -> Labels:
    """Return the labels of an experiment; none without a file. Raises InputError for a broken one."""
    try:
        words = json.loads(folder.labels.read_bytes())
        tags, note, archived = words["tags"], words["note"], words["archived"]
        return LabelChange(add_tags=tuple(tags), note=note, archived=bool(archived)).applied(Labels())
    except FileNotFoundError:
        return Labels()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, InputError):
        raise InputError(f"{folder.labels} cannot be read; delete it, and label the experiment again") from None


def write_labels(folder: ExperimentFolder, labels: Labels) -> None:
    """Keep the labels of an experiment. Raises InputError."""
    try:
        make_directories(folder.path)
        write_atomically(folder.labels, json.dumps(asdict(labels)).encode(), durable=False)
    except OSError as error:
        raise InputError(f"{folder.labels} cannot be written ({error.strerror}); make room or give access") from None


def change_labels(folder: ExperimentFolder, change: LabelChange) -> Labels:
    """Change the labels of an experiment, one process at a time, and return them. Raises InputError."""
    with open(folder.path / "labels.lock", "a", opener=private) as lock:
        if not locked(lock, EXCLUSIVE, wait_s=_LABELLING_S):
            raise InputError(f"the labels of {folder.name!r} are being changed by another process; try again")
        labels = change.applied(read_labels(folder))
        write_labels(folder, labels)
    return labels
