"""Measures an experiment's profile: its scaling function and its start-up times, on real (or virtual) instances.

It speaks the backend's protocol and nothing else. Every slot is kept busy with a copy of the trial while it measures:
a trial that trains alone on an instance looks faster than one that has neighbours, and in a stage it has neighbours.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rubberband.errors import Cancelled, ProviderError, RubberbandError
from rubberband.executor.backend import Backend
from rubberband.executor.events import (
    CheckpointRef,
    DiscardCheckpoint,
    Event,
    Gang,
    InstanceLost,
    InstanceReady,
    InstanceRefused,
    InstanceReleased,
    InstanceRunning,
    LaunchInstance,
    ReleaseInstance,
    Slot,
    StartTrial,
    StopTrial,
    TrialFailed,
    TrialReported,
    TrialStarted,
)
from rubberband.offer import gang_sizes, slots
from rubberband.profile import Profile

_RELEASE_S = 60.0
_PAUSE_S = 30.0
"""A wait that took so much longer than asked was this machine's sleep, and nobody's silence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What measuring may take; it stops at the first that is reached."""

    held_s: float = math.inf
    """How long each instance may run."""
    held_by: str = "max_cost"
    """What sets `held_s`, in the user's words."""
    time_s: float = math.inf
    """From the call, however long the instances take to come."""
    time_by: str = "deadline"
    ready_s: float = 900.0
    """The longest wait for another sign of the instances before they are ready."""
    first_s: float = 300.0
    """For a trial's start-up, and for an iteration as long as none was seen."""
    iteration_s: float | None = None
    """The longest silence of a trial that trains. None: `first_s`, then ten times the slowest iteration that was seen,
    but not less than `shortest_s`."""
    shortest_s: float = 60.0

    def silence_s(self, *, starting: bool, slowest_s: float | None) -> float:
        """After how many seconds without a sign a trial is given up; `slowest_s`: the slowest iteration seen."""
        if starting:
            return max(self.first_s, self.iteration_s or 0.0)
        if self.iteration_s is not None:
            return self.iteration_s
        return self.first_s if slowest_s is None else max(self.shortest_s, 10.0 * slowest_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What was measured with one number of GPUs per trial."""

    gpus: int
    copies: int
    """Trials that trained side by side."""
    iteration_s: float
    """Mean seconds per iteration."""
    iteration_cv: float
    """Coefficient of variation of a single iteration within one trial."""
    trial_cv: float
    """Coefficient of variation between the trials' means, beyond what single iterations explain."""
    startup_s: float
    """Mean seconds from the order to start on warm workers, from a checkpoint, until the first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The profile and the points that it was made of."""

    profile: Profile
    points: tuple[Point, ...]
    held_s: tuple[float, ...]
    """Seconds for which each instance ran: what measuring cost."""
    stopped_by: str = ""
    """Why measuring stopped before all points were there, and what to do about it; empty if it did not."""


def gpu_counts(gpus_per_instance: int, instances: int, minimum: int, maximum: int) -> list[int]:
    """The GPUs per trial to measure: `minimum`, its doubles, and the most that fit, as far as packing allows them."""
    allowed = gang_sizes(gpus_per_instance, minimum, min(maximum, gpus_per_instance * instances))
    doubles = {minimum * 2**power for power in range(maximum.bit_length())}
    return [gpus for gpus in allowed if gpus in doubles or gpus in (allowed[0], allowed[-1])]


def measure(
    backend: Backend,
    *,
    gpus_per_instance: int,
    instances: int = 1,
    min_gpus_per_trial: int = 1,
    max_gpus_per_trial: int = 1,
    num_trials: int | None = None,
    iterations: int = 3,
    warm_up_iterations: int = 1,
    limits: Limits | None = None,
    on_point: Callable[[Point], None] = lambda point: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Measured:
    """Fill `instances` instances with trials and time them, for every GPU count of `gpu_counts`.

    The backend knows `num_trials` trials (None: enough for every slot); the first ones are measured. `on_point` is
    shown every point as soon as it is measured; `cancelled` is asked all the time. The instances are released in the
    end; the caller closes the backend.

    Trials that fail or hang are done without, so a few bad configurations do no harm. A limit that is reached, or a
    hang of all trials that train at once, ends the measurement with the points that there are. Raises ProviderError
    where an instance is refused or lost, RubberbandError where there is no point then, where every trial fails, or none
    reports the metric, and Cancelled.
    """
    counts = gpu_counts(gpus_per_instance, instances, min_gpus_per_trial, max_gpus_per_trial)
    if not counts:
        raise ProviderError(
            f"{instances} instances of {gpus_per_instance} GPUs cannot hold a trial of {min_gpus_per_trial} GPUs; "
            f"raise the number of instances or lower resources.gpus_per_trial.min"
        )
    num_copies = instances * gpus_per_instance if num_trials is None else num_trials
    session = _Session(backend, num_copies, limits or Limits(), cancelled)
    points: list[Point] = []
    stopped_by = ""
    try:
        with session.instances([f"profile-{number}" for number in range(instances)]) as names:
            for gpus in counts:
                gangs = _gangs(names, gpus_per_instance, gpus)
                points.append(session.measure(gangs, warm_up_iterations, iterations))
                on_point(points[-1])
    except _Stopped as reason:
        if not points:
            raise RubberbandError(f"measuring the profile stopped before its first point: {reason}") from None
        stopped_by = str(reason)
    profile = _profile(points, session.provision_delay_s, session.init_delay_s)
    return Measured(profile=profile, points=tuple(points), held_s=session.held_s(), stopped_by=stopped_by)


class _Stopped(Exception):
    """Measuring goes no further; the message says why, and what to do about it."""


def _profile(points: Sequence[Point], provision_delay_s: float, init_delay_s: float) -> Profile:
    return Profile(
        seconds_per_iteration={point.gpus: point.iteration_s for point in points},
        trial_startup_s=statistics.fmean(point.startup_s for point in points),
        trial_cv=statistics.fmean([point.trial_cv for point in points if point.copies > 1] or [0.0]),
        iteration_cv=statistics.fmean(point.iteration_cv for point in points),
        provision_delay_s=provision_delay_s,
        init_delay_s=init_delay_s,
        source="file",
    )


def _gangs(instances: Sequence[str], gpus_per_instance: int, gpus: int) -> list[Gang]:
    """As many disjoint gangs of `gpus` slots as fit on the instances, by the rules of packing."""
    every = [[Slot(instance=instance, gpu=gpu) for gpu in range(gpus_per_instance)] for instance in instances]
    if gpus <= gpus_per_instance:
        groups = [group[start : start + gpus] for group in every for start in range(0, gpus_per_instance, gpus)]
        return [tuple(group) for group in groups if len(group) == gpus]
    flat = [slot for group in every for slot in group]
    copies = slots(len(instances), gpus_per_instance, gpus)
    return [tuple(flat[copy * gpus : (copy + 1) * gpus]) for copy in range(copies)]


class _Session:
    """A conversation with the backend, in which anything unexpected is an error."""

    def __init__(self, backend: Backend, num_trials: int, limits: Limits, cancelled: Callable[[], bool]) -> None:
        self._backend = backend
        self._limits = limits
        self._began_at = backend.now()
        self._woke_at = -math.inf
        self._slowest_s: float | None = None
        self._cancelled = cancelled
        self._trials = list(range(num_trials))
        """Those that have not failed."""
        self._running: dict[str, float] = {}
        self._ended: dict[str, float] = {}
        self._checkpoints: dict[int, CheckpointRef] = {}
        self._held: set[str] = set()
        self._attempt = 0
        self.provision_delay_s = 0.0
        self.init_delay_s = 0.0

    @contextlib.contextmanager
    def instances(self, names: Sequence[str]) -> Iterator[Sequence[str]]:
        """Hold instances while in the block."""
        asked_at = self._backend.now()
        ready: dict[str, float] = {}
        try:
            for name in names:
                self._held.add(name)
                self._backend.execute(LaunchInstance(instance=name))
            heard_at = asked_at
            while len(ready) < len(names):
                if events := self._next(heard_at + self._limits.ready_s):
                    heard_at = self._backend.now()
                ready |= {event.instance: event.occurred_at for event in events if isinstance(event, InstanceReady)}
                if self._silent(heard_at, self._limits.ready_s):
                    raise RubberbandError(
                        f"profiling waited {self._limits.ready_s:.0f} s for the instances to get ready; see their logs"
                    )
            self.provision_delay_s = statistics.fmean(self._running[name] - asked_at for name in names)
            self.init_delay_s = statistics.fmean(ready[name] - self._running[name] for name in names)
            yield names
        finally:
            self._release()

    def _release(self) -> None:
        for checkpoint in self._checkpoints.values():
            self._backend.execute(DiscardCheckpoint(checkpoint=checkpoint))
        for name in sorted(self._held):
            self._backend.execute(ReleaseInstance(instance=name))
        deadline = self._backend.now() + _RELEASE_S
        while self._held and self._backend.now() < deadline:  # what is not back by then, the backend's close gives back
            for event in self._backend.next_events(deadline):
                self._note(event)

    def _note(self, event: Event) -> None:
        match event:
            case InstanceRunning():
                self._running[event.instance] = event.running_at
            case InstanceReleased() | InstanceLost():
                if isinstance(event, InstanceReleased) and event.running_at is not None:
                    self._running.setdefault(event.instance, event.running_at)
                self._held.discard(event.instance)
                self._ended[event.instance] = event.ended_at
            case InstanceRefused():
                self._held.discard(event.instance)

    def held_s(self) -> tuple[float, ...]:
        """How long each instance that ran was held, so far."""
        now = self._backend.now()
        return tuple(self._ended.get(name, now) - running_at for name, running_at in self._running.items())

    def measure(self, gangs: Sequence[Gang], warm_up: int, iterations: int) -> Point:
        """Train on all gangs at once: `warm_up` iterations that do not count, then `iterations` that do."""
        warm: dict[int, list[float]] = {}
        while not warm:
            warm = self._train(dict(zip(self._trials, gangs, strict=False)), 0, warm_up)
        timed = self._train(dict(zip(warm, gangs, strict=False)), warm_up, warm_up + iterations)
        if not timed:
            return self.measure(gangs, warm_up, iterations)
        times = [[after - before for before, after in itertools.pairwise(trial[1:])] for trial in timed.values()]
        mean_s = statistics.fmean(time for trial in times for time in trial)
        within = statistics.fmean(statistics.variance(trial) if len(trial) > 1 else 0.0 for trial in times)
        means = [statistics.fmean(trial) for trial in times]
        between = (statistics.variance(means) if len(means) > 1 else 0.0) - within / iterations
        return Point(
            gpus=len(gangs[0]),
            copies=len(timed),
            iteration_s=mean_s,
            iteration_cv=math.sqrt(within) / mean_s,
            trial_cv=math.sqrt(max(0.0, between)) / mean_s,
            startup_s=statistics.fmean(trial[1] - trial[0] for trial in timed.values()),
        )

    def _train(self, gangs: Mapping[int, Gang], start: int, until: int) -> dict[int, list[float]]:
        """One segment of every trial on its gang; the instants of those that did not fail.

        An instant for the order to start, one for the first step, and one for the end of every iteration.
        """
        self._attempt += 1
        for trial, gang in gangs.items():
            self._backend.execute(
                StartTrial(
                    trial=trial,
                    attempt=self._attempt,
                    gang=gang,
                    from_iterations=start,
                    until_iterations=until,
                    checkpoint=self._checkpoints.get(trial) if start else None,
                )
            )
        instants = {trial: [self._backend.now()] for trial in gangs}
        while waiting := {trial: times for trial, times in instants.items() if len(times) < until - start + 2}:
            wake_at = min(max(times[-1], self._woke_at) + self._patience_s(times) for times in waiting.values())
            for event in self._next(wake_at):
                self._take_in(event, instants)
            for trial, times in waiting.items():
                if trial in instants and self._silent(times[-1], self._patience_s(times)):
                    self._give_up_silent(trial, times, instants)
        return instants

    def _patience_s(self, times: Sequence[float]) -> float:
        return self._limits.silence_s(starting=len(times) == 1, slowest_s=self._slowest_s)

    def _silent(self, heard_at: float, patience_s: float) -> bool:
        return self._backend.now() >= max(heard_at, self._woke_at) + patience_s

    def _take_in(self, event: Event, instants: dict[int, list[float]]) -> None:
        match event:
            case TrialStarted() | TrialReported() if event.attempt == self._attempt and event.trial in instants:
                instants[event.trial].append(event.occurred_at)
            case TrialFailed() if event.attempt == self._attempt and event.trial in instants:
                del instants[event.trial]
                self._give_up(event)
        if isinstance(event, TrialReported):
            self._keep(event.trial, event.checkpoint)
            times = instants.get(event.trial, [])[-2:]
            self._slowest_s = max(
                [self._slowest_s or 0.0, *(after - before for before, after in itertools.pairwise(times))]
            )

    def _give_up_silent(self, trial: int, times: Sequence[float], instants: dict[int, list[float]]) -> None:
        """Do without a trial that hangs. Raises _Stopped if all beside it did: the others would cost as much time."""
        self._backend.execute(StopTrial(trial=trial, attempt=self._attempt))
        self._trials.remove(trial)
        del instants[trial]
        if not instants:
            what = "start-up" if len(times) == 1 else "an iteration"
            raise _Stopped(
                f"its trials hung ({what} took more than {self._patience_s(times):.0f} s); if that may take longer, "
                f"set constraints.iteration_timeout"
            )

    def _give_up(self, failed: TrialFailed) -> None:
        """Do without a trial that failed. Raises RubberbandError if no other is left, or would do better."""
        self._trials.remove(failed.trial)
        if failed.kind == "no_metric":
            raise RubberbandError(failed.message)
        if not self._trials:
            raise RubberbandError(f"every trial that was measured failed; the last one {failed.kind}: {failed.message}")

    def _keep(self, trial: int, checkpoint: CheckpointRef) -> None:
        if (old := self._checkpoints.get(trial)) is not None:
            self._backend.execute(DiscardCheckpoint(checkpoint=old))
        self._checkpoints[trial] = checkpoint

    def _next(self, wake_at: float) -> Sequence[Event]:
        """What has happened, or nothing by `wake_at`. Raises where that ends the measurement, or a limit does."""
        ends_at, limit = self._end()
        wake_at = min(wake_at, ends_at)
        events = self._backend.next_events(wake_at)
        for event in events:
            self._note(event)
            _refuse(event)
        if self._cancelled():
            raise Cancelled("measuring the profile was cancelled; nothing was saved")
        if (now := self._backend.now()) >= ends_at:
            raise _Stopped(f"{limit} is reached; raise it, or write a profile into the experiment file")
        if now > wake_at + _PAUSE_S:
            self._woke_at = now
        return events

    def _end(self) -> tuple[float, str]:
        """When measuring must stop, and the limit that says so."""
        ends = [(self._began_at + self._limits.time_s, self._limits.time_by)]
        if self._running:
            ends.append((min(self._running.values()) + self._limits.held_s, self._limits.held_by))
        return min(ends)


def _refuse(event: Event) -> None:
    match event:
        case InstanceRefused():
            raise ProviderError(f"profiling needs instance {event.instance}, which was refused: {event.reason}")
        case InstanceLost():
            raise ProviderError(f"profiling lost instance {event.instance}: {event.reason}; start it again")
