"""Limits of an account: quotas of vCPUs and requests for more, and a budget that mails when money is spent."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from rubberband.cloud.aws.calls import AwsSession
from rubberband.cloud.aws.client import pages
from rubberband.cloud.aws.errors import FAILURES, ignoring
from rubberband.cloud.aws.quota import allowed_vcpus, quota_code
from rubberband.cloud.aws.steps import AccountChanges
from rubberband.values.plan import Market

_MARKETS: tuple[Market, ...] = ("spot", "on_demand")
_REFUSED = ("DENIED", "NOT_APPROVED", "CASE_CLOSED")
_INVALID = "INVALID_REQUEST"
_OPEN = ("PENDING", "CASE_OPENED")
"""States of a request beside which AWS takes no other one for the same quota."""


def account_plan(session: AwsSession, plan: AccountChanges) -> None:
    """Add a line where the account has AWS's free plan, which rents no GPUs. Older accounts have none."""
    try:
        found = session.client("freetier").get_account_plan_state()
    except FAILURES:
        return
    if found.get("accountPlanType") == "FREE":
        plan.there.append(
            "AWS's free plan, which rents small machines only and no GPUs: upgrade it first (Billing > Account plan)"
        )


def plan_quotas(session: AwsSession, types: Sequence[str], vcpus: int, plan: AccountChanges) -> None:
    """Add the steps that ask for `vcpus` of each family of these types, on both markets. Raises botocore's errors.

    A request that AWS has, in whatever state, is not made again.
    """
    found = {quota_code(name, market) for name in types for market in _MARKETS} - {None}
    for code, name in sorted(one for one in found if one is not None):
        held = allowed_vcpus(session, code)
        asked = None if held >= vcpus else _asked(session, code, vcpus)
        told = f"quota '{name}' ({code}): {held:g} vCPUs"
        if held >= vcpus:
            plan.there.append(told)
        elif asked is not None:
            plan.there.append(f"{told}; {_state(asked, vcpus)}")
        else:
            request = partial(
                session.client("service-quotas").request_service_quota_increase,
                ServiceCode="ec2",
                QuotaCode=code,
                DesiredValue=float(vcpus),
            )
            plan.add(f"ask AWS for {vcpus} vCPUs of {told}", request)


def _asked(session: AwsSession, code: str, vcpus: int) -> Any | None:
    """Return the last request for as many as these, or for more, or one that is open."""
    listed = session.client("service-quotas").list_requested_service_quota_change_history_by_quota
    found = [
        one
        for one in pages(listed, "RequestedQuotas", ServiceCode="ec2", QuotaCode=code)
        if (one["DesiredValue"] >= vcpus or one["Status"] in _OPEN) and one["Status"] != _INVALID
    ]
    return max(found, key=lambda one: str(one.get("Created", "")), default=None)


def _state(asked: Any, vcpus: int) -> str:
    on = f"{asked['Created']:%Y-%m-%d}" if "Created" in asked else "before"
    told = f"{asked['DesiredValue']:g} were asked for on {on}"
    if asked["Status"] in _REFUSED:
        return f"{told}, and AWS did not grant them: answer the case under Service Quotas, or ask for fewer (--vcpus)"
    more = f"; for {vcpus}, run this again then" if asked["DesiredValue"] < vcpus else ""
    return f"{told} ({asked['Status']}), which takes minutes to days{more}"


def plan_budget(session: AwsSession, account: str, name: str, usd: float, email: str, plan: AccountChanges) -> None:
    """Add the step that makes a monthly budget of the whole account. Raises botocore's errors."""
    budgets = session.client("budgets")
    with ignoring("NotFoundException"):
        limit = budgets.describe_budget(AccountId=account, BudgetName=name)["Budget"]["BudgetLimit"]["Amount"]
        plan.there.append(f"budget {name} of {float(limit):g} USD a month")
        return
    told = [_notice("ACTUAL", 80.0, email), _notice("FORECASTED", 100.0, email)]
    limit = {"Amount": f"{usd:g}", "Unit": "USD"}
    budget = {"BudgetName": name, "BudgetLimit": limit, "TimeUnit": "MONTHLY", "BudgetType": "COST"}
    plan.add(
        f"make budget {name} of {usd:g} USD a month for the account, which mails {email} and stops nothing",
        partial(budgets.create_budget, AccountId=account, Budget=budget, NotificationsWithSubscribers=told),
    )


def plan_no_budget(session: AwsSession, account: str, name: str, plan: AccountChanges) -> None:
    """Add the step that deletes the budget. Raises botocore's errors."""
    budgets = session.client("budgets")
    with ignoring("NotFoundException"):
        budgets.describe_budget(AccountId=account, BudgetName=name)
        plan.add(f"delete budget {name}", partial(budgets.delete_budget, AccountId=account, BudgetName=name))


def _notice(kind: str, percent: float, email: str) -> dict[str, Any]:
    return {
        "Notification": {
            "NotificationType": kind,
            "ComparisonOperator": "GREATER_THAN",
            "Threshold": percent,
            "ThresholdType": "PERCENTAGE",
        },
        "Subscribers": [{"SubscriptionType": "EMAIL", "Address": email}],
    }
