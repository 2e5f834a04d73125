"""Variables and secrets in a real run: they are there before any import, and no file of the home has a secret."""

from __future__ import annotations

import json

import pytest

from rubberband.spec.loading import load_experiment
from tests.builders.command_line import CommandLine

pytestmark = [pytest.mark.ray, pytest.mark.timeout(420)]

TOKEN = "hf_aVery$ecret/token"
TRIAL = """
import os
import rubberband

AT_IMPORT = os.environ.get("DATA"), len(os.environ.get("HF_TOKEN", ""))

def train(config):
    print("at import", *AT_IMPORT, "token", os.environ["HF_TOKEN"], flush=True)
    os.environ["DATA"] = "changed by a trial"
    if config["x"] > 0.5:
        raise ValueError("the server refuses " + os.environ["HF_TOKEN"])
    if config["x"] > 0.42:
        rubberband.report({"refused for " + os.environ["HF_TOKEN"]: 1.0})
    for iteration in range(2):
        rubberband.report({"score": config["x"]}, checkpoint=iteration)
"""


@pytest.mark.long
def test_trials_get_variables_and_secrets_and_nothing_keeps_a_secret(command_line: CommandLine) -> None:
    (command_line.folder / "guarded.py").write_text(TRIAL)
    settings = (
        "name=guarded",
        "entrypoint=guarded:train",
        "search.scheduler={type: sha, num_samples: 4, max_t: 2, reduction_factor: 2}",
        "resources.env={DATA: /data}",
        "resources.secrets=[HF_TOKEN]",
    )
    words = [word for setting in settings for word in ("-s", setting)]
    command_line.environment.pop("HF_TOKEN", None)
    refused = command_line.refused("run", "sleepy.yaml", *words)
    assert refused == "error: resources.secrets: HF_TOKEN is not set; run `export HF_TOKEN=…` before this command"
    assert not (command_line.home / "experiments").exists()

    command_line.environment["HF_TOKEN"] = TOKEN
    output, errors = command_line("run", "sleepy.yaml", *words)
    xs = [each["x"] for each in load_experiment(command_line.folder / "sleepy.yaml", settings).configurations()]
    assert {(x > 0.5) + (x > 0.42) for x in xs} == {0, 1, 2}
    result = command_line.result("guarded")
    for trial, x in zip(result.trials, xs, strict=True):
        assert trial.status == "failed" if x > 0.42 else trial.iterations >= 1
    log = command_line.shows("logs", "guarded")
    assert f"at import /data {len(TOKEN)} token ***" in log
    assert "changed by a trial" not in log
    assert "ValueError: the server refuses ***" in log
    report = command_line.shows("report", "guarded", "--verbose")
    assert "the trial reported 'refused for ***'" in report
    message = {"output": output, "errors": errors, "log": log, "report": report, "json": json.dumps(result.to_json())}
    kept = {str(path): path.read_bytes() for path in command_line.home.rglob("*") if path.is_file()}
    assert [name for name, text in message.items() if TOKEN in text] == []
    assert [path for path, content in kept.items() if TOKEN.encode() in content] == []
    assert command_line.nothing_left()
