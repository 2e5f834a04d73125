"""The virtual backend: the same controller on a clock that jumps. Thousands of runs with faults are a unit test.

It is also the check on the planner: with deterministic times a virtual run takes and costs what was predicted. It keeps
the promises of the real backend, and no others (see `rubberband.executor.virtual.fleet` for what may go wrong).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median_low

from rubberband.cloud.virtual import LEASE_S, VirtualClock, VirtualProvider
from rubberband.executor.core.events import (
    CheckpointLost,
    CheckpointRef,
    Command,
    DriverResumed,
    Event,
    FailureKind,
    Gang,
    LaunchInstance,
    ReleaseInstance,
    StartTrial,
    StopTrial,
    TrialEnded,
    TrialFailed,
    TrialRepeated,
    TrialReported,
    TrialStarted,
)
from rubberband.executor.core.job import Job
from rubberband.executor.virtual.fleet import Agenda, AttemptFaults, FaultModel, Faults, VirtualFleet
from rubberband.values.adaptive import BatchUse
from rubberband.values.balance import BalanceUse
from rubberband.values.offer import Offer
from rubberband.values.profile import Profile
from rubberband.values.ranking import Limit


def by_trial(trial: int, iterations: int) -> float:
    """The default metric of a virtual trial, up from 0 to 1: the lower its id, the better."""
    return 1.0 - (trial + 1) / (trial + 1 + iterations)


def shuffled(num_trials: int, seed: object) -> Callable[[int, int], float]:
    """Return a metric by which the trials are good in a random order: where results decide when they come (asha)."""
    order = list(range(num_trials))
    Random(f"{seed}").shuffle(order)

    def metric(trial: int, iterations: int) -> float:
        is_added = trial >= num_trials
        return by_trial(Random(f"{seed} {trial}").randrange(trial) if is_added else order[trial], iterations)

    return metric


def curves(job: Job, seed: object) -> Callable[[int, int], float]:
    """Return the metric of the trials of a job, which improves with each iteration, in the direction of its mode."""
    by = by_trial if job.has_sync else shuffled(job.num_trials, seed)
    return by if job.mode == "max" else lambda trial, iterations: 1.0 - by(trial, iterations)


def within(limit: Limit, trial: int) -> float:
    """Return the value of a metric with a limit: it breaks it for every fourth trial."""
    breaks = trial % 4 == 3
    if limit.at_most is None:
        assert limit.at_least is not None, "a limit has a bound"
        return limit.at_least - breaks
    return limit.at_most + breaks


BatchesOf = Callable[[int, int, Gang, float], tuple[BatchUse, ...]]


def fixed_batch(trial: int, iterations: int, gang: Gang, iteration_s: float) -> tuple[BatchUse, ...]:
    """Return no batches: a virtual trial's batch is fixed."""
    return ()


_RETURNS_AFTER = 0.1
"""Iterations from the last report of a function to its return."""


@dataclass(slots=True)
class _VirtualAttempt:
    """One attempt under way."""

    start: StartTrial
    faults: AttemptFaults
    iteration_s: float
    began_with: int
    """Iterations in the checkpoint from which it starts."""
    saved: int
    """Iterations in its latest checkpoint."""
    curve: int
    """The trial whose curve its metrics follow: another one's, where it goes on from that one's checkpoint."""
    began_at: float | None = None
    done: int = 0
    """Iterations of this attempt, the repeated ones included."""
    mean_iterations: float = 0.0
    """Length of the done iterations and of the one under way, in iterations of mean length on even workers."""
    paces: tuple[float, ...] = ()
    """How many times longer a step takes on each worker in the iteration under way, or the latest."""


class VirtualBackend:
    """Implements `rubberband.executor.core.backend.Backend` with times from the profile and the offer."""

    def __init__(
        self,
        name: str,
        offer: Offer,
        profile: Profile,
        *,
        metric: str,
        metric_of: Callable[[int, int], float] = by_trial,
        faults: FaultModel | None = None,
        clock: VirtualClock | None = None,
        slowdown: float = 1.0,
        pace_of: Callable[[int], float] = lambda trial: 1.0,
        batches_of: BatchesOf = fixed_batch,
        checkpoint_every: int = 1,
        limits: Sequence[Limit] = (),
        lease_s: float | None = None,
        ready_timeout_s: float = math.inf,
    ) -> None:
        """`metric_of(trial, iterations)` is what a trial reports.

        `slowdown` multiplies the profile's iterations of all trials, `pace_of(trial)` those of one.
        `batches_of(trial, iterations, gang, iteration_s)` are the batch sizes in a report. A trial also reports the
        metrics that have `limits`, of which every fourth trial breaks all. A trial writes a checkpoint
        every `checkpoint_every` iterations, and at the end of its stage. Leases are of `lease_s` (None: ten minutes, or
        twice what an instance takes to be ready); an instance whose workers are not warm `ready_timeout_s` after the
        driver saw it run is given up as lost.
        """
        self._profile = profile
        self._metric = metric
        self._metric_of = metric_of
        self.fault_model: FaultModel = faults or Faults()
        self.clock = clock or VirtualClock()
        self._slowdown = slowdown
        self._pace_of = pace_of
        self._batches_of = batches_of
        self._checkpoint_every = checkpoint_every
        self._limits = limits
        lease_s = max(LEASE_S, 2.0 * offer.init_delay_s) if lease_s is None else lease_s
        self.provider = VirtualProvider(
            name, self.clock, offer=offer, lease_s=lease_s, faults_of=self.fault_model.instance, by_worker=True
        )
        self.agenda = Agenda()
        self.fleet = VirtualFleet(
            self.provider, self.clock, self.agenda, self.fault_model, lease_s=lease_s, ready_timeout_s=ready_timeout_s
        )
        self._runs: dict[int, _VirtualAttempt] = {}

    def now(self) -> float:
        return self.clock.now()

    def execute(self, command: Command) -> None:
        """Put what will come of the command on the agenda."""
        match command:
            case StartTrial():
                self._start(command)
            case StopTrial():
                self._stop(command)
            case LaunchInstance():
                self.fleet.launch(command.instance, command.market, command.first_lease_s)
            case ReleaseInstance():
                self.fleet.release(command.instance)

    def hold_until(self, instant: float) -> None:
        if instant != self.fleet.hold_until:
            self.fleet.hold_until = instant
            self.fleet.renew(self.now())

    def next_events(self, wake_at: float | None) -> Sequence[Event]:
        """Jump to the next instant with events, or to `wake_at` if that comes first; events due at `wake_at` go before.

        All events of one instant come at once.
        """
        agenda = self.agenda
        while True:
            next_at = agenda.next_at()
            until = next_at if wake_at is None else min(next_at, wake_at)
            assert until < math.inf, "the controller waits for an event that will never come"
            if self.fleet.hold_until < until and (ends_at := self.fleet.next_end_at()) <= until:
                self._advance(ends_at)
                self.fleet.notice_ends()
                continue
            self._advance(until)
            if until < next_at:
                return []
            if events := self.due_events():
                return events

    def due_events(self) -> list[Event]:
        """Return the events of all that happens now."""
        agenda, now = self.agenda, self.clock.now()
        events: list[Event] = []
        # Reports of one instant come in the order of the trials: where each counts at once (asha), it decides.
        while (action := agenda.pop_due(now)) is not None:
            event = action(now)
            if event is not None:
                events.append(event)
        reports = iter(sorted((e for e in events if isinstance(e, TrialReported)), key=lambda e: e.trial))
        return [next(reports) if isinstance(event, TrialReported) else event for event in events]

    def _advance(self, instant: float) -> None:
        """Advance the clock to `instant`, and renew the leases all the way."""
        if instant > self.clock.now():
            self.fleet.beat(instant)
            self.clock.advance_to(instant)

    def sleep(self, seconds: float) -> None:
        """Let the machine sleep, and its instances with it, as those of the local provider do."""
        self.agenda.postpone(seconds)
        self._advance(self.now() + seconds)

    def stall(self, seconds: float) -> None:
        """Let the driver's machine sleep: instances go on, no lease is renewed, and all messages come late."""
        self.clock.advance_to(self.now() + seconds)
        self.fleet.renew(self.now())

    def forget(self) -> None:
        """Drop all that is under way, as if the driver had died."""
        self.agenda.clear()
        self._runs.clear()

    def reconcile(self, known: Collection[str]) -> DriverResumed:
        """Say what lives and what ended; forget every worker, as if the driver's death had taken them along."""
        self.forget()
        return self.fleet.reconcile(known)

    def close(self) -> None:
        self.agenda.clear()
        self.fleet.close()

    # Trials

    def _start(self, start: StartTrial) -> None:
        faults = self.fault_model.attempt(start.trial, start.attempt)
        iteration_s = self._profile.iteration_s(len(start.gang)) * self._slowdown * self._pace_of(start.trial)
        held, curve = 0, start.trial
        if start.checkpoint is not None:
            of, _, saved = start.checkpoint.url.rpartition("/")
            held, curve = int(saved), int(of.rpartition(":")[2])
        run = self._runs[start.trial] = _VirtualAttempt(
            start, faults, iteration_s * faults.pace, began_with=held, saved=held, curve=curve
        )
        startup_s = self._profile.startup_s(len(start.gang)) * faults.startup
        self.agenda.add(self.now() + startup_s, lambda now: self._begin(run, now))

    def _stop(self, stop: StopTrial) -> None:
        run = self._runs.get(stop.trial)
        if run is not None and run.start.attempt == stop.attempt:
            del self._runs[stop.trial]
            if run.faults.outlives_stop and run.began_at is not None:
                self.agenda.add(self.now(), lambda now: self._last_words(run, now))

    def _lives(self, run: _VirtualAttempt) -> bool:
        """Whether the attempt goes on: not stopped, and none of its machines gone."""
        if self._runs.get(run.start.trial) is not run:
            return False
        gone = self.fleet.gone
        return not gone or not any(slot.instance in gone for slot in run.start.gang)

    def _begin(self, run: _VirtualAttempt, now: float) -> Event | None:
        if not self._lives(run):
            return None
        if run.faults.loses_checkpoint and run.start.checkpoint is not None:
            del self._runs[run.start.trial]
            message = f"the checkpoint {run.start.checkpoint.url} is gone"
            return CheckpointLost(occurred_at=now, trial=run.start.trial, attempt=run.start.attempt, message=message)
        run.began_at = now
        self._expect_report(run, now)
        return TrialStarted(occurred_at=now, trial=run.start.trial, attempt=run.start.attempt)

    def _expect_report(self, run: _VirtualAttempt, began_at: float) -> None:
        if self._has_returned(run) and run.began_with + run.done < run.start.until_iterations:
            self.agenda.add(self.now() + _RETURNS_AFTER * run.iteration_s, lambda now: self._return(run, now))
        elif run.began_with + run.done < run.start.until_iterations:
            run.paces = tuple(self.fault_model.pace(slot.instance, self.now()) for slot in run.start.gang)
            iteration = self.fault_model.iteration(run.start.trial, run.began_with + run.done + 1)
            run.mean_iterations += iteration * balanced_factor(run.paces)
            ends_at = began_at + run.mean_iterations * run.iteration_s
            self.agenda.add(ends_at, lambda now: self._report(run, began_at, now))

    def _report(self, run: _VirtualAttempt, began_at: float, now: float) -> Event | None:
        if not self._lives(run):
            return None
        if run.faults.failure is not None and run.done >= run.faults.after_reports:
            return self._fail(run, run.faults.failure, now)
        run.done += 1
        event = self._as_report(run, run.done, now)
        if isinstance(event, TrialReported) and event.ended:
            del self._runs[run.start.trial]
        else:
            self._expect_report(run, began_at)
        return event

    def _has_returned(self, run: _VirtualAttempt) -> bool:
        """Whether the trial is a function that returns before its next report."""
        end = self.fault_model.end(run.start.trial)
        return end is not None and end.returns and run.began_with + run.done >= end.iterations

    def _return(self, run: _VirtualAttempt, now: float) -> Event | None:
        if not self._lives(run):
            return None
        del self._runs[run.start.trial]
        return TrialEnded(occurred_at=now, trial=run.start.trial, attempt=run.start.attempt)

    def _last_words(self, run: _VirtualAttempt, now: float) -> Event:
        """Return the event that was under way when the attempt was stopped."""
        if self._has_returned(run):
            return TrialEnded(occurred_at=now, trial=run.start.trial, attempt=run.start.attempt)
        return self._as_report(run, run.done + 1, now)

    def _fail(self, run: _VirtualAttempt, kind: FailureKind, now: float) -> Event | None:
        if kind == "hung":
            return None
        start = run.start
        del self._runs[start.trial]
        return TrialFailed(occurred_at=now, trial=start.trial, attempt=start.attempt, kind=kind, message="fault")

    def _as_report(self, run: _VirtualAttempt, done: int, now: float) -> Event:
        start = run.start
        iterations = run.began_with + done
        if iterations <= start.from_iterations:
            return TrialRepeated(occurred_at=now, trial=start.trial, attempt=start.attempt, iterations=iterations)
        checkpoint = None
        end = self.fault_model.end(start.trial)
        ends = end is not None and not end.returns and iterations >= end.iterations
        pauses = ends or iterations == start.until_iterations
        if pauses or (self._profile.resumes and iterations % self._checkpoint_every == 0):
            run.saved = iterations if self._profile.resumes else 0
            of = f"{start.trial}:{run.curve}" if run.curve != start.trial else start.trial
            checkpoint = CheckpointRef(url=f"virtual:{of}/{run.saved}", digest="", size_bytes=0)
        return TrialReported(
            occurred_at=now,
            trial=start.trial,
            attempt=start.attempt,
            iterations=iterations,
            metrics={
                self._metric: self._metric_of(run.curve, iterations),
                **{limit.metric: within(limit, start.trial) for limit in self._limits},
            },
            checkpoint=checkpoint,
            saved_iterations=run.saved if run.saved < iterations else None,
            batches=self._batches_of(start.trial, iterations, start.gang, run.iteration_s),
            balance=balance_use(run.paces, run.iteration_s),
            ended=ends,
        )


# The workers of a gang on virtual instances, some of which are slow: the time of a balanced step, and its shares.
#
# A worker needs time in proportion to its samples, so that a balanced gang is as fast as its workers together.

SAMPLES = 64
"""Samples of one worker in a step with equal shares."""
STEPS = 50
"""Steps of an iteration."""
STRAGGLES = 4.0
"""A worker that is slower than the median by this factor is reported as a straggler."""


def balanced_factor(paces: Sequence[float]) -> float:
    """Return how many times longer a balanced step takes than on even workers; `paces` are the workers' own factors."""
    return len(paces) / math.fsum(1.0 / pace for pace in paces)


def balance_use(paces: Sequence[float], even_s: float) -> BalanceUse | None:
    """Return what a balanced gang reports of an iteration that takes `even_s` on even workers; None on even workers."""
    if len(set(paces)) <= 1:
        return None
    speeds = [1.0 / pace for pace in paces]
    batch, step_s = SAMPLES * len(paces), balanced_factor(paces) * even_s / STEPS
    reached = [round(batch * math.fsum(speeds[:rank]) / math.fsum(speeds)) for rank in range(len(paces) + 1)]
    usual = median_low(paces)
    return BalanceUse(
        shares=tuple(after - before for before, after in itertools.pairwise(reached)),
        compute_s=(step_s,) * len(paces),
        step_s=step_s,
        equal_step_s=max(paces) * even_s / STEPS,
        steps=STEPS,
        stragglers=tuple(rank for rank, pace in enumerate(paces) if pace >= STRAGGLES * usual),
    )
