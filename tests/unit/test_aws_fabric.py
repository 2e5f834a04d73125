"""EFA: where trials span instances of a type that has it, all of these get it, or none does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rubberband.cloud.aws.cleanup import end_everything
from rubberband.cloud.aws.client import type_facts
from rubberband.cloud.aws.network import ensure_group, fabric_of, group_name
from rubberband.cloud.aws.preflight import preflight
from rubberband.errors import ProviderError
from rubberband.spec.resources import GpusPerTrial
from tests.builders.aws_account import Account, offer
from tests.builders.fake_ec2 import World, asked, machines_of
from tests.ec2 import FakeCall, Fault
from tests.ec2.faults import FakeError

ZONES = ("us-east-1a", "us-east-1b")
P4D = offer("p4d.24xlarge", 8, usd=21.96)
NAMES = ("a", "b")


class Clustered(World):
    """A driver's folder, in an account with our security group; its subnets give public addresses or none."""

    def __post_init__(self) -> None:
        """Open the account, whose quota is enough for four instances."""
        super().__post_init__()
        self.offers = [P4D]
        self.machines = machines_of(self.fake, zones=ZONES)
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
def world(tmp_path: Path) -> Clustered:
    return Clustered(tmp_path)


def test_an_instance_with_a_public_address_has_efa_on_one_card(world: Clustered) -> None:
    assert world.launched(*NAMES) == {((0,), True, True)}
    (request,) = [call.params for call in asked(world)]
    assert "SubnetId" not in request
    assert "SecurityGroupIds" not in request
    (interface,) = request["NetworkInterfaces"]
    assert (interface["InterfaceType"], interface["Groups"]) == ("efa", [world.group])


def test_an_instance_in_a_private_subnet_has_efa_on_all_cards_and_one_ip_address(world: Clustered) -> None:
    world.private(*ZONES)
    assert world.launched(*NAMES) == {((0, 1, 2, 3), True, False)}
    (request,) = [call.params for call in asked(world)]
    kinds = [one["InterfaceType"] for one in request["NetworkInterfaces"]]
    assert kinds == ["interface", *["efa-only"] * 4]
    assert all(one["DeleteOnTermination"] for one in request["NetworkInterfaces"])


def test_where_the_first_card_has_no_efa_only_private_subnets_have_it(world: Clustered) -> None:
    types = world.fake.world.machine_types
    types["p4d.24xlarge"] = replace(types["p4d.24xlarge"], network_cards=3, efa_cards=(1, 2))
    world.private("us-east-1b")
    world.fake.set_capacity(0, zone="us-east-1a")
    assert world.launched("a") == {((1, 2), True, False)}
    world.fake.world.capacity.clear()
    assert world.launched("b") == {((1, 2), True, False)}, "in the zone of the other"


@pytest.mark.parametrize("instance_type", ["g4dn.xlarge", "m5.large"])
def test_types_without_efa_have_one_ordinary_interface(world: Clustered, instance_type: str) -> None:
    world.offers = [offer(instance_type, usd=0.526)]
    assert {cards for cards, *_ in world.launched(*NAMES)} == {()}
    assert "NetworkInterfaces" not in asked(world)[0].params


def test_trials_that_fit_an_instance_need_none(world: Clustered) -> None:
    assert {cards for cards, *_ in world.launched(*NAMES, together=False)} == {()}


def test_a_type_without_efa_that_may_stand_in_keeps_all_on_tcp(
    world: Clustered, caplog: pytest.LogCaptureFixture
) -> None:
    world.offers = [offer("g5.8xlarge", usd=2.448), offer("g5.xlarge", usd=1.006)]
    world.fake.set_capacity(1, instance_type="g5.8xlarge")
    world.fake.set_capacity(1, instance_type="g5.xlarge")
    assert {cards for cards, *_ in world.launched(*NAMES)} == {()}
    assert "by TCP, without EFA, as g5.xlarge may be used instead and has none" in caplog.text


def test_two_types_have_efa_in_a_zone_where_both_can(world: Clustered) -> None:
    types = world.fake.world.machine_types
    types["p4d.24xlarge"] = replace(types["p4d.24xlarge"], network_cards=3, efa_cards=(1, 2))
    names = ["g5.48xlarge", "p4d.24xlarge"]

    nowhere = fabric_of(world.fake.session("driver"), world.machines, names)
    world.private("us-east-1b")
    found = fabric_of(world.fake.session("driver"), world.machines, names)

    assert nowhere.cards == {}, "p4d needs a private subnet here, and the other would be alone with it"
    assert "g5.48xlarge have EFA on 0 of 1 network card" in nowhere.note
    assert found.cards == {("g5.48xlarge", "us-east-1b"): (0,), ("p4d.24xlarge", "us-east-1b"): (1, 2)}


def test_the_users_own_group_is_not_changed(world: Clustered, caplog: pytest.LogCaptureFixture) -> None:
    group = world.fake.world.groups[world.group]
    group.name = "theirs"
    before = [*group.ingress], [*group.egress]
    assert {cards for cards, *_ in world.launched(*NAMES)} == {()}
    assert f"{world.group} must let all traffic from and to itself" in caplog.text
    assert ([*group.ingress], [*group.egress]) == before


def refused(operation: str, code: str) -> Any:
    error = FakeError(code, f"not authorized to perform: ec2:{operation}", 403)
    return lambda call: Fault(error=error) if call.operation == operation else None


def test_a_role_of_an_earlier_policy_trains_by_tcp(world: Clustered, caplog: pytest.LogCaptureFixture) -> None:
    world.fake.fault = refused("AuthorizeSecurityGroupEgress", "UnauthorizedOperation")
    assert {cards for cards, *_ in world.launched(*NAMES)} == {()}
    assert "`rubberband aws setup` renews the policy" in caplog.text


def test_two_networks_never_meet(world: Clustered) -> None:
    world.fake.fault = refused("AuthorizeSecurityGroupEgress", "UnauthorizedOperation")
    world.launched("a")
    world.fake.fault = lambda call: None
    assert {cards for cards, *_ in world.launched("b")} == {()}, "the policy was renewed while a runs without"


def test_while_ec2_does_not_describe_the_network_nothing_is_launched(world: Clustered) -> None:
    def throttled(call: FakeCall) -> Fault | None:
        return Fault.throttled() if call.operation == "DescribeSecurityGroups" else None

    world.launched("a")
    world.fake.fault = throttled
    with pytest.raises(ProviderError, match="EC2 does not describe the network of p4d"):
        world.driver(together=True, lease_s=3600.0).launch("b")
    assert world.living == ["a"]


def test_the_next_driver_knows_the_network_of_what_runs(world: Clustered) -> None:
    world.launched("a")
    (intent,) = world.driver(together=True, lease_s=3600.0)._intents.all()
    assert intent.last is not None
    assert intent.last.choice.efa_cards == (0,)


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


def test_down_deletes_a_group_whose_instances_had_several_interfaces(world: Clustered) -> None:
    world.private(*ZONES)
    world.launched(*NAMES)
    ended = end_everything(world.fake.session("driver"), "rubberband", clock=lambda: world.now, sleep=world.sleep)
    assert world.group in ended.security_groups
    assert group_name("rubberband") not in [one.name for one in world.fake.world.groups.values()]
