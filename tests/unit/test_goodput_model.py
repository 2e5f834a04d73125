"""Goodput: the model of a step, its fit, the choice of batches, and plans with it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rubberband.planner.goodput import combined_s, efficiency, gain, grad_s, step_s, sync_s
from rubberband.planner.goodput.fit import extrapolates, fit, relative_errors
from rubberband.values.adaptive import BatchPoint, Throughput

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
