"""Goodput by hand: the model of a step, its fit, the choice of batches, tables for the planner, auto-scaling."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from rubberband.planner.goodput import (
    better,
    candidates,
    choose,
    choose_at,
    choose_many,
    combined_s,
    efficiency,
    gain,
    grad_s,
    step_s,
    sync_s,
)
from rubberband.planner.goodput.fit import extrapolates, fit, relative_errors
from rubberband.planner.goodput.planning import (
    extrapolated,
    fixed_seconds_per_iteration,
    scaled_size,
    scaling_efficiencies,
    seconds_per_iteration,
    should_scale,
)
from rubberband.values.adaptive import BatchLimits, BatchPoint, GoodputProfile, Throughput

MODEL = Throughput(
    alpha_grad_s=1.0, beta_grad_s=0.5, alpha_local_s=2.0, beta_local_s=0.1, alpha_node_s=5.0, beta_node_s=0.2, gamma=2.0
)


def test_a_pass_has_a_constant_and_a_slope():
    assert grad_s(MODEL, np.asarray([0, 1, 6])).tolist() == [1.0, 1.5, 4.0]


@pytest.mark.parametrize(
    ("instances", "gpus", "seconds"), [(1, 1, 0.0), (1, 2, 2.0), (1, 4, 2.2), (2, 2, 5.0), (2, 8, 6.2)]
)
def test_synchronising_depends_on_where_the_gpus_are(instances, gpus, seconds):
    assert sync_s(MODEL, instances, gpus) == pytest.approx(seconds)


def test_a_step_synchronises_in_its_last_pass_only():
    assert step_s(MODEL, 1, 2, 1, 0) == pytest.approx(math.hypot(1.5, 2.0))
    assert step_s(MODEL, 1, 2, 1, 3) == pytest.approx(3 * 1.5 + math.hypot(1.5, 2.0))


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1.0, 1e30])
@pytest.mark.parametrize("gamma", [1.0, 3.0, 10.0])
def test_combining_neither_underflows_nor_overflows(scale, gamma):
    expected = (3.0**gamma + 4.0**gamma) ** (1 / gamma)
    assert combined_s(3.0 * scale, 4.0 * scale, gamma) / scale == pytest.approx(expected)
    assert combined_s(0.0, 0.0, gamma) == 0.0


@pytest.mark.parametrize(("noise_scale", "worth"), [(0.0, 1 / 8), (64.0, 2 / 9), (384.0, 1 / 2), (math.inf, 1.0)])
def test_efficiency_by_hand(noise_scale, worth):
    assert efficiency(noise_scale, 64, 512) == pytest.approx(worth)
    assert efficiency(noise_scale, 64, 64) == 1.0


def test_gain_is_adascales():
    initial, batch_size, trace, squared_norm = 64, 512, 300.0, 0.7
    variance, scale = trace / initial, batch_size / initial
    adascale = (variance + squared_norm) / (variance / scale + squared_norm)
    assert gain(trace / squared_norm, initial, batch_size) == pytest.approx(adascale)


TRUTH = Throughput(
    alpha_grad_s=0.02,
    beta_grad_s=0.001,
    alpha_local_s=0.03,
    beta_local_s=0.002,
    alpha_node_s=0.08,
    beta_node_s=0.003,
    gamma=1.8,
)
FIELDS = ("alpha_grad_s", "beta_grad_s", "alpha_local_s", "beta_local_s", "alpha_node_s", "beta_node_s", "gamma")


def point(instances: int, gpus: int, per_gpu: int, accumulation: int = 0, step: float | None = None) -> BatchPoint:
    seconds = float(step_s(TRUTH, instances, gpus, per_gpu, accumulation)) if step is None else step
    return BatchPoint(instances=instances, gpus=gpus, per_gpu=per_gpu, accumulation=accumulation, step_s=seconds)


SPANNING = [
    point(-(-gpus // 4), gpus, per_gpu, accumulation)
    for gpus in (1, 2, 3, 4, 8, 16, 32)
    for per_gpu in (8, 32, 128)
    for accumulation in (0, 2)
]


def test_known_parameters_are_recovered():
    found = fit(SPANNING)
    for field in FIELDS:
        assert getattr(found, field) == pytest.approx(getattr(TRUTH, field), rel=0.02), field
    assert np.max(relative_errors(found, SPANNING)) < 1e-3


def test_measurements_without_noise_end_no_search():
    rows = [(8, 32, 32, 0.3), (1, 1, 32, 0.0015139364834310584), (1, 2, 128, 0.010006612775140231)]
    rows += [(1, 1, 128, 0.006055745933724234), (2, 8, 32, 0.06), (1, 1, 32, 0.0015139364834310584)]
    points = [point(instances, gpus, per_gpu, step=step) for instances, gpus, per_gpu, step in rows]
    assert np.max(relative_errors(fit(points), points)) < 1e-6


def test_synchronising_costs_nothing_until_it_was_seen():
    alone = fit([point(1, 1, 8), point(1, 1, 64)])
    assert (alone.alpha_local_s, alone.beta_local_s, alone.alpha_node_s, alone.beta_node_s) == (0.0, 0.0, 0.0, 0.0)
    pair = fit([point(1, 1, 8), point(1, 1, 64), point(1, 2, 8), point(1, 2, 64)])
    assert pair.alpha_local_s > 0.0
    assert (pair.beta_local_s, pair.alpha_node_s, pair.beta_node_s) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("measured", [[point(1, 1, 32)], [point(1, 1, 32), point(1, 1, 32, 3)]])
def test_where_one_m_was_measured_half_of_a_pass_depends_on_it(measured):
    found = fit(measured)
    assert found.alpha_grad_s == pytest.approx(32 * found.beta_grad_s)
    assert grad_s(found, 32) == pytest.approx(grad_s(TRUTH, 32), rel=1e-3)


def test_a_fixed_batch_on_more_and_more_gpus_is_explained_without_negative_times():
    points = [point(1, 1, 128), point(1, 2, 64), point(1, 4, 32)]
    found = fit(points)
    assert np.max(relative_errors(found, points)) < 0.02
    assert min(found.alpha_grad_s, found.beta_grad_s, found.alpha_local_s, found.beta_local_s) >= 0.0


def test_an_earlier_fit_without_synchronisation_is_no_trap():
    alone = fit([point(1, 1, per_gpu) for per_gpu in (8, 32, 128)])
    assert np.max(relative_errors(fit(SPANNING, alone), SPANNING)) < 0.01


@pytest.mark.parametrize(
    ("points", "weights", "message"),
    [
        ([], None, "at least one measured step"),
        ([point(1, 1, 8, step=0.0)], None, "step_s=0 of a measured step is not a positive number"),
        ([point(1, 1, 8, step=float("nan"))], None, "step_s=nan"),
        ([point(1, 1, 8)], [-1.0], "weight=-1"),
    ],
)
def test_unfit_data_is_refused(points, weights, message):
    with pytest.raises(ValueError, match=message):
        fit(points, weights=weights)


@pytest.mark.parametrize(
    ("instances", "gpus", "per_gpu", "outside"),
    [
        (1, 1, 8, False),
        (1, 3, 20, False),
        (1, 4, 64, False),
        (1, 4, 65, True),
        (1, 4, 7, True),
        (1, 8, 32, True),
        (2, 4, 32, True),
    ],
)
def test_outside_of_the_measured_range_is_extrapolated(instances, gpus, per_gpu, outside):
    points = [point(1, gpus, per_gpu) for gpus in (1, 2, 4) for per_gpu in (8, 64)]
    assert extrapolates(points, instances, gpus, per_gpu) == outside


def test_a_fit_that_misses_the_steps_nearby_is_not_trusted_within_the_measured_range():
    """Twelve points, and beyond 64 samples a GPU is three times as slow: no line goes through all of them."""
    sizes = (4, 8, 16, 32, 64, 128)
    points = [
        point(1, gpus, size, step=float(step_s(TRUTH, 1, gpus, size, 0)) * (3.0 if size > 64 else 1.0))
        for gpus in (1, 4)
        for size in sizes
    ]
    off = {(each.gpus, each.per_gpu) for each in points if relative_errors(fit(points), [each])[0] > 0.2}
    assert off, "the model has no such bend"
    for gpus, size in off:
        assert extrapolates(points, 1, gpus, size)
    straight = [point(1, gpus, size) for gpus in (1, 4) for size in sizes]
    assert not any(extrapolates(straight, 1, gpus, size) for gpus in (1, 4) for size in (4, 30, 100, 128))


# The choice of a batch


CLUSTER = Throughput(
    alpha_grad_s=0.02,
    beta_grad_s=0.0002,
    alpha_local_s=0.05,
    beta_local_s=0.002,
    alpha_node_s=0.1,
    beta_node_s=0.003,
    gamma=1.5,
)
LIMITS = BatchLimits(initial=128, max=4096, max_per_gpu=256)


def test_without_noise_a_larger_batch_is_worth_nothing():
    free = replace(CLUSTER, beta_grad_s=0.0)
    assert choose(free, 0.0, LIMITS, 1, 4).batch_size == 128


def test_with_endless_noise_the_batch_is_the_largest():
    found = choose(CLUSTER, float("inf"), LIMITS, 1, 4)
    assert (found.batch_size, found.per_gpu, found.accumulation) == (4096, 256, 3)
    assert found.efficiency == 1.0


def test_more_gpus_and_more_noise_take_a_larger_batch():
    sizes = [[choose(CLUSTER, phi, LIMITS, 1, gpus).batch_size for gpus in (1, 4)] for phi in (300.0, 3000.0)]
    assert sizes[0][0] < sizes[0][1] < sizes[1][1]
    assert sizes[0][0] < sizes[1][0]


def test_a_batch_beyond_the_memory_is_accumulated():
    found = choose_at(CLUSTER, 1000.0, LIMITS, 1, 2, 1000)
    assert (found.per_gpu, found.accumulation) == (250, 1)


def test_the_initial_batch_is_accumulated_even_where_larger_ones_may_not_be():
    limits = BatchLimits(initial=128, max=4096, max_per_gpu=20, accumulation=False)
    found = choose(CLUSTER, 1e6, limits, 1, 4)
    assert (found.batch_size, found.per_gpu, found.accumulation) == (128, 16, 1)
    assert candidates(limits, 4).batch_size.tolist() == [128]


def test_without_accumulation_the_largest_batch_is_the_one_that_fits():
    assert choose(CLUSTER, 1e9, replace(LIMITS, accumulation=False), 1, 4).batch_size == 1024


def test_every_gpu_gets_what_it_needs():
    found = choose(CLUSTER, 0.0, BatchLimits(initial=4, max=64), 1, 8, least_per_gpu=2)
    assert (found.batch_size, found.per_gpu) == (16, 2)


@pytest.mark.parametrize(
    ("limits", "gpus", "message"),
    [
        (BatchLimits(initial=8, max=30), 16, r"16 GPUs with at least 2 samples .* batch.max to 32, or use at most 15"),
        (BatchLimits(initial=8, max=64, max_per_gpu=1), 2, "max_per_gpu=1 is less than the 2 samples"),
        (BatchLimits(initial=7, max=7, max_per_gpu=2), 3, "no batch of 7 to 7 samples can be split on 3 GPUs"),
    ],
)
def test_a_batch_that_cannot_be_divided_is_refused(limits, gpus, message):
    with pytest.raises(ValueError, match=message):
        choose(CLUSTER, 100.0, limits, 1, gpus, least_per_gpu=2)
    with pytest.raises(ValueError, match=message):
        choose_many(CLUSTER, 100.0, limits, np.asarray([1]), np.asarray([gpus]), least_per_gpu=2)


def test_an_unknown_noise_scale_keeps_the_initial_batch():
    assert choose(CLUSTER, float("nan"), LIMITS, 1, 4).batch_size == 128


@pytest.mark.parametrize(("current", "worth"), [(128, False), (122, False), (121, True), (134, False), (135, True)])
def test_small_changes_are_not_worth_making(current, worth):
    found = choose_at(CLUSTER, 100.0, LIMITS, 1, 1, 128)
    assert better(current, found) == worth


# Tables for the planner, and auto-scaling


PROFILE = GoodputProfile(
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
    unseen = replace(PROFILE.throughput, alpha_node_s=0.0)
    return replace(PROFILE, points=points, throughput=unseen)


def test_an_iteration_is_its_samples_by_the_goodput_and_its_overhead():
    table = seconds_per_iteration(PROFILE, 4, [1, 4, 8])
    for gpus, instances in ((1, 1), (4, 1), (8, 2)):
        goodput = choose(PROFILE.throughput, 2000.0, PROFILE.limits, instances, gpus).goodput
        assert table[gpus] == pytest.approx(50_000 / goodput + 3.0)


def test_a_fixed_batch_takes_its_steps():
    assert fixed_seconds_per_iteration(PROFILE, 4, [1])[1] == pytest.approx(50_000 / 128 * 0.148 + 3.0)


def test_across_instances_is_not_planned_to_be_free_where_it_was_not_measured():
    table = seconds_per_iteration(measured(1, 2, 4), 4, [4, 8])
    local = seconds_per_iteration(measured(1, 2, 4), 8, [4, 8])
    assert table == local


@pytest.mark.parametrize(("sizes", "outside"), [((1, 2, 4), [8]), ((1, 2), [4, 8]), ((2, 4), [1, 8])])
def test_gangs_that_were_not_measured_are_extrapolated(sizes, outside):
    assert extrapolated(measured(*sizes), 4, [1, 2, 4, 8]) == outside


def test_a_gang_grows_while_it_scales():
    sizes = [1, 2, 4, 8, 16, 32]
    share = scaling_efficiencies(PROFILE, 4, sizes)
    assert share[1] == 1.0
    assert share[4] > 2 / 3 > share[8]
    assert should_scale(PROFILE, 4, 4)
    assert not should_scale(PROFILE, 4, 8)
    assert scaled_size(PROFILE, 4, sizes, 1) == max(size for size in sizes if share[size] >= 0.5)
    assert scaled_size(PROFILE, 4, sizes, 32) == 32
