"""Ray nodes of this machine: how one starts, the processes that guard them, and the Ray head that instances join."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from rubberband.cloud.clock import ExperimentClock, experiment_clock, time_of
from rubberband.cloud.provider import INSTANCE_LABEL, Head, HeadError
from rubberband.cloud.ray_head import instance as guard
from rubberband.cloud.ray_head import ray_start
from rubberband.cloud.ray_head.instance import (
    LONGEST_START_S,
    Record,
    crowding,
    end_tagged,
    finish,
    load,
    lock,
    release_marker,
)
from rubberband.errors import ProviderError
from rubberband.files import make_directories, write_atomically
from rubberband.values.environment import HASH_SEED

LOOPBACK = "127.0.0.1"
_QUIET_PORTS = range(20_000, 32_000)
"""Between the ports of Ray's workers (up to 19999) and Linux's ephemeral ports (from 32768 on)."""
_TRIES = 20
_OBJECT_STORE_BYTES = 80 * 1024**2  # Ray's least; checkpoints and reports do not pass through it

HEALTH_CHECK_DELAY_MS = 10_000
"""A node that has just joined is still starting, and may not answer at once."""

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_task_events_report_interval_ms": "0",  # no history of tasks, which the head would keep
    "RAY_memory_monitor_refresh_ms": "0",  # it would kill the latest trial; the kernel kills the largest process
    "RAY_health_check_initial_delay_ms": f"{HEALTH_CHECK_DELAY_MS}",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    # With few cores, Ray would end its own nodes during their start. The guarding process decides when to give up.
    "RAY_raylet_start_wait_time_s": f"{LONGEST_START_S:.0f}",  # until it has joined; by default 30
    "RAY_agent_register_timeout_ms": f"{LONGEST_START_S * 1000:.0f}",  # else the raylet ends itself; 30 s
    "RAY_worker_register_timeout_seconds": f"{LONGEST_START_S:.0f}",  # 60
    HASH_SEED: "0",
    "SPT_NOENV": "1",  # or Ray's process titles overwrite the environment, and with it our tags
}
"""Environment of every Ray node, on this machine or another."""
NETWORK_SETTINGS = {
    "RAY_health_check_period_ms": "3000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "5",
}
"""In place of those, where nodes are on several machines: a machine that is busy for 10 s is not dead, and its boot
takes minutes. One that has ended is seen by its provider."""
CONNECT_SETTINGS = {
    "RAY_gcs_rpc_server_connect_timeout_s": "600",  # by default 5
    "RAY_py_gcs_connect_timeout_s": "600",  # 30
    "RAY_NUM_REDIS_GET_RETRIES": "600",  # a second each; 20
    "PYTHONUNBUFFERED": "1",  # the node's output shows when it has joined
}
"""Additional environment of nodes on this machine: their head lives, even if it answers late."""


def head_command(port: int, temp_dir: str, host: str = LOOPBACK) -> tuple[str, ...]:
    """Return `ray start` of a head without slots, autoscaler and dashboard; instances reach this machine at `host`."""
    reached_as = () if host == LOOPBACK else (f"--node-ip-address={host}",)
    return (
        *_ray_start(temp_dir),
        *reached_as,
        "--head",
        f"--port={port}",
        "--num-cpus=0",
        "--num-gpus=0",
        "--include-dashboard=false",
        "--no-monitor",
    )


def instance_command(name: str, address: str, gpus: int, temp_dir: str) -> tuple[str, ...]:
    """Return `ray start` of an instance that joins the head at `address`."""
    return (
        *_ray_start(temp_dir),
        f"--address={address}",
        f"--num-cpus={gpus}",
        f"--num-gpus={gpus}",
        "--labels",
        f"{INSTANCE_LABEL}={name}",
    )


def _ray_start(temp_dir: str) -> tuple[str, ...]:
    return (
        sys.executable,
        "-P",
        ray_start.__file__,
        "start",
        "--block",
        "--include-log-monitor=false",
        f"--object-store-memory={_OBJECT_STORE_BYTES}",
        f"--temp-dir={temp_dir}",
    )


def authentication(token_path: Path) -> dict[str, str]:
    """Return the environment with which head, instances and driver may join the cluster."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_path)}


def default_token_path() -> Path:
    """Return the path of the user's token: `ray-token` in RUBBERBAND_HOME, or in `~/.rubberband`.

    Raises RuntimeError if RUBBERBAND_HOME is not set and this user has no home.
    """
    home = os.environ.get("RUBBERBAND_HOME")
    return (Path(home) if home else Path.home() / ".rubberband").expanduser().resolve() / "ray-token"


def ensure_token(path: Path) -> Path:
    """Create the token that only this user can read, unless it exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".token-")  # mkstemp's mode is 0600
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(32))
            os.link(temporary, path)  # unlike a rename, never replaces a token that another process just made
        except FileExistsError:
            pass
        finally:
            os.unlink(temporary)
    return path


def environment(
    base: Mapping[str, str], token_path: Path, tags: Mapping[str, str], devices: Sequence[str], *, host: str = LOOPBACK
) -> dict[str, str]:
    """Return the environment of a node: the driver's without Ray's variables, plus our settings, tags and GPUs.

    `host` is the address by which nodes reach the head. Trials get no access to the journals, nor to the password of
    their store.
    """
    chosen = {key: value for key, value in base.items() if not key.startswith("RAY_") and key != "RUBBERBAND_STORE"}
    chosen |= SETTINGS | CONNECT_SETTINGS | authentication(token_path) | dict(tags)
    chosen |= {} if host == LOOPBACK else NETWORK_SETTINGS
    chosen["RAY_health_check_initial_delay_ms"] = f"{HEALTH_CHECK_DELAY_MS * crowding():.0f}"
    if devices:
        chosen["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    else:  # Ray holds logical GPUs against it, and does not start
        chosen.pop("CUDA_VISIBLE_DEVICES", None)
    return chosen


def make_temp_dir() -> str:
    """Return a new directory with a short path, as the paths of Ray's sockets are limited to 107 characters."""
    return tempfile.mkdtemp(prefix="rb-", dir="/tmp")


def free_port(host: str = LOOPBACK) -> int:
    """Return a free TCP port of this machine's address `host`, if possible one that stays free for some seconds.

    It is no ephemeral port, of which Ray's processes take dozens before the node listens. Raises OSError if `host` is
    no address of this machine.
    """
    for port in [*(secrets.choice(_QUIET_PORTS) for _ in range(_TRIES)), 0]:
        with socket.socket() as listener:
            try:
                listener.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return int(listener.getsockname()[1])
    raise OSError(errno.EADDRINUSE, f"no TCP port of {host} is free")


def answers(address: str) -> bool:
    """Return whether `address` (host:port) accepts connections."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=0.5).close()
    except OSError:
        return False
    return True


_RELEASE_S = 3.0
_log = logging.getLogger("rubberband.cloud")


class Guards:
    """Guarding processes that this one started. Thread-safe."""

    def __init__(
        self, experiment: str, directory: Path, token_path: Path, lease_s: float, clock: ExperimentClock
    ) -> None:
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
        self.variables: Mapping[str, str] = {}
        """Further variables of the processes."""
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
            self.lease.touch(0o600)
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
            **self.variables,
        }
        host = record.address.rpartition(":")[0]
        arguments = (path, self.lease, self._lease_s, self._clock.booted_at, self._starts)
        with self._mutex:
            if self._closed:
                raise ProviderError(f"the provider of experiment {self._experiment} is closed; open a new one")
            process = subprocess.Popen(
                [sys.executable, "-P", guard.__file__, *map(str, arguments)],
                env=environment(os.environ, self._token_path, tags, record.devices, host=host),
                pass_fds=held,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._processes.append(process)

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
    write_atomically(release_marker(path), reason.encode(), durable=False)


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
        host: str = LOOPBACK,
        token_path: Path | None = None,
        lease_s: float = 60.0,
        not_before: float = 0.0,
    ) -> None:
        """Take over `directory`, with a head that an earlier driver started and that still lives.

        `host` is the address of this machine as instances reach it. The token that opens the cluster is one per user
        (see `default_token_path`), as Ray remembers it for the life of a process. An expired lease is renewed
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
        make_directories(self._heads)
        if not self._exclusive.enter_context(lock(self._directory / "driver")):
            self._exclusive.close()
            raise ProviderError(
                f"another driver is running experiment {self._experiment} ({self._directory}); wait for it, or cancel "
                "it"
            )
        self.token_path = ensure_token(token_path or default_token_path())
        self.clock = experiment_clock(self._directory, not_before=not_before)
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
            if answers(record.address):
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
        variables = authentication(self.token_path)
        return Head(address=record.address, temp_dir=record.temp_dir, environment=variables)

    def _start(self) -> Path:
        _say_ignored(os.environ.get("RAY_ADDRESS", ""))
        path = self._heads / f"head-{len(list(self._heads.glob('*.json')))}.json"
        port, temp_dir = free_port(self._host), make_temp_dir()
        command = head_command(port, temp_dir, self._host)
        self.guards.write(path, command, temp_dir, f"{self._host}:{port}", ())
        self.guards.spawn(path)
        return path


@cache
def _say_ignored(ray_address: str) -> None:
    """Say once that the cluster which Ray's own programs join is not used."""
    if ray_address not in ("", "local"):
        _log.warning("RAY_ADDRESS=%s is ignored: RubberBand starts a Ray cluster of its own", ray_address)
