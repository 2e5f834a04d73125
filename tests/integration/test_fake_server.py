"""The fake over HTTP: real boto3 gets there what the clients in this process get, and a small S3 and metadata."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import botocore.session
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.utils import InstanceMetadataFetcher, InstanceMetadataRegionFetcher

from tests.ec2 import BUCKET
from tests.ec2.core import FakeAws
from tests.ec2.fake_cloud import fake_cloud
from tests.ec2.faults import Fault
from tests.ec2.server import SECRET_KEY, FakeServer, access_key

NOW = 1_800_000_000.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with FakeServer(FakeAws(lambda: NOW), tmp_path_factory.mktemp("s3")) as running:
        running.fake.world.buckets[BUCKET] = running.fake.world.new_bucket(BUCKET)
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


def test_the_signer_decides_the_permissions(server: FakeServer) -> None:
    assert client(server, "sts", "worker").get_caller_identity()["Arn"].endswith("i-0e02ce20000000001")
    with pytest.raises(ClientError, match=r"UnauthorizedOperation.*ec2:DescribeInstances"):
        client(server, "ec2", "worker").describe_instances()
    assert client(server, "ec2", "driver").describe_instances()["Reservations"] == []


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


def test_objects_are_kept_listed_and_removed(server: FakeServer) -> None:
    s3 = client(server, "s3")
    contents = {f"runs/{name}": name.encode() * 3 for name in ("a b", "ä/ö", "c+d&<e>", "x/y/z", ".hidden", "..")}
    for key, content in contents.items():
        s3.put_object(Bucket=BUCKET, Key=key, Body=content)
    s3.put_object(Bucket=BUCKET, Key="other", Body=b"")
    for key, content in contents.items():
        assert s3.get_object(Bucket=BUCKET, Key=key)["Body"].read() == content
        assert s3.head_object(Bucket=BUCKET, Key=key)["ContentLength"] == len(content)
    pages = partial(s3.get_paginator("list_objects_v2").paginate, Bucket=BUCKET, Prefix="runs/")
    assert [found["Key"] for page in pages() for found in page["Contents"]] == sorted(contents)
    top = [found["Prefix"] for page in pages(Delimiter="/") for found in page.get("CommonPrefixes", ())]
    assert top == ["runs/x/", "runs/ä/"]
    s3.delete_object(Bucket=BUCKET, Key="runs/a b")
    s3.delete_object(Bucket=BUCKET, Key="runs/a b")
    s3.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": key} for key in contents]})
    assert s3.list_objects_v2(Bucket=BUCKET, Prefix="runs/")["KeyCount"] == 0


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


def test_botocore_finds_credentials_and_region_of_the_drivers_machine(server: FakeServer) -> None:
    config = {"ec2_metadata_service_endpoint": server.metadata_url(), "ec2_metadata_v1_disabled": True}
    credentials = InstanceMetadataFetcher(env={}, config=config).retrieve_iam_role_credentials()
    assert credentials["access_key"] == access_key("driver")
    assert InstanceMetadataRegionFetcher(env={}, config=config).retrieve_region() == "us-east-1"


def test_metadata_wants_a_token_that_is_of_this_machine_and_not_too_old(tmp_path: Path) -> None:
    now = [NOW]
    fake = FakeAws(lambda: now[0], pending_s=0.0)
    launched = fake.launched("g4dn.xlarge", MinCount=2, MaxCount=2)
    machine = launched.instance_id
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
        assert vpc == (200, launched.vpc_id)
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


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--capacity", "g4dn.xlarge", "true"], 2, "TYPE[:ZONE][:MARKET]=N"),
        pytest.param(["no-such-command"], 127, "no-such-command: No such file", marks=pytest.mark.long),
    ],
)
def test_options_that_say_nothing_and_unknown_commands_are_reported(words: list[str], code: int, text: str) -> None:
    refused = on_fake_ec2([], *words)
    assert refused.returncode == code
    assert text in refused.stderr.replace("\n", " ")
