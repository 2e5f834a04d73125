"""Think, purely: predicts what a plan takes and costs, and finds the cheapest one. No I/O, no clock.

Others import its names from here. Each is loaded when it is first used, so that a worker that balances a batch loads no
search; `balancing`, `goodput`, `queueing` and `sharing` are entrances of their own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rubberband.planner.asha_samples import simulated_beside
    from rubberband.planner.curves import LEAST_REPORTS, Chain, Curve, Rest, rest_of
    from rubberband.planner.dag import CriticalTask, SimulatedPlan, simulate_job
    from rubberband.planner.estimates import USER_PLAN, Estimate, Nearest, Option, estimate, estimate_plan, first_kept
    from rubberband.planner.exact.labels import COST_TOLERANCE_USD, TIME_TOLERANCE_S
    from rubberband.planner.exact.model import least_instances, predict, run_s
    from rubberband.planner.exact.solver import Box, Objective
    from rubberband.planner.noise.sampling import Draws, varies, without_noise
    from rubberband.planner.planning import Point, Replanned, method_of, plan, replan
    from rubberband.planner.problem import Batch, Infeasible, JobPlan, Lane, Problem, up_s, up_usd
    from rubberband.planner.reserve import SHORTEST_REACH_S, Reserve
    from rubberband.planner.search import keeps, meets

__all__ = [
    "COST_TOLERANCE_USD",
    "LEAST_REPORTS",
    "SHORTEST_REACH_S",
    "TIME_TOLERANCE_S",
    "USER_PLAN",
    "Batch",
    "Box",
    "Chain",
    "CriticalTask",
    "Curve",
    "Draws",
    "Estimate",
    "Infeasible",
    "JobPlan",
    "Lane",
    "Nearest",
    "Objective",
    "Option",
    "Point",
    "Problem",
    "Replanned",
    "Reserve",
    "Rest",
    "SimulatedPlan",
    "estimate",
    "estimate_plan",
    "first_kept",
    "keeps",
    "least_instances",
    "meets",
    "method_of",
    "plan",
    "predict",
    "replan",
    "rest_of",
    "run_s",
    "simulate_job",
    "simulated_beside",
    "up_s",
    "up_usd",
    "varies",
    "without_noise",
]

_MODULES = {
    "asha_samples": "simulated_beside",
    "curves": "LEAST_REPORTS Chain Curve Rest rest_of",
    "dag": "CriticalTask SimulatedPlan simulate_job",
    "estimates": "USER_PLAN Estimate Nearest Option estimate estimate_plan first_kept",
    "exact.labels": "COST_TOLERANCE_USD TIME_TOLERANCE_S",
    "exact.model": "least_instances predict run_s",
    "exact.solver": "Box Objective",
    "noise.sampling": "Draws varies without_noise",
    "planning": "Point Replanned method_of plan replan",
    "problem": "Batch Infeasible JobPlan Lane Problem up_s up_usd",
    "reserve": "SHORTEST_REACH_S Reserve",
    "search": "keeps meets",
}
"""Module -> the names of it that others use."""
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}


if not TYPE_CHECKING:  # or any name would be one to mypy and to editors

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        return value
