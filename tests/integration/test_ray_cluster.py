"""Experiments on a Ray cluster that is there: real nodes on this machine, whose GPUs are only counted.

Its nodes are asked before a run, other jobs want them, an autoscaler adds and removes them, and they die.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray._private.services import get_node_ip_address
from ray.cluster_utils import Cluster

import rubberband
from rubberband import load_result
from rubberband.cloud.ray_cluster import RayClusterProvider, view
from rubberband.errors import InputError, ProviderError
from rubberband.executor import Connection, Result, make_store
from rubberband.executor.ray.node_probe import NodeProbe
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


pytestmark = [pytest.mark.long, pytest.mark.ray, pytest.mark.timeout(1800)]


@contextmanager
def nodes(count: int, **words: Any) -> Iterator[Cluster]:
    """A head without GPUs, and as many nodes with the words of `ray start`."""
    made = started(count, **words)
    try:
        yield made
    finally:
        made.shutdown()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Two nodes with two GPUs each."""
    with nodes(2, num_cpus=2, num_gpus=2, labels={"pool": "a"}) as made:
        yield made


@pytest.fixture
def runs(tmp_path: Path, cluster: Cluster) -> Iterator[ClusterRuns]:
    with closing(ClusterRuns(tmp_path, cluster.address)) as made:
        yield made


def test_a_run_gives_gpus_back_at_each_sync_and_all_in_the_end(runs: ClusterRuns) -> None:
    run = runs.start("run", "a.yaml")
    runs.until("SYNC 1")
    eventually(lambda: free_gpus(runs.address) >= 2)
    assert "done: best loss" in runs.done(run)
    assert "2 nodes x 2 GPUs, 4 free now" in runs.output
    eventually(lambda: free_gpus(runs.address) == 4)


def test_a_driver_that_is_killed_holds_nothing_and_resumes(runs: ClusterRuns) -> None:
    run = runs.start("run", "a.yaml")
    runs.until("training 8 trials")
    run.send_signal(signal.SIGKILL)
    run.wait()
    eventually(lambda: free_gpus(runs.address) == 4)
    assert "resumed 1 time" in runs.done(runs.start("resume", "a"))


def test_trials_of_a_node_that_dies_continue_elsewhere(runs: ClusterRuns, cluster: Cluster) -> None:
    run = runs.start("run", "a.yaml")
    runs.until("training 8 trials")
    cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
    runs.until(" lost (its Ray node ")
    cluster.add_node(num_cpus=2, num_gpus=2)
    assert "done: best loss" in runs.done(run)


def test_a_run_whose_head_dies_ends_and_is_resumed_on_another_one(runs: ClusterRuns, cluster: Cluster) -> None:
    run = runs.start("run", "a.yaml")
    runs.until("training 8 trials")
    cluster.head_node.kill_gcs_server()
    runs.until("the head of the Ray cluster ended")
    run.wait(timeout=300)
    assert "Traceback" not in runs.output
    resumed = runs.start("resume", "a")
    assert resumed.wait(timeout=300) != 0
    assert "no Ray cluster answers" in runs.output
    with nodes(2, num_cpus=2, num_gpus=2) as other:
        assert "resumed 1 time" in runs.done(runs.start("resume", "a", "--address", other.address))
        assert runs.result("a").best.iterations == 8


@pytest.fixture
def provider(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[[], RayClusterProvider]]:
    """A maker of providers in a process that is connected."""
    connection = Connection()
    nodes = view.view(cluster.address).usable({}, 1)

    def make() -> RayClusterProvider:
        made = RayClusterProvider("a", tmp_path, cluster.address, [{"GPU": 1.0}] * 2, nodes=nodes)
        connection.open(made.ensure_head())
        return made

    yield make
    connection.close()


def test_a_group_waits_for_free_gpus_and_a_fault_excludes_its_node(provider: Callable[[], RayClusterProvider]) -> None:
    ours = provider()
    for instance in ("a", "b", "c"):
        ours.launch(instance)
    eventually(lambda: [one.state for one in ours.describe()] == ["running", "running", "pending"])
    assert ours.node("c") == ""
    sick = ours.node("a")
    ours.release("a", fault="its GPU fell off")
    ours.launch("d")
    eventually(lambda: bool(ours.describe()) and ours.node("c") == sick)  # it was asked for before
    ours.release("c")
    assert [one.state for one in ours.describe()] == ["terminated", "running", "terminated", "pending"]
    ours.release("b")
    eventually(lambda: bool(ours.describe()) and ours.node("d") not in ("", sick))
    again = provider()
    assert again.describe() == ours.describe()
    again.close()
    assert {one.state for one in again.describe()} == {"terminated"}
    with pytest.raises(ProviderError, match="never launched"):
        again.release("e")


CONNECTED = """
import sys
import ray
import rubberband
ray.init(address=sys.argv[1], namespace="mine", log_to_driver=False)
result = rubberband.tune(experiment=rubberband.load_experiment("a.yaml"), verbose=0)
print("kept", ray.is_initialized(), ray.get_runtime_context().namespace, result.best.iterations)
"""


def test_a_process_that_is_connected_stays_connected(runs: ClusterRuns) -> None:
    environment = {**os.environ, "RUBBERBAND_HOME": str(runs.folder / "home")}
    done = subprocess.run(
        [sys.executable, "-c", CONNECTED, runs.address],
        cwd=runs.folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert "kept True mine 8" in done.stdout, done.stdout + done.stderr


ANOTHER = """
import sys
import ray
from ray.util.placement_group import placement_group
ray.init(address=sys.argv[1], log_to_driver=False)
groups = []
for gpus in (2, 1):
    groups.append(placement_group([{"GPU": 1}] * gpus))
    print("waits", flush=True)
    ray.get(groups[-1].ready())
    print(f"has {gpus} more", flush=True)
sys.stdin.read()
"""
"""A job that keeps two GPUs, and then a third one, as soon as it gets them."""


def test_another_job_gets_freed_nodes_at_each_sync_while_the_run_goes_on(tmp_path: Path) -> None:
    with nodes(4, num_cpus=1, num_gpus=1) as four, closing(ClusterRuns(tmp_path, four.address)) as runs:
        runs.write("a", resources={"env": {"PACE_S": "4"}})
        run = runs.start("run", "a.yaml")
        runs.until("training 8 trials")
        other = subprocess.Popen(
            [sys.executable, "-c", ANOTHER, runs.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert other.stdout is not None
            for line, syncs in (("waits", 0), ("has 2 more", 2), ("waits", 2), ("has 1 more", 3)):
                assert other.stdout.readline().strip() == line
                assert runs.output.count("SYNC ") >= syncs
                assert syncs == 3 or run.poll() is None  # after the last SYNC nothing is left to do
            assert "done: best loss" in runs.done(run)
        finally:
            other.kill()
            other.communicate()


def test_slots_train_on_the_nodes_without_gpus(tmp_path: Path) -> None:
    with nodes(2, num_cpus=2, num_gpus=0) as mixed, closing(ClusterRuns(tmp_path, mixed.address)) as runs:
        mixed.add_node(num_cpus=4, num_gpus=1)
        runs.write("cpus", resources={"slots": 2})
        run = runs.start("run", "cpus.yaml")
        runs.until("training 8 trials on 2 instances")
        free = [(node.gpus, node.free_cpus) for node in view.view(mixed.address).nodes]
        assert sorted(free) == [(0, 0), (0, 0), (0, 1), (1, 4)]
        assert "done: best loss" in runs.done(run)
        assert "2 nodes x 2 CPUs + 1 node x 1 CPU, 5 free now" in runs.output


def gpu_nodes(address: str) -> int:
    return sum(node.gpus > 0 for node in view.view(address).nodes)


@pytest.fixture
def growing(tmp_path: Path) -> Iterator[ClusterRuns]:
    """On a cluster that an autoscaler grows and shrinks: its nodes are processes of this machine."""
    with closing(AutoscaledCluster()) as cluster, closing(ClusterRuns(tmp_path, cluster.address)) as made:
        yield made


def test_a_cluster_grows_for_a_run_and_shrinks_with_it_and_later_plans_know_how_long_nodes_took(
    growing: ClusterRuns,
) -> None:
    growing.write("a", resources={"gpus_per_instance": 2, "max_instances": 2, "env": {"PACE_S": "10"}})
    estimate = " ".join(growing.done(growing.start("estimate", "a.yaml")).split())
    assert "no node with GPUs now. Of max_instances=2, 2 instances must join it." in estimate
    assert "a node that joins takes 2m, which is assumed" in estimate
    run = growing.start("run", "a.yaml")
    growing.until("training 8 trials on 2 instances")
    assert gpu_nodes(growing.address) >= 2  # Ray's autoscaler may add one more than is asked for
    growing.until("SYNC 1")
    eventually(lambda: gpu_nodes(growing.address) < 2)
    assert run.poll() is None
    assert "done: best loss" in growing.done(run)
    eventually(lambda: gpu_nodes(growing.address) == 0)
    again = " ".join(growing.done(growing.start("estimate", "a.yaml")).split())
    assert "as the last 2 nodes did" in again


def test_a_node_that_never_comes_ends_a_run_in_one_line_and_a_resume_tries_again(growing: ClusterRuns) -> None:
    growing.write("b", resources={"gpus_per_instance": 4, "max_instances": 1, "provision_delay": "2s"})
    output = growing.done(growing.start("run", "b.yaml"), code=1)
    assert "no instance to train on: no node of the Ray cluster had 4 GPUs free within 20" in output
    assert "run `rubberband resume b` once one is available" in output
    assert "Traceback" not in output


HIDDEN = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == "rubberband" and not any("py_modules_files" in place for place in sys.path):
            raise ModuleNotFoundError("there is no rubberband here")
sys.meta_path.insert(0, Hidden())
"""
"""Run by each Python process of a node when it starts: it has no rubberband but that of a runtime_env."""
OTHER = 'import rubberband; rubberband.__version__ = "0.0.1"'
"""Run by each Python process of a node when it starts."""


@pytest.mark.parametrize("site", ["", HIDDEN], ids=["as_here", "without_rubberband"])
def test_a_small_run_ends_and_its_report_counts_gpu_hours(tmp_path: Path, site: str) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(site)
    place = {"env_vars": {"PYTHONPATH": str(tmp_path / "site")}} if site else {}
    with nodes(1, num_cpus=2, num_gpus=2, **place) as made, closing(ClusterRuns(tmp_path, made.address)) as runs:
        output = runs.done(runs.start("run", "a.yaml", "--no-check"))
        assert "GPU-h" in output
        assert "USD" not in output
        assert free_gpus(runs.address) == 2


def asked(cluster: Cluster, folder: Path) -> RayClusterProvider:
    found = view.view(cluster.address).usable({}, 1)
    return RayClusterProvider("a", folder / "instances", cluster.address, [{"GPU": 1.0}], nodes=found)


def test_nodes_that_lack_the_store_or_have_another_rubberband_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    store = make_store(str(tmp_path / "store"))
    NodeProbe(asked(cluster, tmp_path), store).require_nodes()
    NodeProbe(asked(cluster, tmp_path), store, {"yaml": "yaml.py"}).require_nodes()
    with pytest.raises(InputError, match=r"has no module mine, which the trial imports from .*, and which is not sent"):
        NodeProbe(asked(cluster, tmp_path), store, {"mine": "/home/me/mine.py"}).require_nodes()
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"does not share the checkpoint store .* as resources\.checkpoints"):
        NodeProbe(asked(cluster, tmp_path), store).require_nodes()
    (tmp_path / "elsewhere").rename(tmp_path / "store")
    (tmp_path / "sitecustomize.py").write_text(OTHER)
    cluster.add_node(num_cpus=1, num_gpus=1, env_vars={"PYTHONPATH": str(tmp_path)})
    remedy = rf"has rubberband-tune 0.0.1 and this process {rubberband.__version__}; .* pip install"
    with pytest.raises(InputError, match=remedy):
        NodeProbe(asked(cluster, tmp_path), store).require_nodes()


def test_a_cluster_that_asks_for_a_token_is_refused_in_one_line() -> None:
    head = StartedHead()
    try:
        head.start(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="a" * 64)
        # In a process of its own: Ray reads the mode once, and ends or blocks processes that it did not let in.
        ask = f"from rubberband.cloud.ray_cluster import view; print(len(view.view({head.address!r}).nodes))"
        asked = [
            subprocess.run(
                [sys.executable, "-c", ask],
                env={**os.environ, **words},
                capture_output=True,
                text=True,
                timeout=100,
                check=False,
            )
            for words in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64})
        ]
    finally:
        head.close()
    without, with_token = asked
    assert f"the Ray cluster at {head.address} asks for a token" in without.stderr
    assert "run `export RAY_AUTH_MODE=token` first" in without.stderr
    assert without.returncode == 1
    assert with_token.stdout == "1\n"
