"""What is put beside the checkpoints for instances to fetch, in the bucket of the store; its errors in one line.

Checkpoints themselves go through `s3.S3Folder`, in the processes that write them.
"""

from __future__ import annotations

import hashlib

from botocore.exceptions import ClientError

from rubberband.cloud.aws.errors import code_of, explain, lacks_rights
from rubberband.cloud.aws.machines import Session as AwsSession
from rubberband.errors import InputError


def is_bucket(checkpoints: str | None) -> bool:
    """Whether a checkpoint store is a bucket (s3://…)."""
    return checkpoints is not None and checkpoints.startswith("s3://")


def place_in(checkpoints: str, name: str) -> tuple[str, str]:
    """(bucket, key) of what is called `name` below a store's address."""
    bucket, _, prefix = checkpoints.removeprefix("s3://").partition("/")
    return bucket, "/".join(part for part in (prefix.strip("/"), name) if part)


def put(session: AwsSession | None, checkpoints: str, name: str, content: bytes, *, unless_there: bool = False) -> str:
    """Put `content` below the store's address; its own s3:// address. Raises InputError, with the remedy.

    Without a session nothing is put there.

    With `unless_there`, what lies there is replaced only if it is something else.
    """
    bucket, key = place_in(checkpoints, name)
    if session is None:
        return f"s3://{bucket}/{key}"
    s3 = session.client("s3")
    try:
        if not (unless_there and _holds(session, bucket, key, content)):
            s3.put_object(Bucket=bucket, Key=key, Body=content)
    except ClientError as error:
        raise InputError(f"resources.checkpoints: {trouble(error, bucket)}") from None
    return f"s3://{bucket}/{key}"


def trouble(error: ClientError, bucket: str) -> str:
    """Why a bucket cannot be used, with the remedy."""
    if code_of(error) == "NoSuchBucket":
        return f"there is no bucket {bucket}; make it (`aws s3 mb s3://{bucket}`), or name another"
    if lacks_rights(error) or code_of(error) == "403":
        return (
            f"the role may not s3:{error.operation_name} in {bucket}; put the bucket's name into "
            "rubberband/cloud/aws/policies/driver.json (and worker.json) and attach that"
        )
    return explain(error)


def _holds(session: AwsSession, bucket: str, key: str, content: bytes) -> bool:
    """Whether the object is `content`, as far as S3 tells: its ETag is the MD5, except where a key of KMS encrypts."""
    try:
        there = session.client("s3").head_object(Bucket=bucket, Key=key)
    except ClientError as error:
        if code_of(error) in ("404", "NoSuchKey", "NotFound", "403"):  # without s3:ListBucket, what is not there is 403
            return False
        raise
    return str(there["ETag"]).strip('"') == hashlib.md5(content, usedforsecurity=False).hexdigest()
