"""The Ray backend: carries out the controller's commands with warm Ray actors on a provider's instances."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rubberband.cloud.provider import ClusterProvider
from rubberband.errors import CheckpointError
from rubberband.executor.checkpoints import CheckpointStore, probe
from rubberband.executor.core.events import (
    CheckpointLost,
    Command,
    DiscardCheckpoint,
    DriverResumed,
    Event,
    Finish,
    LaunchInstance,
    ReleaseInstance,
    StartTrial,
    StopTrial,
    Tick,
    TrialFailed,
    TrialReported,
)
from rubberband.executor.logs.trial_log import TrialLog
from rubberband.executor.ray.attempt import Attempt
from rubberband.executor.ray.code import Code
from rubberband.executor.ray.fetcher import Fetcher
from rubberband.executor.ray.fleet import Leases, Mailbox, RayFleet
from rubberband.executor.ray.fork_server import ForkServer
from rubberband.executor.ray.node_probe import NodeProbe
from rubberband.executor.ray.workers import Shipment, Workers
from rubberband.executor.training.run_spec import RunSpec
from rubberband.executor.training.segment import Segment
from rubberband.features import part
from rubberband.values.adaptive import BatchPoint

_SHORTEST_PROBE_BYTES = 2**16


class StoreWatch:
    """Distinguishes a checkpoint store that is full or gone from a bad checkpoint, by writing to the store."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._probe_bytes = _SHORTEST_PROBE_BYTES

    def check(self, events: Sequence[Event]) -> None:
        """Raise StoreAwayError if a checkpoint failed and the store is away, or accepts no other either.

        The trials have not failed then: they can continue once the store is back.
        """
        for event in events:
            if isinstance(event, TrialReported) and event.checkpoint is not None:
                self._probe_bytes = max(self._probe_bytes, event.checkpoint.total_bytes)
            elif isinstance(event, CheckpointLost) or (isinstance(event, TrialFailed) and event.kind == "checkpoint"):
                probe(self._store, event.trial, self._probe_bytes)


_FAREWELL_S = 2.0
_STOOD_STILL_S = 30.0
"""Events are polled every second; a longer gap means that the driver was paused, or its machine slept."""


@dataclass(eq=False, kw_only=True)
class RayBackend:
    """Implements `rubberband.executor.core.backend.Backend`. Threads do the work, so no method blocks on it.

    Nothing is rented, and Ray is not touched, before the first command. Instances outlive this driver by the lease of
    `spec` at most; those that are not ready yet by `first_lease_s`, if that is longer.
    """

    provider: ClusterProvider = field(kw_only=False)
    spec: RunSpec = field(kw_only=False)
    store: CheckpointStore
    gpus_per_instance: int
    slots_on_machine: int | None = None
    """Slots that share the CPUs of a machine; None: those of an instance."""
    known_points: Sequence[BatchPoint] = ()
    """Steps that profiling timed."""
    logs: Path | None = None
    """A directory of this machine: trial 7 prints to `trial-007.log` in it."""
    code: Code | None = None
    """Sent to instances that are other machines."""
    fork_server: ForkServer | None = None
    """Forks the workers of instances that are this machine; closed with this."""
    first_lease_s: float | None = None
    ready_timeout_s: float = 180.0
    """An instance whose workers are not warm within it is given up as lost."""
    node_probe: NodeProbe | None = None
    """Asks nodes that join a borrowed cluster; None: instances are no nodes of one."""
    fetcher: Fetcher | None = None
    """Fetches models and data on instances that are other machines; None: trials need none."""
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._trials_per_gpu = self.spec.experiment.resources.trials_per_gpu
        self._slots_on_machine = self.slots_on_machine or self.gpus_per_instance * self._trials_per_gpu
        self._store_watch = StoreWatch(self.store)
        self._shipment = Shipment(self.code) if self.code is not None and self.provider.remote else None
        self._mailbox = Mailbox(self.clock)
        self._attempts: dict[tuple[int, int], Attempt] = {}
        self._closed = False
        self._looked_at: float | None = None
        leases = Leases(
            self.provider,
            lease_s=self.spec.lease_s,
            interval_s=min(self.spec.kind.lease_interval_s, self.spec.lease_s / 4.0),
            first_lease_s=self.first_lease_s,
            clock=self.clock,
        )
        self._fleet = RayFleet(
            self.provider,
            self._make_workers,
            self._mailbox,
            leases=leases,
            on_gone=self._abandon,
            logs=self.logs,
            log_limit_bytes=self.spec.experiment.resources.log_limit_bytes,
        )

    def _make_workers(self, instance: str, on_sick: Callable[[str, str], None]) -> Workers:
        assert self.spec.entrypoint is not None, "the session asks for one"
        return Workers(
            instance,
            self.gpus_per_instance,
            self.spec.entrypoint,
            self.store,
            device=self.provider.device,
            slots_on_machine=self._slots_on_machine,
            trials_per_gpu=self._trials_per_gpu,
            timeout_s=self.ready_timeout_s,
            on_sick=on_sick,
            remote=self.provider.remote,
            shipment=self._shipment,
            node=self.provider.node,
            node_label=self.provider.node_label,
            group=self.provider.group,
            has_gpus=not (self.spec.kind.is_borrowed and self.spec.experiment.resources.slots),
            node_probe=self.node_probe,
            fetcher=self.fetcher,
        )

    def now(self) -> float:
        return self.clock()

    def execute(self, command: Command) -> None:
        match command:
            case LaunchInstance():
                self._fleet.launch(command.instance, command.market, command.first_lease_s)
            case ReleaseInstance():
                self._fleet.release(command.instance, command.fault)
            case StartTrial():
                self._start(command)
            case StopTrial():
                if (attempt := self._attempts.pop((command.trial, command.attempt), None)) is not None:
                    attempt.stop()
            case DiscardCheckpoint():
                with contextlib.suppress(CheckpointError):  # it costs some disk space and nothing else
                    self.store.discard(command.checkpoint)
            case _:
                assert isinstance(command, Finish), f"no such command: {command!r}"

    def hold_until(self, instant: float) -> None:
        self._fleet.hold_until(instant)

    def _start(self, start: StartTrial) -> None:
        if (start.trial, start.attempt) in self._attempts:
            return
        for key in [key for key in self._attempts if key[0] == start.trial]:
            del self._attempts[key]
        spec, experiment = self.spec, self.spec.experiment
        training = experiment.training.to_plain()
        segment = Segment(
            trial=start.trial,
            attempt=start.attempt,
            config=spec.configurations[start.trial],
            seed=spec.seed_of(start.trial),
            data_seed=spec.data_seed,
            metric=experiment.search.metric,
            rank=0,
            num_workers=len(start.gang),
            rendezvous=None,
            device=self.provider.device,
            from_iterations=start.from_iterations,
            until_iterations=start.until_iterations,
            checkpoint=start.checkpoint,
            num_instances=len({slot.instance for slot in start.gang}),
            slots_on_machine=self._slots_on_machine,
            trials_per_gpu=self._trials_per_gpu,
            batch=experiment.batch.to_plain(),
            balance=experiment.batch.balance.to_plain(),
            verify=experiment.batch.verify,
            known_points=tuple(self.known_points),
            batch_mode=start.batch_mode,
            max_iterations=spec.max_iterations,
            training=training,
        )
        kind: type[Attempt] = Attempt if training is None else part("attempt")
        attempt = kind(start, segment, self._log(start.trial), self._fleet.workers, self._mailbox.put)
        self._attempts[start.trial, start.attempt] = attempt
        attempt.begin()

    def _log(self, trial: int) -> TrialLog | None:
        """Return where a trial prints; on another machine, a folder there from which the log is collected."""
        if self.logs is None:
            return None
        name = f"trial-{trial:03d}.log"
        path = Path(name) if self.provider.remote else self.logs.resolve() / name
        return TrialLog(path=path, limit_bytes=self.spec.experiment.resources.log_limit_bytes)

    def _abandon(self, instance: str) -> None:
        """End the attempts on an instance that is gone, to free their workers on other instances."""
        for attempt in list(self._attempts.values()):
            if attempt.uses(instance):
                attempt.abandon()

    def next_events(self, wake_at: float | None) -> Sequence[Event]:
        """Wait for events and return them in order; return empty once the clock reaches `wake_at`, or after a while.

        Raises StoreAwayError if the checkpoint store is full or gone.
        """
        events = self._noted(self._mailbox.take(wake_at))
        self._store_watch.check(events)
        return events

    def _noted(self, events: list[Event]) -> list[Event]:
        """Return the events; if this driver stood still, with a Tick before those that came after the pause.

        Instances that ended during the pause are looked up first: trials that lost their instances have not failed, and
        an instance that ended by itself costs no more.
        """
        before_at, now = self._looked_at, self.now()
        self._looked_at = now
        paused_s = 0.0 if before_at is None else now - before_at
        if paused_s < _STOOD_STILL_S:
            return events
        self._fleet.look()
        events += self._mailbox.take(now)
        earlier = [event for event in events if event.occurred_at < now - paused_s / 2.0]
        later = events[len(earlier) :]
        woke_at = later[0].occurred_at if later else self._mailbox.stamp()
        return [*earlier, Tick(occurred_at=woke_at, paused_s=paused_s), *later]

    def reconcile(self, known: Collection[str]) -> DriverResumed:
        """Take over from a driver that died. Raises ProviderError if the provider cannot list its instances."""
        return self._fleet.reconcile(known)

    def close(self) -> None:
        if self._closed:
            return
        try:
            for attempt in self._attempts.values():
                attempt.stop(replace_workers=False)
            deadline = time.monotonic() + _FAREWELL_S
            for attempt in self._attempts.values():
                attempt.wait(max(0.0, deadline - time.monotonic()))
        finally:
            self._fleet.close()
            if self.fork_server is not None:
                self.fork_server.close()
            self._closed = True
