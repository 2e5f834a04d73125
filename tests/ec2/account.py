"""Who one is and what one may have: sts, service-quotas, and EC2's account attributes."""

from __future__ import annotations

from typing import Any

from tests.ec2.faults import FakeError
from tests.ec2.filters import page
from tests.ec2.instance import as_datetime
from tests.ec2.quota_codes import QUOTAS
from tests.ec2.request import Request, operation
from tests.ec2.world import ACCOUNT

OPEN = ("PENDING", "CASE_OPENED")
"""States of a request for a larger quota that is not decided."""
NEW_ACCOUNT_VCPUS = 5.0
"""AWS's default for the standard families; a new account has none of the others."""


@operation("sts", "GetCallerIdentity")
def get_caller_identity(request: Request) -> dict[str, Any]:
    return {
        "Account": request.world.account,
        "Arn": request.access.arn,
        "UserId": "AROAFAKE:" + request.access.arn.rpartition("/")[2],
    }


@operation("service-quotas", "GetServiceQuota", checked=True)
def get_service_quota(request: Request) -> dict[str, Any]:
    code = _known(request)
    return {"Quota": _shown(request, code, request.world.quotas_vcpus[code])}


@operation("service-quotas", "GetAWSDefaultServiceQuota", checked=True)
def get_default_quota(request: Request) -> dict[str, Any]:
    """GetAWSDefaultServiceQuota: what a new account may have."""
    code = _known(request)
    return {"Quota": _shown(request, code, NEW_ACCOUNT_VCPUS if "Standard" in QUOTAS[code] else 0.0)}


@operation("service-quotas", "RequestServiceQuotaIncrease", checked=True)
def request_increase(request: Request) -> dict[str, Any]:
    """RequestServiceQuotaIncrease: one at a time for each quota; a person may look at it for days."""
    code, desired = _known(request), float(request.params["DesiredValue"])
    if desired <= request.world.quotas_vcpus[code]:
        message = "Please provide a quota value that is larger than the current one."
        raise FakeError("IllegalArgumentException", message)
    if any(one["QuotaCode"] == code and one["Status"] in OPEN for one in request.world.quota_requests):
        message = "Only one open service quota increase request is allowed per quota."
        raise FakeError("ResourceAlreadyExistsException", message)
    asked = {
        "Id": f"r{len(request.world.quota_requests)}",
        "ServiceCode": "ec2",
        "QuotaCode": code,
        "DesiredValue": desired,
        "Status": "PENDING",
        "Created": as_datetime(request.now),
    }
    request.world.quota_requests.append(asked)
    return {"RequestedQuota": asked}


@operation("service-quotas", "ListRequestedServiceQuotaChangeHistoryByQuota", checked=True)
def list_increases(request: Request) -> dict[str, Any]:
    """ListRequestedServiceQuotaChangeHistoryByQuota, in the shortest pages."""
    code = _known(request)
    found = [one for one in request.world.quota_requests if one["QuotaCode"] == code]
    shown, following = page(found, request.params, at_most=1)
    return {"RequestedQuotas": shown, **following}


@operation("freetier", "GetAccountPlanState", checked=True)
def get_plan(request: Request) -> dict[str, Any]:
    return {"accountId": ACCOUNT, "accountPlanType": "FREE" if request.world.free_plan else "PAID"}


def _check_service(request: Request) -> None:
    if request.params["ServiceCode"] != "ec2":
        raise FakeError("NoSuchResourceException", "The request failed because the specified service does not exist.")


def _known(request: Request) -> str:
    _check_service(request)
    code = str(request.params["QuotaCode"])
    if code not in QUOTAS:
        raise FakeError("NoSuchResourceException", "The request failed because the specified quota does not exist.")
    return code


def _shown(request: Request, code: str, vcpus: float) -> dict[str, Any]:
    return {"ServiceCode": "ec2", "QuotaCode": code, "Value": float(vcpus), "Unit": "None"}
