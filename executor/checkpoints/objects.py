"""Checkpoints as objects in a folder of a bucket."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Protocol

from rubberband.errors import CheckpointError, InputError, StoreAwayError
from rubberband.executor.checkpoints import (
    LONGEST_MARK,
    MARK,
    CheckpointStore,
    Payload,
    file_name,
    reference,
    reference_to,
)
from rubberband.executor.checkpoints.scratch import Scratch
from rubberband.executor.checkpoints.uploads import send
from rubberband.executor.core.events import CheckpointRef
from rubberband.units import counted


class ObjectFolder(Protocol):
    """A folder of a bucket, which can be pickled. All but `check` raise CheckpointError."""

    @property
    def url(self) -> str:
        """Its URL, without a slash at the end."""

    def check(self) -> None:
        """Write and delete an object. Raises InputError with the remedy if that fails."""

    def put(self, name: str, payload: bytes | Path) -> str:
        """Write an object, whole or not at all, of bytes or of a file's content, and return its URL."""

    def get(self, name: str) -> bytes:
        """Return the bytes of an object. Raises FileNotFoundError if there is none."""

    def fetch(self, name: str, file: BufferedIOBase) -> None:
        """Write the bytes of an object to a file. Raises FileNotFoundError if there is none."""

    def has(self, name: str) -> bool:
        """Return whether the object exists."""

    def names(self) -> list[str]:
        """Return the names of all objects."""

    def abort_uploads(self, part: str) -> None:
        """Abort the uploads that were cut off, of objects with `part` in their names."""

    def delete(self, name: str) -> None:
        """Delete an object, if it is there."""


@dataclass(frozen=True, slots=True)
class ObjectStore(CheckpointStore):
    """Checkpoints as objects. Use `open_store`, which checks that the folder can be written."""

    folder: ObjectFolder

    @property
    def url(self) -> str:
        return self.folder.url

    def check(self) -> None:
        self.folder.check()

    def save(self, trial: int, iterations: int, payload: Payload) -> CheckpointRef:
        name = file_name(trial, iterations, self.run)
        if isinstance(payload, bytes):
            return reference(self.folder.put(name, payload), payload)
        try:
            with Scratch() as scratch:
                draft = scratch / name
                digest = payload(draft)
                return reference_to(send(self.folder, name, draft), draft, digest)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of trial {trial} after {counted(iterations, 'iteration')} could not be written to "
                f"this machine, from where it goes to {self.url}: {error.strerror or error}; make room on the disk of "
                "its temporary files, or set TMPDIR"
            ) from error

    def _copy(self, place: str, file: BufferedIOBase) -> None:
        try:
            self.folder.fetch(place, file)
        except FileNotFoundError as error:
            raise CheckpointError(f"the checkpoint {error} is missing") from error

    def _delete(self, ref: CheckpointRef) -> None:
        self.folder.delete(self._place(ref))

    def _remove_others(self, part: str, kept: Collection[str]) -> None:
        for name in self.folder.names():
            if part in name and name not in kept:
                self.folder.delete(name)
        self.folder.abort_uploads(part)

    def holds(self, ref: CheckpointRef) -> bool:
        return self.folder.has(self._place(ref))

    def read_mark(self) -> str:
        try:
            return self.folder.get(MARK)[:LONGEST_MARK].decode("utf-8", "replace").strip()
        except FileNotFoundError:
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


_BLOCK_BYTES = 2**23
"""Read at once; the drivers' own blocks are up to 50 MB."""
_LONGEST_CAUSE = 300
_UPLOADS = {"gs": {"chunksize": _BLOCK_BYTES}, "gcs": {"chunksize": _BLOCK_BYTES}}
"""Words for the drivers whose uploads hold much in memory."""
_ACCESS = {
    "gs": "log in with `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
    "az": "set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "hf": "set HF_TOKEN to a token that may write",
}


@dataclass(frozen=True, slots=True)
class FsspecFolder:
    """A folder that fsspec opens: of Google Cloud Storage, Azure or Hugging Face.

    Each process opens its own driver, with the credentials of its environment.
    """

    url: str
    """Without a slash at its end."""

    def check(self) -> None:
        name = f".probe-{uuid.uuid4().hex}"
        try:
            self.put(name, b"probe")
            self.delete(name)
        except CheckpointError as error:
            scheme = self.url.partition("://")[0]
            access = _ACCESS.get({"gcs": "gs", "abfs": "az", "abfss": "az"}.get(scheme, scheme), "give access")
            why = str(error).partition(": ")[2]
            raise InputError(
                f"checkpoints cannot be written to {self.url}: {why}; check that it exists, and {access}"
            ) from error

    def put(self, name: str, payload: bytes | Path) -> str:
        with self._failing(name, "written") as (files, path):
            if isinstance(payload, bytes):
                files.pipe_file(path, payload)
            else:
                files.put_file(str(payload), path, **_UPLOADS.get(self.url.partition("://")[0], {}))
        return f"{self.url}/{name}"

    def get(self, name: str) -> bytes:
        with self._failing(name, "read", missing=True) as (files, path):
            return bytes(files.cat_file(path))

    def fetch(self, name: str, file: BufferedIOBase) -> None:
        with (
            self._failing(name, "read", missing=True) as (files, path),
            files.open(path, "rb", block_size=_BLOCK_BYTES) as source,
        ):
            shutil.copyfileobj(source, file, _BLOCK_BYTES)

    def has(self, name: str) -> bool:
        try:
            with self._failing(name, "checked", missing=True) as (files, path):
                return bool(files.info(path))
        except FileNotFoundError:
            return False

    def names(self) -> list[str]:
        try:
            with self._failing("", "listed", missing=True) as (files, path):
                entries = files.ls(path, detail=True)
        except FileNotFoundError:
            return []
        return [entry["name"].rpartition("/")[2] for entry in entries if entry["type"] == "file"]

    def abort_uploads(self, part: str) -> None:
        """Do nothing: these stores drop uploads that were cut off by themselves."""

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError), self._failing(name, "deleted", missing=True) as (files, path):
            files.rm_file(path)

    @contextmanager
    def _failing(self, name: str, done: str, *, missing: bool = False) -> Iterator[tuple[Any, str]]:
        """Yield the driver and the object's path, and turn all errors into CheckpointError.

        With `missing`, that an object is not there is a FileNotFoundError.
        """
        try:
            import fsspec

            files, path = fsspec.url_to_fs(f"{self.url}/{name}" if name else self.url)
            files.invalidate_cache()  # other processes write there too
            yield files, path
        except Exception as error:
            if missing and isinstance(error, FileNotFoundError):
                raise FileNotFoundError(f"{self.url}/{name}") from error
            cause = " ".join(str(error).split())[:_LONGEST_CAUSE]
            raise CheckpointError(f"{self.url}/{name} could not be {done}: {type(error).__name__}: {cause}") from error
