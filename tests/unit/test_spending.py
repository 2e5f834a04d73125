"""What is paid for now and later, as the controller keeps it from event to event: it is what is billed in the end."""

from __future__ import annotations

import dataclasses

import pytest

from rubberband.cloud.virtual import InstanceFaults
from rubberband.executor import (
    CancelRequested,
    Controller,
    DriverResumed,
    Event,
    Faults,
    InstanceLost,
    InstancePriced,
    InstanceRunning,
    InstanceStatus,
    Started,
    bill_lines,
    bill_usd,
    spending_without_released,
)
from rubberband.executor import spending as spending_of
from rubberband.values.offer import Billing, BillLine, SideCost
from tests.builders.jobs import JOB, SPOT
from tests.builders.stories import LEASED, Story, at_its_sync, begun
from tests.builders.virtual_runs import run_virtual

OFFER = dataclasses.replace(JOB.offer, data_usd_per_instance=0.01, head_price_usd_per_hour=0.36)
CAPPED = dataclasses.replace(JOB, offer=OFFER, max_cost_usd=2.0)


@pytest.mark.parametrize("billing", ["per_instance", "per_function"])
def test_the_incremental_bill_equals_the_bill(billing: Billing) -> None:
    seen = 0

    def same(_event: Event, controller: Controller) -> None:
        nonlocal seen
        state = controller.state
        if state.fleet.spending is not None and state.ended_at is None:
            billed_usd = bill_usd(state, state.now)
            assert state.fleet.spending.spent_usd(state.now) == pytest.approx(billed_usd, abs=1e-9)
            seen += 1

    instance_faults = {f"i-{number:03d}": InstanceFaults(ends_after_s=5.0 + number) for number in (1, 3)}
    capped = dataclasses.replace(CAPPED, offer=dataclasses.replace(OFFER, billing=billing))
    controller, _, finish = run_virtual(capped, Faults(instance_faults=instance_faults), observers=[same])
    assert finish.outcome == "done"
    assert seen > 10
    assert any(record.ended_at is not None for record in controller.state.instances.values())


def test_an_instance_being_released_is_paid_until_its_release() -> None:
    story, _ = at_its_sync(1.22)
    state = story.state
    assert any(record.status is InstanceStatus.RELEASING for record in state.fleet.current())
    rest = spending_without_released(state)
    assert rest.spent_usd(state.now) == pytest.approx(bill_usd(state, state.now))


def test_an_instance_that_was_asked_for_and_never_comes_does_not_bring_the_stop_nearer() -> None:
    """As long as it may come its minimum is reserved, from now on; what has not come by then has cost nothing."""
    job = dataclasses.replace(JOB, max_cost_usd=0.30, iteration_timeout_s=1e6)
    story = Story(job)
    story.tell(Started)
    story.tell(InstanceRunning, instance="i-001", running_at=story.at)
    running_at, spending = story.at - 1.0, spending_of(story.state)
    first = spending.stops_at(story.at, 0.0)
    assert first == pytest.approx(running_at + 150.0, abs=3.0), "two of them from about now on"
    later = spending.stops_at(first - 1.0, 0.0)
    assert later > first + 30.0
    assert spending.stops_at(later - 1.0, 0.0) <= running_at + 300.0


def test_an_instance_that_starts_up_is_reserved_up_to_its_first_lease() -> None:
    """It cannot be told to end sooner, should the driver die now."""
    story = Story(dataclasses.replace(LEASED, max_cost_usd=1.3, release_margin_s=4.0))
    story.tell(Started)
    first_s = story.state.instances["i-001"].first_lease_s
    assert first_s is not None
    story.tell(InstanceRunning, instance="i-001", running_at=story.at)
    running_at = story.at - 1.0
    spending = spending_of(story.state)
    assert spending.lines[0].bound_until == running_at + first_s + 2.0, (
        "and it notices that its lease is over a while later"
    )
    story.ready("i-001")
    spending = spending_of(story.state)
    assert spending.lines[0].bound_until <= story.at


def test_an_instance_that_is_being_released_is_reserved_until_it_notices_the_end_of_its_lease() -> None:
    story = begun(dataclasses.replace(LEASED, max_cost_usd=2.0, release_margin_s=4.0))
    for trial in range(4):
        story.report(trial, trial / 10)
    released = [one for one in story.state.fleet.current() if one.status is InstanceStatus.RELEASING]
    assert released
    lines = {line.since: line for line in spending_of(story.state).lines}
    for record in released:
        assert record.running_at is not None
        assert record.leased_until is not None
        assert lines[record.running_at].bound_until == record.leased_until + 2.0


def test_instances_that_no_driver_ends_cost_no_more_than_the_cap() -> None:
    """They run from the request on, and notice the end of their first leases half of the release margin later."""
    story = Story(dataclasses.replace(LEASED, max_cost_usd=0.5, release_margin_s=4.0))
    story.tell(Started)
    lives_s = [one.first_lease_s + 2.0 for one in story.state.instances.values() if one.first_lease_s is not None]
    assert len(lives_s) == 2
    usd_per_s = story.controller.job.reserved_usd_per_hour / 3600.0
    assert sum(lives_s) * usd_per_s == pytest.approx(0.5, abs=0.01)
    assert sum(lives_s) * usd_per_s <= 0.5 + 1e-9


def test_the_data_of_instances_on_their_way_is_reserved() -> None:
    dear = dataclasses.replace(SPOT, offer=dataclasses.replace(SPOT.offer, data_usd_per_instance=1.0))
    assert len(Story(dataclasses.replace(dear, max_cost_usd=2.0)).tell(Started)) == 1
    assert len(Story(dataclasses.replace(dear, max_cost_usd=3.0)).tell(Started)) == 2


def test_the_head_costs_nothing_between_an_end_and_a_resume() -> None:
    story = begun(dataclasses.replace(CAPPED, max_cost_usd=5.0))
    story.tell(CancelRequested)
    story.released("i-001", "i-002")
    state = story.state
    before_usd = bill_usd(state, state.now)
    story.at += 86_400.0
    story.tell(DriverResumed, live=(), ended=())
    assert bill_usd(state, state.now) == pytest.approx(before_usd, abs=0.001)
    assert spending_of(state).spent_usd(state.now) == pytest.approx(before_usd, abs=0.001)


@pytest.mark.parametrize("hour_usd", [(0.1,), (3.0,)], ids=["cheaper", "dearer"])
def test_a_price_that_is_known_after_an_instance_has_gone_is_in_what_is_left_of_the_budget(
    hour_usd: tuple[float, ...],
) -> None:
    story = begun(dataclasses.replace(SPOT, max_cost_usd=5.0))
    story.tell(InstanceLost, instance="i-002", ended_at=story.at, reason="taken away", preempted=True)
    state = story.state
    at_once_usd = spending_of(state).spent_usd(state.now)
    story.tell(InstancePriced, instance="i-002", hour_prices_usd=hour_usd)
    ledger_usd, spent_usd = bill_usd(state, state.now), spending_of(state).spent_usd(state.now)
    assert spent_usd == pytest.approx(ledger_usd)
    assert abs(spent_usd - at_once_usd) > 0.005


def test_an_instance_that_ended_before_it_ran_had_its_volume() -> None:
    volumes = SideCost(line="root volumes", usd_per_hour=0.01, usd_once=0.002)
    story = Story(dataclasses.replace(JOB, offer=dataclasses.replace(JOB.offer, side_costs=(volumes,))))
    story.tell(Started)
    story.tell(InstanceLost, instance="i-001", ended_at=story.at, reason="it did not start", preempted=False)
    assert bill_usd(story.state, story.at) == pytest.approx(0.002)
    assert bill_lines(story.state, story.at) == (BillLine(line="root volumes", usd=0.002),)
