"""The checkpoint store: where the bytes of a trial's checkpoints lie until a newer, journalled one replaces them.

It knows nothing of what the bytes mean; `executor/training` writes and reads them.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import unquote, urlsplit

from rubberband.distribution import install_hint
from rubberband.errors import CheckpointError, InputError
from rubberband.executor.events import CheckpointRef

if TYPE_CHECKING:
    from rubberband.cloud.aws.s3 import S3Folder


class CheckpointStore(Protocol):
    """Keeps checkpoints; every implementation passes tests/unit/test_checkpoints.py and can be pickled."""

    def save(self, trial: int, iterations: int, payload: bytes) -> CheckpointRef:
        """Write `payload` so that it survives the death of this process and machine; never overwrites another one.

        Raises CheckpointError.
        """
        ...

    def load(self, ref: CheckpointRef) -> bytes:
        """The bytes that `save` wrote; raises CheckpointError if they are gone or are not those bytes."""
        ...

    def discard(self, ref: CheckpointRef) -> None:
        """Delete the checkpoint; one that is gone already is fine. Raises CheckpointError."""
        ...


def open_store(url: str) -> CheckpointStore:
    """The store at `s3://bucket/prefix`, a directory path or a `file://` URL; a directory is made where it is missing.

    Raises InputError for any other scheme, and where nothing can be written.
    """
    scheme, separator, _ = url.partition("://")
    if not separator:
        return _open_directory(Path(url))
    if scheme == "s3":
        return _open_s3(url)
    if scheme != "file":
        raise InputError(
            f"the checkpoint store {url} is not supported: {scheme}:// is unknown; give s3://bucket/prefix, or a "
            f"directory that every instance sees (a path, or file:///path)"
        )
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise InputError(f"the checkpoint store {url} names the host {parts.netloc!r}; write file:///path")
    return _open_directory(Path(unquote(parts.path)))


def _open_s3(url: str) -> S3CheckpointStore:
    try:
        from rubberband.cloud.aws.s3 import S3Folder
    except ModuleNotFoundError as error:
        raise InputError(f"the checkpoint store {url} needs {error.name}; {install_hint('aws')}") from None
    folder = S3Folder.parse(url)
    folder.check()
    return S3CheckpointStore(folder)


def _open_directory(path: Path) -> LocalCheckpointStore:
    directory = Path(os.path.abspath(path.expanduser()))
    probe = directory / f".probe-{uuid.uuid4().hex}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"checkpoints cannot be written to {directory}: {error.strerror or error}; name another directory"
        ) from error
    return LocalCheckpointStore(directory)


@dataclass(frozen=True, slots=True)
class LocalCheckpointStore:
    """Checkpoints as files in one directory, which all workers see. Use `open_store`, which checks the directory."""

    directory: Path

    def save(self, trial: int, iterations: int, payload: bytes) -> CheckpointRef:
        """Write a new file: temporary name, fsync, rename, fsync of the directory."""
        path = self.directory / _file_name(trial, iterations)
        try:
            _write_durably(path, payload)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of trial {trial} after {iterations} iterations ({len(payload)} bytes) could not be "
                f"written to {path}: {error.strerror or error}"
            ) from error
        return _reference(path.as_uri(), payload)

    def load(self, ref: CheckpointRef) -> bytes:
        """Read the file and compare its size and SHA-256 with the reference."""
        path = self._path(ref)
        try:
            payload = path.read_bytes()
        except FileNotFoundError as error:
            raise CheckpointError(f"the checkpoint {path} is gone") from error
        except OSError as error:
            raise CheckpointError(f"the checkpoint {path} could not be read: {error.strerror or error}") from error
        return _checked(payload, ref, str(path))

    def discard(self, ref: CheckpointRef) -> None:
        """Unlink the file."""
        path = self._path(ref)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"the checkpoint {path} could not be deleted: {error.strerror or error}") from error

    def _path(self, ref: CheckpointRef) -> Path:
        parts = urlsplit(ref.url)
        path = Path(os.path.abspath(unquote(parts.path)))
        if parts.scheme != "file" or path.parent != self.directory:
            raise CheckpointError(f"the checkpoint {ref.url} does not lie in the store {self.directory}")
        return path


@dataclass(frozen=True, slots=True)
class S3CheckpointStore:
    """Checkpoints as objects in a folder of S3. Use `open_store`, which checks that it can be written."""

    folder: S3Folder

    def save(self, trial: int, iterations: int, payload: bytes) -> CheckpointRef:
        """Put a new object, which is there whole or not at all."""
        return _reference(self.folder.put(_file_name(trial, iterations), payload), payload)

    def load(self, ref: CheckpointRef) -> bytes:
        """Get the object and compare its size and SHA-256 with the reference."""
        from rubberband.cloud.aws.s3 import S3Gone

        try:
            payload = self.folder.get(self._name(ref))
        except S3Gone as error:
            raise CheckpointError(f"the checkpoint {ref.url} is gone") from error
        return _checked(payload, ref, ref.url)

    def discard(self, ref: CheckpointRef) -> None:
        """Delete the object."""
        self.folder.delete(self._name(ref))

    def _name(self, ref: CheckpointRef) -> str:
        folder, _, name = ref.url.rpartition("/")
        if folder != self.folder.url or not name:
            raise CheckpointError(f"the checkpoint {ref.url} does not lie in the store {self.folder.url}")
        return name


def _file_name(trial: int, iterations: int) -> str:
    """The random part keeps a late write of an abandoned attempt away from what a newer attempt acknowledged."""
    return f"trial-{trial:04d}-iterations-{iterations:06d}-{uuid.uuid4().hex[:12]}.ckpt"


def _reference(url: str, payload: bytes) -> CheckpointRef:
    return CheckpointRef(url=url, digest=hashlib.sha256(payload).hexdigest(), size_bytes=len(payload))


def _checked(payload: bytes, ref: CheckpointRef, place: str) -> bytes:
    """The payload, if it is what was written. Raises CheckpointError."""
    if len(payload) != ref.size_bytes:
        raise CheckpointError(
            f"the checkpoint {place} has {len(payload)} bytes instead of {ref.size_bytes}: it is not what was written"
        )
    digest = hashlib.sha256(payload).hexdigest()
    if digest != ref.digest:
        raise CheckpointError(
            f"the checkpoint {place} has SHA-256 {digest[:12]}… instead of {ref.digest[:12]}…: "
            f"it is not what was written"
        )
    return payload


def _write_durably(path: Path, payload: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
