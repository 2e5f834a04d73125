"""What runs on an instance that is another machine: its lease, and what the cloud and the kernel tell it of itself.

The machine's boot script arms the lease before anything else and names its file in the environment; a worker of the
driver's, on that machine, calls what is here. It imports only the standard library.
"""

from __future__ import annotations

import json
import os
import tempfile
import urllib.error
import urllib.request
from datetime import datetime
from http.client import HTTPException
from pathlib import Path

LEASE_VARIABLE = "RUBBERBAND_LEASE"
"""Environment variable: path of the lease file. Its modification time is the instant at which the machine ends."""
METADATA_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
"""Environment variable: where the instance metadata service answers, if not at its usual address."""

_METADATA = "http://169.254.169.254"
_TIMEOUT_S = 1.0
_TOKEN_S = 300
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Whatever proxy the environment names: the service answers this machine only."""


def extend_lease(until: float) -> None:
    """Let this machine live until `until` (Unix time), and no longer; nothing where it has no lease file."""
    path = os.environ.get(LEASE_VARIABLE)
    if path:
        os.utime(path, (until, until))


def machine_folder() -> Path:
    """A folder of this machine for what an experiment keeps there, for this user only; it is made where missing.

    It lies beside the lease; where there is none, in the folder for temporary files.
    """
    lease = os.environ.get(LEASE_VARIABLE)
    base = Path(lease).parent if lease else Path(tempfile.gettempdir())
    folder = base / f"rubberband-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or not folder.is_dir() or folder.is_symlink():
        raise PermissionError(f"{folder} belongs to another user; remove it")
    return folder


def metadata(path: str) -> str | None:
    """What the instance metadata service says at `path` below `meta-data` (`local-ipv4`, …); None if it says nothing.

    So it is on a machine that is no instance, too. Only version 2 of the service is spoken (IMDSv2).
    """
    base = os.environ.get(METADATA_VARIABLE, _METADATA).rstrip("/")
    try:
        lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
        token = _ask(urllib.request.Request(f"{base}/latest/api/token", method="PUT", headers=lifetime))
        headers = {"X-aws-ec2-metadata-token": token}
        return _ask(urllib.request.Request(f"{base}/latest/meta-data/{path}", headers=headers))
    except (OSError, ValueError, HTTPException):  # an HTTP status, a time-out and no route are OSErrors
        return None


def interruption() -> float | None:
    """When the cloud takes this machine away (Unix time), if it has given notice; None if it has not."""
    notice = metadata("spot/instance-action")
    if notice is None:
        return None
    try:
        return datetime.fromisoformat(json.loads(notice)["time"]).timestamp()
    except (ValueError, KeyError, TypeError):
        return None


def memory_kills(counters: Path = Path("/proc/vmstat")) -> int:
    """How many processes this machine's kernel has ended for want of memory since it booted; 0 where it does not tell.

    Those that had used up the memory of their container (cgroup) included.
    """
    try:
        found = [line.split() for line in counters.read_text().splitlines() if line.startswith("oom_kill ")]
        return sum(int(count) for _, count in found)
    except (OSError, ValueError):
        return 0


def _ask(request: urllib.request.Request) -> str:
    with _DIRECT.open(request, timeout=_TIMEOUT_S) as answer:
        text: str = answer.read().decode()
        return text
