"""The fake over HTTP: real boto3 gets there what the clients in this process get, and a small S3 and metadata."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import boto3
import botocore.session
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.utils import InstanceMetadataFetcher, InstanceMetadataRegionFetcher

from tests.builders.fake_ec2 import pruned
from tests.ec2.core import FakeAws
from tests.ec2.fake_cloud import fake_cloud
from tests.ec2.faults import FakeCall, Fault
from tests.ec2.operations import OPERATIONS
from tests.ec2.server import SECRET_KEY, FakeServer, access_key
from tests.ec2.storage import decode_chunks

NOW = 1_800_000_000.0
BUCKET = "bucket"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with FakeServer(FakeAws(lambda: NOW), tmp_path_factory.mktemp("s3")) as running:
        running.storage.make_bucket(BUCKET)
        yield running


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def client(server: FakeServer, service: str, principal: str = "admin", region: str = "us-east-1") -> Any:
    return boto3.client(
        service,
        region_name=region,
        endpoint_url=server.url,
        aws_access_key_id=access_key(principal),
        aws_secret_access_key=SECRET_KEY,
        config=Config(retries={"total_max_attempts": 1}, read_timeout=120),
    )


def outcome(clients: Callable[[str], Any], service: str, method: str, params: Mapping[str, Any]) -> Any:
    try:
        answer = getattr(clients(service), method)(**params)
    except ClientError as error:
        said = {key: value for key, value in error.response["Error"].items() if key != "Type"}  # of the wire of IAM
        return said, error.response["ResponseMetadata"]["HTTPStatusCode"]
    return pruned({name: value for name, value in answer.items() if name != "ResponseMetadata"})


def a_life(clients: Callable[[str], Any]) -> list[tuple[str, str, Any]]:
    """Every operation of the fake, called so that each has something to say; with what came of it."""
    lines: list[tuple[str, str, Any]] = []

    def ask(service: str, method: str, **params: Any) -> Any:
        answer = outcome(clients, service, method, params)
        lines.append((service, method, answer))
        return answer

    image = ask("ec2", "describe_images", Filters=[{"Name": "architecture", "Values": ["x86_64"]}])["Images"][0]
    vpc = ask("ec2", "describe_vpcs", Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"][0]["VpcId"]
    subnet = ask("ec2", "describe_subnets", Filters=[{"Name": "vpc-id", "Values": [vpc]}])["Subnets"][0]["SubnetId"]
    ask("ec2", "describe_route_tables", Filters=[{"Name": "vpc-id", "Values": [vpc]}])
    group = ask("ec2", "create_security_group", GroupName="ours", Description="x", VpcId=vpc)["GroupId"]
    rule = {"IpProtocol": "tcp", "FromPort": 0, "ToPort": 65535, "UserIdGroupPairs": [{"GroupId": group}]}
    ask("ec2", "authorize_security_group_ingress", GroupId=group, IpPermissions=[rule])
    ask("ec2", "authorize_security_group_egress", GroupId=group, IpPermissions=[rule])
    ask("ec2", "describe_security_groups", GroupIds=[group])
    tags = [{"ResourceType": "placement-group", "Tags": [{"Key": "rubberband:owner", "Value": "a"}]}]
    for _ in range(2):
        ask("ec2", "create_placement_group", GroupName="near", Strategy="cluster", TagSpecifications=tags)
    ask("ec2", "describe_placement_groups", GroupNames=["near"])
    for _ in range(2):
        ask("ec2", "delete_placement_group", GroupName="near")
    launch = {
        "ImageId": image["ImageId"],
        "InstanceType": "g4dn.xlarge",
        "MinCount": 1,
        "MaxCount": 1,
        "ClientToken": "t" * 64,
        "SubnetId": subnet,
        "SecurityGroupIds": [group],
        "UserData": "#!/bin/bash\necho 'ä & <b>'\r\n",
        "InstanceMarketOptions": {
            "MarketType": "spot",
            "SpotOptions": {"MaxPrice": "0.9", "InstanceInterruptionBehavior": "terminate"},
        },
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1},
        "TagSpecifications": [{"ResourceType": "instance", "Tags": [{"Key": "rubberband:owner", "Value": "a b&c"}]}],
        "BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 200, "DeleteOnTermination": True}}],
        "IamInstanceProfile": {"Name": "rubberband-worker"},
        "KeyName": "me",
    }
    ask("ec2", "run_instances", **launch, DryRun=True)
    instance = ask("ec2", "run_instances", **launch)["Instances"][0]["InstanceId"]
    ask("ec2", "run_instances", **launch)
    ask("ec2", "run_instances", **{**launch, "InstanceType": "m5.large"})
    ask("ec2", "run_instances", **{**launch, "InstanceType": "x9.huge", "ClientToken": "u"})
    ask("ec2", "describe_instances", Filters=[{"Name": "tag:rubberband:owner", "Values": ["a b&c"]}])
    assert ask("ec2", "get_console_output", InstanceId=instance, Latest=True)["Output"] == "ä: it boots\r\n"
    ask("ec2", "start_instances", InstanceIds=[instance])
    ask("ec2", "describe_regions")
    ask("ec2", "describe_capacity_reservations", CapacityReservationIds=["cr-0123456789abcdef0"])
    ask("ec2", "describe_capacity_reservations")
    ask(
        "ec2",
        "describe_capacity_block_offerings",
        InstanceType="p5.48xlarge",
        CapacityDurationHours=24,
        InstanceCount=1,
    )
    script = {"DocumentName": "AWS-RunShellScript", "Parameters": {"commands": ["true"]}}
    sent = ask("ssm", "send_command", InstanceIds=[instance], **script)["Command"]["CommandId"]
    ask("ssm", "get_command_invocation", CommandId=sent, InstanceId=instance)
    ask("ec2", "create_tags", Resources=[instance], Tags=[{"Key": "k", "Value": "v"}])
    made = [ask("ec2", "create_image", InstanceId=instance, Name="mine", TagSpecifications=[]) for _ in range(2)]
    ask("ec2", "describe_images", Owners=["self"])
    snapshot = ask("ec2", "describe_snapshots", OwnerIds=["self"])["Snapshots"][0]["SnapshotId"]
    ask("ec2", "delete_snapshot", SnapshotId=snapshot)
    for _ in range(2):
        ask("ec2", "deregister_image", ImageId=made[0]["ImageId"])
        ask("ec2", "delete_snapshot", SnapshotId=snapshot)
    ask("ec2", "delete_security_group", GroupId=group)
    ask("ec2", "terminate_instances", InstanceIds=[instance])
    ask("ec2", "terminate_instances", InstanceIds=["i-0123456789abcdef0"])
    ask("ec2", "describe_instances", InstanceIds=[instance])
    ask("ec2", "describe_instance_types", InstanceTypes=["p3.8xlarge", "m5.large"])
    ask("ec2", "describe_instance_types", MaxResults=5)
    ask(
        "ec2",
        "describe_instance_type_offerings",
        LocationType="availability-zone",
        Filters=[{"Name": "instance-type", "Values": ["g4dn.xlarge"]}],
    )
    ask("ec2", "describe_spot_price_history", InstanceTypes=["g4dn.xlarge"], ProductDescriptions=["Linux/UNIX"])
    ask("sts", "get_caller_identity")
    ask("ssm", "put_parameter", Name="/rubberband/o/ray-token", Value="s3cret", Type="SecureString", Overwrite=True)
    ask("ssm", "get_parameter", Name="/rubberband/o/ray-token", WithDecryption=True)
    ask("ssm", "delete_parameter", Name="/rubberband/o/ray-token")
    ask("ssm", "get_parameter", Name="/rubberband/o/ray-token")
    ask("service-quotas", "get_service_quota", ServiceCode="ec2", QuotaCode="L-DB2E81BA")
    ask("service-quotas", "get_service_quota", ServiceCode="ec2", QuotaCode="L-00000000")
    ask("service-quotas", "get_aws_default_service_quota", ServiceCode="ec2", QuotaCode="L-DB2E81BA")
    price_filter = {"Type": "TERM_MATCH", "Field": "instanceType", "Value": "g4dn.xlarge"}
    schedule = {
        "Name": f"rubberband-{instance}",
        "ScheduleExpression": "at(2027-02-01T00:00:00)",
        "FlexibleTimeWindow": {"Mode": "OFF"},
        "ActionAfterCompletion": "DELETE",
        "Target": {
            "Arn": "arn:aws:scheduler:::aws-sdk:ec2:terminateInstances",
            "RoleArn": "arn:aws:iam::123456789012:role/rubberband-guard",
            "Input": json.dumps({"InstanceIds": [instance]}),
        },
    }
    for method in ("update_schedule", "create_schedule", "create_schedule", "update_schedule"):
        ask("scheduler", method, **schedule)
    for _ in range(2):
        ask("scheduler", "delete_schedule", Name=schedule["Name"])
    ask("pricing", "get_products", ServiceCode="AmazonEC2", Filters=[price_filter], FormatVersion="aws_v1")
    set_up(ask)
    return lines


def set_up(ask: Callable[..., Any]) -> None:
    """What setting an account up asks for, and clearing it."""
    trust = json.dumps({"Statement": [{"Effect": "Allow", "Principal": {"Service": "scheduler.amazonaws.com"}}]})
    role, profile, held = {"RoleName": "mine"}, {"InstanceProfileName": "mine"}, {"PolicyName": "p&q"}
    for _ in range(2):
        ask("iam", "create_role", **role, AssumeRolePolicyDocument=trust, Tags=[{"Key": "k", "Value": "v"}])
        ask("iam", "create_instance_profile", **profile)
    ask("iam", "tag_role", **role, Tags=[{"Key": "k", "Value": "w"}])
    ask("iam", "get_role", **role)
    ask("iam", "update_assume_role_policy", **role, PolicyDocument=trust)
    ask("iam", "put_role_policy", **role, **held, PolicyDocument=trust)
    ask("iam", "put_role_policy", **role, **held, PolicyDocument="{")
    ask("iam", "list_role_policies", **role)
    ask("iam", "list_attached_role_policies", **role)
    ask("iam", "detach_role_policy", **role, PolicyArn="arn:aws:iam::aws:policy/ReadOnlyAccess")
    for method in ("add_role_to_instance_profile", "add_role_to_instance_profile"):
        ask("iam", method, **profile, **role)
    ask("iam", "get_instance_profile", **profile)
    ask("iam", "delete_role", **role)
    for _ in range(2):
        ask("iam", "get_role_policy", **role, **held)
        ask("iam", "delete_role_policy", **role, **held)
        ask("iam", "remove_role_from_instance_profile", **profile, **role)
        ask("iam", "delete_instance_profile", **profile)
        ask("iam", "delete_role", **role)
    ask("iam", "create_service_linked_role", AWSServiceName="spot.amazonaws.com")
    quota = {"ServiceCode": "ec2", "QuotaCode": "L-DB2E81BA"}
    for vcpus in (4000.0, 5000.0, 1.0):
        ask("service-quotas", "request_service_quota_increase", **quota, DesiredValue=vcpus)
    ask("service-quotas", "list_requested_service_quota_change_history_by_quota", **quota)
    ask("freetier", "get_account_plan_state")
    limit = {"Amount": "20", "Unit": "USD"}
    budget = {"BudgetName": "b", "BudgetLimit": limit, "TimeUnit": "MONTHLY", "BudgetType": "COST"}
    for _ in range(2):
        ask("budgets", "create_budget", AccountId="123456789012", Budget=budget)
    for method in ("describe_budget", "delete_budget", "describe_budget"):
        ask("budgets", method, AccountId="123456789012", BudgetName="b")


@pytest.mark.long
def test_boto3_gets_from_the_server_what_it_gets_in_process(tmp_path: Path) -> None:
    fakes = [FakeAws(lambda: NOW, pending_s=0.0) for _ in range(2)]
    for fake in fakes:
        fake.world.console = lambda _: "ä: it boots\r\n"
        fake.world.agent_s = fake.world.command_known_s = 0.0
    expected = a_life(fakes[0].session("admin").client)
    with FakeServer(fakes[1], tmp_path) as fresh:
        clients: dict[str, Any] = {}
        found = a_life(lambda service: clients.setdefault(service, client(fresh, service)))
    for served, known in zip(found, expected, strict=True):
        assert served == known
    called = {(call.service, call.operation) for call in fresh.fake.calls}
    assert called == {operation for operation in OPERATIONS if operation[0] != "s3"}


def test_the_signer_decides_the_permissions(server: FakeServer) -> None:
    assert client(server, "sts", "worker").get_caller_identity()["Arn"].endswith("i-0e02ce20000000001")
    with pytest.raises(ClientError, match=r"UnauthorizedOperation.*ec2:DescribeInstances"):
        client(server, "ec2", "worker").describe_instances()
    assert client(server, "ec2", "driver").describe_instances()["Reservations"] == []


@pytest.mark.parametrize(
    ("service", "method", "code"),
    [
        ("ec2", "describe_instances", "AuthFailure"),
        ("sts", "get_caller_identity", "InvalidClientTokenId"),
        ("ssm", "describe_parameters", "UnrecognizedClientException"),
        ("s3", "list_buckets", "InvalidAccessKeyId"),
    ],
)
def test_an_unknown_key_is_refused_as_each_service_does(
    server: FakeServer, service: str, method: str, code: str
) -> None:
    with pytest.raises(ClientError, match=code):
        getattr(client(server, service, "nobody"), method)()


def test_another_region_and_an_unsigned_request_are_refused(server: FakeServer) -> None:
    with pytest.raises(ClientError, match="AuthFailure"):
        client(server, "ec2", region="eu-nowhere-1").describe_instances()
    assert client(server, "ec2", region="eu-west-1").describe_instances()["Reservations"] == []
    unsigned = boto3.client(
        "ec2", region_name="us-east-1", endpoint_url=server.url, config=Config(signature_version=botocore.UNSIGNED)
    )
    with pytest.raises(ClientError, match="MissingAuthenticationToken"):
        unsigned.describe_instances()


def test_a_lost_answer_is_a_lost_connection_and_the_call_took_effect(tmp_path: Path) -> None:
    fake = FakeAws(lambda: NOW)
    with FakeServer(fake, tmp_path) as fresh:
        ec2 = client(fresh, "ec2")
        fake.fault = lambda call: Fault.timeout(took_effect=True)
        with pytest.raises(BotoCoreError):
            ec2.create_security_group(GroupName="ours", Description="x")
        fake.fault = None
        groups = ec2.describe_security_groups()["SecurityGroups"]
    assert "ours" in [group["GroupName"] for group in groups]


def test_the_fake_ec2_sees_nothing_of_the_users_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_ENDPOINT_URL_EC2", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS"):
        monkeypatch.setenv(name, "mine")
    with fake_cloud(tmp_path) as aws:
        assert "mine" not in aws.environment.values()
        assert aws.environment["AWS_ENDPOINT_URL"] == aws.server.url


def test_boto3_tries_again_when_it_is_throttled(tmp_path: Path) -> None:
    def first_is_throttled(call: FakeCall) -> Fault | None:
        return Fault.throttled() if call.index == 0 else None

    fake = FakeAws(lambda: NOW)
    fake.fault = first_is_throttled
    with FakeServer(fake, tmp_path) as fresh:
        keys = {"aws_access_key_id": access_key("admin"), "aws_secret_access_key": SECRET_KEY}
        ec2 = boto3.client("ec2", region_name="us-east-1", endpoint_url=fresh.url, **keys)
        assert ec2.describe_instances()["Reservations"] == []
    assert [call.outcome for call in fake.calls] == ["RequestLimitExceeded", "ok"]


def test_objects_are_kept_listed_and_removed(server: FakeServer) -> None:
    s3 = client(server, "s3")
    contents = {f"runs/{name}": name.encode() * 3 for name in ("a b", "ä/ö", "c+d&<e>", "x/y/z", ".hidden", "..")}
    for key, content in contents.items():
        s3.put_object(Bucket=BUCKET, Key=key, Body=content)
    s3.put_object(Bucket=BUCKET, Key="other", Body=b"")
    for key, content in contents.items():
        assert s3.get_object(Bucket=BUCKET, Key=key)["Body"].read() == content
        assert s3.head_object(Bucket=BUCKET, Key=key)["ContentLength"] == len(content)
    pages = s3.get_paginator("list_objects_v2").paginate(
        Bucket=BUCKET, Prefix="runs/", PaginationConfig={"PageSize": 2}
    )
    assert [found["Key"] for page in pages for found in page["Contents"]] == sorted(contents)
    top = s3.list_objects_v2(Bucket=BUCKET, Prefix="runs/", Delimiter="/")
    assert [found["Prefix"] for found in top["CommonPrefixes"]] == ["runs/x/", "runs/ä/"]
    s3.delete_object(Bucket=BUCKET, Key="runs/a b")
    s3.delete_object(Bucket=BUCKET, Key="runs/a b")
    s3.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": key} for key in contents]})
    assert s3.list_objects_v2(Bucket=BUCKET, Prefix="runs/")["KeyCount"] == 0


def test_missing_objects_and_buckets_are_distinguished(server: FakeServer) -> None:
    s3 = client(server, "s3")
    with pytest.raises(s3.exceptions.NoSuchKey):
        s3.get_object(Bucket=BUCKET, Key="none")
    with pytest.raises(s3.exceptions.NoSuchBucket):
        s3.put_object(Bucket="none", Key="k", Body=b"")
    for method, arguments in (("head_bucket", {"Bucket": "none"}), ("head_object", {"Bucket": BUCKET, "Key": "none"})):
        with pytest.raises(ClientError) as caught:
            getattr(s3, method)(**arguments)
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 404
    s3.head_bucket(Bucket=BUCKET)


def test_a_principal_may_do_with_objects_what_its_policy_says(server: FakeServer) -> None:
    worker = client(server, "s3", "worker")
    worker.put_object(Bucket=BUCKET, Key="mine", Body=b"1")
    with pytest.raises(ClientError, match=r"AccessDenied.*s3:CreateBucket"):
        worker.create_bucket(Bucket="another")


def test_large_files_travel_in_parts(server: FakeServer, tmp_path: Path) -> None:
    content = random.Random(0).randbytes(18 * 1024**2)
    (tmp_path / "sent").write_bytes(content)
    s3 = client(server, "s3")
    s3.upload_file(str(tmp_path / "sent"), BUCKET, "large")
    s3.download_file(BUCKET, "large", str(tmp_path / "got"))
    assert (tmp_path / "got").read_bytes() == content
    assert s3.get_object(Bucket=BUCKET, Key="large", Range="bytes=5-9")["Body"].read() == content[5:10]
    s3.delete_object(Bucket=BUCKET, Key="large")


def test_a_body_that_was_damaged_is_not_stored(server: FakeServer) -> None:
    s3 = client(server, "s3")
    with pytest.raises(ClientError, match="BadDigest"):
        s3.put_object(Bucket=BUCKET, Key="damaged", Body=b"content", ChecksumCRC32="AAAAAA==")


def test_chunked_bodies_are_unwrapped() -> None:
    body = b"4;chunk-signature=ab\r\nabcd\r\n3\r\nefg\r\n0\r\nx-amz-checksum-crc32:Nh71Lw==\r\n\r\n"
    assert decode_chunks(body) == (b"abcdefg", {"x-amz-checksum-crc32": "Nh71Lw=="})


def test_botocore_finds_credentials_and_region_of_the_drivers_machine(server: FakeServer) -> None:
    config = {"ec2_metadata_service_endpoint": server.metadata_url(), "ec2_metadata_v1_disabled": True}
    credentials = InstanceMetadataFetcher(env={}, config=config).retrieve_iam_role_credentials()
    assert credentials["access_key"] == access_key("driver")
    assert InstanceMetadataRegionFetcher(env={}, config=config).retrieve_region() == "us-east-1"


def test_metadata_wants_a_token_that_is_of_this_machine_and_not_too_old(tmp_path: Path) -> None:
    now = [NOW]
    fake = FakeAws(lambda: now[0], pending_s=0.0)
    image = next(one for one in fake.world.images.values() if one.architecture == "x86_64")
    launched = (
        fake.session("admin")
        .client("ec2")
        .run_instances(ImageId=image.image_id, InstanceType="g4dn.xlarge", MinCount=2, MaxCount=2)
    )
    machine = launched["Instances"][1]["InstanceId"]
    with FakeServer(fake, tmp_path) as fresh:
        address = fresh.metadata_url(machine) + "/latest/meta-data/"
        assert curl(address + "instance-id")[0] == 401
        assert curl(fresh.metadata_url(machine) + "/latest/api/token", "-X", "PUT")[0] == 400
        mine = ["-H", f"X-aws-ec2-metadata-token: {token(fresh, machine)}"]
        assert curl(address + "instance-id", *mine) == (200, machine)
        assert curl(address + "ami-launch-index", *mine) == (200, "1")
        assert "instance-id\n" in curl(address, *mine)[1]
        mac = curl(address + "mac", *mine)[1]
        vpc = curl(f"{address}network/interfaces/macs/{mac}/vpc-id", *mine)
        assert vpc == (200, launched["Instances"][0]["VpcId"])
        assert curl(address + "iam/security-credentials/", *mine)[0] == 404
        assert curl(address + "instance-id", "-H", f"X-aws-ec2-metadata-token: {token(fresh, 'driver')}")[0] == 401
        now[0] += 61
        assert curl(address + "instance-id", *mine)[0] == 401
        fake.power_off(machine)
        assert curl(address + "instance-id")[0] == 404


def token(server: FakeServer, machine: str) -> str:
    address = server.metadata_url(machine) + "/latest/api/token"
    return curl(address, "-X", "PUT", "-H", "X-aws-ec2-metadata-token-ttl-seconds: 60")[1]


def curl(address: str, *options: str) -> tuple[int, str]:
    command = ["curl", "--silent", "--noproxy", "*", "--write-out", "\n%{http_code}", *options, address]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    body, _, status = answer.rpartition("\n")
    return int(status), body


ASKS_EC2 = """
import sys, boto3
from tests.builders.waiting import eventually
ec2 = boto3.client("ec2")
image = ec2.describe_images(Filters=[{"Name": "architecture", "Values": ["x86_64"]}])["Images"][0]["ImageId"]
tags = [{"Key": "rubberband:owner", "Value": "rubberband"}, {"Key": "rubberband:instance", "Value": "i-001"}]
ec2.run_instances(
    ImageId=image, InstanceType="g4dn.xlarge", MinCount=1, MaxCount=1, MetadataOptions={"HttpTokens": "required"},
    InstanceMarketOptions={"MarketType": sys.argv[1]},
    TagSpecifications=[{"ResourceType": kind, "Tags": tags} for kind in ("instance", "volume")],
    UserData="#!/bin/bash\\necho up; sleep 600",
)
wanted = [{"Name": "instance-state-name", "Values": sys.argv[2:]}]
eventually(lambda: ec2.describe_instances(Filters=wanted)["Reservations"], "the instance")
print("done")
sys.exit(7)
"""


def on_fake_ec2(options: list[str], *command: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "tests.ec2", "--pending", "0.1", *options, *command]
    return subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)


def test_a_command_runs_on_the_fake_ec2_and_is_billed(tmp_path: Path) -> None:
    done = on_fake_ec2(["--dir", str(tmp_path)], sys.executable, "-c", ASKS_EC2, "spot", "running")
    assert (done.returncode, done.stdout) == (7, "done\n"), done.stderr
    assert "still there when the command ended: i-" in done.stderr
    assert "i-001" in done.stderr
    assert "USD for 1 instances" in done.stderr


@pytest.mark.long
def test_spot_instances_are_taken_away_while_the_command_runs(tmp_path: Path) -> None:
    options = ["--dir", str(tmp_path), "--interrupt-every", "0.2", "--notice", "0.1", "--capacity", "*:spot=1"]
    done = on_fake_ec2(options, sys.executable, "-c", ASKS_EC2, "spot", "shutting-down", "terminated")
    assert (done.returncode, done.stdout) == (7, "done\n"), done.stderr
    assert "still there" not in done.stderr


@pytest.mark.long
def test_an_administrator_is_outside_the_vpc(tmp_path: Path) -> None:
    asks = "import boto3; print(boto3.client('sts').get_caller_identity()['Arn'])"
    done = on_fake_ec2(["--dir", str(tmp_path), "--admin"], sys.executable, "-c", asks)
    assert done.stdout.strip().endswith("user/admin")


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--capacity", "g4dn.xlarge"], "TYPE[:ZONE][:MARKET]=N"),
        (["--quota", "L-00000000=3"], "L-DB2E81BA"),
    ],
)
def test_options_that_say_nothing_are_refused(options: list[str], text: str) -> None:
    refused = on_fake_ec2(options, "true")
    assert refused.returncode == 2
    assert text in refused.stderr.replace("\n", " ")


@pytest.mark.long
def test_a_command_that_does_not_exist_is_reported(tmp_path: Path) -> None:
    missing = on_fake_ec2(["--dir", str(tmp_path)], "no-such-command")
    assert missing.returncode == 127
    assert "no-such-command: No such file" in missing.stderr
