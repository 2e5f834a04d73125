"""The words of balancing: what a look at a gang measures, what limits the shares, and what a balancer does.

Symbols are those of LB-BSP (SoCC '20, §3.1): worker i computes x_i of the X samples of a batch, its share, and needs
t_i seconds for them. Tuples are by rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Measurements of all workers over the steps since the last look."""

    shares: tuple[int, ...]
    """x_i, samples per step of each worker."""
    compute_s: tuple[float, ...]
    """t_i, mean own seconds per step: computing and sending, without the wait for others. Not read where x_i = 0."""
    steps: int = 1
    """Steps that the means are over."""
    cpu: tuple[float, ...] | None = None
    """c_i, CPUs that are available to each worker now, so for the steps to come. None on GPUs."""
    memory: tuple[float, ...] | None = None
    """m_i, fraction of each worker's memory (on a GPU, the GPU's) that is available now. None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareLimits:
    """Limits of every division of a batch."""

    caps: tuple[int, ...]
    """The most samples per step of each worker. If a batch is more than they hold together, all of them are taken in
    the same number of passes."""
    least: int = 1
    """The fewest samples of a worker that has any: 2 with BatchNorm. 0 is always allowed."""
    zero_costs_nothing: bool = False
    """Whether a worker without samples takes no time of its own; otherwise it takes its line's base."""


@dataclass(frozen=True, slots=True)
class Line:
    """t = a + b x of one worker."""

    base_s: float
    """a, seconds of a step whatever the share; at least 0."""
    per_sample_s: float
    """b, seconds per sample; at least 0."""

    def time_s(self, share: int, *, zero_costs_nothing: bool = False) -> float:
        """Return the predicted own seconds of a step with `share` samples."""
        if share == 0 and zero_costs_nothing:
            return 0.0
        return self.base_s + self.per_sample_s * share


class Balancer(Protocol):
    """Proposes the shares of a gang from looks at it. Its memory is bounded."""

    def observe(self, look: Look) -> None:
        """Take in one look."""

    def shares(self, batch_size: int, limits: ShareLimits) -> tuple[int, ...]:
        """Return the samples per worker for the steps to come; equal ones before the first look."""

    def lines(self) -> tuple[Line, ...]:
        """Return the time of each worker as a function of its share; empty before the first look."""

    def step_s(self, shares: Sequence[int], limits: ShareLimits) -> float:
        """Return max_i t_i(x_i), the predicted seconds of a step; nan before the first look."""

    def stragglers(self) -> tuple[int, ...]:
        """Return the ranks whose removal would have made the last 20 steps or more no slower."""

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, in plain values."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; one of another number of workers is ignored."""
