"""A program on the head: run, watched, cancelled and resumed from a laptop, with a secret that nothing keeps."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rubberband.cloud.aws.handover import packed_secrets
from tests.builders.ec2_runs import ON_EC2, Ec2CommandLine, ec2, ran, words
from tests.builders.secret_watch import watched
from tests.builders.waiting import eventually
from tests.ec2 import BUCKET

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(1800)]

TOKEN = "hf_aVery$ecret/token"
PROGRAM = """
import os, pathlib, sys, time
from lib.words import WORDS

out, until, lr = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
begin = int((out / "n").read_text()) if (out / "n").exists() else 0
print(WORDS, os.environ["DATA"], "token", os.environ["HF_TOKEN"], "from", begin, flush=True)
for iteration in range(begin + 1, until + 1):
    while iteration > 4 and pathlib.Path(os.environ["DATA"], "hold").exists():
        time.sleep(0.05)
    time.sleep(1.0)
    (out / "n").write_text(str(iteration))
    print(f"iteration {iteration} accuracy={len(os.environ['HF_TOKEN']) + lr}", flush=True)
"""


class Laptop:
    """A command line outside the VPC, beside the folder of a program."""

    def __init__(self, aws: Ec2CommandLine) -> None:
        self.fake, self.machines, self.folder = aws.aws.fake, aws.aws.machines, aws.folder
        self.environment = {**aws.aws.outside(), "RUBBERBAND_HOME": str(self.folder / "laptop"), "HF_TOKEN": TOKEN}
        (self.folder / "laptop").mkdir()
        (self.folder / "laptop" / "aws.yaml").write_text(f"bucket: {BUCKET}\nregion: us-east-1\n")
        (self.folder / "train.py").write_text(PROGRAM)
        (self.folder / "lib").mkdir()
        (self.folder / "lib" / "words.py").write_text('WORDS = "imported words"\n')

    def says(self, *command: str) -> str:
        return ran(self.environment, self.folder, "rubberband.cli", *command)

    def refuses(self, *command: str) -> str:
        with pytest.raises(AssertionError) as refused:
            self.says(*command)
        (line,) = [line for line in str(refused.value).splitlines() if "error: " in line]
        return line.partition("error: ")[2]

    def workers(self) -> list[str]:
        return [one.instance_id for one in self.fake.living if one.tags.get("rubberband:role") == "worker"]

    def iterations(self) -> int:
        """Those of the run; none while it is checked and profiled."""
        if "digits" not in self.says("ps", "--on", "head"):
            return 0
        summary = json.loads(self.says("status", "digits", "--on", "head", "-o", "json"))["summary"]
        return int(summary["iterations"])

    def turn_the_head_off(self) -> str:
        """Shut its system down, as it does itself when it idles; its disk stays."""
        (head,) = self.fake.living
        subprocess.run(["shutdown", "-h", "now"], env=self.machines.environment(head.instance_id), check=True)
        eventually(lambda: head.state(self.fake.clock()) == "stopped", "the head's end")
        return head.instance_id


@pytest.fixture
def laptop(tmp_path: Path) -> Iterator[Laptop]:
    with ec2(tmp_path) as driver:
        yield Laptop(driver)


def settings(data: Path) -> tuple[str, ...]:
    command = "python train.py ${checkpoint} ${max_t} ${lr}"
    return words(
        *ON_EC2,
        f"entrypoint={{command: '{command}', metrics: stdout}}",
        "search.scheduler={type: stages, stages: [{trials: 2, iterations: 3}, {trials: 1, iterations: 4}]}",
        "constraints={deadline: 40m, max_cost: 5, objective: min_time, iteration_timeout: 20m}",
        "profile={seconds_per_iteration: {1: 1.2}, trial_startup: 0.5s}",
        "resources.max_instances=2",
        "resources.gpus_per_trial={min: 1, max: 1}",
        f"resources.env={{DATA: {data}}}",
        "resources.secrets=[HF_TOKEN]",
    )


def test_a_program_with_a_secret_runs_is_cancelled_and_resumes_on_a_head_that_was_off(
    laptop: Laptop, tmp_path: Path
) -> None:
    sent, told = list[str](), dict[str, str]()
    runs = laptop.machines.run_command
    laptop.fake.world.runs_command = lambda instance_id, script: sent.append(script) or runs(instance_id, script)
    hold = tmp_path / "hold"
    run = ("run", "digits.yaml", "--on", "head", "-y", *settings(tmp_path))
    hold.touch()
    with watched([TOKEN, packed_secrets({"HF_TOKEN": TOKEN})], tmp_path) as seen:
        token = laptop.environment.pop("HF_TOKEN")
        assert laptop.refuses(*run) == (
            "resources.secrets: HF_TOKEN is not set; run `export HF_TOKEN=…` before this command"
        )
        assert laptop.fake.instances == ()
        laptop.environment["HF_TOKEN"] = token
        follower = subprocess.Popen(
            [sys.executable, "-m", "rubberband.cli", *run],
            env=laptop.environment,
            cwd=laptop.folder,
            stderr=subprocess.STDOUT,
        )
        eventually(lambda: follower.poll() is not None or laptop.workers(), "an instance", within_s=300.0)
        follower.kill()
        follower.wait()
        eventually(lambda: laptop.iterations() == 7, "the second stage", within_s=300.0)
        told["logs while it runs"] = laptop.says("logs", "digits", "--on", "head")
        told["cancel"] = laptop.says("cancel", "digits", "--on", "head")
        eventually(lambda: not laptop.workers(), "the end of the workers")
        told["status"] = laptop.says("status", "digits", "--on", "head")
        head = laptop.turn_the_head_off()
        del laptop.environment["HF_TOKEN"]
        resume = ("resume", "digits", "--on", "head", "-y")
        assert laptop.refuses(*resume) == (
            "resources.secrets: HF_TOKEN is not set; run `export HF_TOKEN=…` before this command"
        )
        laptop.environment["HF_TOKEN"] = token
        hold.unlink()
        told["resume"] = laptop.says(*resume)
        told["logs"] = laptop.says("logs", "digits", "--on", "head")
        told["json"] = laptop.says("report", "digits", "-o", "json", "--on", "head")
        laptop.says("report", "digits", "--html", "report.html", "--on", "head")
        laptop.says("export", "digits", "trials.csv", "--on", "head")
        told["down"] = laptop.says("cloud", "down", "--region", "us-east-1", "--yes")
    assert "cancelled" in told["status"]
    assert "digits: done in" in told["resume"]
    assert f"imported words {tmp_path} token *** from 0" in told["logs"]
    assert re.search(r"token \*\*\* from [34]", told["logs"])
    assert head in told["down"]
    found = json.loads(told["json"])
    assert [trial["iterations"] for trial in found["trials"]] in ([3, 7], [7, 3])
    told |= {one.instance_id: one.user_data for one in laptop.fake.instances}
    told |= {f"command {number}": script for number, script in enumerate(sent)}
    assert [name for name, text in told.items() if TOKEN in text] == []
    assert seen == []
    assert [name for name in laptop.fake.world.parameters if "secrets" in name] == []
    assert laptop.fake.living == ()
