"""The virtual backend: the same controller on a clock that jumps. Thousands of runs with faults are a unit test.

It is also the check on the planner: with deterministic times a virtual run takes and costs what was predicted.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rubberband.adaptive import BatchUse
from rubberband.cloud.provider import InstanceStatus
from rubberband.cloud.virtual import VirtualClock, VirtualProvider
from rubberband.errors import ProviderError
from rubberband.executor.events import (
    CheckpointRef,
    Command,
    DriverResumed,
    EndedInstance,
    Event,
    FailureKind,
    Finish,
    Gang,
    InstanceLost,
    InstanceReady,
    InstanceRefused,
    InstanceReleased,
    InstanceRunning,
    LaunchInstance,
    LiveInstance,
    ReleaseInstance,
    StartTrial,
    StopTrial,
    TrialFailed,
    TrialReported,
    TrialStarted,
)
from rubberband.offer import Offer
from rubberband.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What goes wrong in a virtual run; nothing by default."""

    refused: Collection[str] = ()
    """Instances that the provider refuses."""
    lost_after_s: Mapping[str, float] = field(default_factory=dict)
    """Instance -> seconds after it began to run at which it dies."""
    failures: Mapping[tuple[int, int], FailureKind] = field(default_factory=dict)
    """(trial, attempt) -> how the attempt ends, in place of its first report; 'hung' means silence."""


def by_trial(trial: int, iterations: int) -> float:
    """The default metric of a virtual trial: the lower its id, the better."""
    return 1.0 - (trial + 1) / (trial + 1 + iterations)


BatchesOf = Callable[[int, int, Gang, float], tuple[BatchUse, ...]]


def fixed_batch(trial: int, iterations: int, gang: Gang, iteration_s: float) -> tuple[BatchUse, ...]:
    """A virtual trial's batch is fixed, so that there is nothing to tell."""
    return ()


class VirtualBackend:
    """Implements `rubberband.executor.backend.Backend` with times from the profile and the offer."""

    def __init__(
        self,
        name: str,
        offer: Offer,
        profile: Profile,
        *,
        metric: str,
        metric_of: Callable[[int, int], float] = by_trial,
        faults: Faults | None = None,
        clock: VirtualClock | None = None,
        slowdown: float = 1.0,
        pace_of: Callable[[int], float] = lambda trial: 1.0,
        batches_of: BatchesOf = fixed_batch,
    ) -> None:
        """`metric_of(trial, iterations)` is what a trial reports.

        `slowdown` multiplies the profile's iterations of all trials, `pace_of(trial)` those of one.
        `batches_of(trial, iterations, gang, iteration_s)` are the batch sizes that a report tells of.
        """
        self._offer = offer
        self._profile = profile
        self._metric = metric
        self._metric_of = metric_of
        self._faults = faults or Faults()
        self._clock = clock or VirtualClock()
        self._slowdown = slowdown
        self._pace_of = pace_of
        self._batches_of = batches_of
        self.provider = VirtualProvider(
            name, self._clock, provision_delay_s=offer.provision_delay_s, refuse=self._faults.refused
        )
        self._agenda: list[tuple[float, int, Callable[[float], Event | None]]] = []
        self._order = itertools.count()
        self._attempts: dict[int, int] = {}

    def now(self) -> float:
        """Seconds on the virtual clock."""
        return self._clock.now()

    def execute(self, command: Command) -> None:
        """Put what will come of the command on the agenda."""
        match command:
            case LaunchInstance():
                self._launch(command.instance)
            case ReleaseInstance():
                with contextlib.suppress(ProviderError):  # refused, which the controller has yet to hear
                    status = self.provider.release(command.instance)
                    self._at(self.now(), lambda now: self._released(status))
            case StartTrial():
                self._attempts[command.trial] = command.attempt
                self._at(self.now() + self._profile.trial_startup_s, lambda now: self._begin(command, now))
            case StopTrial():
                self._attempts.pop(command.trial, None)
            case Finish():
                pass

    def next_events(self, wake_at: float | None) -> Sequence[Event]:
        """Jump to the next event, or to `wake_at` if that comes first; an event due at `wake_at` goes before it."""
        while self._agenda:
            at, _, happen = self._agenda[0]
            if wake_at is not None and wake_at < at:
                break
            heapq.heappop(self._agenda)
            self._clock.advance_to(at)
            event = happen(at)
            if event is not None:
                return [event]
        assert wake_at is not None, "the controller waits for an event that will never come"
        self._clock.advance_to(wake_at)
        return []

    def reconcile(self, known: Collection[str]) -> DriverResumed:
        """Say what lives and what ended; forget every worker, as if the driver's death had taken them along."""
        self._agenda.clear()
        self._attempts.clear()
        live: list[LiveInstance] = []
        ended: list[EndedInstance] = []
        for status in self.provider.describe():
            if status.instance not in known and status.state != "terminated":
                self.provider.release(status.instance)
            elif status.state == "terminated" and status.running_at is not None and status.ended_at is not None:
                ended.append(
                    EndedInstance(instance=status.instance, running_at=status.running_at, ended_at=status.ended_at)
                )
            elif status.state != "terminated":
                live.append(LiveInstance(instance=status.instance, running_at=status.running_at))
                self._bring_up(status)
        return DriverResumed(occurred_at=self.now(), live=tuple(live), ended=tuple(ended))

    def close(self) -> None:
        """Release everything."""
        self._agenda.clear()
        self.provider.close()

    # What happens, and when

    def _at(self, instant: float, happen: Callable[[float], Event | None]) -> None:
        heapq.heappush(self._agenda, (instant, next(self._order), happen))

    def _launch(self, instance: str) -> None:
        try:
            self.provider.launch(instance)
        except ProviderError as error:
            reason = str(error)
            self._at(self.now(), lambda now: InstanceRefused(occurred_at=now, instance=instance, reason=reason))
            return
        self._bring_up(self._status(instance))

    def _status(self, instance: str) -> InstanceStatus:
        return next(status for status in self.provider.describe() if status.instance == instance)

    def _bring_up(self, status: InstanceStatus) -> None:
        instance = status.instance
        running_at = status.requested_at + self._offer.provision_delay_s
        self._at(
            max(running_at, self.now()),
            lambda now: self._if_alive(
                instance, InstanceRunning(occurred_at=now, instance=instance, running_at=running_at)
            ),
        )
        ready_at = max(running_at, self.now()) + self._offer.init_delay_s
        self._at(ready_at, lambda now: self._if_alive(instance, InstanceReady(occurred_at=now, instance=instance)))
        if instance in self._faults.lost_after_s:
            self._at(running_at + self._faults.lost_after_s[instance], lambda now: self._lose(instance, now))

    def _if_alive(self, instance: str, event: Event) -> Event | None:
        return event if self._status(instance).state == "running" else None

    def _lose(self, instance: str, now: float) -> Event | None:
        if self._status(instance).state == "terminated":
            return None
        self.provider.lose(instance)
        return InstanceLost(occurred_at=now, instance=instance, ended_at=now, reason="lost")

    def _released(self, status: InstanceStatus) -> Event:
        ended_at = status.ended_at if status.ended_at is not None else self.now()
        return InstanceReleased(
            occurred_at=self.now(), instance=status.instance, ended_at=ended_at, running_at=status.running_at
        )

    def _begin(self, start: StartTrial, now: float) -> Event | None:
        if self._attempts.get(start.trial) != start.attempt:
            return None
        self._report_next(start, now, done=0)
        return TrialStarted(occurred_at=now, trial=start.trial, attempt=start.attempt)

    def _report_next(self, start: StartTrial, began_at: float, done: int) -> None:
        if start.from_iterations + done < start.until_iterations:
            due = began_at + (done + 1) * self._iteration_s(start)
            self._at(due, lambda now: self._report(start, began_at, done + 1, now))

    def _iteration_s(self, start: StartTrial) -> float:
        return self._profile.iteration_s(len(start.gang)) * self._slowdown * self._pace_of(start.trial)

    def _report(self, start: StartTrial, began_at: float, done: int, now: float) -> Event | None:
        if self._attempts.get(start.trial) != start.attempt:
            return None
        kind = self._faults.failures.get((start.trial, start.attempt))
        if kind == "hung":
            return None
        if kind is not None:
            del self._attempts[start.trial]
            return TrialFailed(occurred_at=now, trial=start.trial, attempt=start.attempt, kind=kind, message="fault")
        self._report_next(start, began_at, done)
        iterations = start.from_iterations + done
        return TrialReported(
            occurred_at=now,
            trial=start.trial,
            attempt=start.attempt,
            iterations=iterations,
            metrics={self._metric: self._metric_of(start.trial, iterations)},
            checkpoint=CheckpointRef(url=f"virtual:{start.trial}/{iterations}", digest="", size_bytes=0),
            batches=self._batches_of(start.trial, iterations, start.gang, self._iteration_s(start)),
        )
