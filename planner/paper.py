"""Algorithm 2 of the paper, literally: the greedy search for an allocation (RubberBand §4.3).

An allocation is a number of GPUs for each stage, divided fairly among its trials. What a plan takes and costs is for
the caller to say; with Algorithm 1 (`rubberband.planner.paper_dag`) the whole is the paper's planner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rubberband.offer import Offer, gang_sizes, slots
from rubberband.plan import Constraints, Plan, Stage, StagePlan
from rubberband.planner.labels import COST_TOLERANCE_USD, TIME_TOLERANCE_S
from rubberband.planner.paper_dag import NUM_SAMPLES, Sampled, build_dag, simulate
from rubberband.profile import Profile

__all__ = ["Evaluate", "Sampled", "build_dag", "greedy", "literal_plan", "simulate"]

Evaluate = Callable[[Plan], tuple[float, float]]
"""(jct_s, cost_usd) of a plan."""


def literal_plan(
    stages: Sequence[Stage],
    profile: Profile,
    offer: Offer,
    constraints: Constraints,
    *,
    num_samples: int = NUM_SAMPLES,
    seed: int = 0,
) -> Plan | None:
    """The paper's planner: Algorithm 2 on the means of Algorithm 1's samples, every plan with the same seed.

    None and errors as for `greedy`.
    """

    def evaluate(plan: Plan) -> tuple[float, float]:
        sampled = simulate(stages, plan, profile, offer, num_samples=num_samples, seed=seed)
        return float(sampled.jct_s.mean()), float(sampled.cost_usd.mean())

    return greedy(stages, profile, offer, constraints, evaluate=evaluate)


def greedy(
    stages: Sequence[Stage],
    profile: Profile,
    offer: Offer,
    constraints: Constraints,
    *,
    evaluate: Evaluate,
    warm_starts: Sequence[int] = (1, 2, 3),
) -> Plan | None:
    """Algorithm 2 from multiples of the best static allocation; the cheapest of the plans that it ends at.

    None if no static allocation is in time (the paper's greedy needs a feasible start, though an elastic plan may
    be), or the plan found is beyond `max_cost_usd`. The plan is never dearer than the best static allocation.
    Raises InputError as `profile.iteration_s` and `evaluate` do.
    """
    search = _Search(stages, offer, constraints, evaluate)
    counts = [count for count in range(1, offer.max_instances + 1) if search.static(count)]
    starts = [allocations for count in counts if search.in_time(allocations := search.static(count))]
    if not starts:
        return None
    best = min(starts, key=search.cost_usd)
    instances = best[0].instances
    ends = [
        search.descend(allocations)
        for factor in warm_starts
        if search.in_time(allocations := search.static(min(factor * instances, offer.max_instances)))
    ]
    found = min(ends, key=search.cost_usd)
    max_cost_usd = math.inf if constraints.max_cost_usd is None else constraints.max_cost_usd
    return _plan(found) if search.cost_usd(found) <= max_cost_usd + COST_TOLERANCE_USD else None


@dataclass(frozen=True, slots=True)
class _Allocation:
    """What a stage gets: GPUs in all, on how many instances, and for each of its trials."""

    gpus: int
    instances: int
    gpus_per_trial: int


_Allocations = tuple[_Allocation, ...]
