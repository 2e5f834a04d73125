"""Where trials span instances: all of those are in one zone, in a cluster and with EFA where there can be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from rubberband.cloud.aws.cleanup import end_everything
from rubberband.cloud.aws.client import type_facts
from rubberband.cloud.aws.network import ensure_cluster, ensure_group, fabric_of, group_name
from rubberband.cloud.aws.preflight import preflight
from rubberband.errors import InputError, ProviderError
from rubberband.executor import Job
from rubberband.spec.resources import GpusPerTrial
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


P4D = offer("p4d.24xlarge", 8, usd=21.96)
PAIR = ("a", "b")


class Clustered(World):
    """A driver's folder, in an account with our security group; its subnets give public addresses or none."""

    def __post_init__(self) -> None:
        """Open the account, whose quota is enough for four instances."""
        super().__post_init__()
        self.offers = [P4D]
        self.machines = machines_of(self.fake)
        vpc = next(iter(self.fake.world.vpcs))
        self.group = ensure_group(self.fake.session("driver"), "rubberband", vpc)
        self.machines = replace(self.machines, security_group=self.group)

    def private(self, *zones: str) -> None:
        """The subnets of these zones give no public address."""
        world = self.fake.world
        for subnet in [one for one in world.subnets.values() if one.zone in zones]:
            world.subnets[subnet.subnet_id] = replace(subnet, public=False)

    def launched(self, *names: str, together: bool = True) -> set[tuple[tuple[int, ...], bool, bool]]:
        """(cards with EFA, whether its traffic passes, public address) of all that lives after a launch."""
        assert self.driver(together=together, lease_s=3600.0).launch_all(names) == {}
        world = self.fake.world
        return {(one.fabric, world.fabric_works(one), one.public_address) for one in self.fake.living}


@pytest.fixture
def clustered(tmp_path: Path) -> Clustered:
    return Clustered(tmp_path)


def test_an_instance_with_a_public_address_has_efa_on_one_card(clustered: Clustered) -> None:
    assert clustered.launched(*PAIR) == {((0,), True, True)}
    (request,) = [call.params for call in asked(clustered)]
    assert "SubnetId" not in request
    assert "SecurityGroupIds" not in request
    (interface,) = request["NetworkInterfaces"]
    assert (interface["InterfaceType"], interface["Groups"]) == ("efa", [clustered.group])


def test_an_instance_in_a_private_subnet_has_efa_on_all_cards_and_one_ip_address(clustered: Clustered) -> None:
    clustered.private(*ZONES[:2])
    assert clustered.launched(*PAIR) == {((0, 1, 2, 3), True, False)}
    (request,) = [call.params for call in asked(clustered)]
    kinds = [one["InterfaceType"] for one in request["NetworkInterfaces"]]
    assert kinds == ["interface", *["efa-only"] * 4]
    assert all(one["DeleteOnTermination"] for one in request["NetworkInterfaces"])


def test_where_the_first_card_has_no_efa_only_private_subnets_have_it(clustered: Clustered) -> None:
    types = clustered.fake.world.machine_types
    types["p4d.24xlarge"] = replace(types["p4d.24xlarge"], network_cards=3, efa_cards=(1, 2))
    clustered.private("us-east-1b")
    clustered.fake.set_capacity(0, zone="us-east-1a")
    assert clustered.launched("a") == {((1, 2), True, False)}
    clustered.fake.world.capacity.clear()
    assert clustered.launched("b") == {((1, 2), True, False)}, "in the zone of the other"


@pytest.mark.parametrize("instance_type", ["g4dn.xlarge", "m5.large"])
def test_types_without_efa_have_one_ordinary_interface(clustered: Clustered, instance_type: str) -> None:
    clustered.offers = [offer(instance_type, usd=0.526)]
    assert {cards for cards, *_ in clustered.launched(*PAIR)} == {()}
    assert "NetworkInterfaces" not in asked(clustered)[0].params


def test_trials_that_fit_an_instance_need_none(clustered: Clustered) -> None:
    assert {cards for cards, *_ in clustered.launched(*PAIR, together=False)} == {()}


def test_a_type_without_efa_that_may_stand_in_keeps_all_on_tcp(
    clustered: Clustered, caplog: pytest.LogCaptureFixture
) -> None:
    clustered.offers = [offer("g5.8xlarge", usd=2.448), offer("g5.xlarge", usd=1.006)]
    clustered.fake.set_capacity(1, instance_type="g5.8xlarge")
    clustered.fake.set_capacity(1, instance_type="g5.xlarge")
    assert {cards for cards, *_ in clustered.launched(*PAIR)} == {()}
    assert "by TCP, without EFA, as g5.xlarge may be used instead and has none" in caplog.text


def test_two_types_have_efa_in_a_zone_where_both_can(clustered: Clustered) -> None:
    types = clustered.fake.world.machine_types
    types["p4d.24xlarge"] = replace(types["p4d.24xlarge"], network_cards=3, efa_cards=(1, 2))
    names = ["g5.48xlarge", "p4d.24xlarge"]
    nowhere = fabric_of(clustered.fake.session("driver"), clustered.machines, names)
    clustered.private("us-east-1b")
    found = fabric_of(clustered.fake.session("driver"), clustered.machines, names)
    assert nowhere.cards == {}, "p4d needs a private subnet here, and the other would be alone with it"
    assert "g5.48xlarge have EFA on 0 of 1 network card" in nowhere.note
    assert found.cards == {("g5.48xlarge", "us-east-1b"): (0,), ("p4d.24xlarge", "us-east-1b"): (1, 2)}


def test_the_users_own_group_is_not_changed(clustered: Clustered, caplog: pytest.LogCaptureFixture) -> None:
    group = clustered.fake.world.groups[clustered.group]
    group.name = "theirs"
    before = [*group.ingress], [*group.egress]
    assert {cards for cards, *_ in clustered.launched(*PAIR)} == {()}
    assert f"{clustered.group} must let all traffic from and to itself" in caplog.text
    assert ([*group.ingress], [*group.egress]) == before


def refused(operation: str, code: str) -> Any:
    error = FakeError(code, f"not authorized to perform: ec2:{operation}", 403)
    return lambda call: Fault(error=error) if call.operation == operation else None


def test_a_role_of_an_earlier_policy_trains_by_tcp(clustered: Clustered, caplog: pytest.LogCaptureFixture) -> None:
    clustered.fake.fault = refused("AuthorizeSecurityGroupEgress", "UnauthorizedOperation")
    assert {cards for cards, *_ in clustered.launched(*PAIR)} == {()}
    assert "`rubberband aws setup` renews the policy" in caplog.text


def test_two_networks_never_meet(clustered: Clustered) -> None:
    clustered.fake.fault = refused("AuthorizeSecurityGroupEgress", "UnauthorizedOperation")
    clustered.launched("a")
    clustered.fake.fault = lambda call: None
    assert {cards for cards, *_ in clustered.launched("b")} == {()}, "the policy was renewed while a runs without"


def test_while_ec2_does_not_describe_the_network_nothing_is_launched(clustered: Clustered) -> None:
    def throttled(call: FakeCall) -> Fault | None:
        return Fault.throttled() if call.operation == "DescribeSecurityGroups" else None

    clustered.launched("a")
    clustered.fake.fault = throttled
    with pytest.raises(ProviderError, match="EC2 does not describe the network of p4d"):
        clustered.driver(together=True, lease_s=3600.0).launch("b")
    assert clustered.living == ["a"]


def test_cards_are_known_where_an_older_boto3_does_not_show_their_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    account = Account()
    ec2 = account.session.client("ec2")
    shown = ec2.describe_instance_types(InstanceTypes=["p4d.24xlarge"])
    network = shown["InstanceTypes"][0]["NetworkInfo"]
    for card in network["NetworkCards"]:
        del card["InterfaceTypes"]
    network["EfaInfo"]["MaximumEfaInterfaces"] = 3
    monkeypatch.setattr(ec2, "describe_instance_types", lambda **_: shown)
    assert type_facts(account.session, "p4d.24xlarge").efa_cards == (1, 2, 3)


def test_the_checks_say_on_how_many_cards_and_a_dry_run_asks_for_them() -> None:
    account = Account()
    resources = account.resources(instance_type="p4d.24xlarge", max_instances=2)
    notes = preflight(resources, [P4D], session=account.session, place=account.place)
    assert any("p4d.24xlarge have EFA on 1 of 4 network cards" in note for note in notes)
    dry_run = next(call for call in account.fake.calls if call.operation == "RunInstances")
    assert dry_run.params["NetworkInterfaces"][0]["InterfaceType"] == "efa"
    one = resources.model_copy(update={"gpus_per_trial": GpusPerTrial(max=8)})
    notes = preflight(one, [P4D], session=account.session, place=account.place)
    assert not any("EFA" in note for note in notes), "no trial spans instances"
    notes = preflight(resources, [P4D], session=account.session, place=account.place, together=False)
    assert not any("EFA" in note for note in notes), "a pool"


def test_down_deletes_a_group_whose_instances_had_several_interfaces(clustered: Clustered) -> None:
    clustered.private(*ZONES[:2])
    clustered.launched(*PAIR)
    ended = end_everything(
        clustered.fake.session("driver"), "rubberband", clock=lambda: clustered.now, sleep=clustered.sleep
    )
    assert clustered.group in ended.security_groups
    assert group_name("rubberband") not in [one.name for one in clustered.fake.world.groups.values()]
