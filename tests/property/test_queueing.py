"""Throughput of asynchronous training, against Markov chains, subset recursions and simulations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rubberband.planner.queueing import (
    Network,
    blended,
    calibrated,
    curve,
    exact,
    highest,
    linearizer,
    mixed,
    mixed_factor,
    proportional,
)
from rubberband.values.asynchronous import AsyncProfile, AsyncTimes
from tests.builders.budget import examples
from tests.builders.parameter_server import (
    constant,
    exponential,
    first_come,
    gamma,
    hybrid,
    simulated_throughputs,
    subset_throughputs,
)

seconds = st.floats(0.001, 10.0)
some_seconds = st.just(0.0) | seconds
networks = st.builds(Network, delay_s=seconds, up_s=some_seconds, server_s=some_seconds, down_s=some_seconds)
MOST = 20


def columns(network: Network, workers: int) -> np.ndarray:
    return np.array([[network.delay_s, network.up_s, network.server_s, network.down_s]] * workers)


@given(networks, st.integers(1, 7))
@settings(max_examples=examples(30))
def test_equal_workers_are_a_class_each(network, workers):
    assert exact(network, workers)[-1] == pytest.approx(subset_throughputs(columns(network, workers)).sum(), rel=1e-12)


@st.composite
def proportional_workers(draw, most=7):
    workers = draw(st.integers(1, most))
    delays = np.array(draw(st.lists(seconds, min_size=workers, max_size=workers)))
    multiples = np.array(draw(st.lists(st.floats(0.01, 1.0), min_size=workers, max_size=workers)))
    common = np.array(draw(st.lists(some_seconds, min_size=3, max_size=3)))
    return delays, multiples, common


@given(proportional_workers())
@settings(max_examples=examples(45))
def test_workers_of_other_speeds_are_exact(workers):
    delays_s, multiples, common_s = workers
    stations_s = multiples[:, None] * common_s
    oracle = subset_throughputs(np.column_stack([delays_s, stations_s]))
    assert proportional(delays_s, multiples, common_s) == pytest.approx(oracle, rel=1e-11)
    assert mixed(delays_s, stations_s) == pytest.approx(oracle, rel=1e-11)


@given(networks, st.integers(1, 300))
@settings(max_examples=examples(45))
def test_many_equal_workers_agree_with_the_recursion(network, workers):
    stations_s = np.tile([network.up_s, network.server_s, network.down_s], (workers, 1))
    found = mixed(np.full(workers, network.delay_s), stations_s)
    assert found.sum() == pytest.approx(exact(network, workers)[-1], rel=1e-9)


@given(st.integers(2, 7), st.integers(0, 10_000))
@settings(max_examples=examples(75))
def test_any_workers_are_within_the_linearizers_error(workers, seed):
    random = np.random.default_rng(seed)
    demands_s = 10.0 ** random.uniform(-2.0, 0.0, size=(workers, 4))
    oracle, found = subset_throughputs(demands_s), linearizer(demands_s[:, 0], demands_s[:, 1:])
    assert found == pytest.approx(oracle, rel=0.012)
    assert found.sum() == pytest.approx(oracle.sum(), rel=0.005)


@given(networks, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
@settings(max_examples=examples(90))
def test_all_forms_are_within_the_band_and_rise_with_workers(network, one, other):
    low, high = exact(network, MOST), highest(network, MOST)
    less, more = (blended(network, MOST, blend) for blend in sorted([one, other]))
    for found in (low, first_come(network, MOST), hybrid(network, MOST), less, more, high):
        assert np.all(found >= low * (1 - 1e-12))
        assert np.all(found <= high * (1 + 1e-12))
        assert np.all(np.diff(found) >= -1e-12 * found[1:])
        assert found[0] == pytest.approx(1.0 / network.update_s, rel=1e-12)
    assert np.all(less <= more * (1 + 1e-12))


LONG = pytest.mark.long
EXAMPLE = Network(delay_s=0.029, up_s=0.072, server_s=0.018, down_s=0.072)


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=LONG), pytest.param(9, marks=LONG)])
def test_a_simulation_agrees_where_the_theory_is_exact(workers):
    """Any law of the times is covered but at the server, whose law is exponential (first come, first served)."""
    found = simulated_throughputs(
        columns(EXAMPLE, workers),
        ["delay", "shared", "in turn", "shared"],
        [constant, gamma(0.6), exponential, gamma(1.5)],
        replicas=1500 if workers > 2 else 600,
        steps=400 * workers + 1000,
        warm_up=80 * workers + 200,
    )
    assert found.sum() == pytest.approx(exact(EXAMPLE, workers)[-1], rel=0.005)


@pytest.mark.parametrize("cv", [pytest.param(0.1, marks=LONG), 0.3])
def test_one_observation_with_two_workers_predicts_the_others(cv):
    """Within 5 % on average where links carry one transfer after another: the band is up to 40 % wide there."""
    law = gamma(cv)
    seen = {
        workers: simulated_throughputs(
            columns(EXAMPLE, workers),
            ["delay", "in turn", "in turn", "in turn"],
            [law] * 4,
            replicas=200,
            steps=200 * workers + 400,
            warm_up=60 * workers + 150,
        ).sum()
        for workers in (2, 3, 4, 8)
    }
    model = AsyncProfile(
        times=AsyncTimes(compute_s=0.029, up_s=0.072, server_s=0.018, down_s=0.072), updates_per_iteration=1
    )
    point = curve(calibrated(model, {2: seen[2]}), 8).point
    errors = [abs(point[workers - 1] / throughput - 1.0) for workers, throughput in seen.items()]
    assert np.mean(errors) <= 0.05
    assert max(errors) <= 0.1


models = st.builds(
    AsyncProfile,
    times=st.builds(AsyncTimes, compute_s=seconds, up_s=some_seconds, server_s=some_seconds, down_s=some_seconds),
    updates_per_iteration=st.just(100.0),
    overhead_s=st.floats(0.0, 1.0),
    servers=st.integers(1, 4),
    blend=st.none() | st.floats(0.0, 1.0),
)


@given(models, st.lists(st.floats(0.1, 1.0), min_size=1, max_size=8))
@settings(max_examples=examples(60))
def test_slower_workers_cost_at_most_what_they_compute_less(model, speeds):
    factor = mixed_factor(model, tuple(speeds))
    assert 1.0 - 1e-6 <= factor <= (1.0 + 0.005) * len(speeds) / sum(speeds)
    assert mixed_factor(model, (1.0,) * len(speeds)) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("times", "speeds"),
    [
        ((0.3, 0.07, 0.02, 0.07), (1.0, 1.0, 1.0, 0.5)),
        pytest.param((0.3, 0.07, 0.02, 0.07), (1.0, 0.5, 0.25, 0.25), marks=LONG),
        pytest.param((0.3, 0.01, 0.06, 0.01), (2.0, 1.0, 1.0, 1.0), marks=LONG),
        pytest.param((0.06, 0.02, 0.04, 0.02), (1.0, 0.25), marks=LONG),
    ],
)
def test_a_simulation_of_mixed_workers_agrees(times, speeds):
    """Within 2 %, where the links are shared, and where they carry one transfer after another."""
    names = ("compute_s", "up_s", "server_s", "down_s")
    plain = AsyncProfile(times=AsyncTimes(**dict(zip(names, times, strict=True))), updates_per_iteration=100.0)
    for law, order in ((exponential, "shared"), (gamma(0.1), "in turn")):

        def simulated(speeds, law=law, order=order):
            own_s = [[sum(times) / speed - sum(times[1:]), *times[1:]] for speed in speeds]
            workers = len(speeds)
            return simulated_throughputs(
                np.array(own_s),
                ["delay", order, "in turn", order],
                [law] * 4,
                replicas=100,
                steps=200 * workers + 400,
                warm_up=60 * workers + 150,
            ).sum()

        model = calibrated(plain, {2: simulated((1.0, 1.0))})
        expected = simulated((1.0,) * len(speeds)) / simulated(speeds)
        assert mixed_factor(model, speeds) == pytest.approx(expected, rel=0.02)
