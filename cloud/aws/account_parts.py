"""Parts of an account that `rubberband aws setup` makes and `teardown` deletes: a stack of CloudFormation, and others.

The stack has the roles and the bucket; budgets are none of CloudFormation's in many regions. The roles have the least
rights: the shipped files in `policies`, in which OWNER and BUCKET are replaced.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from typing import Any

from rubberband.cloud.aws.calls import OWNER_TAG, AwsSession
from rubberband.cloud.aws.capacity import allowed_vcpus, quota_code
from rubberband.cloud.aws.client import pages
from rubberband.cloud.aws.errors import FAILURES, code_of, ignoring
from rubberband.cloud.aws.s3 import PACKAGES, PACKAGES_DAYS
from rubberband.errors import InputError
from rubberband.values.plan import Market


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountChange:
    """One change of the account."""

    text: str
    """Such as `make bucket rubberband-0123456789ab`."""
    carry_out: Callable[[], object]
    """Raises botocore's errors. Carried out again, it completes what was cut off."""
    parts: tuple[str, ...] = ()
    """Lines on what it consists of."""


@dataclass(slots=True, kw_only=True)
class AccountChanges:
    """Result of a look at the account."""

    there: list[str] = field(default_factory=list)
    """Lines on parts that need no change."""
    steps: list[AccountChange] = field(default_factory=list)

    def add(self, text: str, carry_out: Callable[[], object], *parts: str) -> None:
        """Add a step."""
        self.steps.append(AccountChange(text=text, carry_out=carry_out, parts=parts))


Document = dict[str, Any]

HEAD, WORKER, GUARD = "head", "worker", "guard"
BUCKET = "Bucket"
"""Its name in the template, beside `Head`, `HeadProfile` and so on."""
_LAUNCH = "LaunchOnlyTaggedInstances"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Reach of the roles of one owner."""

    account: str
    owner: str
    bucket: str
    region: str | None = None
    """The only region in which the head may launch instances; None: any."""
    types: tuple[str, ...] = ()
    """Types that the head may launch, such as `g5.*`; empty: any."""


def policies(bounds: Bounds) -> dict[str, dict[str, Document]]:
    """Return the inline policies, by name, of the roles of the head, of workers, and of the schedules that guard
    instances."""
    driver = policy("driver", bounds)
    launch = _launch_of(driver)
    if bounds.types:
        launch["Condition"]["StringLike"] = {"ec2:InstanceType": list(bounds.types)}
    if bounds.region is not None:
        launch["Condition"]["StringEquals"]["ec2:Region"] = bounds.region
    return {
        HEAD: {"rubberband": driver, "session": policy("session", bounds)},
        WORKER: {"rubberband": policy("worker", bounds)},
        GUARD: {"rubberband": policy("guard", bounds)},
    }


def policy(name: str, bounds: Bounds) -> Document:
    """Return a shipped policy, filled in."""
    text = files("rubberband.cloud.aws").joinpath("policies", f"{name}.json").read_text(encoding="utf-8")
    document: Document = json.loads(text.replace("BUCKET", bounds.bucket).replace("OWNER", bounds.owner))
    return document


def _launch_of(driver: Document) -> Any:
    return next(one for one in driver["Statement"] if one.get("Sid") == _LAUNCH)


def role_resources(bounds: Bounds) -> dict[str, Document]:
    """Return the resources of a template for the roles, and for the instance profiles of the head and of workers."""
    resources = {}
    for kind, of_kind in policies(bounds).items():
        name, text = f"{bounds.owner}-{kind}", f"policies: {', '.join(of_kind)}"
        role = {
            "RoleName": name,
            "AssumeRolePolicyDocument": _trust(bounds.account if kind == GUARD else None),
            "Policies": [{"PolicyName": each, "PolicyDocument": document} for each, document in of_kind.items()],
        }
        resources[kind.title()] = _resource("IAM::Role", f"role {name} ({text})", role)
        if kind != GUARD:
            profile = {"InstanceProfileName": name, "Roles": [{"Ref": kind.title()}]}
            resources[f"{kind.title()}Profile"] = _resource("IAM::InstanceProfile", f"instance profile {name}", profile)
    return resources


def held_types(resources: Mapping[str, Document]) -> tuple[str, ...]:
    """Return the types to which the head's role is limited; empty: to none, or there is no role yet."""
    if HEAD.title() not in resources:
        return ()
    driver = resources[HEAD.title()]["Properties"]["Policies"][0]["PolicyDocument"]
    return tuple(_launch_of(driver)["Condition"].get("StringLike", {}).get("ec2:InstanceType", ()))


def _trust(scheduled_by: str | None) -> Document:
    """Return the policy that lets EC2 assume a role, or the schedules of one account only."""
    statement: Document = {
        "Effect": "Allow",
        "Principal": {"Service": "ec2.amazonaws.com" if scheduled_by is None else "scheduler.amazonaws.com"},
        "Action": "sts:AssumeRole",
    }
    if scheduled_by is not None:
        statement["Condition"] = {"StringEquals": {"aws:SourceAccount": scheduled_by}}
    return {"Version": "2012-10-17", "Statement": [statement]}


def bucket_resource(name: str) -> Document:
    """Return the resource of a template for a private bucket."""
    return _resource(
        "S3::Bucket",
        f"bucket {name}, private; parts of uploads that were cut off go after 1 day, packages after "
        f"{PACKAGES_DAYS} days",
        {
            "BucketName": name,
            "PublicAccessBlockConfiguration": dict.fromkeys(
                ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets"), True
            ),
            "LifecycleConfiguration": {
                "Rules": [
                    {
                        "Id": "rubberband-uploads",
                        "Status": "Enabled",
                        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
                    },
                    {
                        "Id": "rubberband-packages",
                        "Status": "Enabled",
                        "Prefix": f"{PACKAGES}/",
                        "ExpirationInDays": PACKAGES_DAYS,
                    },
                ]
            },
        },
    )


def _resource(kind: str, text: str, properties: Document) -> Document:
    return {"Type": f"AWS::{kind}", "Metadata": {"Text": text}, "Properties": properties}


def text_of(resource: Document) -> str:
    """Return the line about a resource for users."""
    return str(resource["Metadata"]["Text"])


_PAUSE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The stack of CloudFormation that has what setup made for an owner."""

    name: str
    resources: Mapping[str, Document] = field(default_factory=dict)
    """Resources of its template."""
    stack_id: str = ""
    """Empty: the stack does not exist yet."""
    status: str = ""

    @property
    def bucket(self) -> str | None:
        """The name of its bucket; None: it has none."""
        return self.resources[BUCKET]["Properties"]["BucketName"] if BUCKET in self.resources else None


def stack_of(session: AwsSession, owner: str) -> Stack:
    """Return the owner's stack in this region, once nothing changes it any more.

    Raises InputError if a stack of another owner has its name; botocore's errors.
    """
    cloudformation, name = session.client("cloudformation"), _start(owner)[:-1]
    with ignoring("ValidationError"):  # there is none
        found = _settled(cloudformation, name)
        if {"Key": OWNER_TAG, "Value": owner} not in found["Tags"]:
            raise InputError(f"stack {name} of CloudFormation is not of owner {owner}; give another --owner")
        resources = cloudformation.get_template(StackName=name)["TemplateBody"]["Resources"]
        return Stack(name=name, resources=resources, stack_id=found["StackId"], status=found["StackStatus"])
    return Stack(name=name)


def plan_stack(
    session: AwsSession, owner: str, stack: Stack, resources: Mapping[str, Document], plan: AccountChanges
) -> None:
    """Add the step that gives the stack these resources; without any, the one that deletes it."""
    parts = [
        f"{'change' if name in stack.resources else 'make'} {text_of(one)}"
        for name, one in resources.items()
        if stack.resources.get(name) != one
    ]
    parts += [f"delete {text_of(one)}" for name, one in stack.resources.items() if name not in resources]
    if parts:
        verb = "delete" if not resources else "change" if stack.stack_id else "make"
        change = partial(_change_stack, session, owner, stack, resources)
        plan.add(f"{verb} stack {stack.name} of CloudFormation, which takes minutes", change, *parts)


def _change_stack(session: AwsSession, owner: str, stack: Stack, resources: Mapping[str, Document]) -> None:
    """Make, change or delete the stack, and wait for that; CloudFormation takes back what it cannot complete.

    Raises InputError with its reason; botocore's errors.
    """
    cloudformation, stack_id = session.client("cloudformation"), stack.stack_id
    words = {
        "StackName": stack.name,
        "TemplateBody": json.dumps({"Resources": resources}, separators=(",", ":")),
        "Capabilities": ["CAPABILITY_NAMED_IAM"],
        "Tags": [{"Key": OWNER_TAG, "Value": owner}],  # roles and bucket have them too
    }
    if not resources:
        change = "DELETE"
        cloudformation.delete_stack(StackName=stack_id)
    elif stack_id:
        change = "UPDATE"
        cloudformation.update_stack(**words)
    else:
        change = "CREATE"
        stack_id = cloudformation.create_stack(**words, OnFailure="DELETE")["StackId"]
    if _settled(cloudformation, stack_id)["StackStatus"] == f"{change}_COMPLETE":
        return
    reason = ""
    for event in cloudformation.describe_stack_events(StackName=stack_id)["StackEvents"]:  # the newest is first
        if event["ResourceStatus"].endswith("_FAILED"):
            reason = f"{event['LogicalResourceId']}: {event.get('ResourceStatusReason', '')}"
        elif event["PhysicalResourceId"] == stack_id and event["ResourceStatus"] == f"{change}_IN_PROGRESS":
            break
    raise InputError(f"CloudFormation could not complete it ({reason})")


def _settled(cloudformation: Any, stack: str) -> Any:
    while True:
        found = cloudformation.describe_stacks(StackName=stack)["Stacks"][0]
        if not found["StackStatus"].endswith("_IN_PROGRESS") or found["StackStatus"] == "REVIEW_IN_PROGRESS":
            return found
        time.sleep(_PAUSE_S)


SPOT_ROLE = "AWSServiceRoleForEC2Spot"


def plan_spot_role(session: AwsSession, plan: AccountChanges) -> None:
    """Add the step that gives the account the role with which EC2 serves its spot market. Raises botocore's errors."""
    iam = session.client("iam")
    with ignoring("NoSuchEntity"):
        iam.get_role(RoleName=SPOT_ROLE)
        plan.there.append(f"role {SPOT_ROLE}")
        return
    plan.add(
        f"make role {SPOT_ROLE}, EC2's own for the spot market",
        partial(iam.create_service_linked_role, AWSServiceName="spot.amazonaws.com"),
    )


def new_bucket_name(owner: str) -> str:
    """Return a random name, which cannot be registered beforehand."""
    return _start(owner).lower() + secrets.token_hex(6)


def _start(owner: str) -> str:
    words = re.sub(r"[^A-Za-z0-9]+", "-", owner).strip("-")[:30].strip("-")
    return "rubberband-" if words in ("", "rubberband") else f"rubberband-{words}-"


def check_given(session: AwsSession, bucket: str, account: str) -> str:
    """Return a line about a bucket of the user's. Raises InputError unless it is this account's and in this region."""
    s3 = session.client("s3")
    try:
        region = s3.head_bucket(Bucket=bucket, ExpectedBucketOwner=account).get("BucketRegion", session.region)
    except s3.exceptions.ClientError as error:
        if code_of(error) in ("404", "NoSuchBucket"):
            raise InputError(
                f"--bucket: there is no bucket {bucket}; leave it out, and one is made, or name one that there is"
            ) from None
        if code_of(error) in ("403", "AccessDenied"):
            raise InputError(
                f"--bucket: {bucket} belongs to another account than {account}, or these credentials may not read it; "
                "name one of your own, or leave it out, and one is made"
            ) from None
        raise
    if region != session.region:
        raise InputError(
            f"--bucket: {bucket} is in {region}, and instances would be in {session.region}: each GB between them "
            f"costs about 0.02 USD; name one in {session.region}, or give --region {region}"
        )
    return f"bucket {bucket}, which is yours: its settings stay as they are{_kept_versions(s3, bucket)}"


def _kept_versions(s3: Any, bucket: str) -> str:
    """Return that a bucket keeps what is deleted, as far as these credentials may see that."""
    with ignoring("AccessDenied", "403"):
        if s3.get_bucket_versioning(Bucket=bucket).get("Status") == "Enabled":
            rules: Sequence[Any] = ()
            with ignoring("NoSuchLifecycleConfiguration"):
                rules = s3.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
            if not any(rule["Status"] == "Enabled" and "NoncurrentVersionExpiration" in rule for rule in rules):
                return (
                    ", and it keeps every version: checkpoints that are deleted stay, and are paid for; give it a "
                    "lifecycle rule with NoncurrentVersionExpiration"
                )
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Objects of a bucket, without packages, which every start writes again."""

    objects: int
    size_bytes: int


def content(session: AwsSession, bucket: str) -> Content:
    """Return what would be lost with the bucket. Raises botocore's errors."""
    sizes = [one.get("Size", 0) for one in _versions(session, bucket) if not one["Key"].startswith(f"{PACKAGES}/")]
    return Content(objects=len(sizes), size_bytes=sum(sizes))


def empty_bucket(session: AwsSession, bucket: str) -> None:
    """Delete every object, in all its versions. Raises botocore's errors."""
    found = [{"Key": one["Key"], "VersionId": one["VersionId"]} for one in _versions(session, bucket)]
    for first in range(0, len(found), _AT_ONCE):
        named = {"Objects": found[first : first + _AT_ONCE], "Quiet": True}
        session.client("s3").delete_objects(Bucket=bucket, Delete=named)


def _versions(session: AwsSession, bucket: str) -> Iterator[Any]:
    with ignoring("NoSuchBucket"):  # it was deleted by hand
        for page in session.client("s3").get_paginator("list_object_versions").paginate(Bucket=bucket):
            yield from page.get("Versions", ())
            yield from page.get("DeleteMarkers", ())


_AT_ONCE = 1000
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
        text = f"quota '{name}' ({code}): {held:g} vCPUs"
        if held >= vcpus:
            plan.there.append(text)
        elif asked is not None:
            plan.there.append(f"{text}; {_state(asked, vcpus)}")
        else:
            request = partial(
                session.client("service-quotas").request_service_quota_increase,
                ServiceCode="ec2",
                QuotaCode=code,
                DesiredValue=float(vcpus),
            )
            plan.add(f"ask AWS for {vcpus} vCPUs of {text}", request)


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
    text = f"{asked['DesiredValue']:g} were asked for on {on}"
    if asked["Status"] in _REFUSED:
        return f"{text}, and AWS did not grant them: answer the case under Service Quotas, or ask for fewer (--vcpus)"
    more = f"; for {vcpus}, run this again then" if asked["DesiredValue"] < vcpus else ""
    return f"{text} ({asked['Status']}), which takes minutes to days{more}"


def plan_budget(session: AwsSession, account: str, name: str, usd: float, email: str, plan: AccountChanges) -> None:
    """Add the step that makes a monthly budget of the whole account. Raises botocore's errors."""
    budgets = session.client("budgets")
    with ignoring("NotFoundException"):
        limit = budgets.describe_budget(AccountId=account, BudgetName=name)["Budget"]["BudgetLimit"]["Amount"]
        plan.there.append(f"budget {name} of {float(limit):g} USD a month")
        return
    notices = [_notice("ACTUAL", 80.0, email), _notice("FORECASTED", 100.0, email)]
    limit = {"Amount": f"{usd:g}", "Unit": "USD"}
    budget = {"BudgetName": name, "BudgetLimit": limit, "TimeUnit": "MONTHLY", "BudgetType": "COST"}
    plan.add(
        f"make budget {name} of {usd:g} USD a month for the account, which mails {email} and stops nothing",
        partial(budgets.create_budget, AccountId=account, Budget=budget, NotificationsWithSubscribers=notices),
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
