"""What AWS's errors mean: whether a request took effect, and one line for people with the remedy.

It classifies errors of botocore and makes no calls.
"""

from __future__ import annotations

import re
from typing import Literal

from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

Verdict = Literal["unknown", "throttled", "capacity", "quota", "absent", "mismatch", "refused"]
"""What an error says of the request. `unknown`: it may have taken effect, or yet take effect; `throttled`: it was not
looked at this time, ask again later; `capacity`: not in this zone, of this type, on this market; `quota`: the account
has no more; `absent`: what it names is not there, or not yet visible; `mismatch`: its token has been used, and the
instance can be found by it; `refused`: not as it stands."""

_UNKNOWN = frozenset(
    {
        "InternalError", "InternalFailure", "InternalServerError", "InternalServiceError", "ServerInternal",
        "ServiceUnavailable", "ServiceUnavailableException", "Unavailable", "RequestTimeout",
        "RequestTimeoutException", "PriorRequestNotComplete",
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
        "InsufficientVolumeCapacity", "SpotMaxPriceTooLow", "Unsupported", "UnfulfillableCapacity",
    }
)  # fmt: skip
_QUOTA = frozenset(
    {
        "VcpuLimitExceeded", "InstanceLimitExceeded", "MaxSpotInstanceCountExceeded", "SpotInstanceCountExceeded",
        "VolumeLimitExceeded", "MaxIOPSLimitExceeded",
    }
)  # fmt: skip
_RIGHTS = frozenset({"UnauthorizedOperation", "AccessDenied", "AccessDeniedException", "Client.UnauthorizedOperation"})
_KEYS = frozenset(
    {
        "AuthFailure", "InvalidClientTokenId", "UnrecognizedClientException", "SignatureDoesNotMatch",
        "InvalidAccessKeyId", "IncompleteSignature", "MissingAuthenticationToken",
    }
)  # fmt: skip
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired"})
_LOGINS = (boto.SSOError, boto.TokenRetrievalError)

OF_AWS = (boto.ClientError, boto.BotoCoreError, ResponseParserError)
"""What tells of AWS or of the way to it. ResponseParserError is no BotoCoreError: an answer that was cut short, or that
of a proxy."""
FAILURES = (*OF_AWS, OSError)
"""What a client raises."""

MORE_ROOM = "add subnets of other zones (resources.aws.subnets) or other types"
"""The remedy where a zone has no capacity."""
_ACTION = re.compile(r"not authorized to perform:? ([A-Za-z0-9-]+:[A-Za-z]+)")
_WHO = re.compile(r"User: (\S+) is not authorized")
_SECRET_TAIL = re.compile(r"\s*Encoded authorization failure message:.*", re.DOTALL)


def code_of(error: BaseException) -> str:
    """AWS's code of an error, such as `VcpuLimitExceeded`; empty if it is not an answer of AWS."""
    if isinstance(error, boto.ClientError):
        return str(error.response.get("Error", {}).get("Code", ""))
    return ""


def verdict(error: BaseException) -> Verdict:
    """What a failed request came to."""
    if isinstance(error, boto.ClientError):
        return _verdict_of_answer(error)
    lost = boto.HTTPClientError | boto.ResponseStreamingError | boto.ConnectionError | ResponseParserError | OSError
    if isinstance(error, lost):
        return "unknown"
    return "refused"


def _verdict_of_answer(error: boto.ClientError) -> Verdict:
    code = code_of(error)
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 400) or 400)
    known: tuple[tuple[frozenset[str], Verdict], ...] = (
        (_THROTTLED, "throttled"),
        (_CAPACITY, "capacity"),
        (_QUOTA, "quota"),
        (_UNKNOWN, "unknown"),
    )
    for codes, meaning in known:
        if code in codes:
            return meaning
    if code in ("IdempotentParameterMismatch", "IdempotentInstanceTerminated"):
        return "mismatch"
    if code.startswith("InvalidInstanceID."):
        return "absent"
    return "unknown" if status >= 500 else "refused"


def lacks_rights(error: BaseException) -> bool:
    """Whether the role (or user) may not do what it asked for."""
    return code_of(error) in _RIGHTS


def missing_action(error: BaseException) -> str | None:
    """The action that the role lacks, such as `ec2:RunInstances`; None if that is not what the error says."""
    if not lacks_rights(error):
        return None
    found = _ACTION.search(str(error))
    if found:
        return found.group(1)
    operation = getattr(error, "operation_name", None)
    return f"ec2:{operation}" if operation and "UnauthorizedOperation" in code_of(error) else operation


def explain(error: BaseException) -> str:
    """One line: what AWS said, and the remedy."""
    if isinstance(error, boto.ClientError):
        return _explain_answer(error)
    if isinstance(error, boto.NoCredentialsError | boto.CredentialRetrievalError | boto.PartialCredentialsError):
        return (
            f"there are no AWS credentials ({_line(error)}); run `aws configure`, set AWS_PROFILE, or drive from an "
            "instance with a role (`rubberband up FILE`)"
        )
    if isinstance(error, _LOGINS):
        return f"the login to AWS has expired ({_line(error)}); run `aws sso login` with the same AWS_PROFILE"
    if isinstance(error, boto.ProfileNotFound):
        return f"{_line(error)}; correct AWS_PROFILE, or add the profile to ~/.aws/config"
    if isinstance(error, boto.EndpointConnectionError | boto.ConnectTimeoutError | boto.ReadTimeoutError):
        return f"AWS does not answer ({_line(error)}); check resources.region and this machine's network"
    if isinstance(error, boto.NoRegionError | boto.InvalidRegionError):
        return f"{_line(error)}; set resources.region to one such as us-east-1"
    return f"{type(error).__name__}: {_line(error)}; ask again later"


def _explain_answer(error: boto.ClientError) -> str:
    code, said = code_of(error), _said(error)
    action = missing_action(error)
    if action is not None:
        who = _WHO.search(str(error))
        return (
            f"{who.group(1) if who else 'the role'} may not {action}; attach the policy "
            "rubberband/cloud/aws/policies/driver.json to it (worker.json to the role of instances), which allows it"
        )
    if code in _KEYS:
        return (
            f"AWS does not accept the credentials ({code}: {said}); run `aws sts get-caller-identity`: if that fails "
            "renew the keys, else enable the region for the account"
        )
    if code in _EXPIRED:
        return (
            f"the credentials have expired, or this machine's clock is wrong ({code}); log in again, or set the clock"
        )
    if code == "OptInRequired":
        return f"the account is not enabled here ({said}); enable the region or the service, or set resources.region"
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
    return f"AWS refused it ({code}: {said}){_remedy(code)}"


_REMEDIES = (
    (
        "AuthFailure.ServiceLinkedRole",
        "run, once for the account: aws iam create-service-linked-role --aws-service-name spot.amazonaws.com",
    ),
    ("InvalidAMI", "set resources.aws.image to an image of this region"),
    ("InvalidSubnet", "correct resources.aws.subnets"),
    ("InvalidGroup", "correct resources.aws.security_group"),
    ("InvalidSecurityGroup", "correct resources.aws.security_group"),
    ("InvalidKeyPair", "correct resources.aws.key_name, or leave it out"),
    ("PendingVerification", "AWS verifies new accounts for some hours; try again then"),
    ("ParameterNotFound", "correct the ssm: parameter of resources.aws.image"),
)


def _remedy(code: str) -> str:
    return next((f"; {remedy}" for start, remedy in _REMEDIES if code.startswith(start)), "; correct the request")


def _said(error: boto.ClientError) -> str:
    message = str(error.response.get("Error", {}).get("Message", ""))
    return " ".join(_SECRET_TAIL.sub("", message).split()).rstrip(".")[:300]


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".")[:300]
