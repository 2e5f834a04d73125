"""Models on EC2: fetched once per instance while it joins, through a mirror, and read without the hub."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders.ec2_runs import Ec2CommandLine, ec2, on_ec2, words
from tests.builders.hub import Content, Hub, Repo, served
from tests.ec2 import BUCKET

pytest.importorskip("huggingface_hub", reason="pip install 'rubberband-tune[hf]'")
pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]

READING = """
import json
import os
import time
import rubberband
from huggingface_hub import HfApi, hf_hub_download

def train(config):
    iteration = rubberband.get_checkpoint() or 0
    path = hf_hub_download("org/base", "model.safetensors")
    try:
        HfApi().model_info("org/base")
    except Exception as error:
        print(f"{os.path.getsize(path)} bytes below {os.environ['HF_HOME']}, {type(error).__name__}", flush=True)
    while True:
        time.sleep(0.5)
        iteration += 1
        rubberband.report({"accuracy": config["lr"]}, checkpoint=iteration)
"""
SHORT = (
    "entrypoint=reading:train",
    "profile={seconds_per_iteration: {1: 0.6}}",
    "search.scheduler={type: none, num_samples: 8, max_t: 4}",
    "resources.max_instances=2",
    "constraints.objective=min_time",
    "constraints.max_cost=5",
)


@pytest.fixture
def hub() -> Iterator[Hub]:
    base = Repo({"config.json": Content.of(b"{}"), "model.safetensors": Content(30_000_000, os.urandom(1 << 16))})
    gated = Repo({"config.json": Content.of(b"{}")}, commit="cd" * 20, gated=True)
    with served(Hub({"models/org/base": base, "models/org/gated": gated})) as hub:
        yield hub


@pytest.fixture
def command_line(tmp_path: Path, hub: Hub) -> Iterator[Ec2CommandLine]:
    with ec2(tmp_path) as driver:
        (driver.folder / "reading.py").write_text(READING)
        driver.environment |= {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "none")}
        yield driver


def asked(*fetch: str) -> tuple[str, ...]:
    return words(*on_ec2("digits", "g4dn.xlarge"), *SHORT, *fetch)


def test_each_instance_fetches_once_and_a_second_run_takes_all_from_the_mirror(
    command_line: Ec2CommandLine, hub: Hub
) -> None:
    fetch = f"resources.fetch={{models: [org/base], from: 's3://{BUCKET}/hub'}}"
    output, _ = command_line("run", "digits.yaml", "--no-check", "--yes", *asked(fetch))
    result = command_line.result("digits")
    assert result.outcome == "done", output
    instances = len(command_line.lines_of_the_bill())
    assert hub.gets["model.safetensors"] in range(1, instances + 1), "once per instance, or from the mirror"
    assert "fetching models and data" in command_line.console("i-001")
    homes = {
        line for trial in result.trials for line in command_line("logs", "digits", str(trial.trial))[0].splitlines()
    }
    assert all("30000000 bytes below " in line and "OfflineModeIsEnabled" in line for line in homes if "below" in line)
    assert all("var/lib/rubberband/rubberband-" in line for line in homes if "below" in line)
    assert sum("below" in line for line in homes) == instances
    before = hub.gets.copy()
    command_line("run", "digits.yaml", "--no-check", "--yes", *asked(fetch), *words("name=again"))
    assert command_line.result("again").outcome == "done"
    assert hub.gets == before


def test_a_gated_model_is_fetched_with_the_token_of_the_secrets(command_line: Ec2CommandLine, hub: Hub) -> None:
    command_line.environment["HF_TOKEN"] = hub.token
    fetch = ("resources.fetch={models: [org/base, org/gated]}", "resources.secrets=[HF_TOKEN]")
    command_line("run", "digits.yaml", "--no-check", "--yes", *asked(*fetch))
    assert command_line.result("digits").outcome == "done"
    assert hub.gets["config.json"] == 2 * len(command_line.lines_of_the_bill())
    assert all(hub.token not in one.user_data for one in command_line.aws.fake.instances)


def test_a_fetch_that_fails_for_good_ends_the_run_with_one_line(command_line: Ec2CommandLine, hub: Hub) -> None:
    hub.repos["models/org/base"].digests["config.json"] = "0" * 40
    driver = command_line.start(
        "run", "digits.yaml", "--no-check", "--yes", *asked("resources.fetch={models: [org/base]}")
    )
    output, errors = driver.communicate(timeout=500)
    assert driver.returncode != 0
    assert "org/base was not fetched after 3 attempts: 1 file not as the hub's digests say" in output + errors
    assert not command_line.aws.fake.living


def test_experiments_that_share_a_machine_of_a_pool_share_what_it_fetched(
    command_line: Ec2CommandLine, hub: Hub
) -> None:
    pool = {"provider": "aws", "instance_type": "g4dn.xlarge", "instances": 1, "aws": {"install": "none"}}
    pool |= {"checkpoints": f"s3://{BUCKET}/team", "max_usd_per_hour": 10}
    (command_line.folder / "team.yaml").write_text(json.dumps(pool))
    command_line("pool", "up", "team.yaml")
    resources = {"pool": "team", "fetch": {"models": ["org/base"]}}
    try:
        for name in ("first", "second"):
            changes = (f"name={name}", f"resources={json.dumps(resources)}", *SHORT[:3], "constraints={deadline: 20m}")
            command_line("run", "digits.yaml", "--no-check", *words(*changes))
            result = command_line.result(name)
            assert result.outcome == "done"
            assert "OfflineModeIsEnabled" in command_line("logs", name, "0")[0]
    finally:
        command_line("pool", "down", "team", "--yes")
    assert hub.gets["model.safetensors"] == 1
