"""Plan the rest of an experiment after a SYNC, or within a stage once it may hold more or fewer instances. Pure.

Each lane is planned by itself, with the instances that other lanes leave it, and the money that they are not expected
to need. The state is turned into what the planner knows of a job, and the planner's answer into an event.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from rubberband.errors import RubberbandError
from rubberband.executor.core.bill import bill_usd, held_s
from rubberband.executor.core.events import RestPlanned
from rubberband.executor.core.forecast import (
    Forecast,
    assumed,
    forecast,
    iterations_left,
    lane_factor,
    later_stages,
    runs_in_s,
    stage_left,
)
from rubberband.executor.core.history import InstanceCapChanged, TrialsJoined
from rubberband.executor.core.job import Job
from rubberband.executor.core.measured import Measured, measured
from rubberband.executor.core.state import LaneState, Phase, State
from rubberband.executor.core.worth import worth_of
from rubberband.planner import Problem, Replanned, Reserve, replan
from rubberband.units import counted
from rubberband.values.offer import Offer
from rubberband.values.plan import Cohort, Plan, PlanningConstraints, Prediction, Stage, StagePrediction
from rubberband.values.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Remainder:
    """Start of the rest of a job, with what is held and spent by then."""

    lane: LaneState
    done: int
    """The first stage of the rest."""
    stages: tuple[Stage, ...]
    """The job's up to the lane's last, the later ones with no more trials than are left."""
    held: Sequence[Cohort]
    spent_s: float
    """Since the start."""
    spent_usd: float
    """Expected cost of everything but the rest: other lanes, and the head node if lanes share it."""
    others_end_s: float
    """Expected end of the other lanes, from the start; 0: there are none."""
    seen: Measured
    because: str
    """Differences from the plan's assumptions, in words."""


def decide(state: State, now: float) -> RestPlanned:
    """Plan the stages of a lane after the SYNC that has just been, as of `now`: of the first one that waits for that.

    A run goes on with the plan that it has where the planner refuses.
    """
    lane = next(lane for lane in state.lanes if lane.phase is Phase.PLANNING)
    remainder = after_sync(lane, now)
    try:
        found = best_rest(state, remainder)
    except RubberbandError as error:
        return _as_before(lane, now, f"the rest cannot be replanned: {error}")
    jct_s = max(remainder.others_end_s, remainder.spent_s + found.prediction.jct_s)
    cost_usd = remainder.spent_usd + found.prediction.cost_usd
    return RestPlanned(
        occurred_at=now,
        stage=remainder.done,
        plan=Plan(stages=(*found.plan.stages, *state.plan.stages[lane.end_stage :])),
        predicted=predicted_from(state, found.prediction, remainder.spent_s),
        profile=remainder.seen.profile,
        changed=found.changed,
        reason=found.reason,
        present_jct_s=max(remainder.others_end_s, remainder.spent_s + found.present.jct_s),
        present_cost_usd=remainder.spent_usd + found.present.cost_usd,
        jct_s=jct_s,
        cost_usd=cost_usd,
        own=remainder.seen.own,
        worth=worth_of(state, now, Forecast(jct_s=jct_s, cost_usd=cost_usd)),
    )


def decide_within(state: State, now: float) -> RestPlanned:
    """Plan a lane's current stage again while it is under way, and the stages after it.

    That is where its instance cap changed, or trials were added. The trials that have not ended the stage count as ones
    that have the mean of what they lack still to do. Its market stays: a change would replace every instance. Without a
    cap it keeps its gangs and its instances too, and may have more of them.
    """
    lane = state.resizing()
    assert lane is not None, "a lane waits to be planned again"
    remainder, before = within_stage(lane, now), forecast(state, now)
    stage, market = remainder.done, lane.chosen.market
    plan, predicted, reason = state.plan, state.predicted[stage : lane.end_stage], ""
    try:
        found = best_rest(state, remainder)
    except RubberbandError as error:
        reason = f"the rest cannot be replanned: {error}"
    else:
        reason = found.reason
        if found.plan.stages[stage].market == market:
            plan = Plan(stages=(*found.plan.stages, *state.plan.stages[lane.end_stage :]))
            if state.instance_cap is None:
                most = max(lane.chosen.instances, plan.stages[stage].instances)
                present = replace(lane.chosen, instances=most)
                plan = Plan(stages=(*plan.stages[:stage], present, *plan.stages[stage + 1 :]))
            predicted = (state.predicted[stage], *predicted_from(state, found.prediction, remainder.spent_s)[1:])
    then = state.supposed(
        plan=plan,
        profile=remainder.seen.profile,
        predicted=(*state.predicted[:stage], *predicted, *state.predicted[lane.end_stage :]),
    )
    then.lanes[lane.lane].planned_trials = lane.trials_left
    if state.instance_cap is None and lane.next_stage < lane.end_stage:
        predicted = (predicted[0], *_from_its_end(then.lanes[lane.lane], now, predicted[1:]))
        then.predicted = (*then.predicted[: stage + 1], *predicted[1:], *then.predicted[lane.end_stage :])
    after = forecast(then, now)
    return RestPlanned(
        occurred_at=now,
        stage=stage,
        plan=plan,
        predicted=predicted,
        profile=remainder.seen.profile,
        changed=plan != state.plan,
        reason=reason,
        present_jct_s=before.jct_s,
        present_cost_usd=before.cost_usd,
        jct_s=after.jct_s,
        cost_usd=after.cost_usd,
    )


def _from_its_end(lane: LaneState, now: float, predicted: Sequence[StagePrediction]) -> Sequence[StagePrediction]:
    """Predict the later stages of a lane by the plan in force, from when its current stage is expected to end."""
    remainder = after_stage(lane, now)
    with suppress(RubberbandError):
        return predicted_from(lane.state, _replanned(lane.state, remainder).present, remainder.spent_s)
    return predicted


def within_stage(lane: LaneState, now: float) -> Remainder:
    """The remainder of a lane within a stage, which is taken to begin now with what its trials lack."""
    job = lane.job
    remainder, stage = after_sync(lane, now), lane.stage.stage
    seen = remainder.seen
    if lane.chosen.market == "on_demand":
        seen = replace(seen, offer=replace(seen.offer, spot=None))
    left = [iterations_left(lane, t) for t in (*lane.running(), *lane.queued())]
    present = replace(
        job.stages[stage],
        trials=len(left),
        iterations=max(1, math.ceil(sum(left) / len(left))),
        repeats=None if seen.profile.resumes else 0,
    )
    return replace(
        remainder,
        done=stage,
        stages=(*job.stages[:stage], present, *as_seen(job, seen.profile)[stage + 1 : lane.end_stage]),
        seen=seen,
        because=", ".join(filter(None, (_why_now(lane.state), assumed(lane), seen.findings))),
    )


def _why_now(state: State) -> str:
    """Why the rest is planned again within a stage: the cap, and trials that were added since the latest plan."""
    planned_s = max((state.elapsed_s(one.occurred_at) for one in state.decisions), default=-math.inf)
    added = sum(len(one.trials) for one in state.history.of(TrialsJoined) if one.at_s >= planned_s)
    cap = "no instance cap now"
    if state.instance_cap is not None:
        cap = f"at most {counted(state.instance_cap, 'instance')} now"
    elif not state.history.of(InstanceCapChanged):
        cap = ""
    return ", ".join(filter(None, (f"{counted(added, 'trial')} added" if added else "", cap)))


def after_sync(lane: LaneState, now: float) -> Remainder:
    """The remainder of a lane between two stages."""
    state = lane.state
    seen = measured(state, lane)
    elsewhere_usd, others_end_s = elsewhere(lane, now)
    return Remainder(
        lane=lane,
        done=lane.next_stage,
        stages=remaining(lane, seen.profile),
        held=held(lane, now),
        spent_s=now - state.started_at,
        spent_usd=bill_usd(state, now) + elsewhere_usd,
        others_end_s=others_end_s,
        seen=seen,
        because=", ".join(filter(None, (_losses(lane), assumed(lane), seen.findings))),
    )


def after_stage(lane: LaneState, now: float) -> Remainder:
    """Return the expected remainder at the end of the lane's current stage."""
    state = lane.state
    seen, left = measured(state, lane), stage_left(lane, now)
    elapsed_s = now - state.started_at
    ends_s = elapsed_s + left.jct_s
    elsewhere_usd, others_end_s = elsewhere(lane, now)
    head_usd = 0.0 if share_a_head(state) else lane.job.offer.head_cost_usd(left.jct_s)
    return Remainder(
        lane=lane,
        done=lane.next_stage,
        stages=remaining(lane, seen.profile),
        held=_held_after(lane, now, ends_s - elapsed_s),
        spent_s=ends_s,
        spent_usd=bill_usd(state, now) + left.cost_usd + head_usd + elsewhere_usd,
        others_end_s=others_end_s,
        seen=seen,
        because=seen.findings,
    )


def _held_after(lane: LaneState, now: float, left_s: float) -> list[Cohort]:
    """Return the instances of the lane `left_s` from now: running ones, and those that the stage still lacks."""
    running, chosen = [record for record in lane.held.live if record.running_at is not None], lane.chosen
    running = [record for record in running if record.market == chosen.market] or running
    market = running[0].market if running else chosen.market
    ages = Counter((held_s(record, now) + left_s, record.market) for record in running)
    ages[max(0.0, left_s - runs_in_s(lane, now)), market] += max(0, chosen.instances - len(running))
    return [
        Cohort(instances=count, held_s=age, market=market) for (age, market), count in sorted(ages.items()) if count
    ]


def elsewhere(lane: LaneState, now: float) -> tuple[float, float]:
    """Return the cost that other lanes and the shared head node still add to the bill, and the end of those lanes."""
    state = lane.state
    if not share_a_head(state):
        return 0.0, 0.0
    usd, ends_s = 0.0, [0.0]
    for other in state.active():
        stage, later = stage_left(other, now), later_stages(other)
        ends_s.append(now - state.started_at + stage.jct_s + later.jct_s)
        if other is not lane:
            usd += stage.cost_usd + later.cost_usd
        else:
            own_s = ends_s.pop()
    left_s = max(own_s, *ends_s) - (now - state.started_at)
    return usd + lane.job.offer.head_cost_usd(left_s), max(ends_s)


def share_a_head(state: State) -> bool:
    """Whether several lanes go on: each is planned without the head node. The last one is planned with it."""
    return state.job.is_divided and len(state.active()) > 1


def best_rest(state: State, remainder: Remainder) -> Replanned:
    """The best plan of those that leave their reserve, if there is one. Raises RubberbandError if none can exist.

    A plan that a pool promises stays as long as it keeps the deadline: another one may need GPUs at times when others
    are promised them.
    """
    found = _replanned(state, remainder)
    plan = Plan(stages=state.plan.stages[: remainder.lane.end_stage])
    if not state.job.replan:
        reason = "plan unchanged: it is held fixed"
        return replace(found, plan=plan, prediction=found.present, changed=False, reason=reason)
    if not found.changed or not remainder.lane.is_promised:
        return found
    if state.job.deadline_s is not None and remainder.spent_s + found.present.jct_s > state.job.deadline_s:
        return found
    return replace(found, plan=plan, prediction=found.present, changed=False, reason="plan unchanged: it is promised")


def reserve(lane: LaneState) -> Reserve:
    """The terms of the money that a plan of a lane's rest leaves, beside that of the other lanes."""
    job = lane.job
    others = [lane.state.plan.stages[one.stage.stage : one.end_stage] for one in lane.state.active() if one is not lane]
    beside_usd = sum(max(job.reserve.release_usd(job.offer, choice) for choice in left) for left in others)
    return replace(job.reserve, ready=len(lane.held.ready), beside_usd=beside_usd)


def _replanned(state: State, remainder: Remainder) -> Replanned:
    job = state.job
    terms = limits(job)
    speeds, lane, offer, objective = remainder.seen.speeds, remainder.lane, remainder.seen.offer, job.objective
    are_all = speeds is not None and len(speeds.factors) == remainder.stages[remainder.done].trials
    if job.is_divided or state.instance_cap is not None:
        offer = replace(offer, max_instances=_most_instances(lane))
    if job.is_divided:
        are_all = are_all and job.bracket_of(remainder.done).end_stage == lane.end_stage
        if share_a_head(state):
            offer = replace(offer, head_price_usd_per_hour=0.0)
        terms = replace(terms, confidence=terms.confidence ** (1.0 / len(job.brackets)))
        rest = state.predicted[remainder.done : lane.end_stage]
        own_end_s = remainder.spent_s + sum(stage.provisioning_s + stage.duration_s for stage in rest)
        if objective == "min_time" and own_end_s <= remainder.others_end_s:
            # It is not the lane that the whole waits for: it need not be faster, and may be cheaper.
            late_s = remainder.others_end_s
            objective = "min_cost"
            terms = replace(terms, deadline_s=late_s if terms.deadline_s is None else min(late_s, terms.deadline_s))
    return replan(
        Problem(
            brackets=(remainder.stages,),
            profile=on_held_types(remainder.lane, remainder.seen.profile),
            offer=offer,
            constraints=terms,
            objective=objective,
            held=remainder.held,
            speeds=speeds if are_all else None,
            reserve=reserve(lane),
        ),
        done=remainder.done,
        spent_s=remainder.spent_s,
        spent_usd=remainder.spent_usd,
        current=Plan(stages=state.plan.stages[: lane.end_stage]),
        because=remainder.because,
        name_of=job.stage_name,
    )


def on_held_types(lane: LaneState, profile: Profile) -> Profile:
    """The profile of trials on the types that the lane holds; as it is unless others are used."""
    table = profile.seconds_per_iteration
    on_held_s = {gpus: lane_factor(profile, lane, gpus) * taken_s for gpus, taken_s in table.items()}
    return profile if on_held_s == table else replace(profile, seconds_per_iteration=on_held_s)


def _most_instances(lane: LaneState) -> int:
    """The instances that a lane may have: its own, and its share of what none of the lanes that go on has."""
    state = lane.state
    share = lane.max_instances + state.spare_instances // len(state.active())
    return share if state.instance_cap is None else max(share, lane.least_instances)


def remaining(lane: LaneState, profile: Profile) -> tuple[Stage, ...]:
    """The job's stages up to the lane's last; those that its trials go on to train no more trials than are left.

    A bracket of clones that go on from checkpoints trains what these lack.
    """
    job, trials, left = lane.job, lane.state.trials, lane.trials_left
    stages = list(as_seen(job, profile))
    done, end = lane.next_stage, lane.bracket.end_stage
    for bracket in lane.brackets:
        first = bracket.first_stage
        inherited = min(trials[trial].iterations for trial in job.trials_of(bracket)) if first >= done else 0
        stages[first] = replace(stages[first], iterations=max(1, stages[first].iterations - inherited))
    later = (replace(stage, trials=min(stage.trials, left)) for stage in stages[done:end])
    return (*stages[:done], *later, *stages[max(done, end) : lane.end_stage])


def as_seen(job: Job, profile: Profile) -> tuple[Stage, ...]:
    """The job's stages, with the iterations that trials train again in each if their program saves no checkpoint."""
    if profile.resumes:
        return tuple(replace(stage, repeats=None) for stage in job.stages)
    return tuple(
        replace(stage, repeats=job.iterations_by(at) - stage.iterations) for at, stage in enumerate(job.stages)
    )


def limits(job: Job) -> PlanningConstraints:
    """Return the limits of the whole experiment."""
    sizes = [choice.gpus_per_trial for choice in job.plan.stages]
    least, most = job.min_gpus_per_trial, job.max_gpus_per_trial
    return PlanningConstraints(
        deadline_s=job.deadline_s,
        max_cost_usd=job.max_cost_usd,
        min_gpus_per_trial=min(job.profile.smallest_gpus, *sizes) if least is None else least,
        max_gpus_per_trial=max(sizes) if most is None else most,
        gpus_per_trial_sizes=job.gpus_per_trial_sizes,
        confidence=job.confidence,
    )


def held(lane: LaneState, now: float) -> list[Cohort]:
    """The instances of a lane that run, by how long they have been billed.

    One that was asked for and does not run yet is not held: it costs and delays a plan just as a new one does, and
    nothing if it is given up. Nor is one that is taken away soon. All are of one market, the stage's; what was bought
    on demand instead of spot counts where it is all that there is.
    """
    running = [record for record in lane.held.live if record.running_at is not None]
    planned = [record for record in running if record.market == lane.chosen.market]
    running = planned or running
    cohorts = Counter((held_s(record, now), record.market) for record in running)
    return [Cohort(instances=count, held_s=age_s, market=market) for (age_s, market), count in sorted(cohorts.items())]


def _losses(lane: LaneState) -> str:
    planned = lane.chosen.instances if lane.needs is None else lane.wanted
    running = sum(record.running_at is not None for record in lane.held.live)
    return "" if running >= planned else f"{running} of {counted(planned, 'instance')} are left"


def predicted_from(state: State, found: Prediction, elapsed_s: float) -> tuple[StagePrediction, ...]:
    """The stages of a lane's rest from the job's start; without the head node if there are several brackets."""
    stages: Sequence[StagePrediction] = found.stages
    if state.job.is_divided and not share_a_head(state):
        stages = without_head(state.job.offer, stages)
    return tuple(replace(stage, start_s=elapsed_s + stage.start_s) for stage in stages)


def without_head(offer: Offer, stages: Sequence[StagePrediction]) -> tuple[StagePrediction, ...]:
    """The stages without the cost of the head node, which is the job's where that has several brackets."""
    return tuple(
        replace(stage, cost_usd=stage.cost_usd - offer.head_cost_usd(stage.provisioning_s + stage.duration_s))
        for stage in stages
    )


def _as_before(lane: LaneState, now: float, reason: str) -> RestPlanned:
    state = lane.state
    expected, done = forecast(state, now), lane.next_stage
    return RestPlanned(
        occurred_at=now,
        stage=done,
        plan=state.plan,
        predicted=state.predicted[done : lane.end_stage],
        profile=state.profile,
        changed=False,
        reason=reason,
        present_jct_s=expected.jct_s,
        present_cost_usd=expected.cost_usd,
        jct_s=expected.jct_s,
        cost_usd=expected.cost_usd,
        worth=worth_of(state, now, expected),
    )
