"""From what user code calls metrics to finite floats."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Mapping
from numbers import Number
from typing import Any

from rubberband.executor.training.failures import TrialFailure, one_line, printable
from rubberband.units import shown

MAX_METRICS = 1000
"""In a report."""
MAX_NAME_LENGTH = 200
"""Of a metric, in characters."""
MOST_TOLD = 20
"""Metrics that an error names."""


def clean_metrics(reported: Any, metric: str) -> dict[str, float]:
    """The numbers among the reported metrics, as floats; `metric` must be one of them, and finite.

    Booleans, integers and scalars of NumPy and torch count as numbers. Other values, and other metrics that are not
    finite, are left out: only `metric` decides about the trial.

    Raises TrialFailure: no_metric, not_a_number (one that is too large for a float, too), or raised (too many metrics,
    or too long a name).
    """
    if not isinstance(reported, Mapping):
        raise TrialFailure(
            "no_metric", f"the trial reported {_kind(reported)} where a mapping of metric names to numbers is needed"
        )
    _check_names(reported)
    if metric not in reported:
        raise TrialFailure("no_metric", _missing(metric, [str(name) for name in reported]))
    floats = {printable(str(name)): _named_float(str(name), value) for name, value in reported.items()}
    value = floats[printable(metric)]
    if value is None:
        raise TrialFailure("no_metric", f"the metric {metric!r} is {_kind(reported[metric])}, which is not a number")
    if not math.isfinite(value):
        raise TrialFailure("not_a_number", f"the metric {metric!r} is {value}")
    return {name: number for name, number in floats.items() if number is not None and math.isfinite(number)}


def _check_names(reported: Mapping[Any, Any]) -> None:
    for count, name in enumerate(map(str, reported), start=1):
        if len(name) > MAX_NAME_LENGTH:
            raise TrialFailure(
                "raised",
                f"the metric {shown(name)} has a name of {len(name):,} characters; {MAX_NAME_LENGTH} are allowed: "
                f"shorten it",
            )
        if count > MAX_METRICS:
            raise TrialFailure(
                "raised",
                f"the trial reported {len(reported):,} metrics, {shown(name)} among them; {MAX_METRICS:,} are allowed "
                f"in a report: leave some out",
            )


def _named_float(name: str, value: Any) -> float | None:
    """The number, if it is one. Raises TrialFailure, naming the metric, for one that no float can hold."""
    try:
        return to_float(value)
    except OverflowError:
        raise TrialFailure(
            "not_a_number",
            f"the metric {shown(name)} is too large for a float ({sys.float_info.max:.1e} at most); leave it out, or "
            f"report its logarithm",
        ) from None
    except (ArithmeticError, TypeError, ValueError, RuntimeError) as error:
        raise TrialFailure(
            "not_a_number", f"the metric {shown(name)} cannot be made a float ({one_line(error)}); leave it out"
        ) from error


def to_float(value: Any) -> float | None:
    """A number, or a NumPy or torch value that holds a single one, as a float; None for anything else.

    Raises OverflowError, and whatever else `float` does.
    """
    if hasattr(value, "item") and getattr(value, "size", None) is not None:
        try:
            value = value.item()
        except (ValueError, RuntimeError):
            return None
    if isinstance(value, complex) or not isinstance(value, Number):
        return None
    original: Any = value
    number = float(original)
    if math.isinf(number) and original != number:  # of decimals and long doubles, that is how it is told
        raise OverflowError
    return number


def _missing(metric: str, reported: list[str]) -> str:
    names = ", ".join(repr(name) for name in sorted(reported)[:MOST_TOLD]) or "no metrics"
    names += f" and {len(reported) - MOST_TOLD:,} more" if len(reported) > MOST_TOLD else ""
    nearest = difflib.get_close_matches(metric, reported, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"the metric {metric!r} is missing; the trial reported {names}{hint}"


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a value of type {type(value).__name__}"
