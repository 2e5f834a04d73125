"""Plan the rest of an experiment: after a SYNC, and to see what a later deadline or a larger budget would change. Pure.

What runs goes on as planned until the current stage is over; the rest is planned from there by both limits, as the
driver will plan it at that SYNC. What has ended and can go on is taken to be resumed now.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from rubberband.errors import InputError, RubberbandError
from rubberband.executor.core import rules
from rubberband.executor.core.budget import Reserve, bill_usd, held_s
from rubberband.executor.core.controller import Controller
from rubberband.executor.core.events import DriverResumed, EndedInstance, RestPlanned
from rubberband.executor.core.forecast import Forecast, forecast, runs_in_s, stage_forecast
from rubberband.executor.core.measured import MeasuredTerms, measured
from rubberband.executor.core.purse import MONEY_SLACK_USD
from rubberband.executor.core.state import GONE, Job, Phase, State, TrialStatus
from rubberband.executor.journal.journal import Header
from rubberband.planner.replan import Replanned, replan
from rubberband.units import format_duration, format_instant, format_usd, parse_deadline
from rubberband.values.plan import Cohort, Plan, PlanningConstraints, Prediction, Stage, StagePrediction

# The decision after a SYNC: the state as the planner sees it, and the planner's answer as an event. Pure.


_MOST_TRIES = 4
"""For a plan that leaves its reserve: another plan may have another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remainder:
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
    seen: MeasuredTerms
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
        return _as_before(job, state, now, f"the rest cannot be replanned: {error}")
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


def after_sync(job: Job, state: State, now: float) -> Remainder:
    """The standing between two stages."""
    seen = measured(job, state)
    return Remainder(
        done=state.stages[-1].stage + 1,
        stages=remaining(job, state),
        held=held(state, now),
        ready=len(state.ready()),
        spent_s=now - state.started_at,
        spent_usd=bill_usd(job, state, now),
        seen=seen,
        because=", ".join(finding for finding in (_losses(state), seen.findings) if finding),
    )


def best_rest(job: Job, state: State, standing: Remainder) -> Replanned:
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


def _within(terms: PlanningConstraints, job: Job, state: State, standing: Remainder) -> Replanned:
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


def limits(job: Job) -> PlanningConstraints:
    """What the whole experiment must keep."""
    sizes = [choice.gpus_per_trial for choice in job.plan.stages]
    least, most = job.min_gpus_per_trial, job.max_gpus_per_trial
    return PlanningConstraints(
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """New limits as a `DriverRequest` (and a `Job`) has them; None: as it was."""

    deadline_s: float | None = None
    """From Started."""
    max_cost_usd: float | None = None
    """Of the run, without what its profile cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What is expected of the whole experiment under given limits."""

    jct_s: float
    """From the start."""
    cost_usd: float
    deadline_s: float | None
    max_cost_usd: float | None
    plan: Plan
    """In force from the next stage on; the stages before it are as they were."""
    feasible: bool
    """Whether it keeps these limits."""
    reason: str
    """One line for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """The rest of an experiment by the limits that it has, and by other ones."""

    before: Outlook
    after: Outlook
    stage: int
    """The first stage that the plans are about; the number of stages if none is left."""
    applied: bool = False
    """Whether it was asked of the driver (or journalled), and not only looked at."""

    @property
    def added_s(self) -> float:
        """How much later it ends."""
        return self.after.jct_s - self.before.jct_s

    @property
    def added_usd(self) -> float:
        """How much more it costs."""
        return self.after.cost_usd - self.before.cost_usd


def limits_of(
    header: Header, job: Job, state: State, *, deadline: object = None, max_cost_usd: float | None = None
) -> Limits:
    """New limits in the file's words, as the driver counts them.

    `deadline` is a duration (a number of seconds, or text such as 40m) from the experiment's start, profiling
    included, or an instant with its zone; `max_cost_usd` includes what profiling cost. None: as it was. `job` is the
    controller's, with the limits in force. Raises InputError for what is no limit, or less than is granted already.
    """
    deadline_s = None if deadline is None else _deadline_s(header, job, state, parse_deadline(deadline))
    if max_cost_usd is None:
        return Limits(deadline_s=deadline_s)
    if not math.isfinite(max_cost_usd):
        raise InputError(f"max_cost: {max_cost_usd} is not an amount; give USD, such as 5")
    used_usd: float = header.setup.get("profiling_cost_usd", 0.0)
    _require_larger(max_cost_usd - used_usd, job.max_cost_usd, used_usd)
    return Limits(deadline_s=deadline_s, max_cost_usd=max_cost_usd - used_usd)


def extension(
    job: Job,
    state: State,
    now: float,
    *,
    deadline_s: float | None = None,
    max_cost_usd: float | None = None,
    driven: bool = True,
) -> Extension:
    """The rest of an experiment by the limits in force (those of `job`, the controller's) and by other ones.

    The limits are those of `Limits`, `now` is on the clock of the events. Of an experiment without a driver
    (`driven=False`) nothing is taken to be held. Raises InputError for what is no extension: nothing more than is
    granted, a deadline that has passed, an experiment that is over for good.
    """
    extended = _extended(job, deadline_s, max_cost_usd)
    _require_future(extended, state)
    if deadline_s is not None and state.phase is not Phase.NEW and deadline_s <= now - state.started_at:
        ago = format_duration(round(now - state.started_at - deadline_s, 1))
        raise InputError(f"deadline: that would have been {ago} ago; give a later one")
    before, _ = _outlook(job, state, now, driven)
    after, stage = _outlook(extended, state, now, driven)
    return Extension(before=before, after=after, stage=stage)


# What is asked


def _deadline_s(header: Header, job: Job, state: State, asked: float | datetime) -> float | None:
    """From Started."""
    if not isinstance(asked, datetime):
        used_s: float = header.setup.get("profiling_s", 0.0)
        _require_later(asked - used_s, job.deadline_s, lambda seconds: format_duration(seconds + used_s))
        return asked - used_s
    created_at = header.created_at
    asked_s = asked.timestamp() - created_at
    _require_later(asked_s, job.deadline_s, lambda seconds: _instant(created_at + seconds))
    has_clock = not header.kind.is_simulated and state.phase is not Phase.NEW
    waited_s = state.started_at - created_at if has_clock else 0.0
    return rules.raised(job.deadline_s, asked_s - waited_s)


def _instant(at: float) -> str:
    """Unix time for people."""
    try:
        return format_instant(datetime.fromtimestamp(round(at), UTC))
    except (OverflowError, ValueError, OSError):
        return "end of the calendar"


_SAME_S = 1.0
"""A limit was reckoned from when the experiment was planned, which is somewhat before it was made."""


def _extended(job: Job, deadline_s: float | None, max_cost_usd: float | None) -> Job:
    """The job with the new limits. Raises InputError if they do not extend it."""
    extended = job
    if deadline_s is not None:
        _require_later(deadline_s, job.deadline_s, format_duration)
        extended = replace(extended, deadline_s=rules.raised(job.deadline_s, deadline_s))
    if max_cost_usd is not None:
        _require_larger(max_cost_usd, job.max_cost_usd, 0.0)
        extended = replace(extended, max_cost_usd=max_cost_usd)
    if extended == job:
        raise InputError("the experiment already has these limits; give a later deadline or a larger max_cost")
    return extended


def _require_later(asked_s: float, has_s: float | None, told: Callable[[float], str]) -> None:
    if has_s is None:
        raise InputError("deadline: the experiment has none to extend; leave it out")
    if asked_s < has_s - _SAME_S:
        raise InputError(f"deadline: {told(asked_s)} is before the present one, {told(has_s)}; give a later one")


def _require_larger(asked_usd: float, has_usd: float | None, used_usd: float) -> None:
    if has_usd is None:
        raise InputError("max_cost: the experiment has none to raise; leave it out")
    if asked_usd < has_usd:
        asked, has = format_usd(asked_usd + used_usd), format_usd(has_usd + used_usd)
        raise InputError(f"max_cost: {asked} is less than the present {has}; give more")


def _require_future(extended: Job, state: State) -> None:
    """Raise InputError if the experiment is over, whatever its limits."""
    if state.outcome is None or rules.can_go_on(extended, state):
        return
    if state.outcome == "budget":
        raise InputError(f"it has ended, since {state.reason}: a later deadline changes nothing; raise max_cost")
    raise InputError(f"it has ended ({state.outcome}) and cannot be extended; run it again under another name")


# What is expected


def _outlook(job: Job, state: State, now: float, driven: bool) -> tuple[Outlook, int]:
    """What is expected by the job's limits, and the first stage that is planned for it."""
    if state.outcome is None or rules.can_go_on(job, state):
        going = driven and state.outcome is None and state.phase is not Phase.NEW
        state = state if going else _resumed(job, state, now)
    if state.outcome is not None:
        reason = f"it has ended: {state.reason or state.outcome}"
        return _told(job, forecast(job, state, now), state.plan, reason, feasible=False), len(job.stages)
    done = state.stages[-1].stage + 1
    if done == len(job.stages):
        return _told(job, stage_forecast(job, state, now), state.plan, "only the last stage is left"), done
    standing = after_sync(job, state, now) if state.phase is Phase.PLANNING else _after_stage(job, state, now)
    return _planned(job, state, standing, now), done


def _planned(job: Job, state: State, standing: Remainder, now: float) -> Outlook:
    try:
        found = best_rest(job, state, standing)
    except RubberbandError as error:
        return _told(job, forecast(job, state, now), state.plan, f"the rest cannot be replanned: {error}")
    prediction = found.prediction if job.replan else found.present
    expected = Forecast(jct_s=standing.spent_s + prediction.jct_s, cost_usd=standing.spent_usd + prediction.cost_usd)
    if job.replan:
        return _told(job, expected, found.plan, found.reason, feasible=found.keeps)
    return _told(job, expected, state.plan, "the plan is held fixed")


def _told(job: Job, expected: Forecast, plan: Plan, reason: str, *, feasible: bool | None = None) -> Outlook:
    """An outlook; `feasible` where more is known than what is expected."""
    in_time = job.deadline_s is None or expected.jct_s <= job.deadline_s + rules.SMALLEST_WAIT_S
    in_budget = job.max_cost_usd is None or expected.cost_usd <= job.max_cost_usd + MONEY_SLACK_USD
    return Outlook(
        jct_s=expected.jct_s,
        cost_usd=expected.cost_usd,
        deadline_s=job.deadline_s,
        max_cost_usd=job.max_cost_usd,
        plan=plan,
        feasible=in_time and in_budget if feasible is None else feasible,
        reason=reason,
    )


def _after_stage(job: Job, state: State, now: float) -> Remainder:
    """The standing when the current stage is over, as far as can be told."""
    seen, ends = measured(job, state), stage_forecast(job, state, now)
    held = _held_after(job, state, now, ends.jct_s - (now - state.started_at))
    return Remainder(
        done=state.stages[-1].stage + 1,
        stages=remaining(job, state),
        held=held,
        ready=sum(cohort.instances for cohort in held),
        spent_s=ends.jct_s,
        spent_usd=ends.cost_usd,
        seen=seen,
        because=seen.findings,
    )


def _held_after(job: Job, state: State, now: float, left_s: float) -> list[Cohort]:
    """What is held `left_s` from now: what runs, and what the stage still lacks."""
    running = [record for record in state.live() if record.running_at is not None]
    ages = Counter((held_s(record, now) + left_s, record.market) for record in running)
    chosen = state.chosen()
    coming = max(0, chosen.instances - len(running))
    ages[max(0.0, left_s - runs_in_s(job, state, now)), chosen.market] += coming
    return [
        Cohort(instances=count, held_s=age, market=market) for (age, market), count in sorted(ages.items()) if count
    ]


def _resumed(job: Job, state: State, now: float) -> State:
    """The state once a driver goes on with it at `now`; what ran is taken to have ended when it was last heard of."""
    controller = Controller(job)
    controller.state = copy.deepcopy(state)
    ended = [
        EndedInstance(
            instance=record.instance, running_at=record.running_at, ended_at=max(record.running_at, state.now)
        )
        for record in state.instances.values()
        if record.running_at is not None and record.status not in GONE
    ]
    controller.handle(DriverResumed(occurred_at=now, live=(), ended=tuple(ended)))
    return controller.state
