"""The forecast of a running experiment: when it will end and what it will have cost, from where it stands. Pure.

The current stage is list-scheduled with the profile's times on the slots that the plan gives it; later stages are as
predicted. (Replanning from measured times builds on this.)
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from rubberband.executor.accounting import bill_usd
from rubberband.executor.state import Job, Phase, State, TrialState, TrialStatus
from rubberband.offer import slots
from rubberband.plan import total_iterations


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is expected of the whole experiment now."""

    jct_s: float
    cost_usd: float


def forecast(job: Job, state: State, now: float) -> Forecast:
    """The expected job completion time and bill, as of `now`."""
    if state.phase in (Phase.ENDING, Phase.FINISHED):
        end = state.ended_at if state.ended_at is not None else now
        return Forecast(jct_s=end - state.started_at, cost_usd=bill_usd(job, state, end))
    if not state.stages:
        return Forecast(jct_s=job.prediction.jct_s, cost_usd=job.prediction.cost_usd)
    current = state.stages[-1].stage
    planned = job.prediction.stages[current]
    due_at = state.stages[-1].started_at + planned.provisioning_s
    waiting_s = max(0.0, due_at - now) if state.phase is Phase.SCALING else 0.0
    left_s = waiting_s + _stage_left_s(job, state, now)
    held = job.plan.stages[current].instances
    later = job.prediction.stages[current + 1 :]
    compute_usd = held * job.offer.price_usd_per_s * left_s if job.offer.billing == "per_instance" else 0.0
    return Forecast(
        jct_s=now - state.started_at + left_s + sum(stage.provisioning_s + stage.duration_s for stage in later),
        cost_usd=bill_usd(job, state, now)
        + compute_usd
        + job.offer.head_cost_usd(left_s)
        + sum(stage.cost_usd for stage in later),
    )


def _stage_left_s(job: Job, state: State, now: float) -> float:
    """Seconds until the current stage's last trial is done: list scheduling on the plan's slots."""
    stage = state.stages[-1].stage
    chosen = job.plan.stages[stage]
    target = total_iterations(job.stages[: stage + 1])
    iteration_s = job.profile.iteration_s(chosen.gpus_per_trial)

    def left_s(trial: TrialState) -> float:
        return (target - trial.iterations) * iteration_s

    free_in = [max(0.0, left_s(trial) - (now - trial.progress_at)) for trial in state.running()]
    num_slots = max(1, slots(chosen.instances, job.offer.gpus, chosen.gpus_per_trial))
    free_in += [0.0] * (num_slots - len(free_in))
    heapq.heapify(free_in)
    for trial in state.trials:
        if trial.status is TrialStatus.QUEUED:
            heapq.heappush(free_in, heapq.heappop(free_in) + job.profile.trial_startup_s + left_s(trial))
    return max(free_in)
