"""Operations on buckets (s3): what boto3 needs to keep checkpoints and packages."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import tempfile
import uuid
import zlib
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from botocore.response import StreamingBody

from tests.ec2.faults import FakeError
from tests.ec2.instance import as_datetime
from tests.ec2.request import Request, operation
from tests.ec2.world import ACCOUNT, BucketFacts

ON_A_PAGE = 2
"""Keys that a list shows at most: S3 may stop anywhere, and who reads the first page alone is seen."""


class Files(MutableMapping[str, bytes]):
    """Objects of a bucket as files of a folder, whose names are the quoted keys; writes are atomic, as S3's are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def _path(self, key: str) -> Path:
        name = quote(key, safe="")
        return self.folder / (name.replace(".", "%2E") if name.startswith(".") else name)

    def __getitem__(self, key: str) -> bytes:
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            raise KeyError(key) from None

    def __setitem__(self, key: str, content: bytes) -> None:
        descriptor, draft = tempfile.mkstemp(dir=self.folder, prefix=".put-")
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(draft, self._path(key))

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise KeyError(key)
        self._path(key).unlink()

    def __iter__(self) -> Iterator[str]:
        return (unquote(name) for name in sorted(os.listdir(self.folder)) if not name.startswith("."))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@operation("s3", "HeadBucket")
def head_bucket(request: Request) -> dict[str, Any]:
    bucket = request.params["Bucket"]
    try:
        _check(request, "s3:ListBucket", bucket)
    except FakeError as error:  # it has no body to say why
        status = error.http_status
        raise FakeError(str(status), "Not Found" if status == 404 else "Forbidden", status) from None
    return {"BucketRegion": request.world.facts(bucket).region}


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
    """ListObjectVersions, with the markers of deleted objects on the last page."""
    bucket = request.params["Bucket"]
    _check(request, "s3:ListBucketVersions", bucket)
    objects, after = request.world.buckets[bucket], request.params.get("KeyMarker", "")
    keys = sorted(key for key in objects if key > after)
    shown = [{"Key": key, "VersionId": "null", "Size": len(objects[key])} for key in keys[:ON_A_PAGE]]
    if len(keys) > ON_A_PAGE:
        return {
            "Versions": shown,
            "IsTruncated": True,
            "NextKeyMarker": shown[-1]["Key"],
            "NextVersionIdMarker": "null",
        }
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
    content, key = _content(request), request.params["Key"]
    if request.params.get("IfNoneMatch") == "*" and key in objects:
        message = "At least one of the pre-conditions you specified did not hold"
        raise FakeError("PreconditionFailed", message, 412)
    _write(request, request.params["Bucket"], key, content)
    return {"ETag": _tag(content)}


def _write(request: Request, bucket: str, key: str, content: bytes) -> None:
    request.world.buckets[bucket][key] = content
    request.world.facts(bucket).written_at[key] = request.now


def _content(request: Request) -> bytes:
    """The Body, as the client summed it."""
    body = request.params.get("Body", b"")
    content = body.encode() if isinstance(body, str) else bytes(body if isinstance(body, bytes) else body.read())
    expected = request.params.get("ChecksumCRC32")
    if expected not in (None, base64.b64encode(zlib.crc32(content).to_bytes(4, "big")).decode()):
        raise FakeError("BadDigest", "The CRC32 you specified did not match the calculated checksum.")
    return content


@operation("s3", "CreateMultipartUpload")
def begin_upload(request: Request) -> dict[str, Any]:
    _objects(request, "s3:PutObject")
    bucket, key, upload = request.params["Bucket"], request.params["Key"], uuid.uuid4().hex
    request.world.uploads[upload] = bucket, key, {}
    return {"Bucket": bucket, "Key": key, "UploadId": upload}


@operation("s3", "UploadPart")
def upload_part(request: Request) -> dict[str, Any]:
    content = _content(request)
    _upload(request, "s3:PutObject")[2][request.params["PartNumber"]] = content
    return {"ETag": _tag(content)}


@operation("s3", "CompleteMultipartUpload")
def complete_upload(request: Request) -> dict[str, Any]:
    bucket, key, parts = _upload(request, "s3:PutObject")
    content = b"".join(parts[number] for number in sorted(parts))
    _write(request, bucket, key, content)
    del request.world.uploads[request.params["UploadId"]]
    return {"Bucket": bucket, "Key": key, "ETag": _tag(content)}


@operation("s3", "AbortMultipartUpload")
def abort_upload(request: Request) -> dict[str, Any]:
    _upload(request, "s3:AbortMultipartUpload")
    del request.world.uploads[request.params["UploadId"]]
    return {}


@operation("s3", "ListMultipartUploads")
def list_uploads(request: Request) -> dict[str, Any]:
    bucket, prefix = request.params["Bucket"], request.params.get("Prefix", "")
    _check(request, "s3:ListBucketMultipartUploads", bucket)
    found = [(each, key) for each, (where, key, _) in request.world.uploads.items() if where == bucket]
    return {"Uploads": [{"Key": key, "UploadId": each} for each, key in found if key.startswith(prefix)]}


def _upload(request: Request, action: str) -> tuple[str, str, dict[int, bytes]]:
    _objects(request, action)
    if request.params["UploadId"] not in request.world.uploads:
        raise FakeError("NoSuchUpload", "The specified multipart upload does not exist.", 404)
    return request.world.uploads[request.params["UploadId"]]


@operation("s3", "GetObject")
def get_object(request: Request) -> dict[str, Any]:
    objects, key = _objects(request, "s3:GetObject"), request.params["Key"]
    if key not in objects:
        raise FakeError("NoSuchKey", "The specified key does not exist.", 404)
    _check_key(request, "kms:Decrypt")
    whole = content = objects[key]
    span: dict[str, str] = {}
    if "Range" in request.params:
        first, _, last = request.params["Range"].removeprefix("bytes=").partition("-")
        if int(first) >= len(whole):
            raise FakeError("InvalidRange", "The requested range is not satisfiable", 416)
        content = whole[int(first) : int(last) + 1 if last else None]
        span["ContentRange"] = f"bytes {first}-{int(first) + len(content) - 1}/{len(whole)}"
    body = StreamingBody(io.BytesIO(content), len(content))
    return {"Body": body, "ContentLength": len(content), "ETag": _tag(whole), **span}


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
    """ListObjectsV2: keys with the delimiter after the prefix are cut off there, and shown once."""
    bucket, prefix = request.params["Bucket"], request.params.get("Prefix", "")
    _check(request, "s3:ListBucket", bucket)
    objects, delimiter = request.world.buckets[bucket], request.params.get("Delimiter")
    after = request.params.get("ContinuationToken") or request.params.get("StartAfter", "")
    found = dict.fromkeys(_cut(key, len(prefix), delimiter) for key in sorted(objects) if key.startswith(prefix))
    rest, most = [each for each in found if each > after], min(request.params.get("MaxKeys", ON_A_PAGE), ON_A_PAGE)
    shown = [
        {"Key": key, "Size": len(content), "ETag": _tag(content), "LastModified": as_datetime(request.now)}
        for key in rest[:most]
        if key in objects
        for content in [objects[key]]
    ]
    more = {"NextContinuationToken": rest[most - 1]} if len(rest) > most else {}
    common = [{"Prefix": each} for each in rest[:most] if each not in objects]
    parts = {name: each for name, each in (("Contents", shown), ("CommonPrefixes", common)) if each}
    return {"Name": bucket, "Prefix": prefix, "KeyCount": len(rest[:most]), "IsTruncated": bool(more), **parts, **more}


def _cut(key: str, begin: int, delimiter: str | None) -> str:
    end = key.find(delimiter, begin) if delimiter else -1
    return key if end < 0 else key[: end + len(delimiter or "")]


def _objects(request: Request, action: str) -> MutableMapping[str, bytes]:
    bucket = request.params["Bucket"]
    _check(request, action, bucket, f"/{request.params['Key']}")
    return request.world.buckets[bucket]


def _facts(request: Request, action: str) -> BucketFacts:
    _check(request, action, request.params["Bucket"])
    return request.world.facts(request.params["Bucket"])


def _check(request: Request, action: str, bucket: str, key: str = "") -> None:
    """Raises FakeError unless the caller may do this to an existing bucket, whose owner allows it too."""
    request.access.check(action, f"arn:aws:s3:::{request.world.bucket_of_policies or bucket}{key}")
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
