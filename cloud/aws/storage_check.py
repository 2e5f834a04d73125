"""Whether the checkpoint store of an experiment on EC2 is seen by every instance, outlives them, and can be written."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from botocore.exceptions import ClientError

from rubberband.cloud.aws.bucket import is_bucket, place_in, trouble
from rubberband.cloud.aws.machines import Session
from rubberband.errors import InputError
from rubberband.resources import Resources

_NETWORK = re.compile(r"nfs4?|cifs|smb\w*|lustre|ceph|glusterfs|beegfs|gpfs|wekafs|9p|fuse(\..*)?")
"""File systems that other machines see too: EFS is nfs4, FSx lustre or nfs, Mountpoint for S3 fuse."""


def check_store(session: Session, resources: Resources, *, mounts: Sequence[str] | None = None) -> Iterator[str]:
    """Notes on `resources.checkpoints`. `mounts`: lines as in /proc/mounts, by default this machine's.

    Raises InputError, with the remedy, if instances do not see it, if it does not outlive them, or if it cannot be
    written; botocore's errors.
    """
    url = resources.checkpoints
    if url is None:
        raise InputError(
            "resources.checkpoints: instances of EC2 do not see the experiment's folder; give s3://bucket/prefix, or a "
            "directory on a network mount that all of them have"
        )
    if is_bucket(url):
        _check_bucket(session.client("s3"), url)
        return
    if re.match("[a-z0-9]+://", url) and not url.startswith("file://"):
        raise InputError(f"resources.checkpoints: {url} is not known; give s3://bucket/prefix, or a directory")
    path = Path(unquote(urlsplit(url).path)) if url.startswith("file://") else Path(url).expanduser()
    kind = file_system(path.absolute(), _mounts() if mounts is None else mounts)
    if _NETWORK.fullmatch(kind):
        yield f"checkpoints go to {path} ({kind}), which every instance must have mounted there (resources.aws.setup)"
        return
    if resources.market == "spot":
        raise InputError(
            f"resources.checkpoints: {path} is a directory of one machine ({kind or 'no mount'}), and checkpoints must "
            "outlive instances of the spot market; give s3://bucket/prefix or a network mount, or set market: "
            "on_demand"
        )
    yield f"checkpoints go to {path}, which is no network mount here ({kind or 'no mount found'}): do instances see it?"


def file_system(path: Path, mounts: Sequence[str]) -> str:
    """The kind of file system that `path` is on, such as `nfs4`; empty if no mount holds it."""
    best, found = -1, ""
    for line in mounts:
        words = line.split()
        if len(words) < 3:
            continue
        mount = Path(words[1].replace("\\040", " "))
        if path.is_relative_to(mount) and len(mount.parts) >= best:
            best, found = len(mount.parts), words[2]
    return found


def _mounts() -> list[str]:
    try:
        return Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return []


def _check_bucket(s3: Any, url: str) -> None:
    bucket, key = place_in(url, f".probe-{uuid.uuid4().hex}")
    try:
        s3.put_object(Bucket=bucket, Key=key, Body=b"")
        s3.get_object(Bucket=bucket, Key=key)
        s3.delete_object(Bucket=bucket, Key=key)
    except ClientError as error:
        raise InputError(f"resources.checkpoints: {trouble(error, bucket)}") from None
