"""The local provider: this machine rents out Ray nodes, one small guarding process each (see `instance`).

It reads the state from the records below `directory`, never from memory. So a driver that resumes after a crash, and
`cleanup`, see the same as the one that launched. One driver at a time holds a directory.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Literal

from rubberband.cloud.local import gpus
from rubberband.cloud.provider import (
    CleanedUp,
    ClusterProvider,
    ClusterRequest,
    Head,
    InstanceDescription,
    InstanceState,
)
from rubberband.cloud.ray_head import ray_node
from rubberband.cloud.ray_head.instance import (
    DIRECTORY_TAG,
    EXPERIMENT_TAG,
    INSTANCE_TAG,
    Record,
    crowding,
    end_tagged,
    last_words,
    load,
    lock,
)
from rubberband.cloud.ray_head.ray_node import RayHead, end, end_all, observe
from rubberband.errors import ProviderError
from rubberband.files import make_directories, write_atomically
from rubberband.values.environment import HASH_SEED
from rubberband.values.plan import Market

_USUAL_START_S = 9.0
"""Longest usual start of a node on an idle machine."""
_MOST_SLOWNESS = 10.0
_ENDING_S = 5.0
"""The guarding process of an instance that has ended is gone by then."""


class LocalProvider(ClusterProvider):
    """Rents out this machine's slots as instances of `gpus_per_instance` (logical) GPUs, for one experiment."""

    remote = False
    look_s = 0.25

    def __init__(
        self,
        experiment: str,
        directory: Path,
        gpus_per_instance: int,
        lease_s: float = 30.0,
        *,
        devices: Sequence[str] = (),
        token_path: Path | None = None,
        not_before: float = 0.0,
        hash_seed: str = "0",
    ) -> None:
        """Take over `directory`, which has all records of the instances.

        `devices` are ids of real GPUs to assign (see `gpus`), some of which other runs may have taken; empty: GPUs are
        logical and trials use the CPU. See `RayHead` for the other arguments, and for the ProviderError that it raises.
        """
        self._experiment, self._directory = experiment, directory.resolve()
        self._gpus = gpus_per_instance
        self._devices = tuple(devices)
        self._mutex = threading.RLock()
        self._unwanted: set[str] = set()
        """Instances that were released, some of them before they started."""
        self._early: set[str] = set()
        """Instances that were started before they were asked for."""
        self._head = RayHead(experiment, directory, token_path=token_path, lease_s=lease_s, not_before=not_before)
        self._guards = self._head.guards
        self._guards.variables = {HASH_SEED: hash_seed, **_workers_first(gpus_per_instance)}
        self.clock = self._head.clock
        self.device: Literal["cpu", "cuda"] = "cuda" if self._devices else "cpu"
        self._instances = self._directory / "instances"

    def slowness(self, instance: str) -> float:
        """Return the slowness by its node's start time and the processes per core now."""
        record = load(self._path(instance))
        began_at, running_at = record.began_at, record.running_at
        took_s = 0.0 if began_at is None or running_at is None else running_at - began_at
        return min(_MOST_SLOWNESS, max(1.0, took_s / _USUAL_START_S, crowding()))

    def last_words(self, instance: str) -> str:
        """Return the line of its node's or Ray's logs that best explains its state."""
        path = self._path(instance)
        return last_words(path.with_suffix(".log"), load(path).temp_dir)

    def renew_lease(self, until: float) -> None:
        """Let instances and head live until `until` (Unix time), and no longer."""
        self._head.renew_lease(until)

    def head(self) -> Head | None:
        """Return the living head, or None."""
        return self._head.living()

    def ensure_head(self) -> Head:
        """Return the living head once it answers; start one if there is none. Raises ProviderError."""
        return self._head.ensure()

    def launch(self, instance: str, market: Market = "on_demand", *, first_lease_s: float | None = None) -> None:
        """Start an instance under the name `instance`, once for repeated calls, and the head if there is none.

        The market makes no difference. Raises ProviderError if all of the real GPUs are taken.
        """
        path = self._path(instance)
        if path.exists() and observe(path).pid is not None:
            if instance in self._early:
                self._early.remove(instance)
                write_atomically(_rented(path), str(self.clock()).encode(), durable=False)
            return
        address = self._head.ensure(wanted=lambda: instance not in self._unwanted).address
        with self._mutex, contextlib.ExitStack() as held:
            if path.exists():  # its process has not shown itself, or an earlier driver ended before it began
                locks = self._take_again(instance, load(path).devices, held)
            else:
                make_directories(self._instances)
                locks = self._take_some(instance, held)
                temp_dir = ray_node.make_temp_dir()
                command = ray_node.instance_command(instance, address, self._gpus, temp_dir)
                self._guards.write(path, command, temp_dir, address, tuple(locks), first_lease_s=first_lease_s)
            self._guards.spawn(path, [file.fileno() for file in locks.values()])

    def launch_early(self, instance: str) -> None:
        """Start an instance that is rented from its `launch` on. Raises ProviderError."""
        with self._mutex:
            if self._path(instance).exists():  # the run itself was first
                return
            self._early.add(instance)
        self.launch(instance)

    def describe(self) -> Sequence[InstanceDescription]:
        """Return all instances, living or ended, in the order of launch."""
        with self._mutex:
            headless = self._head.living() is None
            records = []
            for path in self._instances.glob("*.json"):
                record = observe(path)
                if headless and record.ended_at is None:
                    record = end(path, "the Ray head ended")
                records.append(record)
            self._guards.reap()
        records.sort(key=lambda record: (record.requested_at, record.name))
        return [_status(record, self._path(record.name)) for record in records]

    def release(self, instance: str, *, fault: str = "") -> InstanceDescription:
        """End the instance and return its final status; idempotent.

        Raises ProviderError if no such instance was ever launched.
        """
        path = self._path(instance)
        self._unwanted.add(instance)
        if not path.exists():
            raise ProviderError(f"instance {instance} was never launched in {self._instances}; nothing to release")
        return _status(end(path, ""), path)

    def close(self) -> None:
        """End every instance and the head, and release the directory. Idempotent."""
        with self._mutex:
            self._guards.close()
            end_all(self._instances)
            self._head.close()

    def _path(self, instance: str) -> Path:
        return self._instances / f"{instance}.json"

    def _take_some(self, instance: str, held: contextlib.ExitStack) -> dict[str, IO[str]]:
        """Take real GPUs for a new instance, disjoint from those of living ones and of other runs; see `_take`."""
        if not self._devices:
            return {}
        living = [record for record in map(observe, self._instances.glob("*.json")) if record.ended_at is None]
        taken = {device for record in living for device in record.devices}
        free = [device for device in self._devices if device not in taken]
        locks = self._take(free, held, self._gpus)
        if len(locks) < self._gpus:
            by = " and ".join(sorted({owner for owner, _ in self._others()}))
            raise ProviderError(
                f"instance {instance} refused: {len(locks)} of this machine's {len(self._devices)} GPUs are free"
                f"{by and f' ({by} has others)'} and an instance takes {self._gpus}; lower resources.max_instances"
            )
        return locks

    def _take_again(self, instance: str, devices: Sequence[str], held: contextlib.ExitStack) -> dict[str, IO[str]]:
        """Take the GPUs of an instance that was launched before, unless its own process has them; see `_take`."""
        locks = self._take(devices, held, len(devices))
        if any(gpu in devices for _, gpu in self._others()):
            raise ProviderError(f"instance {instance} refused: another run has taken its GPUs; wait until that ends")
        return locks

    def _take(self, devices: Sequence[str], held: contextlib.ExitStack, most: int) -> dict[str, IO[str]]:
        """Return the locks of at most that many GPUs: until `held` is left, and longer in processes that get them."""
        locks: dict[str, IO[str]] = {}
        others = {device for _, device in self._others()}
        for device in devices:
            if len(locks) == most:
                break
            wait_s = 0.0 if device in others else _ENDING_S
            if (file := gpus.take(device, self._experiment, self._directory, wait_s)) is not None:
                locks[device] = held.enter_context(file)
        return locks

    def _others(self) -> list[tuple[str, str]]:
        """Return (owner, GPU) of what other runs have taken."""
        holders = [(gpus.holder(device), device) for device in self._devices]
        return [(who[0], device) for who, device in holders if who is not None and who[1] != str(self._directory)]


def _rented(path: Path) -> Path:
    """Return the file with the instant from which an instance that was started early is rented."""
    return path.with_suffix(".rented")


def _workers_first(gpus: int) -> dict[str, str]:
    """Return Ray's settings by which a node starts a worker for each CPU, all at once, before anything asks for it.

    A CPU is a slot; the workers are forked.
    """
    return {"RAY_enable_worker_prestart": "1", "RAY_worker_maximum_startup_concurrency": str(gpus)}


def _status(record: Record, path: Path) -> InstanceDescription:
    if record.running_at is not None and (rented := _rented(path)).exists():
        record = replace(record, running_at=max(record.running_at, float(rented.read_text())))
    state: InstanceState = "terminated" if record.ended_at else "running" if record.running_at else "pending"
    return InstanceDescription(
        instance=record.name,
        experiment=record.experiment,
        state=state,
        requested_at=record.requested_at,
        running_at=record.running_at,
        ended_at=record.ended_at,
        reason=record.reason,
    )


def open_cluster(request: ClusterRequest) -> LocalProvider:
    """Return the provider of a run, with the GPUs of this machine that no other run has. Raises ProviderError."""
    offer, resources = request.offer, request.resources
    devices = gpus.free_gpus(gpus.gpus_to_share(offer, resources.slots), offer, request.directory).ids
    return LocalProvider(
        request.experiment,
        request.directory,
        offer.gpus,
        resources.lease_length_s,
        devices=devices,
        not_before=request.not_before,
        hash_seed=request.hash_seed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanedUpInstance:
    """An instance (or a head) of a crashed driver that a cleanup ended."""

    experiment: str
    instance: str
    directory: Path
    processes: int
    """Number of its running processes."""

    def __str__(self) -> str:
        return f"{self.instance} of {self.experiment} ({self.processes} processes)"


def clean_up(home: Path, experiment: str | None = None) -> CleanedUp:
    """End and return every instance of `experiment` (None: of all) below `home` whose driver is dead.

    Instances of a living driver are left alone.
    """
    ended = []
    for (directory, name, owner), processes in sorted(_running(home.resolve()).items()):
        if experiment in (None, owner) and (processes := _clean_up(directory, name, processes)):
            ended.append(CleanedUpInstance(experiment=owner, instance=name, directory=directory, processes=processes))
    return CleanedUp(ended=ended)


def _running(home: Path) -> dict[tuple[Path, str, str], int]:
    """Return (directory, instance, experiment) -> number of processes with these tags."""
    import psutil

    counts: defaultdict[tuple[Path, str, str], int] = defaultdict(int)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError, KeyError):
            environment = process.environ()
            directory = Path(environment[DIRECTORY_TAG])
            if directory.is_relative_to(home):
                counts[directory, environment[INSTANCE_TAG], environment[EXPERIMENT_TAG]] += 1
    return counts


def _clean_up(directory: Path, name: str, processes: int) -> int:
    if not directory.exists():
        return len(end_tagged(str(directory), name))
    with lock(directory / "driver") as dead:
        if not dead:
            return 0
        for folder in ("instances", "heads"):
            path = directory / folder / f"{name}.json"
            if path.exists():
                observe(path)
                end(path, "ended by cleanup")
        end_tagged(str(directory), name)
        return processes
