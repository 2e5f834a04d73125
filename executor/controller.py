"""The controller: `handle(event) -> [command]`, a pure function of its history. It reads no clock, network or chance.

A stage: ask for the instances that the plan wants -> wait for them -> place and start trials, queueing those beyond the
slots -> SYNC when all have done their iterations -> promote the best, stop the rest -> the driver plans the rest again
and tells what came of it, as an event -> give back what the next stage does not need. Whatever ends the experiment
(done, cancel, budget, failure) first releases every instance.
"""

from __future__ import annotations

from rubberband.executor import rules
from rubberband.executor.events import (
    CancelRequested,
    Command,
    DiscardCheckpoint,
    DriverResumed,
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
    Outcome,
    ReleaseInstance,
    RestPlanned,
    Started,
    StartTrial,
    StopTrial,
    Tick,
    TrialFailed,
    TrialReported,
    TrialStarted,
)
from rubberband.executor.ranking import rank
from rubberband.executor.recovery import sort_out
from rubberband.executor.state import (
    Allocation,
    InstanceRecord,
    InstanceStatus,
    Job,
    Phase,
    Report,
    StageRecord,
    State,
    TrialState,
    TrialStatus,
)

RETRY_DELAY_S = 10.0
"""Before a refused launch is tried again; doubled each time."""
PAUSE_S = 30.0
"""A Tick that is later than this was delayed by more than a busy driver."""
FINAL_FAILURES: frozenset[FailureKind] = frozenset({"not_a_number", "no_metric"})
"""Failures that another try would only repeat."""


class Controller:
    """The state machine of one experiment. Only `handle` changes `state`."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.state = State(
            trials=[TrialState(trial=trial) for trial in range(job.stages[0].trials)],
            plan=job.plan,
            predicted=job.prediction.stages,
            profile=job.profile,
        )
        self._commands: list[Command] = []

    def handle(self, event: Event) -> list[Command]:
        """Take one event in and return what is to be done now, in order."""
        self._commands = []
        if isinstance(event, Tick):
            self._forgive_a_pause(event.occurred_at)
        self.state.now = max(self.state.now, event.occurred_at)
        if self.state.phase is Phase.FINISHED and not (isinstance(event, DriverResumed) and self._cancelled()):
            return [self._finish()] if isinstance(event, DriverResumed) else []
        self._note(event)
        self._check_time(isinstance(event, Tick))
        self._advance()
        return self._commands

    def wake_at(self) -> float | None:
        """When a Tick is due, if no other event comes before: a hang, a retry, or the end of the budget."""
        return rules.wake_at(self.job, self.state)

    # What happened

    def _note(self, event: Event) -> None:
        match event:
            case Started():
                self.state.started_at = event.occurred_at
                self._begin_stage(0, tuple(range(len(self.state.trials))))
            case InstanceRunning() | InstanceReady() | InstanceRefused() | InstanceLost() | InstanceReleased():
                self._note_instance(event)
            case TrialStarted() | TrialReported() | TrialFailed():
                trial = self.state.trials[event.trial]
                if trial.status is TrialStatus.RUNNING and trial.attempt == event.attempt:
                    self._note_trial(trial, event)
            case DriverResumed():
                self._note_resumed(event)
            case RestPlanned():
                self._note_planned(event)
            case CancelRequested():
                self._end("cancelled", "cancelled by the user")
            case Tick():
                pass
            case _:
                raise AssertionError(f"no such event: {event!r}")

    def _note_instance(
        self, event: InstanceRunning | InstanceReady | InstanceRefused | InstanceLost | InstanceReleased
    ) -> None:
        record = self.state.instances[event.instance]
        match event:
            case InstanceRunning():
                record.running_at = event.running_at
                if record.status is InstanceStatus.REQUESTED:
                    record.status = InstanceStatus.RUNNING
            case InstanceReady():
                if record.ready_at is None:
                    record.ready_at = event.occurred_at
                if record.status is InstanceStatus.RUNNING:
                    record.status = InstanceStatus.READY
            case InstanceRefused():
                record.status, record.reason = InstanceStatus.REFUSED, event.reason
                rounds = self.job.launch_attempts - self.state.launches_left
                self.state.relaunch_at = event.occurred_at + RETRY_DELAY_S * 2 ** max(0, rounds - 1)
            case InstanceLost():
                self._lose(record, event.ended_at, event.reason)
            case InstanceReleased():
                record.status, record.ended_at = InstanceStatus.ENDED, event.ended_at
                if record.running_at is None:
                    record.running_at = event.running_at

    def _note_trial(self, trial: TrialState, event: TrialStarted | TrialReported | TrialFailed) -> None:
        match event:
            case TrialStarted():
                trial.progress_at = event.occurred_at
                self.state.allocation(trial).training_at = event.occurred_at
            case TrialReported():
                self._note_report(trial, event)
            case TrialFailed():
                self._fail(trial, event.kind, event.message)

    def _note_report(self, trial: TrialState, event: TrialReported) -> None:
        if trial.checkpoint is not None:
            self._commands.append(DiscardCheckpoint(checkpoint=trial.checkpoint))
        trial.iterations, trial.checkpoint, trial.progress_at = event.iterations, event.checkpoint, event.occurred_at
        self.state.launches_left = self.job.launch_attempts
        stage = self.state.stages[-1].stage
        trial.reports.append(
            Report(
                reported_at=event.occurred_at,
                iterations=event.iterations,
                metrics=event.metrics,
                stage=stage,
                batches=event.batches,
            )
        )
        if trial.iterations >= rules.target_iterations(self.job, self.state):
            self._free(trial)
            trial.status = TrialStatus.PAUSED

    def _note_resumed(self, event: DriverResumed) -> None:
        state = self.state
        last_progress = max((trial.progress_at for trial in state.trials), default=state.started_at)
        for trial in state.running():
            self._free(trial, at=max(last_progress, self.state.allocation(trial).started_at))
            trial.status = TrialStatus.QUEUED
        commands, lost = sort_out(state, event)
        self._commands += commands
        for record, ended_at, reason in lost:
            self._lose(record, ended_at, reason)
        state.resumes += 1
        self._reopen()

    def _reopen(self) -> None:
        """Go on after a resume, also where the user had cancelled."""
        state = self.state
        state.launches_left = self.job.launch_attempts
        state.relaunch_at = 0.0
        if state.phase is Phase.NEW:
            state.started_at = state.now
            self._begin_stage(0, tuple(range(len(state.trials))))
        elif self._cancelled():
            state.paused_s += state.now - (state.now if state.ended_at is None else state.ended_at)
            state.outcome, state.reason, state.ended_at = None, "", None
            state.phase = Phase.SCALING if state.stages[-1].ended_at is None else Phase.PLANNING

    def _note_planned(self, event: RestPlanned) -> None:
        state = self.state
        if state.phase is not Phase.PLANNING:
            return
        state.decisions.append(event)
        state.plan, state.profile = event.plan, event.profile
        state.predicted = (*state.predicted[: event.stage], *event.predicted)
        self._begin_stage(event.stage, tuple(sorted(rules.promoted(self.job, state.stages[-1]))))

    def _cancelled(self) -> bool:
        return self.state.outcome == "cancelled"

    # What follows from time

    def _check_time(self, ticked: bool) -> None:
        if self.state.phase not in (Phase.SCALING, Phase.TRAINING, Phase.PLANNING):
            return
        for trial in self.state.running():
            limit_s = rules.hang_limit_s(self.job, self.state, trial)
            if self.state.now >= trial.progress_at + limit_s:
                self._commands.append(StopTrial(trial=trial.trial, attempt=trial.attempt))
                self._fail(trial, "hung", f"no report for {limit_s:.0f} s")
        if (reason := rules.over_budget(self.job, self.state, ticked)) is not None:
            self._end("budget", reason)

    def _forgive_a_pause(self, ticked_at: float) -> None:
        """A Tick that comes much too late was not watched for (the machine slept): nobody hung meanwhile."""
        due_at = self.wake_at()
        if due_at is not None and ticked_at > due_at + PAUSE_S:
            self.state.woke_at.append(ticked_at)
            for trial in self.state.running():
                trial.progress_at = ticked_at

    # What is to be done

    def _advance(self) -> None:
        phase = None
        while phase is not self.state.phase:
            phase = self.state.phase
            if phase in (Phase.SCALING, Phase.TRAINING):
                self._scale()
            if phase is Phase.SCALING and not rules.awaited(self.state):
                self._begin_training()
            elif phase is Phase.TRAINING:
                self._train()
            elif phase is Phase.ENDING:
                self._wind_up()

    def _begin_stage(self, stage: int, trials: tuple[int, ...]) -> None:
        state = self.state
        for trial in trials:
            state.trials[trial].status = TrialStatus.QUEUED
            state.trials[trial].last_stage = stage
        state.stages.append(StageRecord(stage=stage, trials=trials, started_at=state.now))
        state.phase = Phase.SCALING
        state.launches_left = self.job.launch_attempts
        state.relaunch_at = 0.0
        surplus = len(state.live()) - state.chosen().instances
        unbilled_first = sorted(state.live(), key=lambda record: record.running_at is not None)
        for record in unbilled_first[: max(0, surplus)]:
            self._release(record)

    def _scale(self) -> None:
        """Ask for the instances that the stage still lacks."""
        state = self.state
        stage = state.stages[-1]
        missing = rules.missing(state)
        if missing == 0 or state.now < state.relaunch_at or state.launches_left <= 0:
            return
        state.launches_left -= 1
        for _ in range(missing):
            if not rules.affordable(self.job, self.state):
                break
            name = f"i-{len(state.instances) + 1:03d}"
            state.instances[name] = InstanceRecord(instance=name, requested_at=state.now)
            self._commands.append(LaunchInstance(instance=name))
        stage.widest = max(stage.widest, len(state.live()))

    def _begin_training(self) -> None:
        self.state.phase = Phase.TRAINING
        stage = self.state.stages[-1]
        if stage.training_at is None:
            stage.training_at = self.state.now
        stage.widest = max(stage.widest, len(self.state.live()))

    def _train(self) -> None:
        state = self.state
        size = rules.gang_size(self.job, self.state)
        if state.queued() and size > 0:
            for trial, gang in rules.starts(self.job, state, size).items():
                self._start(state.trials[trial], gang)
        elif state.queued() and not state.running() and not rules.awaited(self.state):
            reasons = [record.reason for record in state.instances.values() if record.reason]
            outcome: Outcome = "failed" if rules.affordable(self.job, self.state) else "budget"
            self._end(
                outcome, f"no instance to train on: {reasons[-1] if reasons else 'max_cost leaves room for none'}"
            )
        elif not state.queued() and not state.running():
            self._sync()

    def _start(self, trial: TrialState, gang: Gang) -> None:
        state = self.state
        trial.status, trial.gang, trial.progress_at = TrialStatus.RUNNING, gang, state.now
        trial.attempt += 1
        trial.allocation = len(state.allocations)
        state.allocations.append(
            Allocation(
                trial=trial.trial, attempt=trial.attempt, stage=trial.last_stage, gang=gang, started_at=state.now
            )
        )
        self._commands.append(
            StartTrial(
                trial=trial.trial,
                attempt=trial.attempt,
                gang=gang,
                from_iterations=trial.iterations,
                until_iterations=rules.target_iterations(self.job, self.state),
                checkpoint=trial.checkpoint,
            )
        )

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
            self._end("failed", f"every trial of stage {stage.stage} failed; the first one {kind}: {message}")
        elif stage.stage + 1 == len(self.job.stages):
            for trial in stage.ranking:
                state.trials[trial].status = TrialStatus.COMPLETED
            self._end("done", "")
        else:
            promoted = rules.promoted(self.job, stage)
            for trial in set(stage.ranking) - set(promoted):
                state.trials[trial].status = TrialStatus.STOPPED
            if self.job.replan:
                state.phase = Phase.PLANNING
            else:
                self._begin_stage(stage.stage + 1, tuple(sorted(promoted)))

    # Ends

    def _free(self, trial: TrialState, at: float | None = None) -> None:
        self.state.allocation(trial).ended_at = self.state.now if at is None else at

    def _fail(self, trial: TrialState, kind: FailureKind, message: str) -> None:
        self._free(trial)
        trial.failures += 1
        trial.failure = (kind, message)
        final = kind in FINAL_FAILURES or trial.failures > self.job.max_failures
        trial.status = TrialStatus.FAILED if final else TrialStatus.QUEUED
        if kind == "no_metric" and not any(other.reports for other in self.state.trials):
            self._end("failed", message)

    def _lose(self, record: InstanceRecord, ended_at: float, reason: str) -> None:
        """The instance is gone; its trials go on from their checkpoints, elsewhere, and none of them has failed."""
        record.status, record.ended_at, record.reason = InstanceStatus.ENDED, ended_at, reason
        for trial in self.state.running():
            if any(slot.instance == record.instance for slot in trial.gang):
                self._commands.append(StopTrial(trial=trial.trial, attempt=trial.attempt))
                self._free(trial)
                trial.status = TrialStatus.QUEUED

    def _release(self, record: InstanceRecord) -> None:
        record.status = InstanceStatus.RELEASING
        self._commands.append(ReleaseInstance(instance=record.instance))

    def _end(self, outcome: Outcome, reason: str) -> None:
        state = self.state
        if state.phase in (Phase.ENDING, Phase.FINISHED):
            return
        state.phase, state.outcome, state.reason = Phase.ENDING, outcome, reason
        for trial in state.running():
            self._commands.append(StopTrial(trial=trial.trial, attempt=trial.attempt))
            self._free(trial)
            trial.status = TrialStatus.QUEUED

    def _wind_up(self) -> None:
        """Release what is held; when nothing is left, finish."""
        state = self.state
        for record in state.live():
            self._release(record)
        if any(record.status is InstanceStatus.RELEASING for record in state.instances.values()):
            return
        state.phase, state.ended_at = Phase.FINISHED, state.now
        self._commands.append(self._finish())

    def _finish(self) -> Finish:
        assert self.state.outcome is not None, "an ending has an outcome"
        return Finish(outcome=self.state.outcome, reason=self.state.reason)
