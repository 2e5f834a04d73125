"""What else an account has in the fake: networks, types, images, spot prices, parameters, quotas, prices, buckets."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from botocore.exceptions import (
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    NoCredentialsError,
    ReadTimeoutError,
)

from tests.builders.fake_launches import START, Rental, code_of
from tests.ec2 import BUCKET, FakeAws, FakeCall, FakeDisconnect, FakeError, Fault
from tests.ec2.client import operation_names, service_model
from tests.ec2.operations import OPERATIONS

OWNED = [{"ResourceType": "security-group", "Tags": [{"Key": "rubberband:owner", "Value": "rubberband"}]}]
FAMILIES = {"p3.2xlarge": "L-417A185B", "g5.xlarge": "L-DB2E81BA", "m7i.large": "L-1216C47A"}


@pytest.fixture
def rental() -> Rental:
    return Rental("admin")


def client(rental: Rental, service: str) -> Any:
    return rental.fake.session("admin").client(service)


def refused(call: Any, **params: Any) -> str:
    with pytest.raises(ClientError) as error:
        call(**params)
    return code_of(error.value)


def filters(**values: str) -> list[dict[str, Any]]:
    return [{"Name": name.replace("_", "-"), "Values": [value]} for name, value in values.items()]


@pytest.mark.parametrize("key", sorted(OPERATIONS))
def test_every_operation_is_one_that_boto3_has(key: tuple[str, str]) -> None:
    service, operation = key
    assert operation in operation_names(service).values()


@pytest.mark.parametrize(
    ("service", "name", "params"),
    [
        ("ec2", "describe_vpcs", {}),
        ("ec2", "describe_subnets", {}),
        ("ec2", "describe_security_groups", {}),
        ("ec2", "describe_instance_types", {}),
        ("ec2", "describe_instance_type_offerings", {}),
        ("ec2", "describe_images", {}),
        ("ec2", "describe_spot_price_history", {"InstanceTypes": ["g5.xlarge"]}),
        ("ec2", "describe_instances", {}),
        ("sts", "get_caller_identity", {}),
        ("service-quotas", "get_service_quota", {"ServiceCode": "ec2", "QuotaCode": "L-417A185B"}),
        ("s3", "list_objects_v2", {"Bucket": BUCKET}),
    ],
)
def test_results_have_only_what_the_service_s_model_has(service: str, name: str, params: dict[str, Any]) -> None:
    result = getattr(Rental("admin").fake.session("admin").client(service), name)(**params)
    del result["ResponseMetadata"]
    _check_shape(result, service_model(service).operation_model(operation_names(service)[name]).output_shape)


def _check_shape(value: Any, shape: Any) -> None:
    if shape.type_name == "structure":
        assert set(value) <= set(shape.members), shape.name
        for key, member in value.items():
            _check_shape(member, shape.members[key])
    elif shape.type_name == "list":
        for member in value:
            _check_shape(member, shape.member)
    else:
        kinds = {"timestamp": datetime, "boolean": bool, "integer": int, "long": int, "double": float}
        assert isinstance(value, kinds.get(shape.type_name, str)), shape.name


def test_a_default_network_has_a_subnet_in_each_zone(rental: Rental) -> None:
    vpc = rental.ec2.describe_vpcs(Filters=filters(is_default="true"))["Vpcs"][0]
    subnets = rental.ec2.describe_subnets(Filters=filters(vpc_id=vpc["VpcId"]))["Subnets"]
    assert [one["AvailabilityZone"][-1] for one in subnets] == list("abcdef")


def test_a_group_is_made_opened_to_itself_and_deleted(rental: Rental) -> None:
    vpc = rental.ec2.describe_vpcs()["Vpcs"][0]["VpcId"]
    wanted = {"GroupName": "rubberband", "Description": "d", "VpcId": vpc, "TagSpecifications": OWNED}
    group = rental.ec2.create_security_group(**wanted)["GroupId"]
    assert refused(rental.ec2.create_security_group, **wanted) == "InvalidGroup.Duplicate"
    itself = {"IpProtocol": "tcp", "FromPort": 0, "ToPort": 65535, "UserIdGroupPairs": [{"GroupId": group}]}
    rental.ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[itself])
    again = refused(rental.ec2.authorize_security_group_ingress, GroupId=group, IpPermissions=[itself])
    assert again == "InvalidPermission.Duplicate"
    found = rental.ec2.describe_security_groups(Filters=filters(group_name="rubberband", vpc_id=vpc))["SecurityGroups"]
    ingress = found[0]["IpPermissions"]
    assert [pair["GroupId"] for rule in ingress for pair in rule["UserIdGroupPairs"]] == [group]
    assert ingress[0]["IpRanges"] == []
    rental.ec2.delete_security_group(GroupId=group)
    assert refused(rental.ec2.describe_security_groups, GroupIds=[group]) == "InvalidGroup.NotFound"


def test_a_group_that_an_instance_has_is_not_deleted(rental: Rental) -> None:
    group = rental.ec2.create_security_group(GroupName="g", Description="d", TagSpecifications=OWNED)["GroupId"]
    instance = rental.launch(SecurityGroupIds=[group])
    rental.ec2.terminate_instances(InstanceIds=[instance])
    assert refused(rental.ec2.delete_security_group, GroupId=group) == "DependencyViolation"
    rental.clock.sleep(30)
    rental.ec2.delete_security_group(GroupId=group)


def test_the_driver_changes_no_group_but_its_own() -> None:
    rental = Rental()
    default = next(iter(rental.fake.world.groups))
    assert refused(rental.ec2.delete_security_group, GroupId=default) == "UnauthorizedOperation"


def test_types_have_the_facts_that_a_plan_needs(rental: Rental) -> None:
    [p3] = rental.ec2.describe_instance_types(InstanceTypes=["p3.8xlarge"])["InstanceTypes"]
    assert p3["VCpuInfo"]["DefaultVCpus"] == 32
    assert [(gpu["Name"], gpu["Count"], gpu["MemoryInfo"]["SizeInMiB"]) for gpu in p3["GpuInfo"]["Gpus"]] == [
        ("V100", 4, 16384)
    ]
    [arm] = rental.ec2.describe_instance_types(InstanceTypes=["g5g.xlarge"])["InstanceTypes"]
    assert arm["ProcessorInfo"]["SupportedArchitectures"] == ["arm64"]
    assert refused(rental.ec2.describe_instance_types, InstanceTypes=["p9.huge"]) == "InvalidInstanceType"


def test_zones_offer_what_can_be_launched_there(rental: Rental) -> None:
    asked = {"LocationType": "availability-zone", "Filters": filters(instance_type="p5.48xlarge")}
    offered = rental.ec2.describe_instance_type_offerings(**asked)["InstanceTypeOfferings"]
    assert [one["Location"][-1] for one in offered] == list("abc")
    with pytest.raises(ClientError, match="Unsupported"):
        rental.launch(InstanceType="p5.48xlarge", Placement={"AvailabilityZone": "us-east-1d"})


@pytest.mark.parametrize("architecture", ["x86_64", "arm64"])
def test_public_parameters_name_images_that_exist(rental: Rental, architecture: str) -> None:
    name = f"/aws/service/deeplearning/ami/{architecture}/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
    image = client(rental, "ssm").get_parameter(Name=name)["Parameter"]["Value"]
    shown = rental.ec2.describe_images(ImageIds=[image])["Images"][0]
    assert (shown["Architecture"], shown["RootDeviceName"]) == (architecture, "/dev/sda1")


def test_an_image_that_does_not_exist_is_not_described(rental: Rental) -> None:
    assert refused(rental.ec2.describe_images, ImageIds=["ami-00000000"]) == "InvalidAMIID.NotFound"


def test_spot_prices_move_within_their_bounds_and_by_the_hour(rental: Rental) -> None:
    rental.clock.sleep(86_400)
    history = rental.ec2.describe_spot_price_history(
        InstanceTypes=["p3.2xlarge"],
        ProductDescriptions=["Linux/UNIX"],
        AvailabilityZone="us-east-1a",
        StartTime=datetime.fromtimestamp(START, UTC),
        EndTime=datetime.fromtimestamp(START + 36_000, UTC),
    )["SpotPriceHistory"]
    times = [point["Timestamp"].timestamp() for point in history]
    assert times == sorted(times, reverse=True)
    assert times[-1] <= START < times[-2]
    assert len(history) == 11
    assert all(3.06 * 0.3 * 0.8 <= float(point["SpotPrice"]) <= 3.06 * 0.3 * 1.2 for point in history)


def test_the_spot_prices_of_now_are_one_for_each_zone(rental: Rental) -> None:
    now = {"InstanceTypes": ["g5.xlarge"], "StartTime": START, "ProductDescriptions": ["Linux/UNIX"]}
    history = rental.ec2.describe_spot_price_history(**now)["SpotPriceHistory"]
    assert sorted(point["AvailabilityZone"][-1] for point in history) == list("abcdf")
    assert (
        rental.ec2.describe_spot_price_history(**now | {"ProductDescriptions": ["Windows"]})["SpotPriceHistory"] == []
    )


def test_secrets_are_sealed_until_they_are_decrypted(rental: Rental) -> None:
    ssm, name = client(rental, "ssm"), "/rubberband/rubberband/ray-token"
    assert refused(ssm.get_parameter, Name=name) == "ParameterNotFound"
    assert ssm.put_parameter(Name=name, Value="secret", Type="SecureString")["Version"] == 1
    assert refused(ssm.put_parameter, Name=name, Value="other", Type="SecureString") == "ParameterAlreadyExists"
    assert ssm.put_parameter(Name=name, Value="other", Type="SecureString", Overwrite=True)["Version"] == 2
    assert "other" not in ssm.get_parameter(Name=name)["Parameter"]["Value"]
    assert ssm.get_parameter(Name=name, WithDecryption=True)["Parameter"]["Value"] == "other"
    ssm.delete_parameter(Name=name)
    assert refused(ssm.delete_parameter, Name=name) == "ParameterNotFound"


def test_only_advanced_parameters_are_long_or_expire_and_none_names_another(rental: Rental) -> None:
    ssm, word = client(rental, "ssm"), {"Name": "/rubberband/rubberband/word", "Type": "SecureString"}
    ends = json.dumps(
        [{"Type": "Expiration", "Version": "1.0", "Attributes": {"Timestamp": "2100-01-01T00:00:00.000Z"}}]
    )
    for given in ({"Value": "x" * 4097}, {"Value": "x", "Policies": ends}, {"Value": "{{x}}", "Tier": "Advanced"}):
        assert refused(ssm.put_parameter, **word, **given) == "ValidationException"
    ssm.put_parameter(**word, Value="x" * 8192, Policies=ends, Tier="Advanced")
    assert ssm.get_parameter(Name=word["Name"], WithDecryption=True)["Parameter"]["Value"] == "x" * 8192


@pytest.mark.parametrize(
    ("principal", "named"), [("driver", "rubberband-head"), ("worker", "rubberband-worker"), ("admin", "admin")]
)
def test_a_caller_can_ask_for_its_own_identity(rental: Rental, principal: str, named: str) -> None:
    who = rental.fake.session(principal).client("sts").get_caller_identity()
    assert who["Arn"].split("/")[1] == named


@pytest.mark.parametrize(("instance_type", "code"), FAMILIES.items())
def test_quotas_are_those_that_launches_are_held_to(rental: Rental, instance_type: str, code: str) -> None:
    rental.fake.world.quotas_vcpus[code] = 0
    quotas = client(rental, "service-quotas")
    assert quotas.get_service_quota(ServiceCode="ec2", QuotaCode=code)["Quota"]["Value"] == 0.0
    with pytest.raises(ClientError, match="VcpuLimitExceeded"):
        rental.launch(InstanceType=instance_type)
    assert refused(quotas.get_service_quota, ServiceCode="ec2", QuotaCode="L-0") == "NoSuchResourceException"


def on_demand_prices(rental: Rental, **attributes: str) -> list[float]:
    asked = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in attributes.items()]
    pages = client(rental, "pricing").get_paginator("get_products").paginate(ServiceCode="AmazonEC2", Filters=asked)
    products = [json.loads(text) for page in pages for text in page["PriceList"]]
    return [
        float(dimension["pricePerUnit"]["USD"])
        for product in products
        for term in product["terms"]["OnDemand"].values()
        for dimension in term["priceDimensions"].values()
    ]


def test_the_price_list_must_be_asked_precisely(rental: Rental) -> None:
    plain = {"instanceType": "p3.2xlarge", "regionCode": "us-east-1"}
    used = {"operatingSystem": "Linux", "tenancy": "Shared", "preInstalledSw": "NA", "capacitystatus": "Used"}
    assert on_demand_prices(rental, **plain, **used) == [3.06]
    assert len(set(on_demand_prices(rental, **plain))) > 3
    by_location = {"instanceType": "p3.2xlarge", "location": "US East (N. Virginia)"}
    assert on_demand_prices(rental, **by_location, **used) == [3.06]


def test_the_price_list_comes_in_pages(rental: Rental) -> None:
    assert len(on_demand_prices(rental, regionCode="us-east-1", tenancy="Shared")) > 200


def test_the_listed_cost_is_the_bill(rental: Rental) -> None:
    rental.launch(InstanceType="g5.xlarge")
    rental.clock.sleep(60)
    assert rental.fake.bill().lines[0].price_usd_per_hour == pytest.approx(1.006)


def test_a_bucket_keeps_what_is_put_into_it(rental: Rental) -> None:
    s3 = client(rental, "s3")
    s3.head_bucket(Bucket=BUCKET)
    s3.put_object(Bucket=BUCKET, Key="a/b", Body=b"content")
    assert s3.get_object(Bucket=BUCKET, Key="a/b")["Body"].read() == b"content"
    assert [one["Key"] for one in s3.list_objects_v2(Bucket=BUCKET, Prefix="a/")["Contents"]] == ["a/b"]
    s3.delete_object(Bucket=BUCKET, Key="a/b")
    assert refused(s3.get_object, Bucket=BUCKET, Key="a/b") == "NoSuchKey"
    assert refused(s3.head_object, Bucket=BUCKET, Key="a/b") == "404"
    assert refused(s3.put_object, Bucket="another", Key="a", Body=b"") == "NoSuchBucket"
    assert refused(s3.head_bucket, Bucket="another") == "404"
    driver = rental.fake.session("driver").client("s3")
    assert refused(driver.put_object, Bucket="another", Key="a", Body=b"") == "AccessDenied"


def test_another_region_has_its_own_zones_and_images() -> None:
    there, here = FakeAws(lambda: START, region="eu-west-1"), FakeAws(lambda: START)
    subnets = there.session("admin").client("ec2").describe_subnets()["Subnets"]
    assert sorted({one["AvailabilityZone"] for one in subnets}) == ["eu-west-1a", "eu-west-1b", "eu-west-1c"]
    assert not set(there.world.images) & set(here.world.images)


class DriverKilled(BaseException):
    """As a signal would."""


@pytest.mark.parametrize(
    ("fault", "raised", "launched"),
    [
        (Fault.throttled(), ClientError, 0),
        (Fault.no_capacity(), ClientError, 0),
        (Fault.server_error(), ClientError, 0),
        (Fault.server_error(took_effect=True), ClientError, 1),
        (Fault.unavailable(took_effect=True), ClientError, 1),
        (Fault.timeout(took_effect=False), ConnectTimeoutError, 0),
        (Fault.timeout(took_effect=True), ReadTimeoutError, 1),
        (Fault(error=FakeDisconnect("connection_closed"), took_effect=True), Exception, 1),
        (Fault(error=DriverKilled()), DriverKilled, 0),
        (Fault(error=DriverKilled(), took_effect=True), DriverKilled, 1),
    ],
)
def test_a_fault_meets_the_call_before_or_after_its_effect(
    fault: Fault, raised: type[BaseException], launched: int
) -> None:
    rental = Rental()
    rental.fake.fault = lambda call: fault if call.operation == "RunInstances" else None
    with pytest.raises(raised):
        rental.launch(ClientToken="t")
    assert len(rental.fake.instances) == launched
    assert rental.fake.calls[-1].took_effect == bool(launched)
    rental.fake.fault = None
    rental.launch(ClientToken="t")
    assert len(rental.fake.instances) == 1


@pytest.mark.parametrize(
    ("fault", "code", "http_status"),
    [
        (Fault.throttled(), "RequestLimitExceeded", 503),
        (Fault.server_error(), "InternalError", 500),
        (Fault.unavailable(), "Unavailable", 503),
        (Fault.no_capacity(), "InsufficientInstanceCapacity", 500),
        (Fault(error=FakeError("ExpiredToken", "The token is expired", 403)), "ExpiredToken", 403),
    ],
)
def test_errors_have_aws_s_codes(fault: Fault, code: str, http_status: int) -> None:
    rental = Rental()
    rental.fake.fault = lambda call: fault
    with pytest.raises(ClientError) as answered:
        rental.look()
    assert code_of(answered.value) == code
    assert answered.value.response["ResponseMetadata"]["HTTPStatusCode"] == http_status


def test_a_fault_may_slow_or_hide_what_is_launched() -> None:
    rental = Rental()
    slow = [Fault.invisible(300.0), Fault(pending_s=1000.0)]
    rental.fake.fault = lambda call: slow.pop(0) if slow else None
    hidden, late = rental.launch(), rental.launch()
    rental.clock.sleep(100)
    assert [one["InstanceId"] for one in rental.look()] == [late]
    assert rental.state(late) == "pending"
    rental.clock.sleep(200)
    assert rental.state(hidden) == "running"


def test_a_look_may_be_stale() -> None:
    rental = Rental()
    instance = rental.launch()
    rental.clock.sleep(100)
    rental.ec2.terminate_instances(InstanceIds=[instance])
    rental.clock.sleep(10)
    looks = [Fault.stale(5.0), Fault.stale(10.5), Fault.stale(100.0), Fault.stale(110.5)]
    rental.fake.fault = lambda call: looks.pop(0)
    states = [[(one["State"]["Name"], "StateReason" in one) for one in rental.look()] for _ in range(4)]
    assert states == [[("shutting-down", True)], [("running", False)], [("pending", False)], []]


def test_the_log_keeps_every_call_and_its_outcome() -> None:
    rental = Rental()
    instance = rental.launch()
    with pytest.raises(ClientError):
        rental.launch(InstanceType="p9.huge")
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
    assert first.params["InstanceType"] == "p3.2xlarge"


def test_anonymous_requests_have_no_credentials() -> None:
    with pytest.raises(NoCredentialsError):
        Rental("nobody").look()


def test_a_region_that_does_not_exist_cannot_be_reached() -> None:
    rental = Rental()
    with pytest.raises(EndpointConnectionError, match="us-est-1"):
        rental.fake.session("driver", region="us-est-1").client("ec2").describe_instances()


def test_a_principal_that_is_not_known_is_refused() -> None:
    with pytest.raises(ClientError, match="AuthFailure"):
        Rental("stranger").look()


def test_a_client_has_only_what_the_service_has() -> None:
    client: Any = Rental().ec2
    with pytest.raises(AttributeError, match="ec2 has no operation run_instance"):
        client.run_instance()
    assert client.can_paginate("describe_instances")
    assert not client.can_paginate("run_instances")
