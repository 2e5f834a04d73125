"""Searching for a plan: the cheapest (or the fastest) within a deadline and a budget, or the reason why there is none.

It states the problem for the solver (`rubberband.planner.solver`) and words the answer for the user.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from rubberband.errors import InfeasibleError, InputError
from rubberband.planner import asha, risk
from rubberband.planner.model import MeanCost, least_instances, predict, run_s
from rubberband.planner.problem import Problem
from rubberband.planner.solver import Box, FoundPlan, Objective, lower_bound, pareto, solve
from rubberband.planner.table import StageTable, build_table, gangs_of, holding_is_free
from rubberband.planner.wording import unreachable
from rubberband.values.offer import Offer, slots
from rubberband.values.plan import (
    Cohort,
    Plan,
    Planned,
    PlanningConstraints,
    Policy,
    Prediction,
    Speeds,
    Stage,
    StagePlan,
)
from rubberband.values.profile import Profile

if TYPE_CHECKING:
    from rubberband.planner.brackets import JobPlan

KEPT_TABLES = 32


def plan(
    stages: Sequence[Stage],
    profile: Profile,
    offer: Offer,
    constraints: PlanningConstraints,
    policy: Policy = "optimal",
    objective: Objective = "min_cost",
    *,
    held: Sequence[Cohort] = (),
    seed: int = 0,
    speeds: Speeds | None = None,
) -> Planned:
    """Return the best plan of a job (or of the rest of one, with the instances `held` now) with its prediction.

    * `optimal` is exact where nothing varies: no plan within the constraints has a lower cost (RubberBand §4.3 asks
      for this and approximates it).
    * `static` is the paper's baseline: the cheapest number of instances held through all stages, with the best GPUs
      per trial in each.
    * `naive_elastic` (§6) is the cheapest plan with the same GPUs per trial in every stage.
    * `greedy` is the paper's Algorithm 2.

    A plan whose JCT equals the deadline is feasible. Ties on cost go to the shorter JCT, then to fewer instances, then
    to fewer GPUs; with `min_time`, ties on JCT go to the lower cost.

    Where times vary, cost and time are means (times within 0.1 % of each other tie), and the plan keeps deadline and
    budget with a probability of `constraints.confidence` (`rubberband.planner.risk`). Equal seeds give equal samples.
    `speeds` are those of the trials that go on, where the rest of a job is planned.

    Raises InfeasibleError if no plan of the policy meets the constraints, and InputError if none can exist.
    """
    return best(
        Problem(
            stages=stages,
            profile=profile,
            offer=offer,
            constraints=constraints,
            policy=policy,
            objective=objective,
            held=held,
            seed=seed,
            speeds=speeds,
        )
    )


def best(problem: Problem) -> Planned:
    """`plan` of a problem."""
    problem.check()
    if problem.is_asynchronous:
        return asha.plan(problem)
    if problem.policy == "greedy":
        return _greedy(problem)
    if problem.varies:
        return risk.plan(problem)
    tables = _tables(problem)
    found = _certain(problem, tables)
    if found is None:
        raise _infeasible(problem, tables)
    return found


def best_or_none(problem: Problem) -> Planned | None:
    """Return the plan of `best`, or None without the reason, which takes time to find: for searches that try many."""
    if problem.policy == "greedy" or problem.varies or problem.is_asynchronous:
        try:
            return best(problem)
        except InfeasibleError:
            return None
    return _certain(problem, _tables(problem))


@dataclass(slots=True)
class _Tables:
    """The tables of a policy's searches, each built when it is first used."""

    build: Callable[[int], StageTable]
    least: Sequence[tuple[float, float]]
    """For each table: seconds and US dollars that none of its plans goes below."""
    _built: dict[int, StageTable] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.least)

    def __getitem__(self, at: int) -> StageTable:
        if at not in self._built:
            self._built[at] = self.build(at)
        return self._built[at]

    def roughly(self, at: int, box: Box, objective: Objective) -> float:
        """Return a lower bound on the objective without building the table; inf if no plan can be in the box."""
        time_s, cost_usd = (value * (1.0 - 1e-9) for value in self.least[at])
        if not all(box.limits_kept(time_s, cost_usd)):
            return math.inf
        return cost_usd if objective == "min_cost" else time_s


def _tables(problem: Problem) -> _Tables:
    stages, profile, offer = tuple(problem.stages), problem.profile, problem.offer
    searches = problem.families()
    if problem.held:
        built = [build_table(stages, profile, offer, limits, problem.held) for limits in searches]
        return _Tables(built.__getitem__, [(-math.inf, -math.inf)] * len(built))
    unlimited = [replace(limits, deadline_s=None, max_cost_usd=None, confidence=0.95) for limits in searches]
    return _Tables(
        lambda at: _table(stages, profile, offer, unlimited[at]),
        [_least(problem, limits) for limits in unlimited] if len(unlimited) > 1 else [(0.0, 0.0)],
    )


# The table of a job does not depend on its deadline and budget, and these are what users ask about again.
_table = lru_cache(maxsize=KEPT_TABLES)(build_table)


def _least(problem: Problem, limits: PlanningConstraints) -> tuple[float, float]:
    """Return seconds and US dollars that no plan goes below: every stage is one wave, and no slot is ever idle.

    Raises InputError as `build_table` does.
    """
    offer, time_s, gpu_s = problem.offer, 0.0, 0.0
    gangs = gangs_of(problem.profile, offer, limits)
    for stage in problem.stages:
        runs_s = [(gpus, run_s(stage, gpus, problem.profile)) for gpus in gangs]
        time_s += min(trial_s for _, trial_s in runs_s)
        gpu_s += stage.trials * min(gpus * trial_s for gpus, trial_s in runs_s)
    return time_s, offer.least_price_usd_per_s * gpu_s / offer.gpus


def _best_of(tables: _Tables, box: Box, objective: Objective, constant: bool) -> tuple[StageTable, FoundPlan] | None:
    """Return the best plan of several tables, with its table; None if no plan is in the box."""
    if len(tables) == 1:
        found = solve(tables[0], box, objective, constant=constant)
        return None if found is None else (tables[0], found)
    waiting = [(tables.roughly(at, box, objective), at, False) for at in range(len(tables))]
    heapify(waiting)
    first, narrowed = None, box
    while waiting:
        bound, at, is_exact = heappop(waiting)
        if bound == math.inf or (first is not None and bound > first[1].rank(objective)[0]):
            break
        if not is_exact:
            heappush(waiting, (lower_bound(tables[at], box, objective), at, True))
            continue
        found = solve(tables[at], narrowed, objective, constant=constant)
        if found is not None and (first is None or found.rank(objective) < first[1].rank(objective)):
            first = (tables[at], found)
            narrowed = narrowed.within(objective, found.cost_usd if objective == "min_cost" else found.time_s)
    return first


def _certain(problem: Problem, tables: _Tables) -> Planned | None:
    found = _best_of(tables, problem.box, problem.objective, problem.constant)
    if found is None:
        return None
    table, solution = found
    chosen = table.plan(solution.path)
    if holding_is_free(problem.offer):
        chosen = _fewest_instances(problem, chosen)
    prediction = predict(problem.stages, chosen, problem.profile, problem.offer, problem.held)
    return Planned(plan=chosen, prediction=prediction)


def _greedy(problem: Problem) -> Planned:
    """Algorithm 2, with every candidate predicted by our model (or, where times vary, by few samples)."""
    from rubberband.planner.greedy import greedy

    if problem.held:
        raise InputError("policy greedy starts from nothing: it cannot plan the rest of a job; use optimal")
    evaluate = risk.evaluator(problem)
    known = evaluate.figures if isinstance(evaluate, MeanCost) else None
    job = (problem.stages, problem.profile, problem.offer, problem.constraints)
    chosen = greedy(*job, evaluate=evaluate, known=known)
    if chosen is None:
        nearest = best(replace(problem, policy="static"))  # raises, with the reason
        raise InfeasibleError(
            "greedy finds no plan that meets the constraints, though there is one; use policy optimal",
            shortest_jct_s=nearest.prediction.jct_s,
            cheapest_usd=nearest.prediction.cost_usd,
        )
    return risk.planned(problem, chosen)


def frontier(
    stages: Sequence[Stage],
    profile: Profile,
    offer: Offer,
    constraints: PlanningConstraints,
    policy: Policy = "optimal",
    *,
    seed: int = 0,
) -> list[tuple[float, float]]:
    """Return (jct_s, cost_usd) of every plan within the constraints that no other beats on both, fastest first.

    Exact where nothing varies. Else the JCT is the one kept with `constraints.confidence`, the cost is the mean, and
    the plans are near the frontier. `policy` is optimal or static. The list is empty if no plan meets the constraints.

    Raises InputError if no plan can exist.
    """
    problem = Problem(stages=stages, profile=profile, offer=offer, constraints=constraints, policy=policy, seed=seed)
    problem.check()
    if problem.is_asynchronous:
        return asha.frontier(problem)
    if problem.varies:
        return risk.frontier(problem)
    table = build_table(stages, profile, offer, constraints)
    return [(point.time_s, point.cost_usd) for point in pareto(table, problem.box, constant=problem.constant)]


def meets(prediction: Prediction, constraints: PlanningConstraints) -> tuple[bool, bool]:
    """Return whether a prediction keeps the deadline and the budget, each up to the rounding of floats."""
    return Box.of(constraints).limits_kept(prediction.jct_s, prediction.cost_usd)


def keeps(planned: Planned | JobPlan, constraints: PlanningConstraints) -> bool:
    """Return whether a plan keeps the limits; where times vary, with the confidence (greedy decides on few samples)."""
    if planned.odds is not None:
        return planned.odds.p_both >= constraints.confidence
    return all(meets(planned.prediction, constraints))


def _fewest_instances(problem: Problem, chosen: Plan) -> Plan:
    """Return `chosen` with as few instances as keep every stage's waves, without growing later than at the start."""
    counts: list[int] = []
    for stage, choice in zip(reversed(problem.stages), reversed(chosen.stages), strict=True):
        gpus = choice.gpus_per_trial
        num_waves = -(-stage.trials // slots(choice.instances, problem.offer.gpus, gpus))
        needed = least_instances(-(-stage.trials // num_waves), problem.offer.gpus, gpus)
        counts.append(max(needed, counts[-1] if counts else 0))
    if problem.constant:
        counts = [counts[-1]] * len(counts)
    return Plan(
        stages=tuple(
            StagePlan(instances=count, gpus_per_trial=choice.gpus_per_trial)
            for count, choice in zip(reversed(counts), chosen.stages, strict=True)
        )
    )


def _infeasible(problem: Problem, tables: _Tables) -> InfeasibleError:
    """Return the error that names the limit out of reach, and the nearest value within reach."""

    def solvable(box: Box, objective: Objective) -> FoundPlan:
        found = _best_of(tables, box, objective, problem.constant)
        assert found is not None, "one limit alone, or none, that can be kept leaves a plan"
        return found[1]

    box = problem.box
    return unreachable(
        box,
        solvable(Box(), "min_time").time_s,
        solvable(Box(), "min_cost").cost_usd,
        lambda: (
            solvable(Box(time_s=box.time_s), "min_cost").cost_usd,
            solvable(Box(cost_usd=box.cost_usd), "min_time").time_s,
        ),
    )
