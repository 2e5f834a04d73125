"""The demand of an experiment: its use for the GPUs of a pool that it shares, from where it stands. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from rubberband.executor.core.forecast import expected_iterations, stage_left_s
from rubberband.executor.core.history import InstanceCapChanged
from rubberband.executor.core.instances import apportioned
from rubberband.executor.core.state import GroupState, State, TrialStatus
from rubberband.planner.sharing import Demand, Span
from rubberband.values.offer import slots
from rubberband.values.plan import Stage


def demand(
    state: State, now: float, *, arrived_at: float, weight: float = 1.0, promised_gpus: int = 0
) -> Demand | None:
    """Return the demand as of `now`; None if it ends, has ended, or its driver has stopped and holds nothing.

    `now` and `arrived_at`, the instant of the submission, are on the clock of the experiment's events. The time left
    with a number of instances is that of the widest gangs that pay off, wave after wave, in every stage that is left
    (planning-model: stage time); trials and instances are taken to be as fast as at the latest replan. It does not
    include the start of instances. Lanes share the instances by their quotas.
    """
    job = state.job
    if state.stopped or state.course in ("ending", "finished"):
        return None
    gpus, most = job.offer.gpus, job.offer.max_instances
    left_s = [_left_s(state, now, instances) for instances in range(most + 1)]
    done, total = sum(trial.iterations for trial in state.trials), expected_iterations(state)
    held = [use for use in state.allocations if use.training_at is not None]
    attained = sum(len(use.gang) * ((now if use.ended_at is None else use.ended_at) - use.started_at) for use in held)
    started_at = now if state.course == "new" else state.started_at
    return Demand(
        name=job.name,
        arrived_at=arrived_at,
        seconds_left=[left_s[count // gpus] for count in range(1, most * gpus + 1)],
        delta_s=state.profile.trial_startup_s,
        moves=len(state.history.of(InstanceCapChanged)),
        deadline_s=None if job.deadline_s is None else job.deadline_s + started_at - arrived_at,
        weight=weight,
        min_gpus=gpus * min(lane.least_instances for lane in state.active()),
        max_gpus=gpus * _most(state),
        promised_gpus=promised_gpus,
        attained_gpu_s=max(0.0, attained / job.offer.trials_per_gpu),
        progress=min(1.0, done / total) if total else 0.0,
    )


HANDOVER_S = 3.0
"""Time in which GPUs change hands before a stage: others stop their trials, and both look at the pool."""


def overdue(state: State, now: float, start_s: float) -> tuple[str, ...]:
    """Return the instances that were asked for over `start_s` seconds ago, and do not run."""
    since = now - start_s - HANDOVER_S
    return tuple(
        record.instance for record in state.fleet.live() if record.running_at is None and record.requested_at < since
    )


def plan_left(state: State, now: float) -> list[Span]:
    """Return what is left of the plan in force, as GPUs over time from `now` on; empty if it ends, or has ended.

    Times are as long as at the 95th percentile, and each stage has `HANDOVER_S` more.
    """
    job = state.job
    if state.course in ("ending", "finished"):
        return []
    jct = job.prediction.jct
    slack = 1.0 if jct is None or not job.prediction.jct_s else max(1.0, jct.p95 / job.prediction.jct_s)
    stages: list[tuple[float, float, int]] = []
    for lane in state.active():
        first, begin_s = lane.first_left, 0.0
        for stage in range(first, lane.end_stage):
            if lane.stages and stage == first:
                end_s = begin_s + slack * stage_left_s(lane, now)
                is_over = lane.stage.ended_at is not None
            else:
                predicted = state.predicted[stage]
                end_s = begin_s + slack * (predicted.provisioning_s + predicted.duration_s)
                is_over = False
            if not is_over:
                stages.append((begin_s, end_s + HANDOVER_S, job.offer.gpus * state.plan.stages[stage].instances))
                begin_s = end_s + HANDOVER_S
    return summed(stages)


def summed(parts: Sequence[tuple[float, float, int]]) -> list[Span]:
    """Return parts of plans (begin and end in seconds, GPUs) as spans, with the sum of their GPUs at each time."""
    edges = sorted({edge for begin_s, end_s, _ in parts for edge in (begin_s, end_s)})
    return [
        Span(gpus=sum(gpus for begin_s, end_s, gpus in parts if begin_s <= at < end_s), duration_s=to - at)
        for at, to in pairwise(edges)
    ]


def _most(state: State) -> int:
    """The most instances that it has a use for: one that is to be cheap, and need not hurry, uses those of its plan."""
    job = state.job
    if job.objective == "min_time" or job.deadline_s is not None:
        return job.offer.max_instances
    lanes = [slice(lane.first_left, lane.end_stage) for lane in state.active()]
    plans = (job.plan, state.plan)
    planned = sum(
        max((choice.instances for plan in plans for choice in plan.stages[left]), default=1) for left in lanes
    )
    return min(planned, job.offer.max_instances)


def _left_s(state: State, now: float, instances: int) -> float:
    """Seconds to the end with this many instances; infinite where no gang fits."""
    active = state.active()
    if instances < max(lane.least_instances for lane in active):
        return math.inf
    if instances < len(active):  # one lane after the other
        return sum(_lane_left_s(lane, now, instances) for lane in active)
    quotas = state.job.lane_instances or (state.job.offer.max_instances,)
    shares = apportioned(instances, [quotas[lane.lane] for lane in active])
    return max(_lane_left_s(lane, now, share) for lane, share in zip(active, shares, strict=True))


def _lane_left_s(lane: GroupState, now: float, instances: int) -> float:
    if lane.job.ladder is not None and lane.stages:
        return stage_left_s(lane, now, instances)
    return sum(_stage_s(lane.state, stage, instances) for stage in _stages_left(lane))


def _stages_left(lane: GroupState) -> Iterable[Stage]:
    """The lane's stages that are left; the current one has the trials that lack iterations, and their mean."""
    first = lane.first_left
    if not lane.stages:
        return lane.job.stages[first : lane.end_stage]
    going = [lane.state.trials[trial] for trial in lane.stage.trials]
    going = [trial for trial in going if trial.status in (TrialStatus.RUNNING, TrialStatus.QUEUED)]
    later = lane.job.stages[first + 1 : lane.end_stage]
    if not going:
        return later
    lacking = sum(lane.target_iterations(trial) - trial.iterations for trial in going)
    return (Stage(trials=len(going), iterations=max(1, math.ceil(lacking / len(going)))), *later)


def _stage_s(state: State, stage: Stage, instances: int) -> float:
    """Seconds of a stage with the gangs that end it soonest; infinite where none fits."""
    job = state.job
    profile, per_instance = state.profile, job.offer.slots
    best_s = math.inf
    for size in job.gang_sizes(job.largest_gang):
        if at_once := slots(instances, per_instance, size):
            waves = math.ceil(stage.trials / at_once)
            best_s = min(best_s, waves * (profile.trial_startup_s + stage.iterations * profile.iteration_s(size)))
    return best_s
