"""The forecast of a running experiment: when it will end and what it will have cost, from where it stands. Pure.

The current stage is list-scheduled on the slots that the plan gives it, with the profile's times (corrected by what was
measured at the latest replan) and the speed of each trial, as far as it is known; later stages are as predicted
then.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from statistics import NormalDist

from rubberband.executor.core.budget import bill_usd, instance_cost_usd, market_usd_per_s, new_instance_usd
from rubberband.executor.core.own_speeds import OwnSpeed, updated
from rubberband.executor.core.state import InstanceStatus, Job, Phase, State, TrialState, TrialStatus
from rubberband.values.offer import slots
from rubberband.values.plan import total_iterations


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Forecast of the whole experiment as of now."""

    jct_s: float
    cost_usd: float


def forecast(job: Job, state: State, now: float, instances: int | None = None) -> Forecast:
    """The expected job completion time and bill, as of `now`; `instances` in this stage, if not those of the plan."""
    if state.phase in (Phase.ENDING, Phase.FINISHED):
        end = state.ended_at if state.ended_at is not None else now
        return Forecast(jct_s=end - state.started_at, cost_usd=bill_usd(job, state, end))
    if not state.stages:
        return Forecast(jct_s=job.prediction.jct_s, cost_usd=job.prediction.cost_usd)
    current = stage_forecast(job, state, now, instances)
    later = state.predicted[state.stages[-1].stage + 1 :]
    return Forecast(
        jct_s=current.jct_s + sum(stage.provisioning_s + stage.duration_s for stage in later),
        cost_usd=current.cost_usd + sum(stage.cost_usd for stage in later),
    )


def stage_forecast(job: Job, state: State, now: float, instances: int | None = None) -> Forecast:
    """When the current stage's SYNC is expected, from the start, and the whole bill by then; of a run that goes on."""
    waits = state.phase is Phase.SCALING or not (state.ready() or state.running() or state.phase is Phase.PLANNING)
    waiting_s = max(0.0, _ready_at(job, state) - now) if waits else 0.0
    left_s = waiting_s + _stage_left_s(job, state, now, instances)
    return Forecast(
        jct_s=now - state.started_at + left_s,
        cost_usd=bill_usd(job, state, now) + _stage_left_usd(job, state, now, left_s) + job.offer.head_cost_usd(left_s),
    )


def _ready_at(job: Job, state: State) -> float:
    """When the stage's instances are expected to be ready: as was planned, or later where some were asked for later."""
    stage, offer = state.stages[-1], job.offer
    planned_s = state.predicted[stage.stage].provisioning_s
    start_s = planned_s or offer.provision_delay_s + offer.init_delay_s  # as measured, where it was planned to grow
    asked_at = max((r.requested_at for r in state.live() if r.status is not InstanceStatus.READY), default=-math.inf)
    return max(stage.started_at + planned_s, asked_at + start_s)


def runs_in_s(job: Job, state: State, now: float) -> float:
    """Seconds until what the stage still lacks is expected to run."""
    asked_at = max((r.requested_at for r in state.live() if r.running_at is None), default=state.stages[-1].started_at)
    return max(0.0, asked_at + job.offer.provision_delay_s - now)


def _stage_left_usd(job: Job, state: State, now: float, left_s: float) -> float:
    """Return the cost that the current stage still adds to the bill: minima that are paid already are used up first."""
    if state.phase is Phase.PLANNING:
        return 0.0
    offer, end = job.offer, now + left_s
    if offer.billing == "per_function":
        return _functions_left_usd(job, state, now)
    held = [record for record in [*state.live(), *state.leaving()] if record.running_at is not None]
    growth_usd = sum(
        instance_cost_usd(job, record, end, is_expected=True) - instance_cost_usd(job, record, now, is_expected=True)
        for record in held
    )
    coming = max(0, state.chosen().instances - sum(record.running_at is not None for record in state.live()))
    coming_s = max(0.0, left_s - runs_in_s(job, state, now))
    return growth_usd + coming * new_instance_usd(offer, state.chosen().market, coming_s)


def _functions_left_usd(job: Job, state: State, now: float) -> float:
    chosen = state.chosen()
    coming = max(0, chosen.instances - sum(record.running_at is not None for record in state.live()))
    left_s = _running_left_s(job, state, now) + [_trial_left_s(job, state, trial) for trial in state.queued()]
    usd_per_s = market_usd_per_s(job.offer, chosen.market) * chosen.gpus_per_trial / job.offer.gpus
    return usd_per_s * sum(left_s) + coming * new_instance_usd(job.offer, chosen.market, 0.0)


def _stage_left_s(job: Job, state: State, now: float, instances: int | None = None) -> float:
    """Seconds until the current stage's last trial is done: list scheduling on the plan's slots."""
    chosen = state.chosen()
    num_slots = max(1, slots(instances or chosen.instances, job.offer.gpus, chosen.gpus_per_trial))
    late = _lateness(len(state.running()) + len(state.queued()), num_slots)
    free_in = _running_left_s(job, state, now, late)
    free_in += [0.0] * (num_slots - len(free_in))
    heapq.heapify(free_in)
    for trial in state.queued():
        heapq.heappush(free_in, heapq.heappop(free_in) + _trial_left_s(job, state, trial, late=late))
    return max(free_in)


def _lateness(trials: int, num_slots: int) -> float:
    """Standard deviations by which the last of several trials is later than their average, where times vary.

    That is the largest of as many normal quantities as there are slots (Blom's approximation), of sums of trials where
    some wait.
    """
    last = min(trials, num_slots)
    if last <= 1:
        return 0.0
    waves = math.ceil(trials / num_slots)
    return NormalDist().inv_cdf((last - 0.375) / (last + 0.25)) / math.sqrt(waves)


def _running_left_s(job: Job, state: State, now: float, late: float = 0.0) -> list[float]:
    """Seconds that each running trial still takes, what it has done since its start or last report left out."""
    trained = {use.trial for use in state.allocations if use.ended_at is None and use.training_at is not None}
    return [
        max(0.0, _trial_left_s(job, state, trial, trial.trial not in trained, late) - (now - trial.progress_at))
        for trial in state.running()
    ]


def _trial_left_s(job: Job, state: State, trial: TrialState, starts: bool = True, late: float = 0.0) -> float:
    """Seconds from the trial's start, or its latest report, to the stage's end, `late` standard deviations late."""
    stage = state.stages[-1].stage
    target = total_iterations(job.stages[: stage + 1])
    left, own = target - trial.iterations, _own_speed(job, state, trial)
    training_s = left * state.profile.iteration_s(state.chosen().gpus_per_trial) * own.factor
    if late and left > 0:
        deviation = math.sqrt(math.log1p(own.error**2 + state.profile.iteration_cv**2 / left))
        training_s *= math.exp(late * deviation - deviation**2 / 2.0)
    return training_s + (state.profile.trial_startup_s if starts else 0.0)


_AVERAGE = OwnSpeed(factor=1.0, error=0.0)


def _own_speed(job: Job, state: State, trial: TrialState) -> OwnSpeed:
    """How much longer than the profile's the trial's iterations take, by earlier stages and by this one."""
    latest = state.decisions[-1] if state.decisions else None
    known = latest.own.get(trial.trial) if latest is not None else None
    if known is None:
        if state.profile.trial_cv == 0.0:
            return _AVERAGE
        known = OwnSpeed(factor=1.0, error=state.profile.trial_cv)
    done = trial.iterations - total_iterations(job.stages[: state.stages[-1].stage])
    if done <= 0 or trial.status is not TrialStatus.RUNNING:
        return known
    use = state.allocation(trial)
    if use.training_at is None or use.repeated_until is not None or trial.reports[-done].reported_at <= use.training_at:
        return known  # it began anew in between
    taken_s = trial.reports[-1].reported_at - use.training_at
    ratio = taken_s / (done * state.profile.iteration_s(len(use.gang)))
    return updated(known, ratio, done, state.profile.iteration_cv)
