"""The checkpoint store: keeps the bytes of a trial's checkpoints until newer, journalled ones replace them.

`executor/training` writes and reads the bytes. A store has a mark, a file beside the checkpoints with a random id, so
that the empty folder where a disk was mounted is not taken for the store.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import unquote, urlsplit

from rubberband.cloud.node import machine_folder
from rubberband.errors import CheckpointError, CheckpointLostError, InputError, StoreAwayError
from rubberband.executor.core.events import CheckpointRef
from rubberband.files import make_directories, new_file, sync_directory, write_atomically, write_new
from rubberband.installation import require
from rubberband.units import counted

if TYPE_CHECKING:
    from rubberband.cloud.aws.s3 import S3Folder


MARK = "rubberband-store"
"""The file of the mark; not hidden, so that copying `*` includes it."""
_LONGEST_MARK = 64
Payload = bytes | Callable[[Path], None]
"""A checkpoint: its bytes, or a function that writes them to a new file and raises OSError or CheckpointError."""
_LEAST_PROBE_BYTES, _LONGEST_PROBE_BYTES = 2**16, 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStore(ABC):
    """Keeps checkpoints; every implementation passes tests/unit/test_checkpoints.py and can be pickled."""

    mark: str = ""
    """The mark that makes it this store; empty: any store at the same place is accepted."""
    run: str = ""
    """A part of the names of all that this saves, as other experiments may save in the same place; empty: none."""

    @property
    @abstractmethod
    def url(self) -> str: ...

    @abstractmethod
    def save(self, trial: int, iterations: int, payload: Payload) -> CheckpointRef:
        """Write `payload` so that it survives the death of this process and machine; never overwrite another one.

        Raises CheckpointError.
        """

    def load(self, ref: CheckpointRef) -> bytes:
        """Return the bytes that `save` wrote, compared by size and SHA-256.

        Raises CheckpointLostError if the store is well and they are gone, cannot be read, or have changed;
        StoreAwayError if the store as a whole is away.
        """
        place = self._place(ref)
        try:
            payload = self._read(place)
        except CheckpointError:
            self._require_mark()
            try:  # it may have been away for a moment, or a file handle stale
                payload = self._read(place)
            except CheckpointError as error:
                raise CheckpointLostError(str(error)) from error
        return _checked(payload, ref)

    @abstractmethod
    def _place(self, ref: CheckpointRef) -> str:
        """Return the name that the store itself has for it. Raises CheckpointError if it is of another store."""

    @abstractmethod
    def _read(self, place: str) -> bytes:
        """Return all bytes of a place. Raises CheckpointError."""

    @abstractmethod
    def discard(self, ref: CheckpointRef) -> None:
        """Delete the checkpoint, if it is there. Raises CheckpointError."""

    def tidy(self, kept: Collection[CheckpointRef]) -> None:
        """Delete the checkpoints of this run, whole or begun, that are not among `kept`: a killed driver leaves some.

        Those of other runs, or of no run, are left alone. Raises CheckpointError.
        """
        if self.run:
            self._require_mark()
            self._remove_others(f"-{self.run}-", {ref.url.rpartition("/")[2] for ref in kept})

    @abstractmethod
    def _remove_others(self, part: str, kept: Collection[str]) -> None:
        """Delete what has `part` in its name, drafts included, and is not `kept`. Raises CheckpointError."""

    @abstractmethod
    def holds(self, ref: CheckpointRef) -> bool:
        """Whether the checkpoint is there, whole or not. Raises CheckpointError if that is not known."""

    @abstractmethod
    def read_mark(self) -> str:
        """Return the mark that is in it; empty if there is none. Raises StoreAwayError if the store is not there."""

    @abstractmethod
    def write_mark(self, mark: str) -> None:
        """Mark it durably; a directory that has a mark keeps it. Raises CheckpointError."""

    def with_mark(self, mark: str) -> Self:
        """Return the store at the same place that must have this mark."""
        return replace(self, mark=mark)

    def _require_mark(self) -> None:
        """Raise StoreAwayError if it is another store than it was, such as an empty mount point."""
        found = self.read_mark()
        if self.mark and found != self.mark:
            raise _other(self.url, self.mark, found, "")


def open_store(url: str) -> CheckpointStore:
    """Return the store at `s3://bucket/prefix`, a directory path or a `file://` URL; make a missing directory.

    Raises InputError for any other scheme, and if it cannot be written.
    """
    store = _store_at(url)
    if isinstance(store, S3CheckpointStore):
        store.folder.check()
        return store
    probe = store.directory / f".probe-{uuid.uuid4().hex}"
    try:
        make_directories(store.directory, 0o777)
        probe.write_bytes(bytes(_LEAST_PROBE_BYTES))
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"checkpoints cannot be written to {store.directory}: {error.strerror or error}; name another directory"
        ) from error
    return store


def make_store(url: str) -> CheckpointStore:
    """Open a store and mark it; a store that other experiments use keeps its mark.

    Raises InputError.
    """
    store = open_store(url)
    try:
        store.write_mark(uuid.uuid4().hex)
        return store.with_mark(store.read_mark())
    except CheckpointError as error:
        raise InputError(f"{error}; name another store") from error


def reopen_store(url: str, mark: str, known: Sequence[CheckpointRef], run: str = "") -> CheckpointStore:
    """Return the store that was made at `url` with `mark`; nothing is made in its place.

    It is recognised by its mark, or by any of the `known` checkpoints: it may have been restored without its mark, and
    stores of earlier versions have none (`mark` is empty). Raises StoreAwayError if it is not there or cannot be
    written, InputError for an invalid URL.
    """
    store = _store_at(url)
    found = store.read_mark()
    is_it = found == mark if mark else not known
    if not is_it and not any(store.holds(ref) for ref in known):
        raise _other(store.url, mark, found, "none of the experiment's checkpoints" if known else "")
    if not found:
        store.write_mark(mark or uuid.uuid4().hex)
        found = store.read_mark()
    store = replace(store, mark=found, run=run)
    probe(store, size_bytes=max((ref.size_bytes for ref in known), default=0))
    return store


def store_of(ref: CheckpointRef) -> CheckpointStore:
    """Return the store that holds a checkpoint, to read it. Raises InputError if it needs what is not installed."""
    return _store_at(ref.url.rpartition("/")[0])


def probe(store: CheckpointStore, trial: int = 0, size_bytes: int = 0) -> None:
    """Raise StoreAwayError unless it is the same store, and accepts a checkpoint of that size (64 MiB at most)."""
    found = store.read_mark()
    if store.mark and found != store.mark:
        raise _other(store.url, store.mark, found, "")
    try:
        store.discard(store.save(trial, 0, bytes(min(max(size_bytes, _LEAST_PROBE_BYTES), _LONGEST_PROBE_BYTES))))
    except StoreAwayError:
        raise
    except CheckpointError as error:
        why = error.__cause__.strerror if isinstance(error.__cause__, OSError) else None
        raise StoreAwayError(
            f"the checkpoint store {store.url} does not accept checkpoints ({why or error}); make room or give access"
        ) from error


def _other(url: str, mark: str, found: str, lacking: str) -> StoreAwayError:
    seen = f"the mark {found[:8]}…" if found else f"no file {MARK}"
    seen = f"{seen} and {lacking}" if lacking else seen
    wanted = f"the mark {mark[:8]}…" if mark else "its checkpoints"
    return StoreAwayError(
        f"the checkpoint store {url} is not the original one: expected {wanted}, found {seen}; mount or restore it"
    )


def _store_at(url: str) -> LocalCheckpointStore | S3CheckpointStore:
    """Return the unchecked store. Raises InputError."""
    scheme, separator, _ = url.partition("://")
    if not separator:
        return _directory(Path(url))
    if scheme == "s3":
        require(f"the checkpoint store {url}", "boto3")
        from rubberband.cloud.aws.s3 import S3Folder

        return S3CheckpointStore(S3Folder.parse(url))
    if scheme != "file":
        raise InputError(
            f"the checkpoint store {url} is not supported: {scheme}:// is unknown; give s3://bucket/prefix, or a "
            f"directory that every instance sees (a path, or file:///path)"
        )
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise InputError(f"the checkpoint store {url} names the host {parts.netloc!r}; write file:///path")
    return _directory(Path(unquote(parts.path)))


def _directory(path: Path) -> LocalCheckpointStore:
    return LocalCheckpointStore(Path(os.path.abspath(path.expanduser())))


@dataclass(frozen=True, slots=True)
class LocalCheckpointStore(CheckpointStore):
    """Checkpoints as files in one directory, which all workers see. Use `open_store`, which checks the directory."""

    directory: Path

    @property
    def url(self) -> str:
        return str(self.directory)

    def save(self, trial: int, iterations: int, payload: Payload) -> CheckpointRef:
        path = self.directory / _file_name(trial, iterations, self.run)
        self._require_mark()
        try:
            if isinstance(payload, bytes):
                write_atomically(path, payload, durable=True)
                return _reference(path.as_uri(), payload)
            with new_file(path) as draft:
                payload(draft)
                return _reference_to(path.as_uri(), draft)
        except OSError as error:
            size = f" ({len(payload)} bytes)" if isinstance(payload, bytes) else ""
            raise CheckpointError(
                f"the checkpoint of trial {trial} after {counted(iterations, 'iteration')}{size} could "
                f"not be written to {path}: {error.strerror or error}"
            ) from error

    def _read(self, place: str) -> bytes:
        try:
            return Path(place).read_bytes()
        except OSError as error:
            why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror or error}"
            raise CheckpointError(f"the checkpoint {place} {why}") from error

    def discard(self, ref: CheckpointRef) -> None:
        path = Path(self._place(ref))
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"the checkpoint {path} could not be deleted: {error.strerror or error}") from error

    def _remove_others(self, part: str, kept: Collection[str]) -> None:
        try:
            for path in self.directory.glob(f"*{part}*"):
                if path.name not in kept and not path.is_dir():
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self.directory} could not be tidied: {error.strerror or error}") from error

    def holds(self, ref: CheckpointRef) -> bool:
        path = Path(self._place(ref))
        try:
            return path.exists()
        except OSError as error:
            raise CheckpointError(f"the checkpoint {path} cannot be checked: {error.strerror or error}") from error

    def read_mark(self) -> str:
        try:
            with open(self.directory / MARK, "rb") as file:
                return file.read(_LONGEST_MARK).decode("utf-8", "replace").strip()
        except OSError as error:
            if isinstance(error, FileNotFoundError) and self.directory.is_dir():
                return ""
            raise StoreAwayError(
                f"the checkpoint store {self.directory} cannot be read ({error.strerror or error}); mount or restore it"
            ) from error

    def write_mark(self, mark: str) -> None:
        """Write the file of the mark; if two processes do so at once, both find the same mark."""
        if self.read_mark():
            return
        path = self.directory / MARK
        draft = path.with_name(f".{MARK}-{uuid.uuid4().hex}")
        try:
            write_new(draft, f"{mark}\n".encode(), durable=True)
            try:
                with suppress(FileExistsError):
                    os.link(draft, path)
            except OSError:  # a file system without links
                os.rename(draft, path)
            draft.unlink(missing_ok=True)
            sync_directory(self.directory)
        except OSError as error:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            raise StoreAwayError(
                f"the checkpoint store {self.directory} cannot be written ({error.strerror or error}); make room or "
                f"give access"
            ) from error

    def _place(self, ref: CheckpointRef) -> str:
        parts = urlsplit(ref.url)
        path = Path(os.path.abspath(unquote(parts.path)))
        if parts.scheme != "file" or path.parent != self.directory:
            raise CheckpointError(f"the checkpoint {ref.url} is not in the store {self.directory}")
        return str(path)


@dataclass(frozen=True, slots=True)
class S3CheckpointStore(CheckpointStore):
    """Checkpoints as objects in a folder of S3. Use `open_store`, which checks that it can be written."""

    folder: S3Folder

    @property
    def url(self) -> str:
        return self.folder.url

    def save(self, trial: int, iterations: int, payload: Payload) -> CheckpointRef:
        name = _file_name(trial, iterations, self.run)
        if isinstance(payload, bytes):
            return _reference(self.folder.put(name, payload), payload)
        with tempfile.TemporaryDirectory(prefix="rubberband-") as folder:
            draft = Path(folder, name)
            try:
                payload(draft)
            except OSError as error:
                raise CheckpointError(
                    f"the checkpoint of trial {trial} after {counted(iterations, 'iteration')} could not be "
                    f"written to {folder}, from where it goes to {self.url}: {error.strerror or error}; make room "
                    "there, or set TMPDIR"
                ) from error
            return _reference_to(self.folder.put(name, draft), draft)

    def _read(self, place: str) -> bytes:
        from rubberband.cloud.aws.s3 import S3Gone

        try:
            return self.folder.get(place)
        except S3Gone as error:
            raise CheckpointError(f"the checkpoint {error} is missing") from error

    def discard(self, ref: CheckpointRef) -> None:
        self.folder.delete(self._place(ref))

    def _remove_others(self, part: str, kept: Collection[str]) -> None:
        for name in self.folder.names():
            if part in name and name not in kept:
                self.folder.delete(name)
        self.folder.abort_uploads(part)

    def holds(self, ref: CheckpointRef) -> bool:
        return self.folder.has(self._place(ref))

    def read_mark(self) -> str:
        from rubberband.cloud.aws.s3 import S3Gone

        try:
            return self.folder.get(MARK)[:_LONGEST_MARK].decode("utf-8", "replace").strip()
        except S3Gone:
            return ""
        except CheckpointError as error:
            raise StoreAwayError(
                f"the checkpoint store {self.url} cannot be read: {error}; give access or put it back"
            ) from error

    def write_mark(self, mark: str) -> None:
        """Put the object of the mark. Each run has its own folder in the bucket: no other run has marked it."""
        self.folder.put(MARK, f"{mark}\n".encode())

    def _place(self, ref: CheckpointRef) -> str:
        folder, _, name = ref.url.rpartition("/")
        if folder != self.folder.url or not name:
            raise CheckpointError(f"the checkpoint {ref.url} is not in the store {self.folder.url}")
        return name


def _file_name(trial: int, iterations: int, run: str) -> str:
    """Return a name; its random part keeps a late write of an abandoned attempt away from a newer attempt's file."""
    own = "-".join(part for part in (run, uuid.uuid4().hex[:12]) if part)
    return f"trial-{trial:04d}-iterations-{iterations:06d}-{own}.ckpt"


def _reference(url: str, payload: bytes) -> CheckpointRef:
    return CheckpointRef(url=url, digest=hashlib.sha256(payload).hexdigest(), size_bytes=len(payload))


def _reference_to(url: str, path: Path) -> CheckpointRef:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return CheckpointRef(url=url, digest=digest, size_bytes=os.fstat(file.fileno()).st_size)


def _checked(payload: bytes, ref: CheckpointRef) -> bytes:
    """Return the payload. Raises CheckpointLostError unless it matches the reference."""
    if len(payload) != ref.size_bytes:
        raise CheckpointLostError(
            f"the checkpoint {ref.url} has {len(payload)} bytes instead of {ref.size_bytes}: its content has changed"
        )
    digest = hashlib.sha256(payload).hexdigest()
    if digest != ref.digest:
        raise CheckpointLostError(
            f"the checkpoint {ref.url} has changed: its SHA-256 is {digest[:12]}… instead of {ref.digest[:12]}…"
        )
    return payload


# A checkpoint as one file on a machine, which all workers of a gang there map into memory. The first to come loads
# it; else each of eight workers would load and hold all of it. The file goes with its last user. A process that is
# killed leaves it to the next call.


_PAUSE_S = 0.01


@contextlib.contextmanager
def on_machine(store: CheckpointStore, ref: CheckpointRef) -> Iterator[Path | bytes]:
    """Yield the file of a checkpoint while it is needed, or its bytes if this machine has no room for the file.

    Raises CheckpointError as `store.load` does.
    """
    try:
        folder = machine_folder() / "checkpoints"
        folder.mkdir(exist_ok=True)
        _remove_abandoned(folder, ref.digest)
        path = folder / ref.digest
        descriptor = _hold(path, store, ref)
    except OSError:
        yield store.load(ref)
        return
    try:
        yield path
    finally:
        _let_go(path, descriptor)


def _hold(path: Path, store: CheckpointStore, ref: CheckpointRef) -> int:
    """Return a descriptor that keeps the whole file there, by a shared lock on it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        while True:
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits for a worker that loads it
            status = os.fstat(descriptor)
            if not status.st_nlink:  # its last user has removed it in between
                _unlock(descriptor)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            elif status.st_size == ref.size_bytes:
                return descriptor
            else:
                _fill(descriptor, store, ref)
    except BaseException:
        _let_go(path, descriptor)
        raise


def _fill(descriptor: int, store: CheckpointStore, ref: CheckpointRef) -> None:
    """Write the file, unless another worker has or does."""
    try:
        # To wait here could last until another worker, which has it by then, is through; and that one waits for us.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(_PAUSE_S)
        return
    if os.fstat(descriptor).st_size != ref.size_bytes:
        os.ftruncate(descriptor, 0)
        with open(os.dup(descriptor), "wb") as file:
            file.write(store.load(ref))


def _let_go(path: Path, descriptor: int) -> None:
    """Close the file, and remove it unless another process uses it."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:
            path.unlink()
    _unlock(descriptor)


def _unlock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_UN)  # a loader worker that was forked meanwhile has the descriptor too
    os.close(descriptor)


def _remove_abandoned(folder: Path, kept: str) -> None:
    """Remove the files that killed processes left."""
    for path in folder.iterdir():
        if path.name != kept:
            with contextlib.suppress(OSError):
                _let_go(path, os.open(path, os.O_RDWR))
