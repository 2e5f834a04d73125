"""Start one Ray node and wait for its end, as `ray start --block` does, but without unused parts.

The script is run by path, with the arguments of `ray start`. It omits the imports of Ray's command line, the
dashboard's process, the server of Ray's client and the two agents of each node: together they take longer to start
than the node. A raylet needs two processes in place of the agents: it gets two that wait, and unused ports.
If this version of Ray is built differently, the script runs plain `ray start`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

_NO_PORT = -1
_STAND_IN = "import os,sys,time\np=os.getppid()\nsys.stdin.read()\nwhile os.getppid()==p:time.sleep(1)"
"""Lives as long as the raylet, which holds the other end of its standard input (or, in another Ray, is its parent)."""
_WORKER_PORTS = (10_002, 19_999)
"""Lowest and highest port, as in `ray start`."""
_WORKER_SCRIPT = "RUBBERBAND_WORKER_SCRIPT"
"""Variable of `worker_start`, whose import would take too long."""
_LOOK_S = 0.5


def main(argv: Sequence[str]) -> None:
    """Start the node that `words` describe, and end when it does."""
    try:
        start = _prepared(_parse(argv))
    except (AttributeError, ImportError, TypeError) as error:  # nothing was started yet
        print(f"plain ray start, as this is another Ray: {type(error).__name__}: {error}", flush=True)
        os.execv(sys.executable, [sys.executable, "-m", "ray.scripts.scripts", *argv])
    node = start()
    print("Ray runtime started.", flush=True)  # as `ray start` does: see `instance.STARTED`
    while not (dead := node.dead_processes()):
        time.sleep(_LOOK_S)
    for kind, process in dead:
        print(f"its {kind} ended with exit status {process.returncode}", flush=True)
    node.kill_all_processes(check_alive=False, allow_graceful=False)
    os._exit(1)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ray")
    parser.add_argument("start")
    for name in ("block", "head", "no-monitor"):
        parser.add_argument(f"--{name}", action="store_true")
    for name in ("address", "node-ip-address", "temp-dir", "labels", "include-dashboard", "include-log-monitor"):
        parser.add_argument(f"--{name}")
    for name in ("port", "num-cpus", "num-gpus", "object-store-memory"):
        parser.add_argument(f"--{name}", type=int)
    return parser.parse_args(argv)


def _prepared(chosen: argparse.Namespace) -> Callable[[], Any]:
    """Return a function that starts the node and returns once it has joined. Parts that another Ray may lack are
    looked up before."""
    from ray._private import services, workers
    from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class LeanNode(Node):
        """A node whose head has no dashboard."""

        def start_api_server(self, **_: Any) -> None:
            self._webui_url = ""

    host = chosen.node_ip_address or services.get_node_ip_address(chosen.address)  # type: ignore[no-untyped-call]
    parameters = cast(Any, RayParams)(  # its types say other things than its documentation
        gcs_address=chosen.address,
        gcs_server_port=chosen.port,
        node_ip_address=host,
        node_name=host,
        num_cpus=chosen.num_cpus,
        num_gpus=chosen.num_gpus,
        labels=dict(label.split("=", 1) for label in (chosen.labels or "").split(",") if label),
        object_store_memory=chosen.object_store_memory,
        temp_dir=chosen.temp_dir,
        min_worker_port=_WORKER_PORTS[0],
        max_worker_port=_WORKER_PORTS[1],
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
        num_redis_shards=None,
    )
    script = Path(workers.__file__).parent / "default_worker.py"
    if script.is_file():
        os.environ[_WORKER_SCRIPT] = str(script)
        parameters.update_if_absent(worker_path=str(Path(__file__).with_name("worker_start.py")))
    ensure_token_if_auth_enabled({}, create_token_if_missing=False)
    _start_without_agents(services)
    return lambda: LeanNode(parameters, head=chosen.head, shutdown_at_exit=True, spawn_reaper=True)


def _start_without_agents(services: Any) -> None:
    """Let raylets start with stand-ins for their agents."""
    import ray

    core: Any = ray._raylet
    persist_port = core.persist_port
    ports = (
        core.DASHBOARD_AGENT_LISTEN_PORT_NAME,
        core.METRICS_AGENT_PORT_NAME,
        core.METRICS_EXPORT_PORT_NAME,
        core.RUNTIME_ENV_AGENT_PORT_NAME,
    )
    start_process = services.start_ray_process
    stand_in = subprocess.list2cmdline([sys.executable, "-I", "-S", "-c", _STAND_IN])

    def start(command: list[str], kind: str, *rest: Any, **named: Any) -> Any:
        flags = dict(word[2:].split("=", 1) for word in command if word.startswith("--") and "=" in word)
        agents = [flag for flag in flags if flag.endswith("_agent_command")]
        if agents:
            for port in ports:
                persist_port(flags["session_dir"], flags["node_id"], port, _NO_PORT)
            command = [word for word in command if word[2:].split("=", 1)[0] not in agents]
            command += [f"--{agent}={stand_in}" for agent in agents]
        return start_process(command, kind, *rest, **named)

    services.start_ray_process = start


if __name__ == "__main__":
    main(sys.argv[1:])
