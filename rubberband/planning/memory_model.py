"""The memory of configurations by a few that were measured: linear in each, with products."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod
from typing import Any

from rubberband.spec.samplers import extreme_values, leaves

LEAST, LEAST_RESIDENT = 0.02, 0.05
"""Share of the memory that a parameter must change to count. Resident memory differs by some percent between runs."""
_OFF = 0.1
"""Share by which a measured configuration may take more than the model says, at most."""
_MOST_PAIRS = 3
"""Pairs of parameters that are measured together: all of three parameters."""
_MOST_OPTIONS = 3
"""Other options of a parameter that are measured."""
_WITHOUT = re.compile(
    r"(^|_)(lr|alpha|beta|betas|eps|gamma|seed)\d?($|_)|rate|decay|momentum|dropout|warm|temperature|clip|smooth|schedul"
)
"""Names of parameters that hardly ever change the memory: they are measured together."""

Configuration = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """A configuration that was measured."""

    config: Configuration
    peak_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """Predicts the peak of a configuration. It is exact where one parameter, or all that count, were changed."""

    low: MemoryPoint
    """All numbers at their least values."""
    floor_bytes: float = 0.0
    """The least of any configuration: the memory before it is built."""
    slopes: Mapping[str, tuple[float, float]]
    """Number that counts -> its largest value, and the bytes more with it."""
    options: Sequence[tuple[str, Any, float]] = ()
    """Parameter, its option, and the bytes more with it."""
    pairs: Sequence[tuple[str, str, float]] = ()
    """Two numbers that count, and the bytes of both together beyond their sum: where they multiply each other most."""
    joint_bytes: float = 0.0
    """Bytes of all slopes together beyond these."""
    factor: float = 1.0

    def predict(self, config: Configuration) -> float:
        """Return the peak of a configuration in bytes."""
        low = self.low.config
        away = {  # 0 for the least value, 1 for the largest
            name: float(config.get(name, low[name]) - low[name]) / float(high - low[name])
            for name, (high, _) in self.slopes.items()
        }
        found: float = self.low.peak_bytes
        found += sum(more * away[name] for name, (_, more) in self.slopes.items())
        found += sum(more * away[one] * away[other] for one, other, more in self.pairs)
        found += self.joint_bytes * self._joint(away)
        found += sum(more for name, option, more in self.options if config.get(name) == option)
        return max(self.floor_bytes, self.factor * found)

    def _joint(self, away: Mapping[str, float]) -> float:
        """Return the share of `joint_bytes`: the product of all, or products of the pairs that were not measured."""
        known = {frozenset(pair[:2]) for pair in self.pairs}
        weights = {
            (one, other): abs(self.slopes[one][1] * self.slopes[other][1])
            for one, other in combinations(self.slopes, 2)
            if {one, other} not in known
        }
        if not weights:
            return prod(away.values())
        return sum(weight * away[one] * away[other] for (one, other), weight in weights.items()) / sum(weights.values())

    def holding(self, points: Iterable[MemoryPoint]) -> MemoryModel:
        """Return the model raised so that it predicts no measured configuration by more than a tenth too low."""
        ratios = [point.peak_bytes / self.predict(point.config) for point in points]
        return replace(self, factor=self.factor * max(1.0, *(ratio / (1.0 + _OFF) for ratio in ratios)))


class OutOfTime(Exception):
    """No further configuration can be measured."""


class Exploring:
    """Measures the fewest configurations that show which parameters change the memory, and by how much."""

    def __init__(
        self,
        first: MemoryPoint,
        space: Mapping[str, Any],
        measure: Callable[[Configuration], float],
        *,
        floor_bytes: float = 0.0,
        least: float = LEAST,
    ) -> None:
        """`measure` returns the peak of a configuration in bytes, or raises OutOfTime; `least`: see `LEAST`."""
        self._least = least
        self._first, self._measure, self._floor_bytes = first, measure, floor_bytes
        self.points = [first]
        self._ranges = dict[str, tuple[float, float]]()
        """Number -> its least and its largest value."""
        self._options = dict[str, Sequence[Any]]()
        for path, domain in leaves(space):
            name, values = path[0], extreme_values(domain)
            if len(path) > 1 or domain.sub_spaces or name not in first.config:
                continue
            if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
                if max(values) > min(values):
                    self._ranges[name] = float(min(values)), float(max(values))
            else:
                self._options[name] = [value for value in values if value != first.config[name]][:_MOST_OPTIONS]

    def largest(self) -> MemoryPoint:
        """Measure all numbers at their largest values together."""
        return self._at({name: self._value(name, high) for name, (_, high) in self._ranges.items()})

    def model(self) -> MemoryModel:
        """Return the model, once `largest` is measured. Raises OutOfTime."""
        high = {name: self._value(name, values[1]) for name, values in self._ranges.items()}
        low = self._low = self._at({name: self._value(name, values[0]) for name, values in self._ranges.items()})
        unlikely = [name for name in high if _WITHOUT.search(name.lower())]
        found = self._counting(unlikely, high)
        for name in high:
            if name not in unlikely:
                found |= self._counting([name], high)
        chosen = sorted(combinations(found, 2), key=lambda pair: -abs(found[pair[0]] * found[pair[1]]))[:_MOST_PAIRS]
        pairs, joint = [], 0.0
        for one, other in chosen:
            more = self._more({one: high[one], other: high[other]}, found)
            pairs.append((one, other, more - found[one] - found[other]))
        if len(found) > 2:
            all_of_them = self._more({name: high[name] for name in found}, found)
            joint = all_of_them - sum(found.values()) - sum(pair[2] for pair in pairs)
        options = [
            (name, option, self._at({**high, name: option}).peak_bytes - self._at(high).peak_bytes)
            for name, others in self._options.items()
            for option in others
        ]
        return MemoryModel(
            low=low,
            floor_bytes=self._floor_bytes,
            slopes={name: (high[name], more) for name, more in found.items()},
            options=options,
            pairs=pairs,
            joint_bytes=joint,
        ).holding(self.points)

    def _more(self, changes: Mapping[str, Any], like: Iterable[str] | None = None) -> float:
        return self._at({**self._low.config, **changes}, like).peak_bytes - self._low.peak_bytes

    def _value(self, name: str, value: float) -> float:
        return int(value) if isinstance(self._first.config[name], int) else value

    def _counting(self, names: Sequence[str], high: Mapping[str, float]) -> dict[str, float]:
        """Return those of the parameters that count, and the bytes more with each; halves of a group that counts."""
        if not names:
            return {}
        more = self._more({name: high[name] for name in names})
        if abs(more) <= self._least * self._low.peak_bytes:
            return {}
        if len(names) == 1:
            return {names[0]: more}
        half = len(names) // 2
        return self._counting(names[:half], high) | self._counting(names[half:], high)

    def _at(self, changes: Mapping[str, Any], like: Iterable[str] | None = None) -> MemoryPoint:
        """Return a measured configuration; one that is the same in the parameters `like` need not be measured."""
        config = {**self._first.config, **changes}
        for point in self.points:
            if all(point.config[name] == config[name] for name in (config if like is None else like)):
                return point
        self.points.append(point := MemoryPoint(config, self._measure(config)))
        return point
