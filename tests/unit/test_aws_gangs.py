"""Where trials may span instances: all of those are in one zone, and in a cluster placement group if there can be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from rubberband.cloud.aws.cleanup import end_everything
from rubberband.cloud.aws.network import ensure_cluster
from rubberband.errors import InputError
from rubberband.executor import Job
from tests.builders.aws_account import Account, offer
from tests.builders.fake_ec2 import World, asked, machines_of
from tests.ec2 import FakeCall, Fault
from tests.ec2.faults import FakeError
from tests.harness.crash_cases import job_of

NAMES = ("a", "b", "c", "d")
ZONES = ("us-east-1a", "us-east-1b", "us-east-1c")


@pytest.fixture
def world(tmp_path: Path) -> World:
    """An account and a driver's folder, with three zones."""
    world = World(tmp_path)
    world.machines = machines_of(world.fake, zones=ZONES)
    return world


def denied(call: FakeCall) -> Fault | None:
    """The role may not make placement groups."""
    message = f"User: me is not authorized to perform: ec2:{call.operation}"
    error = FakeError("UnauthorizedOperation", message, 403)
    return Fault(error=error) if call.operation == "CreatePlacementGroup" else None


def places(world: World) -> set[tuple[str, str | None]]:
    return {(one.zone, one.placement_group) for one in world.fake.living}


def cluster(zone: str, instance_type: str = "g5.xlarge") -> str:
    return f"rubberband-{instance_type}-{zone}"


def test_all_are_in_one_zone_and_one_cluster(world: World) -> None:
    assert world.driver(together=True).launch_all(NAMES) == {}
    assert places(world) == {("us-east-1a", cluster("us-east-1a"))}
    (request,) = [call.params for call in asked(world)]
    assert (request["MinCount"], request["MaxCount"]) == (4, 4)


def test_a_zone_that_has_all_is_better_than_one_that_has_some(world: World) -> None:
    world.fake.set_capacity(3, zone="us-east-1a")
    world.fake.set_capacity(0, zone="us-east-1b")
    assert world.driver(together=True).launch_all(NAMES) == {}
    assert places(world) == {("us-east-1c", cluster("us-east-1c"))}


def test_where_no_zone_has_all_half_of_them_are_better_than_one(world: World) -> None:
    for zone, instances in zip(ZONES, (1, 0, 3), strict=True):
        world.fake.set_capacity(instances, zone=zone)
    failed = world.driver(together=True).launch_all(NAMES)
    assert places(world) == {("us-east-1c", cluster("us-east-1c"))}
    assert len(world.living) == 3
    (refusal,) = failed.values()
    assert "the others are in us-east-1c, and trials that span instances need all of them in one zone" in str(refusal)


def test_later_ones_go_where_the_others_are(world: World) -> None:
    world.fake.set_capacity(0, zone="us-east-1a")
    driver = world.driver(together=True)
    driver.launch("a")
    world.fake.set_capacity(None, zone="us-east-1a")
    world.sleep(100.0)
    driver = world.driver(together=True)  # another driver of the run
    driver.launch_all(("b", "c"))
    assert {one.zone for one in world.fake.living} == {"us-east-1b"}
    for name in ("a", "b", "c"):
        driver.release(name)
    driver.launch("d")
    assert {one.zone for one in world.fake.living} == {"us-east-1a"}


def test_a_full_cluster_does_not_keep_instances_out_of_its_zone(world: World) -> None:
    world.fake.world.cluster_capacity = 2
    driver = world.driver(together=True)
    driver.launch_all(("a", "b"))
    driver.launch_all(("c", "d"))
    assert places(world) == {("us-east-1a", cluster("us-east-1a")), ("us-east-1a", None)}


def test_a_type_that_has_no_clusters_is_in_one_zone_all_the_same(world: World) -> None:
    world.fake.set_capacity(3, zone="us-east-1a")
    world.offers = [offer("t3.medium", usd=0.0416)]
    assert world.driver(together=True).launch_all(NAMES) == {}
    assert places(world) == {("us-east-1b", None)}
    assert not world.fake.world.placement_groups


def test_without_the_right_to_make_a_cluster_instances_are_in_one_zone_all_the_same(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.fake.fault = denied
    assert world.driver(together=True).launch_all(NAMES) == {}
    assert places(world) == {("us-east-1a", None)}
    assert "are not placed close together" in caplog.text


def test_another_type_that_has_all_is_better_than_two_zones(world: World) -> None:
    world.fake.set_capacity(2, instance_type="g5.xlarge")
    world.offers = [*world.offers, offer("g5.2xlarge", usd=1.212)]
    assert world.driver(together=True).launch_all(NAMES) == {}
    assert {(one.machine_type.name, one.zone) for one in world.fake.living} == {("g5.2xlarge", "us-east-1a")}


@pytest.mark.parametrize("took_effect", [True, False])
def test_an_answer_that_is_lost_moves_no_instance_to_another_zone(world: World, took_effect: bool) -> None:
    world.fake.set_capacity(2, zone="us-east-1a")
    left = [Fault.timeout(took_effect=took_effect)]
    world.fake.fault = lambda call: left.pop() if call.operation == "RunInstances" and left else None
    assert world.driver(together=True).launch_all(NAMES) == {}
    assert {one.zone for one in world.fake.living} == {"us-east-1b"}
    assert len(world.fake.instances) == 4


def test_an_instance_that_may_be_there_keeps_the_others_in_its_zone(world: World) -> None:
    world.fake.set_capacity(0, zone="us-east-1a")
    driver = world.driver(together=True, lease_s=3600.0)
    driver.launch("a")
    driver._intents.change_last("a", outcome="unknown", instance_id="")  # as after a crash before the answer
    world.fake.world.capacity.clear()
    world.sleep(120.0)
    driver.launch("b")
    assert {one.zone for one in world.fake.living} == {"us-east-1b"}


def test_down_deletes_the_clusters() -> None:
    account = Account()
    ec2 = account.session.client("ec2")
    name = ensure_cluster(account.session, "rubberband", account.place.zone, "g5.xlarge")
    assert ensure_cluster(account.session, "rubberband", account.place.zone, "g5.xlarge") == name
    account.fake.session("admin").client("ec2").create_placement_group(GroupName="theirs", Strategy="spread")
    with pytest.raises(ClientError, match="not authorized"):
        ec2.delete_placement_group(GroupName="theirs")

    ended = end_everything(
        account.session, "rubberband", place=account.place, clock=lambda: account.now, sleep=account.sleep
    )

    assert ended.placement_groups == (name,)
    assert [*account.fake.world.placement_groups] == ["theirs"]


def test_a_cluster_in_use_is_not_deleted(world: World) -> None:
    driver = world.driver(together=True)
    driver.launch("a")
    ec2 = world.fake.session("driver").client("ec2")
    for _ in range(2):  # while it runs, and while it shuts down
        with pytest.raises(ClientError, match="InUse"):
            ec2.delete_placement_group(GroupName=cluster("us-east-1a"))
        driver.release("a")
    world.sleep(60.0)
    ec2.delete_placement_group(GroupName=cluster("us-east-1a"))


@pytest.mark.parametrize(
    ("most", "known", "replan", "gang"), [(None, 2, True, 1), (4, 2, True, 2), (4, 1, True, 1), (4, 4, False, 1)]
)
def test_the_largest_gang_is_that_of_the_plan_or_what_a_replan_may_choose(
    most: int | None, known: int, replan: bool, gang: int
) -> None:
    job: Job = job_of("on_demand", "roomy")
    profile = replace(job.profile, seconds_per_iteration={1: 20.0, known: 20.0 / known})
    assert replace(job, max_gpus_per_trial=most, profile=profile, replan=replan).largest_gang == gang


def test_preflight_asks_for_the_right_only_where_trials_may_span_instances(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from rubberband.cloud.aws.preflight import preflight

    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path))
    account = Account()

    account.fake.fault = denied
    words = {"session": account.session, "place": account.place}
    preflight(account.resources(gpus_per_trial={"max": 1}), [offer()], **words)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="ec2:CreatePlacementGroup"):
        preflight(account.resources(gpus_per_trial={"max": 2}), [offer()], **words)  # type: ignore[arg-type]
