"""Runs a script of W&B as a trial, with the parameters in `wandb.config` and an iteration at each log of the metric.

`python -m rubberband.wandb_run val_loss '{"lr": 0.1}' train.py …`: the script is started as a sweep's agent starts it.
"""

from __future__ import annotations

import ast
import json
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rubberband.executor.training.reporting import report


def main(words: Sequence[str]) -> None:
    """Run a script with the metric and the parameters that come before it."""
    metric, parameters, *script = words
    try:
        config = json.loads(parameters)
    except ValueError:
        config = ast.literal_eval(parameters)  # a nested parameter is written as Python writes it
    is_known = "WANDB_API_KEY" in os.environ or "wandb" in _logins()
    os.environ.setdefault("WANDB_MODE", "online" if is_known else "offline")
    import wandb

    _follow(wandb, metric, config)
    is_module = script[0] == "-m"
    sys.argv = script[is_module:]
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(script[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(script[0]))
        runpy.run_path(script[0], run_name="__main__")


def _logins() -> str:
    """Return the file in which `wandb login` keeps its key; empty without any."""
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    return path.read_text(errors="replace") if path.is_file() else ""


def _follow(wandb: Any, metric: str, config: Mapping[str, Any]) -> None:
    """Let each run of W&B have the parameters, and report what it logs with the metric."""
    start = wandb.init

    def init(*args: Any, **options: Any) -> Any:
        run = start(*args, **options)
        run.config.update(dict(config), allow_val_change=True)
        write = run.log

        def log(data: Mapping[str, Any], *more: Any, **others: Any) -> None:
            write(data, *more, **others)
            if metric in data:
                report({name: number for name, value in data.items() if (number := _number(value)) is not None})

        run.log = wandb.log = log
        return run

    wandb.init = init


def _number(value: Any) -> float | None:
    """Return a logged value as a number; None for an image, a table or a text."""
    if isinstance(value, bool | int | float):
        return float(value)
    try:
        return float(value.item())
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None


if __name__ == "__main__":
    main(sys.argv[1:])
