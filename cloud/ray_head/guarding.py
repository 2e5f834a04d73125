"""Guarding processes (see `instance`) of one directory's instances, and the Ray head that instances join."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from rubberband.cloud.clock import SteadyClock, steady_clock, time_of
from rubberband.cloud.provider import Head, HeadError
from rubberband.cloud.ray_head import instance as guard
from rubberband.cloud.ray_head import ray_node
from rubberband.cloud.ray_head.instance import Record, end_tagged, finish, load, lock, release_marker
from rubberband.errors import ProviderError

_RELEASE_S = 3.0
_log = logging.getLogger("rubberband.cloud")


class Guards:
    """Guarding processes that this one started. Thread-safe."""

    def __init__(self, experiment: str, directory: Path, token_path: Path, lease_s: float, clock: SteadyClock) -> None:
        """`clock` is that of the processes. `lease_s`: after this machine was suspended, the time for the first
        renewal."""
        self._experiment = experiment
        self._directory = directory
        self._token_path = token_path
        self._starts = token_path.parent / "starts"
        """Turns to start, per user on this machine, like the token."""
        self._starts.mkdir(exist_ok=True)
        self._lease_s = lease_s
        self._clock = clock
        self._mutex = threading.Lock()
        self._closed = False
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def lease(self) -> Path:
        """The file whose modification time is the end of the instances."""
        return self._directory / "lease"

    def leased(self) -> bool:
        """Return whether there is a lease that has not expired."""
        return self.lease.exists() and self.lease.stat().st_mtime > self._clock()

    def renew_lease(self, until: float) -> None:
        """Set the end of the lease, later or earlier, to `until`."""
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
        """Write the record of a process that is about to start under the name of `path`."""
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

    def spawn(self, path: Path, held: Sequence[int] = ()) -> None:
        """Start the process of the record at `path`. If there is one already, the new one exits at once.

        It keeps the files `held` (descriptors) open for life, and their locks with them.
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
                    env=ray_node.environment(
                        os.environ, self._token_path, tags, record.devices, host=record.address.rpartition(":")[0]
                    ),
                    pass_fds=held,
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
        """Refuse further starts."""
        with self._mutex:
            self._closed = True

    def wait(self) -> None:
        """Wait for processes that were asked to end, and kill slow ones: their instances have ended."""
        for process in self._processes:
            try:
                process.wait(timeout=_RELEASE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.reap()


_SPAWN_S = 120.0
"""A recorded process that has not appeared by then never will: its driver died in between."""
_END_S = 3.0


def observe(path: Path) -> Record:
    """Return the record at `path`. If its process was killed, end the rest of the instance and update the record."""
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
    """Ask the process of the record at `path` to end, without waiting for it."""
    release_marker(path).write_text(reason)


def end(path: Path, reason: str) -> Record:
    """End the instance recorded at `path` for `reason` ('': released) and return its last record; idempotent.

    If nothing can be written (a full disk), the instance ends all the same, and the next reader records it.
    """
    record = load(path)
    try:
        return _end(path, reason)
    except OSError:
        end_tagged(record.directory, record.name)
        return replace(record, ended_at=_clock(record)(), reason=reason)


def end_all(folder: Path) -> None:
    """Release all instances with records in `folder`: ask all to end, then wait for each. Idempotent."""
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


class RayHead:
    """Ray head on the driver's machine, a guarded process; it holds one directory for one driver. Thread-safe."""

    def __init__(
        self,
        experiment: str,
        directory: Path,
        *,
        host: str = ray_node.LOOPBACK,
        token_path: Path | None = None,
        lease_s: float = 60.0,
        not_before: float = 0.0,
    ) -> None:
        """Take over `directory`, with a head that an earlier driver started and that still lives.

        `host` is the address of this machine as instances reach it. The token that opens the cluster is one per user
        (see `ray_node.default_token_path`), as Ray remembers it for the life of a process. An expired lease is renewed
        for `lease_s`. The journal of the experiment ends at `not_before`. Raises ProviderError if another driver holds
        the directory, or if the directory or the token cannot be written.
        """
        self._experiment = experiment
        self._directory = directory.resolve()
        self._host = host
        self._mutex = threading.RLock()
        self._exclusive = contextlib.ExitStack()
        try:
            self._take_over(token_path, lease_s, not_before)
        except OSError as error:
            self._exclusive.close()
            where = error.filename or self._directory
            raise ProviderError(
                f"{where} cannot be written ({error.strerror or error}); make room or give access, or set "
                f"RUBBERBAND_HOME to another folder"
            ) from error

    def _take_over(self, token_path: Path | None, lease_s: float, not_before: float) -> None:
        self._heads.mkdir(parents=True, exist_ok=True)
        if not self._exclusive.enter_context(lock(self._directory / "driver")):
            self._exclusive.close()
            raise ProviderError(
                f"another driver is running experiment {self._experiment} ({self._directory}); wait for it, or cancel "
                "it"
            )
        self.token_path = ray_node.ensure_token(token_path or ray_node.default_token_path())
        self.clock = steady_clock(self._directory, not_before=not_before)
        self.guards = Guards(self._experiment, self._directory, self.token_path, lease_s, self.clock)
        if not self.guards.leased():  # else the budget of an earlier driver's instances may reach no further
            self.renew_lease(self.clock() + lease_s)

    @property
    def _heads(self) -> Path:
        return self._directory / "heads"

    def renew_lease(self, until: float) -> None:
        """Let all guarded processes of the directory live until `until` (Unix time), and no longer."""
        self.guards.renew_lease(until)

    def living(self) -> Head | None:
        """Return the living head, or None."""
        with self._mutex:
            path = self._living()
            return None if path is None else self._as_head(load(path))

    def ensure(self, *, wanted: Callable[[], bool] = lambda: True) -> Head:
        """Return the living head once it answers; start one if there is none.

        Raises HeadError if it does not start, ProviderError once it is not `wanted` any more.
        """
        with self._mutex:
            path = self._living() or self._start()
        while (record := observe(path)).ended_at is None:  # it gives up by itself after a time-out
            if ray_node.answers(record.address):
                return self._as_head(record)
            if not wanted():
                raise ProviderError("it was released while the Ray head started")
            time.sleep(0.05)
        raise HeadError(f"the Ray head did not start: {record.reason}")

    def close(self) -> None:
        """End the head and release the directory. Idempotent."""
        with self._mutex:
            self.guards.close()
            end_all(self._heads)
            self.guards.wait()
            self._exclusive.close()

    def _living(self) -> Path | None:
        return next((path for path in self._heads.glob("*.json") if observe(path).ended_at is None), None)

    def _as_head(self, record: Record) -> Head:
        environment = ray_node.authentication(self.token_path)
        return Head(address=record.address, temp_dir=record.temp_dir, environment=environment)

    def _start(self) -> Path:
        _say_ignored(os.environ.get("RAY_ADDRESS", ""))
        path = self._heads / f"head-{len(list(self._heads.glob('*.json')))}.json"
        port, temp_dir = ray_node.free_port(self._host), ray_node.make_temp_dir()
        command = ray_node.head_command(port, temp_dir, self._host)
        self.guards.write(path, command, temp_dir, f"{self._host}:{port}", ())
        self.guards.spawn(path)
        return path


@cache
def _say_ignored(ray_address: str) -> None:
    """Say once that the cluster which Ray's own programs join is not used."""
    if ray_address not in ("", "local"):
        _log.warning("RAY_ADDRESS=%s is ignored: RubberBand starts a Ray cluster of its own", ray_address)
