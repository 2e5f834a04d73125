"""What a run keeps that is planned again at every SYNC, or whose instance cap changes, beside what every run keeps."""

from __future__ import annotations

from collections import Counter

from rubberband.executor import (
    AllotmentChanged,
    CheckpointLost,
    Controller,
    Event,
    InstanceCapChanged,
    LimitsChanged,
    Phase,
    Regrouped,
    RestPlanned,
    TrialForked,
    TrialReported,
    bill_usd,
    forecast,
)
from rubberband.executor.core.state import LaneState
from rubberband.planner.noise.sampling import varies
from rubberband.units import MONEY_SLACK_USD

ROUNDING_S = 1e-6
SHARE = 1e-6


class Trained:
    """The iterations that are acknowledged; only a checkpoint that cannot be read takes one back."""

    def __init__(self, controller: Controller) -> None:
        self._iterations = [0] * len(controller.state.trials)

    def lost(self, event: Event, controller: Controller) -> list[str]:
        """Return what must not have been, after one more event."""
        trials, wrong = controller.state.trials, list[str]()
        self._iterations += [
            trial.iterations for trial in trials[len(self._iterations) :]
        ]  # some begin with a checkpoint
        for trial in trials:
            had, has = self._iterations[trial.trial], trial.iterations
            if isinstance(event, TrialForked) and event.trial == trial.trial:
                pass  # a failed one goes on from where another is
            elif has < had and not (isinstance(event, CheckpointLost) and event.trial == trial.trial):
                wrong.append(f"trial {trial.trial} had done {had} iterations and has {has}")
            elif has > had + 1:
                wrong.append(f"trial {trial.trial} went from {had} to {has} iterations at once")
            self._iterations[trial.trial] = has
        return wrong[:10]


class InstanceCapWatch:
    """Looks at every event of a run whose instance cap changes; `wrong` is what must not have been."""

    def __init__(self, controller: Controller) -> None:
        self.wrong: list[str] = []
        self.seen: Counter[str] = Counter()
        self._trained = Trained(controller)
        self._instances = 0
        self._decisions = 0

    def saw(self, event: Event, controller: Controller) -> None:
        state = controller.state
        self.wrong += self._trained.lost(event, controller)
        self.seen["cap changed"] += isinstance(event, AllotmentChanged) and self._changed(event, controller)
        if isinstance(event, (AllotmentChanged, LimitsChanged)) or state.course != "running":
            return  # orders follow with the next event
        if state.planning() is not None:
            return  # or with the decision on a lane's next stage
        cap = state.most_instances
        held, leaving = len(state.fleet.live()), state.fleet.leaving()
        kept = held + sum(record.recalled_at is None for record in leaving)
        self._require(kept <= cap, f"{kept} instances are kept of at most {cap}")
        if len(state.instances) > self._instances:
            self._instances = len(state.instances)
            self._require(held + len(leaving) <= cap, f"more is asked for than {cap}")
        for record in leaving:
            lane = state.lanes[record.lane]
            idle = record.recalled_at is not None and not lane.runners.uses(record.instance)
            self._require(not idle, f"{record.instance} is recalled, and no trial runs on it")
            self.seen["recalled"] += record.recalled_at == state.now
        if isinstance(event, TrialReported) and event.checkpoint is not None:
            trial = state.trials[event.trial]
            on = [state.instances[slot.instance] for slot in trial.gang] if trial in state.running() else []
            stays = trial.attempt == event.attempt and any(record.recalled_at is not None for record in on)
            self._require(not stays, f"trial {event.trial} goes on past its checkpoint where it is recalled")
        self._decided(controller)

    def _changed(self, event: AllotmentChanged, controller: Controller) -> bool:
        changes = controller.state.history.of(InstanceCapChanged)
        return bool(changes) and changes[-1].at_s == controller.state.elapsed_s(event.occurred_at)

    def _decided(self, controller: Controller) -> None:
        state = controller.state
        for event in state.decisions[self._decisions :]:
            within = any(stage.stage == event.stage and stage.started_at < state.now for stage in state.stages)
            self.seen["planned again within a stage"] += within
            spent_s, spent_usd = event.occurred_at - state.started_at, bill_usd(state, event.occurred_at)
            self._require(event.jct_s > spent_s - ROUNDING_S, f"it is to end {event.jct_s} s after its start")
            self._require(event.cost_usd > spent_usd - MONEY_SLACK_USD, f"{event.cost_usd} USD of {spent_usd} spent")
        self._decisions = len(state.decisions)

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds and len(self.wrong) < 10:
            self.wrong.append(otherwise)


class PlanWatch:
    """Looks at every event after the controller has taken it in; `wrong` is what must not have been."""

    def __init__(self, controller: Controller) -> None:
        self.wrong: list[str] = []
        self.decisions = 0
        self._plan, self._profile = controller.state.plan, controller.state.profile
        self._trained = Trained(controller)

    def saw(self, event: Event, controller: Controller) -> None:
        if isinstance(event, RestPlanned) and controller.state.decisions[-1:] == [event]:
            self._decided(event, controller)
        self._obeyed(controller)
        self.wrong += self._trained.lost(event, controller)

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds and len(self.wrong) < 10:
            self.wrong.append(otherwise)

    def _decided(self, event: RestPlanned, controller: Controller) -> None:
        job, state = controller.job, controller.state
        self.decisions += 1
        before, after = self._plan.stages, event.plan.stages
        measured_anew = event.profile != self._profile
        self._plan, self._profile = event.plan, event.profile
        end = next(lane.end_stage for lane in state.lanes if event.stage < lane.end_stage)
        others = before[: event.stage] + before[end:]
        kept_others = after[: event.stage] + after[end:] == others
        self._require(kept_others, f"stage {event.stage}: the past, or another lane, is planned again")
        self._require(
            event.changed == (after != before), f"stage {event.stage}: it is not told whether the plan changed"
        )
        spent_s, spent_usd = event.occurred_at - state.started_at, bill_usd(state, event.occurred_at)
        self._require(event.jct_s > spent_s - ROUNDING_S, f"it is to end {event.jct_s} s after its start, in the past")
        self._require(
            event.cost_usd > spent_usd - MONEY_SLACK_USD, f"it is to cost less than the {spent_usd} USD spent"
        )
        if varies(event.profile, job.offer):
            return
        held = [
            (job.deadline_s, event.present_jct_s, event.jct_s),
            (job.max_cost_usd, event.present_cost_usd, event.cost_usd),
        ]
        if all(most is None or present <= most for most, present, _ in held):
            kept = all(most is None or new <= most * (1.0 + SHARE) for most, _, new in held)
            self._require(kept, f"stage {event.stage}: a plan that keeps the limits is left for one that does not")
        on_their_way = [r for r in state.fleet.live() if r.ready_at is None and r.requested_at < event.occurred_at]
        if on_their_way:  # the planner takes what runs for ready, and the forecast knows better
            return
        if any(record.instead_of_spot for record in state.fleet.live()):  # the planner has it given back
            return
        if job.is_divided and measured_anew:  # the other lanes were expected to end by what was known before
            return
        if any(at == event.occurred_at for r in state.fleet.live() for _, at in r.lanes_before):  # another gains by it
            return
        expected = forecast(state, event.occurred_at)
        close = abs(expected.jct_s - event.jct_s) <= ROUNDING_S + SHARE * event.jct_s
        self._require(close, f"the decision says {event.jct_s} s in all, and the forecast {expected.jct_s}")

    def _obeyed(self, controller: Controller) -> None:
        state = controller.state
        self._require(state.plan == self._plan, "the plan changed between two SYNCs")
        if state.phase not in (Phase.SCALING, Phase.TRAINING):
            return
        for lane in state.active():
            self._obeyed_by(controller, lane)

    def _obeyed_by(self, controller: Controller, lane: LaneState) -> None:
        job = controller.job
        chosen, live = lane.chosen, lane.held.live
        self._require(len(live) <= chosen.instances, f"{len(live)} instances are held of {chosen.instances} planned")
        markets = {record.market for record in live if not record.instead_of_spot}
        self._require(markets <= {chosen.market}, f"instances of {markets} where {chosen.market} is planned")
        for trial in lane.running():
            least = job.profile.smallest_gpus
            width = len(trial.gang)
            fits = width == chosen.gpus_per_trial or least <= width < chosen.gpus_per_trial
            joined = controller.state.history.of(Regrouped)
            fits = fits or any((one.trial, one.gpus) == (trial.trial, width) for one in joined)
            self._require(fits, f"trial {trial.trial} trains on {width} GPUs of {chosen.gpus_per_trial} planned")
