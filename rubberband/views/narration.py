"""A run told in lines: what is worth saying about an event, found by comparing the state with what was said before."""

from __future__ import annotations

from collections.abc import Sequence

from rubberband.executor.core import rules
from rubberband.executor.core.budget import bill_usd
from rubberband.executor.core.controller import Controller
from rubberband.executor.core.events import (
    WITHOUT_CHECKPOINT,
    DriverResumed,
    DriverStopped,
    Event,
    InstanceInterrupted,
    InstanceLost,
    InstanceReady,
    InstanceRefused,
    InstanceReleased,
    LimitsChanged,
    Tick,
    TrialReported,
)
from rubberband.executor.core.forecast import forecast
from rubberband.executor.core.state import (
    InstanceRecord,
    InstanceStatus,
    Job,
    Phase,
    StageRecord,
    State,
    TrialState,
    TrialStatus,
)
from rubberband.executor.core.trials import best_trial
from rubberband.units import format_usd
from rubberband.values.offer import slots
from rubberband.views.words import (
    change,
    counted,
    decided,
    duration,
    extended,
    listed,
    number,
    printable,
    stood_still,
    went_back,
)

_UNDER_WAY = (TrialStatus.QUEUED, TrialStatus.RUNNING, TrialStatus.PAUSED)


class Narrator:
    """Turns events into lines; it is shown every event once, after the controller took it in."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._begun = False
        self._failures = 0
        self._setbacks = 0
        self._warned = False
        self._instances: set[str] = set()
        self._live: Sequence[InstanceRecord] = ()
        """Held or on their way when the last event had been told."""
        self._stages_begun = 0
        self._stages_trained = 0
        self._stages_ended = 0
        self._decisions = 0
        self._ending = False

    def lines(self, event: Event, controller: Controller) -> list[str]:
        """What to say about `event`, in order; often nothing."""
        self._job, state = controller.job, controller.state
        if isinstance(event, LimitsChanged):
            return _extended(event, state)
        if isinstance(event, DriverStopped):
            return [f"stopped: {printable(event.reason)}"]
        said: list[str] = []
        if not self._begun:
            self._begun = True
            said.append(self._introduction(event, state))
            if isinstance(event, DriverResumed):
                self._catch_up(state)
        elif isinstance(event, DriverResumed):
            said.append(f"resumed: {_left(state)}")
        if isinstance(event, Tick) and event.paused_s:
            said.append(stood_still(state.pauses[-1]))
        said += self._instance(event, state)
        said += self._failed(state)
        said += self._went_back(state)
        if isinstance(event, TrialReported) and event.saved_iterations == 0 and not self._warned:
            self._warned = True
            said.append(f"trial {event.trial}: the function {WITHOUT_CHECKPOINT}")
        said += self._synced(state)
        said += self._decided(state)
        said += self._scaled(state)
        said += self._training(state)
        said += self._ended(state)
        self._live = state.live()
        return said

    def _introduction(self, event: Event, state: State) -> str:
        job = self._job
        if isinstance(event, DriverResumed) and event.occurred_at > state.started_at:
            return f"resuming {job.name}: {_left(state)}, {format_usd(bill_usd(job, state, state.now))} spent"
        limits = "" if job.deadline_s is None else f"; deadline {duration(job.deadline_s)}"
        limits += "" if job.max_cost_usd is None else f"; max_cost {format_usd(job.max_cost_usd)}"
        return (
            f"{job.name}: {counted(job.stages[0].trials, 'trial')} in {counted(len(job.stages), 'stage')}, planned "
            f"{duration(job.prediction.jct_s)} and {format_usd(job.prediction.cost_usd)}{limits}"
        )

    def _catch_up(self, state: State) -> None:
        """Say nothing of what an earlier driver has told already."""
        now = state.now
        self._failures = len(state.failed)
        self._setbacks = len(state.setbacks)
        self._warned = any(trial.reports and trial.reports[0].saved_iterations == 0 for trial in state.trials)
        self._instances = {record.instance for record in state.instances.values() if record.requested_at < now}
        self._live = [record for record in state.live() if record.instance in self._instances]
        self._stages_begun = sum(stage.started_at < now for stage in state.stages)
        self._stages_trained = sum(stage.training_at is not None for stage in state.stages)
        self._stages_ended = sum(stage.ended_at is not None for stage in state.stages)
        self._decisions = len(state.decisions)

    # Instances

    def _instance(self, event: Event, state: State) -> list[str]:
        match event:
            case InstanceReady():
                record = state.instances[event.instance]
                after = duration(event.occurred_at - record.requested_at)
                bought = self._bought(record)
                return [f"{event.instance} ready after {after} ({len(state.ready())} of {_held(state)}){bought}"]
            case InstanceInterrupted():
                return [self._interrupted(event, state)]
            case InstanceRefused():
                what = "failed to start" if event.failed_start else "refused"
                return [f"{event.instance} {what}: {printable(event.reason)}{self._what_then(state)}"]
            case InstanceLost():
                return [self._lost(event, state)]
            case InstanceReleased():
                return [f"{event.instance} released; {counted(len(state.current()), 'instance')} held"]
            case _:
                return []

    def _what_then(self, state: State) -> str:
        if state.phase not in (Phase.SCALING, Phase.TRAINING):
            return ""
        if rules.buys_none(self._job, state) and not state.ready():
            return f"; {state.failed_starts} in a row never got ready, so no more are bought"
        if any(record.instead_of_spot and record.requested_at == state.now for record in state.live()):
            return ""
        if state.launches_left <= 0:
            return f"; continuing with {_held(state)}"
        return f"; retrying in {duration(max(0.0, state.relaunch_at - state.now))}"

    def _bought(self, record: InstanceRecord) -> str:
        """What it is, where that is not what the offer says."""
        offer, price = self._job.offer, record.price_usd_per_hour
        if record.hour_prices_usd:
            price = record.hour_prices_usd[-1]
        other = record.instance_type if record.instance_type not in ("", offer.instance_type) else ""
        parts = [other, "spot" if record.market == "spot" else "", f"in {record.zone}" if record.zone else ""]
        if price is not None and (other or record.market == "spot"):
            parts.append(f"at {format_usd(price)}/h")
        return f": {' '.join(part for part in parts if part)}" if any(parts) else ""

    def _interrupted(self, event: InstanceInterrupted, state: State) -> str:
        on_it = [t.trial for t in state.running() if any(slot.instance == event.instance for slot in t.gang)]
        line = f"{event.instance} will be taken away soon"
        return f"{line}; {_trials(on_it)} will move" if on_it else line

    def _lost(self, event: InstanceLost, state: State) -> str:
        struck = [
            use.trial
            for use in state.allocations
            if use.ended_at == state.now and any(slot.instance == event.instance for slot in use.gang)
        ]
        hit = [trial for trial in struck if state.trials[trial].status in (TrialStatus.QUEUED, TrialStatus.RUNNING)]
        left = sum(record.instance in self._instances for record in state.live())
        what = "PREEMPTED" if event.preempted else "lost"
        record = state.instances[event.instance]
        what = "failed to start" if record.failed_start else what
        line = f"{event.instance} {what} ({printable(event.reason)})"
        if any(held is record for held in self._live):
            line = f"{line}: {len(self._live)} -> {counted(left, 'instance')}"
        if not hit:
            failed_again = record.failed_start and self._job.start_attempts is not None
            return f"{line}{self._what_then(state)}" if failed_again else line
        return f"{line}; {_trials(hit)} will resume from the last checkpoint"

    # Stages

    def _scaled(self, state: State) -> list[str]:
        """The cluster grows or shrinks: a stage begins, or what is missing is asked for again."""
        if len(state.instances) == len(self._instances) and len(state.stages) == self._stages_begun:
            return []
        asked = [record for record in state.instances.values() if record.instance not in self._instances]
        self._instances.update(record.instance for record in asked)
        on_spot = " on spot" if any(record.market == "spot" for record in asked) else ""
        instead = any(record.instead_of_spot for record in asked)
        on_spot = f" on demand instead of spot ({printable(state.spot_dry_reason)})" if instead else on_spot
        launching = f"launching {len(asked)}{on_spot}: {len(state.live()) - len(asked)} -> {_held(state)}"
        if len(state.stages) > self._stages_begun:
            self._stages_begun = len(state.stages)
            return [self._stage_begins(state, launching if asked else f"{_held(state)} kept")]
        return [launching] if asked else []

    def _stage_begins(self, state: State, otherwise: str) -> str:
        stage = state.stages[-1]
        iterations = self._job.stages[stage.stage].iterations
        line = f"stage {stage.stage}: {counted(len(stage.trials), 'trial')} x {counted(iterations, 'iteration')}"
        going = sorted(record.instance for record in self._live if record.status is InstanceStatus.RELEASING)
        shrinking = f"{len(self._live)} -> {_held(state)}, releasing {listed(going)}"
        if going and any(record.status is InstanceStatus.REQUESTED for record in state.live()):
            return f"{line}; releasing {listed(going)}, {otherwise}"
        return f"{line}; {shrinking if going else otherwise}"

    def _training(self, state: State) -> list[str]:
        if not state.stages or len(state.stages) <= self._stages_trained or state.stages[-1].training_at is None:
            return []
        running = state.running()
        if not running:
            return []
        self._stages_trained = len(state.stages)
        stage, per_instance, size = state.stages[-1], self._job.offer.gpus, len(running[0].gang)
        ready = len(state.ready())
        return [
            f"stage {stage.stage}: training {counted(len(stage.trials), 'trial')} on {counted(ready, 'instance')} x "
            f"{counted(per_instance, 'GPU')}, {counted(size, 'GPU')} per trial, {slots(ready, per_instance, size)} at "
            "once"
        ]

    def _synced(self, state: State) -> list[str]:
        ended = [stage for stage in state.stages if stage.ended_at is not None]
        said = [self._sync(stage, state) for stage in ended[self._stages_ended :]]
        self._stages_ended = len(ended)
        return said

    def _decided(self, state: State) -> list[str]:
        fresh = state.decisions[self._decisions :]
        self._decisions = len(state.decisions)
        return [f"plan {decided(decision.changed, printable(decision.reason))}" for decision in fresh]

    def _sync(self, stage: StageRecord, state: State) -> str:
        job = self._job
        failed = len(stage.trials) - len(stage.ranking)
        parts = []
        if stage.ranking:
            best = state.trials[stage.ranking[0]]
            parts.append(f"best {job.metric}={_metric(job, best)} (trial {best.trial}{_batch(best)})")
        if stage.ranking and stage.stage + 1 < len(job.stages):
            promoted = rules.promoted(job, stage)
            stopped = len(stage.ranking) - len(promoted)
            parts.append(f"promoted {len(promoted)} of {len(stage.trials)} ({_trials(promoted)})")
            parts.append(f"stopped {stopped}" if stopped else "")
        parts.append(f"{failed} failed" if failed else "")
        expected = forecast(job, state, state.now)
        parts.append(f"spent {format_usd(bill_usd(job, state, state.now))}")
        if state.phase in (Phase.SCALING, Phase.TRAINING, Phase.PLANNING):
            parts.append(f"forecast {duration(expected.jct_s)}, {format_usd(expected.cost_usd)}")
        return f"SYNC {stage.stage}: {'; '.join(part for part in parts if part)}"

    # Failures and ends

    def _failed(self, state: State) -> list[str]:
        fresh = sorted(set(state.failed[self._failures :]))
        self._failures = len(state.failed)
        said = []
        for trial in [state.trials[index] for index in fresh]:
            if trial.failure is not None:
                kind, message = trial.failure
                if trial.status is TrialStatus.FAILED:
                    then = "given up" if trial.failures == 1 else f"given up after {trial.failures} failures"
                else:
                    then = f"retrying ({trial.failures} of {self._job.max_failures})"
                said.append(f"trial {trial.trial} failed, {kind.replace('_', ' ')}: {printable(message)}; {then}")
        return said

    def _went_back(self, state: State) -> list[str]:
        fresh = state.setbacks[self._setbacks :]
        self._setbacks = len(state.setbacks)
        return [went_back(setback) for setback in fresh]

    def _ended(self, state: State) -> list[str]:
        said = []
        if state.phase in (Phase.ENDING, Phase.FINISHED) and not self._ending:
            self._ending = True
            going = [r.instance for r in state.instances.values() if r.status is InstanceStatus.RELEASING]
            why = f" ({printable(state.reason)})" if state.reason else ""
            if going:
                said.append(f"ending{why}: {len(going)} -> 0 instances, releasing {listed(going)}")
            elif why:
                said.append(f"ending{why}")
        if state.phase is Phase.FINISHED and state.ended_at is not None:
            best = best_trial(state, self._job.metric, self._job.mode)
            found = "no trial reported" if best is None else f"best {self._job.metric}={_metric(self._job, best)}"
            which = (
                "" if best is None else f" (trial {best.trial}, {counted(best.iterations, 'iteration')}{_batch(best)})"
            )
            cost = format_usd(bill_usd(self._job, state, state.ended_at))
            how = "stopped to keep the budget" if state.outcome == "budget" else state.outcome
            said.append(f"{how}: {found}{which}; {duration(state.ended_at - state.started_at)}, {cost}")
        return said


def _extended(event: LimitsChanged, state: State) -> list[str]:
    """What it grants that was not granted before."""
    granted = state.granted[-1] if state.granted else None
    if granted is None or granted.at != event.occurred_at:
        return []
    return [f"extended: {extended(granted)}"]


def _held(state: State) -> str:
    return counted(len(state.live()), "instance")


def _left(state: State) -> str:
    """What a driver that resumes finds; the instances that it asks for are not there yet."""
    held = [record for record in state.live() if record.requested_at < state.now]
    going = [trial for trial in state.trials if trial.status in _UNDER_WAY]
    return f"{counted(len(held), 'instance')} held, {counted(len(going), 'trial')} to continue"


def _trials(trials: Sequence[int]) -> str:
    return f"trial{'' if len(trials) == 1 else 's'} {listed(trials)}"


def _batch(trial: TrialState) -> str:
    """How its batch size changed; empty where it did not."""
    sizes = [use.batch_size for report in trial.reports for use in report.batches]
    return f", batch {change(sizes[0], sizes[-1])}" if sizes and sizes[0] != sizes[-1] else ""


def _metric(job: Job, trial: TrialState) -> str:
    value = trial.metric(job.metric)
    return "none" if value is None else number(value)
