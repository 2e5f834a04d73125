"""Goodput: fits, choices and plans against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rubberband.planner.goodput import candidates, choose, choose_many, efficiency, step_s
from rubberband.planner.goodput.fit import MeanPoints, fit, relative_errors
from rubberband.planner.goodput.planning import LOWER, scaled_size, scaling_efficiencies, should_scale
from rubberband.values.adaptive import BatchLimits, BatchPoint, GoodputProfile, Throughput
from tests.builders.budget import examples

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


gang_sizes = st.integers(1, 64)


@given(throughputs(), noise_scales, batch_limits(2), gang_sizes, st.integers(1, 2))
def test_a_choice_keeps_every_limit(parameters, noise_scale, limits, gpus, least):
    assume(gpus * least <= limits.max)
    found = choose(parameters, noise_scale, limits, 1, gpus, least_per_gpu=least)
    passes = found.accumulation + 1
    assert limits.initial <= found.batch_size <= limits.max
    assert found.per_gpu == -(-found.batch_size // (gpus * passes))
    assert found.batch_size >= gpus * least
    assert least == 1 or found.batch_size // (gpus * passes) >= least
    assert found.per_gpu <= (limits.max_per_gpu or limits.max)
    assert passes == 1 or gpus * (passes - 1) * limits.max_per_gpu < found.batch_size, "no more passes than needed"
    if not limits.accumulation:
        assert found.accumulation == 0 or found.batch_size == max(limits.initial, gpus * least)


@given(throughputs(), noise_scales, batch_limits(largest_initial=20), st.integers(1, 16))
def test_nothing_is_much_better_than_the_choice(parameters, noise_scale, limits, gpus):
    assume(gpus <= limits.max)
    most = limits.max_per_gpu or limits.max
    per_gpu = np.arange(1, most + 1)[:, None]
    accumulation = np.arange(-(-limits.max // gpus) if limits.accumulation else 1)
    batch_size = gpus * per_gpu * (accumulation + 1)
    rate = batch_size / step_s(parameters, 1, gpus, per_gpu, accumulation)
    goodput = rate * efficiency(noise_scale, limits.initial, batch_size)
    allowed = (limits.initial <= batch_size) & (batch_size <= limits.max)
    best = np.max(goodput, where=allowed, initial=0.0)
    assert choose(parameters, noise_scale, limits, 1, gpus).goodput >= 0.98 * best


@given(throughputs(), noise_scales, batch_limits(2), st.lists(gang_sizes, min_size=1, max_size=8), st.integers(0, 2))
def test_many_choices_at_once_are_the_single_ones(parameters, noise_scale, limits, gpus, least):
    assume(max(gpus) * least <= limits.max)
    instances = [-(-count // 8) for count in gpus]
    found = choose_many(parameters, noise_scale, limits, np.asarray(instances), np.asarray(gpus), least_per_gpu=least)
    for at, (nodes, count) in enumerate(zip(instances, gpus, strict=True)):
        single = choose(parameters, noise_scale, limits, nodes, count, least_per_gpu=least)
        assert found[at].batch_size == single.batch_size
        assert found[at].per_gpu == single.per_gpu
        assert found[at].accumulation == single.accumulation
        assert found[at].goodput == pytest.approx(single.goodput)


@given(batch_limits(), gang_sizes, st.integers(2, 12))
def test_candidates_grow_from_the_initial_to_the_largest_batch(limits, gpus, num):
    assume(gpus <= limits.max)
    found = candidates(limits, gpus, num=num)
    sizes = found.batch_size
    assert len(sizes) <= num
    assert sizes[0] == max(limits.initial, gpus)
    assert np.all(np.diff(sizes) > 0)
    if limits.accumulation or limits.max <= gpus * (limits.max_per_gpu or limits.max):
        assert sizes[-1] == limits.max


def test_rounding_up_does_not_pass_the_largest_batch():
    limits = BatchLimits(initial=128, max=4096, max_per_gpu=200)
    assert candidates(limits, 11).batch_size[-1] == 4096


SIZES = [1, 2, 3, 4, 8, 16, 64]


@given(goodput_profiles(), st.sampled_from(SIZES))
def test_a_gang_grows_only_as_far_as_it_scales(profile, gpus):
    share = scaling_efficiencies(profile, 4, SIZES)
    size = scaled_size(profile, 4, SIZES, gpus)
    assert share[1] == pytest.approx(1.0)
    assert size >= gpus
    assert size == gpus or (should_scale(profile, 4, gpus) and share[size] >= LOWER)
    assert not should_scale(profile, 4, gpus) or all(share[larger] < LOWER for larger in SIZES if larger > size)


seeds = st.integers(0, 2**31)


@given(throughputs(), throughputs(), seeds)
@settings(deadline=None)
def test_the_gradient_is_that_of_the_error(truth, elsewhere, seed):
    measured = MeanPoints.of(points_of(truth, SPAN, noise=0.2, seed=seed), None)
    x = measured.scaled(elsewhere)
    x[6] = np.clip(x[6], 1.01, 9.99)
    error, gradient = measured.error(x)
    by_unit = gradient * x
    for at, step in enumerate(np.diag(1e-5 * x)):
        difference = (measured.error(x + step)[0] - measured.error(x - step)[0]) / 2e-5
        assert by_unit[at] == pytest.approx(difference, rel=1e-5, abs=1e-7)
    residuals, slopes = measured.residuals(x)
    assert measured.weights @ residuals**2 == pytest.approx(error)
    assert 2.0 * (measured.weights * residuals) @ slopes == pytest.approx(gradient, rel=1e-9, abs=1e-12)


@given(throughputs())
@settings(max_examples=examples(50), deadline=None)
def test_steps_without_noise_are_predicted_to_one_per_cent(truth):
    assert np.mean(relative_errors(fit(points_of(truth, SPAN)), points_of(truth, SPAN))) < 0.01


@given(throughputs(), seeds, st.integers(1, 12))
@settings(max_examples=examples(50), deadline=None)
def test_parameters_stay_within_their_bounds(truth, seed, number):
    chosen = np.random.default_rng(seed).choice(len(SPAN), number)
    points = points_of(truth, [SPAN[at] for at in chosen], noise=0.3, seed=seed)
    found = fit(points)
    _assert_within_bounds(found)
    if all(point.gpus == 1 for point in points):
        assert found.alpha_local_s == found.beta_local_s == 0.0
    if all(point.instances == 1 for point in points):
        assert found.alpha_node_s == found.beta_node_s == 0.0
    if all(point.gpus <= 2 for point in points):
        assert found.beta_local_s == found.beta_node_s == 0.0


def _assert_within_bounds(found: Throughput) -> None:
    seconds = [found.alpha_grad_s, found.beta_grad_s, found.alpha_local_s, found.beta_local_s]
    assert all(np.isfinite(value) and value >= 0.0 for value in [*seconds, found.alpha_node_s, found.beta_node_s])
    assert 1.0 <= found.gamma <= 10.0
