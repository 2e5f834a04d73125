"""Runs on larger Ray clusters: four nodes, and another job of Ray that waits for GPUs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from rubberband.cloud.ray_cluster import view
from tests.builders.ray_clusters import ClusterRuns, started

pytestmark = [pytest.mark.long, pytest.mark.ray, pytest.mark.timeout(1800)]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head without GPUs, and four nodes with one each."""
    made = started(4, num_cpus=1, num_gpus=1)
    yield made
    made.shutdown()


@pytest.fixture
def runs(tmp_path: Path, cluster: Cluster) -> Iterator[ClusterRuns]:
    made = ClusterRuns(tmp_path, cluster.address)
    yield made
    made.close()


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


def test_another_job_gets_freed_nodes_at_each_sync_while_the_run_goes_on(runs: ClusterRuns) -> None:
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
            assert run.poll() is None
        assert "done: best loss" in runs.done(run)
    finally:
        other.kill()
        other.communicate()


@pytest.fixture
def mixed() -> Iterator[Cluster]:
    """A head with one CPU, two nodes with two each, and a node with a GPU."""
    made = started(2, num_cpus=2, num_gpus=0)
    made.add_node(num_cpus=4, num_gpus=1)
    yield made
    made.shutdown()


def test_slots_train_on_the_nodes_without_gpus(mixed: Cluster, tmp_path: Path) -> None:
    runs = ClusterRuns(tmp_path, mixed.address)
    try:
        runs.write("cpus", resources={"slots": 2})
        run = runs.start("run", "cpus.yaml")
        runs.until("training 8 trials on 2 instances")
        free = [(node.gpus, node.free_cpus) for node in view.view(mixed.address).nodes]
        assert sorted(free) == [(0, 0), (0, 0), (0, 1), (1, 4)]
        assert "done: best loss" in runs.done(run)
        assert "2 nodes x 2 CPUs + 1 node x 1 CPU, 5 free now" in runs.output
    finally:
        runs.close()
