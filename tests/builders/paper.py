"""What papers have and the product does not use; some from `examples/paper`, by path, as the folder is no package."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from rubberband.planner.dag import NUM_SAMPLES, simulate
from rubberband.planner.search import greedy
from rubberband.values.offer import Offer
from rubberband.values.plan import Plan, PlanningConstraints, Stage
from rubberband.values.profile import Profile


def _loaded(name: str) -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "paper" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"paper_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Arima = _loaded("predictors").Arima


def literal_plan(
    stages: Sequence[Stage],
    profile: Profile,
    offer: Offer,
    constraints: PlanningConstraints,
    *,
    num_samples: int = NUM_SAMPLES,
    seed: int = 0,
) -> Plan | None:
    """Return the paper's plan: Algorithm 2 on the means of Algorithm 1's samples, every plan with the same seed.

    None and errors as for `greedy`.
    """

    def evaluate(plan: Plan) -> tuple[float, float]:
        sampled = simulate(stages, plan, profile, offer, num_samples=num_samples, seed=seed)
        return float(sampled.jct_s.mean()), float(sampled.cost_usd.mean())

    return greedy(stages, profile, offer, constraints, evaluate=evaluate)
