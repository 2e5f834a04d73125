"""Ray clusters on this machine whose GPUs are only counted, and the command line in processes of its own on them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from ray._private.services import get_node_ip_address
from ray.cluster_utils import Cluster

from rubberband import load_result
from rubberband.cloud.ray_cluster import view
from rubberband.executor import Result
from tests.builders.waiting import eventually

PROGRAM = """
import os, sys, time
epoch, epochs, folder = 0, int(sys.argv[2]), sys.argv[3]
os.makedirs(folder, exist_ok=True)
state = os.path.join(folder, "state")
if os.path.exists(state):
    epoch = int(open(state).read())
while epoch < epochs:
    time.sleep(float(os.environ["PACE_S"]))
    epoch += 1
    with open(state, "w") as file:
        file.write(str(epoch))
    print(f"epoch={epoch} loss={float(sys.argv[1]) / epoch}", flush=True)
"""
WORDS: Mapping[str, Any] = {
    "name": "a",
    "entrypoint": {"command": "python program.py ${lr} ${max_t} ${checkpoint}", "metrics": "stdout"},
    "search": {
        "space": {"lr": {"type": "loguniform", "lower": 1e-3, "upper": 0.5}},
        "scheduler": {"type": "sha", "num_samples": 8, "grace_period": 2, "max_t": 8, "reduction_factor": 2},
        "metric": "loss",
        "mode": "min",
    },
    "constraints": {"deadline": "30m", "objective": "min_time"},
    "resources": {"provider": "ray", "gpus_per_trial": {"max": 1}, "env": {"PACE_S": "0.7"}},
    "profile": {"seconds_per_iteration": {1: 0.5}},
}


def started(nodes: int, **words: Any) -> Cluster:
    """Return a cluster of a head without GPUs, and of `nodes` with the words of `ray start`."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
    for _ in range(nodes):
        made.add_node(**words)
    return made


class StartedHead:
    """A head that `ray start` starts, with a folder of its own. Closed in the end."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="rb-", dir="/tmp")  # short: it is a part of the names of sockets
        with socket.socket() as taken:
            taken.bind(("", 0))
            self._port = taken.getsockname()[1]
        self.address = f"{get_node_ip_address()}:{self._port}"

    def start(self, *words: str, **environment: str) -> None:
        """Run `ray start --head` with further words and variables."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--num-cpus=1", "--num-gpus=0"]
        command += [f"--port={self._port}", f"--temp-dir={self._folder}/ray", "--include-dashboard=false", *words]
        subprocess.run(command, env={**os.environ, **environment}, check=True, capture_output=True)

    def close(self) -> None:
        """End all of its processes, which name its folder or its address."""
        for process in psutil.process_iter(["cmdline"]):
            if any(self._folder in word or self.address in word for word in process.info["cmdline"] or ()):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


class AutoscaledCluster(StartedHead):
    """A head without GPUs, whose autoscaler adds nodes of two GPUs, 4 at most: processes of this machine.

    It is what `ray.cluster_utils.AutoscalingCluster` starts, which ends all other clusters of the machine first.
    """

    def __init__(self) -> None:
        super().__init__()
        types = {
            "head": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
            "gpu": {"resources": {"CPU": 2, "GPU": 2}, "node_config": {}, "min_workers": 0, "max_workers": 4},
        }
        provider = {"type": "fake_multinode", "gcs_address": self.address, "use_node_id_as_ip": True}
        provider |= {"disable_node_updaters": True, "disable_launch_config_check": True}
        words = {
            "cluster_name": "fake",
            "max_workers": 4,
            "provider": provider,
            "available_node_types": types,
            "head_node_type": "head",
            "idle_timeout_minutes": 0.05,
            **{key: {} for key in ("auth", "docker", "file_mounts")},
            **{f"{key}_commands": [] for key in _COMMANDS},
            **{key: [] for key in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
        }
        path = Path(self._folder) / "cluster.json"
        path.write_text(json.dumps(words))
        self.start(f"--autoscaling-config={path}", AUTOSCALER_UPDATE_INTERVAL_S="1", RAY_FAKE_CLUSTER="1")


_COMMANDS = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")


def free_gpus(address: str) -> int:
    return sum(node.free_gpus for node in view.view(address).nodes)


class ClusterRuns:
    """The command line in processes of its own, in a folder with `program.py`, on one cluster. Closed in the end."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.address, self.home = folder, address, folder / "home"
        self.started: list[subprocess.Popen[str]] = []
        (folder / "program.py").write_text(PROGRAM)
        self.write("a")

    def write(self, name: str, *, resources: Mapping[str, Any] | None = None, **words: Any) -> None:
        """Write the experiment file `name`.yaml, with other words than `WORDS`; None removes one."""
        placed = {**WORDS["resources"], "address": self.address, **(resources or {})}
        whole = {**WORDS, "name": name, "resources": placed, **words}
        (self.folder / f"{name}.yaml").write_text(
            json.dumps({key: value for key, value in whole.items() if value is not None})
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command, whose output is added to `output`."""
        with open(self.folder / "output", "a") as output:
            started = subprocess.Popen(
                [sys.executable, "-c", "from rubberband.cli import main; main()", *arguments],
                cwd=self.folder,
                env={**os.environ, "RUBBERBAND_HOME": str(self.home)},
                stdout=output,
                stderr=output,
                text=True,
            )
        self.started.append(started)
        return started

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    def until(self, text: str, within_s: float = 900.0) -> None:
        eventually(lambda: text in self.output or self.started[-1].poll() is not None, text, within_s=within_s)
        assert text in self.output, self.output[-5000:]

    def done(self, run: subprocess.Popen[str], code: int = 0) -> str:
        """Wait until a command has ended with that code; return all output."""
        assert run.wait(timeout=900) == code, self.output[-5000:]
        return self.output

    def result(self, name: str) -> Result:
        return load_result(name, home=self.home)

    def close(self) -> None:
        for run in self.started:
            run.kill()
            run.wait()
