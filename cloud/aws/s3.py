"""Objects of S3: a folder of checkpoints, each written whole or not at all, and files that instances fetch."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from io import BufferedIOBase
from pathlib import Path
from typing import Any, TypeGuard

from boto3.s3.transfer import TransferConfig
from boto3.session import Session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from rubberband.cloud.aws.calls import AwsSession
from rubberband.cloud.aws.errors import FAILURES, code_of, denied_by, explain, ignoring, lacks_rights, missing_action
from rubberband.errors import CheckpointError, InputError

_log = logging.getLogger(__name__)
_CONFIG = Config(
    retries={"mode": "adaptive", "max_attempts": 6}, connect_timeout=5, read_timeout=60, max_pool_connections=16
)
_SINGLE_PUT_BYTES = 256 * 1024**2
"""A larger object is sent in parts, which S3 joins at the end: either way it is written whole, or not at all."""
_TRANSFER = TransferConfig(multipart_threshold=_SINGLE_PUT_BYTES, multipart_chunksize=_SINGLE_PUT_BYTES // 4)
_DOWNLOAD = TransferConfig(
    multipart_threshold=64 * 1024**2, multipart_chunksize=16 * 1024**2, max_concurrency=4, max_io_queue=16
)
"""By default, ten threads and the queue to the disk hold 100 MB of a checkpoint."""
_GONE = ("404", "NoSuchKey")


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Folder:
    """`s3://bucket/prefix`. It can be pickled; each process makes its own client when it needs one."""

    bucket: str
    prefix: str
    """Without slashes at its ends; may be empty."""

    @classmethod
    def parse(cls, url: str) -> S3Folder:
        """Return the folder of `s3://bucket/prefix`. Raises InputError."""
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
        """Write and delete an object. Raises InputError with the remedy if that fails."""
        name = f".probe-{uuid.uuid4().hex}"
        try:
            self.put(name, b"")
            self.delete(name)
        except CheckpointError as error:
            cause = error.__cause__
            why = trouble(cause, self.bucket) if isinstance(cause, ClientError) else str(error).partition(": ")[2]
            raise InputError(f"checkpoints cannot be written to {self.url}: {why}") from error

    def put(self, name: str, payload: bytes | Path) -> str:
        """Write an object, of bytes or of a file's content, and return its URL. Raises CheckpointError."""
        with self._failing(name, "written"):
            words = {"Bucket": self.bucket, "Key": self._key(name), "Config": _TRANSFER}
            if isinstance(payload, bytes):
                _client().upload_fileobj(io.BytesIO(payload), **words)
            else:  # by its name: of an open file, parts are read into memory
                _client().upload_file(str(payload), **words)
        return f"{self.url}/{name}"

    def get(self, name: str) -> bytes:
        """Return the bytes of an object. Raises FileNotFoundError if there is none, CheckpointError."""
        with io.BytesIO() as file:
            self.fetch(name, file)
            return file.getvalue()

    def fetch(self, name: str, file: BufferedIOBase) -> None:
        """Write the bytes of an object to a file. Raises FileNotFoundError if there is none, CheckpointError."""
        with self._failing(name, "read"), ignoring(*_GONE):
            _client().download_fileobj(self.bucket, self._key(name), file, Config=_DOWNLOAD)
            return
        raise FileNotFoundError(f"{self.url}/{name}")

    def has(self, name: str) -> bool:
        """Return whether the object exists. Raises CheckpointError."""
        with self._failing(name, "checked"), ignoring(*_GONE):
            _client().head_object(Bucket=self.bucket, Key=self._key(name))
            return True
        return False

    def names(self) -> list[str]:
        """Return the names of all objects. Raises CheckpointError."""
        start = self._key("")
        with self._failing("", "listed"):
            pages = _client().get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=start)
            return [found["Key"].removeprefix(start) for page in pages for found in page.get("Contents", ())]

    def abort_uploads(self, part: str) -> None:
        """Abort the uploads that were cut off, of objects with `part` in their names. Raises CheckpointError."""
        with self._failing("", "tidied"):
            pages = _client().get_paginator("list_multipart_uploads").paginate(Bucket=self.bucket, Prefix=self._key(""))
            for found in [found for page in pages for found in page.get("Uploads", ()) if part in found["Key"]]:
                _client().abort_multipart_upload(Bucket=self.bucket, Key=found["Key"], UploadId=found["UploadId"])

    def delete(self, name: str) -> None:
        """Delete an object; one that is gone already is fine. Raises CheckpointError."""
        with self._failing(name, "deleted"):
            _client().delete_object(Bucket=self.bucket, Key=self._key(name))

    @contextmanager
    def _failing(self, name: str, done: str) -> Iterator[None]:
        """Turn errors into CheckpointError: a transfer raises botocore's, s3transfer's or the operating system's."""
        try:
            yield
        except Exception as error:
            cause = error.__cause__ if isinstance(error.__cause__, BotoCoreError | ClientError) else error
            raise CheckpointError(f"{self.url}/{name} could not be {done}: {explain(cause)}") from error

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name


def _client() -> Any:
    """Return this process's client for the endpoint and the credentials of its environment."""
    return _open(*(os.environ.get(key) for key in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_PROFILE")))


@lru_cache(maxsize=4)
def _open(*_environment: str | None) -> Any:
    return Session().client("s3", config=_CONFIG)


# Files that instances fetch, beside the checkpoints in the bucket of the store.


def is_bucket(checkpoints: str | None) -> TypeGuard[str]:
    """Return whether a checkpoint store is a bucket (s3://…)."""
    return checkpoints is not None and checkpoints.startswith("s3://")


def place_in(checkpoints: str, name: str) -> tuple[str, str]:
    """Return bucket and key of the object `name` below a store's address."""
    bucket, _, prefix = checkpoints.removeprefix("s3://").partition("/")
    return bucket, "/".join(part for part in (prefix.strip("/"), name) if part)


def put(session: AwsSession | None, checkpoints: str, name: str, content: bytes, *, unless_there: bool = False) -> str:
    """Write `content` below the store's address and return its s3:// address. Raises InputError, with the remedy.

    Without a session nothing is written. With `unless_there`, an object of the same content is left alone.
    """
    bucket, key = place_in(checkpoints, name)
    if session is None:
        return f"s3://{bucket}/{key}"
    s3 = session.client("s3")
    try:
        words = {"Bucket": bucket, "Key": key, **owner_words(session)}
        if not (unless_there and _holds(s3, words, content)):
            s3.put_object(**words, Body=content)
    except ClientError as error:
        raise InputError(f"resources.checkpoints: {trouble(error, bucket)}") from None
    return f"s3://{bucket}/{key}"


PACKAGES = "packages"
"""Folder of the bucket with what instances run: workers may read it only, and S3 deletes its objects after
PACKAGES_DAYS."""
PACKAGES_DAYS = 30
_RENEWED_S = 86_400.0
"""An older package is written again by whoever needs it, so that it outlives the run."""


def put_package(
    session: AwsSession | None, checkpoints: str, name: str, content: bytes, *, unless_there: bool = False
) -> str:
    """Do as `put`, in the folder of packages of the store's bucket."""
    bucket, key = place_in(checkpoints, name)
    return put(session, f"s3://{bucket}/{PACKAGES}", key, content, unless_there=unless_there)


@dataclass(slots=True)
class Packages:
    """Packages of one driver, which may launch instances for longer than S3 keeps them."""

    session: AwsSession | None
    checkpoints: str | None
    contents: dict[str, bytes] = field(default_factory=dict)
    renewed_at: float = field(default_factory=time.time)

    def put(self, name: str, content: bytes) -> str:
        """Put a package into the bucket, unless it is there. Return its address. Raises as `put`."""
        assert self.checkpoints is not None
        self.contents[name] = content
        return put_package(self.session, self.checkpoints, name, content, unless_there=True)

    def renew(self) -> None:
        """Write anew, at most once a day, what is old or has expired. Errors are logged: S3 may still hold it."""
        if time.time() - self.renewed_at < _RENEWED_S:
            return
        try:
            for name, content in self.contents.items():
                self.put(name, content)
            self.renewed_at = time.time()
        except (InputError, *FAILURES) as error:
            _log.warning("packages for instances are not written anew: %s", error)


def owner_words(session: AwsSession) -> dict[str, str]:
    """Return the parameter with which S3 refuses a bucket that is not this account's; none where S3 is not AWS's.

    Raises botocore's errors.
    """
    if os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        return {}
    return {"ExpectedBucketOwner": str(session.client("sts").get_caller_identity()["Account"])}


def trouble(error: ClientError, bucket: str) -> str:
    """Return why a bucket cannot be used, with the remedy."""
    if code_of(error) == "NoSuchBucket":
        return f"there is no bucket {bucket}; make one (`rubberband aws setup`), or name another"
    if denied_by(error) is not None:
        return explain(error)
    action = missing_action(error) or ""
    if action.startswith("kms:"):
        return (
            f"the role may not {action}, and {bucket} encrypts with a key of KMS; attach "
            "rubberband/cloud/aws/policies/kms.json to the roles of head and workers, with the ARN of that key"
        )
    if lacks_rights(error) or code_of(error) == "403":
        said = action if action.startswith("s3:") else f"s3:{error.operation_name}"
        return (
            f"the role may not {said} in {bucket}; if the bucket is this account's, put its name into "
            f"rubberband/cloud/aws/policies/driver.json (and worker.json) and attach that (`rubberband aws setup "
            f"--bucket {bucket}`), else name one that is"
        )
    return explain(error)


def _holds(s3: Any, words: dict[str, str], content: bytes) -> bool:
    """Return whether the object is new, and is `content` by its ETag: the MD5, except where a key of KMS encrypts."""
    with ignoring("404", "NoSuchKey", "NotFound", "403"):  # without s3:ListBucket, a missing object answers 403
        there = s3.head_object(**words)
        is_new = time.time() - there["LastModified"].timestamp() < _RENEWED_S
        return is_new and str(there["ETag"]).strip('"') == hashlib.md5(content, usedforsecurity=False).hexdigest()
    return False
