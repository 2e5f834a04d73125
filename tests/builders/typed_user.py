"""A user's script for a type checker, which finds a fault in each line that says so, and no other."""

from typing import Any

import rubberband
from rubberband.types import AshaDict, SearchDict

search: SearchDict = {
    "space": {"lr": rubberband.loguniform(1e-4, 1e-1), "x": {"type": "uniform", "lower": 0, "upper": 1}, "fixed": 3},
    "scheduler": {"type": "sha", "num_samples": 8, "max_t": 4, "reduction_factor": 2},
    "metric": "loss",
    "mode": "min",
}


def tune() -> None:
    """Never runs: only its types are looked at."""
    words: dict[str, Any] = {"name": "first", "search": search}
    experiment = rubberband.Experiment(name="first", search=search, constraints={"deadline": 600, "max_cost": "5 USD"})
    result = rubberband.tune("module:trial", search=search, resources={"gpus_per_trial": {"sizes": [1, 2]}})
    print(result.best_config["lr"])
    profile: dict[int, float] = {1: 10, 2: 6.5}
    rubberband.tune("module:trial", **words, track=["csv", {"type": "mlflow"}])
    rubberband.tune("module:trial", search=search, profile={"seconds_per_iteration": profile})
    print(rubberband.estimate(experiment=experiment).feasible)

    rubberband.tune("module:trial", serach=search)  # fault
    rubberband.unifrom(0.5, 0.95)  # fault
    rubberband.tune("module:trial", constraints={"maxcost": 3})  # fault
    rubberband.tune("module:trial", search={"space": {}, "metric": "loss", "mode": "minimum"})  # fault
    scheduler: AshaDict = {"type": "sha", "max_t": 4}  # fault
    rubberband.estimate("module:trial", resources={"provider": "aws", "max_instance": 3})  # fault
    rubberband.Experiment(name="first", search=search, constraint={"deadline": "2h"})  # fault
    print(scheduler, result.best.metrics)  # fault
