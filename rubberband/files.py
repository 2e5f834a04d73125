"""Files that processes share: written whole, locked, and what the file system of a home can do.

A reader finds the old content or the new one, also after a crash.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from rubberband.errors import InputError


def write_atomically(
    path: Path, data: bytes, *, durable: bool, mode: int = 0o600, modified_at: float | None = None
) -> None:
    """Write the file at `path` by way of a draft beside it.

    With `durable` the file and its name survive a power cut once this returns. `mode` is that of a new file, less the
    umask; by default it is this user's alone. `modified_at` (Unix time) is its time of modification; None: now. Raises
    OSError and leaves no draft.
    """
    with new_file(path, durable=durable) as draft:
        write_new(draft, data, durable=False, mode=mode)
        if modified_at is not None:
            os.utime(draft, (modified_at, modified_at))


@contextmanager
def new_file(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a draft beside `path` to write; afterwards it is the file at `path`, and `durable`.

    Raises OSError. No draft is left after an error.
    """
    draft = path.with_name(f".{path.name}.{os.urandom(4).hex()}.new")
    try:
        yield draft
        if durable:
            _sync(draft, os.O_RDWR)
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def write_new(path: Path, data: bytes, *, durable: bool, mode: int = 0o600) -> None:
    """Write a new file; with `durable` its content, not its name, survives a power cut once this returns.

    Raises OSError; a part of the file may remain.
    """
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def private(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file for `open(..., opener=private)`. A new one is this user's alone."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def make_directories(path: Path, mode: int = 0o700) -> None:
    """Make a directory and its parents, unless they are there; new ones survive a power cut once this returns.

    `mode` is that of new ones, less the umask: by default they are this user's alone. Raises OSError.
    """
    if not path.is_dir():
        make_directories(path.parent, mode)
        path.mkdir(mode, exist_ok=True)
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a power cut."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


SHARED, EXCLUSIVE = 1, 2
"""LOCK_SH and LOCK_EX of fcntl, which is imported where files are locked: an estimate needs none."""
_GLANCE_S = 20.0
"""The longest wait for a shared lock: it is held for an instant, but its process may be paused right then."""
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""NFS without its lock service; Lustre mounted without `-o flock`, and others."""
_MOUNTS = Path("/proc/self/mountinfo")
_REMOTE = {
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "fhgfs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs",
    "nfs4", "ocfs2", "orangefs", "panfs", "prl_fs", "pvfs2", "quobyte", "smb3", "smbfs", "vboxsf", "virtiofs", "weka",
    "wekafs",
}  # fmt: skip
"""File systems of other machines, or of the host of a virtual one (WSL, Docker Desktop), which share no memory."""
_LOCAL_FUSE = {"fuse-overlayfs", "ntfs-3g", "mergerfs", "bindfs", "lxcfs", "gocryptfs", "encfs", "cryfs"}
"""File systems in user space that are of this machine; any other one, such as sshfs, is taken for remote."""


def try_lock(file: IO[str] | IO[bytes] | int, kind: int) -> bool:
    """Lock (flock) `file` until it is closed; return False if another process holds a lock that excludes this one.

    Raises InputError if its file system has no locks, OSError for anything else.
    """
    import fcntl

    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        number = file if isinstance(file, int) else file.fileno()
        raise InputError(_lockless(os.readlink(f"/proc/self/fd/{number}"), error)) from None
    return True


def locked(file: IO[str] | int, kind: int, wait_s: float = 0.0) -> bool:
    """Lock `file` (or the file of a descriptor) until it is closed.

    Returns False if another process holds it exclusively for longer than `wait_s`, or shares it for very long. Raises
    InputError if its file system has no locks.
    """
    begun_at = time.monotonic()
    while not try_lock(file, kind):
        is_shared = try_lock(file, SHARED)
        if is_shared:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_UN)
        if time.monotonic() - begun_at >= (_GLANCE_S if is_shared else wait_s):
            return False
        time.sleep(0.01)
    return True


def require_home(home: Path) -> list[str]:
    """Make the home, for this user alone, unless it is there, and return remarks on it, a line each.

    Raises InputError if it cannot be made, or if its file system has no locks.
    """
    import fcntl

    try:
        make_directories(home)
        with tempfile.TemporaryFile(dir=home) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise InputError(_lockless(str(home), error)) from None
        reason = error.strerror or str(error)
        raise InputError(f"{home} cannot be written ({reason}); set RUBBERBAND_HOME to another folder") from None
    return home_notes(home)


def home_notes(home: Path) -> list[str]:
    """Return remarks on a home, a line each: on its file system, and on other users who may read it."""
    notes = []
    if is_remote(home):
        notes.append(
            f"home: {home} is on a network file system ({file_system(home)}); journals are kept without a write-ahead "
            "log there, which is slower. Set RUBBERBAND_HOME to a folder on a local disk"
        )
    try:
        mode = stat.S_IMODE(home.stat().st_mode)
    except OSError:
        return notes
    if mode & 0o077:
        notes.append(
            f"home: other users can read {home} (mode {mode:04o}), with its configurations, logs and checkpoints; run "
            f"`chmod 700 {home}`"
        )
    return notes


def is_remote(path: Path) -> bool:
    """Whether other machines may have the file system of `path` mounted: memory is not shared with them."""
    kind, _, driver = file_system(path).partition(".")
    return kind in _REMOTE or (kind == "fuse" and driver not in _LOCAL_FUSE)


def file_system(path: Path) -> str:
    """Return the type of the file system that has `path`, or will have it, as Linux names it; empty if not known."""
    try:
        mounts = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    place, kind, longest = path.resolve(), "", -1
    for line in mounts:
        before, _, after = line.partition(" - ")
        mount = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), before.split(" ")[4]))
        if len(mount.parts) >= longest and place.is_relative_to(mount):
            kind, longest = after.split(" ")[0], len(mount.parts)
    return kind


def _lockless(place: str, error: OSError) -> str:
    return (
        f"the file system of {place} has no file locks ({error.strerror}), which keep two drivers off one run; set "
        "RUBBERBAND_HOME to a folder on a local disk"
    )
