"""What the fake EC2 has and moto lacks: tokens, quotas, capacity, spot, leases, throttling, faults, rights."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from botocore.exceptions import (
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    NoCredentialsError,
    ReadTimeoutError,
)

from tests.builders.fake_launches import START, Rental, code_of, spot
from tests.ec2 import FakeAws, FakeCall, FakeDisconnect, Fault
from tests.ec2.limits import Limits, Rate
from tests.ec2.policy import Context, Decision, decided, statements

HERE = {"Placement": {"AvailabilityZone": "us-east-1a"}}


@pytest.fixture
def rental() -> Rental:
    return Rental()


def refusal(rental: Rental, **changed: Any) -> str:
    with pytest.raises(ClientError) as refused:
        rental.launch(**changed)
    return code_of(refused.value)


def test_an_instance_goes_through_its_states_and_is_seen_for_an_hour(rental: Rental) -> None:
    instance = rental.launch()
    states = [rental.state(instance)]
    rental.clock.sleep(20)
    states.append(rental.state(instance))
    rental.ec2.terminate_instances(InstanceIds=[instance])
    states.append(rental.state(instance))
    rental.clock.sleep(30)
    states.append(rental.state(instance))
    assert states == ["pending", "running", "shutting-down", "terminated"]
    rental.clock.sleep(3569)
    assert rental.state(instance) == "terminated"
    rental.clock.sleep(32)
    assert rental.look() == []


# Tokens


def test_the_same_token_is_the_same_instance_until_that_has_ended_and_never_another(rental: Rental) -> None:
    first = rental.launch(ClientToken="t")
    rental.clock.sleep(10_000)
    assert rental.launch(ClientToken="t") == first
    assert refusal(rental, ClientToken="t", InstanceType="p3.8xlarge") == "IdempotentParameterMismatch"
    rental.ec2.terminate_instances(InstanceIds=[first])
    assert rental.launch(ClientToken="t") == first
    rental.clock.sleep(31)
    assert refusal(rental, ClientToken="t") == "IdempotentInstanceTerminated"
    assert len(rental.fake.instances) == 1


def test_threads_with_the_same_token_rent_once(rental: Rental) -> None:
    with ThreadPoolExecutor(8) as threads:
        launched = set(threads.map(lambda _: rental.launch(ClientToken="t"), range(64)))
    assert len(launched) == len(rental.fake.instances) == 1
    assert [call.index for call in rental.fake.calls] == list(range(64))


# Quotas and capacity


@pytest.mark.parametrize(
    ("market", "code"), [("on-demand", "VcpuLimitExceeded"), ("spot", "MaxSpotInstanceCountExceeded")]
)
def test_the_quota_counts_what_lives(rental: Rental, market: str, code: str) -> None:
    for quota in ("L-417A185B", "L-7212CCBC"):
        rental.fake.world.quotas_vcpus[quota] = 16
    options = {"InstanceMarketOptions": spot() if market == "spot" else None}
    first = rental.launch(**options)
    rental.launch(**options)
    assert refusal(rental, **options) == code
    rental.ec2.terminate_instances(InstanceIds=[first])
    assert rental.launch(**options)


def test_capacity_is_a_matter_of_type_zone_and_market(rental: Rental) -> None:
    rental.fake.set_capacity(1, instance_type="p3.2xlarge", zone="us-east-1a", market="on-demand")
    rental.launch(**HERE)
    assert refusal(rental, **HERE, ClientToken="t") == "InsufficientInstanceCapacity"
    rental.launch(Placement={"AvailabilityZone": "us-east-1b"}, ClientToken="t")  # a token that was refused is free
    rental.launch(**HERE, InstanceType="p3.8xlarge")
    rental.launch(**HERE, InstanceMarketOptions=spot())


def test_as_many_are_launched_as_there_are_between_the_two_counts(rental: Rental) -> None:
    rental.fake.set_capacity(3)
    launched = rental.ec2.run_instances(**rental.order(MinCount=2, MaxCount=5))["Instances"]
    assert [one["AmiLaunchIndex"] for one in launched] == [0, 1, 2]
    assert refusal(rental, MinCount=2, MaxCount=2) == "InsufficientInstanceCapacity"


def test_an_invisible_instance_cannot_be_seen_or_ended() -> None:
    rental = Rental(visible_after_s=100.0)
    instance = rental.launch(ClientToken="t")
    assert rental.look(Filters=[{"Name": "client-token", "Values": ["t"]}]) == []
    for call in (rental.ec2.describe_instances, rental.ec2.terminate_instances):
        with pytest.raises(ClientError, match=r"InvalidInstanceID\.NotFound"):
            call(InstanceIds=[instance])
    assert rental.launch(ClientToken="t") == instance
    rental.clock.sleep(100)
    assert rental.state(instance) == "running"


# Ends, leases and spot


def test_the_party_that_ended_an_instance_is_known(rental: Rental) -> None:
    ours, itself, broken, stopped = (
        *(rental.launch() for _ in range(3)),
        rental.launch(InstanceInitiatedShutdownBehavior=None),
    )
    rental.clock.sleep(60)
    rental.ec2.terminate_instances(InstanceIds=[ours])
    rental.fake.power_off(itself)
    rental.fake.break_down(broken)
    rental.fake.power_off(stopped)
    codes = [rental.shown(one)["StateReason"]["Code"] for one in (ours, itself, broken)]
    assert codes == ["Client.UserInitiatedShutdown", "Client.InstanceInitiatedShutdown", "Server.InternalError"]
    assert rental.shown(ours)["StateTransitionReason"] == "User initiated (2026-01-01 00:01:00 GMT)"
    rental.clock.sleep(30)
    assert rental.state(stopped) == "stopped"


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
        rental.clock.sleep(at)
        rental.fake.extend_lease(instance, START + until)
    rental.clock.sleep(10_000)
    (ended,) = rental.fake.instances
    assert ended.ended_at == (None if ended_at is None else START + ended_at)
    assert ended.state_reason == ("" if ended_at is None else "Client.InstanceInitiatedShutdown")


def test_boots_and_ends_are_reported_once_and_a_listener_may_call_back(rental: Rental) -> None:
    lines: list[tuple[str, str]] = []

    def booted(one: Any) -> None:
        lines.append(("boot", one.instance_id))
        rental.fake.power_off(one.instance_id)

    rental.fake.on_boot = booted
    rental.fake.on_end = lambda one: lines.append(("end", one.instance_id))
    ran, never_ran = rental.launch(), rental.launch()
    rental.ec2.terminate_instances(InstanceIds=[never_ran])
    rental.clock.sleep(20)
    rental.fake.tick()
    rental.fake.power_off(ran)
    assert lines == [("end", never_ran), ("boot", ran), ("end", ran)]


def test_a_spot_instance_is_bought_at_the_market_s_price(rental: Rental) -> None:
    shown = rental.shown(rental.launch(InstanceMarketOptions=spot("3.06")))
    assert shown["InstanceLifecycle"] == "spot"
    assert shown["SpotInstanceRequestId"].startswith("sir-")
    history = rental.ec2.describe_spot_price_history(
        InstanceTypes=["p3.2xlarge"], AvailabilityZone="us-east-1a", StartTime=START, EndTime=START
    )["SpotPriceHistory"]
    rental.clock.sleep(120)
    assert rental.fake.bill().lines[0].price_usd_per_hour == float(history[0]["SpotPrice"]) < 3.06


@pytest.mark.parametrize("notice_s", [120.0, 20.0, None])
def test_a_spot_instance_is_reclaimed_with_notice_late_notice_or_none(rental: Rental, notice_s: float | None) -> None:
    instance = rental.launch(InstanceMarketOptions=spot())
    rental.clock.sleep(600)
    rental.fake.reclaim(instance, notice_s=notice_s)
    there = rental.fake.instances[0]
    if notice_s is not None:
        assert (there.notice_at, there.reclaim_at) == (START + 600, START + 600 + notice_s)
        assert rental.state(instance) == "running"
        rental.clock.sleep(notice_s + 1)
    assert rental.shown(instance)["StateReason"]["Code"] == "Server.SpotInstanceTermination"
    assert rental.fake.instances[0].ended_at == START + 600 + (notice_s or 0.0)


# Throttling

NOW = 1000.0


def test_a_burst_of_launches_is_throttled_and_the_others_are_not(rental: Rental) -> None:
    rental.fake.limits = Limits(sleep=rental.clock.sleep, latency_s={})
    ours = [rental.launch() for _ in range(5)]
    assert refusal(rental) == rental.fake.calls[-1].outcome == "RequestLimitExceeded"
    assert len(rental.look()) == len(ours)
    rental.ec2.terminate_instances(InstanceIds=ours)
    rental.clock.sleep(0.5)
    rental.launch()


def test_a_launch_takes_a_second_and_what_is_throttled_no_time(rental: Rental) -> None:
    limits = rental.fake.limits = Limits(sleep=rental.clock.sleep)
    rental.launch()
    assert rental.clock.now == rental.fake.instances[0].launched_at == START + 1.0
    limits.requests["RunInstances"] = Rate(0, 0)
    refusal(rental)
    assert rental.clock.now == START + 1.0


def test_a_launch_pays_for_every_instance_and_a_listing_of_everything_from_a_smaller_bucket() -> None:
    limits = Limits()
    many = {"MinCount": 1, "MaxCount": 600}
    assert limits.refusal("ec2", "RunInstances", many, NOW) is None
    refused = limits.refusal("ec2", "RunInstances", many, NOW + 10.0)
    assert refused is not None
    assert "resource rate" in refused.message
    assert limits.refusal("ec2", "RunInstances", {"MaxCount": 400}, NOW + 10.0) is None
    taken = [
        sum(fresh.refusal("ec2", "DescribeInstances", asked, NOW) is None for _ in range(200))
        for fresh, asked in ((Limits(), {}), (Limits(), {"Filters": [{"Name": "client-token", "Values": ["t"]}]}))
    ]
    assert taken == [50, 100]


# Faults


class DriverKilled(BaseException):
    """As a signal would."""


@pytest.mark.parametrize(
    ("fault", "raised", "launched"),
    [
        (Fault.throttled(), "RequestLimitExceeded", 0),
        (Fault.no_capacity(), "InsufficientInstanceCapacity", 0),
        (Fault.server_error(), "InternalError", 0),
        (Fault.server_error(took_effect=True), "InternalError", 1),
        (Fault.unavailable(took_effect=True), "Unavailable", 1),
        (Fault.timeout(took_effect=False), ConnectTimeoutError, 0),
        (Fault.timeout(took_effect=True), ReadTimeoutError, 1),
        (Fault(error=FakeDisconnect("connection_closed"), took_effect=True), Exception, 1),
        (Fault(error=DriverKilled()), DriverKilled, 0),
        (Fault(error=DriverKilled(), took_effect=True), DriverKilled, 1),
    ],
)
def test_a_fault_meets_the_call_before_or_after_its_effect(
    rental: Rental, fault: Fault, raised: type[BaseException] | str, launched: int
) -> None:
    rental.fake.fault = lambda call: fault if call.operation == "RunInstances" else None
    if isinstance(raised, str):
        assert refusal(rental, ClientToken="t") == raised
    else:
        with pytest.raises(raised):
            rental.launch(ClientToken="t")
    assert len(rental.fake.instances) == launched
    assert rental.fake.calls[-1].took_effect == bool(launched)
    rental.fake.fault = None
    rental.launch(ClientToken="t")
    assert len(rental.fake.instances) == 1


def test_a_fault_may_slow_or_hide_what_is_launched_and_a_look_may_be_stale(rental: Rental) -> None:
    faults = [Fault.invisible(300.0), Fault(pending_s=1000.0)]
    rental.fake.fault = lambda call: faults.pop(0) if faults else None
    hidden, late = rental.launch(), rental.launch()
    rental.clock.sleep(100)
    assert [one["InstanceId"] for one in rental.look()] == [late]
    assert rental.state(late) == "pending"
    rental.ec2.terminate_instances(InstanceIds=[late])
    rental.clock.sleep(200)
    assert (rental.state(hidden), rental.state(late)) == ("running", "terminated")
    faults += [Fault.stale(195.0), Fault.stale(250.0), Fault.stale(310.0)]
    states = [{one["InstanceId"]: one["State"]["Name"] for one in rental.look()}.get(late) for _ in range(3)]
    assert states == ["shutting-down", "pending", None]


def test_the_log_keeps_every_call_and_its_outcome(rental: Rental) -> None:
    instance = rental.launch()
    refusal(rental, InstanceType="p9.huge")
    rental.fake.fault = lambda call: Fault.timeout(took_effect=True)
    with pytest.raises(ReadTimeoutError):
        rental.ec2.terminate_instances(InstanceIds=[instance])
    assert [(call.operation, call.outcome, call.took_effect) for call in rental.fake.calls] == [
        ("RunInstances", "ok", True),
        ("RunInstances", "InvalidParameterValue", False),
        ("TerminateInstances", "read_timeout", True),
    ]
    first: FakeCall = rental.fake.calls[0]
    assert (first.index, first.service, first.principal, first.at) == (0, "ec2", "driver", START)


def test_clients_know_their_principal_region_and_service(rental: Rental) -> None:
    with pytest.raises(NoCredentialsError):
        Rental("nobody").look()
    with pytest.raises(ClientError, match="AuthFailure"):
        Rental("stranger").look()
    with pytest.raises(EndpointConnectionError, match="us-est-1"):
        rental.fake.session("driver", region="us-est-1").client("ec2").describe_instances()
    with pytest.raises(AttributeError, match="ec2 has no operation run_instance"):
        rental.ec2.run_instance()
    with pytest.raises(ClientError, match="InvalidAction"):
        rental.fake.session("admin").client("ec2").describe_addresses()
    there = FakeAws(lambda: START, region="eu-west-1")
    subnets = there.session("admin").client("ec2").describe_subnets()["Subnets"]
    assert sorted({one["AvailabilityZone"] for one in subnets}) == ["eu-west-1a", "eu-west-1b", "eu-west-1c"]
    assert not set(there.world.images) & set(rental.fake.world.images)


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


@pytest.mark.parametrize("operation", ["run_instances", "terminate_instances", "describe_instances"])
def test_a_dry_run_mentions_a_right_that_is_missing(rental: Rental, operation: str) -> None:
    words = {"run_instances": rental.order(), "terminate_instances": {"InstanceIds": [rental.launch()]}}
    rental.fake.policies["driver"] = ()
    with pytest.raises(ClientError, match=r"UnauthorizedOperation.*because no identity-based policy allows the ec2:"):
        getattr(rental.ec2, operation)(**words.get(operation, {}), DryRun=True)
