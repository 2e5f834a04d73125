"""The fake EC2 answers as EC2 does: in this process, to boto3 over HTTP, and (where moto knows it) as moto does."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError, ParamValidationError

from rubberband.cloud.aws.account_parts import Bounds, bucket_resource, role_resources
from tests.builders.fake_launches import START, TAGS, Launches, Rental, spot
from tests.builders.waiting import eventually
from tests.ec2 import BUCKET
from tests.ec2.client import operation_names
from tests.ec2.operations import OPERATIONS
from tests.ec2.server import SECRET_KEY, FakeServer, access_key

OWNER = [{"Key": "rubberband:owner", "Value": "rubberband"}]


class Cloud(Launches):
    """An account, its administrator's clients, and launches that it fills."""

    def __init__(self, client: Callable[[str], Any], image: str, sleep: Callable[[float], None]) -> None:
        self.client, self.image, self.sleep, self.ec2 = client, image, sleep, client("ec2")


@pytest.fixture(scope="module")
def moto() -> Iterator[Callable[[str], Any]]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield _clients(f"http://{host}:{port}", "testing")
    server.stop()


def _clients(url: str, key: str) -> Callable[[str], Any]:
    words = {"aws_access_key_id": key, "aws_secret_access_key": SECRET_KEY, "region_name": "us-east-1"}
    once = Config(retries={"total_max_attempts": 1}, read_timeout=120)
    return lambda service: boto3.client(service, endpoint_url=url, config=once, **words)  # type: ignore[call-overload]


@contextlib.contextmanager
def opened(name: str, folder: Path, request: pytest.FixtureRequest) -> Iterator[Cloud]:
    """An account of the fake with nothing in it yet, or moto's."""
    if name == "moto":
        client = request.getfixturevalue("moto")
        image = client("ec2").describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
        client("s3").create_bucket(Bucket=BUCKET)
        yield Cloud(client, image, lambda seconds: None)
        return
    rental = Rental("admin")
    rental.fake.world.agent_s = rental.fake.world.command_known_s = 0.0
    if name == "in process":
        yield Cloud(rental.fake.session("admin").client, rental.image, rental.sleep)
        return
    with FakeServer(rental.fake, folder / "s3") as server:
        rental.fake.world.buckets[BUCKET] = rental.fake.world.new_bucket(BUCKET)
        yield Cloud(_clients(server.url, access_key("admin")), rental.image, rental.sleep)


HTTP, MOTO = (pytest.param(name, marks=pytest.mark.long) for name in ("http", "moto"))


@pytest.fixture(params=["in process", HTTP, MOTO])
def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cloud]:
    """Each in turn, asked what all answer alike."""
    with opened(request.param, tmp_path, request) as found:
        yield found


@pytest.fixture(params=["in process", HTTP])
def ours(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cloud]:
    """The fake, asked what moto answers otherwise or does not know."""
    with opened(request.param, tmp_path, request) as found:
        yield found


@pytest.fixture(autouse=True)
def _near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def refused(call: Any, **params: Any) -> str:
    """The code with which AWS refuses."""
    with pytest.raises(ClientError) as error:
        call(**params)
    return str(error.value.response["Error"]["Code"])


def by(name: str, *values: str) -> list[dict[str, Any]]:
    """A filter."""
    return [{"Name": name, "Values": [*values]}]


# Launches

P4D = {"InstanceType": "p4d.24xlarge"}


def cards(*kinds: str, **words: Any) -> dict[str, Any]:
    """A network interface of each kind, on cards of their own."""
    asked = [{"InterfaceType": kind, "NetworkCardIndex": card, "DeviceIndex": 0} for card, kind in enumerate(kinds)]
    return {"NetworkInterfaces": [{**one, **words} for one in asked]}


@pytest.mark.parametrize(
    ("changed", "code"),
    [({"SubnetId": "subnet-1"}, "InvalidSubnetID.NotFound"), ({"SecurityGroupIds": ["sg-1"]}, "InvalidGroup.NotFound")],
)
def test_a_launch_with_what_does_not_exist_is_refused(cloud: Cloud, changed: dict[str, Any], code: str) -> None:
    assert refused(cloud.ec2.run_instances, **cloud.order(**changed)) == code


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"InstanceType": "p9.huge"}, "InvalidParameterValue"),
        ({"ImageId": "ami-00000000"}, "InvalidAMIID.NotFound"),
        ({"KeyName": "yours"}, "InvalidKeyPair.NotFound"),
        ({"ImageId": "ubuntu"}, "InvalidAMIID.Malformed"),
        ({"IamInstanceProfile": {"Name": "none"}}, "InvalidParameterValue"),
        ({"InstanceType": "m7g.large"}, "InvalidParameterValue"),
        ({"UserData": "x" * 16_385}, "InvalidParameterValue"),
        ({"Placement": {"AvailabilityZone": "us-east-1e"}}, "Unsupported"),
        ({"MinCount": 2}, "InvalidParameterValue"),
        ({"ClientToken": "x" * 65}, "InvalidParameterValue"),
        ({"BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 8}}]}, "InvalidBlockDeviceMapping"),
        ({"InstanceMarketOptions": spot("cheap")}, "InvalidParameterValue"),
        ({"InstanceMarketOptions": spot("0.01")}, "SpotMaxPriceTooLow"),
        ({"DryRun": True}, "DryRunOperation"),
        ({"DryRun": True, "ImageId": "ami-0000000"}, "InvalidAMIID.NotFound"),
        (cards("efa"), "InvalidParameterCombination"),
        (cards("interface", "interface", AssociatePublicIpAddress=True), "InvalidParameterCombination"),
        (P4D | cards("efa-only"), "InvalidParameterCombination"),
        (P4D | cards(*["interface"] * 5), "InvalidParameterValue"),
    ],
)
def test_a_launch_that_ec2_forbids_is_refused(ours: Cloud, changed: dict[str, Any], code: str) -> None:
    assert refused(ours.ec2.run_instances, **ours.order(**changed)) == code
    assert ours.look() == []


def test_an_instance_is_shown_as_it_was_asked_for_until_it_has_ended(cloud: Cloud) -> None:
    subnet = cloud.ec2.describe_subnets(Filters=by("availability-zone", "us-east-1b"))["Subnets"][0]["SubnetId"]
    instance = cloud.launch(SubnetId=subnet, ClientToken="t1")
    cloud.sleep(20.0)
    shown = cloud.shown(instance)
    assert (shown["InstanceType"], shown["Placement"]["AvailabilityZone"]) == ("p3.2xlarge", "us-east-1b")
    assert (shown["State"]["Name"], shown["ClientToken"], shown["ImageId"]) == ("running", "t1", cloud.image)
    assert ({one["Key"]: one["Value"] for one in shown["Tags"]}, "InstanceLifecycle" in shown) == (TAGS, False)
    cloud.ec2.terminate_instances(InstanceIds=[instance])
    cloud.sleep(30.0)
    assert cloud.shown(instance)["State"]["Name"] == "terminated"
    again = cloud.ec2.terminate_instances(InstanceIds=[instance])["TerminatingInstances"][0]
    assert again["PreviousState"]["Name"] == "terminated"


def test_terminating_several_ends_none_if_one_is_not_there(cloud: Cloud) -> None:
    instance = cloud.launch()
    both = [instance, "i-00000000000000000"]
    assert refused(cloud.ec2.terminate_instances, InstanceIds=both) == "InvalidInstanceID.NotFound"
    assert cloud.shown(instance)["State"]["Name"] in ("pending", "running")


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        (by("tag:run", "r1"), 2),
        (by("tag:run", "r2", "r?"), 2),
        (by("tag:run", "r2"), 0),
        (by("tag-key", "r*"), 2),
        (by("availability-zone", "us-east-1a"), 2),
    ],
)
def test_filters_choose(cloud: Cloud, chosen: list[dict[str, Any]], found: int) -> None:
    tags = [{"ResourceType": "instance", "Tags": [{"Key": "run", "Value": "r1"}]}]
    there = {"TagSpecifications": tags, "Placement": {"AvailabilityZone": "us-east-1a"}}
    launched = [cloud.launch(**there, InstanceType=name) for name in ("p3.2xlarge", "g5.xlarge")]
    assert len(cloud.look(InstanceIds=launched, Filters=chosen)) == found
    cloud.ec2.terminate_instances(InstanceIds=launched)


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        (by("client-token", "second"), 1),
        (by("instance-type", "g5.*"), 1),
        (by("instance-lifecycle", "spot"), 1),
        (by("instance-state-name", "pending", "running"), 2),
        (by("instance-state-name", "running"), 1),
        (by("instance-state-name", "running") + by("instance-lifecycle", "spot"), 0),
    ],
)
def test_filters_of_launches_choose_and_must_all_hold(ours: Cloud, chosen: list[dict[str, Any]], found: int) -> None:
    ours.launch()
    ours.sleep(20.0)
    ours.launch(ClientToken="second", InstanceType="g5.xlarge", InstanceMarketOptions=spot())
    assert len(ours.look(Filters=chosen)) == found


def test_a_filter_that_is_not_known_is_refused(ours: Cloud) -> None:
    assert refused(ours.ec2.describe_instances, Filters=by("colour", "red")) == "InvalidParameterValue"


def test_a_look_comes_in_pages(cloud: Cloud) -> None:
    tags = [{"ResourceType": "instance", "Tags": [{"Key": "of", "Value": "pages"}]}]
    launched = [cloud.launch(InstanceType="g5.xlarge", TagSpecifications=tags) for _ in range(12)]
    paginator = cloud.ec2.get_paginator("describe_instances")
    pages = list(paginator.paginate(Filters=by("tag:of", "pages"), PaginationConfig={"PageSize": 5}))
    seen = [one["Instances"][0]["InstanceId"] for page in pages for one in page["Reservations"]]
    assert (len(pages), sorted(seen)) == (3, sorted(launched))
    cloud.ec2.terminate_instances(InstanceIds=launched)


def test_a_misspelt_parameter_fails_as_with_boto3(cloud: Cloud) -> None:
    with pytest.raises(ParamValidationError, match='Unknown parameter in input: "InstanceTypo"'):
        cloud.ec2.run_instances(**cloud.order(InstanceTypo="p3.2xlarge"))


# Networks and types


def test_the_default_network_has_a_subnet_in_each_zone(cloud: Cloud) -> None:
    vpc = cloud.ec2.describe_vpcs(Filters=by("is-default", "true"))["Vpcs"][0]["VpcId"]
    subnets = cloud.ec2.describe_subnets(Filters=by("vpc-id", vpc))["Subnets"]
    assert sorted(one["AvailabilityZone"][-1] for one in subnets) == list("abcdef")


def test_a_group_is_made_opened_to_itself_and_deleted(cloud: Cloud) -> None:
    vpc = cloud.ec2.describe_vpcs()["Vpcs"][0]["VpcId"]
    tags = [{"ResourceType": "security-group", "Tags": OWNER}]
    wanted = {"GroupName": "rubberband", "Description": "d", "VpcId": vpc, "TagSpecifications": tags}
    group = cloud.ec2.create_security_group(**wanted)["GroupId"]
    assert refused(cloud.ec2.create_security_group, **wanted) == "InvalidGroup.Duplicate"
    itself = {"IpProtocol": "tcp", "FromPort": 0, "ToPort": 65535, "UserIdGroupPairs": [{"GroupId": group}]}
    cloud.ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[itself])
    again = refused(cloud.ec2.authorize_security_group_ingress, GroupId=group, IpPermissions=[itself])
    assert again == "InvalidPermission.Duplicate"
    (found,) = cloud.ec2.describe_security_groups(Filters=by("group-name", "rubberband"))["SecurityGroups"]
    (rule,) = found["IpPermissions"]
    assert ([pair["GroupId"] for pair in rule["UserIdGroupPairs"]], rule["IpRanges"]) == ([group], [])
    cloud.ec2.delete_security_group(GroupId=group)
    assert refused(cloud.ec2.describe_security_groups, GroupIds=[group]) == "InvalidGroup.NotFound"


def test_a_group_that_an_instance_has_is_not_deleted(ours: Cloud) -> None:
    group = ours.ec2.create_security_group(GroupName="g", Description="d")["GroupId"]
    instance = ours.launch(SecurityGroupIds=[group])
    ours.ec2.terminate_instances(InstanceIds=[instance])
    assert refused(ours.ec2.delete_security_group, GroupId=group) == "DependencyViolation"
    ours.sleep(30.0)
    ours.ec2.delete_security_group(GroupId=group)


def test_placement_groups_are_there_once(ours: Cloud) -> None:
    tags = [{"ResourceType": "placement-group", "Tags": OWNER}]
    near = {"GroupName": "near", "Strategy": "cluster"}
    ours.ec2.create_placement_group(**near, TagSpecifications=tags)
    assert refused(ours.ec2.create_placement_group, **near) == "InvalidPlacementGroup.Duplicate"
    (found,) = ours.ec2.describe_placement_groups(GroupNames=["near"])["PlacementGroups"]
    assert (found["Strategy"], found["Tags"]) == ("cluster", OWNER)
    ours.ec2.delete_placement_group(GroupName="near")
    assert refused(ours.ec2.delete_placement_group, GroupName="near") == "InvalidPlacementGroup.Unknown"


def test_types_have_the_facts_that_a_plan_needs(cloud: Cloud) -> None:
    found = cloud.ec2.describe_instance_types(InstanceTypes=["g4dn.12xlarge", "g5g.xlarge"])["InstanceTypes"]
    t4, arm = sorted(found, key=lambda one: str(one["InstanceType"]))
    assert t4["VCpuInfo"]["DefaultVCpus"] == 48
    (gpu,) = t4["GpuInfo"]["Gpus"]
    assert (gpu["Name"], gpu["Count"], gpu["MemoryInfo"]["SizeInMiB"]) == ("T4", 4, 16384)
    assert arm["ProcessorInfo"]["SupportedArchitectures"] == ["arm64"]
    assert refused(cloud.ec2.describe_instance_types, InstanceTypes=["p9.huge"]) == "InvalidInstanceType"


def test_zones_offer_what_can_be_launched_there(ours: Cloud) -> None:
    asked = {"LocationType": "availability-zone", "Filters": by("instance-type", "p5.48xlarge")}
    offered = ours.ec2.describe_instance_type_offerings(**asked)["InstanceTypeOfferings"]
    assert [one["Location"][-1] for one in offered] == list("abc")
    there = {"InstanceType": "p5.48xlarge", "Placement": {"AvailabilityZone": "us-east-1d"}}
    assert refused(ours.ec2.run_instances, **ours.order(**there)) == "Unsupported"


@pytest.mark.parametrize("architecture", ["x86_64", "arm64"])
def test_public_parameters_name_images_that_exist(ours: Cloud, architecture: str) -> None:
    name = f"/aws/service/deeplearning/ami/{architecture}/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
    image = ours.client("ssm").get_parameter(Name=name)["Parameter"]["Value"]
    shown = ours.ec2.describe_images(ImageIds=[image])["Images"][0]
    assert (shown["Architecture"], shown["RootDeviceName"]) == (architecture, "/dev/sda1")


def test_an_image_of_an_instance_and_its_snapshot_are_made_and_deleted(cloud: Cloud) -> None:
    assert refused(cloud.ec2.describe_images, ImageIds=["ami-00000000"]) == "InvalidAMIID.NotFound"
    instance = cloud.launch()
    cloud.sleep(20.0)
    image = cloud.ec2.create_image(InstanceId=instance, Name="mine")["ImageId"]
    cloud.sleep(3600.0)
    (found,) = cloud.ec2.describe_images(Owners=["self"])["Images"]
    assert (found["ImageId"], found["Name"], found["State"]) == (image, "mine", "available")
    disks = [one["Ebs"] for one in found["BlockDeviceMappings"]]
    (snapshot,) = (disk["SnapshotId"] for disk in disks if "SnapshotId" in disk)
    cloud.ec2.deregister_image(ImageId=image)
    assert cloud.ec2.describe_images(Owners=["self"])["Images"] == []
    cloud.ec2.delete_snapshot(SnapshotId=snapshot)
    assert refused(cloud.ec2.delete_snapshot, SnapshotId=snapshot) == "InvalidSnapshot.NotFound"


# Other services


def test_secrets_are_sealed_until_they_are_decrypted(cloud: Cloud) -> None:
    ssm, name = cloud.client("ssm"), "/rubberband/rubberband/ray-token"
    assert refused(ssm.get_parameter, Name=name) == "ParameterNotFound"
    assert ssm.put_parameter(Name=name, Value="secret", Type="SecureString")["Version"] == 1
    assert refused(ssm.put_parameter, Name=name, Value="x", Type="SecureString") == "ParameterAlreadyExists"
    assert ssm.put_parameter(Name=name, Value="other", Type="SecureString", Overwrite=True)["Version"] == 2
    assert ssm.get_parameter(Name=name)["Parameter"]["Value"] != "other"
    assert ssm.get_parameter(Name=name, WithDecryption=True)["Parameter"]["Value"] == "other"
    ssm.delete_parameter(Name=name)
    assert refused(ssm.delete_parameter, Name=name) == "ParameterNotFound"


def test_only_advanced_parameters_are_long_or_expire_and_none_names_another(ours: Cloud) -> None:
    ssm, word = ours.client("ssm"), {"Name": "/rubberband/rubberband/word", "Type": "SecureString"}
    ends = json.dumps(
        [{"Type": "Expiration", "Version": "1.0", "Attributes": {"Timestamp": "2100-01-01T00:00:00.000Z"}}]
    )
    for given in ({"Value": "x" * 4097}, {"Value": "x", "Policies": ends}, {"Value": "{{x}}", "Tier": "Advanced"}):
        assert refused(ssm.put_parameter, **word, **given) == "ValidationException"
    ssm.put_parameter(**word, Value="x" * 8192, Policies=ends, Tier="Advanced")
    assert ssm.get_parameter(Name=word["Name"], WithDecryption=True)["Parameter"]["Value"] == "x" * 8192


def test_a_bucket_keeps_what_is_put_into_it(cloud: Cloud) -> None:
    s3 = cloud.client("s3")
    s3.head_bucket(Bucket=BUCKET)
    s3.put_object(Bucket=BUCKET, Key="a/b", Body=b"content")
    assert s3.get_object(Bucket=BUCKET, Key="a/b")["Body"].read() == b"content"
    assert [one["Key"] for one in s3.list_objects_v2(Bucket=BUCKET, Prefix="a/")["Contents"]] == ["a/b"]
    s3.delete_object(Bucket=BUCKET, Key="a/b")
    assert refused(s3.get_object, Bucket=BUCKET, Key="a/b") == "NoSuchKey"
    assert refused(s3.head_object, Bucket=BUCKET, Key="a/b") == "404"
    assert refused(s3.put_object, Bucket="another", Key="a", Body=b"") == "NoSuchBucket"
    assert refused(s3.head_bucket, Bucket="another") == "404"


def test_a_stack_is_made_changed_and_deleted(cloud: Cloud) -> None:
    cloudformation, name = cloud.client("cloudformation"), {"StackName": "mine"}
    bounds = Bounds(account="123456789012", owner="mine", bucket="mine-0123")
    resources = {**role_resources(bounds), "Bucket": bucket_resource("mine-0123")}
    words = {**name, "Capabilities": ["CAPABILITY_NAMED_IAM"], "Tags": OWNER}
    assert refused(cloudformation.describe_stacks, **name) == "ValidationError"
    made = cloudformation.create_stack(**words, TemplateBody=json.dumps({"Resources": resources}))["StackId"]

    def settled() -> str:
        eventually(lambda: not status().endswith("_IN_PROGRESS"), "the end of a change")
        return status()

    def status() -> str:
        return str(cloudformation.describe_stacks(StackName=made)["Stacks"][0]["StackStatus"])

    assert settled() == "CREATE_COMPLETE"
    assert cloudformation.describe_stacks(**name)["Stacks"][0]["Tags"] == OWNER
    assert cloudformation.get_template(**name)["TemplateBody"] == {"Resources": resources}
    assert cloudformation.describe_stack_events(**name)["StackEvents"][-1]["LogicalResourceId"]
    cloud.client("s3").head_bucket(Bucket="mine-0123")
    kept = {"Bucket": resources["Bucket"]}
    assert cloudformation.update_stack(**words, TemplateBody=json.dumps({"Resources": kept}))["StackId"] == made
    assert settled() == "UPDATE_COMPLETE"
    cloudformation.delete_stack(StackName=made)
    assert settled() == "DELETE_COMPLETE"
    assert refused(cloudformation.describe_stacks, **name) == "ValidationError"
    assert refused(cloud.client("s3").head_bucket, Bucket="mine-0123") == "404"


def test_budgets_are_of_a_name(cloud: Cloud) -> None:
    budgets, mine = cloud.client("budgets"), {"AccountId": "123456789012", "BudgetName": "b"}
    limit = {"Amount": "20", "Unit": "USD"}
    budget = {"BudgetName": "b", "BudgetLimit": limit, "TimeUnit": "MONTHLY", "BudgetType": "COST"}
    budgets.create_budget(AccountId="123456789012", Budget=budget)
    assert refused(budgets.create_budget, AccountId="123456789012", Budget=budget) == "DuplicateRecordException"
    assert budgets.describe_budget(**mine)["Budget"]["BudgetName"] == "b"
    budgets.delete_budget(**mine)
    assert refused(budgets.describe_budget, **mine) == "NotFoundException"


def test_schedules_are_made_changed_and_deleted(cloud: Cloud) -> None:
    scheduler, name = cloud.client("scheduler"), {"Name": "rubberband-i-1"}
    schedule = {
        **name,
        "ScheduleExpression": "at(2027-02-01T00:00:00)",
        "FlexibleTimeWindow": {"Mode": "OFF"},
        "ActionAfterCompletion": "DELETE",
        "Target": {
            "Arn": "arn:aws:scheduler:::aws-sdk:ec2:terminateInstances",
            "RoleArn": "arn:aws:iam::123456789012:role/rubberband-guard",
            "Input": json.dumps({"InstanceIds": ["i-1"]}),
        },
    }
    assert refused(scheduler.update_schedule, **schedule) == "ResourceNotFoundException"
    scheduler.create_schedule(**schedule)
    assert refused(scheduler.create_schedule, **schedule) == "ConflictException"
    cloud.sleep(60.0)
    scheduler.update_schedule(**schedule)
    scheduler.delete_schedule(**name)
    assert refused(scheduler.delete_schedule, **name) == "ResourceNotFoundException"


def test_a_larger_quota_is_asked_for_once(ours: Cloud) -> None:
    quotas, quota = ours.client("service-quotas"), {"ServiceCode": "ec2", "QuotaCode": "L-DB2E81BA"}
    now = quotas.get_service_quota(**quota)["Quota"]["Value"]
    assert quotas.get_aws_default_service_quota(**quota)["Quota"]["Value"] == 0.0
    assert refused(quotas.request_service_quota_increase, **quota, DesiredValue=1.0) == "IllegalArgumentException"
    quotas.request_service_quota_increase(**quota, DesiredValue=now + 8.0)
    again = refused(quotas.request_service_quota_increase, **quota, DesiredValue=now + 16.0)
    assert again == "ResourceAlreadyExistsException"
    asked = quotas.list_requested_service_quota_change_history_by_quota(**quota)["RequestedQuotas"]
    assert [(one["DesiredValue"], one["Status"]) for one in asked] == [(now + 8.0, "PENDING")]
    assert refused(quotas.get_service_quota, ServiceCode="ec2", QuotaCode="L-0") == "NoSuchResourceException"


def test_an_instance_runs_a_command_and_shows_its_console(ours: Cloud) -> None:
    ssm, instance = ours.client("ssm"), ours.launch(IamInstanceProfile={"Name": "rubberband-worker"})
    script = {"DocumentName": "AWS-RunShellScript", "Parameters": {"commands": ["true"]}}
    assert refused(ssm.send_command, InstanceIds=[instance], **script) == "InvalidInstanceId"
    ours.sleep(60.0)
    sent = ssm.send_command(InstanceIds=[instance], **script)["Command"]["CommandId"]
    ours.sleep(60.0)
    assert ssm.get_command_invocation(CommandId=sent, InstanceId=instance)["Status"] == "Success"
    assert ours.ec2.get_console_output(InstanceId=instance, Latest=True)["Output"] == ""


def test_spot_prices_move_within_their_bounds_and_by_the_hour(ours: Cloud) -> None:
    ours.sleep(86_400.0)
    asked = {"InstanceTypes": ["p3.2xlarge"], "AvailabilityZone": "us-east-1a", "StartTime": START}
    history = ours.ec2.describe_spot_price_history(**asked, EndTime=START + 36_000.0)["SpotPriceHistory"]
    times = [point["Timestamp"].timestamp() for point in history]
    assert times == sorted(times, reverse=True)
    assert times[-1] <= START < times[-2]
    assert len(history) == 11
    assert all(3.06 * 0.3 * 0.8 <= float(point["SpotPrice"]) <= 3.06 * 0.3 * 1.2 for point in history)
    now = {"InstanceTypes": ["g5.xlarge"], "StartTime": START + 86_400.0}
    points = ours.ec2.describe_spot_price_history(**now, ProductDescriptions=["Linux/UNIX"])["SpotPriceHistory"]
    assert sorted(point["AvailabilityZone"][-1] for point in points) == list("abcdf")
    assert ours.ec2.describe_spot_price_history(**now, ProductDescriptions=["Windows"])["SpotPriceHistory"] == []


def test_the_price_list_comes_in_pages_and_must_be_asked_precisely(ours: Cloud) -> None:
    def prices(**attributes: str) -> list[float]:
        asked = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in attributes.items()]
        pages = ours.client("pricing").get_paginator("get_products").paginate(ServiceCode="AmazonEC2", Filters=asked)
        products = [json.loads(text) for page in pages for text in page["PriceList"]]
        terms = [term for product in products for term in product["terms"]["OnDemand"].values()]
        return [float(one["pricePerUnit"]["USD"]) for term in terms for one in term["priceDimensions"].values()]

    plain = {"instanceType": "p3.2xlarge", "regionCode": "us-east-1"}
    used = {"operatingSystem": "Linux", "tenancy": "Shared", "preInstalledSw": "NA", "capacitystatus": "Used"}
    assert prices(**plain, **used) == [3.06]
    assert len(set(prices(**plain))) > 3
    assert len(prices(regionCode="us-east-1", tenancy="Shared")) > 200


@pytest.mark.parametrize("key", sorted(OPERATIONS))
def test_every_operation_is_one_that_boto3_has(key: tuple[str, str]) -> None:
    service, operation = key
    assert operation in operation_names(service).values()
