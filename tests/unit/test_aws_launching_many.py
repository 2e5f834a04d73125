"""What AwsProvider asks EC2 for when it launches several instances at the same moment."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from rubberband.cloud.aws.calls import NodeStart, name_in, share
from rubberband.cloud.aws.provider import AwsProvider
from rubberband.errors import InputError, NoCapacityError, ProviderError
from tests.builders.fake_ec2 import World, asked, boot_script, once
from tests.builders.waiting import eventually
from tests.ec2 import FakeCall, Fault
from tests.ec2.limits import Limits, Rate

NAMES = ("a", "b", "c", "d", "e")
LOST = Fault.timeout(took_effect=True)


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


def waits(world: World, sleep: Callable[[float], None]) -> None:
    """Launches take the time of `sleep`, and as many as one likes are taken at once."""
    limits = Limits(sleep=sleep)
    limits.requests["RunInstances"] = limits.instances["RunInstances"] = Rate(1e6, 1e6)
    world.fake.limits = limits


def test_spot_instances_are_requested_side_by_side(world: World) -> None:
    first, others = threading.Event(), threading.Barrier(len(NAMES) - 1)

    def answered(_: float) -> None:
        if first.is_set():
            others.wait(30.0)
        first.set()

    waits(world, answered)
    assert world.driver().launch_all(NAMES, "spot") == {}
    assert not others.broken
    assert world.living == [*NAMES]


@pytest.mark.parametrize("at_once", [1, 3, 8])
@pytest.mark.parametrize("seed", range(4))
def test_in_any_order_of_the_answers_the_same_spot_instances_run(world: World, seed: int, at_once: int) -> None:
    rng, names = random.Random(seed), [f"i-{number:02}" for number in range(12)]
    waits(world, lambda _: time.sleep(rng.uniform(0.0, 0.004)))  # answers come in any order
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
    attempts = [attempt for intent in driver._intents.all() for attempt in intent.attempts]
    assert len({attempt.token for attempt in attempts}) == len(attempts)
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


def test_a_spot_instance_released_while_ec2_is_busy_is_not_bought(world: World) -> None:
    driver = world.driver(lease_s=3600.0)

    def released(call: FakeCall) -> Fault | None:
        driver._unwanted.add("c")  # as a release begins
        return Fault.throttled() if call.operation == "RunInstances" and len(asked(world)) < 6 else None

    world.fake.fault = released
    assert {*driver.launch_all(NAMES, "spot")} == {"c"}
    assert world.living == ["a", "b", "d", "e"]


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


@pytest.mark.parametrize("fault", [LOST, Fault.server_error(took_effect=True), Fault.throttled()])
def test_an_answer_that_is_lost_is_asked_for_again_with_the_same_token(world: World, fault: Fault) -> None:
    world.fake.set_capacity(3, zone="us-east-1a")
    world.fake.fault = once("RunInstances", fault)
    assert world.driver().launch_all(NAMES) == {}
    tokens = [call.params["ClientToken"] for call in asked(world)]
    assert tokens[0] == tokens[1] != tokens[2]
    assert world.living == [*NAMES]


def test_the_outcome_of_a_lost_answer_is_kept_despite_later_answers(world: World) -> None:
    world.fake.set_capacity(3, zone="us-east-1a")
    left = [LOST, Fault.no_capacity()]
    world.fake.fault = lambda call: left.pop(0) if call.operation == "RunInstances" and left else None
    assert world.driver().launch_all(NAMES) == {}
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


def busy_until(released: threading.Event, fault: Fault, world: World) -> None:
    def busy(call: FakeCall) -> Fault | None:
        return fault if call.operation == "RunInstances" and not released.is_set() else None

    world.fake.fault = busy


def released_meanwhile(world: World, fault: Fault) -> dict[str, ProviderError]:
    """`c` is released while EC2 answers all launches with `fault`."""
    released, failed = threading.Event(), {}
    busy_until(released, fault, world)
    driver = world.driver(sleep=lambda _: time.sleep(0.001))  # other threads run meanwhile
    launching = threading.Thread(target=lambda: failed.update(driver.launch_all(NAMES)))
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


def test_an_instance_released_before_its_launch_is_not_bought(world: World) -> None:
    failed = released_meanwhile(world, Fault.throttled())
    assert "released while it was requested" in str(failed["c"])
    assert world.living == ["a", "b", "d", "e"]
    assert len(world.fake.instances) == 4


def test_an_instance_released_during_an_uncertain_launch_is_ended_once_known(world: World) -> None:
    assert {*released_meanwhile(world, LOST)} <= {"c"}
    assert world.living == ["a", "b", "d", "e"]
    assert len(world.fake.instances) == 5


class Killed(BaseException):
    """The driver is killed."""


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


def test_intents_of_a_former_version_are_read(world: World) -> None:
    world.fake.fault = once("RunInstances", Fault(error=Killed(), took_effect=True))
    with pytest.raises(Killed):
        world.driver().launch("a")
    path = next(world.directory.glob("ec2/*/instances/a.json"))
    plain = json.loads(path.read_text())
    del plain["attempts"][0]["names"]
    path.write_text(json.dumps(plain))
    world.driver().launch("a")
    assert world.living == ["a"]
    assert len(world.fake.instances) == 1


def test_more_names_than_a_tag_holds_are_several_requests(world: World) -> None:
    names = [f"i-{number:03}" for number in range(60)]
    assert world.driver().launch_all(names) == {}
    assert counts(world) == [42, 18]
    assert world.living == sorted(names)
    assert all(len(one.tags["rubberband:instance"]) <= 256 for one in world.fake.living)
    assert share(["x" * 300], "on_demand") == 1


def test_more_names_than_user_data_holds_are_several_requests(world: World) -> None:
    def at_most_two(start: NodeStart) -> str:
        if len(start.instances) > 2:
            raise InputError("too long")
        return boot_script(start)

    world.machines = replace(world.machines, user_data=at_most_two)
    assert world.driver().launch_all(NAMES) == {}
    assert sum(counts(world)) == len(NAMES)
    for one in world.fake.living:
        assert f"INSTANCES=({one.tags['rubberband:instance']})" in one.user_data
        assert name_in(one.tags, one.launch_index) in one.user_data


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
