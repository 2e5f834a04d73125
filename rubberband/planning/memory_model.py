"""The memory of configurations by a few that were measured: linear in each, with products."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod
from typing import Any

from rubberband.spec.samplers import extreme_values, leaves

_LEAST = 0.02
"""Share of the memory that a parameter must change to count."""
_OFF = 0.1
"""Share by which a measured configuration may take more than the model says, at most."""
_MOST_PAIRS = 3
"""Pairs of parameters that are measured together: all of three parameters."""
_MOST_OPTIONS = 3
"""Other options of a parameter that are measured."""
_FAR = 2.0 / 3.0
"""A parameter below this part of its range is measured at its upper end, and else at its lower end."""
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

    first: MemoryPoint
    floor_bytes: float = 0.0
    """The least of any configuration: the memory before it is built."""
    slopes: Mapping[str, tuple[float, float]]
    """Number that counts -> the value at which it was measured, and the bytes more there."""
    options: Sequence[tuple[str, Any, float]] = ()
    """Parameter, its option, and the bytes more with it."""
    pairs: Sequence[tuple[str, str, float]] = ()
    """Two numbers that count, and the bytes of both together beyond their sum: where they multiply each other most."""
    joint_bytes: float = 0.0
    """Bytes of all slopes together beyond these."""
    factor: float = 1.0

    def predict(self, config: Configuration) -> float:
        """Return the peak of a configuration in bytes."""
        first = self.first.config
        away = {  # 0 for the first configuration, 1 for the measured one
            name: float(config.get(name, first[name]) - first[name]) / float(far - first[name])
            for name, (far, _) in self.slopes.items()
        }
        found: float = self.first.peak_bytes
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
    ) -> None:
        """`measure` returns the peak of a configuration in bytes, or raises OutOfTime."""
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
        far = {name: self._far(name) for name in self._ranges}
        unlikely = [name for name in far if _WITHOUT.search(name.lower())]
        found = self._counting(unlikely, far)
        for name in far:
            if name not in unlikely:
                found |= self._counting([name], far)
        chosen = sorted(combinations(found, 2), key=lambda pair: -abs(found[pair[0]] * found[pair[1]]))[:_MOST_PAIRS]
        pairs, joint = [], 0.0
        for one, other in chosen:
            both = self._at({one: far[one], other: far[other]}, like=found).peak_bytes - self._first.peak_bytes
            pairs.append((one, other, both - found[one] - found[other]))
        if len(found) > 2:
            point = self._at({name: far[name] for name in found}, like=found)
            joint = point.peak_bytes - self._first.peak_bytes - sum(found.values()) - sum(pair[2] for pair in pairs)
        options = [
            (name, option, self._at({name: option}).peak_bytes - self._first.peak_bytes)
            for name, others in self._options.items()
            for option in others
        ]
        return MemoryModel(
            first=self._first,
            floor_bytes=self._floor_bytes,
            slopes={name: (far[name], more) for name, more in found.items()},
            options=options,
            pairs=pairs,
            joint_bytes=joint,
        ).holding(self.points)

    def _far(self, name: str) -> float:
        low, high = self._ranges[name]
        is_high = float(self._first.config[name]) > low + _FAR * (high - low)
        return self._value(name, low if is_high else high)

    def _value(self, name: str, value: float) -> float:
        return int(value) if isinstance(self._first.config[name], int) else value

    def _counting(self, names: Sequence[str], far: Mapping[str, float]) -> dict[str, float]:
        """Return those of the parameters that count, and the bytes more with each; halves of a group that counts."""
        if not names:
            return {}
        more = self._at({name: far[name] for name in names}).peak_bytes - self._first.peak_bytes
        if abs(more) <= _LEAST * self._first.peak_bytes:
            return {}
        if len(names) == 1:
            return {names[0]: more}
        half = len(names) // 2
        return self._counting(names[:half], far) | self._counting(names[half:], far)

    def _at(self, changes: Mapping[str, Any], like: Iterable[str] | None = None) -> MemoryPoint:
        """Return a measured configuration; one that is the same in the parameters `like` need not be measured."""
        config = {**self._first.config, **changes}
        for point in self.points:
            if all(point.config[name] == config[name] for name in (config if like is None else like)):
                return point
        self.points.append(point := MemoryPoint(config, self._measure(config)))
        return point
