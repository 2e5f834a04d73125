"""Random models of a step, limits and clusters."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from rubberband.planner.goodput import step_s
from rubberband.values.adaptive import BatchLimits, BatchPoint, GoodputProfile, Throughput

SPAN = [
    (-(-gpus // 4), gpus, per_gpu, accumulation)
    for gpus in (1, 2, 3, 4, 8, 12, 16, 32)
    for per_gpu in (8, 32, 128, 512)
    for accumulation in (0, 1, 3)
]
"""(N, K, m, s) that span a cluster of instances with four GPUs each."""

noise_scales = st.floats(0.0, 1e6)


def magnitudes(low: float, high: float) -> st.SearchStrategy[float]:
    """Numbers of every magnitude between 10^low and 10^high."""
    return st.floats(low, high).map(lambda exponent: 10.0**exponent)


@st.composite
def throughputs(draw: st.DrawFn) -> Throughput:
    alpha = draw(magnitudes(-4, 0))
    local = alpha * draw(magnitudes(-1, 1))
    node = local * draw(magnitudes(0, 1))
    return Throughput(
        alpha_grad_s=alpha,
        beta_grad_s=alpha * draw(magnitudes(-3, -0.5)),
        alpha_local_s=local,
        beta_local_s=local * draw(magnitudes(-3, -1)),
        alpha_node_s=node,
        beta_node_s=node * draw(magnitudes(-3, -1)),
        gamma=draw(st.floats(1.0, 10.0)),
    )


@st.composite
def batch_limits(draw: st.DrawFn, least_per_gpu: int = 1, largest_initial: int = 300) -> BatchLimits:
    """Memory holds so much that `least_per_gpu` samples in every pass are always possible."""
    initial = draw(st.integers(1, largest_initial))
    return BatchLimits(
        initial=initial,
        max=draw(st.integers(initial, 32 * initial)),
        max_per_gpu=draw(st.none() | st.integers(2 * least_per_gpu - 1, 600)),
        accumulation=draw(st.booleans()),
    )


@st.composite
def goodput_profiles(draw: st.DrawFn) -> GoodputProfile:
    return GoodputProfile(
        throughput=draw(throughputs()),
        noise_scale=draw(noise_scales),
        samples_per_iteration=draw(st.floats(1e2, 1e6)),
        limits=draw(batch_limits()),
        overhead_s=draw(st.floats(0.0, 10.0)),
    )


def points_of(parameters: Throughput, configurations, *, noise: float = 0.0, seed: int = 0) -> list[BatchPoint]:
    """Steps as a trial with these parameters would measure them, with lognormal noise."""
    table = np.asarray(configurations)
    seconds = step_s(parameters, *table.T) * np.exp(noise * np.random.default_rng(seed).normal(size=len(table)))
    return [
        BatchPoint(instances=row[0], gpus=row[1], per_gpu=row[2], accumulation=row[3], step_s=time_s)
        for row, time_s in zip(table.tolist(), seconds.tolist(), strict=True)
    ]
