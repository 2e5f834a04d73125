"""Runs whose trials read a model of the hub: fetched once for all of them, at one commit, and never asked for again."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders.command_line import CommandLine
from tests.builders.hub import Content, Hub, Repo, served

pytest.importorskip("huggingface_hub", reason="pip install 'rubberband-tune[hf]'")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

READING = """
import time
import rubberband
from huggingface_hub import HfApi, hf_hub_download

try:
    HfApi().model_info("org/base")
except Exception as error:
    refused = type(error).__name__

def train(config):
    iteration = rubberband.get_checkpoint() or 0
    print(hf_hub_download("org/base", "model.safetensors"), refused, flush=True)
    while True:
        time.sleep(0.3)
        iteration += 1
        rubberband.report({"score": config["x"] * iteration}, checkpoint=iteration)
"""
COMMIT = "ab" * 20
FETCH = ("-s", "resources.fetch={models: [org/base]}", "-s", "entrypoint=reading:train")


@pytest.fixture
def hub() -> Iterator[Hub]:
    files = {"config.json": Content.of(b"{}"), "model.safetensors": Content(30_000_000, os.urandom(1 << 16))}
    with served(Hub({"models/org/base": Repo(files)})) as hub:
        yield hub


@pytest.fixture
def command_line(tmp_path: Path, hub: Hub) -> CommandLine:
    made = CommandLine(tmp_path)
    (tmp_path / "reading.py").write_text(READING)
    made.environment |= {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "hf")}
    made.environment.pop("HF_TOKEN", None)
    return made


def test_trials_of_this_machine_read_what_was_fetched_once(command_line: CommandLine, hub: Hub, tmp_path: Path) -> None:
    hub.breaks["model.safetensors"] = 20_000_000
    _, errors = command_line("run", "sleepy.yaml", *FETCH)
    assert (
        "fetch: this machine downloads 30 MB once, about 0.338s at 100 MB/s (a guess): org/base at abababa." in errors
    )
    assert "fetched 30 MB in " in errors
    assert hub.gets == {"config.json": 1, "model.safetensors": 2}
    result = command_line.result()
    assert result.outcome == "done"
    assert result.fetched == {"org/base@main": COMMIT}
    path = tmp_path / "hf" / "hub" / "models--org--base" / "snapshots" / COMMIT / "model.safetensors"
    for trial in result.trials:
        log, _ = command_line("logs", "sleepy", str(trial.trial))
        assert f"{path} OfflineModeIsEnabled" in log
    hub.url, hub.requests = "", 0
    _, errors = command_line("run", "sleepy.yaml", *FETCH, "-s", "name=again")
    assert "fetch: the cache of this machine has org/base at abababa." in errors
    assert command_line.result("again").outcome == "done"
    shutil.rmtree(tmp_path / "hf")
    assert "so that the size of org/base is not known; check the network, or HF_ENDPOINT" in command_line.refused(
        "run", "sleepy.yaml", *FETCH, "-s", "name=third"
    )
    _, errors = command_line("check", "sleepy.yaml", *FETCH, exit_code=1)
    assert [line for line in errors.splitlines() if line.startswith("problem: ")] == [
        f"problem: resources.fetch.models: {command_line.environment['HF_ENDPOINT']} does not answer "
        "(RemoteProtocolError), so that the size of org/base is not known; check the network, or HF_ENDPOINT"
    ]
    output, _ = command_line("estimate", "sleepy.yaml", *FETCH)
    assert "the time to fetch it is not in the" in output


@pytest.mark.long
def test_a_resumed_run_fetches_its_own_commit_again(command_line: CommandLine, hub: Hub, tmp_path: Path) -> None:
    driver = command_line.start("run", "sleepy.yaml", "--no-check", *FETCH)
    command_line.wait_for(driver, lambda result: sum(trial.iterations for trial in result.trials) >= 2)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.communicate()
    shutil.rmtree(tmp_path / "hf")
    repo = hub.repos["models/org/base"]
    hub.repos["models/org/base"] = Repo({"config.json": Content.of(b"[]")}, commit="cd" * 20)
    output, errors = command_line("resume", "sleepy", exit_code=2)
    assert "resources.fetch.models: org/base has no revision abababab" in errors, output
    hub.repos["models/org/base"] = repo
    _, errors = command_line("resume", "sleepy")
    assert "fetched 30 MB in " in errors
    assert command_line.result().outcome == "done"


@pytest.mark.long
def test_nodes_of_a_ray_cluster_fill_their_own_cache(command_line: CommandLine, hub: Hub, tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_ENDPOINT", "HF_HUB_DISABLE_XET", "HF_HOME", "PYTHONPATH"):
            patch.setenv(name, command_line.environment[name])
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
        try:
            for _ in range(2):
                cluster.add_node(num_cpus=2, num_gpus=2)
            changes = {"provider": "ray", "address": cluster.address, "gpus_per_trial": {"max": 1}}
            changes |= {"fetch": {"models": ["org/base"]}}
            words = ("-s", f"resources={json.dumps(changes)}", "-s", "entrypoint=reading:train")
            command_line("run", "sleepy.yaml", "--no-check", *words)
        finally:
            cluster.shutdown()
    assert command_line.result().outcome == "done"
    assert hub.gets == {"config.json": 1, "model.safetensors": 1}, "both nodes are on this machine"
    log, _ = command_line("logs", "sleepy", "0")
    assert f"{tmp_path / 'hf'}" in log
    assert "OfflineModeIsEnabled" in log
