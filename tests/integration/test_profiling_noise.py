"""Profiling where everything varies: what is measured on a virtual backend is what the noise was drawn from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from rubberband.cloud.virtual import VirtualClock
from rubberband.executor import AttemptFaults, Faults, Noise, VirtualBackend
from rubberband.executor.profiling.points import NoiseComponent
from rubberband.executor.profiling.session import ProfilingLimits
from rubberband.executor.profiling.summary import ProfilingResult, measure
from rubberband.running.profile import noise_lines, point_line, start_lines
from rubberband.values.offer import Offer
from rubberband.values.profile import FIXED, Profile, Spread

TRUE = Profile(
    seconds_per_iteration={1: 40.0, 2: 25.0, 4: 15.0},
    trial_startup_s=3.0,
    trial_cv=0.2,
    iteration_cv=0.05,
    startup_cv=0.15,
)
OFFER = Offer(
    instance_type="virtual",
    gpus=4,
    price_usd_per_hour=1.0,
    max_instances=8,
    provision_delay_s=20.0,
    init_delay_s=30.0,
    init_spread=Spread(cv=0.3),
)


class Anew(Noise):
    """Noise that is drawn anew where a trial trains an iteration again, as a real machine does."""

    def __init__(self, profile: Profile, offer: Offer, *, seed: int, now: Callable[[], float]) -> None:
        super().__init__(profile, offer, seed=seed, now=now)
        self._source = Random(seed)
        variance = math.log1p(profile.iteration_cv**2)
        self._law = (-variance / 2.0, math.sqrt(variance))

    def iteration(self, trial: int, iterations: int) -> float:
        return self._source.lognormvariate(*self._law)


def noisy(seed: int, profile: Profile = TRUE, *, num_trials: int = 16, **options: int) -> ProfilingResult:
    """What is measured where everything varies as `profile` says."""
    clock = VirtualClock()
    noise = Anew(profile, OFFER, seed=seed, now=clock.now)
    backend = VirtualBackend("profiling", OFFER, profile, metric="loss", faults=noise, clock=clock)
    return measure(
        backend, slots_per_instance=4, max_gpus_per_trial=4, num_trials=num_trials, **{"instances": 4} | options
    )


def holds(component: NoiseComponent | None, cv: float) -> bool:
    """Whether the interval holds the truth."""
    return component is not None and component.low_cv <= cv <= component.high_cv


def test_every_component_is_recovered_within_its_interval_nearly_as_often_as_it_says() -> None:
    found = [noisy(seed).noise for seed in range(30)]
    assert sum(holds(noise.trial, TRUE.trial_cv) for noise in found) >= 22
    assert sum(holds(noise.iteration, TRUE.iteration_cv) for noise in found) >= 22
    assert sum(holds(noise.startup, TRUE.startup_cv) for noise in found) >= 22


def test_many_trials_in_turn_show_each_component_closely() -> None:
    measured = noisy(1, num_trials=256, instances=8, least_trials=256, iterations=4)
    profile = measured.profile
    assert profile.trial_cv == pytest.approx(TRUE.trial_cv, rel=0.15)
    assert profile.iteration_cv == pytest.approx(TRUE.iteration_cv, rel=0.1)
    assert profile.startup_cv == pytest.approx(TRUE.startup_cv, rel=0.1)
    assert profile.seconds_per_iteration == pytest.approx(TRUE.seconds_per_iteration, rel=0.05)
    assert profile.init_delay_s == pytest.approx(OFFER.init_delay_s, rel=0.4)
    assert len(profile.init_spread.samples) == 8
    assert profile.provision_spread.certain


def test_differences_of_trials_are_not_taken_for_noise_of_iterations() -> None:
    steady = replace(TRUE, trial_cv=0.0, startup_cv=0.0)
    differing = replace(TRUE, iteration_cv=0.0, startup_cv=0.0)
    alike = [noisy(seed, steady).profile.trial_cv for seed in range(10)]
    assert all(0.0 < cv < 0.04 for cv in alike)
    assert noisy(0, differing).profile.iteration_cv == 0.0
    assert noisy(0, differing).profile.trial_cv > 0.1


def test_the_same_trials_are_measured_with_every_number_of_gpus_in_turn() -> None:
    measured = noisy(0, num_trials=16, instances=1, least_trials=6)
    assert [[timed.trial for timed in point.timed] for point in measured.points] == [list(range(6))] * 3
    assert [point.copies for point in measured.points] == [4, 2, 1]
    assert measured.noise.num_trials == 6
    assert "6 trials, 4 side by side" in point_line(measured.points[0])
    assert "6 trials in turn" in point_line(measured.points[2])


def test_trials_change_their_places_from_one_number_of_gpus_to_the_next() -> None:
    measured = noisy(0)
    first, second = ({timed.trial: timed.instances for timed in point.timed} for point in measured.points[:2])
    assert all(second[trial] != first[trial] for trial in (3, 7))


class ColdFirst(Faults):
    """The first start on a worker takes five times as long."""

    def attempt(self, trial: int, attempt: int) -> AttemptFaults:
        return AttemptFaults(startup=5.0 if attempt == 1 else 1.0)


def test_first_starts_on_fresh_workers_belong_to_the_instances() -> None:
    plain = replace(TRUE, trial_cv=0.0, iteration_cv=0.0, startup_cv=0.0)
    backend = VirtualBackend("profiling", OFFER, plain, metric="loss", faults=ColdFirst())
    measured = measure(backend, slots_per_instance=4, instances=2, max_gpus_per_trial=2)
    assert measured.profile.trial_startup_s == pytest.approx(3.0)
    assert measured.profile.startup_cv == 0.0
    assert measured.profile.init_delay_s == pytest.approx(30.0 + 4 * 3.0)
    assert "the first start of a trial takes 12.0 s more" in " ".join(
        start_lines(measured.profile, measured.starts, measured.noise)
    )


def test_one_trial_is_said_to_show_nothing_of_how_trials_differ() -> None:
    measured = noisy(0, num_trials=1, instances=1)
    line = noise_lines(measured.noise)[0]
    assert "assumed to differ" in line
    assert "--trials" in line
    assert measured.profile.trial_cv == pytest.approx(0.147, abs=0.01)
    assert (measured.profile.provision_spread, measured.profile.init_spread) == (FIXED, FIXED)


def test_few_trials_are_said_to_be_few() -> None:
    few, many = noisy(0, num_trials=4, instances=1), noisy(0)
    assert noise_lines(few.noise)[0].endswith("; measure more with --trials N")
    assert "--trials" not in noise_lines(many.noise)[0]
    assert "16 trials" in noise_lines(many.noise)[0]
    assert few.profile.mean_cv > 1.5 * many.profile.mean_cv > 0.0


def test_a_limit_between_turns_keeps_the_trials_that_were_measured() -> None:
    backend = VirtualBackend("profiling", OFFER, TRUE, metric="loss")
    limits = ProfilingLimits(time_s=20.0 + 30.0 + 2 * 3.0 + 4 * 40.0 + 10.0)
    measured = measure(backend, slots_per_instance=4, num_trials=8, least_trials=8, limits=limits)
    assert [len(point.timed) for point in measured.points] == [4]
    assert "deadline is reached" in measured.stopped_by
