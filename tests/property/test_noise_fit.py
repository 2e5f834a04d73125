"""The random-effects fit of training times: it recovers the components that times were drawn from."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.executor import Cell, NoiseEstimate, NoiseScale, cell_of
from rubberband.executor.profiling.points import fit
from rubberband.executor.training.goodput.noise_scale import moments

CVS = (0.01, 0.05, 0.1, 0.3)


def drawn(
    seed: int, *, trial_cv: float, iteration_cv: float, trials: int, points: int = 3, iterations: int = 3
) -> list[Cell]:
    """Cells of trials with 1, 2, 4, … GPUs, each with half of the trials of the one before."""
    numbers = np.random.default_rng(seed)
    speeds = numbers.lognormal(0.0, math.sqrt(math.log1p(trial_cv**2)), trials)
    noise = math.sqrt(math.log1p(iteration_cv**2))
    return [
        cell_of(trial, 2**point, (0.7**point * speeds[trial] * numbers.lognormal(0.0, noise, iterations)).tolist())
        for point in range(points)
        for trial in range(max(1, trials // 2**point))
    ]


@pytest.mark.parametrize("trial_cv", CVS)
@pytest.mark.parametrize("iteration_cv", CVS)
def test_components_of_many_trials_are_recovered(trial_cv: float, iteration_cv: float) -> None:
    found = fit(drawn(1, trial_cv=trial_cv, iteration_cv=iteration_cv, trials=400, iterations=6))
    assert found.trial.cv == pytest.approx(trial_cv, rel=0.12, abs=0.1 * iteration_cv)
    assert found.iteration.cv == pytest.approx(iteration_cv, rel=0.05)
    assert found.trial.low_cv < found.trial.cv < found.trial.high_cv


@pytest.mark.parametrize(("trials", "trial_cv"), [(4, 0.03), (4, 0.1), (4, 0.2), (16, 0.05), (16, 0.3)])
def test_intervals_hold_the_truth_nearly_as_often_as_they_say(trials: int, trial_cv: float) -> None:
    fits = [fit(drawn(seed, trial_cv=trial_cv, iteration_cv=0.05, trials=trials)) for seed in range(60)]
    held = [one.trial.low_cv <= trial_cv <= one.trial.high_cv for one in fits]
    assert sum(held) >= 0.75 * len(fits)
    assert sum(one.iteration.low_cv <= 0.05 <= one.iteration.high_cv for one in fits) >= 0.75 * len(fits)


@given(st.integers(0, 10_000), st.integers(2, 6), st.integers(1, 4), st.integers(1, 4))
def test_trials_that_may_differ_are_never_taken_as_alike(seed: int, trials: int, points: int, iterations: int) -> None:
    cells = drawn(seed, trial_cv=0.0, iteration_cv=0.05, trials=trials, points=points, iterations=iterations)
    found = fit(cells)
    assert 0.001 < found.trial.cv < 0.3
    for component in (found.trial, found.iteration):
        assert 0.0 < component.low_cv <= component.high_cv < 8.0


@given(st.integers(0, 10_000), st.floats(0.01, 100.0))
def test_the_unit_of_time_does_not_matter(seed: int, factor: float) -> None:
    cells = drawn(seed, trial_cv=0.1, iteration_cv=0.05, trials=4)
    scaled = [
        Cell(
            trial=cell.trial,
            gpus=cell.gpus,
            mean_s=factor * cell.mean_s,
            log_s=cell.log_s + math.log(factor),
            iterations=cell.iterations,
            scatter=cell.scatter,
        )
        for cell in cells
    ]
    one, other = fit(cells), fit(scaled)
    assert other.trial.cv == pytest.approx(one.trial.cv, rel=1e-3)
    times_s, scaled_s = one.seconds_per_iteration(cells), other.seconds_per_iteration(scaled)
    assert scaled_s == pytest.approx({gpus: factor * time_s for gpus, time_s in times_s.items()}, rel=1e-3)


def test_the_time_of_few_trials_does_not_depend_on_the_measured_ones() -> None:
    """Trial 0 is the slow one, and the only one with 4 GPUs."""
    slow, speeds = 2.0, (2.0, 1.0, 1.0, 1.0)
    cells = [cell_of(trial, 1, [speed, 1.01 * speed]) for trial, speed in enumerate(speeds)]
    cells.append(cell_of(0, 4, [0.5 * slow, 0.505 * slow]))
    found = fit(cells)
    times_s = found.seconds_per_iteration(cells)
    assert times_s[1] == pytest.approx(1.005 * 1.25)
    assert times_s[4] == pytest.approx(0.5 * times_s[1], rel=0.02)


def test_a_trials_own_speed_is_shrunk_by_what_is_unsure_of_it() -> None:
    sure = [cell_of(trial, 1, [speed, 1.001 * speed] * 3) for trial, speed in enumerate((1.2, 1.0, 0.9, 1.0))]
    unsure = [cell_of(trial, 1, [0.6 * speed, 1.6 * speed]) for trial, speed in enumerate((1.2, 1.0, 0.9, 1.0))]
    slowest, seen = fit(sure).log_speeds[0], fit(unsure).log_speeds[0]
    assert slowest == pytest.approx(math.log(1.2) - math.log(1.2 * 0.9) / 4.0, rel=0.05)
    assert 0.0 < seen < 0.5 * slowest


@pytest.mark.parametrize(("trials", "share"), [(4, 2.353), (8, 1.895), (16, 1.753)])
def test_the_mean_of_few_trials_is_unsure_as_students_t_has_it(trials: int, share: float) -> None:
    """By the table of its 95th percentile, over the normal law's."""
    found = fit([cell_of(trial, 1, [1.0 + 0.1 * trial] * 30) for trial in range(trials)])
    plain = found.trial.cv / math.sqrt(trials)
    assert found.mean_error / plain == pytest.approx(share / 1.645, rel=0.03)


@pytest.mark.parametrize("trials", [3, 4, 8])
def test_times_that_are_exactly_alike_have_no_noise(trials: int) -> None:
    cells = [cell_of(trial, gpus, [time_s] * 3) for gpus, time_s in ((1, 4.0), (2, 2.5)) for trial in range(trials)]
    found = fit(cells)
    assert found.trial.cv == pytest.approx(0.0, abs=1e-3)
    assert found.iteration.cv == pytest.approx(0.0, abs=1e-5)
    assert found.seconds_per_iteration(cells) == pytest.approx({1: 4.0, 2: 2.5})


sizes = st.lists(st.integers(1, 500), min_size=2, max_size=6)
coordinates = st.floats(-10.0, 10.0)


@given(sizes=sizes, gradient=coordinates, spread=st.floats(0.1, 10.0))
def test_unbiased_over_all_equally_likely_outcomes(sizes, gradient, spread):
    """Noise of plus or minus one standard error in each part: the mean over all signs is the expectation."""
    batch_size = sum(sizes)
    weights = np.array(sizes) / batch_size
    found = []
    for signs in itertools.product((-1.0, 1.0), repeat=len(sizes)):
        parts = gradient + spread * np.array(signs) / np.sqrt(sizes)
        mean_square, square_of_mean = float(weights @ parts**2), float(weights @ parts) ** 2
        found.append(moments(mean_square, square_of_mean, num_parts=len(sizes), batch_size=batch_size))
    trace, squared_norm = np.mean(found, axis=0)
    assert trace == pytest.approx(spread**2, rel=1e-9)
    assert squared_norm == pytest.approx(gradient**2, rel=1e-9, abs=1e-9 * spread**2)


@given(sizes=sizes, data=st.data())
def test_the_trace_is_never_negative(sizes, data):
    parts = np.array(data.draw(st.lists(coordinates, min_size=len(sizes), max_size=len(sizes))))
    weights = np.array(sizes) / sum(sizes)
    mean_square, square_of_mean = float(weights @ parts**2), float(weights @ parts) ** 2
    trace, _ = moments(mean_square, square_of_mean, num_parts=len(sizes), batch_size=sum(sizes))
    assert trace >= -1e-9 * mean_square * sum(sizes)


values = st.floats(allow_nan=True, allow_infinity=True, width=32)
estimates = st.builds(
    NoiseEstimate,
    kind=st.sampled_from(["workers", "accumulation", "differenced"]),
    preconditioner=st.sampled_from(["identity", "adam"]),
    steps=st.floats(0.01, 1000.0),
    trace=st.one_of(values, st.floats(0.0, 100.0)),
    squared_norm=st.one_of(values, st.floats(-10.0, 10.0)),
)


@given(st.lists(estimates, max_size=40))
def test_phi_is_finite_for_any_input(history):
    scale = NoiseScale()
    for estimate in history:
        scale.add(estimate)
        reading = scale.reading()
        if reading.noise_scale is not None:
            assert math.isfinite(reading.noise_scale)
            assert reading.noise_scale >= 0.0
            assert reading.uncertainty >= 0.0


@given(st.lists(estimates, max_size=30), st.lists(estimates, max_size=30))
def test_a_state_resumes_where_it_was(before, after):
    scale, other = NoiseScale(), NoiseScale()
    for estimate in before:
        scale.add(estimate)
    scale.reading()
    other.load_state_dict(scale.state_dict())
    for estimate in after:
        scale.add(estimate)
        other.add(estimate)
    assert repr(scale.reading()) == repr(other.reading())
