"""A few operations on buckets (s3), for callers in this process; over HTTP, `storage.py` is the S3."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from typing import Any

from botocore.response import StreamingBody

from tests.ec2.faults import FakeError
from tests.ec2.instance import as_datetime
from tests.ec2.request import Operation, Request


def head_bucket(request: Request) -> dict[str, Any]:
    """HeadBucket."""
    bucket = request.params["Bucket"]
    request.access.check("s3:ListBucket", f"arn:aws:s3:::{bucket}")
    if bucket not in request.world.buckets:
        raise FakeError("404", "Not Found", 404)
    return {"BucketRegion": request.world.region}


def put_object(request: Request) -> dict[str, Any]:
    """PutObject."""
    objects = _objects(request, "s3:PutObject")
    body = request.params.get("Body", b"")
    content = body.encode() if isinstance(body, str) else bytes(body if isinstance(body, bytes) else body.read())
    objects[request.params["Key"]] = content
    return {"ETag": _tag(content)}


def get_object(request: Request) -> dict[str, Any]:
    """GetObject, all of it."""
    objects, key = _objects(request, "s3:GetObject"), request.params["Key"]
    if key not in objects:
        raise FakeError("NoSuchKey", "The specified key does not exist.", 404)
    content = objects[key]
    body = StreamingBody(io.BytesIO(content), len(content))
    return {"Body": body, "ContentLength": len(content), "ETag": _tag(content)}


def head_object(request: Request) -> dict[str, Any]:
    """HeadObject."""
    objects, key = _objects(request, "s3:GetObject"), request.params["Key"]
    if key not in objects:
        raise FakeError("404", "Not Found", 404)
    return {"ContentLength": len(objects[key]), "ETag": _tag(objects[key])}


def delete_object(request: Request) -> dict[str, Any]:
    """DeleteObject, which succeeds for what is not there as well."""
    _objects(request, "s3:DeleteObject").pop(request.params["Key"], None)
    return {}


def list_objects(request: Request) -> dict[str, Any]:
    """ListObjectsV2, in one page."""
    bucket, prefix = request.params["Bucket"], request.params.get("Prefix", "")
    request.access.check("s3:ListBucket", f"arn:aws:s3:::{bucket}")
    objects = _bucket(request, bucket)
    shown = [
        {"Key": key, "Size": len(content), "ETag": _tag(content), "LastModified": as_datetime(request.now)}
        for key, content in sorted(objects.items())
        if key.startswith(prefix)
    ]
    found = {"Contents": shown} if shown else {}
    return {"Name": bucket, "Prefix": prefix, "KeyCount": len(shown), "IsTruncated": False, **found}


def _objects(request: Request, action: str) -> dict[str, bytes]:
    bucket = request.params["Bucket"]
    request.access.check(action, f"arn:aws:s3:::{bucket}/{request.params['Key']}")
    return _bucket(request, bucket)


def _bucket(request: Request, bucket: str) -> dict[str, bytes]:
    if bucket not in request.world.buckets:
        raise FakeError("NoSuchBucket", "The specified bucket does not exist", 404)
    return request.world.buckets[bucket]


def _tag(content: bytes) -> str:
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'


BUCKETS: Mapping[tuple[str, str], Operation] = {
    ("s3", "HeadBucket"): head_bucket,
    ("s3", "PutObject"): put_object,
    ("s3", "GetObject"): get_object,
    ("s3", "HeadObject"): head_object,
    ("s3", "DeleteObject"): delete_object,
    ("s3", "ListObjectsV2"): list_objects,
}
