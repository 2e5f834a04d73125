"""The bucket of checkpoints and packages: made under a random name, kept private and tidy, deleted."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from rubberband.cloud.aws.calls import AwsSession
from rubberband.cloud.aws.errors import code_of, ignoring
from rubberband.cloud.aws.s3 import PACKAGES, PACKAGES_DAYS
from rubberband.cloud.aws.steps import AccountChanges
from rubberband.errors import InputError

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
        plan.add(f"make bucket {bucket} in {session.region}", partial(_make, s3, bucket, session.region))
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


def _make(s3: Any, bucket: str, region: str) -> None:
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
