"""When the last of many trials ends, taken many trials at a time, against list scheduling one by one."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rubberband.planner.noise.makespan import makespan

ROWS = 24


def scheduled(trials_s, num_slots):
    """One trial after another, each row by itself."""
    latest = []
    for row in trials_s.T.astype(float).tolist():
        free_s = row[:num_slots]
        heapq.heapify(free_s)
        for trial_s in row[num_slots:]:
            heapq.heapreplace(free_s, free_s[0] + trial_s)
        latest.append(max(free_s))
    return np.array(latest)


def trials_of(seed, num_trials, cv, startup_s=0.0):
    """Of a mean of 10 seconds."""
    variance = np.log1p(cv * cv)
    normals = np.random.default_rng(seed).standard_normal((num_trials, ROWS))
    return (startup_s + 10.0 * np.exp(np.sqrt(variance) * normals - variance / 2.0)).astype(np.float32)


@given(st.integers(0, 10**6), st.integers(1, 160), st.integers(1, 31), st.floats(0.0, 2.0), st.sampled_from([0.0, 5.0]))
@settings(max_examples=150, deadline=None)
def test_few_trials_are_scheduled_exactly(seed, num_trials, num_slots, cv, startup_s) -> None:
    trials_s = trials_of(seed, num_trials, cv, startup_s)
    assert makespan(trials_s, num_slots) == pytest.approx(scheduled(trials_s, num_slots), rel=2e-5)


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0]), min_size=1, max_size=60), st.integers(1, 60))
@settings(max_examples=150, deadline=None)
def test_trials_that_end_at_once_are_too(times_s, num_slots) -> None:
    trials_s = np.array(times_s, np.float32)[:, None]
    assert makespan(trials_s, num_slots) == pytest.approx(scheduled(trials_s, num_slots))


@given(st.integers(0, 10**6), st.integers(600, 3000), st.integers(1, 1200), st.floats(0.0, 0.5))
@settings(max_examples=40, deadline=None)
def test_many_trials_are_scheduled_nearly(seed, num_trials, num_slots, cv) -> None:
    """Within 0.2 % on average, and each row within a part of one trial."""
    trials_s = trials_of(seed, num_trials, cv)
    expected, found = scheduled(trials_s, num_slots), makespan(trials_s, num_slots)
    assert found.mean() == pytest.approx(expected.mean(), rel=0.002)
    assert np.abs(found - expected).max() <= 0.5 * trials_s.max()


@given(st.integers(0, 10**6), st.integers(600, 3000), st.integers(1, 600), st.floats(0.5, 1.5))
@settings(max_examples=20, deadline=None)
def test_trials_that_vary_very_much_are_not_taken_to_be_faster(seed, num_trials, num_slots, cv) -> None:
    trials_s = trials_of(seed, num_trials, cv)
    expected, found = scheduled(trials_s, num_slots), makespan(trials_s, num_slots)
    assert 0.995 * expected.mean() <= found.mean() <= 1.03 * expected.mean()
