"""Trials that no other beats in several metrics at once (the Pareto front). Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A metric, and which of its values are better."""

    metric: str
    mode: Literal["max", "min"]

    @property
    def title(self) -> str:
        """Return `latency (min)`."""
        return f"{self.metric} ({self.mode})"


Found = TypeVar("Found")


def front(candidates: Sequence[tuple[Found, Mapping[str, float]]], objectives: Sequence[Objective]) -> list[Found]:
    """Return those that no other is at least as good as in every objective and better than in one, best first.

    The first objective orders them. A candidate without a finite value of every objective is left out.
    """
    known: list[tuple[tuple[float, ...], int]] = []
    for at, (_, metrics) in enumerate(candidates):
        reported = [metrics.get(objective.metric, math.nan) for objective in objectives]
        if all(map(math.isfinite, reported)):
            signed = (-v if o.mode == "max" else v for v, o in zip(reported, objectives, strict=True))
            known.append((tuple(signed), at))
    found: list[tuple[float, ...]] = []
    kept: list[Found] = []
    for values, at in sorted(known):  # whatever beats a candidate comes before it
        if not any(_beats(other, values) for other in found):
            found.append(values)
            kept.append(candidates[at][0])
    return kept


def _beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(mine <= theirs for mine, theirs in zip(one, other, strict=True))
