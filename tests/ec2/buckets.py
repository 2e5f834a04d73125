"""Operations on buckets (s3), for callers in this process; over HTTP, `storage.py` is the S3."""

from __future__ import annotations

import hashlib
import io
from typing import Any

from botocore.response import StreamingBody

from tests.ec2.faults import FakeError
from tests.ec2.instance import as_datetime
from tests.ec2.request import Request, operation
from tests.ec2.world import ACCOUNT, BucketFacts


@operation("s3", "CreateBucket")
def create_bucket(request: Request) -> dict[str, Any]:
    """CreateBucket: a name is taken in all of AWS, and the region is named, except us-east-1."""
    name, region = request.params["Bucket"], request.world.region
    request.access.check("s3:CreateBucket", f"arn:aws:s3:::{name}")
    named = request.params.get("CreateBucketConfiguration", {}).get("LocationConstraint")
    if named != (None if region == "us-east-1" else region):
        message = "The specified location-constraint is not valid"
        raise FakeError("InvalidLocationConstraint" if named else "IllegalLocationConstraintException", message)
    if name in request.world.buckets:
        if request.world.facts(name).owner != ACCOUNT:
            message = "The requested bucket name is not available. Please select a different name and try again."
            raise FakeError("BucketAlreadyExists", message, 409)
        if region != "us-east-1":
            message = "Your previous request to create the named bucket succeeded and you already own it."
            raise FakeError("BucketAlreadyOwnedByYou", message, 409)
        return {"Location": f"/{name}"}
    request.world.buckets[name] = {}
    return {"Location": f"/{name}"}


@operation("s3", "ListBuckets")
def list_buckets(request: Request) -> dict[str, Any]:
    """ListBuckets: the account's own, of all regions."""
    request.access.check("s3:ListAllMyBuckets")
    world = request.world
    return {"Buckets": [{"Name": name} for name in sorted(world.buckets) if world.facts(name).owner == ACCOUNT]}


@operation("s3", "HeadBucket")
def head_bucket(request: Request) -> dict[str, Any]:
    bucket = request.params["Bucket"]
    try:
        _check(request, "s3:ListBucket", bucket)
    except FakeError as error:  # it has no body to say why
        status = error.http_status
        raise FakeError(str(status), "Not Found" if status == 404 else "Forbidden", status) from None
    return {"BucketRegion": request.world.facts(bucket).region}


@operation("s3", "DeleteBucket")
def delete_bucket(request: Request) -> dict[str, Any]:
    """DeleteBucket, which wants it empty."""
    bucket = request.params["Bucket"]
    _check(request, "s3:DeleteBucket", bucket)
    if request.world.buckets[bucket] or request.world.facts(bucket).deleted:
        raise FakeError("BucketNotEmpty", "The bucket you tried to delete is not empty", 409)
    del request.world.buckets[bucket]
    request.world.bucket_facts.pop(bucket, None)
    return {}


@operation("s3", "PutPublicAccessBlock")
def put_public_access_block(request: Request) -> dict[str, Any]:
    _facts(request, "s3:PutBucketPublicAccessBlock").public_block = request.params["PublicAccessBlockConfiguration"]
    return {}


@operation("s3", "GetPublicAccessBlock")
def get_public_access_block(request: Request) -> dict[str, Any]:
    found = _facts(request, "s3:GetBucketPublicAccessBlock").public_block
    if found is None:
        message = "The public access block configuration was not found"
        raise FakeError("NoSuchPublicAccessBlockConfiguration", message, 404)
    return {"PublicAccessBlockConfiguration": found}


@operation("s3", "PutBucketLifecycleConfiguration")
def put_lifecycle(request: Request) -> dict[str, Any]:
    _facts(request, "s3:PutLifecycleConfiguration").lifecycle = request.params["LifecycleConfiguration"]["Rules"]
    return {}


@operation("s3", "GetBucketLifecycleConfiguration")
def get_lifecycle(request: Request) -> dict[str, Any]:
    rules = _facts(request, "s3:GetLifecycleConfiguration").lifecycle
    if rules is None:
        raise FakeError("NoSuchLifecycleConfiguration", "The lifecycle configuration does not exist", 404)
    return {"Rules": rules}


@operation("s3", "GetBucketVersioning")
def get_versioning(request: Request) -> dict[str, Any]:
    """GetBucketVersioning, which says nothing of a bucket that never kept versions."""
    return {"Status": "Enabled"} if _facts(request, "s3:GetBucketVersioning").keeps_versions else {}


@operation("s3", "ListObjectVersions")
def list_versions(request: Request) -> dict[str, Any]:
    """ListObjectVersions: a thousand at most, with the markers of deleted objects on the last page."""
    bucket = request.params["Bucket"]
    _check(request, "s3:ListBucketVersions", bucket)
    objects, after = request.world.buckets[bucket], request.params.get("KeyMarker", "")
    keys = sorted(key for key in objects if key > after)
    shown = [{"Key": key, "VersionId": "null", "Size": len(objects[key])} for key in keys[:1000]]
    if len(keys) > 1000:
        return {"Versions": shown, "IsTruncated": True, "NextKeyMarker": keys[999], "NextVersionIdMarker": "null"}
    markers = [{"Key": key, "VersionId": "m"} for key in sorted(request.world.facts(bucket).deleted)]
    return {"Versions": shown, "DeleteMarkers": markers, "IsTruncated": False}


@operation("s3", "DeleteObjects")
def delete_objects(request: Request) -> dict[str, Any]:
    """DeleteObjects: a thousand at most."""
    bucket, named = request.params["Bucket"], request.params["Delete"]["Objects"]
    _check(request, "s3:DeleteObject", bucket, "/*")
    if not 0 < len(named) <= 1000:
        raise FakeError("MalformedXML", "The XML you provided was not well-formed", 400)
    for one in named:
        if one.get("VersionId") == "m":
            request.world.facts(bucket).deleted.discard(one["Key"])
        else:
            request.world.buckets[bucket].pop(one["Key"], None)
    return {"Deleted": [{"Key": one["Key"]} for one in named]}


@operation("s3", "PutObject")
def put_object(request: Request) -> dict[str, Any]:
    objects = _objects(request, "s3:PutObject")
    _check_key(request, "kms:GenerateDataKey")
    body = request.params.get("Body", b"")
    content = body.encode() if isinstance(body, str) else bytes(body if isinstance(body, bytes) else body.read())
    objects[request.params["Key"]] = content
    request.world.facts(request.params["Bucket"]).written_at[request.params["Key"]] = request.now
    return {"ETag": _tag(content)}


@operation("s3", "GetObject")
def get_object(request: Request) -> dict[str, Any]:
    objects, key = _objects(request, "s3:GetObject"), request.params["Key"]
    if key not in objects:
        raise FakeError("NoSuchKey", "The specified key does not exist.", 404)
    _check_key(request, "kms:Decrypt")
    content = objects[key]
    body = StreamingBody(io.BytesIO(content), len(content))
    return {"Body": body, "ContentLength": len(content), "ETag": _tag(content)}


@operation("s3", "HeadObject")
def head_object(request: Request) -> dict[str, Any]:
    objects, key = _objects(request, "s3:GetObject"), request.params["Key"]
    if key not in objects:
        raise FakeError("404", "Not Found", 404)
    written_at = request.world.facts(request.params["Bucket"]).written_at.get(key, request.now)
    content = objects[key]
    return {"ContentLength": len(content), "ETag": _tag(content), "LastModified": as_datetime(written_at)}


@operation("s3", "DeleteObject")
def delete_object(request: Request) -> dict[str, Any]:
    """DeleteObject, which succeeds for what is not there as well."""
    _objects(request, "s3:DeleteObject").pop(request.params["Key"], None)
    return {}


@operation("s3", "ListObjectsV2")
def list_objects(request: Request) -> dict[str, Any]:
    """ListObjectsV2, in one page."""
    bucket, prefix = request.params["Bucket"], request.params.get("Prefix", "")
    _check(request, "s3:ListBucket", bucket)
    objects = request.world.buckets[bucket]
    shown = [
        {"Key": key, "Size": len(content), "ETag": _tag(content), "LastModified": as_datetime(request.now)}
        for key, content in sorted(objects.items())
        if key.startswith(prefix)
    ]
    found = {"Contents": shown} if shown else {}
    return {"Name": bucket, "Prefix": prefix, "KeyCount": len(shown), "IsTruncated": False, **found}


def _objects(request: Request, action: str) -> dict[str, bytes]:
    bucket = request.params["Bucket"]
    _check(request, action, bucket, f"/{request.params['Key']}")
    return request.world.buckets[bucket]


def _facts(request: Request, action: str) -> BucketFacts:
    _check(request, action, request.params["Bucket"])
    return request.world.facts(request.params["Bucket"])


def _check(request: Request, action: str, bucket: str, key: str = "") -> None:
    """Raises FakeError unless the caller may do this to an existing bucket, whose owner allows it too."""
    request.access.check(action, f"arn:aws:s3:::{bucket}{key}")
    if bucket not in request.world.buckets:
        raise FakeError("NoSuchBucket", "The specified bucket does not exist", 404)
    facts = request.world.facts(bucket)
    expected = request.params.get("ExpectedBucketOwner", facts.owner)
    if expected != facts.owner or (facts.owner != ACCOUNT and not facts.public):
        raise FakeError("AccessDenied", "Access Denied", 403)


def _check_key(request: Request, action: str) -> None:
    """Raises FakeError unless the caller may use the key of KMS with which the bucket encrypts."""
    key = request.world.facts(request.params["Bucket"]).kms_key
    if key is None:
        return
    try:
        request.access.check(action, key)
    except FakeError as error:
        raise FakeError("AccessDenied", error.message, 403) from None


def _tag(content: bytes) -> str:
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'
