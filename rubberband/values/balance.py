"""Balancing of unequal workers in plain values: the user's words, and what a stretch of training used.

Symbols are those of LB-BSP (SoCC '20, §3): worker i has x_i of the samples of a batch, its share, and needs t_i seconds
for them. The other functions over these values are in `rubberband.planner.balancing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

BalancePolicy = Literal["auto", "equal", "paper"]
"""How the samples of a batch are divided among the workers of a gang.

auto: in shares that let all workers end together, once the measured times say that it pays. equal: the same for all.
paper: LB-BSP's Algorithm 2 on GPUs, as printed, and Algorithm 1 on CPUs, with one network for all workers (`Narx`).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """The words of `batch: {balance: …}`."""

    policy: BalancePolicy = "auto"
    max_share: float | None = None
    """Largest part of a batch on one worker, in (0, 1]. None: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceUse:
    """The shares of a stretch of a trial's training and the times of its workers, by rank."""

    shares: tuple[int, ...]
    """Samples per step of each worker at the end of the stretch."""
    compute_s: tuple[float, ...]
    """Mean own seconds per step of each worker: its computing and sending, without the wait for others."""
    step_s: float
    """Mean seconds per step, measured."""
    equal_step_s: float
    """Seconds per step with equal shares, predicted from the measured times."""
    steps: int
    stragglers: tuple[int, ...] = ()
    """Ranks that for 20 steps or more slowed the gang more than their removal would."""

    @property
    def is_equal(self) -> bool:
        """Whether all workers have the same share, but for the remainder, and none is a straggler."""
        return max(self.shares) - min(self.shares) <= 1 and not self.stragglers

    @property
    def saved(self) -> float:
        """Part of a step with equal shares that balancing saves; negative where it costs time."""
        return 1.0 - self.step_s / self.equal_step_s if self.equal_step_s > 0.0 else 0.0


def even_shares(batch_size: int, num_workers: int) -> tuple[int, ...]:
    """Return shares as equal as possible, the first ones larger by one; none of 1 if that can be avoided.

    BatchNorm fails on a batch of one, so a small batch goes to fewer workers, and the others take 0.
    """
    workers = max(1, min(num_workers, batch_size // 2))
    share, rest = divmod(batch_size, workers)
    return tuple(share + (rank < rest) if rank < workers else 0 for rank in range(num_workers))


def scale_shares(shares: Sequence[float], batch_size: int) -> tuple[int, ...]:
    """Return shares in the same proportion that sum to `batch_size` (largest remainder; ties go to the lower rank).

    Weights that are not integers may be given in place of shares. Their sum must be more than 0.
    """
    total = sum(shares)
    if total == batch_size and all(isinstance(share, int) for share in shares):
        return tuple(int(share) for share in shares)
    # On floats, too, the floors sum to at most the batch: each quotient is off by less than a part of 1e15.
    floors = [int(share * batch_size // total) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda rank: (-(shares[rank] * batch_size % total), rank))
    for rank in by_remainder[: batch_size - sum(floors)]:
        floors[rank] += 1
    return tuple(floors)
