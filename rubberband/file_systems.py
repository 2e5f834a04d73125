"""The file system of a home: its locks, whether other machines share it, and access of other users.

Everything here is decided by the files and mounts of this machine; nothing is remembered.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import tempfile
import time
from pathlib import Path
from typing import IO

from rubberband.atomic import make_directories
from rubberband.errors import InputError

SHARED, EXCLUSIVE = fcntl.LOCK_SH, fcntl.LOCK_EX
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
            fcntl.flock(file, fcntl.LOCK_UN)
        if time.monotonic() - begun_at >= (_GLANCE_S if is_shared else wait_s):
            return False
        time.sleep(0.01)
    return True


def require_home(home: Path) -> list[str]:
    """Make the home, for this user alone, unless it is there, and return remarks on it, a line each.

    Raises InputError if it cannot be made, or if its file system has no locks.
    """
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
    kind = file_system(path)
    return kind in _REMOTE or (kind.startswith("fuse.") and kind.removeprefix("fuse.") not in _LOCAL_FUSE)


def file_system(path: Path) -> str:
    """Return the type of the file system that has `path`, or will have it, as Linux names it; empty if not known."""
    try:
        mounts = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    place, found, longest = path.resolve(), "", -1
    for line in mounts:
        before, _, after = line.partition(" - ")
        at = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), before.split(" ")[4]))
        if len(at.parts) >= longest and place.is_relative_to(at):
            found, longest = after.split(" ")[0], len(at.parts)
    return found


def _lockless(place: str, error: OSError) -> str:
    return (
        f"the file system of {place} has no file locks ({error.strerror}), which keep two drivers off one run; set "
        "RUBBERBAND_HOME to a folder on a local disk"
    )
