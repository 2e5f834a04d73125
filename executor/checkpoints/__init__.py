"""The checkpoint store: keeps the bytes of a trial's checkpoints until newer, journalled ones replace them.

`executor/training` writes and reads the bytes. A store has a mark, a file beside the checkpoints with a random id, so
that the empty folder where a disk was mounted is not taken for the store.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import pkgutil
import shutil
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from io import BufferedIOBase
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from rubberband.errors import CheckpointError, CheckpointLostError, InputError, StoreAwayError
from rubberband.executor.checkpoints.folders import join
from rubberband.executor.checkpoints.scratch import Scratch
from rubberband.files import make_directories, new_file, sync_directory, write_atomically, write_new
from rubberband.installation import require_driver
from rubberband.units import counted, format_bytes

if TYPE_CHECKING:
    from rubberband.executor.core.events import CheckpointRef

MARK = "rubberband-store"
"""The file of the mark; not hidden, so that copying `*` includes it."""
LONGEST_MARK = 64
Payload = bytes | Callable[[Path], str | None]
"""A checkpoint: its bytes, or a function that writes them to a new file and raises OSError or CheckpointError.

It returns their SHA-256, or None where it does not know that."""
_CHUNK_BYTES = 2**20
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

    @abstractmethod
    def check(self) -> None:
        """Write and delete something. Raises InputError with the remedy if that fails."""

    def load(self, ref: CheckpointRef) -> bytes:
        """Return the bytes that `save` wrote, without parts, compared by size and SHA-256.

        Raises CheckpointLostError if the store is well and they are gone, cannot be read, or have changed;
        StoreAwayError if the store as a whole is away.
        """
        with io.BytesIO() as file:
            self.fetch(ref, file)
            return file.getvalue()

    @contextmanager
    def file(self, ref: CheckpointRef) -> Iterator[Path]:
        """Yield a file of those bytes, or of all parts joined, for as long as it is needed; never all in memory.

        Raises as `load` does, and CheckpointError if this machine has no room for it.
        """
        with ExitStack() as stack:
            first, *parts = (stack.enter_context(self.only(each)) for each in ref.files())
            if parts:
                joined = stack.enter_context(Scratch()) / "checkpoint"
                join(first, parts, joined)
                yield joined
            else:
                yield first

    @contextmanager
    def only(self, ref: CheckpointRef) -> Iterator[Path]:
        """Yield the file of a checkpoint without its parts."""
        with ExitStack() as stack:
            try:
                path = stack.enter_context(Scratch()) / "checkpoint"
                with open(path, "w+b") as file:
                    self.fetch(ref, file)
            except OSError as error:
                raise CheckpointError(
                    f"the checkpoint {ref.url} ({format_bytes(ref.size_bytes)}) could not be copied to this machine: "
                    f"{error.strerror or error}; make room on the disk of its temporary files, or set TMPDIR"
                ) from error
            yield path

    def fetch(self, ref: CheckpointRef, file: BufferedIOBase) -> None:
        """Write those bytes to an empty file, which is open to read and write. Raises as `load` does, and OSError."""
        place = self._place(ref)
        try:
            self._copy(place, file)
        except CheckpointError as error:
            _raise_if_full(error)
            self._require_mark()
            file.seek(0)
            file.truncate()
            try:  # it may have been away for a moment, or a file handle stale
                self._copy(place, file)
            except CheckpointError as again:
                _raise_if_full(again)
                raise CheckpointLostError(str(again)) from again
        file.flush()
        check_content(file, ref)

    @abstractmethod
    def _place(self, ref: CheckpointRef) -> str:
        """Return the name that the store itself has for it. Raises CheckpointError if it is of another store."""

    @abstractmethod
    def _copy(self, place: str, file: BufferedIOBase) -> None:
        """Write all bytes of a place to a file. Raises CheckpointError."""

    def discard(self, ref: CheckpointRef) -> None:
        """Delete the checkpoint with its parts, as far as they are there. Raises CheckpointError."""
        for file in ref.files():
            self._delete(file)

    @abstractmethod
    def _delete(self, ref: CheckpointRef) -> None:
        """Delete a file, if it is there. Raises CheckpointError."""

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
        """Whether the checkpoint's own file is there, whole or not. Raises CheckpointError if that is not known."""

    @abstractmethod
    def read_mark(self) -> str:
        """Return the mark that is in it; empty if there is none. Raises StoreAwayError if the store is not there."""

    @abstractmethod
    def write_mark(self, mark: str) -> None:
        """Mark it durably; a directory that has a mark keeps it. Raises CheckpointError."""

    def _require_mark(self) -> None:
        """Raise StoreAwayError if it is another store than it was, such as an empty mount point."""
        present = self.read_mark()
        if self.mark and present != self.mark:
            raise _other(self.url, self.mark, present, "")


def open_store(url: str) -> CheckpointStore:
    """Return the store at a bucket's URL (s3, gs, az, abfs, hf), a path or a `file://` URL; make a missing directory.

    Raises InputError for any other scheme, for one whose driver is not installed, and if it cannot be written.
    """
    store = _store_at(url)
    store.check()
    return store


def make_store(url: str) -> CheckpointStore:
    """Open a store and mark it; a store that other experiments use keeps its mark. Raises InputError."""
    store = open_store(url)
    try:
        store.write_mark(uuid.uuid4().hex)
        return replace(store, mark=store.read_mark())
    except CheckpointError as error:
        raise InputError(f"{error}; name another store") from error


def reopen_store(url: str, mark: str, known: Sequence[CheckpointRef], run: str = "") -> CheckpointStore:
    """Return the store that was made at `url` with `mark`; nothing is made in its place.

    It is recognised by its mark, or by any of the `known` checkpoints: it may have been restored without its mark.
    Raises StoreAwayError if it is not there or cannot be written, InputError for an invalid URL.
    """
    store = _store_at(url)
    present = store.read_mark()
    if present != mark and not any(store.holds(ref) for ref in known):
        raise _other(store.url, mark, present, "none of the experiment's checkpoints" if known else "")
    if not present:
        store.write_mark(mark)
        present = store.read_mark()
    store = replace(store, mark=present, run=run)
    probe(store, size_bytes=max((ref.total_bytes for ref in known), default=0))
    return store


def store_of(ref: CheckpointRef) -> CheckpointStore:
    """Return the store that holds a checkpoint, to read it. Raises InputError if it needs what is not installed."""
    return _store_at(ref.url.rpartition("/")[0])


def probe(store: CheckpointStore, trial: int = 0, size_bytes: int = 0) -> None:
    """Raise StoreAwayError unless it is the same store, and accepts a checkpoint of that size (64 MiB at most)."""
    store._require_mark()
    try:
        store.discard(store.save(trial, 0, bytes(min(max(size_bytes, _LEAST_PROBE_BYTES), _LONGEST_PROBE_BYTES))))
    except StoreAwayError:
        raise
    except CheckpointError as error:
        why = error.__cause__.strerror if isinstance(error.__cause__, OSError) else None
        raise StoreAwayError(
            f"the checkpoint store {store.url} does not accept checkpoints ({why or error}); make room or give access"
        ) from error


def _other(url: str, mark: str, present: str, lacking: str) -> StoreAwayError:
    seen = f"the mark {present[:8]}…" if present else f"no file {MARK}"
    seen = f"{seen} and {lacking}" if lacking else seen
    return StoreAwayError(
        f"the checkpoint store {url} is not the original one: expected the mark {mark[:8]}…, found {seen}; mount or "
        "restore it"
    )


_FOLDERS = {"s3": "rubberband.cloud.aws.s3:S3Folder.parse"}
"""Scheme -> what opens it, if fsspec does not."""


def _store_at(url: str) -> CheckpointStore:
    """Return the unchecked store. Raises InputError."""
    scheme = require_driver(url)
    if scheme:
        from rubberband.executor.checkpoints.objects import FsspecFolder, ObjectStore

        if scheme in _FOLDERS:
            return ObjectStore(pkgutil.resolve_name(_FOLDERS[scheme])(url))
        return ObjectStore(FsspecFolder(url.rstrip("/")))
    if "://" not in url:
        return _directory(Path(url))
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise InputError(f"the checkpoint store {url} names the host {parts.netloc!r}; write file:///path")
    return _directory(Path(unquote(parts.path)))


def _directory(path: Path) -> LocalCheckpointStore:
    return LocalCheckpointStore(Path(os.path.abspath(path.expanduser())))


_READ_ONLY_PAUSES_S = (0.1, 0.4, 1.0, 2.0)
"""Pauses before a file is written again where the file system is read-only for moments, as while it is repaired."""


@dataclass(frozen=True, slots=True)
class LocalCheckpointStore(CheckpointStore):
    """Checkpoints as files in one directory, which all workers see. Use `open_store`, which checks the directory."""

    directory: Path

    @property
    def url(self) -> str:
        return str(self.directory)

    def check(self) -> None:
        draft = self.directory / f".probe-{uuid.uuid4().hex}"
        try:
            make_directories(self.directory, 0o777)
            draft.write_bytes(bytes(_LEAST_PROBE_BYTES))
            draft.unlink()
        except OSError as error:
            raise InputError(
                f"checkpoints cannot be written to {self.directory}: {error.strerror or error}; name another directory"
            ) from error

    def save(self, trial: int, iterations: int, payload: Payload) -> CheckpointRef:
        path = self.directory / file_name(trial, iterations, self.run)
        self._require_mark()
        try:
            for pause_s in _READ_ONLY_PAUSES_S:
                try:
                    return self._write(path, payload)
                except OSError as error:
                    if os.strerror(errno.EROFS) not in str(error):  # torch's writer raises errors without a number
                        raise
                time.sleep(pause_s)
            return self._write(path, payload)
        except OSError as error:
            size = f" ({len(payload)} bytes)" if isinstance(payload, bytes) else ""
            raise CheckpointError(
                f"the checkpoint of trial {trial} after {counted(iterations, 'iteration')}{size} could "
                f"not be written to {path}: {error.strerror or error}"
            ) from error

    def _write(self, path: Path, payload: Payload) -> CheckpointRef:
        if isinstance(payload, bytes):
            write_atomically(path, payload, durable=True)
            return reference(path.as_uri(), payload)
        with new_file(path) as draft:
            return reference_to(path.as_uri(), draft, payload(draft))

    @contextmanager
    def only(self, ref: CheckpointRef) -> Iterator[Path]:
        """Yield the file itself, which no one changes."""
        path = Path(self._place(ref))
        try:
            with open(path, "rb") as file:
                check_content(file, ref)
        except OSError:  # the copy tells what that means for the store
            with CheckpointStore.only(self, ref) as path:
                yield path
            return
        yield path

    def _copy(self, place: str, file: BufferedIOBase) -> None:
        try:
            with open(place, "rb") as source:
                shutil.copyfileobj(source, file, _CHUNK_BYTES)
        except OSError as error:
            why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror or error}"
            raise CheckpointError(f"the checkpoint {place} {why}") from error

    def _delete(self, ref: CheckpointRef) -> None:
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
                return file.read(LONGEST_MARK).decode("utf-8", "replace").strip()
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


def copy_of(source: Path) -> Payload:
    """Return the content of a file as what is to be saved."""

    def copy(to: Path) -> None:
        shutil.copyfile(source, to)

    return copy


def file_name(trial: int, iterations: int, run: str) -> str:
    """Return a name; its random part keeps a late write of an abandoned attempt away from a newer attempt's file."""
    own = "-".join(part for part in (run, uuid.uuid4().hex[:12]) if part)
    return f"trial-{trial:04d}-iterations-{iterations:06d}-{own}.ckpt"


def reference(url: str, payload: bytes) -> CheckpointRef:
    """Return the reference to a checkpoint at `url` with this content."""
    return _reference(url, hashlib.sha256(payload).hexdigest(), len(payload))


def reference_to(url: str, path: Path, digest: str | None = None) -> CheckpointRef:
    """Return the reference to a checkpoint at `url` with the content of a file, which is read for its SHA-256."""
    with open(path, "rb") as file:
        digest = digest or hashlib.file_digest(file, "sha256").hexdigest()
        return _reference(url, digest, os.fstat(file.fileno()).st_size)


def _reference(url: str, digest: str, size_bytes: int) -> CheckpointRef:
    from rubberband.executor.core.events import CheckpointRef

    return CheckpointRef(url=url, digest=digest, size_bytes=size_bytes)


def check_content(file: BufferedIOBase, ref: CheckpointRef) -> None:
    """Read a file from its beginning. Raises CheckpointLostError unless it matches the reference."""
    size_bytes = file.seek(0, os.SEEK_END)
    if size_bytes != ref.size_bytes:
        raise CheckpointLostError(
            f"the checkpoint {ref.url} has {size_bytes} bytes instead of {ref.size_bytes}: its content has changed"
        )
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != ref.digest:
        raise CheckpointLostError(
            f"the checkpoint {ref.url} has changed: its SHA-256 is {digest[:12]}… instead of {ref.digest[:12]}…"
        )


def _raise_if_full(error: CheckpointError) -> None:
    """Raise the OSError of a full disk here, to which the checkpoint is copied: it is not lost."""
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
        raise cause
