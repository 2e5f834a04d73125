"""A parameter server and its workers, simulated, and by subsets: oracles for the planner's formulae.

The simulation is that of `examples/paper`, which is loaded by its path: the folder is no package.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

_PATH = Path(__file__).parents[2] / "examples" / "paper" / "parameter_server.py"
_SPEC = importlib.util.spec_from_file_location("paper_parameter_server", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
_MODULE = sys.modules[_SPEC.name] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)

simulated_throughputs, exponential, constant, gamma, first_come, hybrid = (
    getattr(_MODULE, name)
    for name in ("simulated_throughputs", "exponential", "constant", "gamma", "first_come", "hybrid")
)
Floats = npt.NDArray[np.float64]


def subset_throughputs(demands_s: Floats) -> Floats:
    """The same by mean value analysis over all 2^K subsets of the workers, of which some times may be 0."""
    workers = len(demands_s)
    queues = {frozenset[int](): np.zeros_like(demands_s[:, 1:])}
    found = np.zeros(workers)
    for size in range(1, workers + 1):
        for there in map(frozenset, itertools.combinations(range(workers), size)):
            queue = np.zeros_like(demands_s[:, 1:])
            for worker in there:
                waits_s = demands_s[worker, 1:] * (1.0 + queues[there - {worker}].sum(axis=0))
                found[worker] = 1.0 / (demands_s[worker, 0] + waits_s.sum())
                queue[worker] = found[worker] * waits_s
            queues[there] = queue
    return found
