"""Makespans of many trials."""

import heapq

import numpy as np
import pytest

from rubberband.planner.sampling import makespan


def scheduled(trials_s, num_slots):
    """List scheduling, one trial after another."""
    free_s = list(trials_s[:num_slots])
    heapq.heapify(free_s)
    for trial_s in trials_s[num_slots:]:
        heapq.heapreplace(free_s, free_s[0] + trial_s)
    return max(free_s)


@pytest.mark.parametrize("num_slots", [1, 2, 16, 17, 60, 200, 300])
def test_it_is_list_scheduling(num_slots: int) -> None:
    trials_s = np.random.default_rng(1).lognormal(0.0, 0.4, (200, 20))
    expected = [scheduled(trials_s[:, row], num_slots) for row in range(20)]
    assert makespan(trials_s, num_slots) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("num_slots", "rel"), [(64, 0.01), (250, 0.01)])
def test_thousands_of_trials_in_many_waves_are_nearly_scheduled(num_slots: int, rel: float) -> None:
    trials_s = 2.0 + 20.0 * np.random.default_rng(1).lognormal(-0.08, 0.4, (3000, 30))
    expected = np.mean([scheduled(trials_s[:, row], num_slots) for row in range(30)])
    assert makespan(trials_s, num_slots).mean() == pytest.approx(expected, rel=rel)


def test_in_few_waves_they_are_never_taken_to_be_faster() -> None:
    trials_s = np.random.default_rng(1).lognormal(0.0, 0.4, (3000, 10))
    for num_slots in (400, 1000, 2000, 2999, 3000):
        expected = np.array([scheduled(trials_s[:, row], num_slots) for row in range(10)])
        assert (makespan(trials_s, num_slots) >= expected - 1e-9).all()


@pytest.mark.parametrize("cv", [0.0, 0.05, 0.15, 0.6])
@pytest.mark.parametrize(("trials", "num_slots"), [(64, 16), (33, 16), (90, 40), (41, 8)])
def test_trials_that_vary_little_are_scheduled_the_same(trials: int, num_slots: int, cv: float) -> None:
    trials_s = 5.0 + 10.0 * np.exp(cv * np.random.default_rng(3).standard_normal((trials, 300)))
    expected = [scheduled(trials_s[:, row], num_slots) for row in range(300)]
    assert makespan(trials_s, num_slots) == pytest.approx(expected, abs=1e-6)
