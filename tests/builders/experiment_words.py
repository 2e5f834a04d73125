"""An experiment file with most of its words, and small experiments that tests alter."""

from __future__ import annotations

import copy
from typing import Any

EXAMPLE = """\
version: 1
name: digits-sha                       # 1 to 63 of a-z, 0-9 and - (not first)
entrypoint: examples.digits:DigitsTrial   # module:attribute; needed to run, not to estimate
search:
  space:                               # Ray Tune's types; a bare value is a constant
    lr: {type: loguniform, lower: 1e-4, upper: 1e-1}
    momentum: {type: uniform, lower: 0.5, upper: 0.99}
    hidden: {type: choice, values: [32, 64]}
  scheduler: {type: sha, num_samples: 32, grace_period: 1, max_t: 50, reduction_factor: 3}
           # {type: hyperband, max_t: 81, reduction_factor: 3} | {type: stages, stages: [{trials: 32, iterations: 1}]}
  sampler: {type: random, seed: 7}     # random | grid
  metric: accuracy
  mode: max
constraints:
  deadline: 20m
  max_cost: 40
  confidence: 0.95                     # P(deadline and budget hold) that a plan must reach when the profile is noisy
  objective: min_cost                  # min_cost | min_time
resources:
  provider: local                      # local | aws | virtual
  region: us-east-1
  instance_type: p3.8xlarge            # or instance_types: [p3.2xlarge, p3.8xlarge]: the planner chooses one
  market: on_demand                    # on_demand | spot
  max_instances: 16
  gpus_per_trial: {min: 1, max: 8}
  # what the catalogue or a measurement would say, overridden:
  gpus_per_instance: 4
  price_per_hour: 12.24
  billing: per_instance                # per_instance | per_function
  minimum_billed: 60s
  provision_delay: 15s                 # a duration | {mean: 30s, cv: 0.5}
  init_delay: 15s
  dataset_gb: 0
  data_price_per_gb: 0
  head_price_per_hour: 0
profile:                               # inline, or a path to a file that `rubberband profile` wrote
  seconds_per_iteration: {1: 110, 2: 57, 4: 30, 8: 18, 16: 13, 32: 11}
  trial_startup: 2s
  trial_cv: 0.0
  iteration_cv: 0.0
batch: {policy: fixed}                 # fixed | goodput (see goodput.md)
"""

MINIMAL: dict[str, Any] = {
    "name": "small",
    "search": {
        "space": {"lr": {"type": "loguniform", "lower": 1e-4, "upper": 1e-1}},
        "scheduler": {"type": "sha", "num_samples": 8, "max_t": 9},
        "metric": "loss",
        "mode": "min",
    },
    "constraints": {"deadline": "20m"},
    "resources": {"price_per_hour": 3.6},
    "profile": {"seconds_per_iteration": {1: 10}},
}


def words(**changes: Any) -> dict[str, Any]:
    """The minimal experiment with changes; `constraints__deadline=...` reaches below."""
    document = copy.deepcopy(MINIMAL)
    for path, value in changes.items():
        *above, last = path.split("__")
        target = document
        for key in above:
            target = target.setdefault(key, {})
        target[last] = value
    return document
