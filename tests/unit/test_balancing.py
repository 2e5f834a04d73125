"""Balancers of a gang: they find the best shares, leave equal workers alone, keep limits and can be resumed."""

from __future__ import annotations

import json
import math

import pytest

from rubberband.planner.balancing import Look, ShareLimits, even_shares, make_balancer
from rubberband.values.balance import BALANCE_POLICIES, Balance
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
@pytest.mark.parametrize("policy", BALANCE_POLICIES)
def test_limits_hold_at_every_step(device, policy):
    limits = ShareLimits(caps=(60, 40, 40, 40), least=2)
    steps = train(make_balancer(Balance(policy=policy), device, 4), CLUSTER, 129, 60, limits=limits, noise=0.1)
    for shares, _ in steps:
        assert sum(shares) == 129
        assert all(share == 0 or 2 <= share <= cap for share, cap in zip(shares, limits.caps, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", BALANCE_POLICIES)
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
@pytest.mark.parametrize("policy", BALANCE_POLICIES)
def test_a_balancer_without_looks_divides_evenly_and_predicts_nothing(device, policy):
    balancer = make_balancer(Balance(policy=policy), device, 3)
    assert balancer.shares(10, even_limits(3, 10)) == even_shares(10, 3)
    assert balancer.lines() == ()
    assert math.isnan(balancer.step_s((4, 3, 3), even_limits(3, 10)))
    assert balancer.stragglers() == ()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", BALANCE_POLICIES)
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


def test_a_worker_without_a_time_keeps_its_line():
    balancer, limits = make_balancer(AUTO, "cuda", 2), even_limits(2, 64)
    train(balancer, EQUAL[:2], 64, 5)
    before = balancer.lines()
    balancer.observe(Look(shares=(32, 32), compute_s=(before[0].time_s(32), math.nan)))
    assert balancer.lines()[1] == before[1]
    assert sum(balancer.shares(64, limits)) == 64


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", BALANCE_POLICIES)
def test_looks_without_any_time_leave_the_shares_even(device, policy):
    balancer, limits = make_balancer(Balance(policy=policy), device, 3), even_limits(3, 12)
    balancer.observe(Look(shares=(4, 4, 4), compute_s=(math.nan,) * 3))
    assert balancer.shares(12, limits) == (4, 4, 4)
