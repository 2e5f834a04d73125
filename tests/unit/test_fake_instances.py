"""Instances of the fake EC2, from launch to end: as EC2's own behave, within its limits of requests."""

from __future__ import annotations

import contextlib
import json
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from botocore.exceptions import ClientError, ReadTimeoutError
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders.fake_launches import START, TAGS, Rental, code_of, spot
from tests.ec2 import FakeAws, Fault
from tests.ec2.limits import Limits, Rate


@pytest.fixture
def rental() -> Rental:
    return Rental()


def refusal(rental: Rental, **changed: Any) -> ClientError:
    with pytest.raises(ClientError) as refused:
        rental.ec2.run_instances(**rental.order(**changed))
    return refused.value


def test_an_instance_goes_through_its_states(rental: Rental) -> None:
    instance = rental.launch()
    states = [rental.state(instance)]
    rental.clock.sleep(20)
    states.append(rental.state(instance))
    rental.ec2.terminate_instances(InstanceIds=[instance])
    states.append(rental.state(instance))
    rental.clock.sleep(30)
    states.append(rental.state(instance))
    assert states == ["pending", "running", "shutting-down", "terminated"]


def test_an_instance_is_shown_as_it_was_asked_for(rental: Rental) -> None:
    subnet = rental.ec2.describe_subnets(Filters=[{"Name": "availability-zone", "Values": ["us-east-1b"]}])["Subnets"][
        0
    ]
    instance = rental.launch(SubnetId=subnet["SubnetId"], ClientToken="t", KeyName="me")
    shown = rental.shown(instance)
    assert shown["Placement"]["AvailabilityZone"] == "us-east-1b"
    assert (shown["InstanceType"], shown["ClientToken"], shown["KeyName"]) == ("p3.2xlarge", "t", "me")
    assert {tag["Key"]: tag["Value"] for tag in shown["Tags"]} == TAGS
    assert shown["MetadataOptions"]["HttpTokens"] == "required"
    assert shown["IamInstanceProfile"]["Arn"].endswith("instance-profile/rubberband-worker")
    assert shown["LaunchTime"].timestamp() == START
    assert "InstanceLifecycle" not in shown


def test_the_machine_gets_its_user_data_decoded(rental: Rental) -> None:
    rental.launch(UserData="#!/bin/bash\necho grüezi")
    assert rental.fake.instances[0].user_data == "#!/bin/bash\necho grüezi"


def test_the_same_token_is_the_same_instance_until_that_has_ended_and_never_another(rental: Rental) -> None:
    first = rental.launch(ClientToken="t")
    rental.clock.sleep(10_000)
    assert rental.launch(ClientToken="t") == first
    rental.ec2.terminate_instances(InstanceIds=[first])
    assert rental.launch(ClientToken="t") == first
    rental.clock.sleep(31)
    assert code_of(refusal(rental, ClientToken="t")) == "IdempotentInstanceTerminated"
    assert len(rental.fake.instances) == 1


def test_the_same_token_with_other_parameters_is_a_mismatch(rental: Rental) -> None:
    rental.launch(ClientToken="t")
    assert code_of(refusal(rental, ClientToken="t", InstanceType="p3.8xlarge")) == "IdempotentParameterMismatch"


def test_parameters_are_the_same_after_a_round_trip_as_json_and_are_not_changed_afterwards(rental: Rental) -> None:
    order = rental.order(ClientToken="t", SecurityGroupIds=tuple(rental.fake.world.groups))
    kept = json.dumps(order)
    first = rental.ec2.run_instances(**order)["Instances"][0]["InstanceId"]
    order["TagSpecifications"].clear()
    assert rental.ec2.run_instances(**json.loads(kept))["Instances"][0]["InstanceId"] == first


def test_threads_with_the_same_token_rent_once() -> None:
    rental = Rental()
    with ThreadPoolExecutor(8) as threads:
        launched = set(threads.map(lambda _: rental.launch(ClientToken="t"), range(64)))
    assert len(launched) == len(rental.fake.instances) == 1
    assert [call.index for call in rental.fake.calls] == list(range(64))


def test_a_token_whose_launch_was_refused_is_free(rental: Rental) -> None:
    rental.fake.set_capacity(0)
    assert code_of(refusal(rental, ClientToken="t")) == "InsufficientInstanceCapacity"
    rental.fake.set_capacity(None)
    assert rental.launch(ClientToken="t", InstanceType="p3.8xlarge")


def interfaces(*kinds: str, **words: Any) -> dict[str, Any]:
    """One of each kind, on network cards of their own."""
    asked = [{"InterfaceType": kind, "NetworkCardIndex": card, "DeviceIndex": 0} for card, kind in enumerate(kinds)]
    return {"NetworkInterfaces": [{**one, **words} for one in asked]}


@settings(max_examples=40, deadline=None)
@given(tokens=st.lists(st.sampled_from(["a", "b", "c", None]), max_size=12))
def test_there_is_one_instance_for_each_token_and_one_for_each_call_without(tokens: list[str | None]) -> None:
    rental = Rental()
    rental.fake.fault = lambda call: Fault.timeout(took_effect=True) if call.index % 3 == 1 else None
    for token in tokens:
        with contextlib.suppress(ReadTimeoutError):
            rental.launch(ClientToken=token, InstanceType="g5.xlarge")
    assert len(rental.fake.instances) == len(set(tokens) - {None}) + tokens.count(None)


@pytest.mark.parametrize(
    ("changed", "code", "words"),
    [
        ({"InstanceType": "p9.huge"}, "InvalidParameterValue", "Invalid value 'p9.huge' for InstanceType."),
        ({"ImageId": "ami-00000000"}, "InvalidAMIID.NotFound", "ami-00000000"),
        ({"ImageId": "ubuntu"}, "InvalidAMIID.Malformed", "ubuntu"),
        ({"SubnetId": "subnet-1"}, "InvalidSubnetID.NotFound", "subnet-1"),
        ({"SecurityGroupIds": ["sg-1"]}, "InvalidGroup.NotFound", "sg-1"),
        ({"KeyName": "yours"}, "InvalidKeyPair.NotFound", "yours"),
        ({"IamInstanceProfile": {"Name": "none"}}, "InvalidParameterValue", "Invalid IAM Instance Profile name"),
        ({"InstanceType": "m7g.large"}, "InvalidParameterValue", "The architecture 'arm64'"),
        ({"UserData": "x" * 16_385}, "InvalidParameterValue", "limited to 16384 bytes"),
        ({"Placement": {"AvailabilityZone": "us-east-1e"}}, "Unsupported", "us-east-1a, us-east-1b"),
        ({"MinCount": 2}, "InvalidParameterValue", "minCount"),
        ({"ClientToken": "x" * 65}, "InvalidParameterValue", "clientToken"),
        (interfaces("efa"), "InvalidParameterCombination", "does not support the interface type 'efa'"),
        (
            interfaces("interface", "interface", AssociatePublicIpAddress=True),
            "InvalidParameterCombination",
            "multiple",
        ),
        ({"InstanceType": "p4d.24xlarge", **interfaces("efa-only")}, "InvalidParameterCombination", "primary"),
        ({"InstanceType": "p4d.24xlarge", **interfaces(*["interface"] * 5)}, "InvalidParameterValue", "card index 4"),
        ({"InstanceMarketOptions": spot("cheap")}, "InvalidParameterValue", "maxPrice"),
        ({"InstanceMarketOptions": spot("0.01")}, "SpotMaxPriceTooLow", "0.01"),
    ],
)
def test_a_launch_that_ec2_forbids_is_refused_in_its_words(
    rental: Rental, changed: dict[str, Any], code: str, words: str
) -> None:
    error = refusal(rental, **changed)
    assert (code_of(error), words in str(error)) == (code, True)
    assert rental.fake.instances == ()


def test_a_root_volume_holds_its_image(rental: Rental) -> None:
    device = rental.fake.world.images[rental.image()].root_device
    small = [{"DeviceName": device, "Ebs": {"VolumeSize": 8}}]
    assert code_of(refusal(rental, BlockDeviceMappings=small)) == "InvalidBlockDeviceMapping"


def test_a_group_of_another_network_is_refused(rental: Rental) -> None:
    other = rental.fake.world.add_vpc()
    group = next(one.group_id for one in rental.fake.world.groups.values() if one.vpc_id == other)
    assert code_of(refusal(rental, SecurityGroupIds=[group])) == "InvalidParameter"


def test_a_misspelt_parameter_fails_as_with_boto3(rental: Rental) -> None:
    with pytest.raises(Exception, match='Unknown parameter in input: "InstanceTypo"'):
        rental.ec2.run_instances(**rental.order(InstanceTypo="p3.2xlarge"))


def test_a_dry_run_says_that_it_would_work_and_launches_nothing(rental: Rental) -> None:
    assert code_of(refusal(rental, DryRun=True)) == "DryRunOperation"
    assert rental.fake.instances == ()


def test_a_dry_run_finds_what_does_not_exist(rental: Rental) -> None:
    assert code_of(refusal(rental, DryRun=True, ImageId="ami-0000000")) == "InvalidAMIID.NotFound"


@pytest.mark.parametrize(
    ("market", "code"), [("on-demand", "VcpuLimitExceeded"), ("spot", "MaxSpotInstanceCountExceeded")]
)
def test_the_quota_counts_what_lives(rental: Rental, market: str, code: str) -> None:
    for quota in ("L-417A185B", "L-7212CCBC"):
        rental.fake.world.quotas_vcpus[quota] = 16
    options = {"InstanceMarketOptions": spot() if market == "spot" else None}
    first = rental.launch(**options)
    rental.launch(**options)
    assert code_of(refusal(rental, **options)) == code
    rental.ec2.terminate_instances(InstanceIds=[first])
    assert rental.launch(**options)


def test_capacity_is_a_matter_of_type_zone_and_market(rental: Rental) -> None:
    rental.fake.set_capacity(1, instance_type="p3.2xlarge", zone="us-east-1a", market="on-demand")
    here = {"Placement": {"AvailabilityZone": "us-east-1a"}}
    rental.launch(**here)
    error = refusal(rental, **here)
    assert error.response["ResponseMetadata"]["HTTPStatusCode"] == 500
    assert code_of(error) == "InsufficientInstanceCapacity"
    rental.launch(Placement={"AvailabilityZone": "us-east-1b"})
    rental.launch(**here, InstanceType="p3.8xlarge")
    rental.launch(**here, InstanceMarketOptions=spot())


def test_as_many_are_launched_as_there_are_between_the_two_counts(rental: Rental) -> None:
    rental.fake.set_capacity(3)
    launched = rental.ec2.run_instances(**rental.order(MinCount=2, MaxCount=5))["Instances"]
    assert [one["AmiLaunchIndex"] for one in launched] == [0, 1, 2]
    assert code_of(refusal(rental, MinCount=2, MaxCount=2)) == "InsufficientInstanceCapacity"


def test_an_invisible_instance_cannot_be_seen_or_ended() -> None:
    rental = Rental(visible_after_s=100.0)
    instance = rental.launch(ClientToken="t")
    assert rental.look(Filters=[{"Name": "client-token", "Values": ["t"]}]) == []
    for call in (rental.ec2.describe_instances, rental.ec2.terminate_instances):
        with pytest.raises(ClientError) as absent:
            call(InstanceIds=[instance])
        assert code_of(absent.value) == "InvalidInstanceID.NotFound"
    assert rental.launch(ClientToken="t") == instance
    rental.clock.sleep(100)
    assert rental.state(instance) == "running"


def test_how_long_an_instance_stays_invisible_is_drawn_for_each_one() -> None:
    rental = Rental(visible_after_s=lambda rng: rng.uniform(0.0, 300.0))
    for _ in range(20):
        rental.launch()
    rental.clock.sleep(150)
    assert 0 < len(rental.look()) < 20
    rental.clock.sleep(150)
    assert len(rental.look()) == 20


def test_a_terminated_instance_is_seen_for_an_hour(rental: Rental) -> None:
    instance = rental.launch()
    rental.ec2.terminate_instances(InstanceIds=[instance])
    rental.clock.sleep(3600)
    assert rental.state(instance) == "terminated"
    rental.clock.sleep(31)
    assert rental.look() == []


def test_terminating_twice_changes_nothing(rental: Rental) -> None:
    instance = rental.launch()
    rental.clock.sleep(60)
    rental.ec2.terminate_instances(InstanceIds=[instance])
    bill_usd = rental.fake.bill().rent_usd
    rental.clock.sleep(600)
    again = rental.ec2.terminate_instances(InstanceIds=[instance])["TerminatingInstances"][0]
    assert again["PreviousState"]["Name"] == again["CurrentState"]["Name"] == "terminated"
    assert rental.fake.bill().rent_usd == bill_usd


def test_terminating_several_ends_none_if_one_is_not_there(rental: Rental) -> None:
    instance = rental.launch()
    with pytest.raises(ClientError):
        rental.ec2.terminate_instances(InstanceIds=[instance, "i-00000000000000000"])
    assert rental.state(instance) == "pending"


def test_the_party_that_ended_an_instance_is_known(rental: Rental) -> None:
    ours, itself, broken = (rental.launch() for _ in range(3))
    rental.clock.sleep(60)
    rental.ec2.terminate_instances(InstanceIds=[ours])
    rental.fake.power_off(itself)
    rental.fake.break_down(broken)
    codes = [rental.shown(one)["StateReason"]["Code"] for one in (ours, itself, broken)]
    assert codes == ["Client.UserInitiatedShutdown", "Client.InstanceInitiatedShutdown", "Server.InternalError"]
    assert rental.shown(ours)["StateTransitionReason"] == "User initiated (2026-01-01 00:01:00 GMT)"


def test_an_instance_that_powers_off_stops_unless_it_was_launched_to_terminate(rental: Rental) -> None:
    instance = rental.launch(InstanceInitiatedShutdownBehavior=None)
    rental.clock.sleep(60)
    rental.fake.power_off(instance)
    rental.clock.sleep(30)
    assert rental.state(instance) == "stopped"
    rental.ec2.terminate_instances(InstanceIds=[instance])
    assert rental.state(instance) == "terminated"


@pytest.mark.parametrize(
    ("name", "values", "found"),
    [
        ("tag:rubberband:run", ["r1"], 2),
        ("tag:rubberband:run", ["r2", "r?"], 2),
        ("tag:rubberband:run", ["r2"], 0),
        ("tag-key", ["rubberband:*"], 2),
        ("tag-key", ["other"], 0),
        ("instance-state-name", ["running"], 1),
        ("instance-state-name", ["pending", "running"], 2),
        ("client-token", ["second"], 1),
        ("instance-type", ["g5.*"], 1),
        ("availability-zone", ["us-east-1a"], 2),
        ("instance-lifecycle", ["spot"], 1),
    ],
)
def test_filters_choose(rental: Rental, name: str, values: list[str], found: int) -> None:
    rental.launch()
    rental.clock.sleep(30)
    rental.launch(ClientToken="second", InstanceType="g5.xlarge", InstanceMarketOptions=spot())
    assert len(rental.look(Filters=[{"Name": name, "Values": values}])) == found


def test_filters_must_all_hold_and_be_known(rental: Rental) -> None:
    rental.launch()
    run, spot_only = (
        {"Name": "tag:rubberband:run", "Values": ["r1"]},
        {"Name": "instance-lifecycle", "Values": ["spot"]},
    )
    assert rental.look(Filters=[run, spot_only]) == []
    with pytest.raises(ClientError, match="The filter 'colour' is invalid"):
        rental.look(Filters=[{"Name": "colour", "Values": ["red"]}])


def test_a_look_comes_in_pages(rental: Rental) -> None:
    launched = [rental.launch(InstanceType="g5.xlarge") for _ in range(12)]
    pages = list(rental.ec2.get_paginator("describe_instances").paginate(PaginationConfig={"PageSize": 5}))
    seen = [one["Instances"][0]["InstanceId"] for page in pages for one in page["Reservations"]]
    assert (len(pages), seen) == (3, launched)


def test_the_same_seed_gives_the_same_account() -> None:
    def ids(seed: int) -> list[str]:
        rental = Rental(seed=seed)
        return [rental.image(), rental.launch()]

    assert ids(1) == ids(1) != ids(2)


def test_tags_are_made_at_launch_only_unless_one_may_do_everything() -> None:
    rental = Rental()
    instance = rental.launch()
    changed = {"Resources": [instance], "Tags": [{"Key": "rubberband:run", "Value": "r2"}]}
    with pytest.raises(ClientError, match="ec2:CreateTags"):
        rental.ec2.create_tags(**changed)
    rental.fake.session("admin").client("ec2").create_tags(**changed)
    assert {"Key": "rubberband:run", "Value": "r2"} in rental.shown(instance)["Tags"]


def test_the_fake_names_its_gaps() -> None:
    fake = FakeAws(lambda: START)
    with pytest.raises(ClientError) as unknown:
        fake.session("admin").client("ec2").describe_addresses()
    assert code_of(unknown.value) == "InvalidAction"


def test_a_spot_instance_is_bought_at_the_market_s_price(rental: Rental) -> None:
    instance = rental.launch(InstanceMarketOptions=spot("3.06"))
    shown = rental.shown(instance)
    assert shown["InstanceLifecycle"] == "spot"
    assert shown["SpotInstanceRequestId"].startswith("sir-")
    history = rental.ec2.describe_spot_price_history(
        InstanceTypes=["p3.2xlarge"], AvailabilityZone="us-east-1a", StartTime=START, EndTime=START
    )["SpotPriceHistory"]
    rental.clock.sleep(120)
    assert rental.fake.bill().lines[0].price_usd_per_hour == float(history[0]["SpotPrice"]) < 3.06


def test_a_spot_flag_can_be_ignored(rental: Rental) -> None:
    rental.fake.world.ignores_spot = True
    assert "InstanceLifecycle" not in rental.shown(rental.launch(InstanceMarketOptions=spot()))
    rental.clock.sleep(60)
    assert rental.fake.bill().lines[0].price_usd_per_hour == pytest.approx(3.06)


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


def leased() -> Rental:
    return Rental(reads=lambda user_data: (300.0, 1000.0))


def test_an_instance_ends_itself_at_its_lease() -> None:
    rental = leased()
    instance = rental.launch()
    rental.clock.sleep(319)
    assert rental.state(instance) == "running"
    rental.clock.sleep(1000)
    assert rental.state(instance) == "terminated"
    assert rental.fake.instances[0].ended_at == START + 320
    assert rental.shown(instance)["StateReason"]["Code"] == "Client.InstanceInitiatedShutdown"


def test_a_lease_is_extended_up_to_the_hard_stop_and_may_be_cut() -> None:
    rental = leased()
    kept, cut = rental.launch(), rental.launch()
    rental.clock.sleep(100)
    rental.fake.extend_lease(kept, START + 90_000)
    rental.fake.extend_lease(cut, START + 200)
    rental.clock.sleep(10_000)
    rental.fake.tick()
    assert [one.ended_at for one in rental.fake.instances] == [START + 1020, START + 200]


def test_a_machine_that_never_boots_does_not_end_itself() -> None:
    rental = Rental(reads=lambda user_data: (300.0, 1000.0), boot_s=lambda rng: math.inf)
    rental.launch()
    rental.clock.sleep(1_000_000)
    assert len(rental.fake.living) == 1


def test_a_lease_begins_when_the_machine_has_booted() -> None:
    rental = Rental(reads=lambda user_data: (300.0, 1000.0), boot_s=40.0)
    rental.launch()
    rental.clock.sleep(1000)
    assert [one.ended_at for one in rental.fake.instances] == [START + 20 + 40 + 300]


def test_a_lease_that_is_over_is_not_extended() -> None:
    rental = leased()
    instance = rental.launch()
    rental.clock.sleep(400)
    rental.fake.extend_lease(instance, START + 900)
    assert rental.fake.living == ()


def test_machines_are_reported_of_boots_and_ends_once(rental: Rental) -> None:
    lines: list[tuple[str, str]] = []
    rental.fake.on_boot = lambda one: lines.append(("boot", one.instance_id))
    rental.fake.on_end = lambda one: lines.append(("end", one.instance_id))
    ran, never_ran = rental.launch(), rental.launch()
    rental.ec2.terminate_instances(InstanceIds=[never_ran])
    rental.clock.sleep(20)
    rental.fake.tick()
    rental.fake.power_off(ran)
    rental.fake.power_off(ran)
    assert lines == [("end", never_ran), ("boot", ran), ("end", ran)]


def test_a_machine_may_call_back_while_it_is_notified(rental: Rental) -> None:
    rental.fake.on_boot = lambda one: rental.fake.power_off(one.instance_id)
    instance = rental.launch()
    rental.clock.sleep(20)
    rental.fake.tick()
    assert rental.state(instance) == "shutting-down"


NOW = 1000.0


def limited() -> Rental:
    rental = Rental()
    rental.fake.limits = Limits(sleep=rental.clock.sleep)
    return rental


def test_nothing_is_limited_unless_it_is_asked_for() -> None:
    rental = Rental()
    for _ in range(200):
        rental.look()
    assert rental.clock.now == Rental().clock.now


def test_a_burst_of_launches_is_throttled_and_the_others_are_not() -> None:
    rental = limited()
    assert rental.fake.limits is not None
    rental.fake.limits.latency_s = {}
    ours = [rental.launch() for _ in range(5)]
    with pytest.raises(ClientError) as caught:
        rental.launch()
    assert code_of(caught.value) == "RequestLimitExceeded"
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503
    assert rental.fake.calls[-1].outcome == "RequestLimitExceeded"
    assert len(rental.look()) == len(ours)
    rental.ec2.terminate_instances(InstanceIds=ours)
    rental.clock.sleep(0.5)
    rental.launch()


def test_a_launch_takes_a_second_and_what_is_throttled_no_time() -> None:
    rental = limited()
    began_at = rental.clock.now
    rental.launch()
    assert rental.clock.now == began_at + 1.0
    assert rental.fake.instances[0].launched_at == began_at + 1.0
    assert rental.fake.limits is not None
    rental.fake.limits.requests["RunInstances"] = Rate(0, 0)
    with pytest.raises(ClientError):
        rental.launch()
    assert rental.clock.now == began_at + 1.0


def test_a_launch_pays_forevery_instance() -> None:
    limits = Limits()
    many = {"MinCount": 1, "MaxCount": 600}
    assert limits.refusal("ec2", "RunInstances", many, NOW) is None
    refusal = limits.refusal("ec2", "RunInstances", many, NOW + 10.0)
    assert refusal is not None
    assert "resource rate" in refusal.message
    assert limits.refusal("ec2", "RunInstances", {"MaxCount": 400}, NOW + 10.0) is None


def test_a_listing_of_everything_has_the_smaller_bucket() -> None:
    def taken(**params: object) -> int:
        limits = Limits()
        return sum(limits.refusal("ec2", "DescribeInstances", params, NOW) is None for _ in range(200))

    assert (taken(), taken(Filters=[{"Name": "client-token", "Values": ["t"]}])) == (50, 100)


def test_other_services_are_not_limited() -> None:
    limits = Limits()
    assert all(limits.refusal("ssm", "GetParameter", {}, NOW) is None for _ in range(1000))


@settings(max_examples=60, deadline=None)
@given(gaps_s=st.lists(st.floats(0.0, 3.0), max_size=80))
def test_no_more_than_the_burst_and_the_refill_is_let_in(gaps_s: list[float]) -> None:
    limits, now, let_in = Limits(), NOW, 0
    for gap_s in gaps_s:
        now += gap_s
        let_in += limits.refusal("ec2", "RunInstances", {"MaxCount": 1}, now) is None
    assert let_in <= 5 + 2 * (now - NOW) + 1e-6
    assert let_in >= min(len(gaps_s), 5)
