"""Functions for an instance that is another machine: its lease, and facts from the cloud's metadata and the kernel.

The machine's boot script arms the lease first and names its file in the environment. A worker of the driver's calls
these functions on that machine. It imports only the standard library.
"""

from __future__ import annotations

import json
import os
import tempfile
from datetime import datetime
from pathlib import Path

LEASE_VARIABLE = "RUBBERBAND_LEASE"
"""Environment variable: path of the lease file, whose modification time is the end of the machine."""
METADATA_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
"""Environment variable: another address of the instance metadata service."""

_METADATA = "http://169.254.169.254"
_TIMEOUT_S = 1.0
_TOKEN_S = 300


def extend_lease(until: float) -> None:
    """Let this machine live until `until` (Unix time), and no longer. Without a lease file, do nothing."""
    path = os.environ.get(LEASE_VARIABLE)
    if path:
        os.utime(path, (until, until))


def machine_folder() -> Path:
    """Return this machine's folder for files of experiments, for this user only; create it where it is missing.

    It lies beside the lease, or without one in the folder for temporary files.
    """
    lease = os.environ.get(LEASE_VARIABLE)
    base = Path(lease).parent if lease else Path(tempfile.gettempdir())
    folder = base / f"rubberband-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or not folder.is_dir() or folder.is_symlink():
        raise PermissionError(f"{folder} belongs to another user; remove it")
    return folder


def metadata(path: str) -> str | None:
    """Return the instance metadata at `path` below `meta-data` (`local-ipv4`, …), by IMDSv2; None without an answer.

    There is none on a machine that is no instance.
    """
    from http.client import HTTPException  # here, so that an estimate needs none
    from urllib.request import ProxyHandler, Request, build_opener

    direct = build_opener(ProxyHandler({}))  # without the environment's proxy: the service answers this machine only

    def ask(request: Request) -> str:
        with direct.open(request, timeout=_TIMEOUT_S) as answer:
            return str(answer.read().decode())

    base = os.environ.get(METADATA_VARIABLE, _METADATA).rstrip("/")
    try:
        lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
        token = ask(Request(f"{base}/latest/api/token", method="PUT", headers=lifetime))
        return ask(Request(f"{base}/latest/meta-data/{path}", headers={"X-aws-ec2-metadata-token": token}))
    except (OSError, ValueError, HTTPException):  # an HTTP status, a time-out and no route are OSErrors
        return None


def interruption() -> float | None:
    """Return when the cloud interrupts this machine (Unix time); None without a notice."""
    notice = metadata("spot/instance-action")
    if notice is None:
        return None
    try:
        return datetime.fromisoformat(json.loads(notice)["time"]).timestamp()
    except (ValueError, KeyError, TypeError):
        return None


def memory_kills(counters: Path = Path("/proc/vmstat")) -> int:
    """Return how many processes the kernel has killed for lack of memory since boot; 0 without a counter.

    Those that exceeded the limit of their container (cgroup) are included.
    """
    try:
        rows = [line.split() for line in counters.read_text().splitlines() if line.startswith("oom_kill ")]
        return sum(int(count) for _, count in rows)
    except (OSError, ValueError):
        return 0
