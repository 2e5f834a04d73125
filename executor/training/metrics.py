"""From what user code calls metrics to finite floats."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from numbers import Number
from typing import Any

from rubberband.executor.training.failures import TrialFailure, printable


def clean_metrics(reported: Any, metric: str) -> dict[str, float]:
    """The numbers among the reported metrics, as floats; `metric` must be one of them, and finite.

    Booleans, integers and scalars of NumPy and torch count as numbers. Other values, and other metrics that are not
    finite, are left out: only `metric` decides about the trial.

    Raises TrialFailure: no_metric, or not_a_number.
    """
    if not isinstance(reported, Mapping):
        raise TrialFailure(
            "no_metric", f"the trial reported {_kind(reported)} where a mapping of metric names to numbers is needed"
        )
    if metric not in reported:
        raise TrialFailure("no_metric", _missing(metric, [str(name) for name in reported]))
    value = to_float(reported[metric])
    if value is None:
        raise TrialFailure("no_metric", f"the metric {metric!r} is {_kind(reported[metric])}, which is not a number")
    if not math.isfinite(value):
        raise TrialFailure("not_a_number", f"the metric {metric!r} is {value}")
    floats = {printable(str(name)): to_float(value) for name, value in reported.items()}
    return {name: number for name, number in floats.items() if number is not None and math.isfinite(number)}


def to_float(value: Any) -> float | None:
    """A number, or a NumPy or torch value that holds a single one, as a float; None for anything else."""
    if hasattr(value, "item") and getattr(value, "size", None) is not None:
        try:
            value = value.item()
        except (ValueError, RuntimeError):
            return None
    if isinstance(value, complex) or not isinstance(value, Number):
        return None
    return float(value)  # type: ignore[arg-type]


def _missing(metric: str, reported: list[str]) -> str:
    names = ", ".join(repr(name) for name in sorted(reported)) or "no metrics"
    nearest = difflib.get_close_matches(metric, reported, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"the metric {metric!r} is missing; the trial reported {names}{hint}"


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a value of type {type(value).__name__}"
