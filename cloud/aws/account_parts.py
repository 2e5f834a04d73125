"""Parts of an account that `rubberband aws setup` makes and `teardown` deletes: roles, bucket, quotas, budget.

Each function adds to a plan what is there already, and the steps still to be done. The roles have the least rights: the
shipped files in `policies`, in which OWNER and BUCKET are replaced.
"""

from __future__ import annotations

import json
import re
import secrets
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


@dataclass(slots=True, kw_only=True)
class AccountChanges:
    """Result of a look at the account."""

    there: list[str] = field(default_factory=list)
    """Lines on parts that need no change."""
    steps: list[AccountChange] = field(default_factory=list)

    def add(self, text: str, carry_out: Callable[[], object]) -> None:
        """Add a step."""
        self.steps.append(AccountChange(text=text, carry_out=carry_out))


Document = dict[str, Any]

HEAD, WORKER, GUARD = "head", "worker", "guard"
POLICY = "rubberband"
"""Name of the inline policy of each role."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A role of IAM."""

    name: str
    trust: Document
    policies: Mapping[str, Document]
    """Name -> inline policy."""
    has_profile: bool
    """Whether instances have it, through an instance profile of the same name."""


def roles(bounds: Bounds) -> tuple[Role, ...]:
    """Return the roles of the head, of workers, and of the schedules that guard instances."""
    driver = policy("driver", bounds)
    launch = _launch_of(driver)
    if bounds.types:
        launch["Condition"]["StringLike"] = {"ec2:InstanceType": list(bounds.types)}
    if bounds.region is not None:
        launch["Condition"]["StringEquals"]["ec2:Region"] = bounds.region
    policies = {
        HEAD: {POLICY: driver, "session": policy("session", bounds)},
        WORKER: {POLICY: policy("worker", bounds)},
        GUARD: {POLICY: policy("guard", bounds)},
    }
    return tuple(
        Role(
            name=f"{bounds.owner}-{kind}",
            trust=_trust(bounds.account if kind == GUARD else None),
            policies=of_kind,
            has_profile=kind != GUARD,
        )
        for kind, of_kind in policies.items()
    )


def types_in(driver: Document) -> tuple[str, ...]:
    """Return the types to which a head's policy limits launches; empty: to none."""
    return tuple(_launch_of(driver)["Condition"].get("StringLike", {}).get("ec2:InstanceType", ()))


def _launch_of(driver: Document) -> Any:
    return next((one for one in driver["Statement"] if one.get("Sid") == _LAUNCH), {"Condition": {}})


def policy(name: str, bounds: Bounds) -> Document:
    """Return a shipped policy, filled in."""
    text = files("rubberband.cloud.aws").joinpath("policies", f"{name}.json").read_text(encoding="utf-8")
    document: Document = json.loads(text.replace("BUCKET", bounds.bucket).replace("OWNER", bounds.owner))
    return document


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


SPOT_ROLE = "AWSServiceRoleForEC2Spot"
_GONE, _THERE = "NoSuchEntity", "EntityAlreadyExists"


def plan_role(session: AwsSession, role: Role, owner: str, plan: AccountChanges) -> None:
    """Add the steps that give the account this role. Raises botocore's errors."""
    iam = session.client("iam")
    found = _found(lambda: iam.get_role(RoleName=role.name)["Role"])
    if found is None:
        beside = "an instance profile, " if role.has_profile else ""
        held = f"policies: {', '.join(role.policies)}"
        plan.add(f"make role {role.name} ({beside}{held})", partial(_make_role, iam, role, owner))
        return
    differences = [*_differences(iam, role, found, owner)]
    if differences:
        plan.add(f"change role {role.name}: {', '.join(differences)}", partial(_make_role, iam, role, owner))
    else:
        plan.there.append(f"role {role.name}")


def _differences(iam: Any, role: Role, found: Any, owner: str) -> list[str]:
    """Return what differs from the role as it should be."""
    differences = []
    if _tags(found).get(OWNER_TAG) != owner:
        differences.append(f"mark it with the tag {OWNER_TAG}")
    if found["AssumeRolePolicyDocument"] != role.trust:
        differences.append("correct who may assume it")
    for name, document in role.policies.items():
        held = _found(partial(_policy, iam, role.name, name))
        if held != document:
            differences.append(f"{'add' if held is None else 'correct'} policy {name}")
    differences += [f"detach {arn.rpartition('/')[2]}" for arn in _attached(iam, role.name) if arn in _TOO_MUCH]
    if role.has_profile and not _holds(iam, role.name):
        differences.append("complete its instance profile")
    return differences


_TOO_MUCH = ("arn:aws:iam::aws:policy/AmazonSSMManagedInstanceCore",)
"""Managed policies that earlier instructions attached: this one reads every parameter of the account."""


def _make_role(iam: Any, role: Role, owner: str) -> None:
    """Make the role and its profile, or what is missing of them."""
    tags, trust = [{"Key": OWNER_TAG, "Value": owner}], json.dumps(role.trust, separators=(",", ":"))
    try:
        iam.create_role(RoleName=role.name, AssumeRolePolicyDocument=trust, Tags=tags)
    except iam.exceptions.ClientError as error:
        if code_of(error) != _THERE:
            raise
        iam.tag_role(RoleName=role.name, Tags=tags)
        iam.update_assume_role_policy(RoleName=role.name, PolicyDocument=trust)
    for name, document in role.policies.items():
        text = json.dumps(document, separators=(",", ":"))
        iam.put_role_policy(RoleName=role.name, PolicyName=name, PolicyDocument=text)
    for arn in _attached(iam, role.name):
        if arn in _TOO_MUCH:
            iam.detach_role_policy(RoleName=role.name, PolicyArn=arn)
    if role.has_profile:
        with ignoring(_THERE):
            iam.create_instance_profile(InstanceProfileName=role.name)
        if not _holds(iam, role.name):
            iam.add_role_to_instance_profile(InstanceProfileName=role.name, RoleName=role.name)


def plan_spot_role(session: AwsSession, plan: AccountChanges) -> None:
    """Add the step that gives the account the role with which EC2 serves its spot market. Raises botocore's errors."""
    iam = session.client("iam")
    if _found(lambda: iam.get_role(RoleName=SPOT_ROLE)) is None:
        plan.add(
            f"make role {SPOT_ROLE}, EC2's own for the spot market",
            partial(iam.create_service_linked_role, AWSServiceName="spot.amazonaws.com"),
        )
    else:
        plan.there.append(f"role {SPOT_ROLE}")


def plan_no_role(session: AwsSession, role: Role, owner: str, plan: AccountChanges) -> None:
    """Add the step that deletes the role, if it has the owner's tag, and its profile. Raises botocore's errors."""
    iam = session.client("iam")
    found = _found(lambda: iam.get_role(RoleName=role.name)["Role"])
    has_profile = role.has_profile and _found(lambda: iam.get_instance_profile(InstanceProfileName=role.name))
    if found is not None and _tags(found).get(OWNER_TAG) != owner:
        plan.there.append(f"role {role.name}, which `rubberband aws setup` did not make")
    elif found is not None or has_profile:
        beside = " and its instance profile" if has_profile else ""
        plan.add(f"delete role {role.name}{beside}", partial(_unmake, iam, role))


def _unmake(iam: Any, role: Role) -> None:
    if role.has_profile:
        with ignoring(_GONE):
            iam.remove_role_from_instance_profile(InstanceProfileName=role.name, RoleName=role.name)
        with ignoring(_GONE):
            iam.delete_instance_profile(InstanceProfileName=role.name)
    with ignoring(_GONE):
        for name in iam.list_role_policies(RoleName=role.name)["PolicyNames"]:
            iam.delete_role_policy(RoleName=role.name, PolicyName=name)
        for arn in _attached(iam, role.name):
            iam.detach_role_policy(RoleName=role.name, PolicyArn=arn)
        iam.delete_role(RoleName=role.name)


def held_types(session: AwsSession, owner: str) -> tuple[str, ...]:
    """Return the types to which the head's role is limited; empty: to none, or there is no role yet."""
    iam = session.client("iam")
    held = _found(partial(_policy, iam, f"{owner}-{HEAD}", POLICY))
    return () if held is None else types_in(held)


def _policy(iam: Any, role: str, name: str) -> Document:
    document: Document = iam.get_role_policy(RoleName=role, PolicyName=name)["PolicyDocument"]
    return document


def _attached(iam: Any, role: str) -> list[str]:
    return [one["PolicyArn"] for one in iam.list_attached_role_policies(RoleName=role)["AttachedPolicies"]]


def _holds(iam: Any, name: str) -> bool:
    """Return whether the instance profile has the role of its name."""
    found = _found(lambda: iam.get_instance_profile(InstanceProfileName=name)["InstanceProfile"])
    return found is not None and any(one["RoleName"] == name for one in found["Roles"])


def _tags(found: Any) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in found.get("Tags", ())}


def _found(ask: Callable[[], Any]) -> Any | None:
    """Return the answer; None if the entity does not exist."""
    with ignoring(_GONE):
        return ask()
    return None


PRIVATE = {"BlockPublicAcls": True, "IgnorePublicAcls": True, "BlockPublicPolicy": True, "RestrictPublicBuckets": True}
RULES: list[dict[str, Any]] = [
    {
        "ID": "rubberband-uploads",
        "Status": "Enabled",
        "Filter": {"Prefix": ""},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
    },
    {
        "ID": "rubberband-packages",
        "Status": "Enabled",
        "Filter": {"Prefix": f"{PACKAGES}/"},
        "Expiration": {"Days": PACKAGES_DAYS},
    },
]
_TIDY = f"parts of uploads that were cut off go after 1 day, packages after {PACKAGES_DAYS} days"
_SUFFIX_BYTES = 6
_AT_ONCE = 1000


def own_bucket(session: AwsSession, owner: str) -> str | None:
    """Return the bucket that `rubberband aws setup` made in this region for the owner. Raises botocore's errors."""
    s3 = session.client("s3")
    # The list has the account's own buckets only: one of the same name that is another's is never taken for it.
    ours = sorted(one["Name"] for one in s3.list_buckets().get("Buckets", ()) if is_own(one["Name"], owner))
    return next((name for name in ours if s3.head_bucket(Bucket=name).get("BucketRegion") == session.region), None)


def is_own(bucket: str, owner: str) -> bool:
    """Return whether `rubberband aws setup` gave the bucket its name."""
    return re.fullmatch(rf"{re.escape(_start(owner))}[0-9a-f]{{{2 * _SUFFIX_BYTES}}}", bucket) is not None


def new_name(owner: str) -> str:
    """Return a random name, which cannot be registered beforehand."""
    return _start(owner) + secrets.token_hex(_SUFFIX_BYTES)


def _start(owner: str) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", owner.lower()).strip("-")[:30].strip("-")
    return "rubberband-" if words in ("", "rubberband") else f"rubberband-{words}-"


def plan_bucket(session: AwsSession, bucket: str, plan: AccountChanges, *, exists: bool) -> None:
    """Add the steps that make the bucket, or complete it. Raises botocore's errors."""
    s3 = session.client("s3")
    if not exists:
        plan.add(f"make bucket {bucket} in {session.region}", partial(_make_bucket, s3, bucket, session.region))
    is_private = exists and _setting(s3.get_public_access_block, bucket, "PublicAccessBlockConfiguration") == PRIVATE
    rules = _setting(s3.get_bucket_lifecycle_configuration, bucket, "Rules") if exists else None
    is_tidy = all(any(_same(rule, held) for held in rules or ()) for rule in RULES)
    if not is_private:
        block = partial(s3.put_public_access_block, Bucket=bucket, PublicAccessBlockConfiguration=PRIVATE)
        plan.add(f"block public access to bucket {bucket}", block)
    if not is_tidy:
        ours = {rule["ID"] for rule in RULES}
        all_rules = {"Rules": [*(held for held in rules or () if held.get("ID") not in ours), *RULES]}
        tidy = partial(s3.put_bucket_lifecycle_configuration, Bucket=bucket, LifecycleConfiguration=all_rules)
        plan.add(f"keep bucket {bucket} tidy: {_TIDY}", tidy)
    if is_private and is_tidy:
        plan.there.append(f"bucket {bucket}, private; {_TIDY}")


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
            rules = _setting(s3.get_bucket_lifecycle_configuration, bucket, "Rules") or ()
            if not any(rule["Status"] == "Enabled" and "NoncurrentVersionExpiration" in rule for rule in rules):
                return (
                    ", and it keeps every version: checkpoints that are deleted stay, and are paid for; give it a "
                    "lifecycle rule with NoncurrentVersionExpiration"
                )
    return ""


def _make_bucket(s3: Any, bucket: str, region: str) -> None:
    place = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    with ignoring("BucketAlreadyOwnedByYou"):
        s3.create_bucket(Bucket=bucket, **place)


def _setting(ask: Any, bucket: str, key: str) -> Any:
    with ignoring("NoSuchPublicAccessBlockConfiguration", "NoSuchLifecycleConfiguration"):
        return ask(Bucket=bucket)[key]
    return None


def _same(rule: Any, held: Any) -> bool:
    """Return whether S3 holds a rule, of which it may leave out the empty filter."""
    prefix = held.get("Filter", {}).get("Prefix") or ""
    return bool({**held, "Filter": {"Prefix": prefix}} == rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Objects of a bucket, without packages, which every start writes again."""

    objects: int
    size_bytes: int


def content(session: AwsSession, bucket: str) -> Content:
    """Return what would be lost with the bucket. Raises botocore's errors."""
    sizes = [one.get("Size", 0) for one in _versions(session, bucket) if not one["Key"].startswith(f"{PACKAGES}/")]
    return Content(objects=len(sizes), size_bytes=sum(sizes))


def delete_bucket(session: AwsSession, bucket: str) -> None:
    """Delete every object, in all its versions, and the bucket. Raises botocore's errors."""
    s3 = session.client("s3")
    with ignoring("NoSuchBucket"):
        found = [{"Key": one["Key"], "VersionId": one["VersionId"]} for one in _versions(session, bucket)]
        for first in range(0, len(found), _AT_ONCE):
            named = {"Objects": found[first : first + _AT_ONCE], "Quiet": True}
            s3.delete_objects(Bucket=bucket, Delete=named)
        s3.delete_bucket(Bucket=bucket)


def _versions(session: AwsSession, bucket: str) -> Iterator[Any]:
    for page in session.client("s3").get_paginator("list_object_versions").paginate(Bucket=bucket):
        yield from page.get("Versions", ())
        yield from page.get("DeleteMarkers", ())


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
