"""One instance of the local cloud: a small process that runs a Ray node and ends it, as a machine with a timer would.

It is run by path, imports nothing but the standard library, and so costs little memory and no start-up time. It ends
its whole process tree when it is told to (SIGTERM, a release marker), when its Ray node ends, and when the driver has
not put off the instant that is the lease file's modification time: that is what guards against a driver that was
killed with -9.

Who holds the lock of a record, and only it, writes the record; an instance holds its own for life. So a lock that can
be taken tells that no such process lives, whatever process ids say.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

EXPERIMENT_TAG = "RUBBERBAND_EXPERIMENT"
DIRECTORY_TAG = "RUBBERBAND_DIRECTORY"
INSTANCE_TAG = "RUBBERBAND_INSTANCE"

_POLL_S = 0.25
_KILL_S = 5.0
_PR_SET_PDEATHSIG = 1
_PASSING = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Goes on while the machine sleeps, and is not moved when its clock is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is written down of an instance (or of the head) before it is asked for, and until long after its end."""

    name: str
    experiment: str
    directory: str
    """The provider's directory: with `name`, the tag of every process of this instance."""
    command: tuple[str, ...]
    temp_dir: str
    """Ray's; removed at the end."""
    devices: tuple[str, ...]
    """Ids of the real GPUs that belong to it; empty where GPUs are logical."""
    address: str
    """Of the head that it joins (or is)."""
    requested_at: float
    lease_until: float | None = None
    """The lease when it was asked for; its first one is as long as that was ahead then."""
    first_lease_s: float | None = None
    """How long that is at most; None: not said."""
    pid: int | None = None
    running_at: float | None = None
    ended_at: float | None = None
    reason: str = ""


def elapsed_s() -> float:
    """Seconds since this machine booted, its sleep included."""
    return time.clock_gettime(_PASSING)


def load(path: Path) -> Record:
    """The record at `path`."""
    values: dict[str, Any] = json.loads(path.read_text())
    values["command"] = tuple(values["command"])
    values["devices"] = tuple(values["devices"])
    return Record(**values)


def save(path: Path, record: Record, at: float) -> None:
    """Write `record` to `path`, as of the instant `at`: a reader sees the old one or the new one."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".record-")
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(record), file)
            file.flush()
            os.fsync(file.fileno())
        os.utime(temporary, (at, at))  # a sign of life, on the experiment's clock
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def lock(path: Path, wait_s: float = 0.0) -> Iterator[bool]:
    """Hold the lock of `path` while in the block, or yield False if it is not free within `wait_s`."""
    with open(path.with_suffix(".lock"), "a") as file:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    yield False
                    return
                time.sleep(0.01)
            else:
                yield True
                return


def release_marker(path: Path) -> Path:
    """The file whose existence tells the instance of the record at `path` to end; it holds the reason."""
    return path.with_suffix(".release")


def tagged(directory: str, name: str | None = None) -> list[Any]:
    """The processes (psutil.Process) of instance `name`, or of all instances, of the provider at `directory`."""
    import psutil  # here, so that an instance carries it only when it ends

    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            environment = process.environ()
            if environment.get(DIRECTORY_TAG) == directory and name in (None, environment.get(INSTANCE_TAG)):
                found.append(process)
    return [process for process in found if process.pid != os.getpid()]


def end_tagged(directory: str, name: str) -> list[int]:
    """Kill every process of an instance, the calling one excepted, and return their ids once they are gone."""
    ended: set[int] = set()
    deadline = time.monotonic() + _KILL_S
    while (processes := tagged(directory, name)) and time.monotonic() < deadline:
        for process in processes:
            ended.add(process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.02)  # a process that is gone, or a zombie, shows no environment
    return sorted(ended)


def finish(path: Path, record: Record, *, ended_at: Callable[[], float], reason: str) -> Record:
    """End what is left of the instance, write its last record, and return it. The caller holds the lock.

    `ended_at` is asked once nothing runs any more. A record that cannot be written (a full disk) is left to who looks
    next.
    """
    end_tagged(record.directory, record.name)
    shutil.rmtree(record.temp_dir, ignore_errors=True)  # first: on a full disk it makes room for the record
    at = ended_at()
    final = replace(record, ended_at=at, reason=reason)
    with contextlib.suppress(OSError):
        save(path, final, at)
    return final


def _die_with_parent() -> None:
    """Let Linux kill this process when its parent ends, however that happens; elsewhere the tags must do."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _lease_ends_at(record: Record, lease: Path) -> float:
    """The instant of the lease file; as long as it is what it was at the launch, counted from when this began to run.

    So a start that took long takes nothing off the first lease.
    """
    until = lease.stat().st_mtime
    if until != record.lease_until or record.running_at is None:
        return until
    first_lease_s = until - record.requested_at
    if record.first_lease_s is not None:
        first_lease_s = min(first_lease_s, record.first_lease_s)
    return record.running_at + first_lease_s


def _watch(
    node: subprocess.Popen[bytes],
    path: Path,
    record: Record,
    lease: Path,
    lease_s: float,
    stop: threading.Event,
    clock: Callable[[], float],
) -> str:
    """Return the reason to end ('': released) as soon as there is one."""
    marker = release_marker(path)
    looked_at, awake_since = clock(), float("-inf")
    while True:
        now = clock()
        if now - looked_at > lease_s / 2:  # this machine slept, and the driver with it
            awake_since = now
        looked_at = now
        if marker.exists():
            return marker.read_text()
        if stop.is_set():
            return "terminated by a signal"
        if node.poll() is not None:
            return f"its Ray node ended (exit status {node.returncode}); see {path.with_suffix('.log')}"
        if now > max(_lease_ends_at(record, lease), awake_since + lease_s):
            return "lease expired"
        os.utime(path, (now, now))  # a sign of life: if this process is killed, the instant of its end
        stop.wait(_POLL_S)


def run(path: Path, lease: Path, lease_s: float, booted_at: float) -> None:
    """Be the instance recorded at `path`, from here to its end; on the clock by which this machine booted then."""

    def clock() -> float:
        return booted_at + elapsed_s()

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with lock(path, wait_s=1.0) as held:
        if not held:
            return
        record = load(path)
        if record.ended_at is not None:
            return
        running_at = clock()
        record = replace(record, pid=os.getpid(), running_at=running_at)
        save(path, record, running_at)
        with open(path.with_suffix(".log"), "ab") as log:
            node = subprocess.Popen(
                record.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        try:
            reason = _watch(node, path, record, lease, lease_s, stop, clock)
        except OSError as error:
            reason = f"its directory is gone ({error})"
        node.kill()
        finish(path, record, ended_at=clock, reason=reason)


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
