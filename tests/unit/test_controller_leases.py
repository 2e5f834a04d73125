"""The controller and leases that it cannot cut, one story a test: what was released, or held by another driver."""

from __future__ import annotations

import dataclasses

import pytest

from rubberband.executor import (
    DriverResumed,
    InstanceLost,
    InstanceReady,
    InstanceReleased,
    InstanceRunning,
    InstanceStatus,
    LaunchInstance,
    LiveInstance,
    ReleaseInstance,
    Started,
    spending,
)
from tests.builders.stories import LEASE_S, LEASED, Story, at_its_sync, begun, kinds


def test_a_launch_waits_for_a_release_where_max_cost_does_not_cover_both() -> None:
    story, orders = at_its_sync(1.22)
    assert kinds(orders) == ["ReleaseInstance", "ReleaseInstance"]
    (launch,) = story.tell(InstanceReleased, instance="i-001", ended_at=story.at)
    assert isinstance(launch, LaunchInstance)
    assert launch.first_lease_s == LEASE_S
    assert launch.market == "on_demand"


def test_where_max_cost_covers_both_it_does_not_wait() -> None:
    _, orders = at_its_sync(4.0)
    assert kinds(orders) == ["ReleaseInstance", "ReleaseInstance", "LaunchInstance"]


def test_a_released_instance_is_paid_up_to_its_lease_at_most() -> None:
    story, _ = at_its_sync(1.22)
    records = story.state.instances.values()
    assert [record.leased_until for record in records] == [story.at + LEASE_S] * 2


def test_a_new_driver_that_has_no_worker_there_yet_counts_the_leases_of_the_old_one() -> None:
    story = begun(dataclasses.replace(LEASED, max_cost_usd=1.3))
    live = tuple(LiveInstance(instance=i, running_at=story.at) for i in ("i-001", "i-002"))
    story.tell(DriverResumed, live=live, ended=())
    former = story.state.instances["i-001"].leased_until
    assert former == pytest.approx(story.at + 600.0, abs=20.0)
    story.tell(InstanceReady, instance="i-001")
    assert story.state.instances["i-001"].leased_until is None
    assert story.state.instances["i-002"].leased_until == former


def test_a_repeated_request_has_the_first_lease_of_its_order() -> None:
    story = Story(dataclasses.replace(LEASED, max_cost_usd=0.9))
    ordered = story.tell(Started)
    first = [order.first_lease_s for order in ordered if isinstance(order, LaunchInstance)]
    assert first == [pytest.approx(450.0, abs=1.0)] * 2
    story.at += 100.0
    assert story.tell(DriverResumed, live=(), ended=()) == ordered


def test_without_a_cap_nothing_waits_and_first_leases_are_those_of_the_backend() -> None:
    story = begun(dataclasses.replace(LEASED, max_cost_usd=None))
    for trial in range(3):
        story.report(trial, trial / 10)
    orders = story.report(3, 0.9)
    assert orders == [
        ReleaseInstance(instance="i-001"),
        ReleaseInstance(instance="i-002"),
        LaunchInstance(instance="i-003", market="on_demand"),
    ]
    story.tell(InstanceRunning, instance="i-003", running_at=story.at)


def test_an_instance_that_max_cost_paid_for_no_longer_than_it_took_to_be_ready_is_a_matter_of_the_budget() -> None:
    story = Story(dataclasses.replace(LEASED, max_cost_usd=0.3, launch_attempts=1))
    story.tell(Started)
    began_at = story.at
    for instance in ("i-001", "i-002"):
        story.tell(InstanceRunning, instance=instance, running_at=began_at, price_usd_per_hour=0.1)
    story.at = began_at + 160.0
    for instance in ("i-001", "i-002"):
        story.tell(InstanceLost, instance=instance, ended_at=began_at + 155.0, reason="lease expired")
    assert story.state.outcome == "budget"
    assert "max_cost paid for 150 s of i-002, which was not ready by then" in story.state.reason


def test_a_release_of_a_dead_driver_is_finished_by_the_next_one() -> None:
    story, _ = at_its_sync(4.0)
    assert story.state.instances["i-001"].status is InstanceStatus.RELEASING
    live = tuple(LiveInstance(instance=i, running_at=101.0) for i in ("i-001", "i-002"))
    orders = story.tell(DriverResumed, live=live, ended=())
    assert {"i-001", "i-002"} <= {order.instance for order in orders if isinstance(order, ReleaseInstance)}


def test_an_instance_unknown_to_the_provider_is_lost_and_replaced() -> None:
    story = begun(dataclasses.replace(LEASED, max_cost_usd=None))
    orders = story.tell(DriverResumed, live=(), ended=())
    assert kinds(orders) == ["LaunchInstance", "LaunchInstance"]
    for instance in ("i-001", "i-002"):
        record = story.state.instances[instance]
        assert (record.status, record.ended_at) == (InstanceStatus.ENDED, story.at)


@pytest.mark.parametrize(("max_cost_usd", "bound_s"), [(9.0, 1011.0), (0.9, 450.0)])
def test_the_budget_covers_an_instance_that_boots_until_the_bound_of_its_boot(
    max_cost_usd: float, bound_s: float
) -> None:
    story = Story(dataclasses.replace(LEASED, max_cost_usd=max_cost_usd, boot_lease_s=1011.0))
    first = [order.first_lease_s for order in story.tell(Started) if isinstance(order, LaunchInstance)]
    assert first == [pytest.approx(bound_s, abs=1.0)] * 2
    story.tell(InstanceRunning, instance="i-001", running_at=story.at, price_usd_per_hour=0.1)
    (line,) = spending(story.state).lines
    assert line.bound_until == pytest.approx(story.at + bound_s, abs=20.0)
    story.tell(InstanceReady, instance="i-001")
    (line,) = spending(story.state).lines
    assert line.bound_until == line.since, "the driver can shorten its lease from now on"
