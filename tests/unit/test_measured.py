"""What a run's own times say of its profile, and what is taken for chance."""

from __future__ import annotations

import dataclasses

import pytest

from rubberband.executor.controller import Controller
from rubberband.executor.events import Slot
from rubberband.executor.measured import measured
from rubberband.executor.state import Allocation, InstanceRecord, InstanceStatus, Job, Report, State
from rubberband.offer import Offer
from rubberband.profile import Profile
from tests.unit.test_journal import JOB

OFFER = Offer(
    instance_type="test", gpus=4, price_usd_per_hour=3.6, max_instances=4, provision_delay_s=60.0, init_delay_s=30.0
)
PROFILE = Profile(seconds_per_iteration={1: 10.0, 2: 6.0, 4: 4.0}, trial_startup_s=5.0)


def seen(
    steps_s: dict[int, list[list[float]]], startup_s: float = 5.0, profile: Profile = PROFILE
) -> tuple[Job, State]:
    """A run of which, for each gang size, trials took these seconds for their iterations."""
    job = dataclasses.replace(JOB, profile=profile, offer=OFFER)
    state = Controller(job).state
    trials = state.trials
    for gpus, every in steps_s.items():
        for steps in every:
            if len(state.allocations) >= len(trials):
                trials.append(dataclasses.replace(trials[0], trial=len(trials), reports=[]))
            trial = trials[len(state.allocations)]
            at = 100.0 + startup_s
            gang = tuple(Slot(instance="i-001", gpu=gpu) for gpu in range(gpus))
            state.allocations.append(
                Allocation(trial=trial.trial, attempt=1, stage=0, gang=gang, started_at=100.0, training_at=at)
            )
            for number, step in enumerate(steps, start=1):
                at += step
                trial.reports.append(Report(reported_at=at, iterations=number, metrics={}, stage=0))
            state.allocations[-1].ended_at = at
    return job, state


def table(*args: object, **kwargs: object) -> dict[int, float]:
    return dict(measured(*seen(*args, **kwargs)).profile.seconds_per_iteration)  # type: ignore[arg-type]


def test_what_was_seen_is_adopted_where_all_trials_agree() -> None:
    found = measured(*seen({1: [[13.0, 13.0]] * 4}))
    assert dict(found.profile.seconds_per_iteration) == pytest.approx({1: 13.0, 2: 7.8, 4: 5.2})
    assert found.findings == "iterations take 30 % longer than profiled"
    faster = measured(*seen({1: [[6.0, 6.0]] * 4}))
    assert faster.findings == "iterations take 40 % less time than profiled"


def test_small_deviations_and_few_iterations_are_left_alone() -> None:
    for steps in ([[10.2, 10.2]] * 4, [[13.0, 13.0]], []):
        job, state = seen({1: steps})
        found = measured(job, state)
        assert found.profile is job.profile
        assert found.offer == job.offer
        assert found.findings == ""


def test_each_gang_size_has_its_own_factor_and_the_others_the_weighted_mean() -> None:
    found = table({1: [[13.0] * 3] * 2, 2: [[6.0] * 3] * 4})
    assert found == pytest.approx({1: 13.0, 2: 6.0, 4: 4.0 * (1.3 * 6 + 1.0 * 12) / 18})


def test_a_size_between_measured_ones_becomes_a_measured_one() -> None:
    expected_s = PROFILE.iteration_s(3)
    found = table({3: [[expected_s * 1.5] * 3] * 2})
    assert found == pytest.approx({1: 15.0, 2: 9.0, 3: expected_s * 1.5, 4: 6.0})


def test_a_few_broken_trials_and_a_nap_of_the_machine_do_not_count() -> None:
    assert table({1: [[10.0, 10.0]] * 5 + [[90.0, 90.0]]}) == dict(PROFILE.seconds_per_iteration)
    job, state = seen({1: [[10.0, 3600.0, 10.0]] * 4})
    state.woke_at.append(3700.0)
    assert measured(job, state).profile is job.profile


def test_what_chance_explains_is_shrunk_away() -> None:
    noisy = dataclasses.replace(PROFILE, trial_cv=0.3)
    assert table({1: [[12.0, 12.0]] * 2}, profile=noisy) == dict(PROFILE.seconds_per_iteration)
    many = table({1: [[12.0, 12.0]] * 60}, profile=noisy)
    assert 11.5 < many[1] < 12.0


def test_start_ups_are_corrected_too() -> None:
    found = measured(*seen({1: [[10.0, 10.0]] * 4}, startup_s=12.0))
    assert found.profile.trial_startup_s == pytest.approx(12.0)
    assert found.findings == "a trial starts in 12s instead of 5s"
    assert dict(found.profile.seconds_per_iteration) == dict(PROFILE.seconds_per_iteration)


def test_the_latest_start_ups_count() -> None:
    job, state = seen({1: [[10.0, 10.0]] * 20}, startup_s=12.0)
    for use in state.allocations[12:]:
        use.started_at += 7.0
    assert measured(job, state).profile is job.profile


def test_delays_of_instances_are_corrected_too() -> None:
    job, state = seen({})
    for number in range(3):
        record = InstanceRecord(instance=f"i-{number}", requested_at=0.0, status=InstanceStatus.READY)
        record.running_at, record.ready_at = 90.0, 120.0
        state.instances[record.instance] = record
    found = measured(job, state)
    assert found.offer.provision_delay_s == pytest.approx(90.0)
    assert found.offer.init_delay_s == 30.0
    assert found.findings == "an instance runs after 1m30s instead of 1m"
