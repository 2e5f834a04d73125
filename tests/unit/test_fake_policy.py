"""The fake holds its callers to their policies, as IAM and EC2 evaluate them."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.builders.fake_launches import Rental, code_of, spot
from tests.ec2.policy import Context, Decision, decided, statements


def policy(*written: dict[str, Any]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Resource": "*", **one} for one in written]}


@pytest.mark.parametrize(
    ("statement", "decision"),
    [
        ({"Action": "ec2:RunInstances"}, "allowed"),
        ({"Action": "EC2:runinstances"}, "allowed"),
        ({"Action": ["s3:*", "ec2:Run*"]}, "allowed"),
        ({"Action": "*"}, "allowed"),
        ({"Action": "ec2:Describe*"}, "not allowed"),
        ({"NotAction": "ec2:Describe*"}, "allowed"),
        ({"NotAction": "ec2:*"}, "not allowed"),
        ({"Action": "ec2:*", "Resource": "arn:aws:ec2:*:*:instance/*"}, "allowed"),
        ({"Action": "ec2:*", "Resource": ["arn:aws:ec2:*:*:volume/*", "arn:aws:s3:::b"]}, "not allowed"),
        ({"Action": "ec2:*", "Effect": "Deny"}, "denied"),
    ],
)
def test_actions_and_resources_match(statement: dict[str, Any], decision: Decision) -> None:
    resource = "arn:aws:ec2:us-east-1:123456789012:instance/*"
    assert decided(statements(policy(statement)), "ec2:RunInstances", resource, {}) == decision


def test_a_deny_wins() -> None:
    both = statements(policy({"Action": "*"}, {"Action": "ec2:TerminateInstances", "Effect": "Deny"}))
    assert decided(both, "ec2:TerminateInstances", "*", {}) == "denied"
    assert decided(both, "ec2:RunInstances", "*", {}) == "allowed"


OWNED: Context = {"aws:RequestTag/owner": "me", "aws:TagKeys": ("owner", "run"), "ec2:MetadataHttpTokens": "required"}


@pytest.mark.parametrize(
    ("operator", "key", "values", "holds"),
    [
        ("StringEquals", "aws:RequestTag/owner", "me", True),
        ("StringEquals", "AWS:requesttag/Owner", ["you", "me"], True),
        ("StringEquals", "aws:RequestTag/owner", "Me", False),
        ("StringEquals", "aws:RequestTag/other", "me", False),
        ("StringEqualsIgnoreCase", "aws:RequestTag/owner", "ME", True),
        ("StringEqualsIfExists", "aws:RequestTag/other", "me", True),
        ("StringEqualsIfExists", "aws:RequestTag/owner", "you", False),
        ("StringNotEquals", "ec2:MetadataHttpTokens", "required", False),
        ("StringNotEquals", "ec2:Missing", "required", True),
        ("StringLike", "aws:RequestTag/owner", "m*", True),
        ("StringLike", "aws:RequestTag/owner", "y*", False),
        ("StringNotLike", "aws:RequestTag/owner", "y*", True),
        ("Null", "aws:RequestTag/owner", "false", True),
        ("Null", "aws:RequestTag/owner", "true", False),
        ("Null", "aws:RequestTag/other", True, True),
        ("ForAllValues:StringEquals", "aws:TagKeys", ["owner", "run", "name"], True),
        ("ForAllValues:StringEquals", "aws:TagKeys", ["owner"], False),
        ("ForAllValues:StringEquals", "ec2:Missing", ["owner"], True),
        ("ForAnyValue:StringEquals", "aws:TagKeys", ["owner"], True),
        ("ForAnyValue:StringEquals", "aws:TagKeys", ["name"], False),
        ("NumericLessThanEquals", "hops", "1", True),
        ("NumericLessThanEquals", "hops", "0", False),
        ("NumericGreaterThan", "hops", "0", True),
        ("Bool", "secure", "true", True),
        ("Bool", "secure", False, False),
        ("ArnLike", "arn", "arn:aws:iam::*:role/*", True),
    ],
)
def test_conditions_hold_or_not(operator: str, key: str, values: Any, holds: bool) -> None:
    context: Context = {**OWNED, "hops": "1", "secure": "true", "arn": "arn:aws:iam::1:role/r"}
    written = statements(policy({"Action": "*", "Condition": {operator: {key: values}}}))
    assert (decided(written, "ec2:RunInstances", "*", context) == "allowed") == holds


def test_an_operator_that_is_not_known_is_not_passed_over() -> None:
    written = statements(policy({"Action": "*", "Condition": {"IpAddress": {"ip": "10.0.0.0/8"}}}))
    with pytest.raises(ValueError, match="IpAddress"):
        decided(written, "ec2:RunInstances", "*", {"ip": "10.0.0.1"})


def launch_without(*left_out: str, **conditions: Any) -> ClientError | None:
    """What becomes of a launch by a driver that has every right but those on `left_out`."""
    everything = {"Action": "*", **({"Condition": conditions} if conditions else {})}
    denied = [{"Action": action, "Effect": "Deny", "Resource": resource} for action, resource in _split(left_out)]
    rental = Rental(policies={"driver": statements(policy(everything, *denied))})
    group = next(iter(rental.fake.world.groups))
    try:
        rental.launch(KeyName="me", SecurityGroupIds=[group], InstanceMarketOptions=spot())
    except ClientError as error:
        return error
    return None


def _split(rights: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(action, resource or "*") for action, _, resource in (right.partition(" ") for right in rights)]


@pytest.mark.parametrize(
    ("right", "named"),
    [
        ("ec2:RunInstances", "ec2:RunInstances on resource: arn:aws:ec2:us-east-1:123456789012:instance/*"),
        ("ec2:RunInstances arn:aws:ec2:*:*:volume/*", "volume/*"),
        ("ec2:RunInstances arn:aws:ec2:*:*:network-interface/*", "network-interface/*"),
        ("ec2:RunInstances arn:aws:ec2:*:*:subnet/*", "subnet/subnet-"),
        ("ec2:RunInstances arn:aws:ec2:*:*:security-group/*", "security-group/sg-"),
        ("ec2:RunInstances arn:aws:ec2:*::image/*", "arn:aws:ec2:us-east-1::image/ami-"),
        ("ec2:RunInstances arn:aws:ec2:*:*:key-pair/*", "key-pair/me"),
        (
            "ec2:CreateTags arn:aws:ec2:*:*:volume/*",
            "ec2:CreateTags on resource: arn:aws:ec2:us-east-1:123456789012:vol",
        ),
        ("iam:PassRole", "iam:PassRole on resource: arn:aws:iam::123456789012:role/rubberband-worker"),
    ],
)
def test_a_launch_needs_a_right_to_everything_that_it_touches(right: str, named: str) -> None:
    error = launch_without(right)
    assert error is not None
    assert code_of(error) == "UnauthorizedOperation"
    assert "is not authorized to perform: " in str(error)
    assert named in str(error)
    assert "explicit deny" in str(error)


def test_a_launch_with_every_right_succeeds() -> None:
    assert launch_without() is None


def test_an_operation_that_no_policy_allows_says_so() -> None:
    rental = Rental(policies={"driver": ()})
    with pytest.raises(ClientError) as refused:
        rental.look()
    assert str(refused.value).endswith(
        "You are not authorized to perform this operation. User: "
        "arn:aws:sts::123456789012:assumed-role/rubberband-head/i-0d21fe20000000001 is not authorized to perform: "
        "ec2:DescribeInstances because no identity-based policy allows the ec2:DescribeInstances action"
    )


@pytest.mark.parametrize("operation", ["run_instances", "terminate_instances", "describe_instances"])
def test_a_dry_run_mentions_a_right_that_is_missing(operation: str) -> None:
    rental = Rental()
    params = {
        "run_instances": rental.order(),
        "terminate_instances": {"InstanceIds": [rental.launch()]},
        "describe_instances": {},
    }[operation]
    rental.fake.policies["driver"] = ()
    with pytest.raises(ClientError) as refused:
        getattr(rental.ec2, operation)(**params, DryRun=True)
    assert code_of(refused.value) == "UnauthorizedOperation"


def test_the_shipped_driver_launches_and_ends_only_what_is_tagged_as_ours() -> None:
    rental = Rental()
    with pytest.raises(ClientError, match=r"ec2:RunInstances on resource: .*instance/"):
        rental.launch(TagSpecifications=None)
    foreign = rental.fake.session("admin").client("ec2").run_instances(**rental.order(TagSpecifications=None))
    with pytest.raises(ClientError, match=r"ec2:TerminateInstances on resource: .*instance/i-"):
        rental.ec2.terminate_instances(InstanceIds=[foreign["Instances"][0]["InstanceId"]])
    rental.ec2.terminate_instances(InstanceIds=[rental.launch()])


def test_the_shipped_driver_launches_with_metadata_tokens_and_passes_the_worker_s_role_only() -> None:
    rental = Rental()
    with pytest.raises(ClientError, match="ec2:RunInstances"):
        rental.launch(MetadataOptions=None)
    with pytest.raises(ClientError, match="iam:PassRole"):
        rental.launch(IamInstanceProfile={"Name": "rubberband-head"})


def test_the_shipped_worker_rents_nothing_and_reads_the_token() -> None:
    rental = Rental()
    token = {"Name": "/rubberband/rubberband/ray-token", "WithDecryption": True}
    ssm = rental.fake.session("driver").client("ssm")
    ssm.put_parameter(Name=token["Name"], Value="secret", Type="SecureString")
    worker = rental.fake.session("worker")
    for call in (worker.client("ec2").describe_instances, lambda: worker.client("ec2").run_instances(**rental.order())):
        with pytest.raises(ClientError, match="UnauthorizedOperation"):
            call()
    with pytest.raises(ClientError, match="ssm:PutParameter"):
        worker.client("ssm").put_parameter(Name=token["Name"], Value="mine", Overwrite=True)
    assert worker.client("ssm").get_parameter(**token)["Parameter"]["Value"] == "secret"
