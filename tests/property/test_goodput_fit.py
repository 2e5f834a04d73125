"""Fits of random clusters: the gradient, what is recovered without noise, and what never happens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rubberband.planner.goodput.fit import MeanPoints, fit, relative_errors
from rubberband.values.adaptive import Throughput
from tests.builders.budget import examples
from tests.builders.goodput_strategies import SPAN, points_of, throughputs

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


@given(throughputs(), throughputs(), seeds)
@settings(max_examples=30, deadline=None)
def test_an_earlier_fit_never_makes_a_fit_much_worse(truth, earlier, seed):
    points = points_of(truth, SPAN, noise=0.05, seed=seed)
    fresh, resumed = (np.mean(relative_errors(fit(points, start), points)) for start in (None, earlier))
    assert resumed <= fresh + 0.02


def test_noisy_clusters_are_predicted_within_five_per_cent_on_average():
    random = np.random.default_rng(3)
    errors = [_error_of_a_noisy_fit(_random_cluster(random), seed) for seed in range(40)]
    assert np.mean(errors) < 0.05


def _error_of_a_noisy_fit(truth: Throughput, seed: int) -> float:
    """Over the whole span, without noise, of a fit to 40 of its steps with 5 % of noise."""
    chosen = np.random.default_rng(seed).choice(len(SPAN), 40, replace=False)
    found = fit(points_of(truth, [SPAN[at] for at in chosen], noise=0.05, seed=seed))
    return float(np.mean(relative_errors(found, points_of(truth, SPAN))))


def _random_cluster(random: np.random.Generator) -> Throughput:
    alpha, local = 10.0 ** random.uniform(-3, -1, 2)
    return Throughput(
        alpha_grad_s=alpha,
        beta_grad_s=alpha * 10.0 ** random.uniform(-2.5, -0.5),
        alpha_local_s=local,
        beta_local_s=local * 10.0 ** random.uniform(-2.5, -1),
        alpha_node_s=3 * local,
        beta_node_s=3 * local * 10.0 ** random.uniform(-2.5, -1),
        gamma=random.uniform(1.0, 10.0),
    )


def _assert_within_bounds(found: Throughput) -> None:
    seconds = [found.alpha_grad_s, found.beta_grad_s, found.alpha_local_s, found.beta_local_s]
    assert all(np.isfinite(value) and value >= 0.0 for value in [*seconds, found.alpha_node_s, found.beta_node_s])
    assert 1.0 <= found.gamma <= 10.0
