"""Records of an experiment that reports show, beside its instances, stages and trials. Plain data."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Allotted:
    """Another number of instances that an experiment may hold, from `at` on, and what that changes.

    The times and costs are those of the plan in force, cut to the allotment; a replan follows and may be better.
    """

    at: float
    max_instances_before: int
    max_instances: int
    jct_before_s: float
    jct_s: float
    """End of the run, from the start; where too few are allotted for any trial, as if the fewest were."""
    cost_before_usd: float
    cost_usd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """A slow instance was exchanged for another, at the report of a trial whose gang it held up."""

    at: float
    instance: str
    """The slow one."""
    trial: int
    ranks: tuple[int, ...]
    """The trial's stragglers on it."""
    first: bool
    """Whether it is used until the other one is ready; if not, its trials wait for that."""
    left_s: float
    """Seconds that the stage would still have taken."""
    saved_s: float
    """Seconds by which the stage was expected to end earlier, the start of the other one included."""
    extra_usd: float
    """Its expected cost; negative if it saves money."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HungInstance:
    """An instance was exchanged for another: a trial hung on it, and no other trial on it reported meanwhile."""

    at: float
    instance: str
    trial: int
    first: bool
    """Whether it is used until the other one is ready; if not, its trials wait for that."""
