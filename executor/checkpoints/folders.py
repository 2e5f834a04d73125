"""A checkpoint that is a folder: one tar with its files, and at its end a manifest of them by size.

Files are read and written by path, a piece at a time. An archive is written whole or not at all, and so is the folder
that it is unpacked to. Its members are files and nothing else: the manifest lists the folders, and the links that lead
to something in the folder. Other links are followed, and stored as what they lead to.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import stat
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rubberband.errors import CheckpointError
from rubberband.executor.checkpoints.scratch import Scratch
from rubberband.units import shown

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

FORMAT = 1
"""Version of the checkpoints' layout."""
MANIFEST = "rubberband-manifest.json"
_FILES = "files/"
_CHUNK_BYTES = 2**20
_LISTED = ("format", "folders", "links", "files", "inherited")
"""Keys of a manifest that describe its own archive."""
_TRIES = 5
_PAUSE_S = 0.05
"""After the first try; twice as long after each further one."""
Sources = Mapping[str, bytes | Path]
"""Path in the archive -> content of a file, or a folder; empty: the folder is the whole archive."""
Signature = tuple[tuple[str, int, int, int], ...]
_Read = TypeVar("_Read")


class Rewritten(CheckpointError):
    """A checkpoint is not kept, as its program has gone on to the next one; no trial has failed."""


class _Changed(Exception):
    """A folder changed while it was read; its message names the file."""


@dataclass(frozen=True, slots=True)
class _Entry:
    path: str
    """Below the folder, with `/`."""
    place: str
    status: os.stat_result
    link: str | None = None
    """Relative target of a link to something in the folder."""

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.status.st_mode)


class FolderCheckpoint:
    """The files of a folder, which are on this machine's disk; `result.load_best(train)` returns it."""

    __slots__ = ("__weakref__", "_owner", "_verify", "path")

    def __init__(self, path: Path, owner: object, verify: Callable[[], None] = lambda: None) -> None:
        """`owner`: keeps the folder as long as it lives; `verify`: raises Rewritten if its files have changed."""
        self.path = path
        """Folder of the files, which goes with this object. They must not be changed."""
        self._owner, self._verify = owner, verify

    def verify(self) -> None:
        """Raise Rewritten if a file has changed since the checkpoint was made."""
        self._verify()

    @classmethod
    def from_directory(cls, folder: str | Path) -> FolderCheckpoint:
        """Copy all files of a folder. Raises OSError, and CheckpointError for a link to nothing."""
        return cls._made(lambda there: _copy(Path(folder), there))

    @classmethod
    def taking(cls, folder: Path) -> FolderCheckpoint:
        """Move a folder, which is no longer there then. Raises OSError."""
        return cls._made(lambda there: shutil.move(folder, there))

    @classmethod
    def from_archive(cls, archive: Path) -> FolderCheckpoint:
        """Unpack the folder of a program. Raises CheckpointError."""
        return cls._made(lambda there: unpack(archive, there))

    @classmethod
    def _made(cls, make: Callable[[Path], object]) -> FolderCheckpoint:
        scratch = Scratch()
        make(scratch.path / "files")
        return cls(scratch.path / "files", scratch)

    def to_directory(self, folder: str | Path) -> Path:
        """Write the files into a folder, which is made if it is not there; return it. Raises OSError."""
        shutil.copytree(self.path, folder, dirs_exist_ok=True)
        return Path(folder)

    # In the checkpoint of a trial its files are kept by path. Another library that pickles it gets their content.

    def __getstate__(self) -> list[Mapping[str, bytes]]:
        return [{entry.path: Path(entry.place).read_bytes() for entry in walk(str(self.path)) if not entry.is_folder}]

    def __setstate__(self, state: list[Mapping[str, bytes]]) -> None:
        scratch = Scratch()
        self.path, self._owner, self._verify = scratch.path / "files", scratch, lambda: None
        self.path.mkdir()
        for name, content in state[0].items():
            _require_inside(name)
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self.path / name).write_bytes(content)


def _copy(folder: Path, to: Path) -> None:
    """Copy a folder; a link is what it leads to."""
    to.mkdir()
    for entry in walk(str(folder)):
        if entry.is_folder:
            (to / entry.path).mkdir()
        else:
            shutil.copy2(entry.place, to / entry.path)


def pack(folder: Path, to: Path, *, iterations: int, metrics: Mapping[str, float], **content: Any) -> str:
    """Write the folder of a program into an archive, with `content` in its manifest too; return its SHA-256.

    Raises CheckpointError, and leaves none then.
    """
    return write_archive({"": folder}, to, kind="program", iterations=iterations, metrics=dict(metrics), **content)


def write_archive(sources: Sources, to: Path, **content: Any) -> str:
    """Write files and folders into an archive, with `content` in its manifest; return its SHA-256.

    A folder that changes meanwhile is read again, a few times. Raises CheckpointError, and leaves none then.
    """
    try:
        folders = [path for path in sources.values() if isinstance(path, Path)]
        return settled(folders, lambda: _write(sources, to, content))
    except BaseException:
        _remove(to)
        raise


def settled(folders: Sequence[Path], read: Callable[[], _Read]) -> _Read:
    """Return what `read` makes of folders that stay as they are meanwhile. It is called again, a few times.

    Raises CheckpointError.
    """
    changed = ""
    for number in range(_TRIES):
        if number:
            time.sleep(_PAUSE_S * 2 ** (number - 1))
        try:
            before = {path: signature(path) for path in folders}
            made = read()
            for path, was in before.items():
                if (now := signature(path)) != was:
                    raise _Changed(str(path / sorted(set(now) ^ set(was))[0][0]))
            return made
        except (FileNotFoundError, _Changed) as error:
            changed = str(getattr(error, "filename", None) or error)
        except OSError as error:
            raise CheckpointError(
                f"{error.filename or 'its folder'} cannot be packed: {error.strerror or error}; the checkpoint is not "
                "kept"
            ) from error
    raise CheckpointError(
        f"{changed} changes while the checkpoint is packed; let the program finish its files before it reports"
    )


def join(first: bytes | Path, parts: Sequence[bytes | Path], to: Path) -> None:
    """Write one archive of a checkpoint in parts. Raises CheckpointError, and OSError for a full disk."""
    with Scratch() as scratch:
        manifest = unpack(first, scratch / "files", parts)
        content = {name: value for name, value in manifest.items() if name not in _LISTED}
        write_archive({"": scratch / "files"}, to, **content)


def unpack(payload: bytes | Path, folder: Path, parts: Sequence[bytes | Path] = ()) -> dict[str, Any]:
    """Write the files of an archive into a folder, which is empty or not there; return the manifest.

    `parts`: archives of the other machines of its gang. A file that a machine has written counts before one with which
    it started; the manifest's `inherited` are the latter of the first machine, whose files count first.

    Raises CheckpointError for an archive that is cut off or damaged, or has anything but files and folders in
    `folder`, which is left as it was then.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}.{os.urandom(4).hex()}.new")
    try:
        draft.mkdir()
        manifest = _extracted(payload, draft)
        written = {file["path"] for file in manifest["files"]} - set(manifest.get("inherited", ()))
        for part in parts:
            _add_part(part, draft, written)
        os.rename(draft, folder)
    except BaseException as error:
        shutil.rmtree(draft, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"the checkpoint could not be unpacked to {folder}: {error.strerror or error}; make room there, or "
                "give an empty folder"
            ) from error
        raise
    return manifest


def read_manifest(payload: bytes | Path) -> dict[str, Any]:
    """Return the manifest of an archive. Raises CheckpointError."""
    with _opened(payload) as archive:
        return _manifest(archive)


def members(payload: bytes | Path) -> dict[str, tuple[int, int]]:
    """Return path of each file in an archive -> its first byte in there, and its size. Raises CheckpointError."""
    with _opened(payload) as archive:
        _manifest(archive)
        return {
            info.name.removeprefix(_FILES): (info.offset_data, info.size)
            for info in archive.getmembers()
            if info.name.startswith(_FILES)
        }


def is_archive(payload: bytes | Path) -> bool:
    """Whether a checkpoint is an archive; those of trials without folders are pickled. Raises OSError."""
    if isinstance(payload, Path):
        with open(payload, "rb") as file:
            payload = file.read(tarfile.BLOCKSIZE)
    return payload[257:262] == b"ustar"


def signature(folder: Path) -> Signature:
    """Return path, inode, size and time of all in a folder. Raises OSError, or CheckpointError as `pack` does."""
    return tuple(
        (entry.path, entry.status.st_ino, 0 if entry.is_folder else entry.status.st_size, entry.status.st_mtime_ns)
        for entry in walk(str(folder))
    )


def walk(
    folder: str, below: str = "", parents: tuple[tuple[int, int], ...] = (), *, top: str | None = None
) -> Iterator[_Entry]:
    """Yield the files and folders in a folder, in order; a link is what it leads to.

    `top`: links to what is in this folder are yielded as links.
    """
    status = os.stat(folder)
    identity = (status.st_dev, status.st_ino)
    if identity in parents:
        raise CheckpointError(f"{folder} is a link to a folder that has it, so it cannot be packed; remove it")
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries)
    for name in names:
        place, path = os.path.join(folder, name), f"{below}{name}"
        try:
            status = os.stat(place)
        except FileNotFoundError:
            if os.path.islink(place):
                raise CheckpointError(
                    f"{place} is a link to {os.readlink(place)}, which is not there; remove it"
                ) from None
            raise
        if top is not None and os.path.islink(place) and (link := _link_within(place, top)) is not None:
            yield _Entry(path, place, os.lstat(place), link)
        elif stat.S_ISDIR(status.st_mode):
            yield _Entry(path, place, status)
            yield from walk(place, f"{path}/", (*parents, identity), top=top)
        elif stat.S_ISREG(status.st_mode):
            yield _Entry(path, place, status)
        else:
            raise CheckpointError(f"{place} is neither a file nor a folder, so it cannot be packed; remove it")


def _link_within(place: str, top: str) -> str | None:
    """Return the relative target of a link, if that is in the folder `top`, and does not have the link."""
    here, target, top = os.path.realpath(os.path.dirname(place)), os.path.realpath(place), os.path.realpath(top)
    if not target.startswith(f"{top}/") or f"{here}/".startswith(f"{target}/"):
        return None
    return os.path.relpath(target, here)


def _write(sources: Sources, to: Path, content: Mapping[str, Any]) -> str:
    files: list[dict[str, Any]] = []
    folders: list[str] = []
    links: list[dict[str, str]] = []
    make: Callable[..., tarfile.TarFile] = tarfile.open
    with _Digested(to) as file, make(mode="w", fileobj=file, copybufsize=_CHUNK_BYTES) as archive:
        for name, source in sources.items():
            if isinstance(source, bytes):
                files.append({"path": name, "size": len(source)})
                archive.addfile(_member(name, len(source), time.time()), io.BytesIO(source))
                continue
            if name:
                folders.append(name)
            for entry in walk(str(source), f"{name}/" if name else "", top=str(source)):
                if entry.link is not None:
                    links.append({"path": entry.path, "target": entry.link})
                elif entry.is_folder:
                    folders.append(entry.path)
                else:
                    files.append(_add(archive, entry))
        listed = {"folders": folders, "links": links, "files": files}
        manifest = json.dumps({"format": FORMAT, **content, **listed}).encode()
        info = tarfile.TarInfo(MANIFEST)
        info.size, info.mtime = len(manifest), time.time()
        archive.addfile(info, io.BytesIO(manifest))
    return file.digest.hexdigest()


def _add(archive: tarfile.TarFile, entry: _Entry) -> dict[str, Any]:
    """Add a file; return its entry in the manifest."""
    with open(entry.place, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        info = _member(entry.path, size, entry.status.st_mtime)
        info.mode = stat.S_IMODE(entry.status.st_mode)
        try:
            archive.addfile(info, file)
        except OSError as error:
            if error.errno is None:  # it became shorter
                raise _Changed(entry.place) from error
            raise
    return {"path": entry.path, "size": size}


def _member(path: str, size_bytes: int, modified_at: float) -> tarfile.TarInfo:
    info = tarfile.TarInfo(f"{_FILES}{path}")
    info.size, info.mtime = size_bytes, modified_at
    return info


class _Digested(io.BufferedWriter):
    """A new file, and the digest of what is written."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"))
        self.digest = hashlib.sha256()

    def write(self, content: ReadableBuffer) -> int:
        self.digest.update(content)
        return super().write(content)


@contextlib.contextmanager
def _opened(payload: bytes | Path) -> Iterator[tarfile.TarFile]:
    """Yield an archive to read. Raises CheckpointError for what it cannot read."""
    try:
        with (
            open(payload, "rb") if isinstance(payload, Path) else io.BytesIO(payload) as file,
            tarfile.open(fileobj=file, mode="r:") as archive,
        ):
            yield archive
    except (tarfile.TarError, ValueError, LookupError, TypeError, OverflowError) as error:
        raise CheckpointError(f"the checkpoint is damaged: {type(error).__name__}: {error}") from error


def _manifest(archive: tarfile.TarFile) -> dict[str, Any]:
    *_, last = (None, *archive)
    if last is None or last.name != MANIFEST or not last.isreg():
        raise CheckpointError("the checkpoint is cut off: its manifest, which is its last file, is missing")
    file = archive.extractfile(last)
    assert file is not None
    manifest = json.load(file)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        kind = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise CheckpointError(f"the checkpoint has format {kind}; this version reads format {FORMAT}")
    entries = [*manifest["files"], *manifest["links"]]
    for path in (*manifest["folders"], *(entry["path"] for entry in entries)):
        _require_inside(path)
    return manifest


def _require_inside(path: str) -> None:
    if "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise CheckpointError(f"the checkpoint has a file {shown(path)}, which would leave its folder")


def _extract(archive: tarfile.TarFile, manifest: Mapping[str, Any], draft: Path) -> None:
    """Write the files that the manifest lists, and no others."""
    wanted = {file["path"]: file for file in manifest["files"]}
    for path in manifest["folders"]:
        (draft / path).mkdir(parents=True, exist_ok=True)
    for member in archive:
        if member.name == MANIFEST:
            continue
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            raise CheckpointError(
                f"the checkpoint has {shown(member.name)}, which is no file: it is a link or a device"
            )
        path = member.name.removeprefix(_FILES)
        file = wanted.pop(path, None) if member.name.startswith(_FILES) else None
        if file is None:
            _require_inside(path)
            raise CheckpointError(f"the checkpoint has a file {shown(member.name)}, which its manifest does not list")
        _extract_file(archive, member, file, draft / path)
    _link(manifest["links"], draft)
    if wanted:
        raise CheckpointError(f"the checkpoint lacks the file {shown(next(iter(wanted)))}, which its manifest lists")


def _extracted(payload: bytes | Path, draft: Path) -> dict[str, Any]:
    with _opened(payload) as archive:
        manifest = _manifest(archive)
        _extract(archive, manifest, draft)
    return manifest


def _add_part(part: bytes | Path, draft: Path, written: set[str]) -> None:
    """Add the files of another machine's archive, but those that are `written`."""
    there = draft.with_name(f"{draft.name}.part")
    there.mkdir()
    try:
        manifest = _extracted(part, there)
        for path in manifest["folders"]:
            (draft / path).mkdir(parents=True, exist_ok=True)
        for path in (entry["path"] for entry in (*manifest["files"], *manifest["links"])):
            if path not in written:
                (draft / path).parent.mkdir(parents=True, exist_ok=True)
                os.replace(there / path, draft / path)
                written.add(path)
    finally:
        shutil.rmtree(there, ignore_errors=True)


def _link(links: Sequence[Mapping[str, str]], draft: Path) -> None:
    """Make the links, of which none may lead out of the folder."""
    top = os.path.realpath(draft)
    for link in links:
        place = draft / link["path"]
        place.parent.mkdir(parents=True, exist_ok=True)
        os.symlink(link["target"], place)
        # Before the next one, which may be below it.
        if os.path.isabs(link["target"]) or not os.path.realpath(place).startswith(f"{top}/"):
            raise CheckpointError(
                f"the checkpoint has a link {shown(link['path'])} to {shown(link['target'])}, which is not in its "
                "folder"
            )


def _extract_file(archive: tarfile.TarFile, member: tarfile.TarInfo, file: Mapping[str, Any], to: Path) -> None:
    source = archive.extractfile(member)
    assert source is not None
    if member.size != file["size"]:
        raise CheckpointError(
            f"the checkpoint's file {shown(file['path'])} has {member.size} bytes instead of {file['size']}"
        )
    to.parent.mkdir(parents=True, exist_ok=True)
    with open(to, "xb") as written:
        shutil.copyfileobj(source, written, _CHUNK_BYTES)
    if member.mode & stat.S_IXUSR:
        mode = to.stat().st_mode
        to.chmod(mode | (mode & 0o444) >> 2)
    os.utime(to, (member.mtime, member.mtime))


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
