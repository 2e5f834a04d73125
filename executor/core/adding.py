"""Trials that join a search while it runs, or go on with it after its end. Writes the state. Pure.

Trials that the user gives join the stage that ends after the fewest iterations: they train to its end from the
beginning, and are ranked at its SYNC with the others. Trials by number join a bracket in its first stage; where none is
in its first stage any more, they are a bracket of their own behind the last one, as they would otherwise train alone
for as long as the best ones have. Where trials climb rungs, they start as the others did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rubberband.executor.core import forking
from rubberband.executor.core.events import TrialForked, TrialsAdded
from rubberband.executor.core.history import TrialsJoined
from rubberband.executor.core.job import Bracket
from rubberband.executor.core.state import LaneState, Phase, State
from rubberband.executor.core.trial_state import TrialState, TrialStatus
from rubberband.planner.exact.model import least_instances as instances_for
from rubberband.planner.exact.model import predict
from rubberband.values.plan import Plan, Stage, StagePlan, StagePrediction


def why_not(state: State) -> str:
    """Return why no trial can be added, and what to do first; empty where one can."""
    name, ended_by = state.job.name, state.ended_by
    if ended_by is not None and ended_by.rule == "target":
        return f"it has reached its target; `rubberband extend {name} --target` and resume it, and add trials then"
    if ended_by is not None:
        return f"search.stop.{ended_by.rule} has ended it; run it again under another name"
    if state.outcome in (None, "done"):
        return ""
    if state.outcome == "budget":
        return f"it has ended by max_cost; `rubberband extend {name} --max-cost USD`, resume it, and add trials then"
    if state.outcome == "cancelled":
        return f"it was cancelled; `rubberband resume {name}`, and add trials then"
    return f"it has failed; `rubberband resume {name}`, or run it again under another name"


def add(state: State, event: TrialsAdded) -> LaneState | None:
    """Add trials; return the lane that they train in, or None where there are none or it ended otherwise than well."""
    why, at_s = why_not(state) or event.reason, state.elapsed_s(max(state.now, event.occurred_at))
    if why_not(state) or not event.configurations:
        state.history.add(TrialsJoined(at_s=at_s, trials=(), stage=0, sampled=False, reason=why))
        return None
    count, first = len(event.configurations), len(state.trials)
    numbers = tuple(range(first, first + count))
    found: tuple[LaneState, int] | None = state.lanes[0], 0
    if state.job.has_sync:
        found = _place(state.lanes, event.from_iterations, by_number=event.sampled > 0)
        if found is None and state.lanes[state.job.all_brackets()[-1].lane].phase is Phase.FINISHED:
            found = _place(state.lanes, event.from_iterations, by_number=False)  # others have its instances by now
    state.sampled_trials += event.sampled
    state.sampled_configs.update(
        (number, config) for number, config in zip(numbers, event.configurations, strict=True) if config is not None
    )
    trials = [TrialState(trial=number, clone_of=event.clone_of) for number in numbers]
    state.trials.extend(trials)
    if state.outcome is None and found is not None:
        lane, stage = found
        _join(lane, stage, trials, event.reduction_factor)
    elif not state.job.has_sync:
        lane, stage = state.lanes[0], 0
        _join(lane, stage, trials, event.reduction_factor)
        _open_again(lane)
    else:
        lane, stage = _follow(state, event.stages, trials)
    state.lane_of = [*state.lane_of, *[lane.lane] * count]
    if event.clone_of is not None and event.from_iterations:
        forked = TrialForked(
            occurred_at=event.occurred_at,
            trial=first,
            parent=event.clone_of,
            iterations=event.from_iterations,
            configuration=event.configurations[0] or {},
            changes=event.changes,
            reason="cloned by the user",
        )
        forking.fork(state, forked)
        if not state.job.has_sync:
            _climb(lane, trials[0])
    state.history.add(
        TrialsJoined(
            at_s=at_s,
            trials=numbers,
            stage=stage,
            sampled=event.sampled > 0,
            reason=event.reason,
            clone_of=event.clone_of,
            changes=event.changes,
            from_iterations=event.from_iterations,
        )
    )
    return lane


def _place(lanes: Sequence[LaneState], done: int, *, by_number: bool) -> tuple[LaneState, int] | None:
    """Return the lane and the stage that trials join, with `done` iterations: the one that ends soonest after these.

    Trials by number join a bracket in its first stage only. None without such a stage.
    """
    stages = [
        (lane.job.iterations_by(stage), stage, lane)
        for lane in lanes
        for stage in _joinable(lane)
        if lane.job.iterations_by(stage) > done and (not by_number or stage == lane.job.bracket_of(stage).first_stage)
    ]
    if not stages:
        return None
    _, stage, lane = min(stages, key=lambda entry: entry[:2])
    return lane, stage


def _joinable(lane: LaneState) -> list[int]:
    """The current stage of each bracket that is not over, or its first one."""
    if lane.phase is Phase.FINISHED:
        return []
    if not lane.stages:
        return [bracket.first_stage for bracket in lane.brackets]
    current = lane.stage.stage
    later = [bracket.first_stage for bracket in lane.brackets if bracket.first_stage > current]
    return [current, *later] if lane.stage.ended_at is None else later


def _join(lane: LaneState, stage: int, trials: Sequence[TrialState], factor: int | None) -> None:
    """Trials join a stage of a bracket, and later stages train more for that, never fewer."""
    state, job = lane.state, lane.job
    bracket = job.bracket_of(stage)
    numbers = tuple(trial.trial for trial in trials)
    had = len(job.trials_of(bracket))
    grown = replace(bracket, num_trials=had - len(bracket.joined), joined=(*bracket.joined, *numbers))
    stages, repeats = list(job.stages), job.repeats
    stages[stage] = replace(stages[stage], trials=stages[stage].trials + len(trials))
    for later in range(stage + 1, bracket.end_stage):
        planned, total = stages[later].trials // repeats, (had + len(trials)) // repeats
        in_proportion = planned * total * repeats // had
        by_rule = in_proportion if factor is None else total // factor ** (later - bracket.first_stage)
        stages[later] = replace(stages[later], trials=repeats * max(planned, by_rule))
    state.job = replace(
        job, stages=tuple(stages), brackets=tuple(grown if b == bracket else b for b in job.all_brackets())
    )
    lane.brackets = tuple(grown if b == bracket else b for b in lane.brackets)
    for trial in trials:
        trial.last_stage = stage
        trial.joined_stage = stage if stage > bracket.first_stage else None
    if lane.stages and lane.stage.stage == stage:
        lane.stage.trials += numbers
        for trial in trials:
            lane.waiters.add(trial)
        lane.needs = None if lane.needs is None else lane.needed_instances
    _ask_for_a_plan(lane)


def _climb(lane: LaneState, trial: TrialState) -> None:
    """A trial goes on from a checkpoint on the rung that this has reached: it has results on those below."""
    totals, ranking = lane.job.rung_ends(0), lane.job.ranking
    while trial.rung + 1 < len(totals) and trial.iterations >= totals[trial.rung]:
        lane.rungs.record(trial.rung, ranking.merit(trial.reports[totals[trial.rung] - 1].metrics), trial.trial)
        lane.rungs.withdraw(trial.rung, trial.trial)
        trial.rung += 1


def _ask_for_a_plan(lane: LaneState) -> None:
    """The rest of a lane is planned again, within its stage if it has one; instances may be asked for at once."""
    lane.launches_left = lane.job.launch_attempts
    lane.replans_at_once = lane.job.has_sync
    if not lane.state.buys_none:
        lane.relaunch_at = 0.0


def _open_again(lane: LaneState) -> None:
    """Trials climb the rungs of a search that has ended: with more results, those that paused may go on too."""
    lane.stage.ended_at, lane.needs = None, None
    for number in lane.stage.trials:
        trial = lane.state.trials[number]
        if trial.status is TrialStatus.STOPPED and trial.stopped_at is None:
            lane.state.put(trial, TrialStatus.PAUSED)


def _follow(state: State, stages: Sequence[Stage], trials: Sequence[TrialState]) -> tuple[LaneState, int]:
    """Trials are a bracket behind the last one, of the same lane. Its plan is made before it begins.

    It has one until then, which stays where the planner finds none.
    """
    job, brackets = state.job, state.job.all_brackets()
    last = brackets[-1]
    bracket = Bracket(
        bracket=1 + max(one.bracket for one in brackets),
        first_stage=last.end_stage,
        num_stages=len(stages),
        first_trial=trials[0].trial,
        lane=last.lane,
    )
    lane = state.lanes[last.lane]
    chosen = tuple(_choice(lane, stage) for stage in stages)
    alone = predict(stages, Plan(stages=chosen), state.profile, replace(job.offer, head_price_usd_per_hour=0.0)).stages
    predicted = tuple(replace(stage, start_s=stage.start_s + state.elapsed_s(state.now)) for stage in alone)
    unplanned = StagePrediction(start_s=0.0, provisioning_s=0.0, duration_s=0.0, cost_usd=0.0, slots=1)
    state.job = replace(
        job,
        stages=(*job.stages, *stages),
        brackets=(*brackets, bracket),
        plan=Plan(stages=(*job.plan.stages, *chosen)),
        prediction=replace(job.prediction, stages=(*job.prediction.stages, *[unplanned] * len(stages))),
    )
    state.plan, state.predicted = Plan(stages=(*state.plan.stages, *chosen)), (*state.predicted, *predicted)
    lane.brackets = (*lane.brackets, bracket)
    for trial in trials:
        trial.last_stage = bracket.first_stage
    _ask_for_a_plan(lane)
    return lane, bracket.first_stage


def _choice(lane: LaneState, stage: Stage) -> StagePlan:
    """The plan of a stage until one is made: gangs as the lane's first stage has, on no more instances than it has."""
    model = lane.state.plan.stages[lane.brackets[0].first_stage]
    needed = instances_for(stage.trials, lane.job.offer.slots, model.gpus_per_trial)
    return replace(model, instances=min(model.instances, needed))
