"""Balancers under looks of any kind: their shares always sum to the batch and keep the limits."""

from __future__ import annotations

import json
import math
from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from rubberband.planner.balancing import Look, ShareLimits, make_balancer
from rubberband.values.balance import Balance, BalancePolicy

WORKERS = 3
times_s = st.one_of(st.sampled_from([0.0, math.nan, math.inf, 1e-9, 1e9]), st.floats(1e-4, 10.0))
resources = st.one_of(st.none(), st.tuples(*[st.floats(0.0, 64.0)] * WORKERS))
policies = st.sampled_from(get_args(BalancePolicy))
steps = st.tuples(
    st.integers(1, 300),
    st.tuples(*[times_s] * WORKERS),
    resources,
    resources,
    st.tuples(*[st.integers(0, 200)] * WORKERS),
    st.integers(1, 3),
    st.booleans(),
)


@given(policies, st.sampled_from(["cpu", "cuda"]), st.lists(steps, min_size=1, max_size=12))
def test_shares_sum_to_the_batch_and_keep_limits_that_can_be_kept(policy, device, looks):
    balancer = make_balancer(Balance(policy=policy), device, WORKERS)
    for batch_size, seconds, cpu, memory, caps, least, free in looks:
        limits = ShareLimits(caps=caps, least=least, zero_costs_nothing=free)
        shares = balancer.shares(batch_size, limits)
        assert sum(shares) == batch_size
        assert all(share >= 0 for share in shares)
        if min(caps) >= batch_size >= least:
            assert all(share == 0 or least <= share for share in shares)
        if sum(caps) >= batch_size and least == 1:
            assert all(share <= cap for share, cap in zip(shares, caps, strict=True))
        balancer.observe(Look(shares=shares, compute_s=seconds, cpu=cpu, memory=memory))
        for line in balancer.lines():
            assert math.isfinite(line.base_s)
            assert line.base_s >= 0.0
            assert line.per_sample_s >= 0.0
        assert all(0 <= rank < WORKERS for rank in balancer.stragglers())
    json.dumps(balancer.state(), allow_nan=True)


@given(policies, st.sampled_from(["cpu", "cuda"]))
def test_memory_is_bounded(policy, device):
    balancer = make_balancer(Balance(policy=policy), device, 2)
    sizes = []
    for look in range(200):
        balancer.observe(Look(shares=(8, 8), compute_s=(0.1 + 1e-3 * (look % 7), 0.2), cpu=(1.0, 2.0)))
        sizes.append(sum(len(str(key)) for key in _leaves(balancer.state())))
    assert len(set(sizes[100:])) == 1


def _leaves(value):
    """A path for each plain value."""
    if isinstance(value, dict):
        return [(key, *path) for key, part in value.items() for path in _leaves(part)]
    if isinstance(value, list):
        return [(at, *path) for at, part in enumerate(value) for path in _leaves(part)]
    return [()]
