"""Metrics that trials report: the numbers among them, as floats, and what is refused."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from numbers import Number
from typing import Any

from rubberband.executor.training.failures import TrialFailure, one_line, printable, refused
from rubberband.units import did_you_mean, shown

MAX_METRICS = 1000
"""Per report."""
MAX_NAME_LENGTH = 200
"""Characters in the name of a metric."""
MOST_NAMED = 20
_OF_TRAINING = re.compile(r"loss|grad|norm", re.IGNORECASE)
"""Metrics that are finite unless training has diverged."""
_OF_EVALUATION = re.compile(r"(?<![a-z])(val|valid|validation|eval|dev|test)(?![a-z])", re.IGNORECASE)
_INFINITE = (3.38e38, 3.41e38)
"""Around the largest numbers of bfloat16 and float32, which `nan_to_num` puts in place of infinity."""


def clean_metrics(reported: Any, metric: str, *, is_last: bool = False) -> dict[str, float]:
    """Return the numbers among the reported metrics as floats; `metric` must be one of them, and finite.

    Booleans, integers and scalars of NumPy and torch count as numbers, but `metric` is no boolean, by which most trials
    would be equal. Other values, and other metrics that are not finite, are left out: only `metric` decides.

    Some libraries and programs leave out training losses that are not finite, and report 0, or the mean of those
    before. So 0 is no result beside a loss or a gradient that is not finite. Nor is a training loss beside the loss of
    an evaluation that is NaN, or in the last iteration (`is_last`) beside such a gradient: before, it may be that of a
    single step, which a GradScaler has skipped.

    Raises TrialFailure: no_metric, not_a_number (also if too large for a float), or raised (too many metrics, or a
    name that is too long).
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
    if _is_boolean(reported[metric]):
        raise TrialFailure(
            "no_metric",
            f"the metric {metric!r} is {reported[metric]}, a boolean, which ranks no trials; report a number",
        )
    if not math.isfinite(value):
        raise TrialFailure("not_a_number", f"the metric {metric!r} is {value}")
    if _INFINITE[0] < abs(value) < _INFINITE[1] or abs(value) == sys.float_info.max:
        raise TrialFailure("not_a_number", f"the metric {metric!r} is {value:.3g}, which stands for infinity")
    if diverged := _diverged(metric, value, floats, is_last=is_last):
        raise TrialFailure(
            "not_a_number", f"the metric {metric!r} is {value:.6g} beside {diverged}: training has diverged"
        )
    return {name: number for name, number in floats.items() if number is not None and math.isfinite(number)}


def _diverged(metric: str, value: float, floats: Mapping[str, float | None], *, is_last: bool) -> str:
    """Return the metric by which training has diverged, as `grad_norm=nan`; empty without one."""
    is_trained = "loss" in metric.lower() and not _OF_EVALUATION.search(metric)
    for name, other in floats.items():
        if other is None or math.isfinite(other) or not _OF_TRAINING.search(name):
            continue
        is_evaluated = _OF_EVALUATION.search(name) is not None
        is_known = is_trained and math.isnan(other) and (is_evaluated or (is_last and "loss" not in name.lower()))
        if value == 0.0 or is_known:
            return f"{name}={other}"
    return ""


def _is_boolean(value: Any) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def _check_names(reported: Mapping[Any, Any]) -> None:
    for count, name in enumerate(map(str, reported), start=1):
        if len(name) > MAX_NAME_LENGTH:
            raise refused(
                f"the metric {shown(name)} has a name of {len(name):,} characters; {MAX_NAME_LENGTH} are allowed: "
                f"shorten it"
            )
        if count > MAX_METRICS:
            raise refused(
                f"the trial reported {len(reported):,} metrics, {shown(name)} among them; {MAX_METRICS:,} are allowed "
                f"in a report: leave some out"
            )


def _named_float(name: str, value: Any) -> float | None:
    """Return the value if it is a number. Raises TrialFailure for one that no float can hold."""
    try:
        return to_float(value)
    except (ArithmeticError, TypeError, ValueError, RuntimeError) as error:
        raise TrialFailure(
            "not_a_number", f"the metric {shown(name)} cannot be made a float ({one_line(error)}); leave it out"
        ) from error


def to_float(value: Any) -> float | None:
    """Return a number, or a NumPy or torch value that holds one, as a float; None for anything else.

    Raises OverflowError, and every error of `float`.
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
    if math.isinf(number) and original != number:  # decimals and long doubles do not raise it
        raise OverflowError("too large")
    return number


def _missing(metric: str, reported: list[str]) -> str:
    names = ", ".join(repr(name) for name in sorted(reported)[:MOST_NAMED]) or "no metrics"
    names += f" and {len(reported) - MOST_NAMED:,} more" if len(reported) > MOST_NAMED else ""
    return f"the metric {metric!r} is missing; the trial reported {names}{did_you_mean(metric, reported)}"


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a value of type {type(value).__name__}"
