"""The controller: `handle(event) -> [command]`, a pure function of its history. It reads no clock, network or chance.

A job is one fleet and one or more lanes of brackets. An event is about one lane, unless it is about an instance, the
time, or the whole. A stage: ask for the instances that the plan wants -> wait for them -> place and start trials,
queueing those beyond the slots -> SYNC when all have done their iterations -> promote the best, stop the rest -> the
driver plans the lane's rest again and answers with an event -> give back what the next stage does not need, warm to
another lane that lacks it. After the last stage of a bracket its lane begins the next one. Every end of the experiment
(done, cancel, budget, failure) first releases every instance.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from rubberband.executor.core import (
    adding,
    forking,
    idle_gpus,
    instances,
    launching,
    limits,
    promotion,
    stragglers,
    stranding,
)
from rubberband.executor.core import trials as attempts
from rubberband.executor.core.ends import ends_search
from rubberband.executor.core.events import (
    AllotmentChanged,
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
    RestValued,
    Started,
    StopTrial,
    Tick,
    TrialArtifact,
    TrialEnded,
    TrialFailed,
    TrialForked,
    TrialRepeated,
    TrialReported,
    TrialsAdded,
    TrialsDrawn,
    TrialStarted,
    TrialStopRequested,
)
from rubberband.executor.core.fleet import InstanceStatus
from rubberband.executor.core.history import LimitsExtended, Pause
from rubberband.executor.core.instances import INSTANCE_EVENTS, sort_out
from rubberband.executor.core.job import Job
from rubberband.executor.core.ranking import is_result, rank
from rubberband.executor.core.state import LaneState, Phase, StageRecord, State
from rubberband.executor.core.trial_state import UNDER_WAY, TrialState, TrialStatus
from rubberband.executor.core.trials import starts
from rubberband.executor.core.worth import results_of
from rubberband.values.worth import RestWorth

PAUSE_S = 30.0
"""A Tick that is later than this was delayed by more than a busy driver."""


_ASKED = (LimitsChanged, AllotmentChanged, CancelRequested, TrialStopRequested, TrialsAdded)
_PROGRESS = (TrialStarted, TrialRepeated, TrialReported, TrialArtifact)
_OfAttempt = TrialStarted | TrialRepeated | TrialReported | TrialArtifact | TrialEnded | TrialFailed | CheckpointLost


class Controller:
    """The state machine of one experiment. Only `handle` changes `state`, and `job` where more is granted."""

    def __init__(self, job: Job) -> None:
        self.state = State.of(job)
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
                return self._extend_limits(event)
            if isinstance(event, AllotmentChanged):
                return self._change_cap(event)
            if isinstance(event, TrialsAdded):
                return self._add_trials(event)
        is_due = self._wake_at is not None and event.occurred_at >= self._wake_at
        self._note_standstill(event)
        self.state.now = max(self.state.now, event.occurred_at)
        if self.state.course == "finished" and (self.is_over or not isinstance(event, DriverResumed)):
            return [self._finish()] if isinstance(event, DriverResumed) else []
        if isinstance(event, DriverStopped):
            self.state.stopped = event.reason
            return []
        state, before = self.state, self.state.changes
        lane = self._note(event)
        if isinstance(event, (TrialReported, TrialEnded)):
            self._end_by_rule([state.trials[event.trial]])
        elif isinstance(event, (Tick, DriverResumed)):
            self._end_by_rule(state.trials)
        if is_due or (self.job.max_cost_usd is not None and self.state.fleet.spending is None):
            self._check_time(isinstance(event, Tick))
        if is_due or self.state.changes != before or self._may_go_on(event, lane):
            self._advance(self.state.lanes if is_due or lane is None else [lane])
        self._look_ahead()
        return self._commands

    @property
    def job(self) -> Job:
        """The job, with the limits in force."""
        return self.state.job

    def wake_at(self) -> float | None:
        """Return when a Tick is due, if no other event comes before: a hang, a retry, or the end of the budget."""
        return self._wake_at

    def hold_until(self) -> float:
        """Return the time by which all instances must have ended if the driver dies: the budget's reach."""
        return self._hold_until

    @property
    def is_over(self) -> bool:
        """Whether it has ended, and no resume goes on with it."""
        return self.state.course == "finished" and not limits.can_go_on(self.state)

    def _may_go_on(self, event: Event, lane: LaneState | None) -> bool:
        """Whether something may have to be done after an event that changed no trial's status."""
        if lane is None or not isinstance(event, _PROGRESS):
            return True
        return bool(lane.held.leaving) or lane.missing > 0 or idle_gpus.holds_idle(lane)

    def _look_ahead(self) -> None:
        """Compute both after every event, asked for or not: the budget's reach remembers its last computation, so a
        replay gets the same values."""
        self._hold_until, self._wake_at = limits.look_ahead(self.state)

    # What was asked

    def _is_news(self, request: str) -> bool:
        """Whether it is asked for the first time; a signal, which has no id, always is."""
        is_news = request not in self.state.requests
        if request:
            self.state.requests.add(request)
        return is_news

    def _extend_limits(self, event: LimitsChanged) -> list[Command]:
        """Orders follow with the next event only: at a resume, this comes before it is known what is still held."""
        before, self.state.job = self.job, self.job.granted(event)
        if self.job == before:
            return []
        self.state.history.add(
            LimitsExtended(
                at_s=self.state.elapsed_s(event.occurred_at),
                deadline_before_s=before.deadline_s,
                deadline_s=self.job.deadline_s,
                max_cost_before_usd=before.max_cost_usd,
                max_cost_usd=self.job.max_cost_usd,
                target_before=before.stop.target,
                target=self.job.stop.target,
                deadline_before=before.deadline,
                deadline=self.job.deadline,
            )
        )
        self.state.fleet.rent_changed()
        self._look_ahead()
        return []

    def _change_cap(self, event: AllotmentChanged) -> list[Command]:
        """Likewise: orders follow with the next event."""
        instances.note_instance_cap(self.state, event)
        self._look_ahead()
        return []

    def _add_trials(self, event: TrialsAdded) -> list[Command]:
        """Likewise."""
        adding.add(self.state, event)
        self._look_ahead()
        return []

    # What happened

    def _note(self, event: Event) -> LaneState | None:
        """Take it in; return the lane that it is about, or None for all of them."""
        if isinstance(event, _OfAttempt):
            trial = self.state.trials[event.trial]
            lane = self.state.lane_of_trial(trial)
            if trial.status is TrialStatus.RUNNING and trial.attempt == event.attempt:
                self._note_attempt(lane, trial, event)
            elif isinstance(event, TrialReported) and event.late:
                self._commands += attempts.note_late(lane, trial, event)
            return lane
        match event:
            case Started():
                self._begin(event.occurred_at)
            case DriverResumed():
                self._note_resumed(event)
            case RestPlanned():
                self._note_planned(event)
            case RestValued():
                self.state.valued_results = results_of(self.state)
                self._is_not_worth_it(event.worth)
            case TrialsDrawn():
                self._note_configs(event)
            case TrialForked():
                self._note_fork(event)
            case CancelRequested():
                self._end("cancelled", event.reason or "cancelled by the user")
            case TrialStopRequested():
                return self._stop_trial(event)
            case Tick():
                pass
            case _:
                assert isinstance(event, INSTANCE_EVENTS), f"no such event: {event!r}"
                self._commands += instances.note(self.state, event)
        return None

    def _note_attempt(self, lane: LaneState, trial: TrialState, event: _OfAttempt) -> None:
        match event:
            case TrialStarted():
                attempts.note_started(lane, trial, event.occurred_at)
            case TrialRepeated():
                attempts.note_repeated(lane, trial, event.occurred_at)
            case TrialReported():
                lane.launches_left = self.job.launch_attempts
                self._commands += attempts.note_report(lane, trial, event)
                self._commands += stragglers.replace_slow(lane, trial)
            case TrialArtifact():
                self._commands += attempts.note_artifact(self.state, trial, event)
            case TrialEnded():
                attempts.note_end(lane, trial)
            case TrialFailed():
                self._fail(trial, event.kind, event.message)
            case CheckpointLost():
                attempts.go_back(self.state, trial, event.occurred_at, event.message)

    def _stop_trial(self, event: TrialStopRequested) -> LaneState | None:
        """Stop a trial for good; a stage that waits for instances needs fewer of them then."""
        state = self.state
        trial = state.trials[event.trial] if event.trial < len(state.trials) else None
        if trial is None or trial.status not in UNDER_WAY or trial.ended:
            return None
        lane = state.lane_of_trial(trial)
        self._commands += attempts.withdraw(lane, trial)
        if state.course != "running":
            return lane
        if lane.phase is Phase.PLANNING:
            self._go_to(lane, lane.next_stage)
        elif lane.phase is Phase.SCALING and not lane.is_idle:
            lane.needs = lane.needed_instances
            self._commands += instances.release_surplus(lane)
        return lane

    def _note_resumed(self, event: DriverResumed) -> None:
        state = self.state
        last_progress = max((trial.progress_at for trial in state.trials), default=state.started_at)
        for trial in state.running():
            attempts.free(state, trial, at=max(last_progress, state.allocation(trial).started_at))
            state.put(trial, TrialStatus.QUEUED)
        instances.let_go(state, state.fleet.current())
        commands, lost = sort_out(state, event)
        self._commands += commands
        for record, ended_at, reason, preempted in lost:
            instances.lose(state, record, ended_at, reason, preempted=preempted)
        state.resumed_at.append(event.occurred_at)
        state.pending_configs = ()
        state.stopped = ""
        self._reopen()

    def _reopen(self) -> None:
        """Go on after a resume, also where the user had cancelled, no instance was to be had, or a cap was raised."""
        state = self.state
        state.fleet.failed_starts = 0
        for lane in state.lanes:
            lane.launches_left, lane.relaunch_at = self.job.launch_attempts, 0.0
        if state.course == "new":
            self._begin(state.now)
        elif limits.can_go_on(state):
            if state.outcome == "failed":
                self._try_again(limits.failed_blameless(state))
            state.paused_s += state.now - (state.now if state.ended_at is None else state.ended_at)
            state.outcome, state.reason, state.ended_at = None, "", None
            state.stranded, state.exhausted_usd = False, None
            ended_by, state.ended_by = state.ended_by, None
            state.fleet.rent_changed()
            state.course = "running"
            for lane in state.lanes:
                if lane.stage.ended_at is None:
                    lane.phase = Phase.SCALING
                    if ended_by is not None and not self.job.has_sync:
                        promotion.promote(lane)
                    if ended_by is not None and not lane.waiters:
                        self._sync(lane)
                elif lane.phase is not Phase.FINISHED or lane.next_stage < lane.end_stage:
                    lane.phase = Phase.PLANNING
                    if self._passes(lane, lane.next_stage):
                        self._begin_stage(lane, lane.next_stage)
            instances.share_out(state)  # lanes that had ended have no share of a cap that came since

    def _try_again(self, trials: Sequence[TrialState]) -> None:
        """Trials that failed by no fault of their own are not over, and so neither is their stage."""
        for trial in trials:
            trial.failures = 0
            self.state.put(trial, TrialStatus.QUEUED)
            self.state.lane_of_trial(trial).stage.ended_at = None

    def _begin(self, at: float) -> None:
        """The experiment starts, and all of its lanes with their first stages."""
        state = self.state
        state.started_at, state.course = at, "running"
        state.job = state.job.begun(at)
        for lane in state.lanes:
            self._begin_stage(lane, lane.brackets[0].first_stage)

    def _note_planned(self, event: RestPlanned) -> None:
        state = self.state
        lane = next(lane for lane in state.lanes if event.stage < lane.end_stage)
        if state.course == "running" and lane is state.resizing() and event.stage == lane.stage.stage:
            instances.note_resized(lane, event)
            return
        if state.course != "running" or lane.phase is not Phase.PLANNING:
            return
        state.decisions.append(event)
        state.plan, state.profile, lane.own = event.plan, event.profile, event.own
        lane.planned_trials = lane.trials_left if event.stage < lane.bracket.end_stage else math.inf
        lane.replans_at_once = False
        state.predicted = (*state.predicted[: event.stage], *event.predicted, *state.predicted[lane.end_stage :])
        widest = max(choice.instances for choice in event.plan.stages[event.stage : lane.end_stage])
        if state.instance_cap is not None:  # the fewest are planned with, also where there are fewer
            widest = min(widest, lane.max_instances + state.spare_instances)
        lane.max_instances = max(lane.max_instances, widest)
        if not self._is_not_worth_it(event.worth):
            self._begin_stage(lane, event.stage)

    def _is_not_worth_it(self, worth: RestWorth | None) -> bool:
        """Take in what the rest may bring; return whether the search ends since that is too little."""
        if worth is None:
            return False
        self.state.history.add(worth)
        return self._end_by_rule()

    def _note_configs(self, event: TrialsDrawn) -> None:
        """Configurations of a bracket's trials are there; it begins now, unless its plan is made first."""
        state = self.state
        state.sampled_configs.update(enumerate(event.configurations, start=event.first_trial))
        lane, state.pending_configs = state.lane_of_trial(state.trials[event.first_trial]), ()
        if state.course == "running" and lane.phase is Phase.PLANNING and not self.job.replan:
            self._begin_stage(lane, lane.next_stage)

    def _note_fork(self, event: TrialForked) -> None:
        """A trial has taken over a checkpoint; after the last one of a SYNC its lane goes on, once it is planned."""
        state = self.state
        self._commands += forking.fork(state, event)
        lane = state.lane_of_trial(state.trials[event.trial])
        if lane.phase is not Phase.PLANNING or event.trial not in lane.stage.trials:
            return
        lane.stage.forked += (event.trial,)
        if state.course == "running" and not forking.takers(lane):
            self._go_to(lane, lane.next_stage)

    # What follows from time

    def _check_time(self, ticked: bool) -> None:
        if self.state.course != "running":
            return
        now = self.state.now
        hung = [(lane, trial) for lane in self.state.lanes for trial in lane.runners.due(now)]
        for _, trial in hung:
            self._commands.append(StopTrial(trial=trial.trial, attempt=trial.attempt))
            silent_s = trial.due_at - trial.progress_at
            log = f"rubberband logs {shlex.quote(self.job.name)} {trial.trial}"
            self._fail(trial, "hung", f"no report for {silent_s:.0f} s ({log})")
        for lane, trial in hung:
            self._commands += stragglers.replace_hung(lane, trial)
        if self.state.just_woke:  # what events say next may have cost less than it would have by now
            return
        if (reason := limits.over_budget(self.state, ticked)) is not None:
            self._end("budget", reason)

    def _forgive_a_pause(self, tick: Tick) -> None:
        """Excuse all running trials after a Tick that comes much too late: the machine slept, and no trial hung."""
        due_at, at = self.wake_at(), tick.occurred_at
        self.state.just_woke = tick.paused_s > 0.0
        if self.state.just_woke:
            self.state.history.add(Pause(at_s=self.state.elapsed_s(at - tick.paused_s), paused_s=tick.paused_s))
        if self.state.just_woke or (due_at is not None and at > due_at + PAUSE_S):
            self.state.woke_at.append(at)
            for trial in self.state.running():
                attempts.note_progress(self.state.lane_of_trial(trial), trial, at)

    # What is to be done

    def _advance(self, lanes: Sequence[LaneState]) -> None:
        """Go on with these lanes, and with those that they hand instances on to."""
        state, waiting = self.state, list(lanes)
        while waiting and state.course == "running":
            lane, reassigned = waiting.pop(0), state.fleet.reassigned
            self._advance_lane(lane)
            if state.fleet.reassigned != reassigned:
                waiting += [other for other in state.lanes if other is not lane and other not in waiting]
        if state.course == "ending":
            for lane in state.lanes:
                self._commands += instances.release_left(lane)
            self._wind_up()

    def _advance_lane(self, lane: LaneState) -> None:
        state, phase = self.state, None
        while phase is not lane.phase and state.course == "running":
            phase = lane.phase
            self._commands += instances.release_left(lane)
            if phase in (Phase.SCALING, Phase.TRAINING) and not lane.is_idle:
                self._commands += instances.fit_instance_cap(lane)
                self._commands += launching.launch_missing(lane)
            if phase is Phase.SCALING and (lane.is_idle or not launching.awaited(lane)):
                self._begin_training(lane)
            elif phase is Phase.TRAINING:
                self._train(lane)

    def _begin_stage(self, lane: LaneState, stage: int) -> None:
        state, trials = self.state, lane.begins_with(stage)
        begun = [state.trials[trial] for trial in trials]
        for trial in begun:
            if trial.status is not TrialStatus.QUEUED and not trial.ended:
                state.put(trial, TrialStatus.QUEUED)
            trial.last_stage = stage
        record = StageRecord(stage=stage, trials=trials, started_at=state.now)
        state.stages.append(record)
        lane.begin(record, [trial for trial in begun if not trial.ended])
        if not lane.waiters:
            self._sync(lane)
            return
        lane.phase = Phase.SCALING
        lane.needs = None if len(lane.waiters) == len(begun) else idle_gpus.needed_at_start(lane)
        lane.launches_left = self.job.launch_attempts
        if not state.buys_none:
            lane.relaunch_at = 0.0
        self._commands += instances.release_surplus(lane)

    def _begin_training(self, lane: LaneState) -> None:
        lane.phase = Phase.TRAINING
        if lane.stage.training_at is None:
            lane.stage.training_at = self.state.now
        launching.note_width(lane)

    def _train(self, lane: LaneState) -> None:
        state = self.state
        if not self.job.has_sync:
            promotion.promote(lane)
            state.pending_configs = promotion.pending_configs(lane)
        if lane.waiters:
            while found := starts(lane):
                self._commands += [attempts.start(lane, state.trials[trial], gang) for trial, gang in found.items()]
        if lane.runners:
            self._commands += promotion.release_idle(lane)
            return
        if state.pending_configs:
            return
        if not lane.waiters:
            self._sync(lane)
        elif not launching.awaited(lane):
            self._strand(lane)

    def _sync(self, lane: LaneState) -> None:
        """Rank the stage's trials; promote the best, stop the rest; go to the lane's next stage or end.

        Those on a rung that promotes none any more are stopped first. Those that the user has stopped are not ranked.
        """
        state, stage = self.state, lane.stage
        stage.ended_at = state.now
        contenders = [state.trials[trial] for trial in stage.trials]
        over = (TrialStatus.FAILED, TrialStatus.STOPPED)
        ranked = [trial for trial in contenders if trial.status not in over]
        for left in [trial for trial in ranked if not lane.ends_last_rung(trial)]:
            state.put(left, TrialStatus.STOPPED)
            self._commands += attempts.let_go(state, left)
        ranked = [trial for trial in ranked if trial.status is not TrialStatus.STOPPED]
        stage.ranking = rank(ranked, self.job.ranking)
        state.best_so_far.note_sync()
        if not stage.ranking:
            self._fail_bracket(lane, contenders)
            return
        promoted = self.job.promoted(stage)
        if stage.stage + 1 == lane.bracket.end_stage:
            for trial in stage.ranking:
                state.put(state.trials[trial], TrialStatus.COMPLETED)
        else:
            for trial in set(stage.ranking) - set(promoted):
                state.put(state.trials[trial], TrialStatus.STOPPED)
                self._commands += attempts.let_go(state, state.trials[trial])
        if self._end_by_rule():
            return
        self._go_to(lane, stage.stage + 1)

    def _go_to(self, lane: LaneState, stage: int) -> None:
        """The lane goes on with a stage, once its trials are exchanged and its rest is planned, or is over."""
        if stage == lane.end_stage:
            self._end_lane(lane)
        elif (
            (self.job.replan and not self._passes(lane, stage))
            or self.state.configs_due_before(stage)
            or forking.takers(lane)
        ):
            lane.phase = Phase.PLANNING
        else:
            self._begin_stage(lane, stage)

    def _passes(self, lane: LaneState, stage: int) -> bool:
        """Whether a stage has no trial left to train, as all of its trials have ended by themselves."""
        if stage >= lane.bracket.end_stage or forking.takers(lane):
            return False
        return all(self.state.trials[trial].ended for trial in lane.begins_with(stage))

    def _fail_bracket(self, lane: LaneState, contenders: Sequence[TrialState]) -> None:
        """All trials of a bracket failed, or were stopped by the user: other brackets go on.

        Unless all of them failed and no trial has ever reported, or it is the last bracket and there is no result.
        """
        state = self.state
        failed = [trial.failure for trial in contenders if trial.status is TrialStatus.FAILED and trial.failure]
        is_last = len(state.active()) == 1 and lane.bracket.end_stage == lane.end_stage
        goes_on = len(failed) < len(contenders) or not contenders or any(trial.reports for trial in state.trials)
        if goes_on and (not is_last or any(map(is_result, state.trials))):
            self._go_to(lane, lane.bracket.end_stage)
            return
        lane.phase = Phase.FINISHED
        self._end("failed", stranding.without_a_trial(lane, failed, whole=len(failed) == len(contenders)))

    def _end_lane(self, lane: LaneState) -> None:
        """A lane is over: its instances go on to others, or are given back."""
        lane.phase = Phase.FINISHED
        if not self.state.active():
            self._end("done", "")
        else:
            instances.share_out(self.state)
            self._commands += instances.release_all(lane)

    # Ends

    def _end_by_rule(self, trials: Sequence[TrialState] = ()) -> bool:
        """End the search where a rule of `search.stop` says so; return whether it has."""
        state = self.state
        if state.course != "running" or (found := ends_search(state, trials)) is None:
            return False
        state.history.add(found)
        self._end("done", found.reason)
        state.ended_by = found
        return True

    def _note_standstill(self, event: Event) -> None:
        """Time for which no driver ran is no time without an improvement."""
        best = self.state.best_so_far
        if isinstance(event, Tick):
            best.at += event.paused_s
        elif isinstance(event, DriverResumed):
            best.at += max(0.0, event.occurred_at - self.state.now)

    def _fail(self, trial: TrialState, kind: FailureKind, message: str) -> None:
        attempts.note_failure(self.state, trial, kind, message)
        if kind == "no_metric" and not any(other.reports for other in self.state.trials):
            self._end("failed", message)

    def _end(self, outcome: Outcome, reason: str) -> None:
        state = self.state
        if state.course in ("ending", "finished"):
            return
        state.course, state.outcome, state.reason = "ending", outcome, reason
        state.exhausted_usd = self.job.max_cost_usd if outcome == "budget" else None
        self._commands += [attempts.stop(state, trial) for trial in state.running()]

    def _strand(self, lane: LaneState) -> None:
        """No instance is to be had for a lane: it waits for what others give back, as long as there are others."""
        if not any(stranding.goes_on(other) for other in self.state.active() if other is not lane):
            self._end(*stranding.end_of(lane))

    def _wind_up(self) -> None:
        """Release what is held; when nothing is left, finish."""
        state = self.state
        self._commands += instances.release(state, [*state.fleet.live(), *state.fleet.leaving()])
        if any(record.status is InstanceStatus.RELEASING for record in state.fleet.current()):
            return
        state.course, state.ended_at = "finished", state.now
        self._commands.append(self._finish())

    def _finish(self) -> Finish:
        assert self.state.outcome is not None, "an ending has an outcome"
        return Finish(outcome=self.state.outcome, reason=self.state.reason)
