"""How long trials take to start: the first time on a worker, and later."""

from __future__ import annotations

import dataclasses

import pytest

from rubberband.executor import Controller, GangRun, InstanceStatus, Slot, State, measured
from rubberband.executor.core.fleet import InstanceRecord
from rubberband.executor.core.measured import TrialStarts, starts
from rubberband.values.offer import Offer
from rubberband.values.profile import Profile
from tests.builders.jobs import JOB

PROFILE = Profile(seconds_per_iteration={1: 10.0}, trial_startup_s=0.2)
OFFER = Offer(instance_type="test", gpus=4, price_usd_per_hour=3.6, max_instances=4, init_delay_s=30.0)


def started(*waves: list[float], startup_s: float = 0.2, load_s: float = 0.0, init_delay_s: float = 30.0) -> State:
    """A run whose trials took so long to start, one wave after another on the same workers; these took 30 s."""
    offer = dataclasses.replace(OFFER, init_delay_s=init_delay_s)
    profile = dataclasses.replace(PROFILE, trial_startup_s=startup_s, checkpoint_load_s=load_s)
    job = dataclasses.replace(JOB, profile=profile, offer=offer)
    state = Controller(job).state
    state.instances["i-001"] = InstanceRecord(
        instance="i-001", requested_at=-30.0, running_at=-30.0, ready_at=0.0, status=InstanceStatus.READY
    )
    for wave in waves:
        for gpu, took_s in enumerate(wave):
            gang = (Slot(instance="i-001", gpu=gpu),)
            use = GangRun(trial=0, attempt=1, stage=0, gang=gang, started_at=0.0, training_at=took_s, ended_at=9.0)
            state.allocations.append(use)
    return state


def test_crowded_first_starts_are_not_taken_for_later_ones() -> None:
    found = starts(started([2.9] * 4))
    assert found.warm_s == 0.2
    assert found.cold_surplus_s == pytest.approx(2.7)
    assert starts(started([2.9] * 4, [0.2] * 4)) == found


def test_later_starts_are_measured_apart() -> None:
    found = starts(started([4.0] * 4, [1.0] * 4))
    assert found.warm_s == pytest.approx(1.0)
    assert found.cold_surplus_s == pytest.approx(3.0)


def test_starts_that_take_as_long_every_time_have_no_surplus() -> None:
    assert starts(started([1.0] * 4, [1.0] * 4)) == TrialStarts(warm_s=1.0, cold_surplus_s=0.0)
    assert starts(started([0.2] * 4)) == TrialStarts(warm_s=0.2, cold_surplus_s=0.0)


def test_even_the_first_starts_may_be_faster_than_profiled() -> None:
    assert starts(started([1.0] * 4, startup_s=5.0)) == TrialStarts(warm_s=pytest.approx(1.0), cold_surplus_s=0.0)


def test_the_loading_of_checkpoints_is_no_part_of_the_start_that_is_seen() -> None:
    assert starts(started([5.0] * 4, [5.0] * 4, startup_s=1.0, load_s=4.0)) == TrialStarts(
        warm_s=1.0, cold_surplus_s=0.0
    )
    assert starts(started([7.0] * 4, [6.0] * 4, startup_s=1.0, load_s=4.0)) == TrialStarts(
        warm_s=pytest.approx(2.0), cold_surplus_s=pytest.approx(1.0)
    )


def test_few_starts_show_nothing() -> None:
    assert starts(started([2.9] * 2, [9.0] * 2)) == TrialStarts(warm_s=0.2, cold_surplus_s=0.0)


def test_a_new_instance_takes_the_surplus_longer_and_later_stages_do_not() -> None:
    found = measured(started([2.9] * 4))
    assert found.profile.trial_startup_s == 0.2
    assert found.offer.init_delay_s == pytest.approx(32.7)
    assert found.findings == "first trials train after 32.7s instead of 30s"


def test_a_surplus_that_the_profile_measured_is_not_counted_twice() -> None:
    found = measured(started([2.9] * 4, init_delay_s=32.7))
    assert found.offer.init_delay_s == pytest.approx(32.7)
    assert found.findings == ""
