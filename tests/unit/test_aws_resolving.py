"""From the words of the file to machines that can be launched, in a fake account."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rubberband.cloud.aws.boot import resolve
from rubberband.cloud.aws.calls import Machines, NodeStart
from rubberband.cloud.aws.joining import fetch_token as fetch_token
from rubberband.cloud.aws.joining import publish_token, read_token, token_parameter
from rubberband.cloud.aws.network import delete_groups, ensure_group, own_place
from rubberband.errors import InputError
from rubberband.spec.resources import Aws
from tests.builders.aws_account import Account
from tests.ec2 import Fault
from tests.ec2.faults import FakeCall


def resolved(account: Account, tmp_path: Path, instance_type: str = "g5.xlarge", **words: Any) -> Machines:
    return resolve(
        account.session,
        Aws(**{"install": "none", **words}),
        instance_type,
        checkpoints=f"s3://{account.bucket}/c",
        place=account.place,
        token_path=tmp_path / "token",
        sleep=account.sleep,
    )


def image(account: Account, machines: Machines) -> str:
    return account.fake.world.images[machines.image].name


@pytest.mark.parametrize(
    ("instance_type", "name"),
    [
        ("g5.xlarge", "Deep Learning base-oss-nvidia-driver-gpu (Ubuntu 22.04) x86_64"),
        ("g5g.xlarge", "Deep Learning base-oss-nvidia-driver-gpu (Ubuntu 22.04) arm64"),
        ("m7i.large", "ubuntu-22.04-amd64-server"),
        ("m7g.large", "ubuntu-22.04-arm64-server"),
    ],
)
def test_the_default_image_is_the_latest_one_that_fits_the_type(
    account: Account, tmp_path: Path, instance_type: str, name: str
) -> None:
    assert image(account, resolved(account, tmp_path, instance_type)) == name


def test_an_image_is_given_by_its_id_or_by_a_parameter(account: Account, tmp_path: Path) -> None:
    parameter = "ssm:/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
    machines = resolved(account, tmp_path, image=parameter)
    assert "24.04" in image(account, machines)
    assert resolved(account, tmp_path, image=machines.image).image == machines.image


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"image": "ami-00000000000000000"}, "images belong to one region"),
        ({"image": "ssm:/aws/service/none"}, "there is no SSM parameter /aws/service/none in us-east-1"),
        ({"subnets": ("subnet-00000000000000000",)}, "resources.aws.subnets: .*leave them out"),
        ({"security_group": "sg-00000000000000000"}, "sg-00000000000000000 does not exist"),
        ({"volume_gb": 8}, "8 GB are less than the 75 GB"),
    ],
)
def test_a_missing_or_unfit_resource_is_refused(
    account: Account, tmp_path: Path, words: dict[str, Any], text: str
) -> None:
    with pytest.raises(InputError, match=text):
        resolved(account, tmp_path, **words)


def test_an_image_of_another_architecture_is_refused(account: Account, tmp_path: Path) -> None:
    arm = resolved(account, tmp_path, "m7g.large").image
    with pytest.raises(InputError, match=r"is for arm64, and g5\.xlarge is x86_64"):
        resolved(account, tmp_path, image=arm)


def test_gpus_that_the_default_images_driver_does_not_know_are_refused(account: Account, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"does not support the V100 of p3\.2xlarge"):
        resolved(account, tmp_path, "p3.2xlarge", install="torch")
    resolved(account, tmp_path, "p3.2xlarge", install="torch", image=resolved(account, tmp_path).image)


def test_a_plain_image_gets_room_for_the_packages(account: Account, tmp_path: Path) -> None:
    assert resolved(account, tmp_path, "m7i.large", install="torch").volume_gb == 60
    assert resolved(account, tmp_path, "m7i.large").volume_gb is None
    assert resolved(account, tmp_path, install="torch").volume_gb is None
    assert resolved(account, tmp_path, volume_gb=200).volume_gb == 200


def test_further_volumes_of_an_image_are_known(account: Account, tmp_path: Path) -> None:
    machines = resolved(account, tmp_path)
    assert machines.further_disks == ()
    images = account.fake.world.images
    images[machines.image] = replace(images[machines.image], lasting_disks=("/dev/sdf",))
    assert resolved(account, tmp_path).further_disks == ("/dev/sdf",)


def test_subnets_are_those_of_the_drivers_vpc_its_own_first_where_the_type_is_available(
    account: Account, tmp_path: Path
) -> None:
    machines = resolved(account, tmp_path)
    zones = list(machines.subnets)
    assert zones[0] == account.place.zone
    assert machines.subnets[zones[0]] == account.place.subnet
    assert "us-east-1e" not in zones
    assert {account.fake.world.subnets[one].vpc_id for one in machines.subnets.values()} == {account.vpc}


def test_local_zones_have_other_prices_and_are_not_used(account: Account, tmp_path: Path) -> None:
    world = account.fake.world
    ours = next(one for one in world.subnets.values() if one.zone == world.zones[0])
    boston = replace(ours, subnet_id="subnet-0b05707", zone="us-east-1-bos-1a")
    world.subnets[boston.subnet_id] = boston
    world.zones = (*world.zones, boston.zone)
    assert boston.zone not in resolved(account, tmp_path).subnets
    with pytest.raises(InputError, match=r"subnet-0b05707 in us-east-1-bos-1a: Local .* prices of their own"):
        resolved(account, tmp_path, subnets=(boston.subnet_id, ours.subnet_id))


@pytest.mark.parametrize("subnets", [True, False])
def test_a_vpc_on_dedicated_hardware_is_refused(account: Account, tmp_path: Path, subnets: bool) -> None:
    chosen = tuple(resolved(account, tmp_path).subnets.values())
    world = account.fake.world
    world.vpcs[account.vpc] = replace(world.vpcs[account.vpc], tenancy="dedicated")
    with pytest.raises(InputError, match=rf"instances in {account.vpc} are on dedicated hardware"):
        resolved(account, tmp_path, **({"subnets": chosen} if subnets else {}))


@pytest.mark.parametrize(
    ("paid", "text"),
    [
        ({"usage": "RunInstances:0010"}, r"as Red Hat Enterprise Linux \(RunInstances:0010\)"),
        ({"product_codes": ("8s1m4e",)}, r"as a product of AWS Marketplace \(8s1m4e\)"),
    ],
)
def test_an_image_that_is_charged_by_the_hour_is_refused(
    account: Account, tmp_path: Path, paid: dict[str, Any], text: str
) -> None:
    image_id = resolved(account, tmp_path).image
    images = account.fake.world.images
    images[image_id] = replace(images[image_id], **paid)
    with pytest.raises(InputError, match=text):
        resolved(account, tmp_path, image=image_id)
    images[image_id] = replace(images[image_id], usage="RunInstances:00g0", product_codes=())
    resolved(account, tmp_path, image=image_id)


def test_without_a_place_the_default_vpc_is_used_and_with_one_its_own(account: Account) -> None:
    other = account.fake.world.add_vpc()
    place = replace(account.place, vpc=other, subnet="")
    for chosen, vpc in ((None, account.vpc), (place, other)):
        found = resolve(account.session, Aws(install="none"), "g5.xlarge", place=chosen)
        assert {account.fake.world.subnets[one].vpc_id for one in found.subnets.values()} == {vpc}


def test_subnets_are_tried_in_the_order_of_the_file(account: Account, tmp_path: Path) -> None:
    chosen = tuple(reversed(resolved(account, tmp_path).subnets.values()))
    assert tuple(resolved(account, tmp_path, subnets=chosen).subnets.values()) == chosen


def test_subnets_of_two_vpcs_are_refused(account: Account, tmp_path: Path) -> None:
    other = account.fake.world.add_vpc()
    theirs = next(one.subnet_id for one in account.fake.world.subnets.values() if one.vpc_id == other)
    with pytest.raises(InputError, match="several VPCs"):
        resolved(account, tmp_path, subnets=(account.place.subnet, theirs))


def test_a_type_that_no_subnets_zone_has_is_refused_with_the_zones_that_have_it(
    account: Account, tmp_path: Path
) -> None:
    lonely = next(one.subnet_id for one in account.fake.world.subnets.values() if one.zone == "us-east-1e")
    with pytest.raises(InputError, match=r"g5\.xlarge is available in us-east-1a, .*the subnets are in us-east-1e"):
        resolved(account, tmp_path, subnets=(lonely,))


def test_the_security_group_is_made_once_and_lets_in_only_itself(account: Account, tmp_path: Path) -> None:
    machines = resolved(account, tmp_path)
    assert resolved(account, tmp_path).security_group == machines.security_group
    ec2 = account.session.client("ec2")
    (group,) = ec2.describe_security_groups(GroupIds=[machines.security_group])["SecurityGroups"]
    assert {"Key": "rubberband:owner", "Value": "rubberband"} in group["Tags"]
    (rule,) = group["IpPermissions"]
    assert [pair["GroupId"] for pair in rule["UserIdGroupPairs"]] == [machines.security_group]
    assert not rule.get("IpRanges")
    assert not rule.get("Ipv6Ranges")


def test_a_group_that_lets_itself_in_by_some_ports_only_is_made_good(account: Account) -> None:
    group = account.fake.world.groups[ensure_group(account.session, "rubberband", account.vpc)]
    (rule,) = group.ingress
    group.ingress[:] = [rule._replace(from_port=22, to_port=22)]
    ensure_group(account.session, "rubberband", account.vpc)
    assert rule in group.ingress


def test_a_group_that_another_driver_makes_at_the_same_moment_is_used(account: Account) -> None:
    def another_is_faster(call: FakeCall) -> Fault | None:
        if call.operation == "CreateSecurityGroup":
            account.fake.fault = None
            ensure_group(account.fake.session("admin"), "rubberband", account.vpc)
        return None

    account.fake.fault = another_is_faster
    group = ensure_group(account.session, "rubberband", account.vpc, sleep=account.sleep)
    assert [one.group_id for one in account.fake.world.groups.values() if one.name == "rubberband"] == [group]


def test_a_strangers_group_of_our_name_is_not_touched(account: Account) -> None:
    account.fake.session("admin").client("ec2").create_security_group(
        GroupName="rubberband", Description="of somebody else", VpcId=account.vpc
    )
    with pytest.raises(InputError, match="without the tag rubberband:owner=rubberband"):
        ensure_group(account.session, "rubberband", account.vpc, sleep=account.sleep)


def test_only_the_owners_groups_are_deleted(account: Account, tmp_path: Path) -> None:
    account.fake.policies["driver"] = None
    kept = resolved(account, tmp_path, owner="me").security_group
    gone = resolved(account, tmp_path).security_group
    assert delete_groups(account.session, "rubberband") == ((gone,), ())
    assert delete_groups(account.session, "rubberband") == ((), ())
    assert kept in account.fake.world.groups


def test_a_group_that_was_named_is_used_if_it_is_in_the_vpc(account: Account, tmp_path: Path) -> None:
    default = next(one for one in account.fake.world.groups.values() if one.vpc_id == account.vpc)
    other = account.fake.world.add_vpc()
    foreign = next(one.group_id for one in account.fake.world.groups.values() if one.vpc_id == other)
    assert resolved(account, tmp_path, security_group=default.group_id).security_group == default.group_id
    with pytest.raises(InputError, match=f"{foreign} is in {other}"):
        resolved(account, tmp_path, security_group=foreign)


def test_the_token_is_published_once_adopted_elsewhere_and_never_overwritten(account: Account, tmp_path: Path) -> None:
    here, there = tmp_path / "here" / "token", tmp_path / "there" / "token"
    publish_token(account.session, "rubberband", here)
    publish_token(account.session, "rubberband", here)
    publish_token(account.session, "rubberband", there)
    assert account.operations().count("PutParameter") == 1
    assert there.read_text() == here.read_text() == read_token(account.session, token_parameter("rubberband"))
    assert there.stat().st_mode & 0o077 == 0
    there.write_text("another")
    with pytest.raises(InputError, match="another driver has published another Ray token"):
        publish_token(account.session, "rubberband", there)


def test_an_instance_reads_the_token_and_nothing_else(
    account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_token(account.session, "rubberband", tmp_path / "token")
    monkeypatch.setattr("rubberband.cloud.aws.client.open_session", lambda _: account.fake.session("worker"))
    monkeypatch.setattr("time.sleep", account.sleep)
    assert fetch_token(token_parameter("rubberband"), "us-east-1", tmp_path / "of" / "worker") == 0
    assert (tmp_path / "of" / "worker").read_text() == (tmp_path / "token").read_text()
    assert (tmp_path / "of" / "worker").stat().st_mode & 0o077 == 0
    assert fetch_token("/rubberband/nobody/ray-token", "us-east-1", tmp_path / "none") == 1
    assert fetch_token("/somewhere/else", "us-east-1", tmp_path / "none") == 1


def test_the_boot_script_knows_the_parameter_and_not_the_token(account: Account, tmp_path: Path) -> None:
    machines = resolved(account, tmp_path)
    start = NodeStart(instances=("i-001",), head_address="10.0.0.5:6379", gpus=1, lease_s=600, lifetime_s=3600)
    text = machines.user_data(start)
    assert text == resolved(account, tmp_path).user_data(start)
    assert "TOKEN=/rubberband/rubberband/ray-token" in text
    assert (tmp_path / "token").read_text() not in text


def test_the_drivers_place_is_what_its_metadata_service_shows() -> None:
    found = {
        "placement/availability-zone": "eu-west-1b",
        "placement/region": "eu-west-1",
        "mac": "0e:aa",
        "network/interfaces/macs/0e:aa/vpc-id": "vpc-1",
        "network/interfaces/macs/0e:aa/subnet-id": "subnet-1",
        "network/interfaces/macs/0e:aa/security-group-ids": "sg-1\nsg-2",
        "local-ipv4": "10.0.0.9",
        "instance-id": "i-1",
    }
    place = own_place(found.get)
    assert place is not None
    assert (place.address, place.vpc, place.region, place.zone) == ("10.0.0.9", "vpc-1", "eu-west-1", "eu-west-1b")
    assert place.security_groups == ("sg-1", "sg-2")
    assert own_place(lambda _: None) is None
