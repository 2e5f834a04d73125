"""What is done once in a process is start-up, in a profile and in a run; a profile that was taken in unrest says so."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rubberband.cloud.virtual import VirtualClock
from rubberband.executor import Faults, Noise, TrialEnd, VirtualBackend, measured
from rubberband.executor.profiling.points import (
    InstanceStart,
    InstanceStarts,
    Point,
    Timed,
    first_extra_s,
    noise_of,
    point_of,
    profile_of,
    startup_of,
)
from rubberband.executor.profiling.summary import ProfilingResult, measure
from rubberband.planning.candidates import candidates, with_start_times
from rubberband.planning.startup_history import StartTimes
from rubberband.running.profile import start_lines
from rubberband.spec.experiment import Experiment
from rubberband.spec.profile_file import load_profile, save_profile
from rubberband.values.offer import Offer
from rubberband.values.profile import Profile, wide_spread
from tests.builders.experiment_words import words
from tests.builders.measured_runs import PROFILE, seen
from tests.builders.tables import cases

OFFER = Offer(instance_type="virtual", gpus=2, price_usd_per_hour=1.0, max_instances=1)


def timed(trial: int, first_s: float, *others_s: float, is_cold: bool = False) -> Timed:
    """A trial whose first iteration took `first_s`, on warm workers."""
    return Timed(
        trial=trial, instances=("i",), startup_s=0.5, iterations_s=others_s, firsts_s=(first_s,), is_cold=is_cold
    )


@pytest.mark.parametrize(
    ("firsts", "extra_s"),
    [
        ([(3.0, (1.0, 1.0)), (3.2, (1.0, 1.2))], 2.05),
        ([(1.02, (1.0, 1.0))], 0.0),  # no more than others
        ([(1.3, (1.0, 1.4)), (1.2, (0.8, 1.1))], 0.0),  # by chance
        ([(0.5, (1.0, 1.0))], 0.0),
        ([], 0.0),
    ],
)
def test_only_what_a_first_iteration_takes_beyond_chance_is_start_up(
    firsts: list[tuple[float, tuple[float, ...]]], extra_s: float
) -> None:
    assert first_extra_s(firsts) == pytest.approx(extra_s)


def test_a_function_that_loads_its_data_first_is_no_slower_for_it(tmp_path: Path) -> None:
    point = point_of(1, 2, [timed(0, 5.0, 1.0, 1.0), timed(1, 5.0, 1.0, 1.0)])
    starts = InstanceStarts(
        instances=(InstanceStart(provision_s=2.0, init_s=3.0),), cold_s=(12.5,), cold_iteration_s=12.0, one_machine=True
    )
    profile = profile_of([point], starts, noise_of([point]), gpus_per_machine=4)
    assert profile.seconds_per_iteration == pytest.approx({1: 1.0})
    assert (profile.trial_startup_s, profile.first_iteration_extra_s) == pytest.approx((4.5, 4.0))
    assert (profile.cold_start_extra_s, profile.cold_iteration_extra_s) == pytest.approx((8.0, 12.0))
    assert profile.init_delay_s == pytest.approx(11.0)
    save_profile(profile, tmp_path / "a.profile.json")
    assert load_profile(tmp_path / "a.profile.json") == dataclasses.replace(profile, source="file")


def test_first_iterations_that_are_like_others_are_timed_with_them() -> None:
    (kept,) = point_of(1, 1, [timed(0, 1.0, 1.0, 1.0)]).timed
    assert (kept.iterations_s, kept.firsts_s) == ((1.0, 1.0, 1.0), ())


def test_a_job_of_one_report_is_timed_on_warm_workers_where_there_are_any() -> None:
    cold = Timed(trial=0, instances=("i",), startup_s=0.1, iterations_s=(6.0,), is_cold=True)
    warm = Timed(trial=1, instances=("i",), startup_s=0.1, iterations_s=(1.0,))
    assert point_of(1, 1, [cold, warm]).iteration_s == 1.0
    assert point_of(1, 1, [cold]).iteration_s == 6.0


def test_a_job_of_one_report_gets_a_second_round() -> None:
    ends = {trial: TrialEnd(iterations=1) for trial in range(8)}
    profile = Profile(seconds_per_iteration={1: 30.0})
    backend = VirtualBackend("profiling", OFFER, profile, metric="loss", faults=Faults(ends=ends))
    (point,) = measure(backend, slots_per_instance=2, num_trials=8).points
    assert {one.trial for one in point.timed} == {2, 3}, "the first two were on fresh workers"


def unsteady(iteration_cv: float) -> ProfilingResult:
    """What is measured of iterations of a tenth of a second that vary."""
    clock, profile = VirtualClock(), Profile(seconds_per_iteration={1: 0.1}, iteration_cv=iteration_cv)
    noise = Noise(profile, OFFER, seed=1, now=clock.now)
    backend = VirtualBackend("profiling", OFFER, profile, metric="loss", faults=noise, clock=clock)
    return measure(backend, slots_per_instance=2, least_trials=1)


def test_iterations_that_vary_are_measured_on_and_the_spread_is_said() -> None:
    steady, wide = unsteady(0.02), unsteady(0.6)
    assert len(steady.points[0].timed[0].iterations_s) == 3
    assert len(wide.points[0].timed[0].iterations_s) > 6
    assert not steady.remarks
    assert any("varied by" in line and "unsure" in line for line in wide.remarks)


def test_the_widest_spread_is_named() -> None:
    assert wide_spread({1: 0.1, 2: 0.02}) == wide_spread({}) == ""
    assert wide_spread({1: 0.2, 2: 0.52}).startswith("the iterations of a trial on 2 GPUs varied by 52%")


def test_a_first_start_on_fresh_workers_is_added_to_measured_start_times() -> None:
    asked = Experiment(
        name="a",
        entrypoint="a:b",
        search={
            "space": {"lr": {"type": "uniform", "lower": 0, "upper": 1}},
            "scheduler": {"type": "sha", "num_samples": 4, "grace_period": 1, "max_t": 4, "reduction_factor": 2},
            "metric": "loss",
            "mode": "min",
        },
        constraints={"deadline": "1h"},
        resources={"provider": "local", "gpus_per_instance": 1, "price_per_hour": 1, "max_instances": 1},
    )
    times = StartTimes(starts=1, instances=1, provision_s=2.0, provision_spread=OFFER.provision_spread, init_s=3.0)
    profile = Profile(seconds_per_iteration={1: 1.0}, cold_start_extra_s=5.0)
    assert with_start_times(asked, times, profile)[0].resources.init_delay_s == 8.0
    assert with_start_times(asked, times)[0].resources.init_delay_s == 3.0


def test_a_run_takes_no_start_within_a_first_iteration_for_a_slow_trial() -> None:
    profile = dataclasses.replace(PROFILE, trial_startup_s=9.0, first_iteration_extra_s=4.0)
    state = seen({1: [[14.0, 10.0]] * 4}, profile=profile)
    found = measured(state)
    assert found.profile is state.job.profile
    assert found.findings == ""
    plain = measured(seen({1: [[14.0, 10.0]] * 4}))
    assert plain.findings == "20 % slower than profiled"


def started(starts_s: dict[int, float]) -> list[Point]:
    """Points whose trials took so long to start."""
    return [
        point_of(gpus, 1, [dataclasses.replace(timed(0, 0.0, 1.0, 1.0), startup_s=start_s)])
        for gpus, start_s in starts_s.items()
    ]


@cases("starts_s", "expected")
def test_the_machines_of_a_gang_share_a_part_of_the_start(
    starts_s: dict[int, float], expected: tuple[float, float]
) -> None:
    points = started(starts_s)
    assert startup_of(points, gpus_per_machine=8) == pytest.approx(tuple(expected))


def test_a_measured_load_is_planned_by_the_machines_of_a_gang(tmp_path: Path) -> None:
    points = started({8: 90.0, 16: 50.0, 32: 30.0})
    starts = InstanceStarts(
        instances=(InstanceStart(provision_s=2.0, init_s=3.0),), cold_s=(60.0,), cold_iteration_s=0.0, one_machine=False
    )
    profile = profile_of(points, starts, noise_of(points), gpus_per_machine=8)
    save_profile(profile, tmp_path / "a.profile.json")
    loaded = load_profile(tmp_path / "a.profile.json")
    assert (loaded.trial_startup_s, loaded.checkpoint_load_s) == pytest.approx((10.0, 80.0))
    resources = {"provider": "virtual", "instance_type": "p4d.24xlarge", "max_instances": 4}
    experiment = Experiment(**words(resources=resources, profile=str(tmp_path / "a.profile.json")))
    (problem,) = candidates(experiment, loaded, 0.0)
    assert [problem.profile.startup_s(gpus) for gpus in (8, 16, 32)] == pytest.approx([90.0, 50.0, 30.0])
    assert start_lines(loaded, starts, noise_of(points))[0].startswith(
        "a trial starts in 10.00 s and 80.00 s over the machines of its gang on a warm worker"
    )
