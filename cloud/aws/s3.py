"""A folder of S3: bytes under a name, written whole or not at all. What the bytes mean is the checkpoint store's."""

from __future__ import annotations

import hashlib
import io
import os
import uuid
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from boto3.s3.transfer import TransferConfig
from boto3.session import Session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from rubberband.cloud.aws.calls import AwsSession
from rubberband.cloud.aws.errors import code_of, explain, lacks_rights
from rubberband.errors import CheckpointError, InputError

_CONFIG = Config(
    retries={"mode": "adaptive", "max_attempts": 6},
    connect_timeout=5,
    read_timeout=60,
    max_pool_connections=16,
)
_SINGLE_PUT_BYTES = 256 * 1024**2
"""What is larger is sent in parts, which S3 puts together at the end: either way it is there whole, or not at all."""
_TRANSFER = TransferConfig(multipart_threshold=_SINGLE_PUT_BYTES, multipart_chunksize=_SINGLE_PUT_BYTES // 4)
_GONE = frozenset({"404", "NoSuchKey"})
_NO_BUCKET = "NoSuchBucket"


class S3Gone(Exception):
    """There is no such object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Folder:
    """`s3://bucket/prefix`. It can be pickled; each process has a client of its own, which is made when needed."""

    bucket: str
    prefix: str
    """Without slashes at its ends; may be empty."""

    @classmethod
    def parse(cls, url: str) -> S3Folder:
        """From `s3://bucket/prefix`. Raises InputError."""
        scheme, separator, rest = url.partition("://")
        bucket, _, prefix = rest.partition("/")
        if not separator or scheme != "s3" or not bucket:
            raise InputError(f"{url} is not a folder of S3; write s3://bucket/prefix")
        return cls(bucket=bucket, prefix=prefix.strip("/"))

    @property
    def url(self) -> str:
        """`s3://bucket/prefix`."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def check(self) -> None:
        """Write and delete an object. Raises InputError with the remedy where that cannot be done."""
        name = f".probe-{uuid.uuid4().hex}"
        try:
            self.put(name, b"")
            self.delete(name)
        except CheckpointError as error:
            raise InputError(f"checkpoints cannot be written to {self.url}: {_remedy(error, self)}") from error

    def put(self, name: str, payload: bytes) -> str:
        """Write an object and return its URL. Raises CheckpointError."""
        try:
            _client().upload_fileobj(io.BytesIO(payload), self.bucket, self._key(name), Config=_TRANSFER)
        except Exception as error:
            raise _failure(f"{self.url}/{name} could not be written", error) from error
        return f"{self.url}/{name}"

    def get(self, name: str) -> bytes:
        """The bytes of an object. Raises S3Gone if there is none, CheckpointError."""
        buffer = io.BytesIO()
        try:
            _client().download_fileobj(self.bucket, self._key(name), buffer, Config=_TRANSFER)
        except Exception as error:
            if code_of(error) in _GONE:
                raise S3Gone(f"{self.url}/{name}") from error
            raise _failure(f"{self.url}/{name} could not be read", error) from error
        return buffer.getvalue()

    def has(self, name: str) -> bool:
        """Whether there is such an object. Raises CheckpointError."""
        try:
            _client().head_object(Bucket=self.bucket, Key=self._key(name))
        except Exception as error:
            if code_of(error) in _GONE:
                return False
            raise _failure(f"{self.url}/{name} could not be checked", error) from error
        return True

    def delete(self, name: str) -> None:
        """Delete an object; one that is gone already is fine. Raises CheckpointError."""
        try:
            _client().delete_object(Bucket=self.bucket, Key=self._key(name))
        except Exception as error:
            raise _failure(f"{self.url}/{name} could not be deleted", error) from error

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name


def _client() -> Any:
    """This process's client for the endpoint and the credentials that its environment names."""
    return _open(*(os.environ.get(key) for key in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_PROFILE")))


@lru_cache(maxsize=4)
def _open(*_environment: str | None) -> Any:
    return Session().client("s3", config=_CONFIG)


def _failure(what: str, error: Exception) -> CheckpointError:
    """What goes wrong in a transfer comes as botocore's errors, s3transfer's or the operating system's."""
    cause = error.__cause__ if isinstance(error.__cause__, BotoCoreError | ClientError) else error
    return CheckpointError(f"{what}: {explain(cause)}")


def _remedy(error: CheckpointError, folder: S3Folder) -> str:
    cause = error.__cause__
    if cause is not None and code_of(cause) == _NO_BUCKET:
        return f"there is no bucket {folder.bucket}; make it by `aws s3 mb s3://{folder.bucket}`, or name another"
    if cause is not None and lacks_rights(cause):
        return (
            f"s3:PutObject and s3:DeleteObject on {folder.url}/* are not allowed; name the bucket in the role's policy "
            "(rubberband/cloud/aws/policies/driver.json)"
        )
    return str(error).partition(": ")[2]


# What is put beside the checkpoints for instances to fetch, in the bucket of the store; its errors in one line.
#
# Checkpoints themselves go through `s3.S3Folder`, in the processes that write them.


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
