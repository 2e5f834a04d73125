"""One session of measuring: instances that are held, trials that train side by side in rounds, and what they report.

The first iteration of a start does not count if it takes longer than the others: what is done once is start-up. While
iterations vary widely, measuring goes on for some seconds.

A trial that fails or hangs is dropped, so that a few bad configurations do no harm. One that ends by itself is timed by
what it did, by its warm-up if there is no more. A limit, or a hang of all trials of a round, ends the measurement with
the points so far.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Literal

from rubberband.errors import Cancelled, ProviderError, RubberbandError
from rubberband.executor.core.backend import Backend
from rubberband.executor.core.events import (
    CheckpointLost,
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
    TrialArtifact,
    TrialEnded,
    TrialFailed,
    TrialRepeated,
    TrialReported,
    TrialStarted,
)
from rubberband.executor.profiling.points import (
    BatchReports,
    InstanceStart,
    Point,
    Timed,
    UpdateReports,
    first_extra_s,
    point_of,
)
from rubberband.values.profile import WIDE_CV

_RELEASE_S = 60.0
ENOUGH_TRIALS = 16
"""With this many, the differences between trials and their mean are known well enough."""
SHARE = 0.1
"""Share of the job's time that measuring may train for, if `job_iterations` is given."""
BRIEFLY_S = 15.0
"""More trials than fit side by side are measured within it by default: an instance is billed for a minute anyway."""
_MOST_BLOCKS = 5
_FEWEST_FURTHER = 2
"""Fewer further iterations show nothing: the first of a start does not count."""
_PAUSE_S = 30.0
"""A wait that takes this much longer than asked is this machine's sleep, not a trial's silence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilingLimits:
    """Limits of measuring; it stops at the first that is reached."""

    held_s: float = math.inf
    """The longest time that each instance may run."""
    slack_s: float = 1.5
    """Beyond `held_s`, until an instance that was not released ends itself."""
    held_by: str = "max_cost"
    """The source of `held_s`, in the user's words."""
    time_s: float = math.inf
    """From the call, including the wait for instances."""
    time_by: str = "deadline"
    ready_s: float = 900.0
    """The longest wait for another event of the instances before they are ready."""
    first_s: float = 300.0
    """For a trial's start-up, and for its first iteration."""
    job_iterations: float | None = None
    """Iterations that the job trains one after another: measuring then trains for a tenth of their time. It leaves out
    further trials first, then iterations after the first timed one, then numbers of GPUs between the smallest and the
    largest. None: all is measured."""
    least_iterations: int = 1
    """Iterations that are timed at least: 2 where a start passes within the first one, which shows it alone."""
    iteration_s: float | None = None
    """The longest silence of a trial that trains. None: `first_s`, then ten times the slowest iteration so far, but at
    least `shortest_s`."""
    shortest_s: float = 60.0

    def silence_s(self, *, starting: bool, slowest_s: float | None) -> float:
        """Return the seconds of silence after which a trial is dropped; `slowest_s` is the slowest iteration so far."""
        if starting:
            return max(self.first_s, self.iteration_s or 0.0)
        if self.iteration_s is not None:
            return self.iteration_s
        return self.first_s if slowest_s is None else max(self.shortest_s, 10.0 * slowest_s)


Purpose = Literal["warm up", "time", "sweep"]
"""Purpose of a segment: it does not count; it is timed; or it tries batch sizes."""


class Stopped(Exception):
    """Measuring stops; the message says why, and the fix."""


class ProfilingSession:
    """Commands to the backend and its events; anything unexpected is an error."""

    def __init__(
        self, backend: Backend, num_trials: int, limits: ProfilingLimits, cancelled: Callable[[], bool]
    ) -> None:
        self._backend = backend
        self._limits = limits
        self._began_at = backend.now()
        self._woke_at = -math.inf
        self._slowest_s: float | None = None
        self._cancelled = cancelled
        self._trials = list(range(num_trials))
        """Trials that have not failed."""
        self._running: dict[str, float] = {}
        self._ended: dict[str, float] = {}
        self._over: set[int] = set()
        """Trials that ended by themselves in their latest segment."""
        self._ended_trials: set[int] = set()
        """Trials that have ever ended by themselves."""
        self._cold: list[tuple[int, float, float]] = []
        """Trials that were the first on one of their slots, of the point that is measured: start-up and first
        iteration in seconds."""
        self.times_warm_up = False
        """Whether a trial ended too soon to be timed after its warm-up."""
        self._checkpoints: dict[int, CheckpointRef] = {}
        self._held: set[str] = set()
        self._timed: dict[int, Gang] = {}
        """Trials of the latest point."""
        self._attempt = 0
        self._purpose: Purpose = "warm up"
        self.batches = BatchReports()
        self.updates = UpdateReports()
        self.failed_sweeps: list[str] = []
        """Why trials stopped trying batch sizes, a line each."""
        self.is_unsaved = self.begins_again = False
        """Whether no report so far came with a checkpoint, and whether trials train all again though they have one."""
        self._repeated = Counter[int]()
        """Iterations of the segment that each trial trains again."""
        self._warm_slots: set[Slot] = set()
        """Slots that a trial has trained on."""
        self.instance_starts: tuple[InstanceStart, ...] = ()
        self.cold_starts_s: list[float] = []
        """Start-up times of trials that were the first on one of their slots."""
        self.cold_extras_s: list[float] = []
        """How much longer their first iterations took than others, by point."""
        self.stopped: Stopped | None = None
        """Why the latest point has fewer trials than it should."""
        self._began_training_at: float | None = None
        self._job_s: float | None = None
        """Predicted time of the job."""
        self.left_out: list[int] = []
        """Numbers of GPUs for which there was no time."""
        self.is_whole = limits.job_iterations is None
        """Whether everything is measured, however short the job is."""
        self.done = 0
        """Iterations of the latest point's trials."""

    def left_s(self) -> float:
        """Return the time for which measuring may still train; infinite without a limit by the job."""
        if self._job_s is None or self._began_training_at is None:
            return math.inf
        return SHARE * self._job_s - (self._backend.now() - self._began_training_at)

    @contextlib.contextmanager
    def instances(self, names: Sequence[str]) -> Iterator[Sequence[str]]:
        asked_at = self._backend.now()
        ready: dict[str, float] = {}
        self._backend.hold_until(self._held_until())
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
            self.instance_starts = tuple(
                InstanceStart(provision_s=self._running[name] - asked_at, init_s=ready[name] - self._running[name])
                for name in names
            )
            yield names
        finally:
            self._release()

    def _release(self) -> None:
        for checkpoint in self._checkpoints.values():
            self._backend.execute(DiscardCheckpoint(checkpoint=checkpoint))
        for name in sorted(self._held):
            self._backend.execute(ReleaseInstance(instance=name))
        deadline = self._backend.now() + _RELEASE_S
        while self._held and self._backend.now() < deadline:  # the backend's close releases the rest
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
        """Return how long each instance that ran was held, so far."""
        now = self._backend.now()
        return tuple(self._ended.get(name, now) - running_at for name, running_at in self._running.items())

    def measure(self, gangs: Sequence[Gang], warm_up: int, iterations: int, least_trials: int | None = 0) -> Point:
        """Train on all gangs at once: `warm_up` iterations that do not count, then `iterations` that do.

        There are as many trials as gangs, or up to `least_trials` in turn; None: up to `ENOUGH_TRIALS` if that takes
        seconds. After a limit or a hang, the trials measured before remain, and `stopped` says why.
        """
        wanted, waiting, timed = max(len(gangs), least_trials or 0), list(self._trials), list[Timed]()
        tried, began_at = 0, self._backend.now()
        self._began_training_at = self._began_training_at or began_at
        while waiting and (tried < wanted or all(trial.is_cold for trial in timed)):
            round_at = self._backend.now()
            round_of = waiting[: len(gangs) if tried >= wanted else min(len(gangs), wanted - tried)]
            waiting, tried = waiting[len(round_of) :], tried + len(round_of)
            try:
                timed += self._measure_round(dict(zip(round_of, gangs, strict=False)), warm_up, iterations)
            except Stopped as reason:
                if not timed:
                    raise
                self.stopped = reason
                break
            if self.stopped is not None:
                break
            now = self._backend.now()
            if self.left_s() < now - round_at:
                break
            if least_trials is None and 2.0 * now - round_at - began_at <= BRIEFLY_S:  # another round would end by then
                wanted = min(ENOUGH_TRIALS, tried + len(gangs))
        return self._point(len(gangs[0]), len(gangs), timed)

    def _point(self, gpus: int, copies: int, timed: Sequence[Timed]) -> Point:
        """Return the point of some trials; what their first starts took goes to `cold_starts_s`."""
        point = point_of(gpus, copies, timed)
        usual = {trial.trial: trial.iterations_s for trial in point.timed}
        anyone = tuple(second for others in usual.values() for second in others)
        firsts = [(first_s, usual.get(trial, anyone)) for trial, _, first_s in self._cold]
        extra_s = first_extra_s(firsts)
        self.cold_extras_s.append(extra_s)
        self.cold_starts_s += [start_s + extra_s for _, start_s, _ in self._cold]
        self._cold.clear()
        return point

    def _measure_round(self, gangs: Mapping[int, Gang], warm_up: int, iterations: int) -> list[Timed]:
        """Train every trial on its gang from its beginning; go on while its iterations vary, if there is time.

        After a limit or a hang, the times measured before remain, and `stopped` says why.
        """
        began_at = self._backend.now()
        cold = {trial for trial, gang in gangs.items() if not self._warm_slots.issuperset(gang)}
        warm = self._train(gangs, 0, warm_up, "warm up")
        self._warm_slots.update(slot for trial in warm for slot in gangs[trial])
        self._cold += [(trial, *_start_of(instants)) for trial, instants in warm.items() if trial in cold]
        if not warm:
            return []
        self._timed = {trial: gangs[trial] for trial in warm if trial not in self._over}
        iteration_s = min((times[-1] - times[1]) / (len(times) - 2) for times in warm.values())
        if self._job_s is None and self._limits.job_iterations is not None:
            self._job_s = self._limits.job_iterations * iteration_s
        ended = {trial: times for trial, times in warm.items() if trial in self._over}
        self.done = warm_up
        blocks = list[dict[int, list[float]]]()
        while self._timed:
            share_s = self.left_s()
            left_s = max(0.0 if blocks and math.isinf(share_s) else share_s, BRIEFLY_S + began_at - self._backend.now())
            left_s -= self.done * iteration_s if self.is_unsaved else 0.0
            number = int(min(iterations, left_s / iteration_s if iteration_s > 0.0 else iterations))
            if blocks and (number < _FEWEST_FURTHER or len(blocks) == _MOST_BLOCKS):
                break
            number = max(self._limits.least_iterations, number)
            try:
                blocks.append(self._train(self._timed, self.done, self.done + number, "time"))
            except Stopped as reason:
                if not blocks:
                    raise
                self.stopped = reason
                break
            self.done += number
            going = {trial: gangs[trial] for trial in blocks[-1] if trial not in self._over}
            is_over, self._timed = len(going) < len(self._timed), going
            times = [_iterations(instants) for instants in blocks[-1].values() if len(instants) > 2]
            if is_over or not times or _is_steady(times):
                break
            iteration_s = max(map(fmean, times))
        if blocks and _is_steady(list(map(_iterations, blocks[-1].values()))):
            blocks = blocks[-1:]  # what disturbed the others is over
        return self._timed_of(gangs, warm, blocks, cold & ended.keys())

    def _timed_of(
        self,
        gangs: Mapping[int, Gang],
        warm: Mapping[int, list[float]],
        blocks: Sequence[Mapping[int, list[float]]],
        is_cold: Set[int],
    ) -> list[Timed]:
        """Return what the trials took in the blocks, and in their warm-up if they ended by then."""
        timed = []
        for trial, instants in warm.items():
            own = [block[trial] for block in blocks if len(block.get(trial, ())) > 2]
            if not own:
                if trial not in self._ended_trials:
                    continue
                self.times_warm_up = True
                own = [instants]
            times = list(map(_iterations, own))
            firsts = tuple(series[0] for series in times if len(series) > 1)
            others = tuple(second for series in times for second in (series[1:] or series))
            timed.append(
                Timed(
                    trial=trial,
                    instances=tuple(dict.fromkeys(slot.instance for slot in gangs[trial])),
                    startup_s=fmean(_start_of(block)[0] for block in own),
                    iterations_s=others,
                    firsts_s=firsts,
                    is_cold=trial in is_cold,
                )
            )
        return timed

    def sweep(self) -> None:
        """Let the latest point's trials try their batch sizes; failures are dropped."""
        self._train(self._timed, self.done, self.done + 1, "sweep")

    def _train(self, gangs: Mapping[int, Gang], start: int, until: int, purpose: Purpose) -> dict[int, list[float]]:
        """Run one segment of every trial on its gang; return the instants of those that did not fail.

        These are the order to start, the first step, and the end of every iteration, with those that are repeated.
        """
        self._attempt += 1
        self._purpose = purpose
        self._over.clear()
        self._repeated.clear()
        for trial, gang in gangs.items():
            self._backend.execute(
                StartTrial(
                    trial=trial,
                    attempt=self._attempt,
                    gang=gang,
                    from_iterations=start,
                    until_iterations=until,
                    checkpoint=self._checkpoints.get(trial) if start else None,
                    batch_mode="sweep" if purpose == "sweep" else "hold",
                )
            )
        instants = {trial: [self._backend.now()] for trial in gangs}
        while waiting := {
            trial: times
            for trial, times in instants.items()
            if trial not in self._over and len(times) < until - start + 2 + self._repeated[trial]
        }:
            wake_at = min(max(times[-1], self._woke_at) + self._patience_s(times) for times in waiting.values())
            for event in self._next(wake_at):
                self._take_in(event, instants)
            for trial, times in waiting.items():
                if trial in instants and self._silent(times[-1], self._patience_s(times)):
                    self._give_up_silent(trial, times, instants)
        self.begins_again = self.begins_again or (start > 0 and max(self._repeated.values(), default=0) >= start)
        return instants

    def _patience_s(self, times: Sequence[float]) -> float:
        patience_s = self._limits.silence_s(starting=len(times) == 1, slowest_s=self._slowest_s)
        return max(patience_s, self._limits.first_s) if self._purpose == "sweep" else patience_s

    def _silent(self, heard_at: float, patience_s: float) -> bool:
        return self._backend.now() >= max(heard_at, self._woke_at) + patience_s

    def _take_in(self, event: Event, instants: dict[int, list[float]]) -> None:
        match event:
            case TrialStarted() | TrialReported() if event.attempt == self._attempt and event.trial in instants:
                instants[event.trial].append(event.occurred_at)
                if isinstance(event, TrialReported) and event.ended:
                    self._end_trial(event.trial)
            case TrialEnded() if event.attempt == self._attempt and event.trial in instants:
                self._end_trial(event.trial)
            case TrialRepeated() if event.attempt == self._attempt and event.trial in instants:
                instants[event.trial].append(event.occurred_at)  # an iteration like the others
                self._repeated[event.trial] += 1
            case TrialFailed() | CheckpointLost() if event.attempt == self._attempt and event.trial in instants:
                del instants[event.trial]
                if self._purpose == "sweep":
                    self.failed_sweeps.append(f"{len(self._timed[event.trial])} GPU: {event.message}")
                else:
                    self._give_up(event)
        if isinstance(event, TrialArtifact):
            self._backend.execute(DiscardCheckpoint(checkpoint=event.file))
        if isinstance(event, TrialReported) and event.checkpoint is not None:
            self.is_unsaved = event.saved_iterations == 0 and not event.ended
            if (old := self._checkpoints.get(event.trial)) is not None:
                self._backend.execute(DiscardCheckpoint(checkpoint=old))
            self._checkpoints[event.trial] = event.checkpoint
        if isinstance(event, TrialReported):
            self._note_times(event, instants.get(event.trial, []))

    def _end_trial(self, trial: int) -> None:
        self._over.add(trial)
        self._ended_trials.add(trial)

    def _note_times(self, report: TrialReported, times: Sequence[float]) -> None:
        took_s = times[-1] - times[-2] if len(times) > 1 and report.attempt == self._attempt else None
        if took_s is not None and self._purpose != "sweep":
            self._slowest_s = max(self._slowest_s or 0.0, took_s)
        iteration_s = took_s if self._purpose == "time" else None
        self.updates.add(report, iteration_s)
        self.batches.add(report, is_timed=self._purpose != "warm up", iteration_s=iteration_s)

    def _give_up_silent(self, trial: int, times: Sequence[float], instants: dict[int, list[float]]) -> None:
        """Drop a trial that hangs. Raises Stopped if all beside it hung: the others would cost as much time."""
        self._backend.execute(StopTrial(trial=trial, attempt=self._attempt))
        self._trials.remove(trial)
        del instants[trial]
        if not instants and not (self._purpose == "sweep" and self._trials):
            what = "start-up" if len(times) == 1 else "an iteration"
            raise Stopped(
                f"its trials hung ({what} took more than {self._patience_s(times):.0f} s); if that may take longer, "
                f"set constraints.iteration_timeout"
            )

    def _give_up(self, failed: TrialFailed | CheckpointLost) -> None:
        """Drop a trial that failed. Raises RubberbandError if no other is left, or would do better."""
        self._trials.remove(failed.trial)
        kind = failed.kind if isinstance(failed, TrialFailed) else "checkpoint"
        if kind == "no_metric":
            raise RubberbandError(failed.message)
        if not self._trials:
            raise RubberbandError(f"every trial that was measured failed; the last one {kind}: {failed.message}")

    def _next(self, wake_at: float) -> Sequence[Event]:
        """Return the events, none by `wake_at`. Raises if an event or a limit ends the measurement."""
        ends_at, limit = self._end()
        self._backend.hold_until(self._held_until())
        wake_at = min(wake_at, ends_at)
        events = self._backend.next_events(wake_at)
        for event in events:
            self._note(event)
            _refuse(event)
        if self._cancelled():
            raise Cancelled("measuring the profile was cancelled; nothing was saved")
        if (now := self._backend.now()) >= ends_at:
            raise Stopped(f"{limit} is reached; raise it, or write a profile into the experiment file")
        if now > wake_at + _PAUSE_S:
            self._woke_at = now
        return events

    def _held_until(self) -> float:
        """Return the instant at which the budget ends, counted from now until an instance runs."""
        return min(self._running.values(), default=self._backend.now()) + self._limits.held_s + self._limits.slack_s

    def _end(self) -> tuple[float, str]:
        """Return when measuring must stop, and the limit that says so."""
        ends = [(self._began_at + self._limits.time_s, self._limits.time_by)]
        if self._running:
            ends.append((min(self._running.values()) + self._limits.held_s, self._limits.held_by))
        return min(ends)


def _start_of(instants: Sequence[float]) -> tuple[float, float]:
    """Return the seconds of the start-up and of the first iteration."""
    return max(0.0, instants[1] - instants[0]), instants[2] - instants[1]


def _iterations(instants: Sequence[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(instants[1:])]


def _is_steady(times: Sequence[Sequence[float]]) -> bool:
    """Whether the iterations of trials after their first one vary so little that a few show their mean."""
    others = [series[1:] for series in times if len(series) > 2]
    if not others:
        return False
    within = fmean(variance(series) / fmean(series) ** 2 for series in others)
    return math.sqrt(within) <= WIDE_CV


def _refuse(event: Event) -> None:
    match event:
        case InstanceRefused():
            how = "failed to start" if event.failed_start else "was refused"
            raise ProviderError(f"profiling needs instance {event.instance}, which {how}: {event.reason}")
        case InstanceLost():
            raise ProviderError(f"profiling lost instance {event.instance}: {event.reason}; start it again")
