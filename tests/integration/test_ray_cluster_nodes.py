"""Questions to the nodes of a Ray cluster before a run, and a small run: real nodes, whose GPUs are only counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

import rubberband
from rubberband.cloud.ray_cluster import RayClusterProvider, view
from rubberband.errors import InputError
from rubberband.executor import make_store
from rubberband.executor.ray.node_probe import NodeProbe
from tests.builders.ray_clusters import StartedHead

pytestmark = [pytest.mark.long, pytest.mark.ray, pytest.mark.timeout(300)]

PROGRAM = """
import sys
for epoch in range(1, int(sys.argv[2]) + 1):
    print(f"epoch={epoch} loss={float(sys.argv[1]) / epoch}", flush=True)
"""
WORDS = {
    "name": "a",
    "entrypoint": {"command": "python program.py ${lr} ${max_t}", "metrics": "stdout"},
    "search": {
        "space": {"lr": {"type": "uniform", "lower": 0.1, "upper": 0.5}},
        "scheduler": {"type": "none", "num_samples": 2, "max_t": 1},
        "metric": "loss",
        "mode": "min",
    },
    "constraints": {"deadline": "30m"},
    "resources": {"provider": "ray", "gpus_per_trial": {"max": 1}},
    "profile": {"seconds_per_iteration": {1: 0.5}},
}
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


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head without GPUs."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
    yield made
    made.shutdown()


def provider(cluster: Cluster, folder: Path) -> RayClusterProvider:
    nodes = view.view(cluster.address).usable({}, 1)
    return RayClusterProvider("a", folder / "instances", cluster.address, [{"GPU": 1.0}], nodes=nodes)


@pytest.mark.parametrize("site", ["", HIDDEN], ids=["as_here", "without_rubberband"])
def test_a_small_run_ends_and_its_report_counts_gpu_hours(cluster: Cluster, tmp_path: Path, site: str) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(site)
    cluster.add_node(num_cpus=2, num_gpus=2, env_vars={"PYTHONPATH": str(tmp_path / "site")} if site else None)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "a.yaml").write_text(json.dumps(WORDS))
    done = subprocess.run(
        [sys.executable, "-c", "from rubberband.cli import main; main()", "run", "a.yaml", "--no-check"],
        cwd=tmp_path,
        env={**os.environ, "RUBBERBAND_HOME": str(tmp_path / "home"), "RAY_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "GPU-h" in done.stdout
    assert "USD" not in done.stdout + done.stderr
    assert sum(node.free_gpus for node in view.view(cluster.address).nodes) == 2


def test_nodes_that_lack_the_store_or_have_another_rubberband_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_node(num_cpus=1, num_gpus=1)
    store = make_store(str(tmp_path / "store"))
    NodeProbe(provider(cluster, tmp_path), store).require_nodes()
    NodeProbe(provider(cluster, tmp_path), store, {"yaml": "yaml.py"}).require_nodes()
    with pytest.raises(InputError, match=r"has no module mine, which the trial imports from .*, and which is not sent"):
        NodeProbe(provider(cluster, tmp_path), store, {"mine": "/home/me/mine.py"}).require_nodes()
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"does not share the checkpoint store .* as resources\.checkpoints"):
        NodeProbe(provider(cluster, tmp_path), store).require_nodes()
    (tmp_path / "elsewhere").rename(tmp_path / "store")
    (tmp_path / "sitecustomize.py").write_text(OTHER)
    cluster.add_node(num_cpus=1, num_gpus=1, env_vars={"PYTHONPATH": str(tmp_path)})
    remedy = rf"has rubberband-tune 0.0.1 and this process {rubberband.__version__}; .* pip install"
    with pytest.raises(InputError, match=remedy):
        NodeProbe(provider(cluster, tmp_path), store).require_nodes()


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
