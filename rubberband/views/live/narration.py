"""Lines about a run, one event after another, found by comparison of the state with what was reported before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from rubberband.executor.core.bill import bill_usd
from rubberband.executor.core.controller import Controller
from rubberband.executor.core.events import (
    WITHOUT_CHECKPOINT,
    AllotmentChanged,
    DriverResumed,
    DriverStopped,
    Event,
    InstanceInterrupted,
    InstanceLost,
    InstanceReady,
    InstanceRefused,
    InstanceReleased,
    LimitsChanged,
    RestPlanned,
    RestValued,
    Tick,
    TrialReported,
    TrialsAdded,
    TrialsDrawn,
    TrialStopRequested,
)
from rubberband.executor.core.fleet import InstanceRecord, InstanceStatus
from rubberband.executor.core.forecast import forecast
from rubberband.executor.core.history import (
    Fork,
    GivenBack,
    HungInstance,
    InstanceCapChanged,
    Kind,
    LimitsExtended,
    Pause,
    Promotion,
    Record,
    Regrouped,
    Replacement,
    Setback,
    TrialCut,
    TrialsJoined,
)
from rubberband.executor.core.job import Job
from rubberband.executor.core.ranking import best_trained, standing
from rubberband.executor.core.state import LaneState, Phase, StageRecord, State
from rubberband.executor.core.trial_state import UNDER_WAY, TrialState, TrialStatus
from rubberband.states import REHEARSAL
from rubberband.units import counted, duration, format_usd, gpus_each, in_unit
from rubberband.values.offer import slots
from rubberband.values.worth import RestWorth
from rubberband.views.formatting import change, listed, local_times, number, printable, slow_workers, unequal
from rubberband.views.story import instance_cap_changed, not_needed, sentence

T = TypeVar("T")
Slow = tuple[Sequence[int], Sequence[int]]
"""Ranks of a gang without samples, and its stragglers."""


class Narrator:
    """Turns events into lines. It sees every event once, after the controller has handled it."""

    def __init__(self, job: Job, *, details: bool = True) -> None:
        """`details`: whether also the lines about instances that start and end, and about stages that begin."""
        self._job, self._details = job, details
        self._begun = False
        self._seen: dict[str, int] = {}
        """List of the state -> its items that lines were about."""
        self._reported: Record | None = None
        """The latest record of other limits that a line was about."""
        self._warned = False
        self._instances: set[str] = set()
        self._live: Sequence[InstanceRecord] = ()
        """Held or starting after the last event."""
        self._lanes: dict[str, int] = {}
        """Instance -> the lane that could use it."""
        self._stages_begun = 0
        self._stages_trained: set[int] = set()
        self._stages_ended: set[int] = set()
        self._slow: dict[int, Slow] = {}
        """Trial whose workers are unequal, or were -> its slow workers."""
        self._seen_recalled: set[str] = set()
        self._ending = False

    def lines(self, event: Event, controller: Controller) -> list[str]:
        """Return the lines about `event`, in order; often none."""
        unit = controller.job.offer.unit
        return [local_times(in_unit(line, unit), event.occurred_at) for line in self._lines(event, controller)]

    def _lines(self, event: Event, controller: Controller) -> list[str]:
        self._job, state = controller.job, controller.state
        if isinstance(event, LimitsChanged):
            return [f"extended: {sentence(granted)}" for granted in self._made(LimitsExtended, event, state)]
        if isinstance(event, TrialsAdded):
            self._fresh("forks", state.history.of(Fork))  # that of a clone is in its sentence
            return [sentence(added) for added in self._made(TrialsJoined, event, state)]
        if isinstance(event, AllotmentChanged):
            is_begun, deadline_s = bool(state.stages), self._job.deadline_s
            changes = self._made(InstanceCapChanged, event, state)
            return [
                f"instance cap: {instance_cap_changed(change, deadline_s, is_begun=is_begun)}" for change in changes
            ]
        said = self._stopped(event, state) if isinstance(event, TrialStopRequested) else []
        if isinstance(event, DriverStopped):
            return [f"stopped: {printable(event.reason)}"]
        if isinstance(event, TrialsDrawn):
            first, last = event.first_trial, event.first_trial + len(event.configurations) - 1
            drawn = f"trials {first} to {last}" if last > first else f"trial {last}"
            return [f"{drawn} drawn {event.reason}"] if self._begun else []
        if not self._begun:
            self._begun = True
            said.append(self._introduction(event, state))
            if isinstance(event, DriverResumed):
                self._catch_up(state)
        elif isinstance(event, DriverResumed):
            said.append(f"resumed: {_left(state)}")
        if isinstance(event, Tick) and event.paused_s:
            said.append(sentence(state.history.of(Pause)[-1]))
        said += self._instance(event, state) if self._details else []
        said += self._failed(state)
        said += map(sentence, self._fresh("setbacks", state.history.of(Setback)))
        said += map(sentence, self._fresh("forks", state.history.of(Fork)))
        repeats = not self._warned and self._job.max_iterations > 1
        if isinstance(event, TrialReported) and event.checkpoint is not None and repeats and not event.ended:
            self._warned = event.saved_iterations == 0
            said += [f"trial {event.trial} {WITHOUT_CHECKPOINT}"] * self._warned
        said += self._unequal(event, state) if isinstance(event, TrialReported) else []
        said += map(sentence, self._fresh("replacements", state.history.of(Replacement)))
        said += map(sentence, self._fresh("hung", state.history.of(HungInstance)))
        said += map(sentence, self._fresh("cuts", state.history.of(TrialCut)))
        said += map(sentence, self._fresh("given back", state.history.of(GivenBack)))
        said += map(sentence, self._fresh("regrouped", state.history.of(Regrouped)))
        said += self._promoted(state)
        said += self._synced(state)
        said += self._decided(state)
        worths = self._fresh("worths", state.history.of(RestWorth))
        said += [f"rest: {worth.in_words(printable(self._job.metric))}" for worth in worths if self._job.trains]
        is_asked = self._job.stop.worth_per_usd is not None and not state.history.of(RestWorth)
        if is_asked and isinstance(event, (RestPlanned, RestValued)):
            said.append("rest: its worth is not known yet; it needs three trials with four reports each")
        said += self._recalled(state)
        about_instances = self._handed_on(state) + self._scaled(state) + self._training(state)
        said += about_instances if self._details else []
        said += self._ended(state)
        if self._live is not state.fleet.live():
            self._live = state.fleet.live()
            self._lanes = {record.instance: record.lane for record in self._live}
        return said

    def _introduction(self, event: Event, state: State) -> str:
        job = self._job
        if isinstance(event, DriverResumed) and event.occurred_at > state.started_at:
            return f"resuming {job.name}: {_left(state)}, {format_usd(bill_usd(state, state.now))} spent"
        limits = "" if job.deadline_s is None else f"; deadline {job.deadline}"
        limits += "" if job.max_cost_usd is None else f"; max_cost {format_usd(job.max_cost_usd)}"
        brackets = f" of {len(job.brackets)} brackets" if job.is_divided else ""
        steps = f"{counted(len(job.stages), 'stage')}{brackets}"
        if not job.has_sync:
            rungs = len(job.rung_ends(0))
            steps = f"{counted(rungs, 'rung')} without a SYNC" if rungs > 1 else "turn, each to its end"
        return (
            f"{job.name}: {counted(job.num_trials, 'trial')} in {steps}, planned "
            f"{duration(job.prediction.jct_s)} and {format_usd(job.prediction.cost_usd)}{limits}"
        )

    def _catch_up(self, state: State) -> None:
        """Mark everything that an earlier driver has reported."""
        now = state.now
        self._seen = {
            "failed": len(state.failed),
            "setbacks": len(state.history.of(Setback)),
            "forks": len(state.history.of(Fork)),
            "decisions": len(state.decisions),
            "promotions": len(state.history.of(Promotion)),
            "replacements": len(state.history.of(Replacement)),
            "hung": len(state.history.of(HungInstance)),
            "cuts": len(state.history.of(TrialCut)),
            "worths": len(state.history.of(RestWorth)),
            "given back": len(state.history.of(GivenBack)),
            "regrouped": len(state.history.of(Regrouped)),
        }
        self._warned = any(trial.reports and trial.reports[0].saved_iterations == 0 for trial in state.trials)
        self._instances = {record.instance for record in state.instances.values() if record.requested_at < now}
        self._live = [record for record in state.fleet.live() if record.instance in self._instances]
        self._stages_begun = sum(stage.started_at < now for stage in state.stages)
        self._stages_trained = {stage.stage for stage in state.stages if stage.training_at is not None}
        self._stages_ended = {stage.stage for stage in state.stages if stage.ended_at is not None}

    def _fresh(self, name: str, every: Sequence[T]) -> Sequence[T]:
        """Return the items of a list of the state that came since the last look at it."""
        before, self._seen[name] = self._seen.get(name, 0), len(every)
        return every[before:]

    def _made(self, kind: type[Kind], event: Event, state: State) -> Sequence[Kind]:
        """Return the record of a kind that the event has just made; none if it has made none."""
        latest = state.history.of(kind)[-1:]
        is_new = (
            bool(latest) and latest[0] is not self._reported and latest[0].at_s == state.elapsed_s(event.occurred_at)
        )
        self._reported = latest[0] if latest else self._reported
        return latest if is_new else []

    def _instance(self, event: Event, state: State) -> list[str]:
        match event:
            case InstanceReady():
                record = state.instances[event.instance]
                after = duration(event.occurred_at - record.requested_at)
                bought = self._bought(record)
                held = counted(len(state.fleet.live()), "instance")
                return [f"{event.instance} ready after {after} ({len(state.fleet.ready())} of {held}){bought}"]
            case InstanceInterrupted():
                on_it = [t.trial for t in state.running() if any(slot.instance == event.instance for slot in t.gang)]
                moving = f"; {_trials(on_it)} will move" if on_it else ""
                return [f"{event.instance} will be taken away soon{moving}"]
            case InstanceRefused():
                what = "failed to start" if event.failed_start else "refused"
                then = self._what_then(state, state.instances[event.instance])
                return [f"{event.instance} {what}: {printable(event.reason)}{then}"]
            case InstanceLost():
                return [self._lost(event, state)]
            case InstanceReleased():
                return [f"{event.instance} released; {counted(len(state.fleet.current()), 'instance')} held"]
            case _:
                return []

    def _what_then(self, state: State, record: InstanceRecord) -> str:
        lane = state.lanes[record.lane]
        if state.course != "running" or lane.phase not in (Phase.SCALING, Phase.TRAINING):
            return ""
        if state.buys_none and not state.fleet.ready():
            return f"; {state.fleet.failed_starts} in a row never got ready, so no more are bought"
        if any(record.instead_of_spot and record.requested_at == state.now for record in state.fleet.live()):
            return ""
        if lane.launches_left <= 0:
            return f"; continuing with {counted(len(lane.held.live), 'instance')}"
        return f"; retrying in {duration(max(0.0, lane.relaunch_at - state.now))}"

    def _bought(self, record: InstanceRecord) -> str:
        """Return the type, market, zone and price if they differ from the offer."""
        offer, price = self._job.offer, record.price_usd_per_hour
        if record.hour_prices_usd:
            price = record.hour_prices_usd[-1]
        other = record.instance_type if record.instance_type not in ("", offer.instance_type) else ""
        parts = [other, "spot" if record.market == "spot" else "", f"in {record.zone}" if record.zone else ""]
        if price is not None and (other or record.market == "spot"):
            parts.append(f"at {format_usd(price)}/h")
        return f": {' '.join(part for part in parts if part)}" if any(parts) else ""

    def _lost(self, event: InstanceLost, state: State) -> str:
        struck = [
            use.trial
            for use in state.allocations
            if use.ended_at == state.now and any(slot.instance == event.instance for slot in use.gang)
        ]
        hit = [trial for trial in struck if state.trials[trial].status in (TrialStatus.QUEUED, TrialStatus.RUNNING)]
        left = sum(record.instance in self._instances for record in state.fleet.live())
        what = "PREEMPTED" if event.preempted else "lost"
        record = state.instances[event.instance]
        what = "failed to start" if record.failed_start else what
        line = f"{event.instance} {what} ({printable(event.reason)})"
        if any(held is record for held in self._live):
            line = f"{line}: {len(self._live)} -> {counted(left, 'instance')}"
        if not hit:
            failed_again = record.failed_start and self._job.start_attempts is not None
            return f"{line}{self._what_then(state, record)}" if failed_again else line
        return f"{line}; {_trials(hit)} will resume from the last checkpoint"

    # Stages

    def _handed_on(self, state: State) -> list[str]:
        """Instances go warm from one lane to another."""
        if len(state.lanes) == 1 or self._live is state.fleet.live():
            return []
        to: dict[int, list[str]] = {}
        for record in state.fleet.live():
            if self._lanes.get(record.instance, record.lane) != record.lane:
                to.setdefault(record.lane, []).append(record.instance)
        return [
            f"{self._job.stage_name(state.lanes[lane].stage.stage)}: gets {listed(sorted(handed))}, warm, from another"
            for lane, handed in to.items()
        ]

    def _recalled(self, state: State) -> list[str]:
        """Instances are given back within a stage, as the instance cap shrank."""
        if not state.history.of(InstanceCapChanged):
            return []
        recalled = [record for record in state.fleet.leaving() if record.recalled_at == state.now]
        fresh = [record.instance for record in recalled if record.instance not in self._seen_recalled]
        self._seen_recalled = {record.instance for record in state.fleet.leaving() if record.recalled_at is not None}
        on_them = [t.trial for t in state.running() if any(slot.instance in fresh for slot in t.gang)]
        stop = f"{_trials(on_them)} {'stops' if len(on_them) == 1 else 'stop'} at the next checkpoint"
        return [f"giving back {listed(fresh)}: {stop}"] if fresh and on_them else []

    def _scaled(self, state: State) -> list[str]:
        """Return the lines about a cluster that grows or shrinks: new stages, or replacements for lost instances."""
        if len(state.instances) == len(self._instances) and len(state.stages) == self._stages_begun:
            return []
        asked = [record for record in state.instances.values() if record.instance not in self._instances]
        self._instances.update(record.instance for record in asked)
        said, begun = list[str](), state.stages[self._stages_begun :]
        self._stages_begun = len(state.stages)
        for lane in state.lanes:
            ours = [record for record in asked if record.lane == lane.lane]
            going = [stage for stage in begun if stage.ended_at is None]  # others had no trial left to train
            stage = next((stage for stage in going if stage is lane.stages[-1]), None) if lane.stages else None
            launching = self._launching(state, lane, ours)
            if stage is not None:
                held = counted(len(lane.held.live), "instance")
                begins = self._stage_begins(state, lane, launching if ours else f"{held} kept")
                at_once = f"; {self._gangs(lane)}" if self._trains(lane) else ""
                said.append(f"{begins}{at_once}")
            elif ours:
                said.append(launching)
        return said

    def _launching(self, state: State, lane: LaneState, asked: Sequence[InstanceRecord]) -> str:
        on_spot = " on spot" if any(record.market == "spot" for record in asked) else ""
        instead = any(record.instead_of_spot for record in asked)
        on_spot = f" on demand instead of spot ({printable(state.fleet.spot_dry_reason)})" if instead else on_spot
        held = len(lane.held.live)
        return f"launching {len(asked)}{on_spot}: {held - len(asked)} -> {counted(held, 'instance')}"

    def _stage_begins(self, state: State, lane: LaneState, otherwise: str) -> str:
        stage, held = lane.stage, lane.held.live
        iterations = self._job.stages[stage.stage].iterations
        line = (
            f"{self._job.stage_name(stage.stage)}: {_to_train(stage, state)} x "
            f"{'up to ' * (not self._job.has_sync)}{counted(iterations, 'iteration')}"
        )
        before = [record for record in self._live if record.lane == lane.lane]
        going = sorted(record.instance for record in before if record.status is InstanceStatus.RELEASING)
        shrinking = f"{len(before)} -> {counted(len(held), 'instance')}, releasing {listed(going)}"
        if going and any(record.status is InstanceStatus.REQUESTED for record in held):
            return f"{line}; releasing {listed(going)}, {otherwise}"
        return f"{line}; {shrinking if going else otherwise}"

    def _training(self, state: State) -> list[str]:
        """Return the lines about stages that had to wait for instances and train now."""
        said, offer = list[str](), self._job.offer
        for lane in state.lanes:
            if self._trains(lane):
                of_it = f" of {self._job.stage_name(lane.stage.stage)}" if self._job.is_divided else ""
                on = f"{counted(len(lane.held.ready), 'instance')} x {counted(offer.gpus, offer.place)}"
                said.append(f"training {_to_train(lane.stage, state)}{of_it} on {on}, {self._gangs(lane)}")
        return said

    def _trains(self, lane: LaneState) -> bool:
        """Whether the stage of a lane trains, and no line has said so."""
        is_new = bool(lane.stages and lane.runners) and lane.stage.stage not in self._stages_trained
        if not is_new or lane.stage.training_at is None:
            return False
        self._stages_trained.add(lane.stage.stage)
        return True

    def _gangs(self, lane: LaneState) -> str:
        offer, size = self._job.offer, len(lane.running()[0].gang)
        each = f"{gpus_each(size, offer.trials_per_gpu)} {offer.place}{'s' * (size > 1)}"
        return f"{each} per trial, {slots(len(lane.held.ready), offer.slots, size)} at once"

    def _promoted(self, state: State) -> list[str]:
        ends = self._job.rung_ends(0)
        return [
            f"trial {one.trial} promoted to rung {one.rung} ({counted(ends[one.rung], 'iteration')}): "
            f"{self._job.metric}={_metric(self._job, state.trials[one.trial])}"
            for one in self._fresh("promotions", state.history.of(Promotion))
        ]

    def _unequal(self, event: TrialReported, state: State) -> list[str]:
        """Return a line when a trial's workers turn out to be unequal, and when other workers of it are slow."""
        use, trial, before = event.balance, state.trials[event.trial], self._slow.get(event.trial)
        if use is None:
            return []
        slow = self._slow[event.trial] = ([rank for rank, x in enumerate(use.shares) if x == 0], use.stragglers)
        if slow == before:
            return []
        slow_ones = slow_workers(use, trial.gang, self._job.offer.place)
        text = "; ".join(filter(None, [unequal(use) if before is None else "", *slow_ones]))
        return [f"trial {event.trial}: {'unequal workers: ' if before is None else ''}{text or unequal(use)}"]

    def _synced(self, state: State) -> list[str]:
        ended = [stage for stage in state.stages if stage.ended_at is not None]
        fresh = [stage for stage in ended if stage.stage not in self._stages_ended]
        self._stages_ended = {stage.stage for stage in ended}
        return [self._sync(stage, state) for stage in fresh]

    def _decided(self, state: State) -> list[str]:
        made, is_divided = list[str](), self._job.is_divided
        for decision in self._fresh("decisions", state.decisions):
            since = f" from {self._job.stage_name(decision.stage)} on" if is_divided else ""
            made.append(f"plan{since} {'' if decision.changed else 'un'}changed: {printable(decision.reason)}")
        return [*made[:-1], f"{made[-1]}; {_forecast(state)}"] if made else []

    def _sync(self, stage: StageRecord, state: State) -> str:
        job = self._job
        failed = sum(state.trials[trial].status is TrialStatus.FAILED for trial in stage.trials)
        parts = []
        if stage.ranking and job.trains:
            best = state.trials[stage.ranking[0]]
            parts.append(f"best {job.metric}={_metric(job, best)} (trial {best.trial}{_note(state, best)})")
        if stage.ranking and stage.stage + 1 < job.bracket_of(stage.stage).end_stage:
            promoted = job.promoted(stage)
            stopped = len(stage.ranking) - len(promoted)
            parts.append(f"promoted {len(promoted)} of {len(stage.trials)} ({_trials(promoted)})")
            parts.append(f"stopped {stopped}" if stopped else "")
        parts.append(f"{failed} failed" if failed else "")
        by_user = sum(state.trials[trial].stopped_at is not None for trial in stage.trials)
        parts.append(f"{by_user} stopped by the user" if by_user else "")
        ended = sum(state.trials[trial].ended for trial in stage.trials)
        parts.append(f"{ended} ended early" if ended else "")
        parts.append(f"spent {format_usd(bill_usd(state, state.now))}")
        is_planned_next = job.replan and any(lane.phase is Phase.PLANNING for lane in state.lanes)
        if state.course == "running" and not is_planned_next:
            parts.append(_forecast(state))
        end = f"SYNC {job.stage_name(stage.stage).removeprefix('stage ')}"
        if not job.has_sync:
            reached = [sum(trial.rung >= rung for trial in state.trials) for rung in range(len(job.rung_ends(0)))]
            end = f"rungs {' > '.join(map(str, reached))}" if len(reached) > 1 else "all trials are at their end"
        return f"{end}: {'; '.join(part for part in parts if part)}"

    def _failed(self, state: State) -> list[str]:
        said = []
        for trial in [state.trials[index] for index in sorted(set(self._fresh("failed", state.failed)))]:
            if trial.failure is not None:
                kind, message = trial.failure
                if kind == "memory":
                    where = f"trial {trial.trial} on {self._job.offer.instance_type}"
                    said.append(f"{where} skipped: {printable(message)}")
                    continue
                then = f"retrying ({trial.failures} of {self._job.max_failures})"
                if trial.status is TrialStatus.FAILED:
                    then = "given up" if trial.failures == 1 else f"given up after {trial.failures} failures"
                said.append(f"trial {trial.trial} failed, {kind.replace('_', ' ')}: {printable(message)}; {then}")
        return said

    def _stopped(self, event: TrialStopRequested, state: State) -> list[str]:
        trial = state.trials[event.trial] if event.trial < len(state.trials) else None
        if trial is None or trial.stopped_at is None or trial.stopped_at < event.occurred_at:
            return []
        return [f"trial {trial.trial} stopped by the user after {counted(trial.iterations, 'iteration')}"]

    def _ended(self, state: State) -> list[str]:
        if state.course not in ("ending", "finished"):
            return []
        said = []
        if not self._ending:
            self._ending = True
            going = [r.instance for r in state.instances.values() if r.status is InstanceStatus.RELEASING]
            why = f" ({printable(state.reason)})" if state.reason else ""
            releasing = f": {len(going)} -> 0 instances, releasing {listed(going)}" if going else ""
            said += [f"ending{why}{releasing}"] if going or why else []
        if state.course == "finished" and state.ended_at is not None:
            best, found = best_trained(state), "no trial reported" if self._job.trains else REHEARSAL
            if best is not None:
                which = f"trial {best.trial}, {counted(best.iterations, 'iteration')}{_note(state, best)}"
                found = f"best {self._job.metric}={_metric(self._job, best)} ({which})"
            cost_usd = bill_usd(state, state.ended_at)
            how = "stopped to keep the budget" if state.outcome == "budget" else state.outcome
            jct_s = state.ended_at - state.started_at
            saved = "" if state.ended_by is None else f"; {not_needed(state.ended_by, jct_s, cost_usd)}"
            said.append(f"{how}: {found}; {duration(jct_s)}, {format_usd(cost_usd)}{saved}")
        return said


def _to_train(stage: StageRecord, state: State) -> str:
    """Return the number of a stage's trials that have not ended by themselves."""
    ended = sum(state.trials[trial].ended for trial in stage.trials)
    return counted(len(stage.trials) - ended, "trial") + (f" of {len(stage.trials)}" if ended else "")


def _left(state: State) -> str:
    """Return what a resuming driver finds, without the instances that it has just requested."""
    held = [record for record in state.fleet.live() if record.requested_at < state.now]
    going = [trial for trial in state.trials if trial.status in UNDER_WAY]
    return f"{counted(len(held), 'instance')} held, {counted(len(going), 'trial')} to continue"


def _forecast(state: State) -> str:
    expected = forecast(state, state.now)
    return f"forecast {duration(expected.jct_s)}, {format_usd(expected.cost_usd)}"


def _trials(trials: Sequence[int]) -> str:
    return f"trial{'' if len(trials) == 1 else 's'} {listed(trials)}"


def _note(state: State, trial: TrialState) -> str:
    """Return a remark on the best trial beside its metric: its batch size, and whether it is feasible."""
    return _batch(trial) + standing(state, trial).note


def _batch(trial: TrialState) -> str:
    """Return the change of the batch size; empty without one."""
    sizes = [use.batch_size for report in trial.reports for use in report.batches]
    return f", batch {change(sizes[0], sizes[-1])}" if sizes and sizes[0] != sizes[-1] else ""


def _metric(job: Job, trial: TrialState) -> str:
    value = trial.metric(job.metric)
    return "none" if value is None else number(value)
