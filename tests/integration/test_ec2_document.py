"""docs/ec2.md: its `rubberband` commands, as they stand there, against the fake EC2. The `aws` commands are not run."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from rubberband.cloud.aws_fake.rehearsal import Rehearsal, rehearsal

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs/ec2.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh (laptop|head)\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)


@pytest.fixture
def aws(tmp_path: Path) -> Iterator[Rehearsal]:
    with rehearsal(tmp_path / "aws") as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The reader's folder; on the fake, instances use this computer's Python."""
    shutil.copytree(ROOT / "examples", tmp_path / "here" / "examples")
    file = tmp_path / "here" / "examples" / "digits-aws.yaml"
    text = file.read_text(encoding="utf-8")
    assert "install: scikit-learn" in text
    file.write_text(text.replace("install: scikit-learn", "install: none"), encoding="utf-8")
    return tmp_path / "here"


def ran(commands: str, environment: Mapping[str, str], folder: Path) -> str:
    words = {**environment, "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        env=words,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_commands_of_the_laptop(aws: Rehearsal, folder: Path) -> None:
    outputs = [ran(commands, aws.outside(), folder) for where, commands in BLOCKS if where == "laptop"]

    estimate, plan, up, down = outputs
    told = dict(re.findall(r"^\| ([\w ]+?) +\| (\d\.\d{6}) \|$", DOCUMENT, re.MULTILINE))
    bill = estimate.partition("The bill\n")[2].partition("\n\n")[0]
    assert told == dict(re.findall(r"^ +([\w ]+?) +(\d\.\d{6})$", bill, re.MULTILINE))
    assert "quota:" in plan
    assert "aws ssm start-session" in up
    assert "ended head" in down
    assert not aws.fake.living


@pytest.mark.long
def test_all_commands_in_their_order(aws: Rehearsal, folder: Path) -> None:
    for where, commands in BLOCKS:
        output = ran(commands, aws.outside() if where == "laptop" else aws.environment, folder)
        if "rubberband run" in commands:
            assert "digits-aws: done in" in output
    assert (folder / "report.html").exists()
    assert not aws.fake.living
    assert aws.fake.bill().total_usd < 1.0
