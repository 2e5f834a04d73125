"""Gangs of unlike workers with known curves, for balancers to be tried on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rubberband.planner.balancing import Balancer, Look, ShareLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """t = a + b max(x, s) of one GPU (LB-BSP §3.3.1); with s = 0 a line."""

    base_s: float
    per_sample_s: float
    saturation: int = 0

    def time_s(self, share: int) -> float:
        return self.base_s + self.per_sample_s * max(share, self.saturation) if share else 0.0

    def most(self, time_s: float) -> int:
        if time_s < self.time_s(1):
            return 0
        return int((time_s - self.base_s) / self.per_sample_s + 1e-9)


V100 = Curve(base_s=0.12, per_sample_s=0.0058, saturation=48)
M60 = Curve(base_s=0.10, per_sample_s=0.027, saturation=12)
K80 = Curve(base_s=0.10, per_sample_s=0.048, saturation=8)
K520 = Curve(base_s=0.12, per_sample_s=0.085, saturation=4)
CLUSTER = (V100, M60, K80, K520)
"""Four unlike GPUs: 32 samples take them between 0.4 s and 2.8 s, as in LB-BSP Figs. 4 and 8 (synthetic)."""


def best_s(curves: Sequence[Curve], batch_size: int) -> float:
    """Return the least possible max_i t_i."""
    low, high = 0.0, max(curve.time_s(batch_size) for curve in curves)
    for _ in range(100):
        middle = 0.5 * (low + high)
        if sum(min(batch_size, curve.most(middle)) for curve in curves) >= batch_size:
            high = middle
        else:
            low = middle
    return high


def even_limits(num_workers: int, batch_size: int, **more: object) -> ShareLimits:
    """Return limits that hold any division."""
    return ShareLimits(caps=(batch_size,) * num_workers, zero_costs_nothing=True, **more)  # type: ignore[arg-type]


def train(
    balancer: Balancer,
    curves: Callable[[int], Sequence[Curve]] | Sequence[Curve],
    batch_size: int,
    steps: int,
    *,
    noise: float = 0.0,
    seed: int = 0,
    limits: ShareLimits | None = None,
    memory: Callable[[Sequence[int]], Sequence[float]] | None = None,
) -> list[tuple[tuple[int, ...], float]]:
    """Return the shares and max_i t_i of each step; `curves` may depend on it, `memory` is what is free by shares."""
    random = np.random.default_rng(seed)
    found = []
    for step in range(steps):
        gang = curves(step) if callable(curves) else curves
        shares = balancer.shares(batch_size, limits or even_limits(len(gang), batch_size))
        times_s = [curve.time_s(share) for curve, share in zip(gang, shares, strict=True)]
        found.append((shares, max(times_s)))
        factors = np.exp(noise * random.normal(size=len(gang)))
        free = None if memory is None else tuple(memory(shares))
        measured_s = tuple(float(time_s * factor) for time_s, factor in zip(times_s, factors, strict=True))
        balancer.observe(Look(shares=shares, compute_s=measured_s, memory=free))
    return found
