"""The planner asked in short, as tests ask it: the plan, or the error of a front door."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rubberband.executor import Job
from rubberband.planner import search
from rubberband.planner.exact.model import check_plan
from rubberband.planner.noise.sampling import MOST_SAMPLES, Draws, Samples
from rubberband.planner.planning import plan as answer
from rubberband.planner.problem import Infeasible, JobPlan, Problem
from rubberband.planning.feasible import PlanningOptions, PricesAndQuotas, Profiles, planned
from rubberband.running.job import job_of
from rubberband.spec.experiment import Experiment
from rubberband.values.offer import Offer
from rubberband.values.plan import Plan, Planned, PlanningConstraints, Speeds, Spent, Stage
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


def plan_brackets(brackets: Sequence[Sequence[Stage]], *job: Any, **more: Any) -> JobPlan:
    """The best plan of a job, asked as `problem` is. Raises InfeasibleError if none meets the limits."""
    found = answer(problem(brackets, *job, **more))
    if isinstance(found, Infeasible):
        raise found.error
    return found


def plan(stages: Sequence[Stage], *job: Any, **more: Any) -> Planned:
    """`plan_brackets` of a job of one bracket."""
    return plan_brackets((stages,), *job, **more).lanes[0].planned


def frontier(stages: Sequence[Stage], *job: Any) -> list[tuple[float, float]]:
    """The frontier within the limits of a job of one bracket."""
    return search.frontier(problem((stages,), *job))


def plan_job(
    experiment: Experiment,
    profiles: Profiles,
    policy: Any = "optimal",
    *,
    spent: Spent | None = None,
    now: float | None = None,
    most_usd: float | None = None,
    **prices: Any,
) -> Job:
    """The job of an experiment as `run` plans it, with `prices`. Raises InfeasibleError if no plan meets the limits."""
    used, now = spent or Spent(), time.time() if now is None else now
    options = PlanningOptions(now=now, policy=policy, spent=used, most_usd=most_usd)
    return job_of(planned(experiment, profiles, PricesAndQuotas(**prices), options), used)


def sample(
    stages: Sequence[Stage],
    plan: Plan,
    profile: Profile,
    offer: Offer,
    *,
    num_samples: int = MOST_SAMPLES,
    seed: int = 0,
    speeds: Speeds | None = None,
) -> Samples:
    """Return at least `num_samples` samples of a plan (RubberBand §4.2, Algorithm 1, without the graph).

    Raises InputError as `predict` does.
    """
    check_plan(stages, plan, offer)
    draws = Draws(stages, profile, offer, seed=seed, speeds=speeds)
    return draws.evaluate(plan, -(-num_samples // draws.rows))
