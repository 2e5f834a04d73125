"""Axes of parameters for the charts of configurations: linear, logarithmic, or categories, from 0 to 1. Pure."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rubberband.executor.result import TrialResult
from rubberband.views.charts import decades
from rubberband.views.words import number, printable, setting

_MOST_CATEGORIES = 12
_FEW_NUMBERS = 5
"""Different numbers that count as categories if there are many trials, and no domain is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Scale of a parameter or a metric."""

    name: str
    place: Callable[[Any], float | None]
    """Value -> 0 to 1; None for a value that the axis cannot show."""
    ticks: Sequence[tuple[float, str]]
    kind: Literal["linear", "log", "category"] = "linear"
    num_categories: int = 0
    has_absent: bool = False
    """Whether the place 0 is that of trials without the parameter, and its values begin at `ABSENT_SHARE`."""


def parameters(trials: Sequence[TrialResult]) -> dict[str, bool]:
    """Return parameter -> whether it differs between trials, in the order of the file."""
    seen: dict[str, set[str]] = {}
    for trial in trials:
        for name, value in trial.configuration.items():
            if len(values := seen.setdefault(name, set())) < 2:
                values.add(setting(value))
    return {name: len(values) > 1 for name, values in seen.items()}


ABSENT = object()
"""Stands for a parameter that a trial does not have, as it belongs to another option of a choice."""


def domains_of(space: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameter -> domain in the words of the file; of those of the options of a choice, the first one."""
    found: dict[str, Any] = {}
    for name, domain in space.items():
        found.setdefault(name, domain)
        options = domain.get("values", ()) if isinstance(domain, Mapping) else ()
        for option in options:
            if isinstance(option, Mapping) and isinstance(option.get("space"), Mapping):
                found = {**domains_of(option["space"]), **found}
    return found


def axis_of(name: str, values: Sequence[Any], domain: Any) -> Axis:
    """Return the axis of a parameter; where some trials do not have it, "-" is below its values."""
    known = [value for value in values if value is not ABSENT]
    axis = _known_axis(name, known, domain)
    return axis if len(known) == len(values) else _with_absent(axis)


def _with_absent(axis: Axis) -> Axis:
    def place(value: Any) -> float | None:
        if value is ABSENT:
            return 0.0
        at = axis.place(value)
        return None if at is None else ABSENT_SHARE + (1.0 - ABSENT_SHARE) * at

    ticks = [(ABSENT_SHARE + (1.0 - ABSENT_SHARE) * at, text) for at, text in axis.ticks]
    return replace(axis, place=place, ticks=[(0.0, "-"), *ticks], has_absent=True)


ABSENT_SHARE = 0.12
"""Share of an axis below its values, for trials that do not have the parameter."""


def _known_axis(name: str, values: Sequence[Any], domain: Any) -> Axis:
    kind = domain.get("type", "") if isinstance(domain, Mapping) else ""
    if kind in ("choice", "grid") or not all(is_number(value) for value in values):
        options = domain.get("values", ()) if kind in ("choice", "grid") else ()
        named = [each["name"] if isinstance(each, Mapping) and "space" in each else each for each in options]
        return _categories(name, [*named, *values])
    if not kind and len(set(values)) <= _FEW_NUMBERS <= len(values) / 4:  # as a choice of numbers has
        return _categories(name, sorted(values))
    bounds = [domain[end] for end in ("lower", "upper") if kind and is_number(domain.get(end))]
    every = [*values, *bounds]
    log = "log" in kind if kind else min(every) > 0 and max(every) >= 100 * min(every)
    return number_axis(name, every, log=log and min(every) > 0)


def is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def number_axis(name: str, values: Sequence[float], *, log: bool) -> Axis:
    """Return an axis from the least to the greatest of `values`."""
    scale: Callable[[float], float] = math.log10 if log else float
    low, high = scale(min(values)), scale(max(values))

    def place(value: Any) -> float | None:
        if not is_number(value) or (log and value <= 0):
            return None
        return 0.5 if high == low else (scale(value) - low) / (high - low)

    ticks = _powers(low, high) if log else _round(low, high)
    kind: Literal["linear", "log"] = "log" if log else "linear"
    return Axis(name=name, place=place, ticks=[(place(tick) or 0.0, number(tick)) for tick in ticks], kind=kind)


def _powers(low: float, high: float) -> list[float]:
    """Return powers of ten between two logarithms, also 2 and 5 times these if there are few."""
    inside = [tick for tick in decades(low, high, fine=2) if low - 1e-9 <= math.log10(tick) <= high + 1e-9]
    return inside[:: 1 + len(inside) // 9] or [10.0**low, 10.0**high]


def _round(low: float, high: float) -> list[float]:
    """Return about five round numbers from `low` to `high`."""
    if high <= low:
        return [low]
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(count * step, 12) for count in range(first, math.floor(high / step + 1e-9) + 1)]


def _categories(name: str, values: Sequence[Any]) -> Axis:
    known = list(dict.fromkeys(setting(value) for value in values))
    places = {text: (index + 0.5) / len(known) for index, text in enumerate(known)}
    ticks = [(places[text], text) for text in known[:: math.ceil(len(known) / _MOST_CATEGORIES)]]
    return Axis(
        name=name,
        place=lambda value: places.get(setting(value)),
        ticks=ticks,
        kind="category",
        num_categories=len(known),
    )


def short_label(text: str, most: int = 18) -> str:
    """Return text for a chart, cut to `most` letters and free of markup."""
    whole = printable(text)
    return html.escape(whole if len(whole) <= most else whole[: most - 1] + "…")
