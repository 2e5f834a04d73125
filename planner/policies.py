"""The plans that each policy searches: all of them, those of a fixed size, those with the same gang throughout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

from rubberband.errors import InputError
from rubberband.planner.labels import COST_TOLERANCE_USD, TIME_TOLERANCE_S
from rubberband.planner.model import run_s
from rubberband.planner.solver import Box, FoundPlan, Objective, lower_bound, solve
from rubberband.planner.table import StageTable, gangs_of
from rubberband.values.offer import Offer
from rubberband.values.plan import PlanningConstraints, Policy, Stage
from rubberband.values.profile import Profile


def family(
    policy: Policy, profile: Profile, offer: Offer, constraints: PlanningConstraints
) -> list[PlanningConstraints]:
    """The limits of each search that a policy makes; the best of their plans is its plan."""
    if policy != "naive_elastic":
        return [constraints]
    gangs = gangs_of(profile, offer, constraints)
    return [replace(constraints, min_gpus_per_trial=gpus, max_gpus_per_trial=gpus) for gpus in gangs]


@dataclass(slots=True)
class Tables:
    """The tables of a policy's searches, each built when it is first looked at."""

    build: Callable[[int], StageTable]
    least: Sequence[tuple[float, float]]
    """Of each: seconds and US dollars that none of its plans goes below."""
    _built: dict[int, StageTable] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.least)

    def __getitem__(self, at: int) -> StageTable:
        if at not in self._built:
            self._built[at] = self.build(at)
        return self._built[at]

    def roughly(self, at: int, box: Box, objective: Objective) -> float:
        """A lower bound on the objective that takes no table; inf if it shows that no plan is in the box."""
        time_s, cost_usd = (value * (1.0 - 1e-9) for value in self.least[at])
        if time_s > box.time_s + TIME_TOLERANCE_S or cost_usd > box.cost_usd + COST_TOLERANCE_USD:
            return math.inf
        return cost_usd if objective == "min_cost" else time_s


def least(stages: Sequence[Stage], profile: Profile, offer: Offer, limits: PlanningConstraints) -> tuple[float, float]:
    """Seconds and US dollars that no plan goes below: every stage is one wave, and no slot is ever idle.

    Raises InputError as `build_table` does.
    """
    price = offer.least_price_usd_per_s
    time_s, gpu_s = 0.0, 0.0
    for stage in stages:
        runs_s = [(gpus, run_s(stage, gpus, profile)) for gpus in gangs_of(profile, offer, limits)]
        time_s += min(trial_s for _, trial_s in runs_s)
        gpu_s += stage.trials * min(gpus * trial_s for gpus, trial_s in runs_s)
    return time_s, price * gpu_s / offer.gpus


def best_of(tables: Tables, box: Box, objective: Objective, *, constant: bool) -> tuple[StageTable, FoundPlan] | None:
    """The best plan of several tables, and its table; None if no plan is in the box."""
    if len(tables) == 1:
        found = solve(tables[0], box, objective, constant=constant)
        return None if found is None else (tables[0], found)
    waiting = [(tables.roughly(at, box, objective), at, False) for at in range(len(tables))]
    heapify(waiting)
    best, narrowed = None, box
    while waiting:
        bound, at, is_exact = heappop(waiting)
        if bound == math.inf or (best is not None and bound > _key(best[1], objective)[0]):
            break
        if not is_exact:
            heappush(waiting, (lower_bound(tables[at], box, objective), at, True))
            continue
        found = solve(tables[at], narrowed, objective, constant=constant)
        if found is not None and (best is None or _key(found, objective) < _key(best[1], objective)):
            best, narrowed = (tables[at], found), _narrowed(narrowed, found, objective)
    return best


def _narrowed(box: Box, found: FoundPlan, objective: Objective) -> Box:
    """The plans of `box` that are no worse than `found`."""
    if objective == "min_cost":
        return replace(box, cost_usd=min(box.cost_usd, found.cost_usd))
    return replace(box, time_s=min(box.time_s, found.time_s))


def _key(found: FoundPlan, objective: Objective) -> tuple[float, float]:
    time_s, cost_usd = round(found.time_s, 6), round(found.cost_usd, 9)
    return (cost_usd, time_s) if objective == "min_cost" else (time_s, cost_usd)


def box_of(constraints: PlanningConstraints) -> Box:
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
