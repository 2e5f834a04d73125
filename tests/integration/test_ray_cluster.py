"""Experiments on a Ray cluster that is there: real nodes on this machine, whose GPUs are only counted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from rubberband.cloud.ray_cluster import RayClusterProvider, view
from rubberband.errors import ProviderError
from rubberband.executor import Connection
from tests.builders.ray_clusters import ClusterRuns, free_gpus, started
from tests.builders.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.ray, pytest.mark.timeout(900)]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head without GPUs, and two nodes with two each."""
    made = started(2, num_cpus=2, num_gpus=2, labels={"pool": "a"})
    yield made
    made.shutdown()


@pytest.fixture
def runs(tmp_path: Path, cluster: Cluster) -> Iterator[ClusterRuns]:
    made = ClusterRuns(tmp_path, cluster.address)
    yield made
    made.close()


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
    other = started(2, num_cpus=2, num_gpus=2)
    try:
        assert "resumed 1 time" in runs.done(runs.start("resume", "a", "--address", other.address))
        assert runs.result("a").best.iterations == 8
    finally:
        other.shutdown()


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


def test_a_group_waits_for_free_gpus_and_a_fault_excludes_its_node(
    provider: Callable[[], RayClusterProvider],
) -> None:
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
