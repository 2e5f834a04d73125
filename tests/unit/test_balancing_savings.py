"""The step with equal shares is known long after the shares were equal, also where workers have changed since."""

from __future__ import annotations

import json

import pytest

from rubberband.planner.balancing import Look, even_shares, make_balancer
from rubberband.values.balance import Balance
from tests.builders.balancing import Curve, even_limits, train

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


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("gang", GANGS)
@pytest.mark.parametrize(("factor", "last_look"), [(1.0, LOOKS), (1.6, LOOKS), (1.6, 350)])
def test_the_saving_is_right_after_many_looks_at_balanced_shares(device, gang, factor, last_look):
    balancer, curves = make_balancer(Balance(), device, len(GANGS[gang])), slowed(GANGS[gang], factor, 250, last_look)
    steps = train(balancer, curves, BATCH, LOOKS, noise=0.02, seed=1)
    assert all(shares != even_shares(BATCH, len(GANGS[gang])) for shares, _ in steps[20:])
    true, predicted = true_and_predicted(balancer, curves(LOOKS - 1))
    assert predicted == pytest.approx(true, rel=0.1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_it_is_right_after_a_restart_too(device):
    first, second = (make_balancer(Balance(), device, 2) for _ in range(2))
    train(first, LINEAR, BATCH, 100, noise=0.02)
    second.restore(json.loads(json.dumps(first.state())))
    train(second, LINEAR, BATCH, 100, noise=0.02, seed=1)
    true, predicted = true_and_predicted(second, LINEAR)
    assert predicted == pytest.approx(true, rel=0.1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_equal_workers_save_nothing(device):
    balancer = make_balancer(Balance(), device, 4)
    train(balancer, (LINEAR[0],) * 4, BATCH, 100, noise=0.05)
    assert true_and_predicted(balancer, (LINEAR[0],) * 4) == (0.0, 0.0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_step_with_more_samples_is_at_most_slower_in_proportion(device):
    balancer = make_balancer(Balance(policy="paper"), device, 2)
    for look in range(40):  # as if the first look had been of a worker that still warmed up
        shares = (32, 32) if look == 0 else (8, 56)
        balancer.observe(Look(shares=shares, compute_s=(9.0, 0.1) if look == 0 else (0.1, 0.1)))
    assert balancer.step_s((32, 32), even_limits(2, 64)) <= 0.4 * (1 + 1e-9)
