"""The Ray backend: carries out the controller's commands with warm Ray actors on a provider's instances."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

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
from rubberband.executor.ray.attempt import Attempt
from rubberband.executor.ray.code import Code
from rubberband.executor.ray.fleet import Leases, Mailbox, RayFleet
from rubberband.executor.ray.fork_server import ForkServer
from rubberband.executor.ray.slot_worker import Device
from rubberband.executor.ray.workers import Crew, Shipment
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.executor.training.segment import Segment
from rubberband.executor.trial_log import TrialLog
from rubberband.spec.resources import LOG_LIMIT_BYTES
from rubberband.values.adaptive import AdaptiveBatch, BatchPoint

# Tells a checkpoint store that is full or gone, which is nobody's failure, from a checkpoint that is at fault.


_SHORTEST_PROBE_BYTES = 2**16


class StoreWatch:
    """Shown every event before the controller; one that blames the store is checked by writing to the store."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._probe_bytes = _SHORTEST_PROBE_BYTES

    def check(self, events: Sequence[Event]) -> None:
        """Raises StoreAwayError if a checkpoint failed and the store is away, or takes no other either.

        The trials have not failed then: once it is back they can go on where they are.
        """
        for event in events:
            if isinstance(event, TrialReported):
                self._probe_bytes = max(self._probe_bytes, event.checkpoint.size_bytes)
            elif isinstance(event, CheckpointLost) or (isinstance(event, TrialFailed) and event.kind == "checkpoint"):
                probe(self._store, event.trial, self._probe_bytes)


_FAREWELL_S = 2.0
_STOOD_STILL_S = 30.0
"""Events are asked for every second; where it takes so long, the driver was paused, or its machine slept."""


class RayBackend:
    """Implements `rubberband.executor.backend.Backend`. Threads do the work; none of the methods waits for it."""

    def __init__(
        self,
        provider: ClusterProvider,
        *,
        entrypoint: Entrypoint,
        configs: Sequence[Mapping[str, Any]],
        seeds: Sequence[int],
        metric: str,
        store: CheckpointStore,
        gpus_per_instance: int,
        device: Device = "cpu",
        batch: AdaptiveBatch | None = None,
        known_points: Sequence[BatchPoint] = (),
        logs: Path | None = None,
        log_limit_bytes: int = LOG_LIMIT_BYTES,
        code: Code | None = None,
        fork_server: ForkServer | None = None,
        lease_s: float = 60.0,
        lease_interval_s: float = 2.0,
        first_lease_s: float | None = None,
        ready_timeout_s: float = 180.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Nothing is rented, and Ray is not touched, before the first command.

        `configs[i]` and `seeds[i]` belong to trial i. `logs` is a directory of this machine: what trial 7 prints
        goes to `trial-007.log` in it, and `log_limit_bytes` of that are kept. `code` is sent to instances that are
        other machines; `fork_server` forks the workers of those that are this one, and is closed with this. `batch` is
        how trials adapt their batch size (None: not at all), and `known_points` what is known of their steps. An
        instance whose workers are not warm within `ready_timeout_s` is given up as lost.
        Instances outlive this driver by `lease_s` at most, which is renewed every `lease_interval_s`; those that are
        not ready yet by `first_lease_s`, if that is longer.
        """
        self._entrypoint = entrypoint
        self._configs = configs
        self._seeds = seeds
        self._metric = metric
        self._store = store
        self._store_watch = StoreWatch(store)
        self._device = device
        self._batch = batch
        self._known_points = tuple(known_points)
        self._logs = logs
        self._log_limit_bytes = log_limit_bytes
        self._clock = clock
        self._fork_server = fork_server
        self._remote = provider.remote
        shipment = Shipment(code) if code is not None and self._remote else None
        self._mailbox = Mailbox(clock)
        self._attempts: dict[tuple[int, int], Attempt] = {}
        self._closed = False
        self._looked_at: float | None = None

        def make_crew(instance: str, on_sick: Callable[[str, str], None]) -> Crew:
            return Crew(
                instance,
                gpus_per_instance,
                entrypoint,
                store,
                device=device,
                timeout_s=ready_timeout_s,
                on_sick=on_sick,
                remote=self._remote,
                shipment=shipment,
            )

        leases = Leases(
            provider, lease_s=lease_s, interval_s=lease_interval_s, first_lease_s=first_lease_s, clock=clock
        )
        self._fleet = RayFleet(
            provider,
            make_crew,
            self._mailbox,
            leases=leases,
            on_gone=self._abandon,
            logs=logs,
            log_limit_bytes=log_limit_bytes,
        )

    def now(self) -> float:
        """Unix time in seconds."""
        return self._clock()

    def execute(self, command: Command) -> None:
        """Begin to carry out `command`; what comes of it arrives as events."""
        match command:
            case LaunchInstance():
                self._fleet.launch(command.instance, command.market, command.first_lease_s)
            case ReleaseInstance():
                self._fleet.release(command.instance)
            case StartTrial():
                self._start(command)
            case StopTrial():
                attempt = self._attempts.pop((command.trial, command.attempt), None)
                if attempt is not None:
                    attempt.stop()
            case DiscardCheckpoint():
                with contextlib.suppress(CheckpointError):  # it costs some disk space and nothing else
                    self._store.discard(command.checkpoint)
            case Finish():
                pass
            case _:
                raise AssertionError(f"no such command: {command!r}")

    def hold_until(self, instant: float) -> None:
        """Let no lease reach beyond `instant`."""
        self._fleet.hold_until(instant)

    def _start(self, start: StartTrial) -> None:
        if (start.trial, start.attempt) in self._attempts:
            return
        for key in [key for key in self._attempts if key[0] == start.trial]:
            del self._attempts[key]
        segment = Segment(
            trial=start.trial,
            attempt=start.attempt,
            config=self._configs[start.trial],
            seed=self._seeds[start.trial],
            metric=self._metric,
            rank=0,
            num_workers=len(start.gang),
            rendezvous=None,
            device=self._device,
            from_iterations=start.from_iterations,
            until_iterations=start.until_iterations,
            checkpoint=start.checkpoint,
            num_instances=len({slot.instance for slot in start.gang}),
            batch=self._batch,
            known_points=self._known_points,
            batch_mode=start.batch_mode,
        )
        attempt = Attempt(start, segment, self._log(start.trial), self._fleet, self._mailbox.put)
        self._attempts[start.trial, start.attempt] = attempt
        attempt.begin()

    def _log(self, trial: int) -> TrialLog | None:
        """Where a trial prints; on another machine in a folder of that machine's, from which it is collected."""
        if self._logs is None:
            return None
        name = f"trial-{trial:03d}.log"
        path = Path(name) if self._remote else self._logs.resolve() / name
        return TrialLog(path=path, limit_bytes=self._log_limit_bytes)

    def _abandon(self, instance: str) -> None:
        """End the attempts on an instance that is gone, so that their workers on other instances are free."""
        for attempt in list(self._attempts.values()):
            if attempt.uses(instance):
                attempt.stop()

    def next_events(self, wake_at: float | None) -> Sequence[Event]:
        """Wait for events and return them in order; return empty once the clock reaches `wake_at`, or after a while.

        Raises StoreAwayError if the checkpoint store is full or gone.
        """
        events = self._noted(self._mailbox.take(wake_at))
        self._store_watch.check(events)
        return events

    def _noted(self, events: list[Event]) -> list[Event]:
        """The events, and before what came after it that this driver stood still, if it did.

        What ended meanwhile is found out first: trials that lost their instances have not failed, and what has ended
        itself costs no more.
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
        """Take over from a driver that died. Raises ProviderError if the provider cannot tell what exists."""
        return self._fleet.reconcile(known)

    def close(self) -> None:
        """Release everything that is still held, and leave no process behind. Idempotent."""
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
            if self._fork_server is not None:
                self._fork_server.close()
            self._closed = True
