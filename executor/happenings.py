"""Parts of a result: what happened to a run beside its stages and trials. Times in seconds from its start. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rubberband.values.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionResult:
    """A decision at a SYNC: to keep the plan for the rest, or to change it."""

    stage: int
    """The first stage that it is about."""
    at_s: float
    """From the start."""
    changed: bool
    reason: str
    plan: Plan
    """In force from then on."""
    present_jct_s: float
    """Expected for the whole run by the plan that was in force."""
    present_cost_usd: float
    jct_s: float
    """Expected by the plan that is in force now."""
    cost_usd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtensionResult:
    """More time or money that the user granted after the start; None is no limit."""

    at_s: float
    """From the start."""
    deadline_before_s: float | None
    deadline_s: float | None
    max_cost_before_usd: float | None
    max_cost_usd: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetbackResult:
    """A trial that went back to an earlier checkpoint, or to its beginning, since its latest was lost."""

    at_s: float
    """From the start."""
    trial: int
    from_iterations: int
    to_iterations: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RungResult:
    """One rung of a search whose trials climb rungs without a SYNC (asha)."""

    rung: int
    iterations: int
    """Iterations in all that a trial has done at its end."""
    trials: int
    """Trials that started in it, or were promoted to it."""
    ended: int
    """Trials that ended it."""
    promoted: int
    """Trials that went on from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseResult:
    """The driver stood still, paused or with its machine asleep; `at_s` is when that began, from the start."""

    at_s: float
    paused_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacementResult:
    """A slow instance that was replaced, as its workers held up the gang of a trial."""

    at_s: float
    """From the start."""
    instance: str
    """The slow one."""
    trial: int
    ranks: tuple[int, ...]
    """The trial's slow workers on it."""
    first: bool
    """Whether it was used until the other one was ready; if not, its trials waited."""
    left_s: float
    """Seconds that the stage would still have taken, as expected then."""
    saved_s: float
    """Seconds by which the stage was expected to end earlier."""
    extra_usd: float
    """Its expected cost; negative if it saves money."""
