"""Improvement that the rest of a search may still bring, beside its cost: the driver finds it, the journal keeps it."""

from __future__ import annotations

from dataclasses import dataclass

from rubberband.units import duration, format_usd


@dataclass(frozen=True, slots=True, kw_only=True)
class RestWorth:
    """Forecast of the best metric if the search goes on to its end, beside what that costs.

    An improvement is of the metric as it will be reported: luck counts.
    """

    at_s: float
    """From the start of the run."""
    best: float
    """The best metric so far."""
    expected: float
    """The expected improvement, in units of the metric, above 0 for both modes; a best one that ends worse is none."""
    chances: tuple[tuple[float, float], ...]
    """Sizes of improvements in ascending order, the first is 0, each with the probability of a larger one."""
    worse: float
    """Probability that the best trial at the end is worse than the best one now."""
    left_s: float
    """Until the expected end of the run."""
    left_usd: float
    """The rest adds this to the bill."""

    @property
    def per_usd(self) -> float | None:
        """The expected improvement for one USD; None where the rest costs nothing."""
        return self.expected / self.left_usd if self.left_usd > 0.0 else None

    @property
    def price(self) -> str:
        """The cost and the time of the rest, in words."""
        return f"{format_usd(self.left_usd)} and {duration(self.left_s)}"

    def in_words(self, metric: str) -> str:
        """Return what the rest may bring, in one line."""
        likely = [f"by more than {size:g} with a chance of {likelihood(chance)}" for size, chance in self.chances[1:]]
        parts = [f"improve {metric}={self.best:.6g} with a chance of {likelihood(self.chances[0][1])}", *likely]
        worse = f"; it ends worse with a chance of {likelihood(self.worse)}" if self.worse >= 0.005 else ""
        return f"another {self.price} {', '.join(parts)}, by {self.expected:.2g} on average{worse}"


def likelihood(chance: float) -> str:
    """Return a probability in percent."""
    if 0.0 < chance < 0.01:
        return "less than 1 %"
    return f"{100.0 if chance == 1.0 else min(99.0, 100.0 * chance):.0f} %"
