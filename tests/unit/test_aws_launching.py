"""What AwsProvider asks EC2 for, one by one and many at once, how often, and what a refusal tells."""

from __future__ import annotations

import base64
import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rubberband.cloud.aws import intents
from rubberband.cloud.aws.calls import Purchase, mismatch, share
from rubberband.cloud.aws.intents import Intents, renew_requests, runs_in
from rubberband.cloud.aws.provider import AwsProvider
from rubberband.cloud.aws.quotes import spot_prices
from rubberband.errors import NoCapacityError, ProviderError
from rubberband.values.plan import Market
from tests.builders.aws_account import offer
from tests.builders.fake_ec2 import ONE_GPU, Killed, World, asked, machines_of, once
from tests.builders.power_cut import PowerCut
from tests.builders.waiting import eventually
from tests.ec2 import FakeCall, Fault

LOST = Fault.timeout(took_effect=True)
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


def test_a_look_ends_what_is_not_what_was_asked_for(world: World) -> None:
    driver = world.driver()
    driver.launch("a")
    assert world.look(driver)["a"].state == "pending"
    (instance,) = world.fake.living
    instance.metadata_options["HttpTokens"] = "optional"
    world.look(driver)
    assert world.living == []


BOUGHT = Purchase(
    instance_type="g5.xlarge", zone="us-east-1a", market="spot", price_usd_per_hour=0.4, on_demand_usd_per_hour=1.0
)
AS_BOUGHT = {"InstanceType": "g5.xlarge", "InstanceLifecycle": "spot", "MetadataOptions": {"HttpTokens": "required"}}


@pytest.mark.parametrize(
    ("choice", "shown", "words"),
    [
        (BOUGHT, {}, ""),
        (replace(BOUGHT, market="on_demand"), {"InstanceLifecycle": "capacity-block"}, ""),
        (BOUGHT, {"InstanceType": "g5.48xlarge"}, "it is a g5.48xlarge and g5.xlarge was asked for"),
        (BOUGHT, {"InstanceLifecycle": "scheduled"}, "it was bought on demand and on the spot market was asked for"),
        (replace(BOUGHT, market="on_demand"), {}, "it was bought on the spot market and on demand was asked for"),
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


NAMES = ("a", "b", "c", "d", "e")


def counts(world: World) -> list[int]:
    return [call.params["MaxCount"] for call in asked(world)]


def zones(world: World, driver: AwsProvider) -> dict[str, int]:
    return Counter(status.zone for status in world.look(driver).values())


def test_many_are_one_request_and_each_lives_its_own_life(world: World) -> None:
    driver = world.driver()
    assert driver.launch_all(NAMES) == {}
    (request,) = [call.params for call in asked(world)]
    assert (request["MinCount"], request["MaxCount"]) == (1, 5)
    assert {one.user_data for one in world.fake.living} == {world.fake.living[0].user_data}
    assert "INSTANCES=(a b c d e)" in world.fake.living[0].user_data
    assert world.living == [*NAMES]
    assert driver.release("c").state == "terminated"
    assert world.living == ["a", "b", "d", "e"]
    world.fake.power_off(next(one.instance_id for one in world.fake.living))
    states = {name: status.state for name, status in world.look(driver).items()}
    assert Counter(states.values()) == {"pending": 3, "terminated": 2}
    driver.close()
    assert world.living == []


@pytest.mark.parametrize("together", [False, True])
def test_spot_instances_without_an_index_of_their_own_all_run(world: World, together: bool) -> None:
    driver = world.driver(together=together)
    assert driver.launch_all(NAMES, "spot") == {}
    assert [status.state for status in world.look(driver).values()] == ["pending"] * 5
    assert len(world.fake.instances) == len(world.fake.living) == 5, "nothing is bought for nothing"
    assert len(zones(world, driver)) == 1


def test_spot_instances_are_requested_side_by_side(world: World) -> None:
    first, others = threading.Event(), threading.Barrier(len(NAMES) - 1)

    def answered(operation: str) -> None:
        if operation == "RunInstances":
            if first.is_set():
                others.wait(30.0)
            first.set()

    world.fake.answers_late = answered
    assert world.driver().launch_all(NAMES, "spot") == {}
    assert not others.broken
    assert world.living == [*NAMES]


@pytest.mark.parametrize("at_once", [1, 3, 8])
@pytest.mark.parametrize("seed", range(4))
def test_in_any_order_of_the_answers_the_same_spot_instances_run(world: World, seed: int, at_once: int) -> None:
    rng, names = random.Random(seed), [f"i-{number:02}" for number in range(12)]
    world.fake.answers_late = lambda _: time.sleep(rng.uniform(0.0, 0.004))  # answers come in any order
    lost = [LOST, Fault.timeout(took_effect=False), Fault.server_error(took_effect=True)]
    faults = [*lost, Fault.throttled(), None, None]
    rng.shuffle(faults)
    world.fake.fault = lambda call: faults.pop() if call.operation == "RunInstances" and faults else None
    for zone, instances in (("us-east-1a", 4), ("us-east-1b", 5)):
        world.fake.set_capacity(instances, zone=zone)
    driver = world.driver(at_once=at_once)
    failed = driver.launch_all(names, "spot")
    assert sorted({*world.living, *failed}) == names
    assert (len(world.living), len(world.fake.instances), len(failed)) == (9, 9, 3)
    assert zones(world, driver) == {"us-east-1a": 4, "us-east-1b": 5}
    assert all(isinstance(error, NoCapacityError) for error in failed.values())
    driver.close()
    assert world.living == []


def test_a_sold_out_zone_gets_few_requests_for_spot_instances(world: World) -> None:
    for zone in ("us-east-1a", "us-east-1b"):
        world.fake.set_capacity(0, zone=zone)
    failed = world.driver().launch_all([f"i-{number:02}" for number in range(40)], "spot")
    assert len(failed) == 40
    assert len(asked(world)) == 2


@pytest.mark.parametrize("took_effect", [True, False])
def test_a_driver_that_dies_while_spot_instances_are_requested_leaves_none_behind(
    world: World, took_effect: bool
) -> None:
    left = [Fault(error=Killed(), took_effect=took_effect), None, None]
    world.fake.fault = lambda call: left.pop() if call.operation == "RunInstances" and left else None
    with pytest.raises(Killed):
        world.driver().launch_all(NAMES, "spot")
    driver = world.driver()
    assert driver.launch_all(NAMES, "spot") == {}
    assert world.living == [*NAMES]
    assert len(world.fake.instances) == len(NAMES)
    driver.close()
    assert world.living == []


def test_instances_that_a_zone_lacks_are_bought_in_the_next_one(world: World) -> None:
    world.fake.set_capacity(3, zone="us-east-1a")
    driver = world.driver()
    assert driver.launch_all(NAMES) == {}
    assert counts(world) == [5, 2]
    assert zones(world, driver) == {"us-east-1a": 3, "us-east-1b": 2}
    assert len({call.params["ClientToken"] for call in asked(world)}) == 2


def test_a_type_without_capacity_is_refused_with_the_reason_of_every_zone(world: World) -> None:
    world.fake.set_capacity(2, zone="us-east-1a")
    world.fake.set_capacity(0, zone="us-east-1b")
    failed = world.driver().launch_all(NAMES)
    assert len(failed) == 3
    assert len(world.living) == 2
    for error in failed.values():
        assert "EC2 has no room for more than 2 of 5; add subnets" in str(error)
        assert "us-east-1b: EC2 has no room (InsufficientInstanceCapacity)" in str(error)


@pytest.mark.parametrize(
    "faults", [[LOST], [Fault.server_error(took_effect=True)], [Fault.throttled()], [LOST, Fault.no_capacity()]]
)
def test_an_answer_that_is_lost_is_asked_for_again_with_the_same_token(world: World, faults: list[Fault]) -> None:
    """What the zone says to a later one changes nothing."""
    world.fake.set_capacity(3, zone="us-east-1a")
    left = [*faults]
    world.fake.fault = lambda call: left.pop(0) if call.operation == "RunInstances" and left else None
    assert world.driver().launch_all(NAMES) == {}
    tokens = [call.params["ClientToken"] for call in asked(world)]
    assert tokens[0] == tokens[1] != tokens[2]
    assert world.living == [*NAMES]


def test_as_many_instances_are_bought_as_the_quota_allows(world: World) -> None:
    for code in world.fake.world.quotas_vcpus:
        world.fake.world.quotas_vcpus[code] = 4.0 * 10  # ten g5.xlarge
    names = [f"i-{number:03}" for number in range(32)]
    failed = world.driver().launch_all(names)
    assert len(world.living) == 10
    assert len(failed) == 22
    assert all("quota is used up" in str(error) for error in failed.values())
    assert counts(world)[:3] == [32, 16, 8]


def in_threads(world: World, names: Sequence[str], together: threading.Barrier) -> None:
    """Launch each name from a thread of its own, all at the same moment."""
    driver = world.driver(sleep=lambda seconds: time.sleep(min(seconds, 0.5)))

    def launch(name: str) -> None:
        together.wait()
        driver.launch(name)

    threads = [threading.Thread(target=launch, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_name_that_several_threads_ask_for_is_bought_once(world: World) -> None:
    in_threads(world, ["a", "a", "a", "b"], threading.Barrier(4))
    assert world.living == ["a", "b"]


def test_launches_of_several_threads_are_bought_together(world: World) -> None:
    in_threads(world, NAMES, threading.Barrier(len(NAMES)))
    assert world.living == [*NAMES]
    assert len({call.params["ClientToken"] for call in asked(world)}) < len(NAMES)


def released_meanwhile(world: World, fault: Fault, market: Market = "on_demand") -> dict[str, ProviderError]:
    """`c` is released while EC2 answers all launches with `fault`."""
    released, failed = threading.Event(), {}
    world.fake.fault = lambda call: fault if call.operation == "RunInstances" and not released.is_set() else None
    driver = world.driver(sleep=lambda _: time.sleep(0.001))  # other threads run meanwhile
    launching = threading.Thread(target=lambda: failed.update(driver.launch_all(NAMES, market)))
    launching.start()
    eventually(lambda: asked(world), "a launch")
    releasing = threading.Thread(target=lambda: driver.release("c"))
    releasing.start()
    eventually(lambda: "c" in driver._unwanted, "the release")
    most = len(asked(world)) + 1  # this one may have been on its way; each later one has seen the release
    eventually(lambda: not launching.is_alive() or len(asked(world)) > most, "a launch that has seen the release")
    released.set()
    for thread in (launching, releasing):
        thread.join()
    return failed


@pytest.mark.parametrize("market", ["on_demand", "spot"])
def test_an_instance_released_before_its_launch_is_not_bought(world: World, market: Market) -> None:
    failed = released_meanwhile(world, Fault.throttled(), market)
    assert "released while it was requested" in str(failed["c"])
    assert world.living == ["a", "b", "d", "e"]
    assert len(world.fake.instances) == 4


def test_an_instance_released_during_an_uncertain_launch_is_ended_once_known(world: World) -> None:
    assert {*released_meanwhile(world, LOST)} <= {"c"}
    assert world.living == ["a", "b", "d", "e"]
    assert len(world.fake.instances) == 5


@pytest.mark.parametrize("hidden_s", [0.0, 200.0])
@pytest.mark.parametrize("took_effect", [True, False])
def test_requests_of_a_killed_driver_are_settled_by_the_next_one(
    world: World, took_effect: bool, hidden_s: float
) -> None:
    world.fake.set_capacity(3, zone="us-east-1a")
    fault = Fault(error=Killed(), took_effect=took_effect, visible_after_s=hidden_s)
    world.fake.fault = once("RunInstances", fault)
    with pytest.raises(Killed):
        world.driver().launch_all(NAMES)
    driver = world.driver()
    assert driver.launch_all(NAMES) == {}
    assert world.living == [*NAMES]
    driver.close()
    assert world.living == []


def test_a_request_that_was_not_written_for_all_of_its_instances_was_never_made(world: World) -> None:
    world.fake.fault = once("RunInstances", Fault(error=Killed()))
    with pytest.raises(Killed):
        world.driver().launch_all(NAMES)
    path = next(world.directory.glob("ec2/*/instances/e.json"))
    path.write_text(json.dumps({**json.loads(path.read_text()), "attempts": []}))
    before = len(asked(world))
    driver = world.driver()
    assert driver.release("a").running_at is None
    assert len(asked(world)) == before
    assert driver.launch_all(NAMES[1:]) == {}
    assert world.living == ["b", "c", "d", "e"]


def test_more_names_than_a_tag_holds_are_several_requests(world: World) -> None:
    names = [f"i-{number:03}" for number in range(60)]
    assert world.driver().launch_all(names) == {}
    assert counts(world) == [42, 18]
    assert world.living == sorted(names)
    assert all(len(one.tags["rubberband:instance"]) <= 256 for one in world.fake.living)
    assert share(["x" * 300], "on_demand") == 1


def test_a_zone_that_has_refused_is_asked_last_for_a_while(world: World) -> None:
    world.fake.set_capacity(0, zone="us-east-1a")
    driver = world.driver()
    driver.launch_all(("a", "b"))
    driver.launch("c")
    zone_of = {subnet: zone for zone, subnet in world.machines.subnets.items()}
    assert [zone_of[call.params["SubnetId"]][-1] for call in asked(world)] == ["a", "b", "b"]
    world.sleep(60.0)
    driver.launch("d")
    assert [zone_of[call.params["SubnetId"]][-1] for call in asked(world)][3:] == ["a", "b"]
