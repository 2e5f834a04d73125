"""Searching for a plan: the cheapest (or the fastest) within a deadline and a budget, or why there is none.

It words the problem for the solver and the answer for the user; the search itself is `rubberband.planner.solver`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from rubberband.errors import InfeasibleError, InputError
from rubberband.planner import risk
from rubberband.planner.labels import COST_TOLERANCE_USD, TIME_TOLERANCE_S
from rubberband.planner.model import MeanCost, least_instances, predict
from rubberband.planner.policies import Tables, best_of, box_of, check_stages, family, least
from rubberband.planner.sampling import varies
from rubberband.planner.solver import Box, FoundPlan, Objective, pareto
from rubberband.planner.table import StageTable, build_table, holding_is_free
from rubberband.planner.wording import too_dear, too_late, too_much_at_once
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
    """The best plan of a job (or of the rest of one, with the instances `held` now) on an offer, and its prediction.

    `optimal` is exact where nothing varies: no plan within the constraints has a lower cost (RubberBand §4.3 asks for
    it and approximates it). `static` is the paper's baseline: the cheapest number of instances held through all
    stages, with the best GPUs per trial in each. `naive_elastic` is the other one (§6): the cheapest plan with the
    same GPUs per trial in every stage. `greedy` is the paper's Algorithm 2. A plan whose JCT equals the deadline is
    feasible. Ties on cost go to the shorter JCT, then to fewer instances, then to fewer GPUs; with `min_time`, ties on
    JCT go to the lower cost.

    Where times vary, cost and time are means (times within 0.1 % of each other are a tie), and the plan keeps deadline
    and budget with a probability of `constraints.confidence` (`rubberband.planner.risk`); `seed` makes the samples the
    same again. `speeds` are those of the trials that go on, where the rest of a job is planned.

    Raises InfeasibleError if no plan of the policy meets the constraints, and InputError if none can exist.
    """
    check_stages(stages)
    if policy == "greedy":
        return _greedy(stages, profile, offer, constraints, held, seed)
    if varies(profile, offer, speeds):
        return risk.plan(stages, profile, offer, constraints, policy, objective, held=held, seed=seed, speeds=speeds)
    tables = _tables(stages, profile, offer, constraints, policy, held)
    found = _certain(stages, profile, offer, constraints, policy, objective, held, tables)
    if found is None:
        raise _infeasible(tables, constraints, policy == "static")
    return found


def plan_or_none(
    stages: Sequence[Stage],
    profile: Profile,
    offer: Offer,
    constraints: PlanningConstraints,
    policy: Policy = "optimal",
    objective: Objective = "min_cost",
    *,
    seed: int = 0,
) -> Planned | None:
    """What `plan` finds, without saying why there is nothing where nothing varies: for searches that try many."""
    if policy == "greedy" or varies(profile, offer):
        try:
            return plan(stages, profile, offer, constraints, policy, objective, seed=seed)
        except InfeasibleError:
            return None
    tables = _tables(stages, profile, offer, constraints, policy, ())
    return _certain(stages, profile, offer, constraints, policy, objective, (), tables)


def _tables(
    stages: Sequence[Stage],
    profile: Profile,
    offer: Offer,
    constraints: PlanningConstraints,
    policy: Policy,
    held: Sequence[Cohort],
) -> Tables:
    searches = family(policy, profile, offer, constraints)
    if held:
        built = [build_table(stages, profile, offer, limits, held) for limits in searches]
        return Tables(built.__getitem__, [(-math.inf, -math.inf)] * len(built))
    unlimited = [replace(limits, deadline_s=None, max_cost_usd=None, confidence=0.95) for limits in searches]
    return Tables(
        lambda at: _table(tuple(stages), profile, offer, unlimited[at]),
        [least(stages, profile, offer, limits) for limits in unlimited] if len(unlimited) > 1 else [(0.0, 0.0)],
    )


@lru_cache(maxsize=KEPT_TABLES)
def _table(stages: tuple[Stage, ...], profile: Profile, offer: Offer, limits: PlanningConstraints) -> StageTable:
    """The table of a job is the same whatever its deadline and budget, which are what is mostly asked about anew."""
    return build_table(stages, profile, offer, limits)


def _certain(
    stages: Sequence[Stage],
    profile: Profile,
    offer: Offer,
    constraints: PlanningConstraints,
    policy: Policy,
    objective: Objective,
    held: Sequence[Cohort],
    tables: Tables,
) -> Planned | None:
    found = best_of(tables, box_of(constraints), objective, constant=policy == "static")
    if found is None:
        return None
    table, solution = found
    chosen = table.plan(solution.path)
    if holding_is_free(offer):
        chosen = _fewest_instances(stages, chosen, offer, policy == "static")
    return Planned(plan=chosen, prediction=predict(stages, chosen, profile, offer, held))


def _greedy(
    stages: Sequence[Stage],
    profile: Profile,
    offer: Offer,
    constraints: PlanningConstraints,
    held: Sequence[Cohort],
    seed: int,
) -> Planned:
    """Algorithm 2, with every candidate predicted by our model (or, where times vary, by few samples)."""
    from rubberband.planner.paper import greedy

    if held:
        raise InputError("policy greedy starts from nothing: it cannot plan the rest of a job; use optimal")
    evaluate = risk.evaluator(stages, profile, offer, constraints, seed=seed)
    known = evaluate.figures if isinstance(evaluate, MeanCost) else None
    chosen = greedy(stages, profile, offer, constraints, evaluate=evaluate, known=known)
    if chosen is None:
        nearest = plan(stages, profile, offer, constraints, "static", seed=seed)  # raises, with the reason
        raise InfeasibleError(
            "greedy finds no plan that meets the constraints, though there is one; use policy optimal",
            shortest_jct_s=nearest.prediction.jct_s,
            cheapest_usd=nearest.prediction.cost_usd,
        )
    return risk.planned(stages, chosen, profile, offer, constraints, seed=seed)


def frontier(
    stages: Sequence[Stage],
    profile: Profile,
    offer: Offer,
    constraints: PlanningConstraints,
    policy: Policy = "optimal",
    *,
    seed: int = 0,
) -> list[tuple[float, float]]:
    """(jct_s, cost_usd) of every plan within the constraints that no other beats on both, fastest first.

    Exact where nothing varies; else the JCT that is kept with `constraints.confidence` and the mean cost, of plans
    near the frontier. `policy` is optimal or static.
    Raises InputError if no plan can exist; the list is empty if none meets the constraints.
    """
    check_stages(stages)
    constant = policy == "static"
    if varies(profile, offer):
        return risk.frontier(stages, profile, offer, constraints, constant=constant, seed=seed)
    table = build_table(stages, profile, offer, constraints)
    points = pareto(table, box_of(constraints), constant=constant)
    return [(point.time_s, point.cost_usd) for point in points]


def meets(prediction: Prediction, constraints: PlanningConstraints) -> tuple[bool, bool]:
    """Whether a prediction keeps the deadline and the budget, each up to the rounding of floats."""
    box = box_of(constraints)
    return (
        prediction.jct_s <= box.time_s + TIME_TOLERANCE_S,
        prediction.cost_usd <= box.cost_usd + COST_TOLERANCE_USD,
    )


def _fewest_instances(stages: Sequence[Stage], chosen: Plan, offer: Offer, constant: bool) -> Plan:
    """`chosen` with as few instances as keep every stage's waves, without growing later than at the start."""
    counts: list[int] = []
    for stage, choice in zip(reversed(stages), reversed(chosen.stages), strict=True):
        gpus = choice.gpus_per_trial
        num_waves = -(-stage.trials // slots(choice.instances, offer.gpus, gpus))
        needed = least_instances(-(-stage.trials // num_waves), offer.gpus, gpus)
        counts.append(max(needed, counts[-1] if counts else 0))
    if constant:
        counts = [counts[-1]] * len(counts)
    return Plan(
        stages=tuple(
            StagePlan(instances=count, gpus_per_trial=choice.gpus_per_trial)
            for count, choice in zip(reversed(counts), chosen.stages, strict=True)
        )
    )


def infeasible(constraints: PlanningConstraints, shortest_s: float, cheapest_usd: float) -> InfeasibleError:
    """The error for a deadline that is out of reach, with what is not."""
    obstacle, advice = too_late(box_of(constraints), shortest_s)
    return InfeasibleError(obstacle, advice=advice, shortest_jct_s=shortest_s, cheapest_usd=cheapest_usd)


def _infeasible(tables: Tables, constraints: PlanningConstraints, constant: bool) -> InfeasibleError:
    """The error that names what is out of reach and the nearest value that is not."""
    box = box_of(constraints)
    shortest_s = _solvable(tables, Box(), "min_time", constant).time_s
    cheapest_usd = _solvable(tables, Box(), "min_cost", constant).cost_usd
    if shortest_s > box.time_s + TIME_TOLERANCE_S:
        words = too_late(box, shortest_s)
    elif cheapest_usd > box.cost_usd + COST_TOLERANCE_USD:
        words = too_dear(box, cheapest_usd)
    else:
        in_time_usd = _solvable(tables, Box(time_s=box.time_s), "min_cost", constant).cost_usd
        in_budget_s = _solvable(tables, Box(cost_usd=box.cost_usd), "min_time", constant).time_s
        words = too_much_at_once(box, in_time_usd, in_budget_s)
    return InfeasibleError(words[0], advice=words[1], shortest_jct_s=shortest_s, cheapest_usd=cheapest_usd)


def _solvable(tables: Tables, box: Box, objective: Objective, constant: bool) -> FoundPlan:
    found = best_of(tables, box, objective, constant=constant)
    assert found is not None, "one limit alone, or none, that can be kept leaves a plan"
    return found[1]
