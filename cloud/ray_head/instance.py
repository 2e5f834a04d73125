"""One instance of the local cloud: a small process that runs a Ray node and ends it, as a machine with a timer would.

It is run by path and imports little beside the standard library, so it costs little memory and start-up time. It ends
its whole process tree on request (SIGTERM, a release marker), when its Ray node ends, and when its lease expires, which
is the modification time of the lease file. The lease protects against a driver that was killed with -9.

No more nodes start at once on this machine than it has cores: an instance waits for its turn. It runs, and is metered,
from when its node has joined the cluster.

Only the holder of a record's lock writes the record, and an instance holds its own lock for life. So a free lock means
that no such process lives, whatever process ids say.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from rubberband.cloud.clock import ExperimentClock
from rubberband.errors import InputError, ProviderError
from rubberband.files import EXCLUSIVE, locked, private, try_lock, write_atomically

EXPERIMENT_TAG = "RUBBERBAND_EXPERIMENT"
DIRECTORY_TAG = "RUBBERBAND_DIRECTORY"
INSTANCE_TAG = "RUBBERBAND_INSTANCE"

STARTED = "Ray runtime started."
"""Line that `ray start` prints once its node has joined the cluster."""
LONGEST_START_S = 1800.0
"""A node that has not joined by then never will, however slow the machine is."""

_START_S = 180.0
"""Longest start of a node on an idle machine, where it takes 5 to 9 s."""
_POLL_S = 0.25
_KILL_S = 5.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """File of an instance (or of the head), written before its start and kept after its end."""

    name: str
    experiment: str
    directory: str
    """The provider's directory: with `name`, the tag of every process of this instance."""
    command: tuple[str, ...]
    temp_dir: str
    """Ray's; removed at the end."""
    devices: tuple[str, ...]
    """Ids of its real GPUs; empty where GPUs are logical."""
    address: str
    """Address of the head that it joins (or is)."""
    requested_at: float
    lease_until: float | None = None
    """End of the lease at the request; the first lease is as long as that was ahead."""
    first_lease_s: float | None = None
    """Limit of that length; None: no limit."""
    pid: int | None = None
    began_at: float | None = None
    """Time at which its turn to start came."""
    running_at: float | None = None
    """Time at which its node had joined the cluster."""
    ended_at: float | None = None
    reason: str = ""


def load(path: Path) -> Record:
    """Return the record at `path`. Raises ProviderError for one of a newer version."""
    values: dict[str, Any] = json.loads(path.read_text())
    values["command"] = tuple(values["command"])
    values["devices"] = tuple(values["devices"])
    try:
        return Record(**values)
    except TypeError as error:
        raise ProviderError(
            f"{path} is no record of this version of rubberband ({error}); install the version that launched it"
        ) from None


def save(path: Path, record: Record, at: float) -> None:
    """Write `record` to `path`, as of time `at`: a reader sees the old one or the new one."""
    # The time of the file is a sign of life, on the experiment's clock.
    write_atomically(path, json.dumps(asdict(record)).encode(), durable=True, mode=0o600, modified_at=at)


@contextlib.contextmanager
def lock(path: Path, wait_s: float = 0.0) -> Iterator[bool]:
    """Hold the lock of `path` while in the block, or yield False if it is not free within `wait_s`.

    Raises InputError if its file system has no locks.
    """
    with open(path.with_suffix(".lock"), "a", opener=private) as file:
        yield locked(file, EXCLUSIVE, wait_s)


def release_marker(path: Path) -> Path:
    """Return the file whose existence makes the instance of the record at `path` end; it contains the reason."""
    return path.with_suffix(".release")


def tagged(directory: str, name: str | None = None) -> list[Any]:
    """Return the processes (psutil.Process) of instance `name`, or of all, of the provider at `directory`."""
    import psutil  # here, so that an instance loads it only when it ends

    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            environment = process.environ()
            if environment.get(DIRECTORY_TAG) == directory and name in (None, environment.get(INSTANCE_TAG)):
                processes.append(process)
    return [process for process in processes if process.pid != os.getpid()]


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
    """End the rest of the instance, write its last record, and return it. The caller holds the lock.

    `ended_at` is called once nothing runs any more. If the record cannot be written (a full disk), the next reader
    writes it.
    """
    end_tagged(record.directory, record.name)
    shutil.rmtree(record.temp_dir, ignore_errors=True)  # first: on a full disk it makes room for the record
    now = ended_at()
    final = replace(record, ended_at=now, reason=reason)
    with contextlib.suppress(OSError):
        save(path, final, now)
    return final


def _die_with_parent() -> None:
    """Let Linux kill this process when its parent ends for any reason; elsewhere its tags identify it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _lease_ends_at(record: Record, lease: Path) -> float:
    """Return the time of the lease file. Until its first renewal, the lease counts from when the instance began to run.

    So a slow start does not shorten the first lease.
    """
    until = lease.stat().st_mtime
    if until != record.lease_until:
        return until
    if record.running_at is None:
        return float("inf")
    first_lease_s = until - record.requested_at
    if record.first_lease_s is not None:
        first_lease_s = min(first_lease_s, record.first_lease_s)
    return record.running_at + first_lease_s


def cores() -> int:
    """Return the number of cores that this process may use, within its control group's quota; at least 1."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # no such file: no quota; "max": likewise
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        count = min(count, int(quota) // int(period))
    return max(1, count)


def crowding() -> float:
    """Return the number of processes per core of this machine, by the last minute's load; at least 1."""
    try:
        return max(1.0, os.getloadavg()[0] / cores())
    except OSError:
        return 1.0


def _turn(folder: Path) -> IO[str] | None:
    """Return a file that holds one of this machine's turns to start until it is closed; None while all are taken."""
    for number in range(cores()):
        file = open(folder / f"{number}.lock", "a", opener=private)  # noqa: SIM115 - it is held until the node has joined
        try:
            is_free = try_lock(file, EXCLUSIVE)
        except InputError:  # no locks there: turns only spare the machine
            is_free = True
        if is_free:
            return file
        file.close()
    return None


_SEVERE = re.compile(r"\[[^\]]* (?P<severity>[ECF]) \d+ \d+\] (?:\(\w+\) )?[\w.]+:\d+: +(?P<said>.*\S)")
_RAISED = re.compile(r"(?:[A-Za-z_][\w.]*)?(?:Error|Exception|Exit|Interrupt)\b.*")
_LOGGED = re.compile(r"\d{4}-\d\d-\d\d [^\t]*\t\w+ \S+ -- ")
_TELLING = re.compile(r"RAY_CHECK|Check failed|[Ff]ailed|[Cc]annot|[Uu]nable|[Ee]rror|exit")
_LONGEST_LINE = 200
_TAIL_BYTES = 64 * 1024


def last_words(log: Path, temp_dir: str) -> str:
    """Return the log line that best explains why a node did not start, as `process: line`; empty without one.

    A fatal error of a Ray process comes before the exception of `ray start`, which is often only a time-out.
    """
    severe: dict[str, str] = {}
    for process in ("gcs_server", "raylet"):
        for stream in ("err", "out"):
            for line in _tail(Path(temp_dir) / "session_latest" / "logs" / f"{process}.{stream}"):
                match = _SEVERE.match(line)
                if match and _TELLING.search(match["said"]):
                    rank = "E" if match["severity"] == "E" else "F"
                    severe[rank] = f"{process}: {match['said']}"
    lines = _tail(log)
    raised = [line for line in lines if _RAISED.fullmatch(line)]
    last = _LOGGED.sub("", (raised or lines or [""])[-1])
    text = severe.get("F") or severe.get("E") or (f"ray start: {last}" if last else "")
    return text if len(text) <= _LONGEST_LINE else f"{text[: _LONGEST_LINE - 1]}…"


def _tail(path: Path) -> list[str]:
    """Return the last non-empty lines of a log; none if the file is missing."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip()]


class Guard:
    """One instance from its start to its end."""

    def __init__(
        self, path: Path, record: Record, lease: Path, lease_s: float, stop: threading.Event, clock: Callable[[], float]
    ) -> None:
        self._path = path
        self._clock = clock
        self.record = record
        self._lease = lease
        self._lease_s = lease_s
        self._stop = stop
        self._log = path.with_suffix(".log")
        self._looked_at, self._awake_since = clock(), float("-inf")

    def ends(self) -> str | None:
        """Return an external reason to end ('': released); None while there is none."""
        now = self._clock()
        if now - self._looked_at > self._lease_s / 2:  # this machine was suspended, and the driver with it
            self._awake_since = now
        self._looked_at = now
        marker = release_marker(self._path)
        if marker.exists():
            return marker.read_text()
        if self._stop.is_set():
            return "terminated by a signal"
        if now > max(_lease_ends_at(self.record, self._lease), self._awake_since + self._lease_s):
            return "lease expired"  # LEASE_EXPIRED of rubberband.cloud.provider, which is not imported here
        os.utime(self._path, (now, now))  # a sign of life: if this process is killed, the time of its end
        return None

    def _note(self, record: Record, at: float) -> None:
        self.record = record
        save(self._path, record, at)

    def live(self, starts: Path) -> str:
        """Start the node in its turn, watch it, and return the reason for its end."""
        while (turn := _turn(starts)) is None:
            if (reason := self.ends()) is not None:
                return reason
            self._stop.wait(_POLL_S)
        with turn:
            began_at = self._clock()
            self._note(replace(self.record, began_at=began_at), began_at)
            with open(self._log, "ab", opener=private) as log:
                node = subprocess.Popen(
                    self.record.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=_die_with_parent,
                )
            try:
                reason = self._await_join(node)
                turn.close()
                return self.watch(node) if reason is None else reason
            finally:
                node.kill()

    def _await_join(self, node: subprocess.Popen[bytes]) -> str | None:
        """Return None once the node has joined, or why it does not. A busy machine gets more time."""
        began_at, patience_s = time.monotonic(), 0.0
        while not any(line.endswith(STARTED) for line in _tail(self._log)):
            if (reason := self.ends()) is not None:
                return reason
            if node.poll() is not None:
                text = last_words(self._log, self.record.temp_dir) or "its Ray node printed nothing"
                return f"{text} (exit status {node.returncode}; see {self._log})"
            patience_s = max(patience_s, min(_START_S * crowding(), LONGEST_START_S))
            if time.monotonic() - began_at > patience_s:
                text = last_words(self._log, self.record.temp_dir)
                limit = f"its Ray node did not join within {patience_s:.0f} s (see {self._log})"
                return f"{text}; {limit}" if text else limit
            self._stop.wait(_POLL_S)
        running_at = self._clock()
        self._note(replace(self.record, running_at=running_at), running_at)
        return None

    def watch(self, node: subprocess.Popen[bytes]) -> str:
        """Return the reason for the node's end, once there is one."""
        while (reason := self.ends()) is None:
            if node.poll() is not None:
                text = last_words(self._log, self.record.temp_dir)
                status = f"exit status {node.returncode}; see {self._log}"
                return f"its Ray node ended ({f'{text}; ' if text else ''}{status})"
            self._stop.wait(_POLL_S)
        return reason


def run(path: Path, lease: Path, lease_s: float, booted_at: float, starts: Path) -> None:
    """Run the instance recorded at `path` to its end, on the clock by which this machine booted at `booted_at`.

    `starts` is the folder of this machine's turns to start.
    """
    clock, stop = ExperimentClock(boot="", booted_at=booted_at), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with lock(path, wait_s=1.0) as held:
        if not held:
            return
        record = load(path)
        if record.ended_at is not None:
            return
        record = replace(record, pid=os.getpid())
        save(path, record, clock())
        guard = Guard(path, record, lease, lease_s, stop, clock)
        try:
            reason = guard.live(starts)
        except OSError as error:
            reason = f"its directory is gone ({error})"
        finish(path, guard.record, ended_at=clock, reason=reason)


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5]))
