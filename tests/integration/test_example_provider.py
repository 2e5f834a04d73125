"""The example of a provider in a package of its own (examples/provider): it conforms, and an experiment runs on it."""

from __future__ import annotations

import contextlib
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
from rubberband.errors import RubberbandError
from rubberband.executor import ExperimentFolder
from rubberband.executor import read_journal as read
from rubberband.spec.resources import Resources
from rubberband.testing.provider_conformance import ProviderConformance, ProviderUnderTest
from rubberband.values import kinds
from tests.builders import fake_nodes
from tests.builders.waiting import eventually

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
    kinds.look_again()
    yield site
    kinds.look_again()
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
            provider, lambda: time.sleep(0.02), provider.clock, lease_s=0.5, spot=False, heard=heard
        )
        provider.close()
        assert not tagged(str(tmp_path / "machines"))


def started(folder: Path, site: Path, *command: str) -> subprocess.Popen[str]:
    """A command, where the provider is installed if it is in `site`."""
    return subprocess.Popen(
        [sys.executable, "-c", "from rubberband.cli import main; main()", *command],
        cwd=folder,
        env={**os.environ, "RUBBERBAND_HOME": str(folder / "home"), "PYTHONPATH": str(site)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def printed(folder: Path, site: Path, *command: str, code: int = 0) -> str:
    """All that a command prints to its end."""
    process = started(folder, site, *command)
    text, _ = process.communicate(timeout=250)
    assert process.returncode == code, text
    return text


@pytest.mark.ray
@pytest.mark.long
def test_an_experiment_is_estimated_run_and_cleaned_up(tmp_path: Path) -> None:
    install(tmp_path / "site")
    (tmp_path / "trial.py").write_text(TRIAL)
    words = {**WORDS, "resources": {**WORDS["resources"], "checkpoints": str(tmp_path / "checkpoints")}}
    (tmp_path / "a.yaml").write_text(json.dumps(words))

    def said(*command: str, site: Path = tmp_path / "site", code: int = 0) -> str:
        return printed(tmp_path, site, *command, code=code)

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


@pytest.fixture
def longer(installed: Path, tmp_path: Path) -> tuple[ExperimentFolder, dict[str, Any]]:
    """The folder, and the words, of an experiment that trains long enough to be killed; its home is beside its code."""
    (tmp_path / "trial.py").write_text(TRIAL.replace("0.05", "0.5"))
    scheduler = {"type": "sha", "num_samples": 4, "max_t": 16, "grace_period": 4, "reduction_factor": 2}
    resources = {key: value for key, value in WORDS["resources"].items() if key != "options"}
    words = {
        **WORDS,
        "search": {**WORDS["search"], "scheduler": scheduler},
        "resources": {**resources, "checkpoints": str(tmp_path / "checkpoints"), "max_instances": 1, "lease": "5s"},
        "profile": {"seconds_per_iteration": {1: 0.5}},
    }
    return ExperimentFolder(home=tmp_path / "home", name="shed"), words


def iterations(folder: ExperimentFolder) -> int:
    """Those of all trials, as the journal has them."""
    with contextlib.suppress(RubberbandError):
        return sum(trial.iterations for trial in read(folder).trials)
    return 0


def holds_one_run(folder: ExperimentFolder, *, instances: int) -> None:
    """Check that an experiment, resumed once, is done, rented this number of machines, and left none."""
    result = read(folder)
    assert (result.outcome, result.resumes) == ("done", 1)
    assert sorted(trial.iterations for trial in result.trials) == [4, 4, 12, 16]
    assert len(result.instances) == instances
    assert not tagged(str(folder.path / "local/machines"))


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_whose_driver_is_killed_is_resumed_once_leases_have_ended_its_machines(
    longer: tuple[ExperimentFolder, dict[str, Any]], tmp_path: Path
) -> None:
    folder, words = longer
    (tmp_path / "a.yaml").write_text(json.dumps(words))
    driver = started(tmp_path, tmp_path / "site", "run", "a.yaml", "--yes", "--no-check")
    eventually(lambda: iterations(folder) >= 6 or driver.poll() is not None, within_s=200.0)
    assert driver.poll() is None, driver.communicate()
    driver.kill()
    driver.communicate()
    eventually(lambda: not tagged(str(folder.path / "local/machines")), "the machine ends", within_s=60.0)
    refused = printed(tmp_path, tmp_path / "nothing", "resume", "shed", code=1)
    assert "'shed' cannot be used here; install the package that brings it" in refused
    printed(tmp_path, tmp_path / "site", "resume", "shed")
    holds_one_run(folder, instances=2)
