"""The instance cap: how many instances an experiment may hold, as its user or its pool says. Writes the state. Pure.

It is shared out among the lanes that go on, by the instances that each was planned to have. The plan in force is cut to
what a lane may hold, so that everything that follows the plan keeps the cap; the driver replans at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rubberband.executor.core.events import AllotmentChanged, RestPlanned
from rubberband.executor.core.forecast import forecast
from rubberband.executor.core.history import InstanceCapChanged
from rubberband.executor.core.job import Job
from rubberband.executor.core.state import GroupState, Phase, State
from rubberband.values.offer import slots
from rubberband.values.plan import Plan, StagePlan


def note_instance_cap(state: State, event: AllotmentChanged) -> None:
    """Take in another cap: shares and plan follow it now, and instances with the next event."""
    most, before = state.job.offer.max_instances, state.most_instances
    cap = most if event.max_instances is None else max(0, min(most, event.max_instances))
    state.fleet.recall = event.recall
    if (cap, event.promised_instances) == (before, state.promised_instances):
        return
    at = max(state.now, event.occurred_at)
    expected = forecast(state, at)
    state.instance_cap, state.promised_instances = cap, event.promised_instances
    share_out(state)
    if cap == before:
        return
    then = forecast(state, at)
    state.history.add(
        InstanceCapChanged(
            at_s=state.elapsed_s(at),
            max_instances_before=before,
            max_instances=cap,
            jct_before_s=expected.jct_s,
            jct_s=then.jct_s,
            cost_before_usd=expected.cost_usd,
            cost_usd=then.cost_usd,
        )
    )


def share_out(state: State) -> None:
    """Divide the cap among the lanes that go on, and cut their plans to it. Without a cap, do nothing."""
    job = state.job
    active = state.active()
    if state.instance_cap is None or not active:
        return
    quotas = job.lane_instances or (job.offer.max_instances,)
    own = [quotas[lane.lane] for lane in active]
    shares, promised = apportioned(state.instance_cap, own), apportioned(state.promised_instances or 0, own)
    for lane, share, kept in zip(active, shares, promised, strict=True):
        if (share, kept) == (lane.max_instances, lane.promised_instances):
            continue
        lane.max_instances, lane.promised_instances = share, kept
        _cut_plan(lane)
        state.fleet.reassigned += 1
        keeps = lane.is_promised or lane.waits_for_instances
        lane.replans_at_once = job.replan and not keeps
        lane.resized = lane.stage.stage if lane.stages else None
        if not state.buys_none:
            lane.relaunch_at = 0.0
        lane.launches_left = job.launch_attempts


def apportioned(total: int, quotas: Sequence[int]) -> list[int]:
    """Divide `total` in proportion to `quotas`, by largest remainders (Hamilton); one for each first, if that goes."""
    first = [1 if total >= len(quotas) else 0] * len(quotas)
    rest = total - sum(first)
    exact = [rest * quota / sum(quotas) for quota in quotas]
    shares = [one + int(share) for one, share in zip(first, exact, strict=True)]
    by_remainder = sorted(range(len(quotas)), key=lambda index: (int(exact[index]) - exact[index], index))
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return shares


def _cut_plan(lane: GroupState) -> None:
    """Cut what is left of the lane's plan to its share, or to what it is promised.

    A plan that is held fixed is the job's again as the share grows.
    """
    job, state = lane.job, lane.state
    first, end = lane.first_left, lane.end_stage
    basis = state.plan if job.replan else job.plan
    most = max(lane.max_instances, lane.promised_instances, lane.least_instances)
    left = tuple(cut(job, choice, most) for choice in basis.stages[first:end])
    state.plan = Plan(stages=(*state.plan.stages[:first], *left, *state.plan.stages[end:]))


def cut(job: Job, choice: StagePlan, most: int) -> StagePlan:
    """The plan of a stage with at most `most` instances; a gang that does not fit on them is as wide as one can be."""
    instances, gpus, planned = min(choice.instances, most), job.offer.slots, choice.gpus_per_trial
    if slots(instances, gpus, planned) > 0:
        return replace(choice, instances=instances)
    size = max((size for size in job.gang_sizes(planned) if slots(instances, gpus, size) > 0), default=planned)
    return replace(choice, instances=instances, gpus_per_trial=size)


def note_resized(lane: GroupState, event: RestPlanned) -> None:
    """The rest is planned again from the current stage on, while that is under way."""
    state = lane.state
    state.decisions.append(event)
    state.plan, state.profile = event.plan, event.profile
    lane.planned_trials = lane.trials_left
    state.predicted = (*state.predicted[: event.stage], *event.predicted, *state.predicted[lane.end_stage :])
    lane.replans_at_once, lane.resized = False, event.stage
    lane.launches_left = lane.job.launch_attempts
    if lane.phase is Phase.TRAINING and not state.buys_none:
        lane.relaunch_at = 0.0
