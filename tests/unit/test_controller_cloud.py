"""The controller in a cloud, one story a test: markets, interruptions, prices at purchase, the budget as a reserve."""

from __future__ import annotations

import dataclasses

import pytest

from rubberband.executor import (
    AllotmentChanged,
    DriverResumed,
    EndedInstance,
    InstanceInterrupted,
    InstanceLost,
    InstancePriced,
    InstanceReady,
    InstanceRefused,
    InstanceReleased,
    InstanceRunning,
    InstanceStatus,
    LaunchInstance,
    LiveInstance,
    ReleaseInstance,
    Result,
    Started,
    StartTrial,
    Tick,
    bill_usd,
    measured,
    summarise,
)
from rubberband.executor import held_instances as held
from rubberband.executor.core.forecast import stage_left
from rubberband.values.plan import Plan
from rubberband.values.profile import Profile
from tests.builders.jobs import JOB, SPOT, SPOT_OFFER, SPOT_PLAN, STAGES
from tests.builders.stories import Story, begun, kinds


def result(story: Story) -> Result:
    return summarise(story.state, {"configurations": [{}] * 4}, story.at)


# Markets


def test_a_stage_is_bought_on_its_market_and_one_of_another_market_replaces_everything() -> None:
    story = Story(SPOT)
    assert story.tell(Started) == [LaunchInstance(instance=i, market="spot") for i in ("i-001", "i-002")]
    story.ready("i-001", "i-002")
    assert [cohort.market for cohort in held(story.state.lanes[0], story.at)] == ["spot", "spot"]
    for trial in range(3):
        story.report(trial, trial / 10)
    assert story.report(3, 0.9) == [
        ReleaseInstance(instance="i-001"),
        ReleaseInstance(instance="i-002"),
        LaunchInstance(instance="i-003", market="on_demand"),
    ]
    assert kinds(story.ready("i-003")) == ["StartTrial", "StartTrial"]


def test_a_repeated_request_of_a_new_driver_is_of_the_same_market() -> None:
    story = Story(SPOT)
    story.tell(Started)
    assert story.tell(DriverResumed, live=(), ended=()) == [
        LaunchInstance(instance="i-001", market="spot"),
        LaunchInstance(instance="i-002", market="spot"),
    ]


# Prices


def test_the_bill_is_at_the_prices_of_purchase() -> None:
    story = Story(SPOT)
    story.tell(Started)
    at = story.at
    story.tell(InstanceRunning, instance="i-001", running_at=at, price_usd_per_hour=7.2, zone="us-east-1a")
    story.tell(InstanceRunning, instance="i-002", running_at=at)
    assert bill_usd(story.state, at + 100.0) == pytest.approx((7.2 + 1.2) / 36.0)
    first = result(story).instances[0]
    assert (first.market, first.zone, first.price_usd_per_hour) == ("spot", "us-east-1a", 7.2)


def test_an_instance_released_before_it_ran_is_known_as_it_was_bought() -> None:
    story = Story(SPOT)
    story.tell(Started)
    bought = {"price_usd_per_hour": 7.2, "zone": "us-east-1a", "instance_type": "g5.xlarge"}
    story.tell(InstanceReleased, instance="i-001", running_at=story.at, ended_at=story.at + 1.0, **bought)
    first = result(story).instances[0]
    assert {name: getattr(first, name) for name in bought} == bought


def test_prices_come_through_a_resume() -> None:
    story = Story(SPOT)
    story.tell(Started)
    live = (LiveInstance(instance="i-001", running_at=story.at, price_usd_per_hour=3.0),)
    ended = (
        EndedInstance(
            instance="i-002", running_at=story.at, ended_at=story.at + 0.5, price_usd_per_hour=2.0, preempted=True
        ),
    )
    story.tell(DriverResumed, live=live, ended=ended)
    assert [story.state.instances[name].price_usd_per_hour for name in ("i-001", "i-002")] == [3.0, 2.0]
    assert story.state.instances["i-002"].preempted


# Interruptions


def test_a_notice_asks_for_a_replacement_at_once_and_trials_continue_until_there_is_room_elsewhere() -> None:
    story = begun(SPOT)
    assert story.tell(InstanceInterrupted, instance="i-001") == [LaunchInstance(instance="i-003", market="spot")]
    assert [trial.status for trial in story.state.trials] == ["running"] * 4
    assert bill_usd(story.state, story.at + 600) > bill_usd(story.state, story.at)


def longer() -> Story:
    """Every trial trains for two iterations in the first stage."""
    stages = (dataclasses.replace(STAGES[0], iterations=2), STAGES[1])
    return begun(dataclasses.replace(SPOT, stages=stages))


@pytest.mark.parametrize("usd_per_hour", [0.5, 3.0])
def test_the_forecast_expects_the_price_of_the_latest_hour_and_not_the_highest(usd_per_hour: float) -> None:
    def left_usd(price: float) -> float:
        story = begun(dataclasses.replace(SPOT, profile=Profile(seconds_per_iteration={1: 1e4, 2: 1e4})))
        for instance in ("i-001", "i-002"):
            story.tell(InstancePriced, instance=instance, hour_prices_usd=(price,))
        return stage_left(story.state.lanes[0], story.at).cost_usd

    assert left_usd(usd_per_hour) == pytest.approx(usd_per_hour * left_usd(1.0))


def test_a_trial_moves_off_at_its_next_report_once_there_is_room() -> None:
    story = longer()
    story.tell(InstanceInterrupted, instance="i-001")
    assert kinds(story.report(0, 0.1)) == [], "there is no room yet: it may as well go on"
    story.ready("i-003")
    commands = story.report(1, 0.1)
    assert kinds(commands) == ["StopTrial", "StartTrial"]
    assert isinstance(commands[1], StartTrial)
    assert (commands[1].from_iterations, {slot.instance for slot in commands[1].gang}) == (1, {"i-003"})
    assert kinds(story.report(0, 0.1)) == ["ReleaseInstance"]
    assert (story.state.trials[0].failures, story.state.trials[1].failures) == (0, 0)
    assert (result(story).interruptions, result(story).redone_iterations) == (1, 0)


def moved_off(at_s: float) -> Story:
    """An interrupted instance that nothing uses any more; the notice came `at_s` after its start."""
    story = longer()
    story.at += at_s
    story.tell(InstanceInterrupted, instance="i-001", free_if_taken=True)
    story.ready("i-003")
    story.report(1, 0.1)
    return story


def test_an_instance_that_ec2_takes_away_for_free_is_left_to_it() -> None:
    story = moved_off(600.0)
    assert kinds(story.report(0, 0.1)) == []
    record = story.state.instances["i-001"]
    assert record.interrupted_at is not None
    wake_at = story.controller.wake_at()
    assert wake_at is not None
    assert wake_at <= record.interrupted_at + 150.0
    story.tell(InstanceLost, instance="i-001", ended_at=story.at, reason="taken away", preempted=True)
    story.tell(InstancePriced, instance="i-001", hour_prices_usd=(0.0,))
    assert bill_usd(story.state, story.at) < bill_usd(moved_off(3600.0).state, story.at)


def test_an_instance_that_ec2_does_not_take_away_is_given_back_shortly_after() -> None:
    story = moved_off(600.0)
    story.report(0, 0.1)
    interrupted_at = story.state.instances["i-001"].interrupted_at
    assert interrupted_at is not None
    story.at = interrupted_at + 148.0
    assert "ReleaseInstance" not in kinds(story.tell(Tick))
    assert kinds(story.tell(Tick)) == ["ReleaseInstance"]


@pytest.mark.parametrize("at_s", [3470.0, 7200.0])
def test_an_instance_that_ec2_does_not_take_away_for_free_is_given_back_at_once(at_s: float) -> None:
    story = moved_off(at_s)
    story.report(0, 0.1)
    assert story.state.instances["i-001"].status is InstanceStatus.RELEASING


def test_nothing_starts_on_an_instance_that_is_taken_away_soon() -> None:
    story = longer()
    story.tell(InstanceInterrupted, instance="i-001")
    story.tell(InstanceLost, instance="i-002", ended_at=story.at, reason="taken away", preempted=True)
    assert [trial.status for trial in story.state.trials] == ["running", "running", "queued", "queued"]
    story.report(0, 0.1)
    assert story.report(0, 0.1) == []
    assert len(story.state.lanes[0].queued()) == 2


def test_a_run_waits_for_an_instance_that_leaves_where_its_cap_has_room_for_no_other() -> None:
    story = Story(SPOT)
    story.tell(AllotmentChanged, request="r", max_instances=1)
    story.tell(Started)
    story.ready("i-001")
    assert story.tell(InstanceInterrupted, instance="i-001", free_if_taken=True) == []
    for trial in [one.trial for one in story.state.running()]:
        assert story.fail(trial, "died") == []
    assert story.state.outcome is None
    lost = story.tell(InstanceLost, instance="i-001", ended_at=story.at, reason="taken away", preempted=True)
    assert lost == [LaunchInstance(instance="i-002", market="spot")]


def test_an_interruption_costs_the_current_iteration_and_no_failure() -> None:
    story = longer()
    for trial in story.state.trials:
        story.state.allocation(trial).training_at = story.at
    commands = story.tell(InstanceLost, instance="i-001", ended_at=story.at, reason="taken away", preempted=True)
    assert kinds(commands) == ["StopTrial", "StopTrial", "LaunchInstance"]
    assert [trial.failures for trial in story.state.trials] == [0, 0, 0, 0]
    assert [use.preempted for use in story.state.allocations] == [True, True, False, False]
    assert (result(story).interruptions, result(story).redone_iterations) == (1, 2)


def test_an_instance_that_leaves_before_it_is_of_use_is_given_back_and_replaced() -> None:
    story = Story(SPOT)
    story.tell(Started)
    story.ready("i-001")
    assert kinds(story.tell(InstanceInterrupted, instance="i-002")) == ["ReleaseInstance", "LaunchInstance"]


def test_live_and_leaving_instances_are_no_more_than_may_be_held() -> None:
    offer = dataclasses.replace(SPOT_OFFER, max_instances=2)
    story = begun(dataclasses.replace(SPOT, offer=offer))
    assert story.tell(InstanceInterrupted, instance="i-001") == []
    assert LaunchInstance(instance="i-003", market="spot") in story.tell(
        InstanceLost, instance="i-001", ended_at=story.at, reason="taken away", preempted=True
    )


def test_interruptions_do_not_use_up_the_attempts_at_refused_launches() -> None:
    story = begun(SPOT)
    for number in range(1, 8):
        name = f"i-{number + 2:03d}"
        lost = f"i-{number:03d}" if number == 1 else f"i-{number + 1:03d}"
        commands = story.tell(InstanceLost, instance=lost, ended_at=story.at, reason="taken away", preempted=True)
        assert LaunchInstance(instance=name, market="spot") in commands
        story.ready(name)


def test_instances_that_leave_at_the_end_are_released_with_the_rest() -> None:
    story = begun(SPOT)
    story.tell(InstanceInterrupted, instance="i-001")
    for trial in range(3):
        story.report(trial, trial / 10)
    assert story.state.instances["i-001"].status is InstanceStatus.RELEASING


def test_a_report_on_a_gone_instance_changes_nothing() -> None:
    story = begun(SPOT)
    story.tell(InstanceLost, instance="i-001", ended_at=story.at, reason="died")
    ended_at = story.state.instances["i-001"].ended_at
    for event, facts in (
        (InstanceLost, {"ended_at": story.at + 50.0, "reason": "died"}),
        (InstanceReleased, {"ended_at": story.at + 60.0}),
        (InstanceReady, {}),
        (InstanceRefused, {"reason": "late"}),
        (InstanceInterrupted, {}),
    ):
        story.tell(event, instance="i-001", **facts)
    assert story.state.instances["i-001"].ended_at == ended_at


# The budget


def test_spot_is_reserved_at_the_price_on_demand() -> None:
    """Two instances for their minimum of a minute cost 0.12 USD on demand."""
    enough = Story(dataclasses.replace(SPOT, max_cost_usd=0.1201))
    assert len(enough.tell(Started)) == 2
    too_little = Story(dataclasses.replace(SPOT, max_cost_usd=0.1199))
    assert len(too_little.tell(Started)) == 1


def test_a_dearer_fallback_type_is_reserved_for() -> None:
    story = Story(dataclasses.replace(SPOT, max_cost_usd=0.1201, highest_price_usd_per_hour=7.2))
    assert len(story.tell(Started)) == 1


def test_an_instance_being_released_is_still_reserved_for() -> None:
    story = begun(dataclasses.replace(SPOT, max_cost_usd=0.13))
    for trial in range(4):
        commands = story.report(trial, 0.1)
    assert kinds(commands) == ["ReleaseInstance", "ReleaseInstance", "LaunchInstance"]
    story = begun(dataclasses.replace(SPOT, max_cost_usd=0.21, release_margin_s=100.0))
    for trial in range(4):
        commands = story.report(trial, 0.1)
    assert "LaunchInstance" not in kinds(commands)


@pytest.mark.parametrize("market", ["spot", "on_demand"])
def test_the_stop_comes_before_the_leases_end_and_both_before_the_cap(market: str) -> None:
    stages = tuple(dataclasses.replace(choice, market=market) for choice in SPOT_PLAN.stages)
    patient = dataclasses.replace(SPOT, plan=Plan(stages=stages), iteration_timeout_s=1e6)
    job = dataclasses.replace(patient, max_cost_usd=2.0, release_margin_s=30.0)
    story = begun(job)
    for _ in range(1000):
        wake_at, hold_until = story.controller.wake_at(), story.controller.hold_until()
        assert wake_at is not None
        assert wake_at > story.at
        assert bill_usd(story.state, hold_until) <= 2.0
        story.at = wake_at - 1.0
        if "ReleaseInstance" in kinds(story.tell(Tick)):
            break
    assert story.state.outcome == "budget"
    assert bill_usd(story.state, story.at + 30.0) <= 2.0
    assert story.controller.hold_until() >= story.at


def test_a_driver_that_hears_nothing_puts_leases_off_before_they_end() -> None:
    """On spot the budget reaches farther as time passes, since it is reserved at the price on demand."""
    story = begun(dataclasses.replace(SPOT, max_cost_usd=2.0, release_margin_s=30.0))
    for _ in range(20):
        wake_at, hold_until = story.controller.wake_at(), story.controller.hold_until()
        assert wake_at is not None
        if wake_at - story.at < 60.0:
            break
        assert wake_at < hold_until - 7.5
        story.at = wake_at - 1.0
        story.tell(Tick)
        assert story.controller.hold_until() >= hold_until


def test_a_first_lease_that_the_driver_cannot_cut_is_paid_for_in_advance() -> None:
    """The driver may die while an instance is on its way: it then lives for all of its first lease."""
    story = Story(dataclasses.replace(JOB, max_cost_usd=2.0, lease_s=600.0))
    story.tell(Started)
    story.ready("i-001")
    story.at += 900.0
    story.tell(Tick)
    first_usd = bill_usd(story.state, story.controller.hold_until())
    assert first_usd + 600.0 * 0.001 == pytest.approx(2.0)


def test_an_instance_that_ran_and_ended_unseen_is_paid_for_as_long_as_it_ran() -> None:
    """EC2 described nothing for an hour: the instance is first seen when it has ended."""
    story = Story(dataclasses.replace(JOB, max_cost_usd=2.0))
    story.tell(Started)
    story.at += 3600.0
    ran = {"instance": "i-001", "ended_at": story.at - 3300.0}
    story.tell(InstanceRunning, running_at=story.at - 3500.0, **ran)
    assert (story.state.course, story.state.outcome) == ("running", None)
    assert bill_usd(story.state, story.at) == pytest.approx(0.2)
    story.tell(InstanceLost, reason="its lease expired", **ran)
    assert (story.state.course, story.state.outcome) == ("running", None)
    assert bill_usd(story.state, story.at) == pytest.approx(0.2)


def test_the_rest_is_planned_with_the_latest_spot_price() -> None:
    story = Story(SPOT)
    story.tell(Started)
    story.tell(InstanceRunning, instance="i-001", running_at=story.at, price_usd_per_hour=1.8)
    seen = measured(story.state)
    assert seen.offer.spot is not None
    assert seen.offer.spot.price_usd_per_hour == 1.8
    assert "spot costs 1.80 USD/h instead of 1.20 USD/h" in seen.findings


# Journals of other versions


def test_requests_of_an_older_version_are_known_though_this_one_would_not_make_them() -> None:
    story = Story(dataclasses.replace(JOB, max_cost_usd=0.07))
    assert len(story.tell(Started)) == 1
    story.tell(InstanceRunning, instance="i-002", running_at=story.at)
    assert kinds(story.tell(Tick)) == ["ReleaseInstance", "ReleaseInstance"], "it is too much for the cap"
