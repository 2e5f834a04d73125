"""What AWS's errors mean for a request, and what a person is told: one line with the remedy."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl

import pytest
from botocore import exceptions as boto
from botocore.awsrequest import AWSPreparedRequest, AWSResponse, HeadersDict
from botocore.httpsession import URLLib3Session

from rubberband.cloud.aws import capacity
from rubberband.cloud.aws.capacity import quotas
from rubberband.cloud.aws.cleanup import living
from rubberband.cloud.aws.client import check_region, open_session
from rubberband.cloud.aws.errors import explain, missing_action, verdict
from rubberband.cloud.aws.network import choose_subnets, delete_groups, ensure_group, zones_of
from rubberband.cloud.aws.quotes import on_demand_price, spot_prices
from rubberband.errors import InputError
from tests.builders.aws_account import Account, started
from tests.ec2 import filters


def answer(code: str, message: str = "said", status: int = 400, operation: str = "RunInstances") -> boto.ClientError:
    """An error that AWS answers with."""
    response = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return boto.ClientError(response, operation)


class Raw(io.BytesIO):
    """A body as urllib3 hands it on."""

    def stream(self, **_: Any) -> Iterator[bytes]:
        """All of it."""
        yield self.read()


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (answer("InsufficientInstanceCapacity", status=500), "capacity"),
        (answer("SpotMaxPriceTooLow"), "capacity"),
        (answer("Unsupported"), "capacity"),
        (answer("VcpuLimitExceeded"), "quota"),
        (answer("MaxSpotInstanceCountExceeded"), "quota"),
        (answer("RequestLimitExceeded", status=503), "throttled"),
        (answer("InternalError", status=500), "unknown"),
        (answer("SomethingNew", status=502), "unknown"),
        (answer("IdempotentParameterMismatch"), "mismatch"),
        (answer("IdempotentInstanceTerminated"), "mismatch"),
        (answer("InvalidInstanceID.NotFound"), "absent"),
        (answer("UnauthorizedOperation", status=403), "refused"),
        (answer("InvalidAMIID.NotFound"), "refused"),
        (boto.ReadTimeoutError(endpoint_url="u"), "unknown"),
        (boto.ConnectTimeoutError(endpoint_url="u"), "unknown"),
        (boto.EndpointConnectionError(endpoint_url="u"), "unknown"),
        (boto.ConnectionClosedError(endpoint_url="u"), "unknown"),
        (ConnectionResetError(), "unknown"),
        (boto.NoCredentialsError(), "refused"),
        (boto.CredentialRetrievalError(provider="iam-role", error_msg="no answer"), "throttled"),
        (boto.MetadataRetrievalError(error_msg="no answer"), "throttled"),
        (answer("ConflictException", status=409), "unknown"),
        (boto.ParamValidationError(report="r"), "refused"),
    ],
)
def test_the_outcome_of_a_failed_request(error: Exception, meaning: str) -> None:
    assert verdict(error) == meaning


_DENIED = (
    "You are not authorized to perform this operation. User: arn:aws:sts::1:assumed-role/me/x is not authorized to "
    "perform: iam:PassRole on resource: arn:aws:iam::1:role/w because no identity-based policy allows the iam:PassRole "
    "action. Encoded authorization failure message: SECRET"
)


_BY_SCP = "User: arn:me is not authorized to perform: s3:PutObject with an explicit deny in a service control policy"
_BY_POLICY = (
    "User: arn:me is not authorized to perform: ec2:X with an explicit deny in an identity-based policy. Encoded"
)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (boto.NoCredentialsError(), r"no AWS credentials .*aws configure"),
        (boto.PartialCredentialsError(provider="env", cred_var="X"), r"no AWS credentials"),
        (boto.EndpointConnectionError(endpoint_url="https://ec2.us-est-1"), r"us-est-1.*resources\.region"),
        (answer("AuthFailure"), r"does not accept the credentials"),
        (answer("ExpiredToken"), r"expired.*clock"),
        (answer("InsufficientInstanceCapacity"), r"no room.*resources\.aws\.subnets"),
        (answer("VcpuLimitExceeded"), r"quota is used up.*Service Quotas"),
        (answer("InvalidAMIID.NotFound"), r"resources\.aws\.image"),
        (answer("InvalidKeyPair.NotFound"), r"resources\.aws\.key_name"),
        (answer("Unheard"), r"refused it \(Unheard: said\)"),
        (answer("UnauthorizedOperation", _DENIED), r"assumed-role/me/x may not iam:PassRole; attach .*driver\.json"),
        (answer("UnauthorizedOperation", "no"), r"the role may not ec2:RunInstances"),
        (
            answer("AccessDeniedException", "no"),
            r"the role may not RunInstances; .*worker\.json to the role of instances",
        ),
        (answer("AuthFailure.ServiceLinkedRoleCreationNotPermitted"), r"rubberband aws setup"),
        (answer("InvalidClientTokenId"), r"enable the region for the account"),
        (boto.UnauthorizedSSOTokenError(), r"run `aws sso login`"),
        (boto.ProxyConnectionError(proxy_url="http://proxy:1"), r"proxy:1.*HTTPS_PROXY"),
        (boto.SSLError(endpoint_url="https://ec2", error="self-signed"), r"self-signed.*AWS_CA_BUNDLE"),
        (boto.ConfigParseError(path="~/.aws/config"), r"~/\.aws/config.*AWS_PROFILE"),
        (
            answer("SignatureDoesNotMatch", "Signature expired: 20261126T1 is now earlier than 2"),
            r"20261126T1.*set the clock",
        ),
        (answer("InvalidSignatureException", "Signature not yet current: 2"), r"set the clock"),
        (answer("RequestTimeTooSkewed"), r"set the clock"),
        (answer("InvalidSignatureException"), r"does not accept the credentials"),
        (answer("AccessDenied", _BY_SCP), r"may not s3:PutObject: a service control policy denies .*another account"),
        (answer("UnauthorizedOperation", _BY_POLICY), r"an identity-based policy denies .*second factor"),
        (boto.TokenRetrievalError(provider="sso", error_msg="Token has expired"), r"run `aws sso login`"),
    ],
)
def test_messages_for_users(error: Exception, text: str) -> None:
    import re

    line = explain(error)
    assert re.search(text, line)
    assert "\n" not in line
    assert "SECRET" not in line


def test_only_a_lack_of_rights_names_an_action() -> None:
    assert missing_action(answer("UnauthorizedOperation", _DENIED)) == "iam:PassRole"
    assert missing_action(answer("VcpuLimitExceeded")) is None
    assert missing_action(ValueError()) is None


def test_a_session_makes_each_client_once_and_says_who_asks() -> None:
    session = open_session("eu-west-1")
    client = session.client("sts")
    assert session.client("sts") is client
    assert client.meta.region_name == session.region == "eu-west-1"
    assert client.meta.config.user_agent.rpartition(" ")[2].startswith("rubberband/")


def test_launches_and_ends_have_connections_and_attempts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation meets a server that answers every request with a 500."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.0)
    asked: list[tuple[int, str]] = []

    def send(self: URLLib3Session, request: AWSPreparedRequest) -> AWSResponse:
        body = request.body.decode() if isinstance(request.body, bytes) else str(request.body)
        asked.append((id(self), dict(parse_qsl(body))["Action"]))
        error = b"<Error><Code>InsufficientInstanceCapacity</Code></Error>"
        return AWSResponse(request.url, 500, HeadersDict(), Raw(b"<Response><Errors>%s</Errors></Response>" % error))

    monkeypatch.setattr(URLLib3Session, "send", send)
    ec2 = open_session("eu-west-1").client("ec2")
    order = {"MinCount": 1, "MaxCount": 1}
    calls: list[Callable[[], object]] = [
        lambda: ec2.run_instances(**order),
        lambda: ec2.run_instances(**order, DryRun=True),
        lambda: ec2.terminate_instances(InstanceIds=["i-1"]),
        ec2.describe_instances,
    ]
    for call in calls:
        with pytest.raises(boto.ClientError, match="InsufficientInstanceCapacity"):
            call()
    names = ["RunInstances"] * 6 + ["TerminateInstances"] * 3 + ["DescribeInstances"] * 5
    assert [name for _, name in asked] == names
    launch, dry_run, end, look = (asked[index][0] for index in (0, 1, 6, 9))
    assert dry_run == look
    assert len({launch, end, look}) == 3


def test_a_profile_that_is_not_there_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody's")
    with pytest.raises(InputError, match="AWS_PROFILE"):
        open_session("eu-west-1").client("ec2")


def test_regions_that_cannot_be_read_are_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def unread() -> tuple[str, ...]:
        raise boto.ProfileNotFound(profile="missing")

    monkeypatch.setattr("rubberband.cloud.aws.client._known", unread)
    with pytest.raises(InputError, match="AWS_PROFILE"):
        check_region("eu-west-1")


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Account:
    account = Account()
    account.session = account.fake.session("admin")
    for _ in range(2):
        started(account)
    monkeypatch.setattr(filters, "shown_at_once", 1)
    return account


def test_all_zones_and_their_subnets_and_prices_are_found(account: Account) -> None:
    zones = zones_of(account.session, "g5.xlarge")
    assert len(zones) > 1
    assert set(choose_subnets(account.session, (), "g5.xlarge", None)[1]) == set(zones)
    assert set(spot_prices(account.session, ["g5.xlarge"], account.now)["g5.xlarge"]) == set(zones)
    assert on_demand_price(account.session, "g5.xlarge") == pytest.approx(1.006)


def test_all_instances_count_in_a_quota_and_are_ended(account: Account) -> None:
    (room,) = quotas(account.session, ["m7i.large"], ["on_demand"])
    assert room.quota.used_vcpus == 4.0
    assert len(living(account.session, "rubberband")) == 2


def test_the_groups_of_all_networks_are_deleted(account: Account) -> None:
    world = account.fake.world
    world.vpcs["vpc-2"] = replace(world.vpcs[account.vpc], vpc_id="vpc-2", default=False)
    groups = {ensure_group(account.session, "team", vpc) for vpc in world.vpcs}
    assert len(groups) == 2
    assert set(delete_groups(account.session, "team")[0]) == groups


def test_the_cheapest_block_may_be_on_the_last_page(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    found = capacity.cheapest_block(account.session, "p5.48xlarge", 1, 3600.0)
    monkeypatch.setattr(filters, "shown_at_once", filters.PAGE)
    assert found is not None
    assert found == capacity.cheapest_block(account.session, "p5.48xlarge", 1, 3600.0)
