"""The fake's meter: from running to shutting-down, a minute at the least, at the price of the hour."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders.fake_launches import START, Rental, spot

ZONE = "us-east-1c"


@settings(max_examples=60, deadline=None)
@given(pending_s=st.floats(0.0, 600.0), ran_s=st.floats(0.0, 100_000.0), later_s=st.floats(0.0, 100_000.0))
def test_an_instance_is_billed_from_running_until_its_end(pending_s: float, ran_s: float, later_s: float) -> None:
    rental = Rental(pending_s=pending_s)
    instance = rental.launch()
    rental.clock.sleep(pending_s)
    rental.clock.sleep(ran_s)
    rental.ec2.terminate_instances(InstanceIds=[instance])
    rental.clock.sleep(later_s)
    assert rental.fake.bill().rent_usd == pytest.approx(max(60.0, ran_s) / 3600.0 * 3.06)


@settings(max_examples=60, deadline=None)
@given(steps_s=st.lists(st.floats(0.0, 5000.0), max_size=8), lease_s=st.floats(0.0, 10_000.0))
def test_a_bill_never_falls_and_ends_with_the_lease(steps_s: list[float], lease_s: float) -> None:
    rental = Rental(reads=lambda user_data: (lease_s, 1e9))
    rental.launch()
    bills_usd = [0.0]
    for step_s in steps_s:
        rental.clock.sleep(step_s)
        bills_usd.append(rental.fake.bill().rent_usd)
    assert bills_usd == sorted(bills_usd)
    assert bills_usd[-1] <= max(60.0, lease_s) / 3600.0 * 3.06 * (1 + 1e-9)


@pytest.mark.parametrize("swing", [0.0, 0.2, 5.0])
def test_a_spot_price_is_never_above_the_price_on_demand(swing: float) -> None:
    rental = Rental()
    rental.fake.world.spot.swing, rental.fake.world.spot.step_s = swing, 60.0
    prices_usd = {_price_usd(rental, START + minute * 60.0) for minute in range(100)}
    assert (len(prices_usd) == 1) == (swing == 0.0)
    assert 0.0 < min(prices_usd) <= max(prices_usd) <= 3.06


WALKS = st.lists(st.tuples(st.floats(0.0, 20_000.0), st.floats(0.2, 3.0)), min_size=1, max_size=8)


@settings(max_examples=100, deadline=None)
@given(walk=WALKS, pending_s=st.floats(0.0, 600.0), ran_s=st.floats(0.0, 20_000.0))
def test_every_hour_on_spot_costs_the_price_at_its_start(
    walk: list[tuple[float, float]], pending_s: float, ran_s: float
) -> None:
    rental = Rental(pending_s=pending_s)
    changes = sorted((START + after_s, price) for after_s, price in walk)
    rental.fake.world.spot.set("p3.2xlarge", ZONE, changes)
    rental.launch(InstanceMarketOptions=spot(), Placement={"AvailabilityZone": ZONE})
    rental.clock.sleep(pending_s + ran_s)
    line = rental.fake.bill().lines[0]
    expected_usd, left_s, at = 0.0, line.billed_s, line.running_at
    while left_s > 0:
        price = next((price for since, price in reversed(changes) if since <= at), changes[0][1])
        expected_usd += min(left_s, 3600.0) / 3600.0 * price
        left_s, at = left_s - 3600.0, at + 3600.0
    assert line.cost_usd == pytest.approx(expected_usd)


def test_the_history_shows_the_prices_that_are_billed() -> None:
    rental = Rental()
    rental.launch(InstanceMarketOptions=spot(), Placement={"AvailabilityZone": ZONE})
    rental.clock.sleep(20 + 7200)
    line = rental.fake.bill().lines[0]
    assert (line.instance_type, line.market, line.zone) == ("p3.2xlarge", "spot", ZONE)
    assert (line.running_at, line.ended_at, line.billed_s) == (START + 20, None, 7200.0)
    lines = [(point["Timestamp"].timestamp(), float(point["SpotPrice"])) for point in _history(rental)]
    hours = [next(price for since, price in lines if since <= START + 20 + hour * 3600.0) for hour in (0, 1)]
    assert len(set(hours)) == 2
    assert line.cost_usd == pytest.approx(sum(hours))


@pytest.mark.parametrize(("ran_s", "billed_s"), [(1000.0, 0.0), (3479.0, 0.0), (3480.0, 3600.0), (5000.0, 5120.0)])
def test_an_instance_that_is_reclaimed_in_its_first_hour_is_free(ran_s: float, billed_s: float) -> None:
    rental = Rental()
    rental.fake.world.spot.set("p3.2xlarge", ZONE, [(START, 0.72)])
    instance = rental.launch(InstanceMarketOptions=spot(), Placement={"AvailabilityZone": ZONE})
    rental.clock.sleep(20 + ran_s)
    rental.fake.reclaim(instance, notice_s=120.0)
    rental.clock.sleep(5000)
    assert rental.fake.bill().rent_usd == pytest.approx(billed_s / 3600.0 * 0.72)


def test_ending_an_instance_after_its_notice_is_charged() -> None:
    rental = Rental()
    rental.fake.world.spot.set("p3.2xlarge", ZONE, [(START, 0.72)])
    instance = rental.launch(InstanceMarketOptions=spot(), Placement={"AvailabilityZone": ZONE})
    rental.clock.sleep(20 + 1000)
    rental.fake.reclaim(instance, notice_s=120.0)
    rental.clock.sleep(100)
    rental.ec2.terminate_instances(InstanceIds=[instance])
    assert rental.fake.bill().rent_usd == pytest.approx(1100.0 / 3600.0 * 0.72)


def test_a_price_above_the_maximum_takes_an_instance_away_after_two_minutes() -> None:
    rental = Rental()
    rental.fake.world.spot.set("p3.2xlarge", ZONE, [(START, 0.72), (START + 5000.0, 1.2), (START + 5100.0, 0.7)])
    instance = rental.launch(InstanceMarketOptions=spot("1.0"), Placement={"AvailabilityZone": ZONE})
    rental.clock.sleep(6000)
    assert rental.shown(instance)["StateReason"]["Code"] == "Server.SpotInstanceTermination"
    assert rental.fake.bill().lines[0].ended_at == START + 5120.0


def test_an_instance_that_is_started_again_is_billed_for_both_times() -> None:
    rental = Rental()
    instance = rental.launch(InstanceInitiatedShutdownBehavior="stop")
    rental.clock.sleep(20 + 100)
    rental.fake.power_off(instance)
    rental.clock.sleep(1000)
    rental.fake.session("admin").client("ec2").start_instances(InstanceIds=[instance])
    rental.clock.sleep(20 + 200)
    bill = rental.fake.bill()
    assert [line.billed_s for line in bill.lines] == [100.0, 200.0]
    assert bill.side_usd("volume") == pytest.approx(75 * 0.08 / 720 * 1340 / 3600)


def _price_usd(rental: Rental, at: float) -> float:
    """As the history tells it then."""
    rental.clock.now, now = at, rental.clock.now
    history = rental.ec2.describe_spot_price_history(
        InstanceTypes=["p3.2xlarge"], AvailabilityZone="us-east-1c", StartTime=at
    )["SpotPriceHistory"]
    rental.clock.now = now
    return float(history[0]["SpotPrice"])


def _history(rental: Rental) -> list[dict[str, Any]]:
    history: list[dict[str, Any]] = rental.ec2.describe_spot_price_history(
        InstanceTypes=["p3.2xlarge"], AvailabilityZone=ZONE, StartTime=START
    )["SpotPriceHistory"]
    return history
