"""The example of a provider in a package of its own (examples/provider): it conforms, and an experiment runs on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rubberband.cloud.offers import offers
from rubberband.cloud.provider import ClusterRequest
from rubberband.cloud.ray_head import ray_node
from rubberband.cloud.ray_head.instance import tagged
from rubberband.spec.resources import Resources
from rubberband.testing.provider_conformance import ProviderConformance, ProviderUnderTest
from rubberband.values import kinds
from tests.builders import fake_nodes

EXAMPLE = Path(__file__).parents[2] / "examples/provider"
TRIAL = """
import time
import rubberband

class Trial(rubberband.Trial):
    def setup(self, config, context):
        self.lr, self.loss = config["lr"], 1.0

    def iterate(self):
        time.sleep(0.05)
        self.loss *= 1.0 - self.lr / 2.0
        return {"loss": self.loss}

    def save(self):
        return self.loss

    def load(self, state):
        self.loss = state
"""
WORDS = {
    "name": "shed",
    "entrypoint": "trial:Trial",
    "search": {
        "scheduler": {"type": "sha", "num_samples": 4, "max_t": 4, "grace_period": 1, "reduction_factor": 2},
        "space": {"lr": {"type": "uniform", "lower": 0.1, "upper": 0.9}},
        "metric": "loss",
        "mode": "min",
    },
    "constraints": {"deadline": "20m", "max_cost": 5},
    "resources": {
        "provider": "shed",
        "instance_type": "small",
        "options": {"boot_s": 0.1},
        "max_instances": 2,
        "gpus_per_trial": {"max": 1},
    },
    "profile": {"seconds_per_iteration": {1: 0.1}},
}


def install(site: Path) -> None:
    """Puts the example on a path, with the metadata that pip writes."""
    info = site / "shed_cloud-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shed-cloud\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[rubberband.providers]\nshed = shed_cloud:SHED\n")
    (site / "shed_cloud").symlink_to(EXAMPLE / "shed_cloud")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    site = tmp_path / "site"
    install(site)
    monkeypatch.syspath_prepend(site)
    for known in (kinds._installed, kinds._loaded):
        known.cache_clear()
    yield site
    for known in (kinds._installed, kinds._loaded):
        known.cache_clear()
    for module in [name for name in sys.modules if name.partition(".")[0] == "shed_cloud"]:
        del sys.modules[module]


class TestShed(ProviderConformance):
    @pytest.fixture
    def tested(self, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProviderUnderTest]:
        """The example, with stand-ins for Ray nodes."""
        monkeypatch.setattr(ray_node, "head_command", fake_nodes.head_command)
        monkeypatch.setattr(ray_node, "instance_command", fake_nodes.instance_command)
        resources = Resources(provider="shed", instance_type="small")
        (offer,) = offers(resources)
        request = ClusterRequest(
            experiment="conformance", run="r", directory=tmp_path, home=tmp_path, resources=resources, offer=offer
        )
        provider: Any = kinds.part_of("shed", "open_cluster").__globals__["ShedProvider"](
            request, token_path=tmp_path / "token"
        )
        provider.ensure_head()

        def heard(until: float) -> None:
            for lease in tmp_path.glob("machines/*/lease"):
                os.utime(lease, (until, until))

        yield ProviderUnderTest(
            provider, lambda: time.sleep(0.02), provider.clock, lease_s=2.0, spot=False, heard=heard
        )
        provider.close()
        assert not tagged(str(tmp_path / "machines"))


@pytest.mark.ray
def test_an_experiment_is_estimated_run_and_cleaned_up(tmp_path: Path) -> None:
    install(tmp_path / "site")
    (tmp_path / "trial.py").write_text(TRIAL)
    words = {**WORDS, "resources": {**WORDS["resources"], "checkpoints": str(tmp_path / "checkpoints")}}
    (tmp_path / "a.yaml").write_text(json.dumps(words))

    def said(*command: str, site: Path = tmp_path / "site", code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-c", "from rubberband.cli import main; main()", *command],
            cwd=tmp_path,
            env={**os.environ, "RUBBERBAND_HOME": str(tmp_path / "home"), "PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    assert "price: that of small is from provider shed" in said("estimate", "a.yaml", "--verbose")
    said("check", "a.yaml")
    said("run", "a.yaml", "--yes")
    status = json.loads(said("status", "shed", "-o", "json"))
    cost_usd = status["summary"]["cost_usd"]
    assert status["state"] == "done"
    assert 0.0 < cost_usd < 5.0
    assert said("cleanup") == "nothing was left behind\n"
    assert not tagged(str(tmp_path / "home/experiments/shed/local/machines"))
    without = {"site": tmp_path / "nothing"}
    assert json.loads(said("status", "shed", "-o", "json", **without))["summary"]["cost_usd"] == cost_usd
    assert "shed: done" in said("report", "shed", **without)
    assert "'shed' is not installed here; known are local" in said("estimate", "a.yaml", code=2, **without)
