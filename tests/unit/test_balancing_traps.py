"""Traps of Algorithm 2 as it is printed (LB-BSP): policy `paper` falls into each, `auto` into none."""

from __future__ import annotations

import itertools

import pytest

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


def test_a_step_of_five_samples_is_small_for_a_batch_of_4096():
    curves = (line(0.0001), line(0.0002), line(0.0004), line(0.0008))

    def steps_needed(policy):
        steps = train(gpu(policy, 4), curves, 4096, 1500)
        bound_s = best_s(curves, 4096)
        return next((at for at, (_, time_s) in enumerate(steps) if time_s <= LIMIT * bound_s), 1500)

    assert steps_needed(PAPER) > 150
    assert steps_needed(AUTO) <= 8


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


def test_no_worker_moves_where_only_the_straggler_has_memory_left():
    curves = (line(0.01), line(0.01), line(0.03))
    limits = ShareLimits(caps=(40, 40, 96))

    def free(shares):
        return [0.04, 0.04, 0.9]

    paper, auto = (train(gpu(policy, 3), curves, 96, 200, limits=limits, memory=free) for policy in (PAPER, AUTO))
    assert {shares for shares, _ in paper} == {(32, 32, 32)}
    assert auto[-1][0] == (40, 40, 16)


@pytest.mark.parametrize("times_s", [(0.1, 0.1), (0.2, 0.2)])
def test_workers_of_the_same_time_are_leader_and_straggler_at_once(times_s):
    algorithm = Algorithm2(2)
    for _ in range(30):
        assert algorithm.update((50, 50), times_s, (0.5, 0.5)) == (50, 50)


def test_the_window_of_a_move_is_not_reset_so_the_next_look_moves_again():
    algorithm, shares = Algorithm2(2), (50, 50)
    for _ in range(5):
        shares = algorithm.update(shares, (0.1, 0.2), (0.5, 0.5))
    assert shares == (55, 45)
    assert algorithm.update(shares, (0.1, 0.2), (0.5, 0.5)) == (60, 40)
