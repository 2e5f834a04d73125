"""The plans that each policy searches: all of them, those of a fixed size, those with the same gang throughout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from rubberband.errors import InputError
from rubberband.offer import Offer
from rubberband.plan import Constraints, Stage
from rubberband.planner.solver import Box, Found, Objective, lower_bound, solve
from rubberband.planner.table import Table, gangs_of
from rubberband.profile import Profile

Policy = Literal["optimal", "greedy", "static", "naive_elastic"]


def family(policy: Policy, profile: Profile, offer: Offer, constraints: Constraints) -> list[Constraints]:
    """The limits of each search that a policy makes; the best of their plans is its plan."""
    if policy != "naive_elastic":
        return [constraints]
    gangs = gangs_of(profile, offer, constraints)
    return [replace(constraints, min_gpus_per_trial=gpus, max_gpus_per_trial=gpus) for gpus in gangs]


def best_of(tables: Sequence[Table], box: Box, objective: Objective, *, constant: bool) -> tuple[Table, Found] | None:
    """The best plan of several tables, and its table; None if no plan is in the box."""
    if len(tables) == 1:
        found = solve(tables[0], box, objective, constant=constant)
        return None if found is None else (tables[0], found)
    bounds = [lower_bound(table, box, objective) for table in tables]
    best: tuple[Table, Found] | None = None
    for at in sorted(range(len(tables)), key=bounds.__getitem__):
        if best is not None and bounds[at] > _key(best[1], objective)[0]:
            break
        found = solve(tables[at], box, objective, constant=constant)
        if found is not None and (best is None or _key(found, objective) < _key(best[1], objective)):
            best = (tables[at], found)
            box = _narrowed(box, found, objective)
    return best


def _narrowed(box: Box, found: Found, objective: Objective) -> Box:
    """The plans of `box` that are no worse than `found`."""
    if objective == "min_cost":
        return replace(box, cost_usd=min(box.cost_usd, found.cost_usd))
    return replace(box, time_s=min(box.time_s, found.time_s))


def _key(found: Found, objective: Objective) -> tuple[float, float]:
    time_s, cost_usd = round(found.time_s, 6), round(found.cost_usd, 9)
    return (cost_usd, time_s) if objective == "min_cost" else (time_s, cost_usd)


def box_of(constraints: Constraints) -> Box:
    """The limits as the solver has them."""
    return Box(
        time_s=math.inf if constraints.deadline_s is None else constraints.deadline_s,
        cost_usd=math.inf if constraints.max_cost_usd is None else constraints.max_cost_usd,
    )


def check_stages(stages: Sequence[Stage]) -> None:
    """Raise InputError unless there are stages, each with trials and iterations."""
    if not stages:
        raise InputError("the job has 0 stages; give it at least 1")
    for index, stage in enumerate(stages):
        if stage.trials < 1 or stage.iterations < 1:
            raise InputError(
                f"stage {index} has trials={stage.trials} and iterations={stage.iterations}; both must be at least 1"
            )
