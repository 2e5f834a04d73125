"""Balancing a gang of unequal workers: shares, predictors, what is saved, and traps."""

from __future__ import annotations

import json
import math
from typing import Any, get_args

import numpy as np
import pytest

from rubberband.planner.balancing import Look, ShareLimits, make_balancer
from rubberband.planner.balancing.paper import ENOUGH, Narx, OwnNarx
from rubberband.planner.balancing.speed_balancer import Ema, FixedPart, Gated, Memoryless, NormalisedEma
from rubberband.values.balance import Balance, BalancePolicy, even_shares
from tests.builders.balancing import CLUSTER, K80, M60, V100, Curve, best_s, even_limits, train

EQUAL = (Curve(base_s=0.05, per_sample_s=0.01),) * 4
AUTO = Balance()
DEVICES = ("cpu", "cuda")
CPUS = tuple(Curve(base_s=0.0, per_sample_s=0.01 / cpus) for cpus in (1, 1, 2, 4))


def test_four_unlike_gpus_are_balanced_after_a_few_looks():
    steps = train(make_balancer(AUTO, "cuda", 4), CLUSTER, 128, 30)
    assert steps[0][0] == (32, 32, 32, 32)
    bound_s = best_s(CLUSTER, 128)
    assert all(time_s <= 1.05 * bound_s for _, time_s in steps[5:])


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_keep_them_from_it(seed):
    steps = train(make_balancer(AUTO, "cuda", 4), CLUSTER, 128, 60, noise=0.02, seed=seed)
    assert all(time_s <= 1.05 * best_s(CLUSTER, 128) for _, time_s in steps[20:])


def test_a_gpu_that_slows_down_and_recovers_is_followed():
    def curves(step: int) -> tuple[Curve, ...]:
        slow = Curve(base_s=0.15, per_sample_s=0.060, saturation=4)
        return (V100, slow if 40 <= step < 80 else M60, K80, CLUSTER[3])

    steps = train(make_balancer(AUTO, "cuda", 4), curves, 128, 120, noise=0.01)
    for end in (39, 79, 119):
        assert steps[end][1] <= 1.06 * best_s(curves(end), 128)


def test_shares_of_gpus_are_multiples_of_eight_at_any_batch_size_that_is_large():
    balancer = make_balancer(AUTO, "cuda", 4)
    for batch_size in (2048, 3 * 2048, 2400):
        steps = train(balancer, CLUSTER, batch_size, 60, noise=0.02)
        assert all(sum(share % 8 > 0 for share in shares) <= 1 for shares, _ in steps)
        assert all(time_s <= 1.05 * best_s(CLUSTER, batch_size) for _, time_s in steps[20:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
def test_equal_workers_keep_equal_shares(device, noise):
    steps = train(make_balancer(AUTO, device, 4), EQUAL, 256, 200, noise=noise, seed=3)
    assert {shares for shares, _ in steps} == {(64, 64, 64, 64)}


def test_cpu_workers_get_shares_in_proportion_to_their_speeds():
    steps = train(make_balancer(AUTO, "cpu", 4), CPUS, 256, 5)
    assert steps[1][0] == (32, 32, 64, 128)


def test_a_change_of_the_available_cpus_is_in_the_very_next_shares():
    balancer, limits = make_balancer(AUTO, "cpu", 2), even_limits(2, 100)
    for _ in range(10):
        shares = balancer.shares(100, limits)
        balancer.observe(Look(shares=shares, compute_s=tuple(0.01 * x for x in shares), cpu=(4.0, 4.0)))
    assert shares == (50, 50)
    balancer.observe(Look(shares=shares, compute_s=tuple(0.01 * x for x in shares), cpu=(4.0, 1.0)))
    assert balancer.shares(100, limits)[1] == pytest.approx(20, abs=3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", get_args(BalancePolicy))
def test_a_batch_of_another_size_keeps_the_proportion(device, policy):
    balancer = make_balancer(Balance(policy=policy), device, 4)
    train(balancer, CPUS, 256, 60)
    small, large = (balancer.shares(size, even_limits(4, size)) for size in (256, 512))
    assert sum(large) == 512
    assert all(abs(one - 2 * other) <= 2 for one, other in zip(large, small, strict=True))


def test_equal_policy_predicts_but_never_moves():
    balancer = make_balancer(Balance(policy="equal"), "cpu", 4)
    steps = train(balancer, CPUS, 256, 30)
    assert {shares for shares, _ in steps} == {(64, 64, 64, 64)}
    assert balancer.step_s((64, 64, 64, 64), even_limits(4, 256)) == pytest.approx(0.64)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", get_args(BalancePolicy))
def test_a_balancer_without_looks_divides_evenly_and_predicts_nothing(device, policy):
    balancer = make_balancer(Balance(policy=policy), device, 3)
    assert balancer.shares(10, even_limits(3, 10)) == even_shares(10, 3)
    assert balancer.lines() == ()
    assert math.isnan(balancer.step_s((4, 3, 3), even_limits(3, 10)))
    assert balancer.stragglers() == ()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", get_args(BalancePolicy))
def test_a_restored_balancer_goes_on_as_if_nothing_had_happened(device, policy):
    first, second = (make_balancer(Balance(policy=policy), device, 4) for _ in range(2))
    train(first, CLUSTER, 128, 30, noise=0.03)
    second.restore(json.loads(json.dumps(first.state())))
    went_on, restored = (train(each, CLUSTER, 128, 20, noise=0.03, seed=1) for each in (first, second))
    assert went_on == restored


def test_the_state_of_another_gang_is_ignored():
    balancer = make_balancer(AUTO, "cuda", 3)
    other = make_balancer(AUTO, "cuda", 4)
    train(other, CLUSTER, 128, 5)
    balancer.restore(other.state())
    assert balancer.lines() == ()


def test_a_worker_that_alone_holds_the_gang_up_is_a_straggler_after_twenty_steps():
    bound = Curve(base_s=2.0, per_sample_s=1e-4)
    balancer = make_balancer(AUTO, "cuda", 4)
    train(balancer, (*EQUAL[:3], bound), 64, 15, limits=ShareLimits(caps=(64,) * 4))
    assert balancer.stragglers() == ()
    train(balancer, (*EQUAL[:3], bound), 64, 10, limits=ShareLimits(caps=(64,) * 4))
    assert balancer.stragglers() == (3,)


@pytest.mark.parametrize("device", DEVICES)
def test_workers_that_help_are_no_stragglers(device):
    balancer = make_balancer(AUTO, device, 4)
    train(balancer, CLUSTER, 128, 60, noise=0.02)
    assert balancer.stragglers() == ()


def test_a_worker_without_samples_is_probed_and_comes_back_once_it_has_recovered():
    def curves(step: int) -> tuple[Curve, ...]:
        return (*EQUAL[:3], Curve(base_s=0.5, per_sample_s=0.01) if step < 60 else EQUAL[3])

    balancer = make_balancer(AUTO, "cuda", 4)
    before = train(balancer, curves, 64, 60)
    assert before[-1][0][3] == 0
    assert sum(share[3] > 0 for share, _ in before[20:]) <= 1
    after = train(balancer, lambda step: curves(60 + step), 64, 600)
    assert after[-1][0][3] >= 14


BATCH = 64
LOOKS = 500
LINEAR = (Curve(base_s=0.005, per_sample_s=0.0022), Curve(base_s=0.02, per_sample_s=0.0003))
FLAT_THEN_LINEAR = (
    Curve(base_s=0.01, per_sample_s=0.004, saturation=8),
    Curve(base_s=0.01, per_sample_s=0.001, saturation=24),
)
PROPORTIONAL = tuple(Curve(base_s=0.0, per_sample_s=0.01 / cpus) for cpus in (1, 2, 3, 4))
GANGS = {"linear": LINEAR, "flat then linear": FLAT_THEN_LINEAR, "proportional": PROPORTIONAL}


def slowed(gang, factor, first_look, last_look=LOOKS, rank=0):
    """Curves by step, with one worker slower from one look to another."""
    curve = gang[rank]
    slow = Curve(base_s=factor * curve.base_s, per_sample_s=factor * curve.per_sample_s, saturation=curve.saturation)
    other = (*gang[:rank], slow, *gang[rank + 1 :])
    return lambda step: other if first_look <= step < last_look else gang


def saved(step_s, equal_step_s):
    return 1.0 - step_s / equal_step_s


def true_and_predicted(balancer, curves):
    """Parts of a step with equal shares that the present ones save."""
    limits, even = even_limits(len(curves), BATCH), even_shares(BATCH, len(curves))
    now = balancer.shares(BATCH, limits)
    true_s = (max(curve.time_s(share) for curve, share in zip(curves, each, strict=True)) for each in (now, even))
    return saved(*true_s), saved(balancer.step_s(now, limits), balancer.step_s(even, limits))


@pytest.mark.by_default(6)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("gang", GANGS)
@pytest.mark.parametrize(("factor", "last_look"), [(1.0, LOOKS), (1.6, LOOKS), (1.6, 350)])
def test_the_saving_is_right_after_many_looks_at_balanced_shares(device, gang, factor, last_look):
    balancer, curves = make_balancer(Balance(), device, len(GANGS[gang])), slowed(GANGS[gang], factor, 250, last_look)
    steps = train(balancer, curves, BATCH, LOOKS, noise=0.02, seed=1)
    assert all(shares != even_shares(BATCH, len(GANGS[gang])) for shares, _ in steps[20:])
    true, predicted = true_and_predicted(balancer, curves(LOOKS - 1))
    assert predicted == pytest.approx(true, rel=0.1)


def trace(workers: int, steps: int, every: float = 60.0) -> tuple[Any, Any, Any]:
    """(steps, workers) Speeds of workers on shared CPUs, those CPUs, which shift now and then, and their memory."""
    random = np.random.default_rng(0)
    fresh, moves = random.uniform(0.15, 1.0, (steps, workers)), random.random((steps, workers)) < 1.0 / every
    moves[0] = True
    at = np.maximum.accumulate(np.where(moves, np.arange(steps)[:, None], 0), axis=0)
    cpu = np.take_along_axis(fresh, at, axis=0) * np.exp(0.01 * random.normal(size=fresh.shape))
    return 10.0 * cpu**0.9 * np.exp(0.05 * random.normal(size=cpu.shape)), cpu, np.ones_like(cpu)


PREDICTORS = {
    "memoryless": Memoryless,
    "ema": Ema,
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
    first, second = PREDICTORS[name](3), PREDICTORS[name](3)
    forecasts(first, *trace(3, 60))
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
    predictor, (speeds, cpu, memory) = NormalisedEma(8), trace(8, 400)
    found = forecasts(predictor, speeds, cpu, memory)[200:]
    assert 0.75 <= predictor.exponents()[0] <= 1.05
    assert np.quantile(np.abs(found / speeds[200:] - 1.0), 0.95) < 0.2


def test_each_worker_of_the_papers_policy_has_a_network_from_its_500th_iteration_on():
    own, ema, random = OwnNarx(2), Ema(2), np.random.default_rng(0)
    for _ in range(ENOUGH + 2):
        noisy = np.array([10.0, np.nan if own.networks[0].samples < 5 else 20.0]) * np.exp(0.1 * random.normal(size=2))
        for each in (own, ema):
            each.observe(noisy, np.ones(2), np.ones(2))
    again = OwnNarx(2)
    again.restore(own.state())

    assert [network.samples >= ENOUGH for network in own.networks] == [True, False]
    assert own.forecast()[0] != ema.forecast()[0]
    assert own.forecast()[1] == pytest.approx(ema.forecast()[1])
    assert again.forecast().tolist() == own.forecast().tolist()


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
