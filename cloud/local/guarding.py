"""Starts the guarding processes (see `instance`) of one directory's instances and head, and reaps them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rubberband.cloud.local import instance as guard
from rubberband.cloud.local import ray_node
from rubberband.cloud.local.instance import Record, end_tagged, finish, load, lock, release_marker
from rubberband.cloud.steady import SteadyClock, time_of
from rubberband.errors import ProviderError

_RELEASE_S = 3.0


class Guards:
    """The guarding processes that this one started. Every method may be called from any thread."""

    def __init__(self, experiment: str, directory: Path, token_path: Path, lease_s: float, clock: SteadyClock) -> None:
        """What it starts goes by `clock`.

        `lease_s`: how long an instance bears with a driver that slept with this machine, from when both woke.
        """
        self._experiment = experiment
        self._directory = directory
        self._token_path = token_path
        self._starts = token_path.parent / "starts"
        """Of one user on this machine, like the token: whose turn it is to start."""
        self._starts.mkdir(exist_ok=True)
        self._lease_s = lease_s
        self._clock = clock
        self._mutex = threading.Lock()
        self._closed = False
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def lease(self) -> Path:
        """The file whose modification time is the instant at which instances end."""
        return self._directory / "lease"

    def leased(self) -> bool:
        """Whether there is a lease that is not over."""
        return self.lease.exists() and self.lease.stat().st_mtime > self._clock()

    def renew_lease(self, until: float) -> None:
        """Put the end off, or bring it forward, to `until`."""
        if not self.lease.exists():
            self.lease.touch()
        os.utime(self.lease, (until, until))

    def write(
        self,
        path: Path,
        command: Sequence[str],
        temp_dir: str,
        address: str,
        devices: Sequence[str],
        *,
        first_lease_s: float | None = None,
    ) -> None:
        """Write down what is about to be started under the name of `path`."""
        now = self._clock()
        record = Record(
            name=path.stem,
            experiment=self._experiment,
            directory=str(self._directory),
            command=tuple(command),
            temp_dir=temp_dir,
            devices=tuple(devices),
            address=address,
            requested_at=now,
            lease_until=self.lease.stat().st_mtime,
            first_lease_s=first_lease_s,
        )
        guard.save(path, record, now)

    def spawn(self, path: Path) -> None:
        """Start the process of the record at `path`; where there is one already, the new one finds that, and goes.

        Raises ProviderError once this is closed.
        """
        record = guard.load(path)
        tags = {
            guard.EXPERIMENT_TAG: self._experiment,
            guard.DIRECTORY_TAG: str(self._directory),
            guard.INSTANCE_TAG: record.name,
        }
        with self._mutex:
            if self._closed:
                raise ProviderError(f"the provider of experiment {self._experiment} is closed; open a new one")
            self._processes.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        "-P",
                        guard.__file__,
                        str(path),
                        str(self.lease),
                        str(self._lease_s),
                        repr(self._clock.booted_at),
                        str(self._starts),
                    ],
                    env=ray_node.environment(os.environ, self._token_path, tags, record.devices),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )

    def reap(self) -> None:
        """Forget processes that ended, so that none stays a zombie."""
        with self._mutex:
            self._processes = [process for process in self._processes if process.poll() is None]

    def close(self) -> None:
        """Start nothing any more."""
        with self._mutex:
            self._closed = True

    def wait(self) -> None:
        """Wait for processes that were told to end; what they guarded has ended, and who is slow to go is killed."""
        for process in self._processes:
            try:
                process.wait(timeout=_RELEASE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.reap()


# Look at an instance's record and end the instance, from outside of its own process.


_SPAWN_S = 120.0
"""A recorded process that has not appeared by then never will: its driver died in between."""
_END_S = 3.0


def observe(path: Path) -> Record:
    """The record at `path`, brought up to date if its process died without a word; what it left running is ended."""
    record = load(path)
    if record.ended_at is not None:
        return record
    with lock(path) as held:
        record = load(path)
        if not held or record.ended_at is not None:
            return record
        if record.pid is not None:
            last_sign = path.stat().st_mtime
            return finish(path, record, ended_at=lambda: last_sign, reason="its process died")
        if _clock(record)() > record.requested_at + _SPAWN_S:
            return finish(path, record, ended_at=_clock(record), reason="its process never started")
        return record


def ask_to_end(path: Path, reason: str) -> None:
    """Tell the process of the record at `path` to end, and do not wait for it."""
    release_marker(path).write_text(reason)


def end(path: Path, reason: str) -> Record:
    """End the instance recorded at `path` for `reason` ('': released) and return its last record; idempotent.

    Where nothing can be written (a full disk), the instance is ended all the same, and who looks next records it.
    """
    record = load(path)
    try:
        return _end(path, reason)
    except OSError:
        end_tagged(record.directory, record.name)
        return replace(record, ended_at=_clock(record)(), reason=reason)


def end_all(folder: Path) -> None:
    """Release all whose records lie in `folder`: they are told first, then waited for. Idempotent."""
    living = [path for path in folder.glob("*.json") if load(path).ended_at is None]
    for path in living:
        with contextlib.suppress(OSError):  # a full disk; `end` needs none of it
            ask_to_end(path, "")
    for path in living:
        end(path, "")


def _end(path: Path, reason: str) -> Record:
    record = observe(path)
    if record.ended_at is not None:
        return record
    with contextlib.suppress(OSError):
        ask_to_end(path, reason)
    if record.pid is not None:  # alive just now: it holds the lock
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, signal.SIGTERM)
    with lock(path, wait_s=_END_S):
        record = load(path)
        return record if record.ended_at is not None else finish(path, record, ended_at=_clock(record), reason=reason)


def _clock(record: Record) -> Callable[[], float]:
    return partial(time_of, Path(record.directory))
