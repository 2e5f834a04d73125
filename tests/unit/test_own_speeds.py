"""How fast each trial is for itself: what is told from chance, and whether the better ones are the slower ones."""

from __future__ import annotations

import math
import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.executor.core.own_speeds import OwnSpeed, own_speeds, updated, with_metric


def drawn(trials: int, iterations: int, trial_cv: float, iteration_cv: float, seed: int = 1) -> dict[int, list[float]]:
    chance = random.Random(seed)

    def factor(cv: float) -> float:
        variance = math.log1p(cv * cv)
        return chance.lognormvariate(-variance / 2.0, math.sqrt(variance))

    own = [factor(trial_cv) for _ in range(trials)]
    return {trial: [own[trial] * factor(iteration_cv) for _ in range(iterations)] for trial in range(trials)}


def test_trials_that_are_alike_have_no_speed_of_their_own() -> None:
    found = own_speeds({trial: [1.3, 1.3] for trial in range(8)}, 0.0, 0.0)
    assert (found.trial_cv, found.iteration_cv, found.of) == (0.0, 0.0, {})
    assert own_speeds({}, 0.2, 0.1).of == {}


def test_a_steady_difference_is_the_trials_own_and_known_exactly() -> None:
    ratios = drawn(16, 4, 0.2, 0.0)
    found = own_speeds(ratios, 0.2, 0.0)
    assert found.trial_cv == 0.2
    for trial, taken in ratios.items():
        assert found.of[trial].factor == pytest.approx(taken[0])
        assert found.of[trial].error == 0.0


def test_differences_by_chance_are_shrunk_towards_the_others() -> None:
    ratios = drawn(32, 4, 0.2, 0.3)
    found = own_speeds(ratios, 0.2, 0.3)
    for trial, taken in ratios.items():
        seen, known = fmean(taken), found.of[trial]
        if abs(seen - 1.0) > 0.1:
            assert min(1.0, seen) < known.factor < max(1.0, seen)
        assert 0.08 < known.error < 0.15


def test_iterations_that_vary_make_no_trial_slow() -> None:
    assert own_speeds(drawn(16, 4, 0.0, 0.3), 0.0, 0.3).of == {}
    assert own_speeds(drawn(16, 4, 0.0, 0.3), 0.0, 0.0).of == {}


def test_the_run_may_show_that_trials_differ_of_which_nothing_was_profiled() -> None:
    found = own_speeds(drawn(64, 4, 0.3, 0.05), 0.0, 0.0)
    assert found.trial_cv == pytest.approx(0.3, rel=0.3)
    assert found.iteration_cv == pytest.approx(0.05, rel=0.3)


def test_two_sources_that_cannot_be_reported_apart_share_what_is_seen() -> None:
    found = own_speeds(drawn(64, 1, 0.2, 0.0), 0.0, 0.0)
    assert found.trial_cv == pytest.approx(found.iteration_cv)
    assert found.of[0].error > 0.05


def test_few_trials_do_not_show_how_much_trials_differ() -> None:
    assert own_speeds({0: [1.0, 1.0], 1: [2.0, 2.0]}, 0.1, 0.0).trial_cv == 0.1


@given(st.integers(0, 10_000))
def test_the_estimate_is_closer_than_what_was_seen(seed: int) -> None:
    own = {trial: taken[0] for trial, taken in drawn(64, 1, 0.1, 0.0, seed).items()}
    noise = drawn(64, 2, 0.0, 0.4, seed + 1)
    ratios = {trial: [own[trial] * factor for factor in noise[trial]] for trial in own}
    found = own_speeds(ratios, 0.1, 0.4)
    missed = fmean((found.of[trial].factor - own[trial]) ** 2 for trial in own)
    assert missed < fmean((fmean(ratios[trial]) - own[trial]) ** 2 for trial in own)


def test_more_iterations_show_more() -> None:
    before = OwnSpeed(factor=1.0, error=0.2)
    after = updated(before, 1.5, 4, 0.2)
    assert before.factor < after.factor < 1.5
    assert after.error < before.error
    assert updated(before, 1.5, 400, 0.2).factor == pytest.approx(1.5, rel=0.01)
    assert updated(OwnSpeed(factor=1.2, error=0.0), 2.0, 4, 0.1).factor == 1.2


def test_slow_trials_that_win_show_a_correlation() -> None:
    slowest_first = [2.0 - 0.05 * place for place in range(16)]
    assert with_metric([slowest_first]) > 0.9
    assert with_metric([slowest_first[::-1]]) < -0.9
    shuffled = random.Random(3).sample(slowest_first, 16)
    assert with_metric([shuffled]) == 0.0


def test_few_trials_show_none() -> None:
    assert with_metric([]) == 0.0
    assert with_metric([[1.2, 1.1, 1.0, 0.9]]) == 0.0
    assert with_metric([[1.0] * 16]) == 0.0
    assert abs(with_metric([[1.1, 1.3, 1.0, 1.2, 0.9, 0.8]])) < 0.9
