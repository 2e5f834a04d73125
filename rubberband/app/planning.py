"""From an experiment and its profile to the job that is run: the plan, and all that its controller must know.

A run keeps to max_cost by stopping while there is still money for giving everything back. So what is planned leaves a
reserve for that: a plan that is accepted here also finishes, as long as times are as they were predicted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rubberband.app.cases import Room, cases
from rubberband.app.measure import Spent
from rubberband.app.remedies import CasesOf, Reached, find_remedies, reached
from rubberband.cloud.catalogue import Table, types_of
from rubberband.cloud.start_limits import start_limits
from rubberband.errors import InfeasibleError
from rubberband.executor.core.budget import Reserve
from rubberband.executor.core.state import Job
from rubberband.planner.brackets import JobPlan
from rubberband.planner.estimate import Case, Estimate, estimate
from rubberband.planner.solver import Objective
from rubberband.planner.wording import advice, none_within, usd_up
from rubberband.spec.experiment import Experiment
from rubberband.units import format_duration, format_usd
from rubberband.values.plan import PlanningConstraints, Policy
from rubberband.values.profile import Profile

_STEP = 1.02
"""A max_cost that is to be named as a remedy is raised by this factor until a plan is accepted with it."""
_MOST_STEPS = 40
START_ATTEMPTS = 3
"""After so many instances in a row that never got ready a run buys no more for now."""

Profiles = Profile | Mapping[str, Profile]
Planner = Callable[[Sequence[Case], Objective], Estimate]


def plan_job(
    experiment: Experiment,
    profiles: Profiles,
    policy: Policy = "optimal",
    *,
    spent: Spent | None = None,
    table: Table | None = None,
    room: Room | None = None,
    most_usd: float | None = None,
) -> Job:
    """Plan an experiment that starts now, on the best of its instance types, and say all that its controller must know.

    `profiles` is one for all types, or type -> profile; `table` and `room` are those of `rubberband.app.cases.cases`.
    Raises InfeasibleError if no plan meets the constraints, with remedies none of which costs more than `most_usd`.
    """
    used, began_at = spent or Spent(), time.time()

    def cases_of(changed: Experiment) -> list[Case]:
        found = cases(changed, profiles, began_at - used.seconds, table=table, room=room)
        return [_less(case, used) for case in found]

    options = cases_of(experiment)
    dearest_usd_per_hour = _dearest(experiment, options)

    def planned(tried: Sequence[Case], objective: Objective) -> Estimate:
        return estimate(
            [experiment.stages()],
            tried,
            policy,
            experiment.name,
            clock=time.perf_counter,
            objective=objective,
            compare=False,
        )

    reserve = Reserve(release_margin_s(experiment), dearest_usd_per_hour)
    try:
        answer = _affordable(planned, options, reserve, experiment.constraints.objective)
    except InfeasibleError as error:
        raise _advised(error, experiment, cases_of, planned, reserve, used, most_usd) from None
    assert answer.job is not None, "what is affordable has a plan"
    case = next(case for case in options if case.offer.instance_type == answer.offer.instance_type)
    return _job(experiment, case, answer.job, policy, dearest_usd_per_hour)


def _advised(
    error: InfeasibleError,
    experiment: Experiment,
    cases_of: CasesOf,
    planned: Planner,
    reserve: Reserve,
    used: Spent,
    most_usd: float | None,
) -> InfeasibleError:
    """The error with what would make a run possible, its reserve included."""

    def attempt(tried: Sequence[Case], objective: Objective) -> Reached | None:
        first = planned(tried, objective)
        if first.job is None or not first.feasible:
            return None
        answer = _within(planned, tried, reserve, objective, first)
        if answer is None or answer.job is None:
            return None
        plain = reached(answer.job.prediction, answer.constraints.confidence)
        reserve_usd = reserve.of_plan(answer.offer, answer.job.plan.stages)
        return replace(
            plain,
            needs_s=plain.needs_s + used.seconds,
            needs_usd=plain.needs_usd + reserve_usd + used.cost_usd,
        )

    remedies = find_remedies(experiment, cases_of, attempt, clock=time.perf_counter, most_usd=most_usd)
    if not remedies and most_usd is None:
        return error
    return InfeasibleError(
        error.obstacle,
        advice=advice(remedies[0]) if remedies else none_within(most_usd),
        remedies=remedies,
        shortest_jct_s=error.shortest_jct_s,
        cheapest_usd=error.cheapest_usd,
    )


def release_margin_s(experiment: Experiment) -> float:
    """How long giving an instance back may take."""
    return experiment.resources.kind.release_margin_s


def _dearest(experiment: Experiment, options: Sequence[Case]) -> float | None:
    """The price of the dearest instance that may stand in for another; None where none may."""
    prices = [case.offer.price_usd_per_hour for case in options]
    return max(prices) if experiment.resources.kind.is_rented and len(prices) > 1 else None


def _affordable(planned: Planner, options: Sequence[Case], reserve: Reserve, objective: Objective) -> Estimate:
    """The plan that leaves its reserve. Raises InfeasibleError, with a max_cost that is really enough."""
    first = planned(options, objective)
    if first.job is None and (not _is_capped(options) or _too_late(first) or not reserve.is_asked_for):
        raise _no_plan(first)
    if first.job is not None and not first.feasible:
        raise _missed(first)
    found = None if first.job is None else _within(planned, options, reserve, objective, first)
    if found is None:
        raise _too_dear(planned, options, reserve, first)
    return found


def _within(
    planned: Planner, options: Sequence[Case], reserve: Reserve, objective: Objective, first: Estimate
) -> Estimate | None:
    """`first` if it leaves its reserve, else the best plan that does, of as many instances as may be."""
    if not _is_capped(options) or _leaves(first, reserve):
        return first
    for width in range(max(case.offer.max_instances for case in options), 0, -1):
        narrower = [_narrowed(case, reserve, width) for case in options if case.offer.max_instances >= width]
        answer = planned(narrower, objective)
        if answer.job is not None and answer.feasible:
            return answer
    return None


def _leaves(answer: Estimate, reserve: Reserve) -> bool:
    """Whether the plan is kept by its limits with the reserve set aside."""
    assert answer.job is not None, "what is asked has a plan"
    assert answer.constraints.max_cost_usd is not None, "and a cap"
    left_usd = answer.constraints.max_cost_usd - reserve.of_plan(answer.offer, answer.job.plan.stages)
    prediction = answer.job.prediction
    if prediction.cost is None:
        return prediction.cost_usd <= left_usd
    return prediction.cost.p95 <= left_usd and answer.constraints.confidence <= 0.95


def _narrowed(case: Case, reserve: Reserve, width: int) -> Case:
    cap_usd = case.constraints.max_cost_usd
    left_usd = None if cap_usd is None else max(0.0, cap_usd - reserve.of_width(case.offer, width))
    return replace(
        case,
        offer=replace(case.offer, max_instances=width),
        constraints=replace(case.constraints, max_cost_usd=left_usd),
    )


def _is_capped(options: Sequence[Case]) -> bool:
    return any(case.constraints.max_cost_usd is not None for case in options)


def _too_late(answer: Estimate) -> bool:
    assert answer.nearest is not None, "an infeasible answer has a nearest plan"
    deadline_s = answer.constraints.deadline_s
    return deadline_s is not None and answer.nearest.jct_s > deadline_s


def _no_plan(answer: Estimate) -> InfeasibleError:
    assert answer.nearest is not None, "an infeasible answer has a nearest plan"
    return InfeasibleError(
        answer.obstacle or "",
        advice=(answer.reason or "").removeprefix(f"{answer.obstacle}; "),
        shortest_jct_s=answer.nearest.jct_s,
        cheapest_usd=answer.nearest.cost_usd,
    )


def _missed(answer: Estimate) -> InfeasibleError:
    """A policy's plan that is not good enough, where it does not look for another."""
    assert answer.prediction is not None, "there is a plan"
    prediction = answer.prediction
    limits = answer.constraints
    missed = []
    if limits.deadline_s is not None:
        missed.append(f"deadline {format_duration(limits.deadline_s)}")
    if limits.max_cost_usd is not None:
        missed.append(f"max_cost {format_usd(limits.max_cost_usd)}")
    surely = "" if answer.odds is None else f" with confidence {limits.confidence:g}"
    return InfeasibleError(
        f"the {answer.policy} plan does not keep {' and '.join(missed)}{surely}: it takes "
        f"{format_duration(prediction.jct_s)} and costs {format_usd(prediction.cost_usd)}",
        advice="use the policy optimal, or raise the limits",
        shortest_jct_s=prediction.jct_s,
        cheapest_usd=prediction.cost_usd,
    )


def _too_dear(planned: Planner, options: Sequence[Case], reserve: Reserve, first: Estimate) -> InfeasibleError:
    """The error for a max_cost that is too low, which names one that is not."""
    free = planned([_capped(case, None) for case in options], "min_cost")
    if free.job is None or free.prediction is None:
        return _no_plan(first)
    cheapest_usd = free.prediction.cost_usd
    enough_usd = (free.prediction.cost.p95 if free.prediction.cost else cheapest_usd) + reserve.of_plan(
        free.offer, free.job.plan.stages
    )
    for _ in range(_MOST_STEPS):
        tried = [_capped(case, enough_usd) for case in options]
        answer = planned(tried, "min_cost")
        if answer.job is not None and answer.feasible and _within(planned, tried, reserve, "min_cost", answer):
            break
        enough_usd *= _STEP
    cap_usd = first.constraints.max_cost_usd
    assert cap_usd is not None, "what is too dear has a limit"
    in_time = "" if first.constraints.deadline_s is None else " in time"
    return InfeasibleError(
        f"max_cost {format_usd(cap_usd)} cannot be kept: the cheapest plan{in_time} needs {usd_up(enough_usd)}, "
        "giving its instances back included",
        advice=f"raise max_cost to {usd_up(enough_usd)}",
        shortest_jct_s=free.prediction.jct_s if first.nearest is None else first.nearest.jct_s,
        cheapest_usd=enough_usd,
    )


def _capped(case: Case, cap_usd: float | None) -> Case:
    return replace(case, constraints=replace(case.constraints, max_cost_usd=cap_usd))


def _less(case: Case, spent: Spent) -> Case:
    return replace(case, constraints=_left(case.constraints, spent))


def _left(constraints: PlanningConstraints, spent: Spent) -> PlanningConstraints:
    deadline_s, max_cost_usd = constraints.deadline_s, constraints.max_cost_usd
    return replace(
        constraints,
        deadline_s=None if deadline_s is None else max(0.0, deadline_s - spent.seconds),
        max_cost_usd=None if max_cost_usd is None else max(0.0, max_cost_usd - spent.cost_usd),
    )


def _job(
    experiment: Experiment, case: Case, planned: JobPlan, policy: Policy, dearest_usd_per_hour: float | None
) -> Job:
    constraints = case.constraints
    return Job(
        name=experiment.name,
        stages=experiment.stages(),
        plan=planned.plan,
        prediction=planned.prediction,
        offer=case.offer,
        profile=case.profile,
        metric=experiment.search.metric,
        mode=experiment.search.mode,
        deadline_s=constraints.deadline_s,
        deadline_at=None if experiment.resources.kind.is_simulated else experiment.constraints.deadline_at,
        max_cost_usd=constraints.max_cost_usd,
        max_failures=experiment.constraints.max_failures,
        iteration_timeout_s=experiment.constraints.iteration_timeout_s,
        release_margin_s=release_margin_s(experiment),
        replan=policy == "optimal",
        objective=experiment.constraints.objective,
        min_gpus_per_trial=constraints.min_gpus_per_trial,
        max_gpus_per_trial=constraints.max_gpus_per_trial,
        confidence=constraints.confidence,
        dearest_usd_per_hour=dearest_usd_per_hour,
        lease_s=None if experiment.resources.kind.is_simulated else experiment.resources.lease_length_s,
        boot_lease_s=_boot_lease_s(experiment),
        start_attempts=START_ATTEMPTS,
    )


def _boot_lease_s(experiment: Experiment) -> float | None:
    """How long an instance that starts may outlive the driver; None: no longer than any."""
    resources = experiment.resources
    return start_limits(types_of(resources), resources.init_delay_s).lease_s if resources.kind.is_rented else None
