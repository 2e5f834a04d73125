"""What a later deadline or a larger budget would change, before it is granted. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rubberband.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What is expected of the whole experiment under given limits."""

    jct_s: float
    """From the start."""
    cost_usd: float
    deadline_s: float | None
    max_cost_usd: float | None
    plan: Plan
    """In force from the next stage on; the stages before it are as they were."""
    feasible: bool
    """Whether it keeps these limits."""
    reason: str
    """One line for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """The rest of an experiment by the limits that it has, and by other ones."""

    before: Outlook
    after: Outlook
    stage: int
    """The first stage that the plans are about; the number of stages if none is left."""
    applied: bool = False
    """Whether it was asked of the driver (or journalled), and not only looked at."""

    @property
    def added_s(self) -> float:
        """How much later it ends."""
        return self.after.jct_s - self.before.jct_s

    @property
    def added_usd(self) -> float:
        """How much more it costs."""
        return self.after.cost_usd - self.before.cost_usd
