"""What can happen to a call of the fake, and what the log keeps of it."""

from __future__ import annotations

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
from tests.ec2 import FakeCall, FakeDisconnect, FakeError, Fault


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
