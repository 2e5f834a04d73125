"""Divisions of a batch: exactly the best one on small cases, close to the continuous bound on large ones."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.planner.balancing.shares import (
    ALIGNED_COST,
    Line,
    ShareLimits,
    aligned_shares,
    min_max_shares,
    slowest_s,
)
from rubberband.values.balance import scale_shares

seconds = st.one_of(st.just(0.0), st.floats(1e-3, 10.0))
lines = st.builds(Line, seconds, seconds)


@st.composite
def cases(draw, largest_batch=12, most_workers=4):
    """Lines, a batch and limits that some division keeps."""
    workers = draw(st.lists(lines, min_size=1, max_size=most_workers))
    batch_size = draw(st.integers(1, largest_batch))
    caps = draw(st.lists(st.integers(0, largest_batch), min_size=len(workers), max_size=len(workers)))
    limits = ShareLimits(caps=tuple(caps), least=draw(st.integers(1, 3)), zero_costs_nothing=draw(st.booleans()))
    return workers, batch_size, limits


def every_division(batch_size, limits):
    """All divisions that keep the limits."""
    choices = [[0, *range(limits.least, cap + 1)] for cap in limits.caps]
    return [shares for shares in itertools.product(*choices) if sum(shares) == batch_size]


@given(cases())
def test_no_division_within_the_limits_is_faster(case):
    workers, batch_size, limits = case
    found = min_max_shares(workers, batch_size, limits)
    assert sum(found) == batch_size
    divisions = every_division(batch_size, limits)
    if divisions:
        assert found in divisions
        best_s = min(slowest_s(workers, shares, limits) for shares in divisions)
        assert slowest_s(workers, found, limits) == pytest.approx(best_s, rel=1e-9)


@given(st.lists(st.builds(Line, seconds, st.floats(1e-4, 1.0)), min_size=2, max_size=64), st.integers(1, 100_000))
def test_a_large_batch_takes_one_sample_more_than_the_continuous_bound_at_most(workers, batch_size):
    limits = ShareLimits(caps=(batch_size,) * len(workers), zero_costs_nothing=True)
    found = min_max_shares(workers, batch_size, limits)
    assert sum(found) == batch_size
    low, high = 0.0, max(line.time_s(batch_size) for line in workers)
    for _ in range(200):
        middle = 0.5 * (low + high)
        done = sum(max(0.0, middle - line.base_s) / line.per_sample_s for line in workers)
        low, high = (low, middle) if done >= batch_size else (middle, high)
    time_s = slowest_s(workers, found, limits)
    slowest = max(line.per_sample_s for line in workers if line.base_s <= high)
    assert low * (1.0 - 1e-9) <= time_s <= high * (1.0 + 1e-9) + slowest


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 4))
def test_a_batch_that_the_caps_do_not_hold_is_done_in_passes(caps, factor):
    workers = [Line(0.1, 0.01 * (rank + 1)) for rank in range(len(caps))]
    batch_size = factor * sum(caps)
    found = min_max_shares(workers, batch_size, ShareLimits(caps=tuple(caps)))
    assert found == tuple(min(batch_size, factor * cap) for cap in caps)


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=64), st.integers(0, 10_000))
def test_proportional_shares_are_off_by_less_than_one_sample(weights, batch_size):
    found = scale_shares(weights, batch_size)
    assert sum(found) == batch_size
    for weight, share in zip(weights, found, strict=True):
        assert abs(share - weight / sum(weights) * batch_size) < 1.0 + 1e-6


def test_a_sample_that_is_left_over_goes_to_whom_it_brings_nearest_to_its_proportion():
    assert scale_shares([3, 3, 4], 7) == (2, 2, 3)
    assert scale_shares([1.0, 1.0, 1.0, 0.5], 12) == (4, 3, 3, 2)


@given(cases(largest_batch=600, most_workers=8))
def test_multiples_cost_little_and_take_the_whole_batch(case):
    workers, batch_size, limits = case
    best = min_max_shares(workers, batch_size, limits)
    found = aligned_shares(workers, best, limits)
    assert sum(found) == batch_size
    assert slowest_s(workers, found, limits) <= (1.0 + ALIGNED_COST) * slowest_s(workers, best, limits)
    if found != best:
        multiple = next(multiple for multiple in (8, 4, 2, 1) if sum(share % multiple > 0 for share in found) <= 1)
        assert multiple > 1
        assert all(share == 0 or limits.least <= share for share in found)


@pytest.mark.parametrize(
    ("best", "expected"),
    [
        ((50, 39, 24, 15), (50, 39, 24, 15)),
        ((101, 77, 48, 30), (100, 78, 48, 30)),
        ((804, 618, 383, 243), (808, 616, 384, 240)),
        ((804, 619, 383, 243), (808, 616, 384, 241)),
    ],
)
def test_the_larger_the_batch_the_larger_the_multiples(best, expected):
    workers, limits = [Line(0.0, slow) for slow in (1.0, 1.3, 2.1, 3.3)], ShareLimits(caps=(2048,) * 4)
    assert min_max_shares(workers, sum(best), limits) == best
    assert aligned_shares(workers, best, limits) == expected


def test_even_shares_stay_also_where_a_worker_s_time_hardly_depends_on_its_share():
    assert aligned_shares([Line(1.0, 1e-6)] * 3, (34, 33, 33), ShareLimits(caps=(100,) * 3)) == (34, 33, 33)
