"""A backup of a home, whole while its experiments, its service and its pools run.

A backup is a folder: `home/` with the files, `store.db` with the store where that is no file of the home, and last of
all `manifest.json`, which lists every file with its size and SHA-256. A folder without it was cut off.

The order matters. The store comes first, as its feed must not be ahead of the journals. For each experiment, hard links
hold the checkpoints first, then the journal is copied as it is at one instant, then links hold the checkpoints that
came in between. A driver deletes a checkpoint only after the journal names a newer one. Where one that the copy names
is not held all the same, the journal is copied again.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import sqlalchemy as sql
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

import rubberband
from rubberband.api.store import Store
from rubberband.api.store.schema import METADATA, NUMBERS, SUBMISSIONS
from rubberband.errors import InputError, JournalError
from rubberband.executor.journal.database import Database, first_line, parse_url, shown_url
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.journal.journal import TABLES as JOURNALS
from rubberband.executor.journal.journal import journalled, sqlite_url
from rubberband.executor.run.follower import read_file
from rubberband.files import EXCLUSIVE, make_directories, sync_directory, try_lock, write_atomically
from rubberband.installation import RESTORING

VERSION = 1
"""Version of the layout of a backup. A newer version of rubberband may write a greater one."""
MANIFEST, HOME, STORE = "manifest.json", "home", "store.db"
LOCK, BEFORE = "backup.lock", "before-restore-"
_HELD = "backup.held"
_NOT_COPIED = (LOCK, RESTORING, _HELD)
_CHECKPOINT = re.compile(r"trial-\d+-iterations-\d+-.*\.ckpt")
_PASSING = re.compile(r".*\.db-(wal|shm|journal)|\..*\.new|\.probe-.*")
"""Files that are a part of another one, or are not whole yet."""
_TRIES = 20
_CHUNK = 1 << 20


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Content of a whole backup."""

    version: int
    written_by: str
    """Version of rubberband."""
    created_at: float
    """Unix time."""
    home: str
    """Path of the home, which its journals name."""
    store: str | None
    """URL of the store, without a password; None: the store is a file of the home, or there is none."""
    files: Mapping[str, tuple[int, str]]
    """Path in the backup -> size in bytes and SHA-256."""

    @property
    def size_bytes(self) -> int:
        """Size of all files."""
        return sum(size for size, _ in self.files.values())

    @property
    def experiments(self) -> set[str]:
        """Names of the experiments that have a folder."""
        return {name.split("/")[2] for name in self.files if re.match(f"{HOME}/experiments/[^/]+/", name)}


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a backup. Raises InputError if it is not whole, or of a newer version."""
    try:
        data = (folder / MANIFEST).read_bytes()
    except OSError:
        if not folder.is_dir():
            raise InputError(f"there is no backup at {folder}; name the folder of one") from None
        raise InputError(
            f"{folder} is no whole backup: it has no {MANIFEST}, which is written last; take another backup"
        ) from None
    try:
        found = TypeAdapter(Manifest).validate_json(data)
    except ValidationError as error:
        unknown = ".".join(map(str, error.errors()[0]["loc"]))
        raise InputError(
            f"{folder / MANIFEST} is not of this version of rubberband ({rubberband.__version__}; see {unknown!r}); "
            "restore with the version that wrote it"
        ) from None
    if found.version > VERSION:
        raise InputError(
            f"the backup {folder} was written by version {found.written_by} of rubberband, and this one is "
            f"{rubberband.__version__}; restore with that version"
        )
    return found


def back_up(home: Path, target: Path, store: str | None, announce: Callable[[str], None]) -> Manifest:
    """Write a backup of a home, and of the store at the URL `store`, to the new or empty folder `target`.

    `announce` gets remarks, a line each. Raises InputError if it cannot be written, JournalError if the store cannot
    be read; `target` is left as it was.
    """
    home, target = home.resolve(), Path(os.path.abspath(target))
    is_new = not target.exists()
    _require_places(home, target)
    try:
        with _alone(home) as held:
            make_directories(target)
            backup = _Backup(home=home, target=target, store=store, held=held, announce=announce)
            return backup.write()
    except BaseException as error:
        if not is_new:
            _empty(target)
        else:
            shutil.rmtree(target, ignore_errors=True)
        if not isinstance(error, OSError | sqlite3.Error):
            raise
        where = Path(os.fsdecode(getattr(error, "filename", None) or target))
        remedy = "make room or give access, or choose another folder"
        if where.is_relative_to(home):
            remedy = "give access: a backup keeps its lock and links to checkpoints there"
        raise InputError(
            f"the backup could not be taken: {where}: {getattr(error, 'strerror', None) or first_line(error)}; {remedy}"
        ) from None


def store_file(url: str | None) -> Path | None:
    """Return the SQLite file of a store; None for another database, or without a URL. Raises InputError."""
    parsed = None if url is None else parse_url(url)
    if parsed is None or parsed.get_backend_name() != "sqlite":
        return None
    return Path(os.path.realpath(str(parsed.database)))


def _require_places(home: Path, target: Path) -> None:
    if not any((home / name).exists() for name in ("experiments", "pools", "server.db")):
        raise InputError(f"{home} is no home of rubberband; set RUBBERBAND_HOME to the folder to back up")
    place = target.resolve()
    if place.is_relative_to(home) or home.is_relative_to(place):
        raise InputError(f"{target} is in the home {home}, or has it; back up to a folder outside of it")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{target} exists already; choose a folder that is new or empty")


@contextmanager
def _alone(home: Path) -> Iterator[Path]:
    """Let no other backup of a home be taken. Yields a new folder in the home for links to checkpoints."""
    held = home / _HELD
    with open(os.open(home / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b") as lock:
        if not try_lock(lock, EXCLUSIVE):
            raise InputError(f"another backup of {home} is being taken; wait for it")
        shutil.rmtree(held, ignore_errors=True)  # of a backup that was killed
        held.mkdir(0o700)
        try:
            yield held
        finally:
            shutil.rmtree(held, ignore_errors=True)


def _empty(folder: Path) -> None:
    with suppress(OSError):
        for path in folder.iterdir():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


_Write = Callable[[Callable[[], None]], None]


@dataclass(kw_only=True)
class _Backup:
    """A backup that is being written."""

    home: Path
    target: Path
    store: str | None
    held: Path
    announce: Callable[[str], None]
    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    elsewhere: dict[str, dict[str, None]] = field(default_factory=dict)
    """Checkpoint store that is not in the home -> experiments."""

    done: set[str] = field(default_factory=set)
    """Experiments whose checkpoints were copied with their journals."""

    def write(self) -> Manifest:
        """Write it all. Raises InputError, JournalError, OSError or sqlite3.Error."""
        if self.store is None:
            self._require_journals()
        server = self.home / "server.db"
        if server.exists():  # before the journals: a feed that is ahead of its journal would skip events
            self._copy_database(server)
        if self.store is not None:
            self._copy_store(self.store)
        for path in sorted((self.home / "experiments").glob("*/journal.db")):
            folder = ExperimentFolder(home=self.home, name=path.parent.name)
            self._whole([folder], self._place(path), partial(self._copy_journal, folder))
        self._copy_rest()
        for place, names in self.elsewhere.items():
            self.announce(f"checkpoints of {', '.join(names)} are in {place}, which is not in this backup")
        os.sync()
        manifest = Manifest(
            version=VERSION,
            written_by=rubberband.__version__,
            created_at=time.time(),
            home=str(self.home),
            store=None if self.store is None else shown_url(self.store),
            files=self.files,
        )
        data = TypeAdapter(Manifest).dump_json(manifest, indent=1)
        write_atomically(self.target / MANIFEST, data, durable=True, mode=0o600)
        sync_directory(self.target.parent)
        return manifest

    # Journals, and the checkpoints that they name

    def _require_journals(self) -> None:
        """Note experiments whose journals are no files of the home. Raises InputError if those of all are not."""
        without = [path for path in sorted((self.home / "experiments").glob("*")) if (path / "driver.lock").exists()]
        without = [path for path in without if not (path / "journal.db").exists()]
        if not without:
            return
        journals = f"the journals of {', '.join(path.name for path in without[:3])}{' ...' * (len(without) > 3)}"
        if not any((self.home / "experiments").glob("*/journal.db")):
            raise InputError(f"{journals} are not in {self.home}; name their store: --store URL, or RUBBERBAND_STORE")
        self.announce(f"note: {journals} are not in this backup; if a store has them, name it: --store URL")

    def _copy_store(self, url: str) -> None:
        copy = self.target / STORE
        folders = [
            ExperimentFolder(home=self.home, name=path.name, store=url)
            for path in sorted((self.home / "experiments").glob("*"))
            if path.is_dir() and not (path / "journal.db").exists()
        ]
        self._whole(folders, copy, partial(dump_store, url, copy))
        if others := set(journalled(f"sqlite:///{copy}")) - {folder.name for folder in folders}:
            self.announce(f"note: the store has {len(others)} experiments of other homes, whose files are not in this")

    def _copy_journal(self, folder: ExperimentFolder, begun: Callable[[], None]) -> None:
        copy = self._place(folder.journal)
        try:
            copy_file(folder.journal, copy)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError) and folder.journal.exists():
                raise
            self._copy_damaged(folder, str(error))
        begun()

    def _whole(self, folders: Sequence[ExperimentFolder], copy: Path, write: _Write) -> None:
        """Let `write` copy the journals of experiments, until all checkpoints that they name are held; copy those too.

        `write` calls what it is given at the instant of the copy, or after it.
        """

        def hold() -> None:
            for folder in folders:
                self._hold(folder)

        lost: set[Path] = set()
        for _ in range(_TRIES):
            hold()
            copy.unlink(missing_ok=True)
            write(hold)
            needed = {folder: self._needed(folder, copy) for folder in folders}
            before, lost = lost, {path for paths in needed.values() for path in paths or () if not path.exists()}
            if lost <= before:  # named twice, and not there: lost, and not replaced meanwhile
                break
        else:
            raise InputError(f"the checkpoints of {folders[0].name!r} change too fast to be held; try again later")
        if copy.exists():
            self._note(copy)
        for folder, paths in needed.items():
            self._copy_held(folder, paths)

    def _hold(self, folder: ExperimentFolder) -> None:
        """Link the checkpoints that are there now, so that they stay."""
        held = self.held / folder.name
        held.mkdir(0o700, exist_ok=True)
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder.checkpoints) as entries:
            for entry in entries:
                if _CHECKPOINT.fullmatch(entry.name) and not (held / entry.name).exists():
                    with suppress(FileNotFoundError):
                        _link(Path(entry.path), held / entry.name)

    def _needed(self, folder: ExperimentFolder, copy: Path) -> set[Path] | None:
        """Return the held checkpoints that a copied journal names, or where they should be; None if it is not read."""
        if folder.store is not None and not journalled(f"sqlite:///{copy}", folder.name):
            return None
        try:
            found = read_file(copy, folder.name, "mode=ro&immutable=1")
        except Exception as error:  # also one that this version cannot replay
            if copy.exists():
                self.announce(f"note: {folder.name}: {first_line(error)}; it is copied as it is")
            return None
        needed, place = set(), folder.checkpoints.resolve()
        for trial in found.controller.state.trials:
            for ref in trial.files():
                if ref.url.startswith("virtual:"):
                    continue
                path = Path(unquote(urlsplit(ref.url).path))
                if path.parent.resolve() == place:  # also by a link to the home, or from it
                    needed.add(self.held / folder.name / path.name)
                else:
                    self.elsewhere.setdefault(found.header.setup["checkpoints"], {})[folder.name] = None
        return needed

    def _copy_held(self, folder: ExperimentFolder, needed: set[Path] | None) -> None:
        """Copy the held checkpoints of an experiment that it needs, or all where that is not known."""
        held = self.held / folder.name
        lost = sorted(path.name for path in needed or () if not path.exists())
        if lost:
            self.announce(f"note: {folder.name}: checkpoints were lost before this backup: {', '.join(lost)}")
        for path in sorted(held.iterdir()):
            if needed is None or path in needed:
                self._copy(path, self._place(folder.checkpoints / path.name))
        shutil.rmtree(held, ignore_errors=True)
        self.done.add(folder.name)

    def _copy_damaged(self, folder: ExperimentFolder, why: str) -> None:
        """Copy what a damaged journal is made of. By another process: one that closes a file drops SQLite's locks."""
        self.announce(f"note: the journal of {folder.name} is damaged ({why}); it is copied as it is")
        for suffix in ("-wal", ""):
            copy = Path(f"{self._place(folder.journal)}{suffix}")
            copy.unlink(missing_ok=True)
            command = ["cp", "--", f"{folder.journal}{suffix}", str(copy)]
            subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
            if suffix and copy.exists():
                self._note(copy)

    # All other files

    def _copy_rest(self) -> None:
        for directory, names, found in os.walk(self.home, followlinks=True, onerror=_require_gone):
            place = Path(directory)
            names[:] = [name for name in names if not self._is_left_out(place, name)]
            for name in found:
                path = place / name
                if self._is_left_out(place, name) or self._key(self._place_of(path)) in self.files:
                    continue
                with suppress(FileNotFoundError):
                    if not path.is_file():  # a socket, a pipe, or gone
                        continue
                    if name.endswith(".db") and _is_sqlite(path):
                        self._copy_database(path)
                    else:
                        self._copy(path, self._place(path))

    def _is_left_out(self, place: Path, name: str) -> bool:
        path = place / name
        if place == self.home and (name in _NOT_COPIED or name.startswith(BEFORE)):
            return True
        if path == store_file(self.store):  # it is in the backup already
            return True
        real = Path(os.path.realpath(path))
        if real == self.target.resolve() or (path.is_symlink() and path.is_dir() and real.is_relative_to(self.home)):
            return True
        if path.is_symlink() and place.resolve().is_relative_to(real):
            self.announce(f"note: {path} leads back to {real}, which has it; it is not copied")
            return True
        if _CHECKPOINT.fullmatch(name) and place.name == "checkpoints":
            return place.parent.name in self.done
        return bool(_PASSING.fullmatch(name))

    def _copy_database(self, path: Path) -> None:
        copy = self._place(path)
        try:
            copy_file(path, copy)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            raise InputError(f"{path} is damaged ({error}); repair it or move it away, and try again") from None
        self._note(copy)

    def _copy(self, path: Path, copy: Path) -> None:
        """Copy a file that may grow meanwhile: as much as it has now."""
        digest, size = hashlib.sha256(), 0
        with open(path, "rb") as source:
            rest = os.fstat(source.fileno()).st_size
            with open(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                while rest and (chunk := source.read(min(_CHUNK, rest))):
                    file.write(chunk)
                    digest.update(chunk)
                    size, rest = size + len(chunk), rest - len(chunk)
        self.files[self._key(copy)] = size, digest.hexdigest()

    def _note(self, copy: Path) -> None:
        with open(copy, "rb") as file:
            self.files[self._key(copy)] = (
                os.fstat(file.fileno()).st_size,
                hashlib.file_digest(file, "sha256").hexdigest(),
            )

    def _place(self, path: Path) -> Path:
        """Return where the copy of a file of the home goes; its folder is made."""
        copy = self._place_of(path)
        make_directories(copy.parent)
        return copy

    def _place_of(self, path: Path) -> Path:
        return self.target / HOME / path.relative_to(self.home)

    def _key(self, copy: Path) -> str:
        return copy.relative_to(self.target).as_posix()


def _is_sqlite(path: Path) -> bool:
    """Whether a file is a SQLite database, which trials may keep as well as other files with such a name."""
    with open(path, "rb") as file:
        return file.read(16) == b"SQLite format 3\0"


def _require_gone(error: OSError) -> None:
    """Raise the error of a folder that cannot be read: a backup that lacks it would not be whole."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _link(source: Path, link: Path) -> None:
    try:
        os.link(source, link)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without links, or another one
        shutil.copyfile(source, link)


# Copies of a store: a SQLite file with the same tables, from any database.

_AT_ONCE = 1000
"""Rows per statement."""
_OWN = NUMBERS.c.name == "server"
"""The row of the server that has the store, which is no part of a copy."""


def copy_file(source: Path, target: Path) -> None:
    """Copy a SQLite file as it is at one instant, while others write to it (SQLite's online backup).

    The copy is private and has no log beside it. Raises sqlite3.Error, OSError.
    """
    os.close(os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    place = f"file:{quote(str(source.absolute()))}?mode=rw"
    try:
        with closing(sqlite3.connect(place, uri=True, timeout=30.0)) as live, closing(sqlite3.connect(target)) as copy:
            live.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_CANTOPEN or not source.exists():
            raise
        raise PermissionError(errno.EACCES, str(error), str(source)) from None


def dump_store(url: str, target: Path, begun: Callable[[], None]) -> None:
    """Copy the store at `url`, with the journals in it, as it is at one instant; call `begun` right after that.

    Raises JournalError, sqlite3.Error or OSError.
    """
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        if not Path(str(parsed.database)).exists():
            raise JournalError(f"the store {parsed.database} does not exist; name the one that the service uses")
        copy_file(Path(str(parsed.database)), target)
        begun()
        return
    with closing(Store(url)):  # its tables are of this version then
        pass
    with closing(Database(url, what="the service's store", remedy="")) as store, _made(target) as copy:
        store.make(JOURNALS)
        try:
            with store.engine.connect().execution_options(isolation_level="REPEATABLE READ") as reader:
                reader.execute(sql.select(NUMBERS)).all()  # the instant of all that follows
                begun()
                with copy.begin() as writer:
                    _copy_rows(reader, writer)
        except sql.exc.SQLAlchemyError as error:
            raise JournalError(f"the store {store.shown} cannot be copied: {first_line(error)}") from error
        with copy.begin() as writer:
            writer.execute(sql.delete(NUMBERS).where(_OWN))


def load_store(source: Path, url: str) -> None:
    """Replace all rows of a store that is no SQLite file by those of a copy, at once. Raises JournalError."""
    with closing(Database(url, what="the service's store", remedy="the store is unchanged")) as store:
        store.make(METADATA)
        store.make(JOURNALS)
        copied = sql.create_engine(sqlite_url(source))
        try:
            with copied.connect() as reader, store.writing() as writer:
                for table in reversed(_tables()):
                    kept = sql.delete(table).where(~_OWN) if table is NUMBERS else sql.delete(table)
                    writer.execute(kept)
                _copy_rows(reader, writer)
        finally:
            copied.dispose()


@contextmanager
def _made(path: Path) -> Iterator[sql.Engine]:
    """Make a private SQLite file with the tables of a store."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    engine = sql.create_engine(sqlite_url(path))
    try:
        METADATA.create_all(engine)
        JOURNALS.create_all(engine)
        yield engine
    finally:
        engine.dispose()


def _tables() -> list[sql.Table]:
    return [*METADATA.sorted_tables, *JOURNALS.sorted_tables]


def _copy_rows(reader: sql.Connection, writer: sql.Connection) -> None:
    for table in _tables():
        rows = reader.execution_options(yield_per=_AT_ONCE).execute(sql.select(table)).mappings()
        for some in rows.partitions(_AT_ONCE):
            writer.execute(sql.insert(table), [dict(row) for row in some])


def store_experiments(url: str) -> set[str]:
    """Return the names of all experiments of a store, of every home that uses it. Raises JournalError."""
    with closing(Database(url, what="the service's store", remedy="")) as store, store.reading() as connection:
        return {*connection.scalars(sql.select(SUBMISSIONS.c.name)), *journalled(url)}


def revoked_tokens(store: Store) -> Mapping[str, bool]:
    """Return token id -> whether it is revoked."""
    return {record.id: record.revoked_at is not None for record in store.tokens()}


def limit_access(store: Store, known: Mapping[str, bool], *, keep: bool, at: float) -> int:
    """End the sessions of a restored store, and revoke the tokens that may have been revoked since its backup.

    Those are the tokens that `known` (`revoked_tokens` of the present store) has as revoked or, without `keep`, does
    not have. Returns how many this revoked.
    """
    store.end_sessions()
    ended = [record.id for record in store.tokens() if record.revoked_at is None and known.get(record.id, not keep)]
    for id in ended:
        store.revoke_token(id, at=at)
    return len(ended)
