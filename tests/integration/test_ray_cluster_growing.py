"""Runs on a Ray cluster that an autoscaler grows and shrinks: its nodes are processes of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rubberband.cloud.ray_cluster import view
from tests.builders.ray_clusters import AutoscaledCluster, ClusterRuns
from tests.builders.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.ray, pytest.mark.timeout(1800)]


@pytest.fixture
def cluster() -> Iterator[AutoscaledCluster]:
    made = AutoscaledCluster()
    yield made
    made.close()


@pytest.fixture
def runs(tmp_path: Path, cluster: AutoscaledCluster) -> Iterator[ClusterRuns]:
    made = ClusterRuns(tmp_path, cluster.address)
    yield made
    made.close()


def gpu_nodes(address: str) -> int:
    return sum(node.gpus > 0 for node in view.view(address).nodes)


def test_a_cluster_grows_for_a_run_and_shrinks_with_it_and_later_plans_know_how_long_nodes_took(
    runs: ClusterRuns,
) -> None:
    runs.write("a", resources={"gpus_per_instance": 2, "max_instances": 2, "env": {"PACE_S": "10"}})
    estimate = " ".join(runs.done(runs.start("estimate", "a.yaml")).split())
    assert "no node with GPUs now. Of max_instances=2, 2 instances must join it." in estimate
    assert "a node that joins takes 2m, which is assumed" in estimate
    run = runs.start("run", "a.yaml")
    runs.until("training 8 trials on 2 instances")
    assert gpu_nodes(runs.address) >= 2  # Ray's autoscaler may add one more than is asked for
    runs.until("SYNC 1")
    eventually(lambda: gpu_nodes(runs.address) < 2)
    assert run.poll() is None
    assert "done: best loss" in runs.done(run)
    eventually(lambda: gpu_nodes(runs.address) == 0)
    again = " ".join(runs.done(runs.start("estimate", "a.yaml")).split())
    assert "as the last 2 nodes did" in again


def test_a_node_that_never_comes_ends_a_run_in_one_line_and_a_resume_tries_again(runs: ClusterRuns) -> None:
    runs.write("b", resources={"gpus_per_instance": 4, "max_instances": 1, "provision_delay": "2s"})
    output = runs.done(runs.start("run", "b.yaml"), code=1)
    assert "no instance to train on: no node of the Ray cluster had 4 GPUs free within 20" in output
    assert "run `rubberband resume b` once one is available" in output
    assert "Traceback" not in output
