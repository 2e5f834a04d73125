"""How the fake's instances come to be taken away or end themselves: spot, leases, machines that boot and power off."""

from __future__ import annotations

import math

import pytest

from tests.builders.fake_launches import START, Rental, spot


@pytest.fixture
def rental() -> Rental:
    return Rental()


def test_a_spot_instance_is_bought_at_the_market_s_price(rental: Rental) -> None:
    instance = rental.launch(InstanceMarketOptions=spot("3.06"))
    shown = rental.shown(instance)
    assert shown["InstanceLifecycle"] == "spot"
    assert shown["SpotInstanceRequestId"].startswith("sir-")
    history = rental.ec2.describe_spot_price_history(
        InstanceTypes=["p3.2xlarge"], AvailabilityZone="us-east-1a", StartTime=START, EndTime=START
    )["SpotPriceHistory"]
    rental.clock.sleep(120)
    assert rental.fake.bill().lines[0].price_usd_per_hour == float(history[0]["SpotPrice"]) < 3.06


def test_a_spot_flag_can_be_ignored(rental: Rental) -> None:
    rental.fake.world.ignores_spot = True
    assert "InstanceLifecycle" not in rental.shown(rental.launch(InstanceMarketOptions=spot()))
    rental.clock.sleep(60)
    assert rental.fake.bill().lines[0].price_usd_per_hour == pytest.approx(3.06)


@pytest.mark.parametrize("notice_s", [120.0, 20.0, None])
def test_a_spot_instance_is_reclaimed_with_notice_late_notice_or_none(rental: Rental, notice_s: float | None) -> None:
    instance = rental.launch(InstanceMarketOptions=spot())
    rental.clock.sleep(600)
    rental.fake.reclaim(instance, notice_s=notice_s)
    there = rental.fake.instances[0]
    if notice_s is not None:
        assert (there.notice_at, there.reclaim_at) == (START + 600, START + 600 + notice_s)
        assert rental.state(instance) == "running"
        rental.clock.sleep(notice_s + 1)
    assert rental.shown(instance)["StateReason"]["Code"] == "Server.SpotInstanceTermination"
    assert rental.fake.instances[0].ended_at == START + 600 + (notice_s or 0.0)


def leased() -> Rental:
    return Rental(reads=lambda user_data: (300.0, 1000.0))


def test_an_instance_ends_itself_at_its_lease() -> None:
    rental = leased()
    instance = rental.launch()
    rental.clock.sleep(319)
    assert rental.state(instance) == "running"
    rental.clock.sleep(1000)
    assert rental.state(instance) == "terminated"
    assert rental.fake.instances[0].ended_at == START + 320
    assert rental.shown(instance)["StateReason"]["Code"] == "Client.InstanceInitiatedShutdown"


def test_a_lease_is_extended_up_to_the_hard_stop_and_may_be_cut() -> None:
    rental = leased()
    kept, cut = rental.launch(), rental.launch()
    rental.clock.sleep(100)
    rental.fake.extend_lease(kept, START + 90_000)
    rental.fake.extend_lease(cut, START + 200)
    rental.clock.sleep(10_000)
    rental.fake.tick()
    assert [one.ended_at for one in rental.fake.instances] == [START + 1020, START + 200]


def test_a_machine_that_never_boots_does_not_end_itself() -> None:
    rental = Rental(reads=lambda user_data: (300.0, 1000.0), boot_s=lambda rng: math.inf)
    rental.launch()
    rental.clock.sleep(1_000_000)
    assert len(rental.fake.living) == 1


def test_a_lease_begins_when_the_machine_has_booted() -> None:
    rental = Rental(reads=lambda user_data: (300.0, 1000.0), boot_s=40.0)
    rental.launch()
    rental.clock.sleep(1000)
    assert [one.ended_at for one in rental.fake.instances] == [START + 20 + 40 + 300]


def test_a_lease_that_is_over_is_not_extended() -> None:
    rental = leased()
    instance = rental.launch()
    rental.clock.sleep(400)
    rental.fake.extend_lease(instance, START + 900)
    assert rental.fake.living == ()


def test_machines_are_reported_of_boots_and_ends_once(rental: Rental) -> None:
    told: list[tuple[str, str]] = []
    rental.fake.on_boot = lambda one: told.append(("boot", one.instance_id))
    rental.fake.on_end = lambda one: told.append(("end", one.instance_id))
    ran, never_ran = rental.launch(), rental.launch()
    rental.ec2.terminate_instances(InstanceIds=[never_ran])
    rental.clock.sleep(20)
    rental.fake.tick()
    rental.fake.power_off(ran)
    rental.fake.power_off(ran)
    assert told == [("end", never_ran), ("boot", ran), ("end", ran)]


def test_a_machine_may_call_back_while_it_is_notified(rental: Rental) -> None:
    rental.fake.on_boot = lambda one: rental.fake.power_off(one.instance_id)
    instance = rental.launch()
    rental.clock.sleep(20)
    rental.fake.tick()
    assert rental.state(instance) == "shutting-down"
