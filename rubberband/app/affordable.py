"""The plan with which an experiment would run, or the changes that make one possible: the one way of every front door.

`estimate`, previews and admission, `run` and the size of a search all count the same: the limits of
`rubberband.app.cases`, and the money that a run keeps back (`rubberband.planner.reserve`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from rubberband.app.cases import Room, Spent, cases
from rubberband.app.remedies import Reached, find_remedies, reached
from rubberband.cloud.catalogue import Table
from rubberband.errors import InfeasibleError
from rubberband.planner.estimate import Beside, Case, Estimate, estimate, rank
from rubberband.planner.planning import plan
from rubberband.planner.problem import JobPlan
from rubberband.planner.search import keeps
from rubberband.planner.solver import Objective
from rubberband.planner.wording import advice, none_within
from rubberband.spec.experiment import Experiment
from rubberband.units import format_duration, format_usd
from rubberband.values.plan import Policy, Stage
from rubberband.values.profile import Profile

Profiles = Profile | Mapping[str, Profile]


@dataclass(frozen=True, slots=True)
class CasesLeft:
    """A function from an experiment to its cases, with what is left of its limits."""

    profiles: Profiles
    used: Spent
    now: float
    """Unix time."""
    table: Table | None = None
    room: Room | None = None

    def __call__(self, experiment: Experiment) -> tuple[Case, ...]:
        """Return the cases. Raises InputError as `rubberband.app.cases.cases` does."""
        return cases(experiment, self.profiles, self.now, table=self.table, room=self.room, spent=self.used)


def planned(
    experiment: Experiment,
    options: Sequence[Case],
    policy: Policy,
    *,
    clock: Callable[[], float] = time.perf_counter,
    compare: bool = False,
    with_frontier: bool = False,
    beside: Beside | None = None,
    seed: int = 0,
) -> Estimate:
    """Return the estimate of an experiment with these cases. `compare`, `with_frontier` and `beside` add to it."""
    return estimate(
        experiment.brackets(),
        options,
        policy,
        experiment.name,
        clock=clock,
        objective=experiment.constraints.objective,
        compare=compare,
        with_frontier=with_frontier,
        beside=beside,
        seed=seed,
    )


def affordable_job(experiment: Experiment, options: Sequence[Case], policy: Policy) -> JobPlan | None:
    """Return the plan of `planned`; None if there is none, without the reason."""
    found = _best_case(experiment.brackets(), options, policy, experiment.constraints.objective)
    return None if found is None else found[1]


def _best_case(
    brackets: Sequence[Sequence[Stage]], options: Sequence[Case], policy: Policy, objective: Objective, seed: int = 0
) -> tuple[Case, JobPlan] | None:
    """Return the best instance type with its plan; None if none has one."""
    found = [(case, plan(case.problem(brackets, policy, objective, seed))) for case in options]
    kept = [(case, job) for case, job in found if isinstance(job, JobPlan) and keeps(job, case.constraints)]
    return min(kept, key=lambda pair: rank(pair[1], pair[0], objective), default=None)


def with_remedies(
    found: Estimate,
    experiment: Experiment,
    cases_of: CasesLeft,
    *,
    clock: Callable[[], float] = time.perf_counter,
    most_usd: float | None = None,
) -> Estimate:
    """Return an estimate without a plan with the remedies that make a run possible, of at most `most_usd`."""
    used = cases_of.used

    def attempt(tried: Sequence[Case], objective: Objective) -> Reached | None:
        answer = _best_case(found.brackets, tried, cast(Policy, found.policy), objective, found.seed)
        if answer is None:
            return None
        plain = reached(answer[1], answer[0].constraints.confidence)
        return replace(plain, needs_s=plain.needs_s + used.seconds, needs_usd=plain.needs_usd + used.cost_usd)

    nearest = found.nearest if used == Spent() else None
    remedies = find_remedies(experiment, cases_of, attempt, clock=clock, most_usd=most_usd, nearest=nearest)
    if not remedies and most_usd is None:
        return found
    fix = advice(remedies[0]) if remedies else none_within(most_usd)
    if used != Spent():
        fix = f"measuring took {format_duration(used.seconds)} and {format_usd(used.cost_usd)} of the limits; {fix}"
    return replace(found, remedies=remedies, reason=f"{found.obstacle}; {fix}")


def refusal(found: Estimate) -> InfeasibleError:
    """Return the error of an estimate that is not feasible, with its remedies."""
    if found.job is not None:
        return _missed(found)
    assert found.nearest is not None, "an infeasible answer has a nearest plan"
    return InfeasibleError(
        found.obstacle or "",
        advice=(found.reason or "").removeprefix(f"{found.obstacle}; "),
        remedies=found.remedies,
        shortest_jct_s=found.nearest.jct_s,
        cheapest_usd=found.nearest.cost_usd,
    )


def _missed(found: Estimate) -> InfeasibleError:
    """Return the error for a policy that has one plan, which misses the limits."""
    assert found.prediction is not None, "there is a plan"
    prediction, limits = found.prediction, found.constraints
    missed = []
    if limits.deadline_s is not None:
        missed.append(f"deadline {format_duration(limits.deadline_s)}")
    if limits.max_cost_usd is not None:
        missed.append(f"max_cost {format_usd(limits.max_cost_usd)}")
    surely = "" if found.odds is None else f" with confidence {limits.confidence:g}"
    return InfeasibleError(
        f"the {found.policy} plan does not keep {' and '.join(missed)}{surely}: it takes "
        f"{format_duration(prediction.jct_s)} and costs {format_usd(prediction.cost_usd)}",
        advice="use the policy optimal, or raise the limits",
        shortest_jct_s=prediction.jct_s,
        cheapest_usd=prediction.cost_usd,
    )
