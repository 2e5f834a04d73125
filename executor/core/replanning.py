"""The decision after a SYNC: the state as the planner sees it, and the planner's answer as an event. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rubberband.errors import RubberbandError
from rubberband.executor.core.budget import Reserve, bill_usd, held_s
from rubberband.executor.core.events import RestPlanned
from rubberband.executor.core.forecast import forecast
from rubberband.executor.core.measured import Measured, measured
from rubberband.executor.core.state import Job, State, TrialStatus
from rubberband.planner.replan import Replanned, replan
from rubberband.values.plan import Cohort, Constraints, Prediction, Stage, StagePrediction

_MOST_TRIES = 4
"""For a plan that leaves its reserve: another plan may have another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where the rest of a job begins, and with what."""

    done: int
    """The first stage of the rest."""
    stages: tuple[Stage, ...]
    """The job's, the later ones with no more trials than are left."""
    held: Sequence[Cohort]
    ready: int
    """How many of what is held trials can start on."""
    spent_s: float
    """Since the start."""
    spent_usd: float
    seen: Measured
    because: str
    """What differs from the plan's assumptions, in words."""


def decide(job: Job, state: State, now: float) -> RestPlanned:
    """Plan the stages after the SYNC that has just been, as of `now`.

    A run goes on with the plan that it has where the planner refuses.
    """
    standing = after_sync(job, state, now)
    try:
        found = best_rest(job, state, standing)
    except RubberbandError as error:
        return _as_before(job, state, now, f"the rest cannot be planned again: {error}")
    return RestPlanned(
        occurred_at=now,
        stage=standing.done,
        plan=found.plan,
        predicted=_from_start(found.prediction.stages, standing.spent_s),
        profile=standing.seen.profile,
        changed=found.changed,
        reason=found.reason,
        present_jct_s=standing.spent_s + found.present.jct_s,
        present_cost_usd=standing.spent_usd + found.present.cost_usd,
        jct_s=standing.spent_s + found.prediction.jct_s,
        cost_usd=standing.spent_usd + found.prediction.cost_usd,
        own=standing.seen.own,
    )


def after_sync(job: Job, state: State, now: float) -> Standing:
    """The standing between two stages."""
    seen = measured(job, state)
    return Standing(
        done=state.stages[-1].stage + 1,
        stages=remaining(job, state),
        held=held(state, now),
        ready=len(state.ready()),
        spent_s=now - state.started_at,
        spent_usd=bill_usd(job, state, now),
        seen=seen,
        because=", ".join(finding for finding in (_losses(state), seen.findings) if finding),
    )


def best_rest(job: Job, state: State, standing: Standing) -> Replanned:
    """The best plan of those that leave their reserve, if there is one. Raises RubberbandError if none can exist."""
    found = _within(limits(job), job, state, standing)
    reserve = Reserve(job.release_margin_s, job.dearest_usd_per_hour)
    if job.max_cost_usd is None or not reserve.is_asked_for:
        return found
    for _ in range(_MOST_TRIES):
        rest = found.plan.stages[standing.done :]
        left_usd = max(0.0, job.max_cost_usd - reserve.of_plan(standing.seen.offer, rest, held=standing.ready))
        if standing.spent_usd + surely_usd(found.prediction) <= left_usd:
            break
        other = _within(replace(limits(job), max_cost_usd=left_usd), job, state, standing)
        if other.plan == found.plan:
            break
        found = other
    return found


def surely_usd(prediction: Prediction) -> float:
    """What it costs at most, as good as surely."""
    return prediction.cost_usd if prediction.cost is None else prediction.cost.p95


def _within(terms: Constraints, job: Job, state: State, standing: Standing) -> Replanned:
    speeds = standing.seen.speeds
    are_all = speeds is not None and len(speeds.factors) == standing.stages[standing.done].trials
    return replan(
        standing.stages,
        standing.seen.profile,
        standing.seen.offer,
        terms,
        done=standing.done,
        held=standing.held,
        spent_s=standing.spent_s,
        spent_usd=standing.spent_usd,
        current=state.plan,
        objective=job.objective,
        because=standing.because,
        speeds=speeds if are_all else None,
    )


def remaining(job: Job, state: State) -> tuple[Stage, ...]:
    """The job's stages, those after the current one with no more trials than are left: some may have failed."""
    contenders = state.stages[-1].trials
    left = sum(state.trials[trial].status is not TrialStatus.FAILED for trial in contenders)
    done = state.stages[-1].stage + 1
    later = (replace(stage, trials=min(stage.trials, left)) for stage in job.stages[done:])
    return (*job.stages[:done], *later)


def limits(job: Job) -> Constraints:
    """What the whole experiment must keep."""
    sizes = [choice.gpus_per_trial for choice in job.plan.stages]
    least, most = job.min_gpus_per_trial, job.max_gpus_per_trial
    return Constraints(
        deadline_s=job.deadline_s,
        max_cost_usd=job.max_cost_usd,
        min_gpus_per_trial=min(job.profile.smallest_gpus, *sizes) if least is None else least,
        max_gpus_per_trial=max(sizes) if most is None else most,
        confidence=job.confidence,
    )


def held(state: State, now: float) -> list[Cohort]:
    """The instances that run, by how long they have been billed.

    One that was asked for and does not run yet is not held: it costs and delays a plan just as a new one does, and
    nothing if it is given up. Nor is one that is taken away soon. All are of one market, the stage's; what was bought
    on demand instead of spot counts where it is all that there is.
    """
    running = [record for record in state.live() if record.running_at is not None]
    planned = [record for record in running if record.market == state.chosen().market]
    running = planned or running
    cohorts = Counter((held_s(record, now), record.market) for record in running)
    return [Cohort(instances=count, held_s=age_s, market=market) for (age_s, market), count in sorted(cohorts.items())]


def _losses(state: State) -> str:
    planned, running = state.chosen().instances, sum(record.running_at is not None for record in state.live())
    return "" if running >= planned else f"{running} of {planned} instances are left"


def _from_start(stages: Sequence[StagePrediction], elapsed_s: float) -> tuple[StagePrediction, ...]:
    return tuple(replace(stage, start_s=elapsed_s + stage.start_s) for stage in stages)


def _as_before(job: Job, state: State, now: float, reason: str) -> RestPlanned:
    expected, done = forecast(job, state, now), state.stages[-1].stage + 1
    return RestPlanned(
        occurred_at=now,
        stage=done,
        plan=state.plan,
        predicted=state.predicted[done:],
        profile=state.profile,
        changed=False,
        reason=reason,
        present_jct_s=expected.jct_s,
        present_cost_usd=expected.cost_usd,
        jct_s=expected.jct_s,
        cost_usd=expected.cost_usd,
    )
