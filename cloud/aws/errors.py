"""Errors of AWS: whether the request took effect, and a line for users with the remedy. It makes no calls."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from rubberband.errors import InputError

Verdict = Literal["unknown", "throttled", "capacity", "quota", "absent", "mismatch", "refused"]
"""Meaning of an error for its request. `unknown`: it may have taken effect, or may do so later; `throttled`: EC2 did
not consider it, retry later; `capacity`: none in this zone, of this type, on this market; `quota`: the account has no
more; `absent`: the named thing does not exist, or is not visible yet; `mismatch`: its token was used before, and the
instance can be found by it; `refused`: the request itself is wrong."""

_UNKNOWN = frozenset(
    {
        "InternalError", "InternalFailure", "InternalServerError", "InternalServiceError", "ServerInternal",
        "ServiceUnavailable", "ServiceUnavailableException", "Unavailable", "RequestTimeout",
        "RequestTimeoutException", "PriorRequestNotComplete", "ConflictException",
    }
)  # fmt: skip
_THROTTLED = frozenset(
    {
        "RequestLimitExceeded", "Throttling", "ThrottlingException", "ThrottledException", "RequestThrottled",
        "RequestThrottledException", "TooManyRequestsException", "EC2ThrottledException", "SlowDown",
        "BandwidthLimitExceeded", "LimitExceededException",
    }
)  # fmt: skip
_CAPACITY = frozenset(
    {
        "InsufficientInstanceCapacity", "InsufficientHostCapacity", "InsufficientCapacity",
        "InsufficientReservedInstanceCapacity", "InsufficientFreeAddressesInSubnet", "InsufficientAddressCapacity",
        "InsufficientVolumeCapacity", "ReservationCapacityExceeded", "SpotMaxPriceTooLow", "Unsupported",
        "UnfulfillableCapacity",
    }
)  # fmt: skip
_QUOTA = frozenset(
    {
        "VcpuLimitExceeded", "InstanceLimitExceeded", "MaxSpotInstanceCountExceeded", "SpotInstanceCountExceeded",
        "VolumeLimitExceeded", "MaxIOPSLimitExceeded",
    }
)  # fmt: skip
_MEANINGS: dict[str, Verdict] = {
    **dict.fromkeys(_THROTTLED, "throttled"),
    **dict.fromkeys(_CAPACITY, "capacity"),
    **dict.fromkeys(_QUOTA, "quota"),
    **dict.fromkeys(_UNKNOWN, "unknown"),
    **dict.fromkeys(("IdempotentParameterMismatch", "IdempotentInstanceTerminated"), "mismatch"),
}
_RIGHTS = frozenset({"UnauthorizedOperation", "AccessDenied", "AccessDeniedException", "Client.UnauthorizedOperation"})
_KEYS = frozenset(
    {
        "AuthFailure", "InvalidClientTokenId", "UnrecognizedClientException", "SignatureDoesNotMatch",
        "InvalidAccessKeyId", "IncompleteSignature", "MissingAuthenticationToken", "InvalidSignatureException",
    }
)  # fmt: skip
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired", "RequestTimeTooSkewed"})
_OLD_SIGNATURE = ("Signature expired", "Signature not yet current")
_LOGINS = (boto.SSOError, boto.TokenRetrievalError, getattr(boto, "LoginError", boto.SSOError))
"""The last one is of `aws login`, which newer versions of botocore know."""
_NO_KEYS = (boto.NoCredentialsError, boto.CredentialRetrievalError, boto.PartialCredentialsError)
_NO_ANSWER = (boto.HTTPClientError, boto.ConnectionError)

OF_AWS = (boto.ClientError, boto.BotoCoreError, ResponseParserError)
"""Errors of AWS and of the connection to it. ResponseParserError, which is no BotoCoreError, stands for an answer that
was cut short or that came from a proxy."""
FAILURES = (*OF_AWS, OSError)
"""All that a client raises."""

PROTECTED = "OperationNotPermitted"
"""Code for an instance with termination protection."""
MORE_ROOM = "add subnets of other zones (resources.aws.subnets) or other types"
"""Remedy where a zone has no capacity."""
_ACTION = re.compile(r"not authorized to perform:? ([A-Za-z0-9-]+:[A-Za-z]+)")
_WHO = re.compile(r"User: (\S+) is not authorized")
_DENIED_BY = re.compile(r"with an explicit deny in (an? [a-zA-Z -]+)")
_SECRET_TAIL = re.compile(r"\s*Encoded authorization failure message:.*", re.DOTALL)


def code_of(error: BaseException) -> str:
    """Return AWS's code of an error, such as `VcpuLimitExceeded`; empty if AWS did not answer."""
    if isinstance(error, boto.ClientError):
        return str(error.response.get("Error", {}).get("Code", ""))
    return ""


@contextmanager
def ignoring(*codes: str) -> Iterator[None]:
    """Ignore errors of AWS whose code begins with one of `codes`."""
    try:
        yield
    except boto.ClientError as error:
        if not code_of(error).startswith(codes):
            raise


@contextmanager
def in_one_line() -> Iterator[None]:
    """Turn errors of AWS into InputError, with the remedy."""
    try:
        yield
    except OF_AWS as error:
        raise InputError(explain(error)) from None


def verdict(error: BaseException) -> Verdict:
    """Return the meaning of an error for its request."""
    if isinstance(error, boto.ClientError):
        if code_of(error).startswith("InvalidInstanceID."):
            return "absent"
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 400) or 400)
        return _MEANINGS.get(code_of(error), "unknown" if status >= 500 else "refused")
    lost = boto.HTTPClientError | boto.ResponseStreamingError | boto.ConnectionError | ResponseParserError | OSError
    if isinstance(error, lost):
        return "unknown"
    if isinstance(error, boto.CredentialRetrievalError | boto.MetadataRetrievalError):
        return "throttled"  # the request was not sent; the credentials of an instance's role are there again shortly
    return "refused"


def lacks_rights(error: BaseException) -> bool:
    """Return whether the role (or user) lacks the permission."""
    return code_of(error) in _RIGHTS


def missing_action(error: BaseException) -> str | None:
    """Return the action that the role lacks, such as `ec2:RunInstances`; None for another error."""
    if not lacks_rights(error):
        return None
    found = _ACTION.search(str(error))
    if found:
        return found.group(1)
    operation = getattr(error, "operation_name", None)
    return f"ec2:{operation}" if operation and "UnauthorizedOperation" in code_of(error) else operation


def denied_by(error: BaseException) -> str | None:
    """Return the kind of policy that denies an action whatever others allow, such as `a service control policy`."""
    found = _DENIED_BY.search(str(error)) if lacks_rights(error) else None
    return found.group(1).strip() if found else None


def explain(error: BaseException) -> str:
    """Return one line: AWS's message, and the remedy."""
    if isinstance(error, boto.ClientError):
        return _explain_answer(error)
    if isinstance(error, _NO_KEYS):
        return (
            f"there are no AWS credentials ({_line(error)}); run `aws configure`, set AWS_PROFILE, or work on an "
            "instance with a role"
        )
    if isinstance(error, _LOGINS):
        return (
            f"the login to AWS has expired ({_line(error)}); run `aws sso login` (or `aws login`) with the same "
            "AWS_PROFILE"
        )
    if isinstance(error, _NO_ANSWER):
        return (
            f"AWS does not answer ({_line(error)}); check resources.region, this machine's network and its proxy "
            "(HTTPS_PROXY, AWS_CA_BUNDLE)"
        )
    return (
        f"{type(error).__name__}: {_line(error)}; check ~/.aws/config, AWS_PROFILE and other AWS_ variables, or ask "
        "again later"
    )


def _explain_answer(error: boto.ClientError) -> str:
    code, message = code_of(error), str(error.response.get("Error", {}).get("Message", ""))
    said = " ".join(_SECRET_TAIL.sub("", message).split()).rstrip(".")[:300]
    action = missing_action(error)
    if action is not None:
        found, policy = _WHO.search(str(error)), denied_by(error)
        who = found.group(1) if found else "the role"
        if policy is not None:
            return (
                f"{who} may not {action}: {policy} denies it, whatever others allow; change that (a second factor may "
                "be needed: mfa_serial of the AWS_PROFILE), or use another account, region or type"
            )
        return (
            f"{who} may not {action}; attach the policy "
            "rubberband/cloud/aws/policies/driver.json to it (worker.json to the role of instances), which allows it; "
            "`rubberband aws setup` makes such roles, with --owner those of another owner"
        )
    if code in _EXPIRED or any(words in said for words in _OLD_SIGNATURE):
        return (
            f"the credentials have expired, or this machine's clock is wrong ({code}: {said}); log in again or renew "
            "the keys, or set the clock"
        )
    if code in _KEYS:
        return (
            f"AWS does not accept the credentials ({code}: {said}); run `aws sts get-caller-identity`: if that fails "
            "renew the keys, else enable the region for the account"
        )
    meaning = verdict(error)
    if meaning == "capacity":
        why = code if code == "InsufficientInstanceCapacity" else f"{code}: {said}"  # it says no more than the zone
        return f"EC2 has no room ({why}); {MORE_ROOM}"
    if meaning == "quota":
        return (
            f"the account's quota is used up ({code}: {said}); ask for more under Service Quotas > Amazon EC2, or "
            "lower resources.max_instances"
        )
    if meaning in ("throttled", "unknown"):
        return f"AWS is busy or broken ({code}: {said}); ask again later"
    remedy = next((remedy for start, remedy in _REMEDIES if code.startswith(start)), "correct the request")
    if code == "InvalidParameterCombination" and "Free Tier" in said:
        remedy = _FREE_PLAN
    return f"AWS refused it ({code}: {said}); {remedy}"


_REMEDIES = (
    ("AuthFailure.ServiceLinkedRole", "run `rubberband aws setup`, which makes the role of EC2's spot market"),
    ("InvalidAMI", "set resources.aws.image to an image of this region"),
    ("InvalidSubnet", "correct resources.aws.subnets"),
    ("InvalidGroup", "correct resources.aws.security_group"),
    ("InvalidSecurityGroup", "correct resources.aws.security_group"),
    ("InvalidCapacityReservation", "correct resources.aws.reservation, or leave it out"),
    ("InvalidKeyPair", "correct resources.aws.key_name, or leave it out"),
    ("InvalidBlockDeviceMapping", "raise resources.aws.volume_gb, or leave it out"),
    ("ParameterNotFound", "correct the ssm: parameter of resources.aws.image"),
)

_FREE_PLAN = (
    "the account is on AWS's Free plan, which rents no GPUs: upgrade to the paid plan (console: Billing > Account plan)"
)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".:")[:300]
