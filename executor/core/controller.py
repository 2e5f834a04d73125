"""The controller: `handle(event) -> [command]`, a pure function of its history. It reads no clock, network or chance.

A stage: ask for the instances that the plan wants -> wait for them -> place and start trials, queueing those beyond the
slots -> SYNC when all have done their iterations -> promote the best, stop the rest -> the driver plans the rest again
and tells what came of it, as an event -> give back what the next stage does not need. Whatever ends the experiment
(done, cancel, budget, failure) first releases every instance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rubberband.executor.core import budget, instances, rules
from rubberband.executor.core import trials as attempts
from rubberband.executor.core.events import (
    CancelRequested,
    CheckpointLost,
    Command,
    DriverResumed,
    DriverStopped,
    Event,
    FailureKind,
    Finish,
    LimitsChanged,
    Outcome,
    RestPlanned,
    Started,
    StopTrial,
    Tick,
    TrialFailed,
    TrialRepeated,
    TrialReported,
    TrialStarted,
)
from rubberband.executor.core.instances import INSTANCE_EVENTS, sort_out
from rubberband.executor.core.state import (
    Granted,
    InstanceStatus,
    Job,
    Pause,
    Phase,
    StageRecord,
    State,
    TrialState,
    TrialStatus,
)
from rubberband.executor.core.trials import rank
from rubberband.units import format_usd

PAUSE_S = 30.0
"""A Tick that is later than this was delayed by more than a busy driver."""


_ASKED = (LimitsChanged, CancelRequested)
_PROGRESS = (TrialStarted, TrialRepeated, TrialReported)


class Controller:
    """The state machine of one experiment. Only `handle` changes `state`, and `job` where more is granted."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.state = State(
            trials=[TrialState(trial=trial) for trial in range(job.stages[0].trials)],
            plan=job.plan,
            predicted=job.prediction.stages,
            profile=job.profile,
        )
        self._commands: list[Command] = []
        self._wake_at: float | None = None
        self._hold_until = math.inf

    def handle(self, event: Event) -> list[Command]:
        """Take one event in and return what is to be done now, in order."""
        self._commands = []
        if isinstance(event, Tick):
            self._forgive_a_pause(event)
        elif isinstance(event, _ASKED):
            if not self._is_news(event.request):
                return []
            if isinstance(event, LimitsChanged):
                return self._grant(event)
        is_due = self._wake_at is not None and event.occurred_at >= self._wake_at
        self.state.now = max(self.state.now, event.occurred_at)
        if self.state.phase is Phase.FINISHED and (self.is_over or not isinstance(event, DriverResumed)):
            return [self._finish()] if isinstance(event, DriverResumed) else []
        if isinstance(event, DriverStopped):
            self.state.stopped = event.reason
            return []
        before = self.state.changes
        self._note(event)
        if is_due or (self.job.max_cost_usd is not None and self.state.purse is None):
            self._check_time(isinstance(event, Tick))
        if is_due or self.state.changes != before or self._may_go_on(event):
            self._advance()
        self._look_ahead()
        return self._commands

    def wake_at(self) -> float | None:
        """When a Tick is due, if no other event comes before: a hang, a retry, or the end of the budget."""
        return self._wake_at

    def hold_until(self) -> float:
        """When whatever is held must have ended, should nothing be heard of the driver any more: the budget's reach."""
        return self._hold_until

    @property
    def is_over(self) -> bool:
        """Whether it has ended, and no resume goes on with it."""
        return self.state.phase is Phase.FINISHED and not rules.can_go_on(self.job, self.state)

    def _may_go_on(self, event: Event) -> bool:
        """Whether something may have to be done after an event that changed no trial's standing."""
        if not isinstance(event, _PROGRESS):
            return True
        return rules.missing(self.job, self.state) > 0 or bool(self.state.leaving())

    def _look_ahead(self) -> None:
        """After every event, asked for or not: the budget's reach remembers when it was reckoned, and so a replay comes
        to the very same."""
        self._hold_until, self._wake_at = rules.look_ahead(self.job, self.state)

    # What was asked

    def _is_news(self, request: str) -> bool:
        """Whether it is asked for the first time; a signal, which has no id, always is."""
        is_news = request not in self.state.requests
        if request:
            self.state.requests.add(request)
        return is_news

    def _grant(self, event: LimitsChanged) -> list[Command]:
        """Orders follow with the next event only: at a resume, this comes before it is known what is still held."""
        before, self.job = self.job, rules.granted(self.job, event)
        if self.job == before:
            return []
        self.state.granted.append(
            Granted(
                at=event.occurred_at,
                deadline_before_s=before.deadline_s,
                deadline_s=self.job.deadline_s,
                max_cost_before_usd=before.max_cost_usd,
                max_cost_usd=self.job.max_cost_usd,
            )
        )
        self.state.rent_changed()
        self._look_ahead()
        return []

    # What happened

    def _note(self, event: Event) -> None:
        match event:
            case TrialStarted() | TrialRepeated() | TrialReported() | TrialFailed() | CheckpointLost():
                trial = self.state.trials[event.trial]
                if trial.status is TrialStatus.RUNNING and trial.attempt == event.attempt:
                    self._note_trial(trial, event)
            case Started():
                self.state.started_at = event.occurred_at
                self.job = rules.begun(self.job, event.occurred_at)
                self._begin_stage(0, tuple(range(len(self.state.trials))))
            case DriverResumed():
                self._note_resumed(event)
            case RestPlanned():
                self._note_planned(event)
            case CancelRequested():
                self._end("cancelled", "cancelled by the user")
            case Tick():
                pass
            case _:
                assert isinstance(event, INSTANCE_EVENTS), f"no such event: {event!r}"
                self._commands += instances.note(self.job, self.state, event)

    def _note_trial(
        self, trial: TrialState, event: TrialStarted | TrialRepeated | TrialReported | TrialFailed | CheckpointLost
    ) -> None:
        match event:
            case TrialStarted():
                attempts.note_started(self.job, self.state, trial, event.occurred_at)
            case TrialRepeated():
                attempts.note_repeated(self.job, self.state, trial, event.occurred_at)
            case TrialReported():
                self.state.launches_left = self.job.launch_attempts
                self._commands += attempts.note_report(self.job, self.state, trial, event)
            case TrialFailed():
                self._fail(trial, event.kind, event.message)
            case CheckpointLost():
                attempts.go_back(self.job, self.state, trial, event.occurred_at, event.message)

    def _note_resumed(self, event: DriverResumed) -> None:
        state = self.state
        last_progress = max((trial.progress_at for trial in state.trials), default=state.started_at)
        for trial in state.running():
            attempts.free(self.job, state, trial, at=max(last_progress, state.allocation(trial).started_at))
            state.put(trial, TrialStatus.QUEUED)
        instances.let_go(self.job, state, state.current())
        commands, lost = sort_out(state, event)
        self._commands += commands
        for record, ended_at, reason, preempted in lost:
            instances.lose(self.job, state, record, ended_at, reason, preempted=preempted)
        state.resumed_at.append(event.occurred_at)
        state.stopped = ""
        self._reopen()

    def _reopen(self) -> None:
        """Go on after a resume, also where the user had cancelled, no instance was to be had, or a cap was raised."""
        state = self.state
        state.launches_left = self.job.launch_attempts
        state.relaunch_at, state.failed_starts = 0.0, 0
        if state.phase is Phase.NEW:
            state.started_at = state.now
            self.job = rules.begun(self.job, state.now)
            self._begin_stage(0, tuple(range(len(state.trials))))
        elif rules.can_go_on(self.job, state):
            if state.outcome == "failed":
                self._try_again(rules.failed_blameless(state))
            state.paused_s += state.now - (state.now if state.ended_at is None else state.ended_at)
            state.outcome, state.reason, state.ended_at = None, "", None
            state.stranded, state.exhausted_usd = False, None
            state.rent_changed()
            state.phase = Phase.SCALING if state.stages[-1].ended_at is None else Phase.PLANNING

    def _try_again(self, trials: Sequence[TrialState]) -> None:
        """Trials that failed by no fault of their own are not over, and so neither is their stage."""
        for trial in trials:
            trial.failures = 0
            self.state.put(trial, TrialStatus.QUEUED)
            self.state.stages[-1].ended_at = None

    def _note_planned(self, event: RestPlanned) -> None:
        state = self.state
        if state.phase is not Phase.PLANNING:
            return
        state.decisions.append(event)
        state.plan, state.profile = event.plan, event.profile
        state.predicted = (*state.predicted[: event.stage], *event.predicted)
        self._begin_stage(event.stage, tuple(sorted(rules.promoted(self.job, state.stages[-1]))))

    # What follows from time

    def _check_time(self, ticked: bool) -> None:
        if self.state.phase not in (Phase.SCALING, Phase.TRAINING, Phase.PLANNING):
            return
        now = self.state.now
        for trial in self.state.runners.due(now):
            self._commands.append(StopTrial(trial=trial.trial, attempt=trial.attempt))
            self._fail(trial, "hung", f"no report for {trial.due_at - trial.progress_at:.0f} s")
        if self.state.just_woke:  # what is told next may have cost less than it would have by now
            return
        if (reason := rules.over_budget(self.job, self.state, ticked)) is not None:
            self._end("budget", reason)

    def _forgive_a_pause(self, tick: Tick) -> None:
        """A Tick that comes much too late was not watched for (the machine slept): nobody hung meanwhile."""
        due_at, at = self.wake_at(), tick.occurred_at
        self.state.just_woke = tick.paused_s > 0.0
        if self.state.just_woke:
            self.state.pauses.append(Pause(at=at, paused_s=tick.paused_s))
        if self.state.just_woke or (due_at is not None and at > due_at + PAUSE_S):
            self.state.woke_at.append(at)
            for trial in self.state.running():
                attempts.note_progress(self.job, self.state, trial, at)

    # What is to be done

    def _advance(self) -> None:
        phase = None
        while phase is not self.state.phase:
            phase = self.state.phase
            self._commands += instances.release_left(self.job, self.state)
            if phase in (Phase.SCALING, Phase.TRAINING):
                self._commands += instances.launch_missing(self.job, self.state)
            if phase is Phase.SCALING and not rules.awaited(self.job, self.state):
                self._begin_training()
            elif phase is Phase.TRAINING:
                self._train()
            elif phase is Phase.ENDING:
                self._wind_up()

    def _begin_stage(self, stage: int, trials: tuple[int, ...]) -> None:
        state = self.state
        for trial in trials:
            state.put(state.trials[trial], TrialStatus.QUEUED)
            state.trials[trial].last_stage = stage
        state.stages.append(StageRecord(stage=stage, trials=trials, started_at=state.now))
        state.phase = Phase.SCALING
        state.launches_left = self.job.launch_attempts
        if not rules.buys_none(self.job, state):
            state.relaunch_at = 0.0
        self._commands += instances.release_surplus(self.job, state)

    def _begin_training(self) -> None:
        self.state.phase = Phase.TRAINING
        stage = self.state.stages[-1]
        if stage.training_at is None:
            stage.training_at = self.state.now
        stage.widest = max(stage.widest, len(self.state.live()))

    def _train(self) -> None:
        state = self.state
        if state.waiters:
            for trial, gang in rules.starts(self.job, state).items():
                self._commands.append(attempts.start(self.job, state, state.trials[trial], gang))
        if state.runners:
            return
        if not state.waiters:
            self._sync()
        elif not rules.awaited(self.job, state):
            self._end_stranded()

    def _sync(self) -> None:
        """Rank the stage's trials; promote the best, stop the rest; go to the next stage or end."""
        state = self.state
        stage = state.stages[-1]
        stage.ended_at = state.now
        contenders = [state.trials[trial] for trial in stage.trials]
        stage.ranking = rank(
            [trial for trial in contenders if trial.status is not TrialStatus.FAILED], self.job.metric, self.job.mode
        )
        if not stage.ranking:
            kind, message = next(trial.failure for trial in contenders if trial.failure is not None)
            told = f"every trial of stage {stage.stage} failed; the first one {kind}: {message}"
            if rules.failed_blameless(state):
                told += f"; `rubberband resume {self.job.name}` tries again"
            self._end("failed", told)
        elif stage.stage + 1 == len(self.job.stages):
            for trial in stage.ranking:
                state.put(state.trials[trial], TrialStatus.COMPLETED)
            self._end("done", "")
        else:
            promoted = rules.promoted(self.job, stage)
            for trial in set(stage.ranking) - set(promoted):
                state.put(state.trials[trial], TrialStatus.STOPPED)
                self._commands += attempts.let_go(state.trials[trial])
            if self.job.replan:
                state.phase = Phase.PLANNING
            else:
                self._begin_stage(stage.stage + 1, tuple(sorted(promoted)))

    # Ends

    def _fail(self, trial: TrialState, kind: FailureKind, message: str) -> None:
        attempts.note_failure(self.job, self.state, trial, kind, message)
        if kind == "no_metric" and not any(other.reports for other in self.state.trials):
            self._end("failed", message)

    def _end(self, outcome: Outcome, reason: str) -> None:
        state = self.state
        if state.phase in (Phase.ENDING, Phase.FINISHED):
            return
        state.phase, state.outcome, state.reason = Phase.ENDING, outcome, reason
        state.exhausted_usd = self.job.max_cost_usd if outcome == "budget" else None
        self._commands += [attempts.stop(self.job, state, trial) for trial in state.running()]

    def _end_stranded(self) -> None:
        state = self.state
        last = next((record for record in reversed(state.instances.values()) if record.reason), None)
        cut_short = last is not None and rules.cut_short(self.job, last)
        if state.failed_starts and not cut_short and last is not None and last.failed_start:
            self._end_unstarted()
            return
        told = f"no instance to train on: {'max_cost leaves room for none' if last is None else last.reason}"
        if (enough_usd := instances.needed_usd(self.job, state)) is not None:
            told += f"; max_cost of {format_usd(enough_usd)} would buy one on demand instead of spot"
        if last is not None and cut_short:
            told += f"; max_cost paid for {last.first_lease_s:.0f} s of {last.instance}, which was not ready by then"
        if rules.affordable(self.job, state) and not cut_short:
            state.stranded = True
            self._end("failed", f"{told}; run `rubberband resume {self.job.name}` once one is available")
        else:
            self._end("budget", told)

    def _end_unstarted(self) -> None:
        """No instance gets ready: the cause comes first, and a resume tries again."""
        job, state = self.job, self.state
        told = f"{rules.fails_to_start(state)}; {format_usd(budget.bill_usd(job, state, state.now))} spent"
        if rules.affordable(job, state):
            state.stranded = True
            self._end("failed", f"{told}; fix it, then rubberband resume {job.name}")
        else:
            self._end("budget", f"{told}; max_cost leaves room for no other instance")

    def _wind_up(self) -> None:
        """Release what is held; when nothing is left, finish."""
        state = self.state
        self._commands += instances.release(self.job, state, [*state.live(), *state.leaving()])
        if any(record.status is InstanceStatus.RELEASING for record in state.current()):
            return
        state.phase, state.ended_at = Phase.FINISHED, state.now
        self._commands.append(self._finish())

    def _finish(self) -> Finish:
        assert self.state.outcome is not None, "an ending has an outcome"
        return Finish(outcome=self.state.outcome, reason=self.state.reason)
