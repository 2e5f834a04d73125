"""The warm workers of one instance, one per slot: brought up together, replaced one by one when they die."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rubberband.cloud.provider import INSTANCE_LABEL
from rubberband.executor.checkpoints import CheckpointStore
from rubberband.executor.core.placement import gpu_of
from rubberband.executor.ray import connection
from rubberband.executor.ray.code import Code
from rubberband.executor.ray.connection import ray_nodes
from rubberband.executor.ray.fetcher import Fetcher
from rubberband.executor.ray.node_probe import NodeProbe
from rubberband.executor.ray.slot_worker import ServerProcess, SlotWorker
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.executor.training.trial import Device
from rubberband.units import counted, error_line
from rubberband.values.environment import HASH_SEED


class Shipment:
    """The user's code in Ray's object store: put there once per cluster, fetched once by each instance. Thread-safe."""

    def __init__(self, code: Code) -> None:
        self._code = code
        self._mutex = threading.Lock()
        self._address = ""
        self._reference: Any = None

    def reference(self) -> Any:
        """Return the reference that an actor is given for the code; the driver must be connected."""
        with self._mutex:
            address = ray.get_runtime_context().gcs_address
            if self._reference is None or address != self._address:  # another head knows nothing of it
                self._address, self._reference = address, ray.put(self._code)
            return self._reference


Worker = Any
"""The handle of a `SlotWorker` actor."""

ServerPlace = tuple[int, int]
"""(slot, number): a place for a parameter server beside a slot's worker."""
_REPLACEMENTS = 3
_MOST_GPU_FAILURES = 2
_LOOK_S = 0.5
_PLACED_LOOK_S = 1
"""Ray waits whole seconds for a placement group: less is no wait, and misses a group that is there."""
_LONGEST_LOOK_S = 10.0
_PAUSE_S = 0.1
_REMOTE_PAUSE_S = 1.0
"""Other machines boot for minutes; asking for many of them ten times a second would keep the head busy."""


class Patience:
    """Time that is left to wait. A very long gap between two looks counts as a short one: the driver was paused."""

    def __init__(self, seconds: float) -> None:
        self._left_s = seconds
        self._looked_at = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether no time is left; to be read at every look."""
        now = time.monotonic()
        self._left_s -= min(now - self._looked_at, _LONGEST_LOOK_S)
        self._looked_at = now
        return self._left_s <= 0.0


class WorkersError(Exception):
    """The instance's workers cannot be brought up; the message is one line that says why."""


@dataclass(eq=False)
class Workers:
    """Workers of `instance`; every method may be called from any thread."""

    instance: str
    gpus: int
    entrypoint: Entrypoint
    store: CheckpointStore
    device: Device = field(kw_only=True)
    slots_on_machine: int = field(kw_only=True)
    """Slots that share the CPUs of its machine."""
    trials_per_gpu: int = field(default=1, kw_only=True)
    """Slots of each GPU."""
    timeout_s: float = field(kw_only=True)
    on_sick: Callable[[str, str], None] = field(kw_only=True)
    """Called with (instance, reason) when a slot's worker cannot be replaced."""
    remote: bool = field(default=False, kw_only=True)
    """Whether the instance is another machine, which gets the user's code by the `shipment`."""
    shipment: Shipment | None = field(default=None, kw_only=True)
    node: Callable[[str], str] = field(default=lambda instance: instance, kw_only=True)
    """Gives the name of the Ray node that a running instance is, or is a part of."""
    node_label: str = field(default=INSTANCE_LABEL, kw_only=True)
    """Key of the Ray label that has it."""
    group: Callable[[str], Any] = field(default=lambda instance: None, kw_only=True)
    """Gives the placement group that a running instance is; None: this makes one on its node."""
    has_gpus: bool = field(default=True, kw_only=True)
    """Whether a slot is a GPU of Ray."""
    node_probe: NodeProbe | None = field(default=None, kw_only=True)
    """Asks its node, where that has joined a borrowed cluster."""
    fetcher: Fetcher | None = field(default=None, kw_only=True)
    """Fetches models and data on its machine; None: there are none, or they are there."""

    def __post_init__(self) -> None:
        self._pause_s = _REMOTE_PAUSE_S if self.remote else _PAUSE_S
        self._mutex = threading.Lock()
        self._dismissed = threading.Event()
        self._group: Any = None
        self._slots: list[Future[Worker]] = [Future() for _ in range(self.gpus * self.trials_per_gpu)]
        self._held: dict[int, Worker] = {}
        """By slot: a worker that may come back."""
        self._servers: dict[ServerPlace, Worker] = {}
        self._gpu_failures = [0] * len(self._slots)

    def options(self) -> Mapping[str, Any]:
        """Return further options of Ray for processes of the instance."""
        if self.node_probe is None:
            return {}
        given = self.node_probe.options()
        variables = {HASH_SEED: self.entrypoint.environment.hash_seed}
        return {**given, "runtime_env": {**given.get("runtime_env", {}), "env_vars": variables}}

    @property
    def dismissed(self) -> bool:
        """Whether the instance was given up."""
        return self._dismissed.is_set()

    def assemble(self, slowness: float = 1.0) -> None:
        """Wait for the Ray node and bring up a warm worker on every slot. Raises WorkersError.

        On a machine that is slower by the factor `slowness`, the timeout is as much longer.
        """
        self.timeout_s *= slowness
        patience = Patience(self.timeout_s)
        try:
            # A placement group that waits for its node keeps the head busy, and fills its memory.
            self._until(lambda: ray_nodes(self.node_label).get(self.node(self.instance), False), patience)
            if self.node_probe is not None and (fault := self.node_probe.fault_of(self.node(self.instance))):
                raise WorkersError(fault)
            if self.fetcher is not None:
                self._fetch(self.fetcher)
                patience = Patience(self.timeout_s)
            group = self._place(patience)
            workers = [self._start(group, slot) for slot in range(len(self._slots))]
            self.warm_up(workers, patience)
        except BaseException:
            self.dismiss()
            raise
        for future, worker in zip(self._slots, workers, strict=True):
            future.set_result(worker)

    def worker(self, gpu: int) -> Future[Worker]:
        """Return the future of the warm worker on slot `gpu`."""
        with self._mutex:
            return self._slots[gpu]

    def replace(self, gpu: int, worker: Worker) -> None:
        """Kill `worker` and start another one on its slot; `worker(gpu)` waits for it."""
        self.hold(gpu, worker)
        with self._mutex:
            if self.dismissed or self._held.get(gpu) is not worker:
                return
            del self._held[gpu]
        connection.start(lambda: self._replace(gpu, worker), f"replace-{gpu}")

    def hold(self, gpu: int, worker: Worker) -> None:
        """Give `worker` to no more trials: it is replaced or given back soon, and `worker(gpu)` waits for that."""
        with self._mutex:
            current = self._slots[gpu]
            if current.done() and current.result() is worker:
                self._slots[gpu], self._held[gpu] = Future(), worker

    def give_back(self, gpu: int, worker: Worker) -> None:
        """Give a worker that is held to trials again."""
        with self._mutex:
            if self._held.get(gpu) is worker:
                del self._held[gpu]
                self._slots[gpu].set_result(worker)

    def note_gpu_failure(self, gpu: int, message: str) -> None:
        """Count a failure of the GPU itself, or its driver, under a trial; the second one makes the instance sick."""
        with self._mutex:
            self._gpu_failures[gpu] += 1
            count = self._gpu_failures[gpu]
        if count == _MOST_GPU_FAILURES and not self.dismissed:
            reason = f"GPU {gpu_of(gpu, self.gpus)} failed {count} times: {message}"
            connection.start(lambda: self.on_sick(self.instance, reason), f"sick-{gpu}")

    def server(self, place: ServerPlace) -> Worker:
        """Return the parameter server's process at that place; it is started at its first use, and stays warm.

        Raises WorkersError if the instance was given up.
        """
        with self._mutex:
            if self._group is None:
                raise WorkersError("released")
            if place not in self._servers:
                strategy = PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=gpu_of(place[0], self.gpus)
                )
                actor = ray.remote(ServerProcess).options(
                    num_cpus=0, max_restarts=0, scheduling_strategy=strategy, **self.options()
                )
                code = None if self.shipment is None else self.shipment.reference()
                self._servers[place] = actor.remote(self.entrypoint, code=code)
            return self._servers[place]

    def drop_server(self, place: ServerPlace, server: Worker) -> None:
        """Kill a parameter server's process; another one is started at the next use of its place."""
        with self._mutex:
            if self._servers.get(place) is server:
                del self._servers[place]
        kill(server)

    def dismiss(self) -> None:
        """Give the slots up: their workers go with the placement group, which a provider removes itself."""
        with self._mutex:
            self._dismissed.set()
            group, self._group = self._group, None
        if group is not None and self.group(self.instance) is None:
            with contextlib.suppress(Exception):  # the head may be gone, and the group with it
                remove_placement_group(group)

    def _place(self, patience: Patience) -> Any:
        label = {self.node_label: self.node(self.instance)}
        group = self.group(self.instance) or placement_group(
            [{"GPU": 1}] * self.gpus, strategy="PACK", bundle_label_selector=[label] * self.gpus
        )
        with self._mutex:
            self._group = group
        self._until(lambda: bool(group.wait(_PLACED_LOOK_S)), patience)
        return group

    def _fetch(self, fetcher: Fetcher) -> None:
        """Let its machine fetch what trials need; its workers get variables that lead there. Raises WorkersError."""
        label = {self.node_label: self.node(self.instance)}
        try:
            found = fetcher.fetch({"label_selector": label, **self.options()}, lambda: self.dismissed)
        except RayError as error:
            raise WorkersError(f"its fetch of models and data ended: {last_line(error)}") from error
        if isinstance(found, str):
            raise WorkersError(found)
        environment = self.entrypoint.environment
        variables = {**found, **environment.variables}
        self.entrypoint = replace(self.entrypoint, environment=replace(environment, variables=variables))

    def _until(self, holds: Callable[[], bool], patience: Patience) -> None:
        while not holds():
            if patience.is_over:
                raise WorkersError(
                    f"its Ray node did not offer {counted(self.gpus, 'GPU')} in {self.timeout_s:.0f} s; see its log"
                )
            if self._dismissed.wait(self._pause_s):
                raise WorkersError("released")

    def _start(self, group: Any, slot: int) -> Worker:
        gpu = gpu_of(slot, self.gpus)
        place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=gpu)
        # Ray cuts a share to ten-thousandths, so that seven of 1/7 fit.
        share = 1 / self.trials_per_gpu if self.has_gpus else 0
        actor = ray.remote(SlotWorker).options(
            num_cpus=0, num_gpus=share, max_restarts=0, scheduling_strategy=place, **self.options()
        )
        code = None if self.shipment is None else self.shipment.reference()
        return actor.remote(self.entrypoint, self.store, instance=self.instance, remote=self.remote, code=code)

    def warm_up(self, workers: Sequence[Worker], patience: Patience) -> None:
        """Wait until they are ready for trials. Raises WorkersError."""
        pending = [worker.warm_up.remote(self.device, self.slots_on_machine) for worker in workers]
        try:
            while pending:
                if self.dismissed:
                    raise WorkersError("released")
                if patience.is_over:
                    raise WorkersError(
                        f"{len(pending)} of its workers did not get warm within {self.timeout_s:.0f} s; "
                        f"does importing {self.entrypoint} take that long?"
                    )
                ready, pending = ray.wait(pending, num_returns=len(pending), timeout=_LOOK_S)
                ray.get(ready)
        except RayError as error:
            raise WorkersError(f"a worker ended while it warmed up: {last_line(error)}") from error

    def _replace(self, gpu: int, worker: Worker) -> None:
        kill(worker)
        reason = ""
        for _ in range(_REPLACEMENTS):
            with self._mutex:
                group, future = self._group, self._slots[gpu]
            if group is None:
                return
            fresh = None
            try:
                fresh = self._start(group, gpu)
                self.warm_up([fresh], Patience(self.timeout_s))
            except Exception as error:
                reason = last_line(error)
                kill(fresh)
            else:
                future.set_result(fresh)
                return
        if not self.dismissed:
            self.on_sick(self.instance, f"no new worker on GPU {gpu_of(gpu, self.gpus)}: {reason}")


def kill(worker: Worker) -> None:
    """End a worker at once; harmless if it, or the cluster, is gone."""
    with contextlib.suppress(Exception):
        ray.kill(worker)


def last_line(error: BaseException) -> str:
    """Return the most useful line of one of Ray's long messages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    useful = [line for line in lines if line.startswith(("The actor is dead because", "Worker exit"))]
    return (useful[-1] if useful else error_line(str(error)) or type(error).__name__)[:300]
