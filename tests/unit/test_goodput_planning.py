"""Tables for the planner and the rule of auto-scaling, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rubberband.planner.goodput import choose
from rubberband.planner.goodput.planning import (
    extrapolated,
    fixed_seconds_per_iteration,
    scaled_size,
    scaling_efficiencies,
    seconds_per_iteration,
    should_scale,
)
from rubberband.values.adaptive import BatchLimits, BatchPoint, GoodputProfile, Throughput

MODEL = GoodputProfile(
    throughput=Throughput(alpha_grad_s=0.02, beta_grad_s=0.001, alpha_local_s=0.03, alpha_node_s=0.2, gamma=2.0),
    noise_scale=2000.0,
    samples_per_iteration=50_000,
    limits=BatchLimits(initial=128, max=4096, max_per_gpu=256),
    overhead_s=3.0,
)


def measured(*sizes: int) -> GoodputProfile:
    """The model as if it had been measured on one instance with these numbers of GPUs."""
    points = tuple(
        BatchPoint(instances=1, gpus=gpus, per_gpu=per_gpu, accumulation=0, step_s=0.1)
        for gpus in sizes
        for per_gpu in (8, 256)
    )
    unseen = replace(MODEL.throughput, alpha_node_s=0.0)
    return replace(MODEL, points=points, throughput=unseen)


def test_an_iteration_is_its_samples_by_the_goodput_and_its_overhead():
    table = seconds_per_iteration(MODEL, 4, [1, 4, 8])
    for gpus, instances in ((1, 1), (4, 1), (8, 2)):
        goodput = choose(MODEL.throughput, 2000.0, MODEL.limits, instances, gpus).goodput
        assert table[gpus] == pytest.approx(50_000 / goodput + 3.0)


def test_a_fixed_batch_takes_its_steps():
    assert fixed_seconds_per_iteration(MODEL, 4, [1])[1] == pytest.approx(50_000 / 128 * 0.148 + 3.0)


def test_across_instances_is_not_planned_to_be_free_where_it_was_not_measured():
    table = seconds_per_iteration(measured(1, 2, 4), 4, [4, 8])
    local = seconds_per_iteration(measured(1, 2, 4), 8, [4, 8])
    assert table == local


@pytest.mark.parametrize(("sizes", "outside"), [((1, 2, 4), [8]), ((1, 2), [4, 8]), ((2, 4), [1, 8])])
def test_gangs_that_were_not_measured_are_extrapolated(sizes, outside):
    assert extrapolated(measured(*sizes), 4, [1, 2, 4, 8]) == outside


def test_a_gang_grows_while_it_scales():
    sizes = [1, 2, 4, 8, 16, 32]
    share = scaling_efficiencies(MODEL, 4, sizes)
    assert share[1] == 1.0
    assert share[4] > 2 / 3 > share[8]
    assert should_scale(MODEL, 4, 4)
    assert not should_scale(MODEL, 4, 8)
    assert scaled_size(MODEL, 4, sizes, 1) == max(size for size in sizes if share[size] >= 0.5)
    assert scaled_size(MODEL, 4, sizes, 32) == 32
