"""What happened to an experiment and is reported, beside its instances, stages and trials. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Setback:
    """A trial went back, since its checkpoint was lost."""

    at: float
    trial: int
    from_iterations: int
    to_iterations: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """A trial goes on to a rung, where trials climb rungs (asha)."""

    at: float
    trial: int
    rung: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """The driver stood still, paused or with its machine asleep."""

    at: float
    """Its end."""
    paused_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """More time or money than an experiment had, from `at` on; None is no limit."""

    at: float
    deadline_before_s: float | None
    deadline_s: float | None
    max_cost_before_usd: float | None
    max_cost_usd: float | None
