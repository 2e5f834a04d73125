"""What AwsProvider asks EC2 for, how often, and what a refusal tells."""

from __future__ import annotations

import base64
import re
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rubberband.cloud.aws import intents
from rubberband.cloud.aws.calls import Purchase, mismatch
from rubberband.cloud.aws.intents import Intents, renew_requests, runs_in
from rubberband.cloud.aws.quotes import spot_prices
from rubberband.errors import ProviderError
from tests.builders.aws_account import offer
from tests.builders.fake_ec2 import ONE_GPU, World, asked, machines_of, once
from tests.builders.power_cut import PowerCut
from tests.builders.waiting import eventually
from tests.ec2 import FakeCall, Fault
from tests.ec2.client import FakeClient

FALLBACK = (*ONE_GPU, offer("g5.2xlarge", usd=1.212, spot_usd=0.5))


def test_the_launch_request(world: World) -> None:
    world.driver().launch("a", "spot")
    request = asked(world)[0].params
    assert "CreditSpecification" not in request
    assert [disk["Ebs"] for disk in request["BlockDeviceMappings"]] == [
        {"VolumeType": "gp3", "Iops": 3000, "Throughput": 125, "DeleteOnTermination": True}
    ]
    assert (request["MinCount"], request["MaxCount"]) == (1, 1)
    assert len(request["ClientToken"]) == 64
    assert request["MetadataOptions"]["HttpTokens"] == "required"
    assert request["MetadataOptions"]["HttpPutResponseHopLimit"] == 1
    assert request["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert request["InstanceMarketOptions"]["SpotOptions"]["MaxPrice"] == "1.006000"
    for kind in request["TagSpecifications"]:
        tags = {tag["Key"]: tag["Value"] for tag in kind["Tags"]}
        assert tags["rubberband:experiment"] == "digits"
        assert tags["rubberband:run"] == "run-1"
        assert tags["rubberband:instance"] == "a"
        assert (tags["rubberband:owner"], tags["rubberband:role"]) == ("rubberband", "worker")
    assert [kind["ResourceType"] for kind in request["TagSpecifications"]] == ["instance", "volume"]


def test_nothing_is_bought_that_is_paid_for_apart_or_outlives_the_instance(world: World) -> None:
    world.machines = replace(world.machines, further_disks=(world.machines.root_device, "/dev/sdf"), volume_gb=200)
    world.offers = [offer("t3.medium", usd=0.0416)]

    with suppress(ProviderError):  # the account does not have the type
        world.driver().launch("a")

    request = asked(world)[0].params
    disks = {disk["DeviceName"]: disk["Ebs"] for disk in request["BlockDeviceMappings"]}
    assert disks.keys() == {world.machines.root_device, "/dev/sdf"}
    assert all(disk["DeleteOnTermination"] and disk["VolumeType"] == "gp3" for disk in disks.values())
    assert disks[world.machines.root_device]["VolumeSize"] == 200
    assert request["CreditSpecification"] == {"CpuCredits": "standard"}


def test_volumes_have_the_speed_that_is_in_their_price(world: World) -> None:
    images = world.fake.world.images
    images.update({name: replace(one, iops=16_000) for name, one in images.items()})
    world.driver().launch("a")
    world.sleep(360.0)
    gb = images[world.machines.image].volume_gb
    assert world.fake.bill().side_usd("volume") == pytest.approx(gb * 0.08 / 720.0 / 10.0)


def test_its_lease_is_within_what_the_driver_said(world: World) -> None:
    driver = world.driver()
    driver.renew_lease(world.now + 400.0)
    driver.launch("a")
    assert world.fake.living[0].lease_until is not None
    lease_s = world.fake.living[0].lease_until - world.fake.living[0].running_at
    boot_s = 60.0  # until its boot script runs, which arms it
    assert 0.9 * 400.0 - boot_s < lease_s <= 400.0 - boot_s


def test_an_instance_may_boot_longer_than_its_lease_as_far_as_the_budget_reaches(world: World) -> None:
    driver = world.driver()  # its lease is 600 s
    driver.renew_lease(world.now + 1011.0)
    driver.launch("a")
    driver.launch("b", first_lease_s=700.0)
    scripts = [base64.b64decode(call.params["UserData"]).decode() for call in asked(world)]
    times = [dict(re.findall(r"^(LEASE_S|BOOT_S)=(\d+)$", script, re.MULTILINE)) for script in scripts]
    assert times == [{"LEASE_S": "510", "BOOT_S": "900"}, {"LEASE_S": "510", "BOOT_S": "605"}]


def test_slow_firmware_is_within_what_the_budget_covers(world: World) -> None:
    world.offers = [offer("p4d.24xlarge", usd=21.957642)]
    for code in world.fake.world.quotas_vcpus:
        world.fake.world.quotas_vcpus[code] = 96.0
    driver = world.driver()
    driver.renew_lease(world.now + 690.0)
    with pytest.raises(ProviderError, match=r"reaches 690 s from now, and an instance needs 695 s"):
        driver.launch("a")
    driver.renew_lease(world.now + 1580.0)
    driver.launch("b")
    script = base64.b64decode(asked(world)[0].params["UserData"]).decode()
    assert "BOOT_S=900\n" in script


def test_an_instance_that_would_end_too_soon_is_not_rented(world: World) -> None:
    driver = world.driver()
    driver.renew_lease(world.now + 30.0)
    with pytest.raises(ProviderError, match=r"reaches 30 s from now.*raise max_cost, or resources.lease"):
        driver.launch("a")
    assert asked(world) == []
    assert driver.describe() == []


def test_the_next_zone_is_tried_with_another_token(world: World) -> None:
    world.fake.set_capacity(0, zone="us-east-1a")
    driver = world.driver()
    driver.launch("a")
    assert world.look(driver)["a"].zone == "us-east-1b"
    first, second = asked(world)
    assert first.params["ClientToken"] != second.params["ClientToken"]


def test_then_another_type_at_its_own_price(world: World) -> None:
    world.fake.set_capacity(0, instance_type="g5.xlarge")
    driver = world.driver(offers=FALLBACK)
    driver.launch("a")
    status = world.look(driver)["a"]
    assert (status.instance_type, status.price_usd_per_hour) == ("g5.2xlarge", 1.212)


@pytest.mark.parametrize(
    ("differs", "reported"),
    [
        ({"InstanceType": "g5.48xlarge"}, "it is a g5.48xlarge and g5.xlarge was asked for"),
        ({"InstanceLifecycle": "spot"}, "it was bought on the spot market and on demand was asked for"),
        ({"MetadataOptions": {"HttpTokens": "optional"}}, "its metadata service answers without a token"),
    ],
)
def test_an_instance_that_differs_from_the_request_is_ended(
    world: World, monkeypatch: pytest.MonkeyPatch, differs: dict[str, Any], reported: str
) -> None:
    honest = FakeClient._call

    def call(client: FakeClient, operation: str, params: dict[str, Any]) -> dict[str, Any]:
        answer = honest(client, operation, params)
        if operation == "RunInstances":
            answer["Instances"] = [{**one, **differs} for one in answer["Instances"]]
        return answer

    monkeypatch.setattr(FakeClient, "_call", call)
    with pytest.raises(ProviderError, match=f"instance a was ended at once: {reported}"):
        world.driver().launch("a")
    assert len(asked(world)) == 1
    assert not world.fake.living


def test_a_refusal_shows_every_zone_and_is_final(world: World) -> None:
    world.fake.set_capacity(0)
    driver = world.driver()
    no_room = r"^g5\.xlarge in us-east-1a, us-east-1b: EC2 has no room \(InsufficientInstanceCapacity\); add"
    with pytest.raises(ProviderError, match=no_room) as refused:
        driver.launch("a")
    world.fake.set_capacity(None)
    with pytest.raises(ProviderError) as again:
        driver.launch("a")
    assert str(again.value) == str(refused.value)
    with pytest.raises(ProviderError, match="never launched"):
        driver.release("a")
    assert world.look(driver) == {}
    assert world.living == []


def test_a_zone_without_spot_is_the_first_on_demand(world: World) -> None:
    prices = spot_prices(world.fake.session("driver"), ["g5.xlarge"], world.now)["g5.xlarge"]
    cheapest_first = sorted(prices, key=lambda zone: prices[zone])
    world.machines = machines_of(world.fake, zones=cheapest_first)
    world.fake.set_capacity(0, zone=cheapest_first[0], market="spot")
    driver = world.driver()
    driver.launch("a", "spot")
    driver.launch("b")
    assert [one.zone for one in world.fake.living] == [cheapest_first[1], cheapest_first[0]]


def test_hours_of_spot_that_no_driver_saw_are_billed(world: World) -> None:
    driver = world.driver(lease_s=7200.0)
    driver.launch("a", "spot")
    driver.describe()
    world.beat(world.now + 7200.0)
    world.sleep(5400.0)
    assert len(driver.release("a").hour_prices_usd or ()) == 2


def test_a_used_up_quota_is_not_asked_in_other_zones(world: World) -> None:
    for code in world.fake.world.quotas_vcpus:
        world.fake.world.quotas_vcpus[code] = 0.0
    with pytest.raises(ProviderError, match=r"quota is used up.*ask for more.*max_instances"):
        world.driver(offers=FALLBACK).launch("a")
    assert [call.params["InstanceType"] for call in asked(world)] == ["g5.xlarge", "g5.2xlarge"]


def test_a_role_without_rights_is_reported_which(world: World) -> None:
    world.fake.policies["driver"] = []
    with pytest.raises(ProviderError, match=r"may not ec2:RunInstances; attach the policy .*driver\.json"):
        world.driver().launch("a")
    assert len(asked(world)) == 1


@pytest.mark.parametrize(
    "fault",
    [
        Fault.timeout(took_effect=True),
        Fault.timeout(took_effect=False),
        Fault.server_error(took_effect=True),
        Fault.server_error(),
        Fault.throttled(),
    ],
)
def test_an_unanswered_request_is_repeated_with_the_same_token(world: World, fault: Fault) -> None:
    world.fake.fault = once("RunInstances", fault)
    driver = world.driver()
    driver.launch("a")
    tokens = [call.params["ClientToken"] for call in asked(world)]
    assert len(tokens) == 2
    assert len(set(tokens)) == 1
    assert world.living == ["a"]


def test_a_lost_answer_whose_request_no_longer_fits_is_settled_by_looking(world: World) -> None:
    driver = world.driver()
    driver.renew_lease(world.now + 150.0)

    def slow(call: FakeCall) -> Fault | None:
        if call.operation != "RunInstances":
            return None
        world.sleep(20.0)
        return Fault.timeout(took_effect=False)

    world.fake.fault = slow
    with pytest.raises(ProviderError, match="the budget, or its lease, reaches"):
        driver.launch("a")
    assert len(asked(world)) == 1
    assert world.living == []


def test_an_instance_of_a_refused_request_is_ended_when_it_appears(world: World) -> None:
    """Its answer was lost, EC2 then refused the same token, and the other zone gave what was wanted."""
    faults = [Fault.timeout(took_effect=True), Fault.no_capacity()]

    def hidden(call: FakeCall) -> Fault | None:
        if call.operation != "RunInstances" or not faults:
            return None
        fault = faults.pop(0)
        return Fault(error=fault.error, took_effect=fault.took_effect, visible_after_s=200.0)

    world.fake.fault = hidden
    driver = world.driver()
    driver.launch("a")
    assert world.living == ["a", "a"]
    world.sleep(200.0)
    assert world.look(driver)["a"].zone == "us-east-1b"
    assert world.living == ["a"]


LOST = Fault.timeout(took_effect=True)


@pytest.mark.parametrize("answers", [[LOST, Fault.no_capacity()], [LOST, Fault.throttled(), Fault.no_capacity()]])
def test_the_outcome_of_a_lost_answer_is_kept_despite_later_answers(world: World, answers: list[Fault]) -> None:
    left = list(answers)
    world.fake.fault = lambda call: left.pop(0) if call.operation == "RunInstances" and left else None
    driver = world.driver()
    driver.launch("a")

    assert world.look(driver)["a"].zone == "us-east-1a"
    assert len({call.params["ClientToken"] for call in asked(world)}) == 1
    world.sleep(60.0)
    assert len(world.fake.bill().lines) == len(world.living) == 1


@pytest.mark.parametrize("between", [[], [Fault.throttled()]])
def test_close_waits_for_what_may_yet_appear(world: World, between: list[Fault]) -> None:
    world.fake.world.visible_after_s = 250.0
    left = [LOST, *between, Fault.no_capacity(), Fault.no_capacity()]
    world.fake.fault = lambda call: left.pop(0) if call.operation == "RunInstances" and left else None
    driver = world.driver()
    with pytest.raises(ProviderError):
        driver.launch("a")
    assert world.living == ["a"]
    driver.close()
    assert world.living == []


def test_the_zones_of_the_spot_market_are_tried_from_the_cheapest_on(world: World) -> None:
    prices = spot_prices(world.fake.session("driver"), ["g5.xlarge"], world.now)["g5.xlarge"]
    cheapest_first = sorted(prices, key=lambda zone: prices[zone])
    world.machines = machines_of(world.fake, zones=cheapest_first[::-1])
    zones = {world.machines.subnets[zone]: zone for zone in prices}
    world.fake.set_capacity(0, zone=cheapest_first[0])
    driver = world.driver()
    driver.launch("a", "spot")

    assert len(prices) > 2
    assert [zones[call.params["SubnetId"]] for call in asked(world)] == cheapest_first[:2]
    status = world.look(driver)["a"]
    world.sleep(60.0)
    (line,) = world.fake.bill().lines
    assert (status.market, status.zone, line.zone) == ("spot", cheapest_first[1], cheapest_first[1])
    assert status.price_usd_per_hour == line.price_usd_per_hour == prices[cheapest_first[1]]


def test_an_ignored_spot_flag_is_an_error_and_ends_it(world: World) -> None:
    world.fake.world.ignores_spot = True
    driver = world.driver()
    with pytest.raises(ProviderError, match="bought on demand and on the spot market was asked for"):
        driver.launch("a", "spot")
    assert world.living == []


def test_an_instance_on_dedicated_hardware_is_ended_at_once(world: World) -> None:
    (vpc,) = world.fake.world.vpcs
    world.fake.world.vpcs[vpc] = replace(world.fake.world.vpcs[vpc], tenancy="dedicated")
    with pytest.raises(ProviderError, match="it is on dedicated hardware, which costs more"):
        world.driver().launch("a")
    assert world.living == []


def test_a_look_ends_what_is_not_what_was_asked_for(world: World) -> None:
    driver = world.driver()
    driver.launch("a")
    assert world.look(driver)["a"].state == "pending"
    (instance,) = world.fake.living
    instance.tenancy = "dedicated"
    world.look(driver)
    assert world.living == []


BOUGHT = Purchase(
    instance_type="g5.xlarge", zone="us-east-1a", market="spot", price_usd_per_hour=0.4, on_demand_usd_per_hour=1.0
)
AS_BOUGHT = {
    "InstanceType": "g5.xlarge",
    "InstanceLifecycle": "spot",
    "Placement": {"Tenancy": "default"},
    "MetadataOptions": {"HttpTokens": "required"},
}


@pytest.mark.parametrize(
    ("choice", "shown", "words"),
    [
        (BOUGHT, {}, ""),
        (replace(BOUGHT, market="on_demand"), {"InstanceLifecycle": "capacity-block"}, ""),
        (BOUGHT, {"InstanceType": "g5.48xlarge"}, "it is a g5.48xlarge and g5.xlarge was asked for"),
        (BOUGHT, {"InstanceLifecycle": "scheduled"}, "it was bought on demand and on the spot market was asked for"),
        (replace(BOUGHT, market="on_demand"), {}, "it was bought on the spot market and on demand was asked for"),
        (BOUGHT, {"Placement": {"Tenancy": "host"}}, "it is on host hardware"),
        (BOUGHT, {"MetadataOptions": {"HttpTokens": "optional"}}, "answers without a token"),
    ],
)
def test_an_instance_is_compared_with_the_request_for_it(choice: Purchase, shown: Any, words: str) -> None:
    wrong = mismatch({**AS_BOUGHT, **shown}, choice)
    assert words in wrong
    assert bool(words) == bool(wrong)


def test_a_request_is_known_after_a_power_cut(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world.directory = tmp_path / "driver"
    world.directory.mkdir()
    cut = PowerCut(world.directory, monkeypatch)
    found: list[list[str]] = []

    def cut_off(call: FakeCall) -> Fault | None:
        if call.operation == "RunInstances":
            after = cut.survivors(tmp_path / f"after-{len(found)}")
            (run,) = runs_in(after)
            known = Intents(after, run).all()
            found.append([intent.last.token for intent in known if intent.last is not None])
        return None

    world.fake.fault = cut_off
    driver = world.driver()
    driver.launch("a")
    driver.launch("b")

    first, second = (call.params["ClientToken"] for call in asked(world))
    assert found == [[first], [first, second]]


def test_nothing_is_rented_that_cannot_be_written_down(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = world.driver()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(intents, "_write", full)
    with pytest.raises(ProviderError, match=r"cannot be written \(No space left.*make room"):
        driver.launch("a")
    assert asked(world) == []


def test_a_release_ends_the_asking(world: World) -> None:
    refused: list[str] = []

    def busy(call: FakeCall) -> Fault | None:
        return Fault.throttled() if call.operation == "RunInstances" and not refused else None

    world.fake.fault = busy
    driver = world.driver(sleep=lambda _: time.sleep(0.001))  # other threads run meanwhile

    def launch() -> None:
        try:
            driver.launch("a")
        except ProviderError as error:
            refused.append(str(error))

    thread = threading.Thread(target=launch)
    thread.start()
    eventually(lambda: asked(world), "a launch")
    assert driver.release("a").state == "terminated"
    thread.join()
    assert "released while it was requested" in refused[0]
    assert world.living == []


def test_a_restored_run_does_not_get_an_instance_that_it_launched_after_its_backup(world: World) -> None:
    """EC2 answers a token that it knows with the instance of then, which has ended."""
    world.driver().launch("a")
    first = asked(world)[0].params["ClientToken"]
    (intent,) = world.directory.glob("ec2/*/instances/a.json")
    intent.unlink()  # the backup did not have it
    renew_requests(world.directory)
    world.driver().launch("a")
    tokens = [call.params["ClientToken"] for call in asked(world)]
    assert len(tokens) == 2
    assert first not in tokens[1:]
