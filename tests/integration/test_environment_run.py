"""Variables and secrets in a real run: they are there before any import, and no file of the home has a secret."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from rubberband.spec.loading import load_experiment
from tests.builders.command_line import CommandLine

pytestmark = [pytest.mark.long, pytest.mark.ray, pytest.mark.timeout(420)]

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


ORDERED = """
import subprocess
import sys
import rubberband

ORDER = "".join(set("cat dog bird fish cow pig".split()))
PRINT = "print(''.join(set('cat dog bird fish cow pig'.split())))"

def train(config):
    child = subprocess.run([sys.executable, "-c", PRINT], capture_output=True, text=True, check=True).stdout.strip()
    for iteration in range(rubberband.get_checkpoint() or 0, 2):
        print("order", ORDER, child, flush=True)
        rubberband.report({"score": config["x"]}, checkpoint=iteration + 1)
"""


@pytest.mark.parametrize(("seed", "setting"), [(5, "resources.env={}"), (7, 'resources.env={PYTHONHASHSEED: "5"}')])
def test_sets_have_one_order_in_every_process_of_every_stage(
    command_line: CommandLine, seed: int, setting: str
) -> None:
    """A label -> index that follows from a set is the same after a SYNC."""
    (command_line.folder / "ordered.py").write_text(ORDERED)
    settings = (
        "name=ordered",
        "entrypoint=ordered:train",
        "search.scheduler={type: sha, num_samples: 2, max_t: 2, reduction_factor: 2}",
        f"search.sampler={{type: random, seed: {seed}}}",
        setting,
    )
    command_line("run", "sleepy.yaml", *[word for setting in settings for word in ("-s", setting)])
    seen = {
        line.partition("order ")[2] for line in command_line.shows("logs", "ordered").splitlines() if "order " in line
    }
    here = {**os.environ, "PYTHONHASHSEED": "5"}
    print_order = ORDERED.partition('PRINT = "')[2].partition('"')[0]
    order = subprocess.run(
        [sys.executable, "-c", print_order], env=here, capture_output=True, text=True, check=True
    ).stdout
    assert seen == {f"{order.strip()} {order.strip()}"}
