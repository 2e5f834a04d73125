"""Restoring a home from a backup: as a whole, in the place of the home that was backed up, and nothing else left in it.

The present home is moved aside, with SQLite's logs, which would be applied to the files of the backup. Runs that were
driven are resumed by hand or by the service: their locks are none, and the resume asks the provider for instances.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rubberband.api.store import Store, open_store
from rubberband.errors import InputError, JournalError
from rubberband.executor.journal.database import first_line
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.journal.inbox import is_hosted
from rubberband.executor.journal.journal import sqlite_url
from rubberband.files import EXCLUSIVE, SHARED, locked, make_directories, require_home, sync_directory, try_lock
from rubberband.installation import RESTORING
from rubberband.running.backup import (
    BEFORE,
    HOME,
    LOCK,
    STORE,
    Manifest,
    limit_access,
    load_store,
    read_manifest,
    revoked_tokens,
    store_experiments,
    store_file,
)
from rubberband.spec.pool import pools_up
from rubberband.values.kinds import KINDS, part_of

_LOGS = ("-wal", "-shm", "-journal")
_STAYING = (RESTORING, LOCK, "server.lock")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Outcome of a restore."""

    manifest: Manifest
    before: Path | None
    """Folder with the files that were in the home; None if there were none."""
    revoked: int
    """Number of tokens that were revoked."""


def restore(
    folder: Path,
    home: Path,
    store: str | None,
    *,
    keep_tokens: bool,
    announce: Callable[[str], None],
    all_homes: bool = False,
) -> Restored:
    """Put a backup in the place of the home, and of the store at the URL `store`.

    The store is replaced as a whole. Experiments in it that this home does not know, which other homes may drive, are
    replaced with `all_homes` only.

    Raises InputError if the backup is not whole, if it is of another home, if the home is in use, or if it cannot be
    written, and JournalError if the store cannot be written; the home is unchanged then.
    """
    folder, home = Path(os.path.abspath(folder)), home.resolve()
    manifest = read_manifest(folder)
    _require_match(manifest, home, store)
    if folder.resolve().is_relative_to(home):
        raise InputError(f"the backup {folder} is in the home {home}; move it out of it first")
    for note in require_home(home):
        announce(note)
    with _unused(home), _taken(store) as present:
        if store is not None and not all_homes:
            _require_own(store, home, manifest)
        ended = _stage(folder, manifest, home, present, keep_tokens)
        return Restored(manifest=manifest, before=_put_in_place(home, store), revoked=ended)


def _put_in_place(home: Path, store: str | None) -> Path | None:
    """Put the staged files and store in the place of the present ones; return the folder with these, if any."""
    try:
        file = store_file(store)
        if store is not None and file is None:
            load_store(home / RESTORING / STORE, store)
        return _swap(home / RESTORING, home, file)
    except JournalError:
        shutil.rmtree(home / RESTORING, ignore_errors=True)
        raise
    except OSError as error:
        raise InputError(
            f"{error.filename or home} cannot be changed ({error.strerror}), and {home} is half restored; give "
            "access, and run this again"
        ) from None


def _stage(folder: Path, manifest: Manifest, home: Path, present: Store | None, keep_tokens: bool) -> int:
    """Make all files that the home will have, in a folder in it, and return how many tokens were revoked.

    Raises InputError; the home is as it was then.
    """
    staging = home / RESTORING
    shutil.rmtree(staging, ignore_errors=True)  # of a restore that was cut off
    try:
        staging.mkdir(0o700)
        _copy(folder, manifest, staging)
        for directory in (staging / HOME).glob("*/*/local"):
            for renew in filter(None, (part_of(name, "restored") for name in KINDS)):
                renew(directory)
        ended = _limit_access(staging, home, present, keep_tokens)
        os.sync()
        _require_unused(home)  # copying may take long
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        why = error.strerror or first_line(error)
        raise InputError(f"{error.filename or home} cannot be written ({why}); make room or give access") from None
    return ended


def _require_match(manifest: Manifest, home: Path, store: str | None) -> None:
    """Raise InputError for a backup of another home or kind of store."""
    if Path(manifest.home).resolve() != home:
        raise InputError(
            f"this is a backup of the home {manifest.home}, whose path its journals name, and not of {home}; set "
            f"RUBBERBAND_HOME={manifest.home}, or make that path a link to {home}"
        )
    if (manifest.store is None) != (store is None):
        there = "needs none: unset RUBBERBAND_STORE" if manifest.store is None else f"is of the store {manifest.store}"
        remedy = "" if manifest.store is None else "; name the store to restore to: --store URL, or RUBBERBAND_STORE"
        raise InputError(f"this backup {there}{remedy}")


def _require_own(store: str, home: Path, manifest: Manifest) -> None:
    """Raise InputError if a store has experiments that are neither in the home nor in the backup."""
    own = {path.name for path in (home / "experiments").glob("*")} | manifest.experiments
    if others := sorted(store_experiments(store) - own):
        named = f"{', '.join(others[:3])}{' ...' * (len(others) > 3)}"
        raise InputError(
            f"the store has experiments that are not of this home ({named}), and a restore replaces them too; stop "
            "what runs in their homes, and add --all-homes"
        )


@contextmanager
def _unused(home: Path) -> Iterator[None]:
    """Hold the locks of a home for as long as this lasts. Raises InputError if something in it runs."""
    with ExitStack() as stack:
        for name, who in (("server.lock", "a service"), (LOCK, "a backup")):
            lock = stack.enter_context(open(os.open(home / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b"))
            if not try_lock(lock, EXCLUSIVE):
                raise InputError(f"{home} is in use by {who}; stop it first")
        _require_unused(home)
        yield


def _require_unused(home: Path) -> None:
    """Raise InputError if an experiment or a pool runs."""
    for path in sorted((home / "experiments").glob("*")):
        experiment = ExperimentFolder(home=home, name=path.name)
        if experiment.driven or is_hosted(experiment):
            raise InputError(
                f"{home} is in use: experiment {path.name!r} runs; stop the service, then the experiment with "
                f"`rubberband cancel {path.name}`"
            )
    for pool in pools_up(home):
        with suppress(FileNotFoundError), open(pool.lock) as lock_of_pool:
            if not locked(lock_of_pool, SHARED):
                raise InputError(f"{home} is in use: pool {pool.name!r} is up; run `rubberband pool down {pool.name}`")


def _copy(folder: Path, manifest: Manifest, staging: Path) -> None:
    """Copy the files of a backup, compared with its manifest. Raises InputError, OSError."""
    make_directories(staging / HOME)
    for name, (size, digest) in manifest.files.items():
        source, target = folder / name, staging / name
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise InputError(f"the backup {folder} names a file outside of it ({name}); it is not restored")
        make_directories(target.parent)
        try:
            found = hashlib.sha256()
            with open(source, "rb") as file, open(os.open(target, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as copy:
                while chunk := file.read(1 << 20):
                    copy.write(chunk)
                    found.update(chunk)
                length = file.tell()
        except FileNotFoundError:
            raise InputError(f"the backup {folder} is not whole: {name} is missing; use another backup") from None
        if (length, found.hexdigest()) != (size, digest):
            raise InputError(f"the backup {folder} is damaged: {name} has changed; use another backup")


def _limit_access(staging: Path, home: Path, present: Store | None, keep: bool) -> int:
    """Limit the access to the restored store by what the present one knows, and return how many tokens this ended."""
    copy = staging / STORE
    if not copy.exists():
        copy = staging / HOME / "server.db"
    if not copy.exists():
        return 0
    with closing(Store(sqlite_url(copy))) as restored:
        known = _revoked_here(home) if present is None else revoked_tokens(present)
        return limit_access(restored, known, keep=keep, at=time.time())


def _revoked_here(home: Path) -> Mapping[str, bool]:
    """Return the tokens of the home's own store; none if there is no store, or a damaged one."""
    if not (home / "server.db").exists():
        return {}
    try:
        with closing(open_store(None, home)) as present:
            return revoked_tokens(present)
    except JournalError:
        return {}


def _swap(staging: Path, home: Path, store: Path | None) -> Path | None:
    """Put the restored files in the place of the present ones, and a store that is a file beside them (or in the home).

    Until all are, no command uses the home.
    """
    present = [path for path in home.iterdir() if path.name not in _STAYING and not path.name.startswith(BEFORE)]
    begun = f"{BEFORE}{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([begun], (f"{begun}-{number}" for number in itertools.count(2)))
    before = next(home / name for name in names if not (home / name).exists())
    if present:
        before.mkdir(0o700)
        for path in present:
            os.rename(path, before / path.name)
    for path in sorted((staging / HOME).iterdir(), key=lambda path: path.name == "server.db"):
        if path.name not in _STAYING:
            os.rename(path, home / path.name)
    if store is not None:
        _put_file(staging / STORE, store)
    os.sync()
    shutil.rmtree(staging)
    sync_directory(home)
    return before if present else None


@contextmanager
def _taken(store: str | None) -> Iterator[Store | None]:
    """Hold a store that is no file of the home. Raises InputError if a service uses it, JournalError."""
    if store is None:
        yield None
        return
    with ExitStack() as stack:
        if (file := store_file(store)) is not None:
            make_directories(file.parent)
            path = f"{file}.lock"
            lock = stack.enter_context(open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b"))
            if not try_lock(lock, EXCLUSIVE):
                raise InputError(f"the store {file} is in use by a service; stop it first")
        present = stack.enter_context(closing(Store(store)))
        present.take("")
        yield present


def _put_file(copy: Path, path: Path) -> None:
    """Put a SQLite store in the place of the present one and its logs. Raises OSError."""
    make_directories(path.parent)
    draft = path.with_name(f".{path.name}.restored")
    draft.unlink(missing_ok=True)
    shutil.copyfile(copy, draft)
    draft.chmod(0o600)
    for suffix in _LOGS:
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    os.replace(draft, path)
