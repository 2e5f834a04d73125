"""The planner asked in short, as tests ask it: the plan, or the error of a front door."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rubberband.planner import search
from rubberband.planner.planning import plan as answer
from rubberband.planner.problem import Infeasible, JobPlan, Problem
from rubberband.values.offer import Offer
from rubberband.values.plan import Planned, PlanningConstraints, Stage
from rubberband.values.profile import Profile


def problem(
    brackets: Sequence[Sequence[Stage]],
    profile: Profile,
    offer: Offer,
    constraints: PlanningConstraints,
    policy: Any = "optimal",
    objective: Any = "min_cost",
    **more: Any,
) -> Problem:
    """The problem of a job; `more` are fields of it."""
    return Problem(
        brackets=brackets,
        profile=profile,
        offer=offer,
        constraints=constraints,
        policy=policy,
        objective=objective,
        **more,
    )


def plan_job(brackets: Sequence[Sequence[Stage]], *job: Any, **more: Any) -> JobPlan:
    """The best plan of a job, asked as `problem` is. Raises InfeasibleError if none meets the limits."""
    found = answer(problem(brackets, *job, **more))
    if isinstance(found, Infeasible):
        raise found.error
    return found


def plan(stages: Sequence[Stage], *job: Any, **more: Any) -> Planned:
    """`plan_job` of a job of one bracket."""
    return plan_job((stages,), *job, **more).lanes[0].planned


def frontier(stages: Sequence[Stage], *job: Any) -> list[tuple[float, float]]:
    """The frontier within the limits of a job of one bracket."""
    return search.frontier(problem((stages,), *job))
