"""What papers have and the product does not use: from `examples/paper`, by path, as the folder is no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def _loaded(name: str) -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "paper" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"paper_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Arima = _loaded("predictors").Arima
