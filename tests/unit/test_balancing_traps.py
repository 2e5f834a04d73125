"""Traps of Algorithm 2 as it is printed (LB-BSP): policy `paper` falls into each, `auto` into none."""

from __future__ import annotations

import itertools

from rubberband.planner.balancing import ShareLimits, make_balancer
from rubberband.planner.balancing.paper import Algorithm2
from rubberband.values.balance import Balance
from tests.builders.balancing import CLUSTER, Curve, best_s, train

AUTO, PAPER = Balance(), Balance(policy="paper")
LIMIT = 1.05
"""Times of the best step that count as balanced."""


def gpu(policy, num_workers):
    return make_balancer(policy, "cuda", num_workers)


def line(per_sample_s, base_s=0.0):
    return Curve(base_s=base_s, per_sample_s=per_sample_s)


def moves(steps):
    return sum(one[0] != other[0] for one, other in itertools.pairwise(steps))


def test_small_shares_never_move_as_line_5_returns_first():
    curves = (line(0.01), line(0.01), line(0.04))
    paper, auto = (train(gpu(policy, 3), curves, 15, 200) for policy in (PAPER, AUTO))
    assert {shares for shares, _ in paper} == {(5, 5, 5)}
    assert auto[-1][0] == (7, 7, 1)


def test_a_shift_after_fine_tuning_is_followed_sample_by_sample():
    def curves(step):
        return CLUSTER if step < 400 else (CLUSTER[2], *CLUSTER[1:])

    def steps_to_recover(policy):
        steps = train(gpu(policy, 4), curves, 128, 600)
        bound_s = best_s(curves(400), 128)
        return next((at for at, (_, time_s) in enumerate(steps[400:]) if time_s <= LIMIT * bound_s), 200)

    assert steps_to_recover(PAPER) >= 50
    assert steps_to_recover(AUTO) <= 10


def test_shares_move_to_and_fro_without_a_dead_band():
    curves = (line(0.010), line(0.010), line(0.0104), line(0.0104))
    paper, auto = (train(gpu(policy, 4), curves, 256, 400, noise=0.001) for policy in (PAPER, AUTO))
    assert moves(paper[200:]) >= 5
    assert moves(auto[20:]) == 0


def test_a_straggler_bound_by_communication_loses_its_samples_for_nothing():
    curves = (line(0.01), line(0.01), line(0.01), line(0.0001, base_s=2.0))
    limits = ShareLimits(caps=(256,) * 4)
    paper, auto = (train(gpu(policy, 4), curves, 256, 400, limits=limits) for policy in (PAPER, AUTO))
    assert paper[-1][0][3] <= 5
    assert auto[-1][0][3] >= 16
    assert auto[-1][1] <= LIMIT * 2.0


def test_the_leader_is_given_more_than_its_memory_holds():
    """5.5 % of the memory is free, less than 5 samples take: line 2 still allows the leader to grow."""
    algorithm = Algorithm2(2)
    shares = (63, 65)
    for _ in range(5):
        shares = algorithm.update(shares, (0.1, 0.2), (0.945, 0.5))
    assert shares == (68, 60)
    assert 68 * 0.945 / 63 > 1.0

    limits = ShareLimits(caps=(66, 128))
    auto = train(gpu(AUTO, 2), (line(0.001), line(0.003)), 128, 30, limits=limits)
    assert max(shares[0] for shares, _ in auto) == 66
