"""The policies that the package ships: enough for every call that is made, and nothing that no call needs."""

from __future__ import annotations

import ast
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from rubberband.cloud.aws import account_parts
from rubberband.cloud.aws.boot import resolve
from rubberband.cloud.aws.calls import NodeStart, Purchase, client_token, launch_request, tags_of
from rubberband.cloud.aws.cleanup import end_everything
from rubberband.cloud.aws.joining import read_token, token_parameter
from rubberband.cloud.aws.network import ensure_cluster
from rubberband.cloud.aws.preflight import preflight
from rubberband.errors import InputError
from tests.builders.aws_account import Account, offer, started
from tests.ec2 import BUCKET
from tests.ec2.client import operation_names
from tests.ec2.policy import statements

PREFLIGHT = [
    "ec2:AuthorizeSecurityGroupIngress",
    "ec2:CreatePlacementGroup",
    "ec2:CreateSecurityGroup",
    "ec2:CreateTags",
    "ec2:DescribeImages",
    "ec2:DescribeInstanceTypeOfferings",
    "ec2:DescribeInstanceTypes",
    "ec2:DescribeInstances",
    "ec2:DescribeSecurityGroups",
    "ec2:DescribeSpotPriceHistory",
    "ec2:DescribeSubnets",
    "ec2:DescribeVpcs",
    "ec2:RunInstances",
    "ec2:TerminateInstances",
    "iam:PassRole",
    "s3:DeleteObject",
    "s3:GetObject",
    "s3:PutObject",
    "servicequotas:GetServiceQuota",
    "ssm:GetParameter",
    "ssm:PutParameter",
]
"""What a run cannot do without: the checks before it find that it is missing."""
GUARD = ["iam:PassRole", "scheduler:CreateSchedule", "scheduler:DeleteSchedule", "scheduler:UpdateSchedule"]
"""What a run can do without, as the checks before it note."""
OTHERWISE = {
    "ec2:AuthorizeSecurityGroupEgress": "EFA between instances of a trial; without it a note says so",
    "ec2:DeletePlacementGroup": "rubberband cloud down",
    "ec2:DeleteSecurityGroup": "rubberband cloud down",
    "ec2:DescribePlacementGroups": "rubberband cloud down",
    "ec2:DescribeRegions": "rubberband cloud down",
    "ec2:CreateImage": "rubberband cloud image build",
    "ec2:DeleteSnapshot": "rubberband cloud image delete",
    "ec2:DeregisterImage": "rubberband cloud image delete",
    "ec2:DescribeSnapshots": "rubberband cloud image delete",
    "ec2:GetConsoleOutput": "the reason of an instance that powered itself off",
    "ec2:DescribeRouteTables": "whether a NAT gateway charges what instances download; without it a note says so",
    "ec2:DescribeCapacityBlockOfferings": "capacity blocks beside a plan; without it a note says so",
    "ec2:DescribeCapacityReservations": "resources.aws.reservation",
    "pricing:GetProducts": "prices, which have a fallback",
    "s3:AbortMultipartUpload": "large checkpoints",
    "s3:ListBucket": "an object that is not there is then 404, not 403; checkpoints that a killed driver left",
    "s3:ListBucketMultipartUploads": "uploads that a killed driver left",
    "servicequotas:GetAWSDefaultServiceQuota": "quotas that were never changed",
    "ssm:DeleteParameter": "rubberband cloud down",
}
"""What else the driver's policy allows, and what for."""
UP = {"ec2:StartInstances", "ssm:GetCommandInvocation", "ssm:SendCommand"}
"""What the user of `rubberband cloud up` and `--on head` may do besides, and a head may not."""


SERVICES = {
    "ec2": "ec2",
    "pricing": "pricing",
    "s3": "s3",
    "scheduler": "scheduler",
    "service-quotas": "servicequotas",
    "ssm": "ssm",
    "sts": "sts",
}
"""Name of a service's client -> what its actions begin with."""
ACTIONS = {"HeadObject": "GetObject", "HeadBucket": "ListBucket", "ListObjectsV2": "ListBucket"}
"""Operations whose action has another name."""


def policy(name: str) -> dict[str, Any]:
    return account_parts.policy(name, account_parts.Bounds(account="123456789012", owner="rubberband", bucket=BUCKET))


def actions(document: dict[str, Any]) -> set[str]:
    listed = [one["Action"] for one in document["Statement"]]
    return {action for one in listed for action in ([one] if isinstance(one, str) else one)}


def without(document: dict[str, Any], action: str) -> dict[str, Any]:
    kept = []
    for one in document["Statement"]:
        listed = [one["Action"]] if isinstance(one["Action"], str) else one["Action"]
        if rest := [each for each in listed if each != action]:
            kept.append({**one, "Action": rest})
    return {**document, "Statement": kept}


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:9")


def held_to(document: dict[str, Any]) -> Account:
    account = Account()
    account.fake.policies["driver"] = statements(document)
    started(account)
    return account


def everything(account: Account) -> None:
    """What is asked of AWS for a run: the checks, a launch on both markets, its end, and the end of everything."""
    resources = account.resources(market="spot", aws={"key_name": "me"})
    preflight(resources, [offer()], session=account.session, place=account.place)
    machines = resolve(account.session, resources.aws, "g5.xlarge", place=account.place)
    ec2 = account.session.client("ec2")
    for market in ("on_demand", "spot"):
        choice = Purchase(
            instance_type="g5.xlarge",
            zone=account.place.zone,
            market=market,  # type: ignore[arg-type]
            price_usd_per_hour=1.0,
            on_demand_usd_per_hour=1.0,
            placement_group=ensure_cluster(account.session, machines.owner, account.place.zone, "g5.xlarge"),
        )
        start = NodeStart(instances=("i-001",), head_address="10.0.0.1:1", gpus=1, lease_s=600, lifetime_s=3600)
        request = launch_request(
            machines,
            choice,
            token=client_token("e", "r", ("i-001",), 0, choice),
            tags=tags_of("e", "r", ("i-001",), machines.owner),
            user_data=machines.user_data(start),
        )
        ec2.run_instances(**request)
    end_everything(account.session, machines.owner, place=account.place, clock=lambda: account.now, sleep=account.sleep)


def test_the_drivers_policy_allows_all_that_a_run_asks_for() -> None:
    account = held_to(policy("driver"))

    everything(account)

    assert not [call for call in account.fake.calls if call.outcome in ("UnauthorizedOperation", "AccessDenied")]
    assert account.fake.living == ()


def test_the_drivers_policy_allows_nothing_that_is_not_needed() -> None:
    assert actions(policy("driver")) == {*PREFLIGHT, *GUARD, *OTHERWISE, "sts:GetCallerIdentity"}


@pytest.mark.parametrize("action", PREFLIGHT)
def test_a_role_without_a_right_is_refused_before_anything_is_rented(action: str) -> None:
    account = held_to(without(policy("driver"), action))
    before = len(account.fake.instances)

    with pytest.raises(InputError, match=f"{action}.*driver\\.json"):
        preflight(account.resources(market="spot"), [offer()], session=account.session, place=account.place)

    assert len(account.fake.instances) == before


@pytest.mark.parametrize("action", GUARD)
def test_a_role_that_may_not_guard_instances_is_reported_so(action: str) -> None:
    kept = policy("driver")
    kept["Statement"] = [one for one in kept["Statement"] if "Guard" not in one["Sid"]]
    guard = {**policy("driver"), "Statement": [one for one in policy("driver")["Statement"] if "Guard" in one["Sid"]]}
    account = held_to({**kept, "Statement": [*kept["Statement"], *without(guard, action)["Statement"]]})

    notes = preflight(account.resources(), [offer()], session=account.session, place=account.place)

    assert len([note for note in notes if f"{action}" in note and "driver.json" in note and "guard_role" in note]) == 1
    unguarded = account.resources(aws={"guard_role": None})
    assert not any(
        "guard" in one for one in preflight(unguarded, [offer()], session=account.session, place=account.place)
    )


def test_schedules_may_end_what_is_ours_and_nothing_else() -> None:
    (allowed,) = policy("guard")["Statement"]
    (ours,) = (one for one in policy("driver")["Statement"] if one["Sid"] == "EndOnlyOurInstances")
    assert (allowed["Action"], allowed["Condition"]) == ("ec2:TerminateInstances", ours["Condition"])


def test_every_operation_that_the_code_names_is_allowed_and_no_other_of_ec2() -> None:
    named = operations_named()

    assert named - UP <= actions(policy("driver"))
    assert {one for one in actions(policy("driver")) if one.startswith("ec2:")} <= named | {"ec2:CreateTags"}


ADMINISTRATORS = ("account.py", "account_parts.py")
"""Modules that only `rubberband aws` uses, with an administrator's rights."""


def operations_named() -> set[str]:
    """The actions of all operations of AWS that modules of rubberband.cloud.aws mention."""
    found = set()
    known = {name: (service, operation) for service in SERVICES for name, operation in operation_names(service).items()}
    for path in files("rubberband.cloud.aws").iterdir():
        if path.name.endswith(".py") and path.name not in ADMINISTRATORS:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found |= {
                known[node.attr] for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in known
            }
    return {f"{SERVICES[service]}:{ACTIONS.get(operation, operation)}" for service, operation in found}


def test_the_driver_cannot_launch_without_its_tag_or_with_the_old_metadata_service() -> None:
    account = held_to(policy("driver"))
    resources = account.resources()
    machines = resolve(account.session, resources.aws, "g5.xlarge", place=account.place)
    choice = Purchase(
        instance_type="g5.xlarge",
        zone=account.place.zone,
        market="on_demand",
        price_usd_per_hour=1.0,
        on_demand_usd_per_hour=1.0,
    )
    ours = tags_of("e", "r", ("i-001",), machines.owner)
    for tags, tokens in ((tags_of("e", "r", ("i-001",), "somebody"), "required"), (ours, "optional")):
        request = launch_request(machines, choice, token="t", tags=tags, user_data="#!/bin/bash")
        request["MetadataOptions"]["HttpTokens"] = tokens
        with pytest.raises(Exception, match="not authorized to perform: ec2:RunInstances"):
            account.session.client("ec2").run_instances(**request)


def test_the_driver_cannot_end_or_tag_what_is_not_its_own() -> None:
    account = held_to(policy("driver"))
    (ours,) = account.fake.instances
    admin, driver = account.fake.session("admin").client("ec2"), account.session.client("ec2")
    other = admin.run_instances(ImageId=ours.image_id, InstanceType="m7i.large", MinCount=1, MaxCount=1)
    theirs = other["Instances"][0]["InstanceId"]

    with pytest.raises(Exception, match="not authorized to perform: ec2:TerminateInstances"):
        driver.terminate_instances(InstanceIds=[theirs])
    with pytest.raises(Exception, match="not authorized to perform: ec2:CreateTags"):
        driver.create_tags(Resources=[theirs], Tags=[{"Key": "rubberband:owner", "Value": "rubberband"}])


def test_instances_may_do_nothing_on_ec2() -> None:
    document = policy("worker")

    assert not [action for action in actions(document) if action.startswith(("ec2:", "iam:")) or "*" in action]
    assert "ssm:PutParameter" not in actions(document)


@pytest.mark.parametrize("principal", ["driver", "worker"])
def test_no_role_reads_the_token_of_another_owner(principal: str) -> None:
    account = Account()
    admin = account.fake.session("admin").client("ssm")
    for owner in ("rubberband", "another"):
        admin.put_parameter(Name=token_parameter(owner), Value="secret", Type="SecureString")

    session = account.fake.session(principal)
    assert read_token(session, token_parameter("rubberband")) == "secret"
    with pytest.raises(Exception, match="not authorized to perform: ssm:GetParameter"):
        read_token(session, token_parameter("another"))


def test_no_policy_uses_a_wildcard_for_actions() -> None:
    for name in ("driver", "worker"):
        assert not [action for action in actions(policy(name)) if "*" in action]
