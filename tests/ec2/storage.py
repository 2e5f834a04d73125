"""A small S3: what boto3 needs to keep checkpoints and packages, as files in a directory. No versions, no permissions.

A bucket is a directory; an object is one file in it whose name is the quoted key. Writes are atomic, as S3's are.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import tempfile
import uuid
import zlib
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import formatdate
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, quote, unquote
from xml.etree import ElementTree

from tests.ec2.wire import Response, xml_response, xml_text
from tests.ec2.world import ACCOUNT, BucketFacts

_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_LONGEST_NAME = 255
_MOST_KEYS = 1000
_PARTS: Final = ".parts"
"""A directory in a bucket with the parts of uploads under way; no object's file starts with a dot."""


_SETTINGS: Final = {
    "publicAccessBlock": "NoSuchPublicAccessBlockConfiguration",
    "lifecycle": "NoSuchLifecycleConfiguration",
}
"""Settings of a bucket, which are kept as they are sent -> the error where there is none."""


class _Refused(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Storage:
    """The objects under `directory`, which is made when the first bucket is. `facts`: owner and region of a bucket."""

    def __init__(self, directory: Path, facts: Callable[[str], BucketFacts]) -> None:
        self.directory, self._facts = directory, facts

    def make_bucket(self, name: str) -> None:
        (self.directory / name).mkdir(parents=True, exist_ok=True)

    def handle(self, method: str, path: str, query: str, headers: Mapping[str, str], body: bytes) -> Response:
        """Answer a request in path style (`/bucket/key`)."""
        bucket, _, key = path.lstrip("/").partition("/")
        arguments = dict(parse_qsl(query, keep_blank_values=True))
        try:
            if not bucket:
                return self._list_buckets()
            if not key:
                return self._on_bucket(method, unquote(bucket), arguments, headers, body)
            return self._on_object(method, unquote(bucket), unquote(key), arguments, headers, body)
        except _Refused as refusal:
            if method == "HEAD":
                return Response(status=refusal.status)
            text = f"<Code>{refusal.code}</Code><Message>{xml_text(str(refusal))}</Message>"
            return xml_response(refusal.status, f"<Error>{text}<RequestId>{uuid.uuid4()}</RequestId></Error>")

    def _list_buckets(self) -> Response:
        self.directory.mkdir(parents=True, exist_ok=True)
        names = sorted(path.name for path in self.directory.iterdir() if path.is_dir())
        names = [name for name in names if self._facts(name).owner == ACCOUNT]
        buckets = "".join(f"<Bucket><Name>{xml_text(name)}</Name></Bucket>" for name in names)
        return _document("ListAllMyBucketsResult", f"<Buckets>{buckets}</Buckets>")

    def _on_bucket(
        self, method: str, bucket: str, arguments: Mapping[str, str], headers: Mapping[str, str], body: bytes
    ) -> Response:
        if method == "PUT" and not arguments:
            return self._make(bucket)
        directory = self._bucket(bucket, headers)
        for setting in _SETTINGS.keys() & arguments.keys():
            return _setting(directory / f".{setting}", method, setting, body)
        if method == "GET" and "versions" in arguments:
            return _list_versions(directory, bucket)
        if method == "HEAD":
            return Response(headers={"x-amz-bucket-region": self._facts(bucket).region})
        if method == "GET" and "versioning" in arguments:
            return _document("VersioningConfiguration", "")
        if method == "GET" and "location" in arguments:
            return _document("LocationConstraint", "")
        if method == "GET":
            return _list_objects(directory, bucket, arguments)
        if method == "POST" and "delete" in arguments:
            return _delete_objects(directory, body)
        if method == "DELETE":
            return _delete_bucket(directory)
        raise _Refused(501, "NotImplemented", f"this S3 does not know {method} of a bucket with {sorted(arguments)}")

    def _on_object(
        self,
        method: str,
        bucket: str,
        key: str,
        arguments: Mapping[str, str],
        headers: Mapping[str, str],
        body: bytes,
    ) -> Response:
        directory = self._bucket(bucket, headers)
        path = directory / _file_name(key)
        match method:
            case "PUT":
                content = _content(headers, body)
                target = _part(directory, arguments) if "uploadId" in arguments else path
                return _put(target, content, headers)
            case "GET" | "HEAD":
                return _get(path, key, headers.get("Range"), with_body=method == "GET")
            case "DELETE" if "uploadId" in arguments:
                shutil.rmtree(_upload(directory, arguments), ignore_errors=True)
                return Response(status=204)
            case "DELETE":
                path.unlink(missing_ok=True)
                return Response(status=204)
            case "POST" if "uploads" in arguments:
                return _begin_upload(directory, bucket, key)
            case "POST" if "uploadId" in arguments:
                return _complete_upload(path, _upload(directory, arguments), bucket, key)
        raise _Refused(501, "NotImplemented", f"this S3 does not know {method} of an object with {sorted(arguments)}")

    def _make(self, bucket: str) -> Response:
        if (self.directory / bucket).is_dir() and self._facts(bucket).owner != ACCOUNT:
            raise _Refused(409, "BucketAlreadyExists", "The requested bucket name is not available.")
        self.make_bucket(bucket)
        return Response(headers={"Location": f"/{bucket}"})

    def _bucket(self, name: str, headers: Mapping[str, str]) -> Path:
        directory = self.directory / name
        if name in {".", ".."} or not directory.is_dir():
            raise _Refused(404, "NoSuchBucket", f"The specified bucket does not exist: {name}")
        facts, expected = self._facts(name), headers.get("x-amz-expected-bucket-owner")
        if expected not in (None, facts.owner) or (facts.owner != ACCOUNT and not facts.public):
            raise _Refused(403, "AccessDenied", "Access Denied")
        return directory


def rights(method: str, path: str, query: str, bucket: str) -> tuple[str, str]:
    """The action that a request needs and the resource that it needs it on, were the policies' bucket `bucket`.

    Every bucket here stands for the one that the policies leave open.
    """
    named, _, key = unquote(path).lstrip("/").partition("/")
    arguments = dict(parse_qsl(query, keep_blank_values=True))
    if not named:
        return "s3:ListAllMyBuckets", "*"
    arn = f"arn:aws:s3:::{bucket}"
    if not key:
        if method == "POST" and "delete" in arguments:
            return "s3:DeleteObject", f"{arn}/*"
        if "uploads" in arguments:
            return "s3:ListBucketMultipartUploads", arn
        if _SETTINGS.keys() & arguments.keys():
            return ("s3:GetBucketLocation" if method == "GET" else "s3:PutBucketPublicAccessBlock"), arn
        actions = {"PUT": "s3:CreateBucket", "DELETE": "s3:DeleteBucket"}
        return ("s3:GetBucketLocation" if "location" in arguments else actions.get(method, "s3:ListBucket")), arn
    if method == "DELETE":
        return ("s3:AbortMultipartUpload" if "uploadId" in arguments else "s3:DeleteObject"), f"{arn}/{key}"
    return ("s3:GetObject" if method in ("GET", "HEAD") else "s3:PutObject"), f"{arn}/{key}"


def _document(name: str, content: str) -> Response:
    return xml_response(200, f'<{name} xmlns="{_NAMESPACE}">{content}</{name}>')


def _file_name(key: str) -> str:
    name = quote(key, safe="").replace(".", "%2E") if key.startswith(".") else quote(key, safe="")
    if len(name) > _LONGEST_NAME:
        raise _Refused(
            400, "KeyTooLongError", f"Your key is too long: {len(name)} bytes; this S3 takes {_LONGEST_NAME}"
        )
    return name


def _content(headers: Mapping[str, str], body: bytes) -> bytes:
    """What is to be stored: without the framing of `aws-chunked`, and as the client summed it."""
    trailers: dict[str, str] = {}
    if "aws-chunked" in headers.get("Content-Encoding", ""):
        body, trailers = decode_chunks(body)
    expected = headers.get("x-amz-checksum-crc32") or trailers.get("x-amz-checksum-crc32")
    if expected is not None and expected != base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode():
        raise _Refused(400, "BadDigest", "The CRC32 you specified did not match the calculated checksum.")
    return body


def decode_chunks(body: bytes) -> tuple[bytes, dict[str, str]]:
    """The content and the trailing headers of a body in `aws-chunked` encoding (each chunk's size before it, hex)."""
    parts = []
    position = 0
    while True:
        end = body.index(b"\r\n", position)
        size = int(body[position:end].split(b";")[0], 16)
        position = end + 2
        if size == 0:
            break
        parts.append(body[position : position + size])
        position += size + 2
    lines = body[position:].decode().split("\r\n")
    trailers = (line.partition(":") for line in lines if ":" in line)
    return b"".join(parts), {name.strip().lower(): value.strip() for name, _, value in trailers}


def _put(path: Path, content: bytes, headers: Mapping[str, str]) -> Response:
    if headers.get("If-None-Match") == "*" and path.exists():
        raise _Refused(412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold")
    _write(path, content)
    return Response(headers={"ETag": _etag(content)})


def _write(path: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".put-")
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    os.replace(temporary, path)


def _etag(content: bytes) -> str:
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'


def _get(path: Path, key: str, span: str | None, *, with_body: bool) -> Response:
    try:
        content = path.read_bytes()
        modified_at = path.stat().st_mtime
    except FileNotFoundError as error:
        raise _Refused(404, "NoSuchKey", f"The specified key does not exist: {key}") from error
    headers = {
        "ETag": _etag(content),
        "Last-Modified": formatdate(modified_at, usegmt=True),
        "Content-Type": "binary/octet-stream",
        "Accept-Ranges": "bytes",
    }
    status, chosen = 200, content
    if span is not None:
        first, last = _span(span, len(content))
        status, chosen = 206, content[first : last + 1]
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
    headers["Content-Length"] = str(len(chosen))
    return Response(status=status, headers=headers, body=chosen if with_body else b"")


def _span(header: str, size: int) -> tuple[int, int]:
    """The first and last byte that a Range header asks for."""
    first, _, last = header.removeprefix("bytes=").partition("-")
    if not first:
        return max(size - int(last), 0), size - 1
    if int(first) >= size:
        raise _Refused(416, "InvalidRange", f"The requested range is not satisfiable: {header} of {size} bytes")
    return int(first), min(int(last), size - 1) if last else size - 1


def _keys(directory: Path) -> list[str]:
    return sorted(unquote(path.name) for path in directory.iterdir() if not path.name.startswith("."))


def _list_objects(directory: Path, bucket: str, arguments: Mapping[str, str]) -> Response:
    prefix, delimiter = arguments.get("prefix", ""), arguments.get("delimiter", "")
    limit = min(int(arguments.get("max-keys", _MOST_KEYS)), _MOST_KEYS)
    after = arguments.get("continuation-token") or arguments.get("start-after", "")
    entries = _entries(_keys(directory), prefix, delimiter)
    rest = [entry for entry in entries if entry > after]
    chosen = rest[:limit]
    quoted: Callable[[str], str] = quote if arguments.get("encoding-type") == "url" else xml_text
    texts = [_listed(directory, entry, prefix, delimiter, quoted) for entry in chosen]
    more = f"<NextContinuationToken>{xml_text(chosen[-1])}</NextContinuationToken>" if len(rest) > limit > 0 else ""
    encoding = "<EncodingType>url</EncodingType>" if arguments.get("encoding-type") == "url" else ""
    return _document(
        "ListBucketResult",
        f"<Name>{bucket}</Name><Prefix>{quoted(prefix)}</Prefix><MaxKeys>{limit}</MaxKeys>{encoding}{more}"
        f"<KeyCount>{len(chosen)}</KeyCount><IsTruncated>{'true' if more else 'false'}</IsTruncated>{''.join(texts)}",
    )


def _entries(keys: list[str], prefix: str, delimiter: str) -> list[str]:
    """The keys under `prefix`, those with `delimiter` in the rest cut off after it, each once, in order."""
    entries = set()
    for key in keys:
        if key.startswith(prefix):
            head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key[len(prefix) :], "", "")
            entries.add(prefix + head + found)
    return sorted(entries)


def _listed(directory: Path, entry: str, prefix: str, delimiter: str, quoted: Callable[[str], str]) -> str:
    if delimiter and entry[len(prefix) :].endswith(delimiter):
        return f"<CommonPrefixes><Prefix>{quoted(entry)}</Prefix></CommonPrefixes>"
    path = directory / _file_name(entry)
    stat = path.stat()
    modified = datetime.fromtimestamp(stat.st_mtime, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return (
        f"<Contents><Key>{quoted(entry)}</Key><LastModified>{modified}</LastModified><Size>{stat.st_size}</Size>"
        f"<ETag>{xml_text(_etag(path.read_bytes()))}</ETag><StorageClass>STANDARD</StorageClass></Contents>"
    )


def _setting(path: Path, method: str, name: str, body: bytes) -> Response:
    if method == "PUT":
        _write(path, body)
        return Response()
    if not path.exists():
        raise _Refused(404, _SETTINGS[name], "The configuration was not found")
    return Response(headers={"Content-Type": "application/xml"}, body=path.read_bytes())


def _list_versions(directory: Path, bucket: str) -> Response:
    versions = "".join(
        f"<Version><Key>{xml_text(key)}</Key><VersionId>null</VersionId>"
        f"<Size>{(directory / _file_name(key)).stat().st_size}</Size></Version>"
        for key in _keys(directory)
    )
    return _document("ListVersionsResult", f"<Name>{bucket}</Name><IsTruncated>false</IsTruncated>{versions}")


def _delete_objects(directory: Path, body: bytes) -> Response:
    keys = [node.text or "" for node in ElementTree.fromstring(body).iter() if node.tag.rpartition("}")[2] == "Key"]
    for key in keys:
        (directory / _file_name(key)).unlink(missing_ok=True)
    return _document("DeleteResult", "".join(f"<Deleted><Key>{xml_text(key)}</Key></Deleted>" for key in keys))


def _delete_bucket(directory: Path) -> Response:
    if _keys(directory):
        raise _Refused(409, "BucketNotEmpty", "The bucket you tried to delete is not empty")
    shutil.rmtree(directory)
    return Response(status=204)


def _begin_upload(directory: Path, bucket: str, key: str) -> Response:
    upload = uuid.uuid4().hex
    (directory / _PARTS / upload).mkdir(parents=True)
    content = f"<Bucket>{bucket}</Bucket><Key>{xml_text(key)}</Key><UploadId>{upload}</UploadId>"
    return _document("InitiateMultipartUploadResult", content)


def _upload(directory: Path, arguments: Mapping[str, str]) -> Path:
    upload = directory / _PARTS / arguments["uploadId"]
    if not arguments["uploadId"].isalnum() or not upload.is_dir():
        raise _Refused(404, "NoSuchUpload", "The specified multipart upload does not exist.")
    return upload


def _part(directory: Path, arguments: Mapping[str, str]) -> Path:
    return _upload(directory, arguments) / f"{int(arguments['partNumber']):05}"


def _complete_upload(path: Path, upload: Path, bucket: str, key: str) -> Response:
    content = b"".join(part.read_bytes() for part in sorted(upload.iterdir()))
    _write(path, content)
    shutil.rmtree(upload)
    text = f"<Bucket>{bucket}</Bucket><Key>{xml_text(key)}</Key><ETag>{xml_text(_etag(content))}</ETag>"
    return _document("CompleteMultipartUploadResult", text)
