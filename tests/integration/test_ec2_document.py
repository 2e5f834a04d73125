"""docs/ec2.md: its `rubberband` commands, as they stand there, against the fake EC2. The `aws` commands are not run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.builders.documents import blocks
from tests.ec2.fake_cloud import FakeCloud, fake_cloud

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/ec2.md"
DOCUMENT = PAGE.read_text(encoding="utf-8")
PATIENCE_S = 600.0
"""Of a block of commands, on a machine that does something else as well."""
SMALLER = {"num_samples: 36": "num_samples: 4", "max_t: 13": "max_t: 4"}
"""The search of the long test, which tries the commands, not the training."""
BLOCKS = [(block.place, block.text) for block in blocks(PAGE) if block.place in ("laptop", "head")]


@pytest.fixture
def aws(tmp_path: Path) -> Iterator[FakeCloud]:
    with fake_cloud(tmp_path / "aws") as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The reader's folder; on the fake, instances use this computer's Python."""
    shutil.copytree(ROOT / "examples", tmp_path / "here" / "examples")
    change(tmp_path / "here", {"install: scikit-learn": "install: none"})
    return tmp_path / "here"


def change(folder: Path, words: Mapping[str, str]) -> None:
    """Write other words into the example, each of which it has."""
    file = folder / "examples" / "digits-aws.yaml"
    text = file.read_text(encoding="utf-8")
    for old, new in words.items():
        assert old in text
        text = text.replace(old, new)
    file.write_text(text, encoding="utf-8")


def ran(commands: str, environment: Mapping[str, str], folder: Path) -> str:
    """What commands print; after `PATIENCE_S` they are killed, and the test fails."""
    words = {**environment, "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}", "PYTHONPATH": str(ROOT)}
    shell = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", commands],
        env=words,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = shell.communicate(timeout=PATIENCE_S)
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
    assert shell.returncode == 0, f"{commands}\n{output}\n{errors}"
    return output


@pytest.mark.long
def test_the_commands_of_the_laptop(aws: FakeCloud, folder: Path) -> None:
    *first, last = [commands for where, commands in BLOCKS if where == "laptop"]
    up = "rubberband cloud up examples/digits-aws.yaml"
    outputs = [ran(commands, aws.outside(), folder) for commands in (*first, up, last)]
    setup, estimate, plan, up, down = outputs
    assert '"RoleName": "rubberband-head"' in setup
    assert "done: make stack rubberband of CloudFormation" in setup
    expected = dict(re.findall(r"^\| ([\w ]+?) +\| (\d\.\d{6}) \|$", DOCUMENT, re.MULTILINE))
    bill = estimate.partition("The bill\n")[2].partition("\n\n")[0]
    assert expected == dict(re.findall(r"^ +([\w ]+?) +(\d\.\d{6})$", bill, re.MULTILINE))
    assert "quota:" in plan
    assert "aws ssm start-session" in up
    assert "ended head" in down
    assert "done: delete stack rubberband of CloudFormation" in down
    assert not aws.fake.world.roles
    assert not aws.fake.living


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_all_commands_in_their_order(aws: FakeCloud, folder: Path) -> None:
    change(folder, SMALLER)
    for _, commands in BLOCKS:
        measured = commands.replace("run examples/digits-aws.yaml", "run examples/digits-aws.yaml -s profile=")
        output = ran(measured, aws.outside(), folder)
        if "rubberband run" in commands:
            assert "digits-aws: done in" in output
    assert (folder / "report.html").exists()
    assert not aws.fake.living
    assert aws.fake.bill().total_usd < 1.0
