"""boto3 and the fake's wire understand each other, for any parameters and results that the service models allow."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import boto3
import pytest
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.exceptions import ClientError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.builders.fake_ec2 import pruned
from tests.ec2 import wire

OPERATIONS = [
    ("ec2", "RunInstances"),
    ("ec2", "DescribeInstances"),
    ("ec2", "TerminateInstances"),
    ("ec2", "DescribeInstanceTypes"),
    ("ec2", "DescribeImages"),
    ("ec2", "DescribeRouteTables"),
    ("ec2", "DescribeSnapshots"),
    ("ec2", "DescribeSubnets"),
    ("ec2", "DescribeSpotPriceHistory"),
    ("ec2", "CreateSecurityGroup"),
    ("ec2", "AuthorizeSecurityGroupIngress"),
    ("ec2", "CreateTags"),
    ("ssm", "GetParameter"),
    ("ssm", "GetParameters"),
    ("ssm", "PutParameter"),
    ("sts", "GetCallerIdentity"),
    ("sts", "AssumeRole"),
    ("service-quotas", "GetServiceQuota"),
    ("pricing", "GetProducts"),
    ("iam", "CreatePolicy"),
]
_DEPTH = 5
_CHARACTERS = st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"], exclude_characters="\ufffe\uffff")
_INSTANTS = st.integers(0, 4_000_000_000).map(lambda at: datetime.fromtimestamp(at, UTC))


def values(shape: Any, depth: int = 0) -> st.SearchStrategy[Any]:
    """Values of a shape; required members always, others sometimes, nothing that the wire cannot say (empty lists)."""
    match shape.type_name:
        case "structure":
            return _structures(shape, depth)
        case "list":
            return st.lists(values(shape.member, depth + 1), min_size=1, max_size=2)
        case "map":
            return st.dictionaries(
                st.text(_CHARACTERS, min_size=1, max_size=8), values(shape.value, depth + 1), min_size=1, max_size=2
            )
        case "string":
            least = shape.metadata.get("min", 0)
            return (
                st.sampled_from(shape.enum) if shape.enum else st.text(_CHARACTERS, min_size=least, max_size=least + 8)
            )
        case "integer" | "long":
            return st.integers(shape.metadata.get("min", 0), min(shape.metadata.get("max", 10**6), 10**6))
        case "float" | "double":
            return st.floats(0, 1e6, allow_nan=False).map(lambda x: math.floor(x * 64) / 64)
        case "boolean":
            return st.booleans()
        case "blob":
            return st.binary(max_size=8)
        case "timestamp":
            return _INSTANTS
    raise AssertionError(shape.type_name)


def _structures(shape: Any, depth: int) -> st.SearchStrategy[dict[str, Any]]:
    required = {name: values(shape.members[name], depth + 1) for name in shape.required_members}
    others = [] if depth >= _DEPTH else [name for name in shape.members if name not in shape.required_members]
    if not others:
        return st.fixed_dictionaries(required)
    chosen = st.lists(st.sampled_from(others), min_size=0 if required else 1, max_size=3, unique=True)
    return chosen.flatmap(
        lambda names: st.fixed_dictionaries(required | {name: values(shape.members[name], depth + 1) for name in names})
    )


class Wire:
    """Stands where the network would: decodes what boto3 sends, and answers with `result` (or raises its error)."""

    def __init__(self) -> None:
        self.operation = ""
        self.params: Mapping[str, Any] = {}
        self.response = wire.Response()
        self.clients: dict[str, Any] = {}

    def client(self, service: str) -> Any:
        if service not in self.clients:
            keys = {"aws_access_key_id": "AKIAEXAMPLE", "aws_secret_access_key": "secret"}
            client = boto3.client(service, region_name="us-east-1", **keys)
            client.meta.events.register("before-send", self.send)
            self.clients[service] = client
        return self.clients[service]

    def call(self, service: str, operation: str, params: Mapping[str, Any], response: wire.Response) -> Any:
        self.response = response
        client = self.client(service)
        names = {api: python for python, api in client.meta.method_to_api_mapping.items()}
        return getattr(client, names[operation])(**params)

    def send(self, request: AWSPreparedRequest, **_: Any) -> AWSResponse:
        headers = {
            name: value.decode() if isinstance(value, bytes) else value for name, value in request.headers.items()
        }
        caller = wire.caller(headers)
        assert caller is not None
        assert (caller.access_key, caller.region) == ("AKIAEXAMPLE", "us-east-1")
        body = request.body.encode() if isinstance(request.body, str) else request.body
        self.operation, self.params = wire.decode(caller.service, headers, body)
        return AWSResponse(request.url, self.response.status, dict(self.response.headers), Raw(self.response.body))


class Raw:
    """A body as urllib3 hands it over."""

    def __init__(self, body: bytes) -> None:
        self.body = body

    def stream(self, **_: Any) -> Any:
        yield self.body


LINE = Wire()


@pytest.mark.by_default(6)
@pytest.mark.parametrize(("service", "operation"), OPERATIONS)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_boto3_exchanges_the_same_messages_as_the_server(service: str, operation: str, data: st.DataObject) -> None:
    model = wire.service_model(service).operation_model(operation)
    params = data.draw(values(model.input_shape)) if model.input_shape else {}
    result = data.draw(values(model.output_shape)) if model.output_shape else {}
    received = LINE.call(service, operation, params, wire.encode(service, operation, result))
    received.pop("ResponseMetadata")
    assert LINE.operation == operation
    assert pruned(received) == pruned(result)
    invented = [name for name in model.idempotent_members if name not in params]
    sent = {name: value for name, value in LINE.params.items() if name not in invented}
    assert pruned(sent) == pruned(as_sent(params, operation))


def as_sent(params: Mapping[str, Any], operation: str) -> dict[str, Any]:
    """boto3 encodes UserData itself."""
    encoded = dict(params)
    if operation == "RunInstances" and "UserData" in params:
        encoded["UserData"] = base64.b64encode(params["UserData"].encode()).decode()
    return encoded


@pytest.mark.parametrize("service", ["ec2", "ssm", "sts", "service-quotas", "pricing"])
def test_errors_arrive_with_code_message_and_status(service: str) -> None:
    operation = {"ec2": "DescribeRegions", "ssm": "DescribeParameters", "sts": "GetCallerIdentity"}.get(
        service, "ListServices" if service == "service-quotas" else "DescribeServices"
    )
    response = wire.encode_error(service, "SomeCode", 'No <b> & "c"', 418)
    with pytest.raises(ClientError) as caught:
        LINE.call(service, operation, {}, response)
    assert caught.value.response["Error"]["Code"] == "SomeCode"
    assert caught.value.response["Error"]["Message"] == 'No <b> & "c"'
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 418


@pytest.mark.parametrize(
    ("service", "headers", "body"),
    [
        ("ec2", {}, b"Action=NoSuchAction"),
        ("ec2", {}, b"Version=2016-11-15"),
        ("ec2", {}, b"Action=RunInstances&MinCount=many"),
        ("ec2", {}, b"Action=DescribeInstances&Filter=x"),
        ("ssm", {"X-Amz-Target": "AmazonSSM.GetParameter"}, b"{"),
        ("ssm", {}, b"{}"),
        ("no-such-service", {}, b""),
    ],
)
def test_malformed_requests_are_refused(service: str, headers: Mapping[str, str], body: bytes) -> None:
    with pytest.raises(wire.MalformedRequest):
        wire.decode(service, headers, body)


def test_a_request_without_a_signature_has_no_caller() -> None:
    assert wire.caller({}) is None
    assert wire.caller({"Authorization": "Basic eA=="}) is None
