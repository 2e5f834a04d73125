"""Start of a Ray node of the local cloud: its command, its environment, its temporary directory."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rubberband.cloud.provider import INSTANCE_LABEL
from rubberband.cloud.ray_head import ray_start
from rubberband.cloud.ray_head.instance import LONGEST_START_S, crowding

LOOPBACK = "127.0.0.1"
_QUIET_PORTS = range(20_000, 32_000)
"""Between the ports of Ray's workers (up to 19999) and Linux's ephemeral ports (from 32768 on)."""
_TRIES = 20
_OBJECT_STORE_BYTES = 80 * 1024**2  # Ray's least; checkpoints and reports do not pass through it

HEALTH_CHECK_DELAY_MS = 10_000
"""A node that has just joined is still starting, and may not answer at once."""

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_task_events_report_interval_ms": "0",  # no history of tasks, which the head would keep
    "RAY_memory_monitor_refresh_ms": "0",  # it would kill the latest trial; the kernel kills the largest process
    "RAY_health_check_initial_delay_ms": f"{HEALTH_CHECK_DELAY_MS}",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    # With few cores, Ray would end its own nodes during their start. The guarding process decides when to give up.
    "RAY_raylet_start_wait_time_s": f"{LONGEST_START_S:.0f}",  # until it has joined; by default 30
    "RAY_agent_register_timeout_ms": f"{LONGEST_START_S * 1000:.0f}",  # else the raylet ends itself; 30 s
    "RAY_worker_register_timeout_seconds": f"{LONGEST_START_S:.0f}",  # 60
    "SPT_NOENV": "1",  # or Ray's process titles overwrite the environment, and with it our tags
}
"""Environment of every Ray node, on this machine or another."""
NETWORK_SETTINGS = {
    "RAY_health_check_period_ms": "3000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "5",
}
"""In place of those, where nodes are on several machines: a machine that is busy for 10 s is not dead, and its boot
takes minutes. One that has ended is seen by its provider."""
CONNECT_SETTINGS = {
    "RAY_gcs_rpc_server_connect_timeout_s": "600",  # by default 5
    "RAY_py_gcs_connect_timeout_s": "600",  # 30
    "RAY_NUM_REDIS_GET_RETRIES": "600",  # a second each; 20
    "PYTHONUNBUFFERED": "1",  # the node's output shows when it has joined
}
"""Additional environment of nodes on this machine: their head lives, even if it answers late."""


def head_command(port: int, temp_dir: str, host: str = LOOPBACK) -> tuple[str, ...]:
    """Return `ray start` of a head without slots, autoscaler and dashboard; instances reach this machine at `host`."""
    reached_as = () if host == LOOPBACK else (f"--node-ip-address={host}",)
    return (
        *_ray_start(temp_dir),
        *reached_as,
        "--head",
        f"--port={port}",
        "--num-cpus=0",
        "--num-gpus=0",
        "--include-dashboard=false",
        "--no-monitor",
    )


def instance_command(name: str, address: str, gpus: int, temp_dir: str) -> tuple[str, ...]:
    """Return `ray start` of an instance that joins the head at `address`."""
    return (
        *_ray_start(temp_dir),
        f"--address={address}",
        f"--num-cpus={gpus}",
        f"--num-gpus={gpus}",
        "--labels",
        f"{INSTANCE_LABEL}={name}",
    )


def _ray_start(temp_dir: str) -> tuple[str, ...]:
    return (
        sys.executable,
        "-P",
        ray_start.__file__,
        "start",
        "--block",
        "--include-log-monitor=false",
        f"--object-store-memory={_OBJECT_STORE_BYTES}",
        f"--temp-dir={temp_dir}",
    )


def authentication(token_path: Path) -> dict[str, str]:
    """Return the environment with which head, instances and driver may join the cluster."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_path)}


def default_token_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the user's token: `ray-token` in RUBBERBAND_HOME, or in `~/.rubberband`.

    Raises RuntimeError if RUBBERBAND_HOME is not set and this user has no home.
    """
    home = environment.get("RUBBERBAND_HOME")
    return (Path(home) if home else Path.home() / ".rubberband").expanduser().resolve() / "ray-token"


def ensure_token(path: Path) -> Path:
    """Create the token that only this user can read, unless it exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".token-")  # mkstemp's mode is 0600
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(32))
            os.link(temporary, path)  # unlike a rename, never replaces a token that another process just made
        except FileExistsError:
            pass
        finally:
            os.unlink(temporary)
    return path


def environment(
    base: Mapping[str, str],
    token_path: Path,
    tags: Mapping[str, str],
    devices: Sequence[str],
    *,
    host: str = LOOPBACK,
) -> dict[str, str]:
    """Return the environment of a node: the driver's without Ray's variables, plus our settings, tags and GPUs.

    `host` is the address by which nodes reach the head. Trials get no access to the journals, nor to the password of
    their store.
    """
    chosen = {key: value for key, value in base.items() if not key.startswith("RAY_") and key != "RUBBERBAND_STORE"}
    chosen |= SETTINGS | CONNECT_SETTINGS | authentication(token_path) | dict(tags)
    chosen |= {} if host == LOOPBACK else NETWORK_SETTINGS
    chosen["RAY_health_check_initial_delay_ms"] = f"{HEALTH_CHECK_DELAY_MS * crowding():.0f}"
    if devices:
        chosen["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    else:  # Ray holds logical GPUs against it, and does not start
        chosen.pop("CUDA_VISIBLE_DEVICES", None)
    return chosen


def make_temp_dir() -> str:
    """Return a new directory with a short path, as the paths of Ray's sockets are limited to 107 characters."""
    return tempfile.mkdtemp(prefix="rb-", dir="/tmp")


def free_port(host: str = LOOPBACK) -> int:
    """Return a free TCP port of this machine's address `host`, if possible one that stays free for some seconds.

    It is no ephemeral port, of which Ray's processes take dozens before the node listens. Raises OSError if `host` is
    no address of this machine.
    """
    for port in [*(secrets.choice(_QUIET_PORTS) for _ in range(_TRIES)), 0]:
        with socket.socket() as listener:
            try:
                listener.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                found: int = listener.getsockname()[1]
                return found
    raise OSError(errno.EADDRINUSE, f"no TCP port of {host} is free")


def answers(address: str) -> bool:
    """Return whether `address` (host:port) accepts connections."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=0.5).close()
    except OSError:
        return False
    return True
