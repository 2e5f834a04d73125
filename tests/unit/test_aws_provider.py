"""AwsProvider against the fake EC2: what is believed of instances, and how they end."""

from __future__ import annotations

import pytest

from rubberband.cloud.aws.fleet import PATIENCE_S, SHUTDOWN_S, VISIBILITY_S
from rubberband.cloud.aws.provider import CLOSED, AwsProvider
from rubberband.errors import ProviderError
from rubberband.values.plan import Market
from tests.builders.fake_ec2 import START_AT, Killed, World, once
from tests.ec2 import Fault


def test_an_instance_not_yet_shown_is_pending_and_can_be_released(world: World) -> None:
    world.fake.world.visible_after_s = 290.0
    driver = world.driver()
    driver.launch("a")
    for _ in range(5):
        assert world.look(driver)["a"].state == "pending"
    assert driver.release("a").state == "terminated"
    assert world.living == []


def test_absent_is_believed_once_the_lease_is_over(world: World) -> None:
    driver = world.driver()
    driver.launch("a")
    world.sleep(60.0)
    assert world.look(driver)["a"].state == "running"
    world.fake.world.instances.clear()
    world.sleep(600.0)
    assert world.look(driver)["a"].state == "running"
    world.sleep(SHUTDOWN_S + VISIBILITY_S)
    gone = world.look(driver)["a"]
    assert gone.state == "terminated"
    assert gone.reason == "EC2 no longer lists it"
    assert gone.ended_at == pytest.approx(START_AT + 600.0 + SHUTDOWN_S), "its bill is never underestimated"


def test_an_instance_that_ec2_omits_while_its_lease_is_renewed_is_kept(world: World) -> None:
    driver = world.driver()
    driver.launch("a")
    world.fake.fault = lambda call: (
        Fault.stale(1e9)
        if call.operation == "DescribeInstances" and START_AT + 600.0 < call.at < START_AT + 3600.0
        else None
    )
    for _ in range(120):
        world.sleep(60.0)
        driver.renew_lease(world.now + 600.0)
        world.beat(world.now + 600.0)
        assert [one.ended_at for one in driver.describe()] == [None]
    assert world.living == ["a"]
    driver.release("a")
    assert world.living == []


def test_an_instance_that_is_never_shown_ends_with_the_lease_that_it_boots_with(world: World) -> None:
    driver = world.driver()
    world.fake.fault = lambda call: Fault.stale(1e9) if call.operation == "DescribeInstances" else None
    driver.launch("a")
    for _ in range(60):
        world.sleep(60.0)
        driver.renew_lease(world.now + 600.0)
        (shown,) = driver.describe()
    assert world.living == []
    billed_usd = world.fake.bill().rent_usd
    assert shown.running_at is not None
    assert shown.ended_at is not None
    ledger_usd = (shown.ended_at - shown.running_at) * 1.006 / 3600.0
    assert billed_usd <= ledger_usd <= billed_usd + 1.006 * (SHUTDOWN_S + 90.0) / 3600.0


def test_the_boot_step_of_an_instance_that_is_not_ready_is_shown(world: World) -> None:
    driver = world.driver()
    assert driver.last_words("a") == ""
    driver.launch("a")
    world.sleep(60.0)
    world.fake.world.console = lambda _: "rubberband: 01:02:03 setup: sleep 1000\nwaits for the disk\n"
    assert driver.last_words("a") == "its boot script is at `setup: sleep 1000`: waits for the disk"


def test_a_reclaimed_instance_that_has_lost_its_tags_is_still_known_as_such(world: World) -> None:
    world.driver().launch("a", "spot")
    world.sleep(300.0)
    (instance,) = world.fake.living
    world.fake.reclaim(instance.instance_id, notice_s=None)
    world.sleep(1200.0)
    instance.tags.clear()
    driver = world.driver()
    for _ in range(2):
        gone = world.look(driver)["a"]
    assert (gone.state, gone.preempted, gone.reason) == ("terminated", True, "EC2 took the spot instance back")


def test_an_ended_instance_without_its_tags_is_released(world: World) -> None:
    world.driver().launch("a")
    world.sleep(300.0)
    (instance,) = world.fake.living
    world.fake.power_off(instance.instance_id)
    world.sleep(1200.0)
    instance.tags.clear()
    assert world.driver().release("a").state == "terminated"


def test_tags_that_are_not_known_yet_are_waited_for(world: World) -> None:
    driver = world.driver()
    driver.launch("a")
    (instance,) = world.fake.living
    tags = {**instance.tags}
    instance.tags.clear()

    def slept(seconds: float) -> None:
        world.now += seconds
        instance.tags.update(tags)

    assert world.driver(sleep=slept).release("a").state == "terminated"
    assert world.living == []


@pytest.mark.parametrize("hidden_s", [0.0, 299.0])
def test_a_driver_killed_after_the_launch_finds_the_same_instance(world: World, hidden_s: float) -> None:
    world.fake.fault = once("RunInstances", Fault(error=Killed(), took_effect=True, visible_after_s=hidden_s))
    with pytest.raises(Killed):
        world.driver().launch("a")
    driver = world.driver()
    assert world.look(driver)["a"].ended_at is None
    driver.launch("a")
    assert world.living == ["a"]
    assert driver.release("a").state == "terminated"
    assert world.living == []


def test_a_driver_killed_before_the_launch_rents_nothing_by_looking(world: World) -> None:
    world.fake.fault = once("RunInstances", Fault(error=Killed()))
    with pytest.raises(Killed):
        world.driver().launch("a")
    driver = world.driver()
    assert world.look(driver)["a"].state == "pending"
    world.sleep(300.0)
    ended = world.look(driver)["a"]
    assert (ended.state, ended.running_at) == ("terminated", None)
    assert "launched no instance" in ended.reason
    assert world.living == []


def paid_usd(world: World, driver: AwsProvider) -> float:
    """By the ledger: what instances cost that have ended."""
    world.look(driver)
    ended = world.look(driver).values()
    assert {one.state for one in ended} == {"terminated"}
    hours = [((one.ended_at or 0.0) - (one.running_at or one.ended_at or 0.0)) / 3600.0 for one in ended]
    return sum(hour * (one.price_usd_per_hour or 0.0) for hour, one in zip(hours, ended, strict=True))


@pytest.mark.parametrize("asks_again", [False, True])
def test_an_instance_forgotten_before_a_driver_came_back_is_billed(world: World, asks_again: bool) -> None:
    """EC2 launched both, the driver died before the answer, and nothing shows them when the next one comes."""
    world.fake.fault = once("RunInstances", Fault(error=Killed(), took_effect=True))
    with pytest.raises(Killed):
        world.driver().launch_all(["a", "b"])
    world.sleep(2 * 3600.0)
    billed_usd = world.fake.bill().rent_usd
    driver = world.driver()
    if asks_again:
        assert driver.launch_all(["a", "b"]) == {}
    assert 0.0 < billed_usd <= paid_usd(world, driver) < 1.5 * billed_usd
    world.driver().launch_all(["a", "b"])
    assert (world.living, len(world.fake.instances)) == ([], 2)


def test_time_while_the_drivers_machine_slept_is_billed(world: World) -> None:
    def asleep(seconds: float) -> None:
        world.sleep(7200.0 if world.fake.instances and world.now < START_AT + 7200.0 else seconds)

    world.fake.fault = once("RunInstances", Fault.timeout(took_effect=True))
    driver = world.driver(sleep=asleep)
    driver.launch("a")
    billed_usd = world.fake.bill().rent_usd
    assert 0.0 < billed_usd <= paid_usd(world, driver) < 1.5 * billed_usd
    assert len(world.fake.instances) == 1


def test_without_the_head_instances_are_of_no_use(world: World) -> None:
    driver = world.driver()
    driver.launch("a")
    world.sleep(30.0)
    world.head.lives = False
    world.look(driver)
    status = world.look(driver)["a"]
    assert (status.state, status.reason) == ("terminated", "the Ray head ended")
    assert world.living == []


def test_an_instance_of_a_former_head_is_of_no_use(world: World) -> None:
    driver = world.driver()
    driver.launch("a")
    world.head.address = "10.0.0.1:7000"
    driver.launch("b")
    world.look(driver)
    assert world.living == ["b"]


def test_while_ec2_does_not_answer_nothing_changes(world: World) -> None:
    driver = world.driver()
    driver.launch("a")
    world.sleep(60.0)
    before = world.look(driver)
    world.fake.fault = lambda call: Fault.timeout(took_effect=False)
    with pytest.raises(ProviderError, match="does not answer"):
        world.look(driver)
    with pytest.raises(ProviderError, match="not released yet"):
        driver.release("a")
    world.fake.fault = None
    assert before["a"].state == "running"
    assert driver.release("a").state == "terminated"


def test_a_driver_that_comes_back_late_does_not_bill_the_days_between(world: World) -> None:
    driver = world.driver()
    driver.launch("a")
    world.sleep(60.0)
    world.look(driver)
    world.sleep(3 * 86_400.0)
    driver = world.driver()
    world.look(driver)
    status = world.look(driver)["a"]
    assert status.running_at is not None
    assert status.ended_at is not None
    assert status.ended_at - status.running_at < 800.0


def test_an_instance_past_its_end_and_not_shown_is_over_at_once(world: World) -> None:
    driver = world.driver()
    driver.launch("a")
    world.sleep(60.0)
    world.look(driver)
    world.sleep(86_400.0)  # a driver that took it for alive would find max_cost used up, and end the experiment
    (status,) = world.driver().describe()
    assert status.state == "terminated"
    assert status.ended_at is not None
    assert status.ended_at < world.now - 85_000.0


def test_a_driver_that_closes_is_the_reason_of_ends(world: World) -> None:
    driver = world.driver()
    driver.launch("a")
    driver.close()
    (shown,) = world.driver().describe()
    assert (shown.state, shown.reason) == ("terminated", CLOSED)


def test_ends_are_reported_in_words(world: World) -> None:
    driver = world.driver()
    for name in ("off", "stolen", "broken"):
        driver.launch(name)
    off, stolen, broken = (one.instance_id for one in world.fake.instances)
    world.fake.break_down(broken, "Server.InsufficientInstanceCapacity")
    world.sleep(60.0)
    world.fake.power_off(off)
    world.fake.session("admin").client("ec2").terminate_instances(InstanceIds=[stolen])
    shown = world.look(driver)
    assert "powered itself off" in shown["off"].reason
    assert "get-console-output" in shown["off"].reason
    assert shown["stolen"].reason.startswith("terminated by another user or process, or by its guard")
    assert shown["broken"].running_at is None
    assert "Insufficient capacity" in shown["broken"].reason


@pytest.mark.parametrize("reason", ["Server.InsufficientInstanceCapacity", "Client.VolumeLimitExceeded"])
@pytest.mark.parametrize("market", ["on_demand", "spot"])
def test_a_zone_that_has_no_room_after_all_is_sold_out_and_others_come_first(
    world: World, market: Market, reason: str
) -> None:
    driver, zones = world.driver(), []
    for name in "abc":
        driver.launch(name, market)
        (machine,) = world.fake.living
        zones.append(machine.zone)
        world.fake.break_down(machine.instance_id, reason)
        status = world.look(driver)[name]
        assert (status.sold_out, status.running_at, status.state) == (True, None, "terminated")
    assert zones[0] != zones[1]
    world.sleep(61.0)
    driver.launch("d", market)
    assert {one.zone for one in world.fake.living} == {zones[0]}, "it is forgotten after a minute"
    assert world.driver().describe()[0].sold_out, "the next driver knows it"


def test_a_stopped_instance_is_ended(world: World) -> None:
    driver = world.driver()
    driver.launch("a")
    world.sleep(60.0)
    instance = world.fake.living[0]
    world.fake.world.end(instance, world.now, "Client.UserInitiatedShutdown", "stop")
    assert "was stopped" in world.look(driver)["a"].reason
    assert instance.end_behavior == "terminate"


def test_a_closed_provider_rents_nothing(world: World) -> None:
    driver = world.driver()
    driver.close()
    with pytest.raises(ProviderError, match="closed"):
        driver.launch("a")
    assert world.head.closed == 1
    assert world.fake.calls == []


def test_close_ends_what_it_can_and_shows_the_rest(world: World) -> None:
    driver = world.driver()
    driver.launch("a")
    world.fake.policies["driver"] = []
    with pytest.raises(ProviderError, match=r"may not ec2:.*rubberband cleanup"):
        driver.close()
    assert world.head.closed == 1
    del world.fake.policies["driver"]
    driver.close()
    assert world.living == []


def test_runs_of_one_name_do_not_meet(world: World) -> None:
    first = world.driver()
    first.launch("a")
    world.run = "run-2"
    second = world.driver()
    second.launch("a")
    assert world.living == ["a", "a"]
    second.close()
    assert world.living == ["a"]
    world.head.lives = True
    assert world.look(first)["a"].ended_at is None


def test_one_instances_vain_wait_is_not_repeated_by_the_others(world: World) -> None:
    driver = world.driver()
    for name in "abcdef":
        driver.launch(name)
    world.sleep(60.0)
    world.fake.fault = lambda call: Fault.timeout(took_effect=False) if call.operation == "TerminateInstances" else None
    before = world.now
    with pytest.raises(ProviderError, match="rubberband cleanup"):
        driver.close()
    assert world.now - before < 2 * PATIENCE_S
    world.fake.fault = None
    driver.close()
    assert world.living == []
