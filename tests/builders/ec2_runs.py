"""Whole runs on the fake EC2 with machines that are real Ray nodes, through the command line, as a user drives them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from rubberband.cloud.aws.calls import name_in
from rubberband.executor import Result
from tests.builders.command_line import ROOT, CommandLine
from tests.ec2.billing import BillLine
from tests.ec2.core import FakeAws
from tests.ec2.fake_cloud import FakeCloud, fake_cloud
from tests.ec2.instance import Instance
from tests.ec2.principals import BUCKET

TALKING = '''
import time
import rubberband

class Talking(rubberband.Trial):
    """Iterations so long that something can happen between them, with a word on each."""

    def setup(self, config, context):
        self.lr, self.iterations = config["lr"], context.iterations

    def iterate(self):
        time.sleep(1.8)
        self.iterations += 1
        print(f"iteration {self.iterations}, accuracy {self.lr:.3f}", flush=True)
        return {"accuracy": self.lr}

    def save(self):
        return self.iterations

    def load(self, state):
        assert state == self.iterations
'''


def on_ec2(name: str, instance_type: str) -> tuple[str, ...]:
    """All that a user changes in `examples/NAME.yaml`, on the fake EC2."""
    return (
        "resources.provider=aws",
        f"resources.instance_type={instance_type}",
        "resources.gpus_per_instance=",
        "resources.price_per_hour=",
        f"resources.checkpoints=s3://{BUCKET}/{name}",
        "resources.aws.install=none",
    )


ON_EC2 = on_ec2("digits", "g4dn.xlarge")
SHARDED_ON_EC2 = on_ec2("sharded", "g4dn.12xlarge")
TALKATIVE = ("entrypoint=talking:Talking", "profile={seconds_per_iteration: {1: 2.0}, trial_startup: 0.2s}")
FEW = (
    *TALKATIVE,
    "search.scheduler={type: stages, stages: [{trials: 4, iterations: 3}, {trials: 2, iterations: 4}]}",
    "resources.max_instances=2",
)
SPOT = ("resources.market=spot",)
MEASURED = ("profile=",)
"""The profile of the example is left out, so that an instance is measured first."""


class Ec2CommandLine(CommandLine):
    """`rubberband` on a machine in the VPC of the fake, in a folder with the digits' experiment file."""

    def __init__(self, folder: Path, aws: FakeCloud) -> None:
        folder.mkdir()
        super().__init__(folder)
        self.aws = aws
        self.home = Path(aws.environment["RUBBERBAND_HOME"])
        search = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.environment = {**aws.environment, "PYTHONPATH": search}
        (folder / "digits.yaml").write_text((ROOT / "examples" / "digits.yaml").read_text())
        (folder / "examples").mkdir()
        (folder / "examples" / "digits.py").write_text((ROOT / "examples" / "digits.py").read_text())
        (folder / "talking.py").write_text(TALKING)

    def instance(self, name: str) -> Instance:
        """The latest one of that name; its tags tell it."""
        named = [one for one in self.aws.fake.instances if name_in(one.tags, one.launch_index) == name]
        return max(named, key=lambda one: one.running_at)

    def console(self, name: str) -> str:
        return self.aws.machines.console(self.instance(name).instance_id)

    def lines_of_the_bill(self) -> dict[str, BillLine]:
        """Name -> what EC2 charges for it, of the run (not of its profile)."""
        named = {name_in(line.tags, line.launch_index): line for line in self.aws.fake.bill().lines}
        return {name: line for name, line in named.items() if name.startswith("i-")}


@contextlib.contextmanager
def ec2(folder: Path, *, pending_s: float = 0.0, boot_s: float = 0.0) -> Iterator[Ec2CommandLine]:
    """A command line beside an EC2 of its own, of which nothing is left afterwards.

    Its instances take `pending_s` until they run, and from then `boot_s` until their boot script begins.
    """
    fake = FakeAws(time.time, pending_s=pending_s, shutting_down_s=0.0)
    with fake_cloud(folder / "aws", fake=fake, boot_s=boot_s) as aws:
        yield Ec2CommandLine(folder / "code", aws)
    assert not aws.fake.living
    assert not aws.machines.processes()


def ran(environment: Mapping[str, str], folder: Path, *command: str) -> str:
    """Run a module of the package to its end, from anywhere; all that it printed."""
    done = subprocess.run(
        [sys.executable, "-m", *command], env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def words(*overrides: str) -> tuple[str, ...]:
    return tuple(part for override in overrides for part in ("-s", override))


def iterations(result: Result) -> int:
    return sum(trial.iterations for trial in result.trials)


def each_iteration_once(result: Result) -> bool:
    """Whether the journal has every iteration of every trial, and none of them twice."""
    return all([n for _, n, _ in trial.curve] == list(range(1, trial.iterations + 1)) for trial in result.trials)
