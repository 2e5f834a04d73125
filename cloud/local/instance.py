"""One instance of the local cloud: a small process that runs a Ray node and ends it, as a machine with a timer would.

It is run by path, imports nothing but the standard library, and so costs little memory and no start-up time. It ends
its whole process tree when it is told to (SIGTERM, a release marker), when its Ray node ends, and when the driver has
not put off the instant that is the lease file's modification time: that is what guards against a driver that was
killed with -9.

No more nodes start at once on this machine than it has cores: an instance waits for its turn. It runs, and is metered,
from when its node has joined the cluster.

Who holds the lock of a record, and only it, writes the record; an instance holds its own for life. So a lock that can
be taken tells that no such process lives, whatever process ids say.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
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

from rubberband.atomic import write_atomically

EXPERIMENT_TAG = "RUBBERBAND_EXPERIMENT"
DIRECTORY_TAG = "RUBBERBAND_DIRECTORY"
INSTANCE_TAG = "RUBBERBAND_INSTANCE"

STARTED = "Ray runtime started."
"""What `ray start` prints once its node has joined the cluster."""
LONGEST_START_S = 1800.0
"""A node that has not joined by then never will, however slow the machine is."""

_START_S = 180.0
"""For how long a node may start on an idle machine, where it takes 5 to 9 s."""
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
    began_at: float | None = None
    """When its turn to start had come."""
    running_at: float | None = None
    """When its node had joined the cluster."""
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
    # the time of the file is a sign of life, on the experiment's clock
    write_atomically(path, json.dumps(asdict(record)).encode(), durable=True, mode=0o600, modified_at=at)


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

    So a start that takes long takes nothing off the first lease.
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
    """How many processor cores this process may use, its control group's quota included; at least 1."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # no such file: no quota; "max": likewise
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        found = min(found, int(quota) // int(period))
    return max(1, found)


def crowding() -> float:
    """How many processes want each core of this machine, by the last minute's load; at least 1."""
    try:
        return max(1.0, os.getloadavg()[0] / cores())
    except OSError:
        return 1.0


def _turn(folder: Path) -> IO[str] | None:
    """A file that holds one of this machine's turns to start until it is closed; None while all are taken."""
    for number in range(cores()):
        file = open(folder / f"{number}.lock", "a")  # noqa: SIM115 - it is held until the node has joined
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
        else:
            return file
    return None


_SEVERE = re.compile(r"\[[^\]]* (?P<severity>[ECF]) \d+ \d+\] (?:\(\w+\) )?[\w.]+:\d+: +(?P<said>.*\S)")
_RAISED = re.compile(r"(?:[A-Za-z_][\w.]*)?(?:Error|Exception|Exit|Interrupt)\b.*")
_LOGGED = re.compile(r"\d{4}-\d\d-\d\d [^\t]*\t\w+ \S+ -- ")
_TELLING = re.compile(r"RAY_CHECK|Check failed|[Ff]ailed|[Cc]annot|[Uu]nable|[Ee]rror|exit")
_LONGEST_LINE = 200
_TAIL_BYTES = 64 * 1024


def last_words(log: Path, temp_dir: str) -> str:
    """The one line that tells best why a node did not start: `who: what`; empty if nothing was said.

    What a process of Ray died of comes before what `ray start` raised, which often says only that it waited in vain.
    """
    severe: dict[str, str] = {}
    for who in ("gcs_server", "raylet"):
        for kind in ("err", "out"):
            for line in _tail(Path(temp_dir) / "session_latest" / "logs" / f"{who}.{kind}"):
                found = _SEVERE.match(line)
                if found and _TELLING.search(found["said"]):
                    rank = "E" if found["severity"] == "E" else "F"
                    severe[rank] = f"{who}: {found['said']}"
    said = _tail(log)
    raised = [line for line in said if _RAISED.fullmatch(line)]
    last = _LOGGED.sub("", (raised or said or [""])[-1])
    told = severe.get("F") or severe.get("E") or (f"ray start: {last}" if last else "")
    return told if len(told) <= _LONGEST_LINE else f"{told[: _LONGEST_LINE - 1]}…"


def _tail(path: Path) -> list[str]:
    """The last lines of a log that say something; none if there is no such file."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip()]


class _Guard:
    """One instance from here to its end."""

    def __init__(
        self,
        path: Path,
        record: Record,
        lease: Path,
        lease_s: float,
        stop: threading.Event,
        clock: Callable[[], float],
    ) -> None:
        self._path = path
        self._clock = clock
        self.record = record
        self._lease = lease
        self._lease_s = lease_s
        self._stop = stop
        self._log = path.with_suffix(".log")
        self._looked_at, self._awake_since = clock(), float("-inf")

    def _ends(self) -> str | None:
        """The reason to end ('': released) that comes from outside; None while there is none."""
        now = self._clock()
        if now - self._looked_at > self._lease_s / 2:  # this machine slept, and the driver with it
            self._awake_since = now
        self._looked_at = now
        marker = release_marker(self._path)
        if marker.exists():
            return marker.read_text()
        if self._stop.is_set():
            return "terminated by a signal"
        if now > max(_lease_ends_at(self.record, self._lease), self._awake_since + self._lease_s):
            return "lease expired"
        os.utime(self._path, (now, now))  # a sign of life: if this process is killed, the instant of its end
        return None

    def _note(self, record: Record, at: float) -> None:
        self.record = record
        save(self._path, record, at)

    def live(self, starts: Path) -> str:
        """Start the node in its turn, and watch it; the reason for the end."""
        while (turn := _turn(starts)) is None:
            if (reason := self._ends()) is not None:
                return reason
            self._stop.wait(_POLL_S)
        with turn:
            began_at = self._clock()
            self._note(replace(self.record, began_at=began_at), began_at)
            with open(self._log, "ab") as log:
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
                return self._watch(node) if reason is None else reason
            finally:
                node.kill()

    def _await_join(self, node: subprocess.Popen[bytes]) -> str | None:
        """None once the node has joined, else why it does not; a crowded machine gets more time."""
        began_at, patience_s = time.monotonic(), 0.0
        while not any(line.endswith(STARTED) for line in _tail(self._log)):
            if (reason := self._ends()) is not None:
                return reason
            if node.poll() is not None:
                told = last_words(self._log, self.record.temp_dir) or "its Ray node printed nothing"
                return f"{told} (exit status {node.returncode}; see {self._log})"
            patience_s = max(patience_s, min(_START_S * crowding(), LONGEST_START_S))
            if time.monotonic() - began_at > patience_s:
                told = last_words(self._log, self.record.temp_dir)
                limit = f"its Ray node did not join within {patience_s:.0f} s (see {self._log})"
                return f"{told}; {limit}" if told else limit
            self._stop.wait(_POLL_S)
        running_at = self._clock()
        self._note(replace(self.record, running_at=running_at), running_at)
        return None

    def _watch(self, node: subprocess.Popen[bytes]) -> str:
        while (reason := self._ends()) is None:
            if node.poll() is not None:
                told = last_words(self._log, self.record.temp_dir)
                status = f"exit status {node.returncode}; see {self._log}"
                return f"its Ray node ended ({f'{told}; ' if told else ''}{status})"
            self._stop.wait(_POLL_S)
        return reason


def run(path: Path, lease: Path, lease_s: float, booted_at: float, starts: Path) -> None:
    """Be the instance recorded at `path`, from here to its end; on the clock by which this machine booted then.

    `starts` is the folder of this machine's turns to start.
    """

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
        record = replace(record, pid=os.getpid())
        save(path, record, clock())
        guard = _Guard(path, record, lease, lease_s, stop, clock)
        try:
            reason = guard.live(starts)
        except OSError as error:
            reason = f"its directory is gone ({error})"
        finish(path, guard.record, ended_at=clock, reason=reason)


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5]))
