"""Plan the rest of an experiment to see what a later deadline or a larger budget would change. Pure.

The current stage goes on as planned until it is over; the rest is planned from there by both limits, as the driver will
plan it at that SYNC. An experiment that has ended and can go on is taken to be resumed now.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from rubberband.errors import InputError, RubberbandError
from rubberband.executor.core.adding import why_not
from rubberband.executor.core.bill import bill_usd
from rubberband.executor.core.controller import Controller
from rubberband.executor.core.ends import reaching
from rubberband.executor.core.events import DriverResumed, EndedInstance, TrialsAdded
from rubberband.executor.core.fleet import GONE
from rubberband.executor.core.forecast import Forecast, forecast, stage_left
from rubberband.executor.core.history import TrialsJoined
from rubberband.executor.core.job import Job, raised
from rubberband.executor.core.limits import SMALLEST_WAIT_S, can_go_on
from rubberband.executor.core.replanning import (
    Remainder,
    after_stage,
    after_sync,
    best_rest,
    decide,
    decide_within,
    share_a_head,
    within_stage,
)
from rubberband.executor.core.state import LaneState, Phase, State
from rubberband.executor.journal.journal import Header
from rubberband.units import MONEY_SLACK_USD, counted, format_duration, format_instant, format_usd, parse_deadline
from rubberband.values.plan import Plan
from rubberband.values.stopping import target_fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """New limits as a `DriverRequest` (and a `Job`) has them; None: as it was."""

    deadline_s: float | None = None
    """From Started."""
    max_cost_usd: float | None = None
    """Limit of the run, without the cost of its profile."""
    target: float | None = None
    """Value of the metric that ends the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Expectation of the whole experiment under given limits."""

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
    deadline: str = ""
    """The deadline for people, as in `Job`."""
    target: float | None = None
    """Value of the metric that ends the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """The rest of an experiment by the limits that it has, and by other ones."""

    before: Outlook
    after: Outlook
    stage: int
    """The first stage that the plans are about; the number of stages if none is left."""
    trials: tuple[Mapping[str, Any] | None, ...] = ()
    """Configurations of the trials that are added; None: the sampler draws it."""
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
    header: Header,
    state: State,
    *,
    deadline: object = None,
    max_cost_usd: float | None = None,
    target: float | None = None,
) -> Limits:
    """New limits in the file's words, as the driver counts them.

    `deadline` is a duration (a number of seconds, or text such as 40m) from the experiment's submission or, without
    one, from its start, profiling included; or an instant with its zone. `max_cost_usd` includes what profiling cost.
    None: as it was. `job` is the controller's, with the limits in force. Raises InputError for what is no limit, or
    less than is granted already.
    """
    deadline_s = None if deadline is None else _deadline_s(header, state, parse_deadline(deadline))
    if target is not None:
        _require_target(target, state.job)
    if max_cost_usd is None:
        return Limits(deadline_s=deadline_s, target=target)
    if state.job.offer.unit != "USD":
        raise InputError("max_cost: it is in USD, and an experiment without a price counts GPU-hours; leave it out")
    if not math.isfinite(max_cost_usd):
        raise InputError(f"max_cost: {max_cost_usd} is not an amount; give USD, such as 5")
    used_usd: float = header.setup.get("profiling_cost_usd", 0.0)
    _require_larger(max_cost_usd - used_usd, state.job.max_cost_usd, used_usd)
    return Limits(deadline_s=deadline_s, max_cost_usd=max_cost_usd - used_usd, target=target)


def extension(
    state: State,
    now: float,
    *,
    deadline_s: float | None = None,
    max_cost_usd: float | None = None,
    target: float | None = None,
    added: TrialsAdded | None = None,
    driven: bool = True,
) -> Extension:
    """The rest of an experiment as it is, and by other limits or with trials that are added.

    The limits are those of `Limits`, `now` is on the clock of the events. An experiment without a driver
    (`driven=False`) is taken to hold nothing. Raises InputError if nothing more is granted, the deadline has passed,
    the experiment is over for good, or trials that are added do not fit its limits.
    """
    job = state.job
    if added is None or (deadline_s, max_cost_usd, target) != (None, None, None):
        job = _extended(job, deadline_s, max_cost_usd, target)
    extended = state.supposed(job=job)
    if added is None:
        _require_future(extended)
    elif why := why_not(state):
        raise InputError(why)
    elif (found := reaching(extended, state.trials)) is not None:
        value = f"trial {found.trial} has {job.metric}={found.metric(job.metric):.6g}"
        raise InputError(
            f"target: {job.stop.target:g} is reached already ({value}), so no trial would be trained; give a harder one"
        )
    if deadline_s is not None and state.course != "new" and deadline_s <= now - state.started_at:
        ago = format_duration(round(now - state.started_at - deadline_s, 1))
        raise InputError(f"deadline: that would have been {ago} ago; give a later one")
    before, _ = _outlook(state, now, driven)
    if added is None:
        after, stage = _outlook(extended, now, driven)
        return Extension(before=before, after=after, stage=stage)
    after, stage = _with_trials(extended, added, now, driven)
    _require_fit(state.job, added, after)
    return Extension(before=before, after=after, stage=stage, trials=added.configurations)


def _with_trials(state: State, added: TrialsAdded, now: float, driven: bool) -> tuple[Outlook, int]:
    """Return the outlook with trials, as the driver will plan it, and the first stage that is planned for it."""
    controller = Controller(state.job)
    controller.state = copy.deepcopy(state)
    controller.handle(replace(added, occurred_at=max(now, state.now)))
    if not driven or state.outcome is not None or state.course == "new":
        controller.state = resumed(controller.state, now)
    then, stages, keeps = controller.state, list[int](), list[bool]()
    while (lane := then.planning() or then.resizing()) is not None:
        between = lane.phase is Phase.PLANNING
        with suppress(RubberbandError):  # then the plan in force stays
            keeps.append(best_rest(then, after_sync(lane, now) if between else within_stage(lane, now)).keeps)
        decision = decide(then, now) if between else decide_within(then, now)
        stages.append(decision.stage)
        controller.handle(decision)
    expected, stage = forecast(then, now), min(stages, default=len(then.job.stages) - 1)
    varies = any((then.profile.trial_cv, then.profile.iteration_cv, then.profile.startup_cv))
    feasible = False if varies and then.job.replan and not all(keeps) else None
    text = f"{counted(len(added.configurations), 'trial')} added to {_place_of(then)}"
    return outlook_of(then.job, expected, then.plan, text, feasible=feasible), stage


def _place_of(state: State) -> str:
    joined = state.history.of(TrialsJoined)[-1]
    if not state.job.has_sync:
        return "the search"
    is_own = state.trials[joined.trials[0]].trial == state.job.bracket_of(joined.stage).first_trial
    name = state.job.stage_name(joined.stage)
    return f"the search as bracket {state.job.bracket_of(joined.stage).bracket}" if is_own else name


def _require_fit(job: Job, added: TrialsAdded, after: Outlook) -> None:
    """Raise InputError, with the remedy, where the search with more trials keeps a limit no more."""
    remedies = []
    if after.max_cost_usd is not None and after.cost_usd > after.max_cost_usd + MONEY_SLACK_USD:
        remedies.append(f"max_cost={format_usd(after.max_cost_usd)}")
    if after.deadline_s is not None and after.jct_s > after.deadline_s + SMALLEST_WAIT_S:
        remedies.append(f"deadline={format_duration(after.deadline_s)}")
    if after.feasible:
        return
    short = " and ".join(remedies) or f"the limits with {100.0 * job.confidence:.0f} % confidence"
    enough_usd, enough_s = math.ceil(110.0 * after.cost_usd) / 100.0, math.ceil(1.1 * after.jct_s)
    flags = {"max_cost": f" --max-cost {enough_usd:.2f}", "deadline": f" --deadline {enough_s}s"}
    flags = {word: flag for word, flag in flags.items() if word in short} or flags
    raise InputError(
        f"{counted(len(added.configurations), 'more trial')} would end after {format_duration(after.jct_s)} for "
        f"{format_usd(after.cost_usd)}, which exceeds {short}; first `rubberband extend {job.name}"
        f"{''.join(flags.values())}`, or add fewer"
    )


# What is asked


def _deadline_s(header: Header, state: State, asked: float | datetime) -> float | None:
    """From Started."""
    job = state.job
    if not isinstance(asked, datetime):
        used_s = job.before_s
        _require_later(asked - used_s, job.deadline_s, lambda seconds: format_duration(seconds + used_s))
        return asked - used_s
    has_clock = not header.kind.is_simulated and state.phase is not Phase.NEW
    since = state.started_at if has_clock else _planned_at(header)
    asked_s = asked.timestamp() - since
    _require_later(asked_s, job.deadline_s, lambda seconds: _instant(since + seconds))
    return raised(job.deadline_s, asked_s)


def _planned_at(header: Header) -> float:
    """Return the Unix time from which the deadline of a plan counts."""
    asked = header.setup.get("experiment", {}).get("constraints", {}).get("deadline")
    instant = None if asked is None else parse_deadline(asked)
    if isinstance(instant, datetime) and header.job.deadline_s is not None:
        return instant.timestamp() - header.job.deadline_s
    return header.created_at


def _instant(at: float) -> str:
    """Unix time for people."""
    try:
        return format_instant(datetime.fromtimestamp(round(at), UTC))
    except (OverflowError, ValueError, OSError):
        return "end of the calendar"


_SAME_S = 1.0
"""A limit counts from when the experiment was planned, which is somewhat before it was made."""


def _require_target(target: float, job: Job) -> None:
    """Raise InputError for a target that no metric can have, or that any has."""
    if not math.isfinite(target):
        raise InputError(f"target: {target} is not a finite number; write one, such as 0.98")
    if wrong := target_fault(target, job.metric, job.mode):
        raise InputError(f"target: {wrong}")


def _extended(job: Job, deadline_s: float | None, max_cost_usd: float | None, target: float | None) -> Job:
    """The job with the new limits. Raises InputError if they do not extend it."""
    extended = job
    if deadline_s is not None:
        _require_later(deadline_s, job.deadline_s, format_duration)
        extended = job.extended(deadline_s)
    if max_cost_usd is not None:
        _require_larger(max_cost_usd, job.max_cost_usd, 0.0)
        extended = replace(extended, max_cost_usd=max_cost_usd)
    if target is not None:
        extended = replace(extended, stop=replace(job.stop, target=target))
    if extended == job:
        raise InputError(
            "the experiment already has these limits; give a later deadline, a larger max_cost or another target"
        )
    return extended


def _require_later(asked_s: float, has_s: float | None, as_text: Callable[[float], str]) -> None:
    if has_s is None:
        raise InputError("deadline: the experiment has none to extend; leave it out")
    if asked_s < has_s - _SAME_S:
        raise InputError(f"deadline: {as_text(asked_s)} is before the present one, {as_text(has_s)}; give a later one")


def _require_larger(asked_usd: float, has_usd: float | None, used_usd: float) -> None:
    if has_usd is None:
        raise InputError("max_cost: the experiment has none to raise; leave it out")
    if asked_usd < has_usd:
        asked, has = format_usd(asked_usd + used_usd), format_usd(has_usd + used_usd)
        raise InputError(f"max_cost: {asked} is less than the present {has}; give more")


def _require_future(state: State) -> None:
    """Raise InputError if the experiment is over, whatever its limits."""
    if state.outcome is None or can_go_on(state):
        return
    if state.ended_by is not None and state.ended_by.rule == "target":
        raise InputError(f"it has ended, since {state.reason}; give a harder target with --target")
    if state.outcome == "budget":
        raise InputError(f"it has ended, since {state.reason}: a later deadline changes nothing; raise max_cost")
    raise InputError(f"it has ended ({state.outcome}) and cannot be extended; run it again under another name")


# What is expected


def _outlook(state: State, now: float, driven: bool) -> tuple[Outlook, int]:
    """Return the outlook under the job's limits, and the first stage that is planned for it."""
    job = state.job
    if state.outcome is None or can_go_on(state):
        going = driven and state.outcome is None and state.course != "new"
        state = state if going else resumed(state, now)
    if state.outcome is not None:
        reason = f"it has ended: {state.reason or state.outcome}"
        return outlook_of(job, forecast(state, now), state.plan, reason, feasible=False), len(job.stages)
    if (found := reaching(state, state.trials)) is not None:
        reason = f"trial {found.trial} has reached the target, and the search ends"
        now_s = Forecast(jct_s=state.elapsed_s(now), cost_usd=bill_usd(state, now))
        return outlook_of(job, now_s, state.plan, reason), len(job.stages)
    left = [lane for lane in state.active() if lane.next_stage < lane.end_stage]
    if not left:
        return outlook_of(job, forecast(state, now), state.plan, "only the last stage is left"), len(job.stages)
    rests = [_planned(state, _remainder(lane, now)) for lane in left]
    return _joined(state, now, rests), min(rest.remainder.done for rest in rests)


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupRest:
    """The rest of a lane as it is planned."""

    remainder: Remainder
    choice: Plan
    """Plan of the job's stages up to the lane's last."""
    jct_s: float
    """End of the lane, from the start."""
    cost_usd: float
    """Cost of the whole run by it, if the other lanes keep their plans."""
    present_usd: float
    """Cost of the whole run if this lane keeps its plan too."""
    reason: str
    feasible: bool | None = None
    """None: it follows from the expected time and cost."""


def _remainder(lane: LaneState, now: float) -> Remainder:
    return after_sync(lane, now) if lane.phase is Phase.PLANNING else after_stage(lane, now)


def _planned(state: State, remainder: Remainder) -> _GroupRest:
    job = state.job
    lane = remainder.lane
    present = state.predicted[remainder.done : lane.end_stage]
    left_s = sum(stage.provisioning_s + stage.duration_s for stage in present)
    left_usd = sum(stage.cost_usd for stage in present)
    if job.is_divided and not share_a_head(state):
        left_usd += job.offer.head_cost_usd(left_s)
    kept = _GroupRest(
        remainder=remainder,
        choice=Plan(stages=state.plan.stages[: lane.end_stage]),
        jct_s=remainder.spent_s + left_s,
        cost_usd=remainder.spent_usd + left_usd,
        present_usd=remainder.spent_usd + left_usd,
        reason="the plan is held fixed",
    )
    try:
        found = best_rest(state, remainder)
    except RubberbandError as error:
        return replace(kept, reason=f"the rest cannot be replanned: {error}")
    present_usd = remainder.spent_usd + found.present.cost_usd
    if not job.replan:
        jct_s = remainder.spent_s + found.present.jct_s
        return replace(kept, jct_s=jct_s, cost_usd=present_usd, present_usd=present_usd)
    return _GroupRest(
        remainder=remainder,
        choice=found.plan,
        jct_s=remainder.spent_s + found.prediction.jct_s,
        cost_usd=remainder.spent_usd + found.prediction.cost_usd,
        present_usd=present_usd,
        reason=found.reason,
        feasible=found.keeps,
    )


def _joined(state: State, now: float, rests: Sequence[_GroupRest]) -> Outlook:
    """The outlook of the whole, from those of the lanes that have stages left."""
    job = state.job
    plan = list(state.plan.stages)
    for rest in rests:
        first, end = rest.remainder.done, rest.remainder.lane.end_stage
        plan[first:end] = rest.choice.stages[first:end]
    saved_usd = sum(rest.present_usd - rest.cost_usd for rest in rests[1:])
    expected = Forecast(
        jct_s=max([*(rest.jct_s for rest in rests), *_last_ends_s(state, now)]), cost_usd=rests[0].cost_usd - saved_usd
    )
    feasible = None if any(rest.feasible is None for rest in rests) else all(rest.feasible for rest in rests)
    reasons = [
        f"{job.stage_name(rest.remainder.done)}: {rest.reason}" if job.is_divided else rest.reason for rest in rests
    ]
    return outlook_of(job, expected, Plan(stages=tuple(plan)), "; ".join(reasons), feasible=feasible)


def _last_ends_s(state: State, now: float) -> list[float]:
    """Return the ends of the lanes that have only their last stage left, from the start."""
    last = [lane for lane in state.active() if lane.next_stage == lane.end_stage]
    return [now - state.started_at + stage_left(lane, now).jct_s for lane in last]


def outlook_of(job: Job, expected: Forecast, plan: Plan, reason: str, *, feasible: bool | None = None) -> Outlook:
    """Return the outlook of what is expected; `feasible` where more is known than that."""
    in_time = job.deadline_s is None or expected.jct_s <= job.deadline_s + SMALLEST_WAIT_S
    in_budget = job.max_cost_usd is None or expected.cost_usd <= job.max_cost_usd + MONEY_SLACK_USD
    return Outlook(
        jct_s=expected.jct_s,
        cost_usd=expected.cost_usd,
        deadline_s=job.deadline_s,
        deadline=job.deadline,
        max_cost_usd=job.max_cost_usd,
        target=job.stop.target,
        plan=plan,
        feasible=in_time and in_budget if feasible is None else feasible,
        reason=reason,
    )


def resumed(state: State, now: float) -> State:
    """The state once a driver goes on with it at `now`; what ran is taken to have ended when it was last heard of."""
    controller = Controller(state.job)
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
