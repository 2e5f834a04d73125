"""The paper's Algorithm 1, from `examples/paper/dag.py`, which is loaded by its path: the folder is no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_PATH = Path(__file__).parents[2] / "examples" / "paper" / "dag.py"
_SPEC = importlib.util.spec_from_file_location("paper_dag", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
_MODULE = sys.modules[_SPEC.name] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)

Sorted, build_dag, literal_plan, sampled, simulate = (
    getattr(_MODULE, name) for name in ("Sorted", "build_dag", "literal_plan", "sampled", "simulate")
)
