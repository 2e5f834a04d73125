"""Forecasts of speeds: each follows what it can follow, and is used only while it pays."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rubberband.planner.balancing import make_balancer
from rubberband.planner.balancing.paper import ENOUGH, Narx
from rubberband.planner.balancing.speed_balancer import (
    Ema,
    FixedPart,
    Gated,
    Memoryless,
    NormalisedEma,
    relative_time,
)
from rubberband.values.balance import Balance
from tests.bench.balancing_traces import trace
from tests.builders.balancing import Curve, best_s, train
from tests.builders.paper import Arima

PREDICTORS = {
    "memoryless": Memoryless,
    "ema": Ema,
    "arima": Arima,
    "narx": Narx,
    "normalised": NormalisedEma,
    "gated": lambda n: Gated(NormalisedEma(n), n),
}
ONES = np.ones(3)


def forecasts(predictor, speeds, cpu, memory):
    """(steps, n) The forecast of each step after the first; nan for that one."""
    found = np.full(speeds.shape, np.nan)
    for step in range(1, len(speeds)):
        predictor.observe(speeds[step - 1], cpu[step], memory[step])
        found[step] = predictor.forecast()
    return found


def error(kind, name, seed=0, steps=500):
    """RMSE of the forecasts over the mean speed, without the first 200."""
    made = trace(kind, seed, steps=steps)
    found = forecasts(PREDICTORS[name](made.speeds.shape[1]), made.speeds, made.cpu, made.memory)[200:]
    return float(np.sqrt(np.mean(np.square((found - made.speeds[200:]) / made.speeds[200:].mean(axis=0)))))


@pytest.mark.parametrize("name", PREDICTORS)
def test_a_steady_speed_is_forecast(name):
    predictor = PREDICTORS[name](3)
    speeds = np.array([10.0, 20.0, 40.0])
    for _ in range(60):
        predictor.observe(speeds, ONES, ONES)
    assert predictor.forecast() == pytest.approx(speeds, rel=0.02)


@pytest.mark.parametrize("name", PREDICTORS)
def test_an_unseen_worker_is_as_fast_as_the_others_and_a_missing_look_changes_nothing(name):
    predictor = PREDICTORS[name](3)
    for _ in range(20):
        predictor.observe(np.array([10.0, 30.0, np.nan]), ONES, ONES)
    assert predictor.forecast() == pytest.approx([10.0, 30.0, 20.0], rel=0.05)


@pytest.mark.parametrize("name", PREDICTORS)
def test_a_restored_predictor_forecasts_the_same(name):
    made = trace("both", 0, workers=3, steps=60)
    first, second = PREDICTORS[name](3), PREDICTORS[name](3)
    forecasts(first, made.speeds, made.cpu, made.memory)
    second.restore(json.loads(json.dumps(first.state())))
    assert second.forecast().tolist() == first.forecast().tolist()


@pytest.mark.parametrize("name", PREDICTORS)
def test_forecasts_are_positive_numbers_whatever_happens(name):
    random = np.random.default_rng(0)
    predictor = PREDICTORS[name](3)
    for _ in range(200):
        speeds = np.where(random.random(3) < 0.2, np.nan, 10.0 ** random.uniform(-6.0, 6.0, 3))
        predictor.observe(speeds, random.uniform(0.0, 64.0, 3), random.uniform(0.0, 1.0, 3))
        found = predictor.forecast()
        assert np.all(np.isfinite(found))
        assert np.all(found > 0.0)


def test_a_spike_hardly_moves_the_normalised_average_and_a_shift_moves_it_wholly():
    predictor, usual = NormalisedEma(3), np.array([10.0, 20.0, 40.0])
    for _ in range(30):
        predictor.observe(usual, ONES, ONES)
    predictor.observe(usual * [0.3, 1.0, 1.0], ONES, ONES)
    assert predictor.forecast() == pytest.approx(usual, rel=0.02)
    for _ in range(4):
        predictor.observe(usual * [0.3, 1.0, 1.0], ONES, ONES)
    assert predictor.forecast() == pytest.approx(usual * [0.3, 1.0, 1.0], rel=0.02)


def test_resources_are_in_the_forecast_before_any_step_with_them():
    made = trace("shifts", 1, steps=400)
    predictor = NormalisedEma(8)
    found = forecasts(predictor, made.speeds, made.cpu, made.memory)[200:]
    assert 0.75 <= predictor.exponents()[0] <= 1.05
    assert np.quantile(np.abs(found / made.speeds[200:] - 1.0), 0.95) < 0.2


@pytest.mark.parametrize("name", ["narx", "normalised"])
def test_resources_make_forecasts_better_than_past_speeds_alone(name):
    assert error("shifts", name) < 0.7 * min(error("shifts", other) for other in ("memoryless", "ema", "arima"))


def test_the_network_is_used_after_enough_samples_only():
    narx, ema = Narx(3), Ema(3)
    speeds, steps = np.array([10.0, 20.0, 40.0]), ENOUGH // 3 + 10
    random = np.random.default_rng(0)
    for step in range(steps):
        noisy = speeds * np.exp(0.1 * random.normal(size=3))
        for each in (narx, ema):
            each.observe(noisy, ONES, ONES)
        if step == 50:
            assert narx.forecast().tolist() == ema.forecast().tolist()
    assert narx.forecast().tolist() != ema.forecast().tolist()


class Wrong(NormalisedEma):
    """Forecasts that are off by a factor of three for one worker."""

    def forecast(self):
        return super().forecast() * [3.0, *[1.0] * (len(self.level) - 1)]


def test_the_gate_closes_where_the_last_speeds_make_faster_steps():
    gate, random = Gated(Wrong(3), 3), np.random.default_rng(0)
    for _ in range(20):
        last = np.array([10.0, 20.0, 40.0]) * np.exp(0.05 * random.normal(size=3))
        gate.observe(last, ONES, ONES)
    assert not gate.is_open
    assert gate.forecast().tolist() == last.tolist()
    assert gate.noise_share == 1.0


def test_the_gate_is_open_where_the_predictor_is_better():
    gate, random = Gated(NormalisedEma(3), 3), np.random.default_rng(0)
    for _ in range(50):
        gate.observe(np.array([10.0, 20.0, 40.0]) * np.exp(0.05 * random.normal(size=3)), ONES, ONES)
    assert gate.is_open
    assert gate.noise_share < 0.3


def test_the_time_of_a_forecast_is_that_of_its_slowest_worker():
    assert relative_time(np.array([1.0, 1.0]), np.array([1.0, 1.0])) == 1.0
    assert relative_time(np.array([1.0, 1.0]), np.array([1.0, 3.0])) == pytest.approx(2.0)


def test_a_fixed_part_is_found_from_moves():
    found, shares = FixedPart(), np.array([64.0, 64.0])
    for moved in (shares, np.array([32.0, 96.0]), np.array([40.0, 88.0])):
        found.observe(moved, (32.0 + moved) / 100.0, np.zeros(2))
    assert found.samples == pytest.approx(32.0)


def test_a_worker_that_slows_down_is_no_fixed_part():
    found = FixedPart()
    looks = [((64.0, 64.0), (0.64, 0.64)), ((64.0, 64.0), (0.64, 1.92)), ((96.0, 32.0), (0.96, 0.96))]
    for shares, times_s in looks:
        found.observe(np.array(shares), np.array(times_s), np.zeros(2))
    assert found.samples == 0.0


@pytest.mark.parametrize("base_s", [0.0, 0.05, 0.2])
def test_cpu_workers_with_a_part_that_no_share_shortens_are_balanced_too(base_s):
    curves = tuple(Curve(base_s=base_s / cpus, per_sample_s=0.01 / cpus) for cpus in (1, 1, 2, 4))
    steps = train(make_balancer(Balance(), "cpu", 4), curves, 256, 40, noise=0.01)
    assert all(time_s <= 1.07 * best_s(curves, 256) for _, time_s in steps[10:])
