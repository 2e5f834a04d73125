"""What the fake EC2 has and moto lacks: tokens, leases, rights and a bill. The tests of drivers hold the rest of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from botocore.exceptions import ClientError
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders.fake_launches import START, Rental, spot
from tests.ec2.policy import Context, Decision, decided, statements


def test_the_same_token_is_the_same_instance_until_that_has_ended_and_never_another() -> None:
    def refusal(**changed: Any) -> str:
        with pytest.raises(ClientError) as refused:
            rental.launch(**changed)
        return str(refused.value.response["Error"]["Code"])

    rental = Rental()
    first = rental.launch(ClientToken="t")
    rental.sleep(10_000)
    assert rental.launch(ClientToken="t") == first
    assert refusal(ClientToken="t", InstanceType="p3.8xlarge") == "IdempotentParameterMismatch"
    rental.ec2.terminate_instances(InstanceIds=[first])
    assert rental.launch(ClientToken="t") == first
    rental.sleep(31)
    assert refusal(ClientToken="t") == "IdempotentInstanceTerminated"
    assert len(rental.fake.instances) == 1


@pytest.mark.parametrize(
    ("boot_s", "extended", "ended_at"),
    [
        (0.0, {}, 20 + 300),
        (40.0, {}, 20 + 40 + 300),
        (math.inf, {}, None),
        (0.0, {100: 90_000}, 20 + 1000),  # not beyond the hard stop
        (0.0, {100: 200}, 200),
        (0.0, {400: 900}, 20 + 300),  # it is over
    ],
)
def test_an_instance_ends_itself_at_its_lease(
    boot_s: float, extended: dict[float, float], ended_at: float | None
) -> None:
    rental = Rental(reads=lambda user_data: (300.0, 1000.0), boot_s=boot_s)
    instance = rental.launch()
    for at, until in extended.items():
        rental.sleep(at)
        rental.fake.extend_lease(instance, START + until)
    rental.sleep(10_000)
    (ended,) = rental.fake.instances
    assert ended.ended_at == (None if ended_at is None else START + ended_at)
    assert ended.state_reason == ("" if ended_at is None else "Client.InstanceInitiatedShutdown")


# Rights


def policy(*written: dict[str, Any]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Resource": "*", **one} for one in written]}


CONTEXT: Context = {"aws:RequestTag/owner": "me", "ec2:CreateAction": "RunInstances", "kms:Grant": "true"}


@pytest.mark.parametrize(
    ("statement", "decision"),
    [
        ({"Action": "EC2:runinstances"}, "allowed"),
        ({"Action": ["s3:*", "ec2:Run*"]}, "allowed"),
        ({"Action": "ec2:Describe*"}, "not allowed"),
        ({"Action": "ec2:*", "Resource": "arn:aws:ec2:*:*:instance/*"}, "allowed"),
        ({"Action": "ec2:*", "Resource": ["arn:aws:ec2:*:*:volume/*", "arn:aws:s3:::b"]}, "not allowed"),
        ({"Action": "ec2:*", "Effect": "Deny"}, "denied"),
        ({"StringEquals": {"AWS:requesttag/Owner": ["you", "me"]}}, "allowed"),
        ({"StringEquals": {"aws:RequestTag/owner": "Me"}}, "not allowed"),
        ({"StringEquals": {"aws:RequestTag/other": "me"}}, "not allowed"),
        ({"StringLike": {"aws:RequestTag/owner": ["x", "m*"]}}, "allowed"),
        ({"StringLike": {"aws:RequestTag/owner": "y*"}}, "not allowed"),
        ({"Bool": {"kms:Grant": True}}, "allowed"),
        ({"Bool": {"kms:Grant": "false"}}, "not allowed"),
    ],
)
def test_a_policy_decides_by_action_resource_and_condition(statement: dict[str, Any], decision: Decision) -> None:
    written = statement if "Action" in statement else {"Action": "*", "Condition": statement}
    resource = "arn:aws:ec2:us-east-1:123456789012:instance/*"
    allowed = statements(policy({"Action": "ec2:X"}, written))
    assert decided(allowed, "ec2:RunInstances", resource, CONTEXT) == decision
    if decision == "allowed":
        denying = statements(policy({"Action": "ec2:Run*", "Effect": "Deny"}, written))
        assert decided(denying, "ec2:RunInstances", resource, CONTEXT) == "denied"


def test_an_operator_that_is_not_known_is_not_passed_over() -> None:
    written = statements(policy({"Action": "*", "Condition": {"IpAddress": {"ip": "10.0.0.0/8"}}}))
    with pytest.raises(ValueError, match="IpAddress"):
        decided(written, "ec2:RunInstances", "*", {"ip": "10.0.0.1"})


@pytest.mark.parametrize(
    ("right", "named"),
    [
        ("ec2:RunInstances *", "ec2:RunInstances on resource: arn:aws:ec2:us-east-1:123456789012:instance/*"),
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
        ("iam:PassRole *", "iam:PassRole on resource: arn:aws:iam::123456789012:role/rubberband-worker"),
        ("s3:GetObject *", None),
    ],
)
def test_a_launch_needs_a_right_to_everything_that_it_touches(right: str, named: str | None) -> None:
    action, _, resource = right.partition(" ")
    denied = {"Action": action, "Effect": "Deny", "Resource": resource}
    rental = Rental(policies={"driver": statements(policy({"Action": "*"}, denied))})
    words = {"KeyName": "me", "SecurityGroupIds": [*rental.fake.world.groups], "InstanceMarketOptions": spot()}
    if named is None:
        assert rental.launch(**words)
        return
    with pytest.raises(ClientError, match=r"UnauthorizedOperation.*is not authorized to perform: ") as refused:
        rental.launch(**words)
    assert named in str(refused.value)
    assert "explicit deny" in str(refused.value)


# The bill: from running to shutting-down, a minute at the least, at the price of the hour.

ZONE = "us-east-1c"


@settings(max_examples=60, deadline=None)
@given(pending_s=st.floats(0.0, 600.0), ran_s=st.floats(0.0, 100_000.0), later_s=st.floats(0.0, 100_000.0))
def test_an_instance_is_billed_from_running_until_its_end(pending_s: float, ran_s: float, later_s: float) -> None:
    rental = Rental(pending_s=pending_s)
    instance = rental.launch()
    rental.sleep(pending_s)
    rental.sleep(ran_s)
    rental.ec2.terminate_instances(InstanceIds=[instance])
    rental.sleep(later_s)
    assert rental.fake.bill().rent_usd == pytest.approx(max(60.0, ran_s) / 3600.0 * 3.06)


WALKS = st.lists(st.tuples(st.floats(0.0, 20_000.0), st.floats(0.2, 3.0)), min_size=1, max_size=8)


@settings(max_examples=100, deadline=None)
@given(walk=WALKS, pending_s=st.floats(0.0, 600.0), ran_s=st.floats(0.0, 20_000.0))
def test_every_hour_on_spot_costs_the_price_at_its_start(
    walk: list[tuple[float, float]], pending_s: float, ran_s: float
) -> None:
    rental = Rental(pending_s=pending_s)
    changes = sorted((START + after_s, price) for after_s, price in walk)
    rental.fake.world.spot.set("p3.2xlarge", ZONE, changes)
    rental.launch(InstanceMarketOptions=spot(), Placement={"AvailabilityZone": ZONE})
    rental.sleep(pending_s + ran_s)
    line = rental.fake.bill().lines[0]
    expected_usd, left_s, at = 0.0, line.billed_s, line.running_at
    while left_s > 0:
        price = next((price for since, price in reversed(changes) if since <= at), changes[0][1])
        expected_usd += min(left_s, 3600.0) / 3600.0 * price
        left_s, at = left_s - 3600.0, at + 3600.0
    assert line.cost_usd == pytest.approx(expected_usd)


@pytest.mark.parametrize(("ran_s", "billed_s"), [(1000.0, 0.0), (3479.0, 0.0), (3480.0, 3600.0), (5000.0, 5120.0)])
def test_an_instance_that_is_reclaimed_in_its_first_hour_is_free(ran_s: float, billed_s: float) -> None:
    rental = Rental()
    rental.fake.world.spot.set("p3.2xlarge", ZONE, [(START, 0.72)])
    instance = rental.launch(InstanceMarketOptions=spot(), Placement={"AvailabilityZone": ZONE})
    rental.sleep(20 + ran_s)
    rental.fake.reclaim(instance, notice_s=120.0)
    rental.sleep(5000)
    assert rental.fake.bill().rent_usd == pytest.approx(billed_s / 3600.0 * 0.72)


def test_ending_an_instance_after_its_notice_is_charged() -> None:
    rental = Rental()
    rental.fake.world.spot.set("p3.2xlarge", ZONE, [(START, 0.72)])
    instance = rental.launch(InstanceMarketOptions=spot(), Placement={"AvailabilityZone": ZONE})
    rental.sleep(20 + 1000)
    rental.fake.reclaim(instance, notice_s=120.0)
    rental.sleep(100)
    rental.ec2.terminate_instances(InstanceIds=[instance])
    assert rental.fake.bill().rent_usd == pytest.approx(1100.0 / 3600.0 * 0.72)


def test_a_price_above_the_maximum_takes_an_instance_away_after_two_minutes() -> None:
    rental = Rental()
    rental.fake.world.spot.set("p3.2xlarge", ZONE, [(START, 0.72), (START + 5000.0, 1.2), (START + 5100.0, 0.7)])
    instance = rental.launch(InstanceMarketOptions=spot("1.0"), Placement={"AvailabilityZone": ZONE})
    rental.sleep(6000)
    assert rental.shown(instance)["StateReason"]["Code"] == "Server.SpotInstanceTermination"
    assert rental.fake.bill().lines[0].ended_at == START + 5120.0


def test_an_instance_that_is_started_again_is_billed_for_both_times() -> None:
    rental = Rental()
    instance = rental.launch(InstanceInitiatedShutdownBehavior="stop")
    rental.sleep(20 + 100)
    rental.fake.power_off(instance)
    rental.sleep(1000)
    rental.fake.session("admin").client("ec2").start_instances(InstanceIds=[instance])
    rental.sleep(20 + 200)
    bill = rental.fake.bill()
    assert [line.billed_s for line in bill.lines] == [100.0, 200.0]
    assert bill.side_usd("volume") == pytest.approx(75 * 0.08 / 720 * 1340 / 3600)
