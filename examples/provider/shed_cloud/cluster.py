"""The instances of one run: processes that join the head as machines of a cloud would. All records are files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rubberband.cloud.node import LEASE_VARIABLE
from rubberband.cloud.provider import ClusterProvider, ClusterRequest, Head, InstanceDescription, InstanceState
from rubberband.cloud.ray_head import ray_node
from rubberband.cloud.ray_head.instance import DIRECTORY_TAG, INSTANCE_TAG, end_tagged, lock
from rubberband.errors import ProviderError
from rubberband.files import write_atomically
from rubberband.values.plan import Market
from shed_cloud import Options, machine


def open_cluster(request: ClusterRequest) -> ShedProvider:
    """Return the provider of a run."""
    return ShedProvider(request)


class ShedProvider(ClusterProvider):
    """Machines of the shed. Thread-safe."""

    device: Literal["cpu", "cuda"] = "cpu"
    look_s = 0.25

    def __init__(self, request: ClusterRequest, *, token_path: Path | None = None) -> None:
        self._request, lease_s = request, request.resources.lease_length_s
        self._options = Options(**request.resources.options)
        self._head = ray_node.RayHead(
            request.experiment, request.directory, lease_s=lease_s, not_before=request.not_before, token_path=token_path
        )
        self._machines = request.directory.resolve() / "machines"
        self._mutex = threading.RLock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self.clock = self._head.clock
        self._until = self.clock() + lease_s

    def launch(self, instance: str, market: Market = "on_demand", *, first_lease_s: float | None = None) -> None:
        """Start a machine, once for repeated calls. It ends itself with its lease."""
        address = self._head.ensure().address
        with self._mutex:
            folder = self._machines / instance
            if (folder / "order.json").exists():
                return
            folder.mkdir(parents=True, exist_ok=True)
            ahead_s, temp_dir = self._until - self.clock(), ray_node.make_temp_dir()
            order = {
                "number": len(list(self._machines.iterdir())),
                "requested_at": self.clock(),
                "boot_s": self._options.boot_s,
                "lease_s": ahead_s if first_lease_s is None else min(ahead_s, first_lease_s),
                "command": ray_node.instance_command(instance, address, self._request.offer.gpus, temp_dir),
            }
            write_atomically(folder / "order.json", json.dumps(order).encode(), durable=True)
            tags = {DIRECTORY_TAG: str(self._machines), INSTANCE_TAG: instance, LEASE_VARIABLE: str(folder / "lease")}
            process = subprocess.Popen(
                [sys.executable, "-P", machine.__file__, str(folder)],
                env=ray_node.environment(os.environ, self._head.token_path, tags, ()),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._processes.append(process)

    def describe(self) -> Sequence[InstanceDescription]:
        """Return all machines, living or ended, in the order of launch."""
        with self._mutex:
            self._processes = [process for process in self._processes if process.poll() is None]
            orders = {path.parent: json.loads(path.read_text()) for path in self._machines.glob("*/order.json")}
            return [self._status(folder) for folder in sorted(orders, key=lambda folder: orders[folder]["number"])]

    def release(self, instance: str, *, fault: str = "") -> InstanceDescription:
        """End a machine and return its final status; idempotent. Raises ProviderError if it was never launched."""
        with self._mutex:
            folder = self._machines / instance
            if not (folder / "order.json").exists():
                raise ProviderError(f"instance {instance} was never launched; nothing to release")
            if self._status(folder).ended_at is None:
                self._end(folder, "")
            return self._status(folder)

    def renew_lease(self, until: float) -> None:
        """Bound the leases of new machines. The driver's worker on a machine renews that of the machine."""
        self._until = until
        self._head.renew_lease(min(until, self.clock() + self._request.resources.lease_length_s))

    def close(self) -> None:
        """End all machines and the head. Idempotent."""
        for status in self.describe():
            self.release(status.instance)
        for process in self._processes:
            process.wait()
        self._head.close()

    def head(self) -> Head | None:
        """Return the living head, or None."""
        return self._head.living()

    def ensure_head(self) -> Head:
        """Return the living head; start one on this machine if there is none. Raises HeadError."""
        return self._head.ensure()

    def last_words(self, instance: str) -> str:
        """Return the last line of its console."""
        console = self._machines / instance / "console.log"
        lines = console.read_text(errors="replace").splitlines() if console.exists() else []
        return lines[-1] if lines else ""

    def _status(self, folder: Path) -> InstanceDescription:
        order, state = json.loads((folder / "order.json").read_text()), _state(folder)
        if "running_at" in state and "ended_at" not in state:
            with lock(folder / "machine") as died:  # a machine holds it while it lives
                if died and "ended_at" not in (state := _state(folder)):
                    self._end(folder, "its machine died")
                    state = _state(folder)
        now: InstanceState = "terminated" if "ended_at" in state else "running" if "running_at" in state else "pending"
        return InstanceDescription(
            instance=folder.name,
            experiment=self._request.experiment,
            state=now,
            requested_at=order["requested_at"],
            running_at=state.get("running_at"),
            ended_at=state.get("ended_at"),
            reason=state.get("reason", ""),
        )

    def _end(self, folder: Path, reason: str) -> None:
        end_tagged(str(self._machines), folder.name)
        if "ended_at" not in (state := _state(folder)):
            state = {**state, "ended_at": self.clock(), "reason": reason}
            write_atomically(folder / "state.json", json.dumps(state).encode(), durable=True)


def _state(folder: Path) -> dict[str, Any]:
    path = folder / "state.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found
