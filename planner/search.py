"""Searching for a plan: the cheapest (or the fastest) within a deadline and a budget, or why there is none.

It words the problem for the solver and the answer for the user; the search itself is `rubberband.planner.solver`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from rubberband.errors import InfeasibleError, InputError
from rubberband.offer import Offer, slots
from rubberband.plan import Constraints, Plan, Planned, Prediction, Stage, StagePlan
from rubberband.planner.labels import COST_TOLERANCE_USD, TIME_TOLERANCE_S
from rubberband.planner.model import least_instances, predict
from rubberband.planner.solver import Box, Found, Objective, pareto, solve
from rubberband.planner.table import Table, build_table, holding_is_free
from rubberband.profile import Profile
from rubberband.units import format_duration, format_usd

Policy = Literal["optimal", "static"]


def plan(
    stages: Sequence[Stage],
    profile: Profile,
    offer: Offer,
    constraints: Constraints,
    policy: Policy = "optimal",
    objective: Objective = "min_cost",
) -> Planned:
    """The best plan of a job on an offer, and its prediction.

    `optimal` is exact: no plan within the constraints has a lower cost (RubberBand §4.3 asks for it and approximates
    it). `static` is the paper's baseline: the cheapest number of instances held through all stages, with the best
    GPUs per trial in each. A plan whose JCT equals the deadline is feasible. Ties on cost go to the shorter JCT, then
    to fewer instances, then to fewer GPUs; with `min_time`, ties on JCT go to the lower cost.

    Raises InfeasibleError if no plan of the policy meets the constraints, and InputError if none can exist.
    """
    _check_stages(stages)
    table = build_table(stages, profile, offer, constraints)
    constant = policy == "static"
    found = solve(table, _box(constraints), objective, constant=constant)
    if found is None:
        raise _infeasible(table, constraints, constant)
    chosen = table.plan(found.path)
    if holding_is_free(offer):
        chosen = _fewest_instances(stages, chosen, offer, constant)
    return Planned(plan=chosen, prediction=predict(stages, chosen, profile, offer))


def frontier(
    stages: Sequence[Stage], profile: Profile, offer: Offer, constraints: Constraints
) -> list[tuple[float, float]]:
    """(jct_s, cost_usd) of every plan within the constraints that no other beats on both, fastest first.

    Exact, and dearer than `plan`, which needs to look near one point of it only.
    Raises InputError if no plan can exist; the list is empty if none meets the constraints.
    """
    _check_stages(stages)
    table = build_table(stages, profile, offer, constraints)
    return [(point.time_s, point.cost_usd) for point in pareto(table, _box(constraints))]


def meets(prediction: Prediction, constraints: Constraints) -> tuple[bool, bool]:
    """Whether a prediction keeps the deadline and the budget, each up to the rounding of floats."""
    box = _box(constraints)
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


def _check_stages(stages: Sequence[Stage]) -> None:
    if not stages:
        raise InputError("the job has 0 stages; give it at least 1")
    for index, stage in enumerate(stages):
        if stage.trials < 1 or stage.iterations < 1:
            raise InputError(
                f"stage {index} has trials={stage.trials} and iterations={stage.iterations}; both must be at least 1"
            )


def _box(constraints: Constraints) -> Box:
    return Box(
        time_s=math.inf if constraints.deadline_s is None else constraints.deadline_s,
        cost_usd=math.inf if constraints.max_cost_usd is None else constraints.max_cost_usd,
    )


def _infeasible(table: Table, constraints: Constraints, constant: bool) -> InfeasibleError:
    """The error that names what is out of reach and the nearest value that is not."""
    box = _box(constraints)
    shortest = _solvable(table, Box(), "min_time", constant)
    cheapest = _solvable(table, Box(), "min_cost", constant)
    if shortest.time_s > box.time_s + TIME_TOLERANCE_S:
        message = _too_late(box, shortest.time_s)
    elif cheapest.cost_usd > box.cost_usd + COST_TOLERANCE_USD:
        message = _too_dear(box, cheapest.cost_usd)
    else:
        message = _too_much_at_once(table, box, constant)
    return InfeasibleError(message, shortest_jct_s=shortest.time_s, cheapest_usd=cheapest.cost_usd)


def _solvable(table: Table, box: Box, objective: Objective, constant: bool) -> Found:
    found = solve(table, box, objective, constant=constant)
    assert found is not None, "one limit alone, or none, that can be kept leaves a plan"
    return found


def _too_late(box: Box, shortest_s: float) -> str:
    return (
        f"deadline {format_duration(box.time_s)} cannot be met: the shortest plan takes {_duration_up(shortest_s)}; "
        f"raise the deadline to {_duration_up(shortest_s)}"
    )


def _too_dear(box: Box, cheapest_usd: float) -> str:
    return (
        f"max_cost {format_usd(box.cost_usd)} cannot be kept: the cheapest plan costs {_usd_up(cheapest_usd)}; "
        f"raise max_cost to {_usd_up(cheapest_usd)}"
    )


def _too_much_at_once(table: Table, box: Box, constant: bool) -> str:
    in_time = _solvable(table, Box(time_s=box.time_s), "min_cost", constant)
    in_budget = _solvable(table, Box(cost_usd=box.cost_usd), "min_time", constant)
    return (
        f"deadline {format_duration(box.time_s)} and max_cost {format_usd(box.cost_usd)} cannot both be kept: "
        f"the cheapest plan in time costs {_usd_up(in_time.cost_usd)} and the shortest plan for the money takes "
        f"{_duration_up(in_budget.time_s)}; raise max_cost to {_usd_up(in_time.cost_usd)}, "
        f"or the deadline to {_duration_up(in_budget.time_s)}"
    )


def _duration_up(seconds: float) -> str:
    """A duration as text, never rounded down: what the remedy names must be enough."""
    return format_duration(math.ceil(seconds - TIME_TOLERANCE_S))


def _usd_up(amount_usd: float) -> str:
    """An amount as text, never rounded down."""
    unit_usd = 0.01 if amount_usd >= 0.1 else 0.0001
    return format_usd(math.ceil((amount_usd - COST_TOLERANCE_USD) / unit_usd) * unit_usd)
