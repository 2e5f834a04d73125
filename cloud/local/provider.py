"""The local provider: this machine rents out Ray nodes, one small guarding process each (see `instance`).

What exists is read from the records below `directory`, never from memory: so a driver that comes back after a crash,
and `sweep`, see the same as the one that launched. One driver at a time holds a directory.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rubberband.cloud.cluster import Head
from rubberband.cloud.local import instance as guard
from rubberband.cloud.local import ray_node
from rubberband.cloud.local.instance import Record
from rubberband.cloud.local.records import ask_to_end, end, observe
from rubberband.cloud.provider import InstanceState, InstanceStatus
from rubberband.errors import ProviderError

_HEAD_START_S = 60.0
_RELEASE_S = 3.0


class LocalProvider:
    """Rents out this machine's slots as instances of `gpus_per_instance` (logical) GPUs, for one experiment."""

    def __init__(
        self,
        experiment: str,
        directory: Path,
        gpus_per_instance: int,
        lease_s: float = 30.0,
        *,
        max_instances: int | None = None,
        devices: Sequence[str] = (),
        token_path: Path | None = None,
    ) -> None:
        """Take over `directory`, where everything about the instances is kept.

        `devices` are ids of real GPUs to hand out (see `real_gpus`); empty: GPUs are logical and trials use the CPU.
        The token that opens the Ray cluster is one per user (see `ray_node.default_token_path`), as Ray remembers it
        for the life of a process. Raises ProviderError if another driver holds the directory, or if the directory or
        the token cannot be written.
        """
        self._experiment = experiment
        self._directory = directory.resolve()
        self._gpus = gpus_per_instance
        self._lease_s = lease_s
        self._max_instances = max_instances
        self._devices = tuple(devices)
        self._mutex = threading.RLock()
        self._closed = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._exclusive = contextlib.ExitStack()
        try:
            self._take_over(token_path)
        except OSError as error:
            self._exclusive.close()
            where = error.filename or self._directory
            raise ProviderError(
                f"{where} cannot be written ({error.strerror or error}); make room or give access, or set "
                f"RUBBERBAND_HOME to another folder"
            ) from error

    def _take_over(self, token_path: Path | None) -> None:
        for folder in (self._instances, self._heads):
            folder.mkdir(parents=True, exist_ok=True)
        if not self._exclusive.enter_context(guard.lock(self._directory / "driver")):
            self._exclusive.close()
            raise ProviderError(
                f"another driver is at work on experiment {self._experiment} ({self._directory}); wait for it, or "
                f"cancel it"
            )
        self._token_path = ray_node.ensure_token(token_path or ray_node.default_token_path())
        self.renew_lease()

    @property
    def _instances(self) -> Path:
        return self._directory / "instances"

    @property
    def _heads(self) -> Path:
        return self._directory / "heads"

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """What trials run on: `cuda` if this provider hands out real GPUs, else `cpu`."""
        return "cuda" if self._devices else "cpu"

    def renew_lease(self) -> None:
        """Say that the driver lives."""
        (self._directory / "lease").touch()

    def head(self) -> Head | None:
        """The living head, or None."""
        with self._mutex:
            path = self._living_head()
            return None if path is None else self._as_head(guard.load(path))

    def ensure_head(self) -> Head:
        """The living head, which is started if there is none; returns once it answers.

        Raises ProviderError if it does not start.
        """
        with self._mutex:
            path = self._living_head() or self._start_head()
        deadline = time.monotonic() + _HEAD_START_S
        while time.monotonic() < deadline:
            record = observe(path)
            if record.ended_at is not None:
                raise ProviderError(f"the Ray head did not start: {record.reason}")
            if ray_node.answers(record.address):
                return self._as_head(record)
            time.sleep(0.05)
        raise ProviderError(f"the Ray head did not answer within {_HEAD_START_S:.0f} s; see {path.with_suffix('.log')}")

    def launch(self, instance: str) -> None:
        """Start an instance under the name `instance`; asking twice starts one. Starts the head first if need be.

        Raises ProviderError if all of `max_instances`, or of the real GPUs, are taken.
        """
        path = self._path(instance)
        if path.exists() and observe(path).pid is not None:
            return
        address = self.ensure_head().address
        with self._mutex:
            if not path.exists():
                devices = self._take_devices(instance)
                temp_dir = ray_node.make_temp_dir()
                command = ray_node.instance_command(instance, address, self._gpus, temp_dir)
                self._write(path, instance, command, temp_dir, devices, address)
            self._spawn(path)

    def describe(self) -> Sequence[InstanceStatus]:
        """All instances that live or have ended, in the order of their launch."""
        with self._mutex:
            headless = self._living_head() is None
            records = []
            for path in self._instances.glob("*.json"):
                record = observe(path)
                if headless and record.ended_at is None:
                    record = end(path, "the Ray head ended")
                records.append(record)
            self._reap()
        records.sort(key=lambda record: (record.requested_at, record.name))
        return [_status(record) for record in records]

    def release(self, instance: str) -> InstanceStatus:
        """End the instance and return its final status; idempotent.

        Raises ProviderError if no such instance was ever launched.
        """
        path = self._path(instance)
        if not path.exists():
            raise ProviderError(f"instance {instance} was never launched in {self._directory}; nothing to release")
        return _status(end(path, ""))

    def close(self) -> None:
        """End every instance and the head, and let the directory go. Idempotent."""
        with self._mutex:
            self._closed = True
            paths = [*self._instances.glob("*.json"), *self._heads.glob("*.json")]
            living = [path for path in paths if guard.load(path).ended_at is None]
            for path in living:
                with contextlib.suppress(OSError):  # a full disk; `end` needs none of it
                    ask_to_end(path, "")
            for path in living:
                end(path, "")
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=_RELEASE_S)
            self._reap()
            self._exclusive.close()

    def _path(self, instance: str) -> Path:
        return self._instances / f"{instance}.json"

    def _living_head(self) -> Path | None:
        return next((path for path in self._heads.glob("*.json") if observe(path).ended_at is None), None)

    def _as_head(self, record: Record) -> Head:
        environment = ray_node.authentication(self._token_path)
        return Head(address=record.address, temp_dir=record.temp_dir, environment=environment)

    def _start_head(self) -> Path:
        number = len(list(self._heads.glob("*.json")))
        path = self._heads / f"head-{number}.json"
        port, temp_dir = ray_node.free_port(), ray_node.make_temp_dir()
        address = f"{ray_node.LOOPBACK}:{port}"
        self._write(path, path.stem, ray_node.head_command(port, temp_dir), temp_dir, (), address)
        self._spawn(path)
        return path

    def _take_devices(self, instance: str) -> tuple[str, ...]:
        """The real GPUs for a new instance, disjoint from those of living ones."""
        living = [r for r in map(observe, self._instances.glob("*.json")) if r.ended_at is None]
        if self._max_instances is not None and len(living) >= self._max_instances:
            raise ProviderError(
                f"instance {instance} refused: {len(living)} of max_instances={self._max_instances} are held; "
                "release one or raise the limit"
            )
        if not self._devices:
            return ()
        taken = {device for record in living for device in record.devices}
        free = [device for device in self._devices if device not in taken]
        if len(free) < self._gpus:
            raise ProviderError(
                f"instance {instance} refused: {len(free)} of this machine's {len(self._devices)} GPUs are free and an "
                f"instance takes {self._gpus}; lower cloud.max_instances"
            )
        return tuple(free[: self._gpus])

    def _write(
        self, path: Path, name: str, command: tuple[str, ...], temp_dir: str, devices: tuple[str, ...], address: str
    ) -> None:
        record = Record(
            name=name,
            experiment=self._experiment,
            directory=str(self._directory),
            command=command,
            temp_dir=temp_dir,
            devices=devices,
            address=address,
            requested_at=time.time(),
        )
        guard.save(path, record)

    def _spawn(self, path: Path) -> None:
        """Start the guarding process; if there is one already, the new one finds the lock taken and goes."""
        if self._closed:
            raise ProviderError(f"the provider of experiment {self._experiment} is closed; open a new one")
        record = guard.load(path)
        tags = {
            guard.EXPERIMENT_TAG: self._experiment,
            guard.DIRECTORY_TAG: str(self._directory),
            guard.INSTANCE_TAG: record.name,
        }
        self._processes.append(
            subprocess.Popen(
                [sys.executable, "-P", guard.__file__, str(path), str(self._directory / "lease"), str(self._lease_s)],
                env=ray_node.environment(os.environ, self._token_path, tags, record.devices),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        )

    def _reap(self) -> None:
        """Forget ended children, so that none stays a zombie."""
        self._processes = [process for process in self._processes if process.poll() is None]


def _status(record: Record) -> InstanceStatus:
    state: InstanceState = "terminated" if record.ended_at else "running" if record.running_at else "pending"
    return InstanceStatus(
        instance=record.name,
        experiment=record.experiment,
        state=state,
        requested_at=record.requested_at,
        running_at=record.running_at,
        ended_at=record.ended_at,
        reason=record.reason,
    )
