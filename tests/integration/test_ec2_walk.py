"""The whole walk on a head, from an empty account to an empty one: we tell what EC2 charges, and nothing stays.

`pytest -n 0 -m long -s tests/integration/test_ec2_walk.py` prints both bills, line by line.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rubberband.cloud.aws.calls import name_in
from tests.builders.command_line import ROOT
from tests.builders.ec2_runs import FEW, SPOT, TALKING, ran, words
from tests.builders.waiting import eventually
from tests.ec2.core import FakeAws
from tests.ec2.fake_cloud import FakeCloud, fake_cloud
from tests.ec2.instance import Instance

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(900)]
ON_EC2 = (
    "resources.provider=aws",
    "resources.instance_type=g4dn.xlarge",
    "resources.gpus_per_instance=",
    "resources.price_per_hour=",
    "resources.aws.install=none",
)
LINES = {"instances": "rent", "root volumes": "volume", "public IPv4 addresses": "address"}
"""Line of a report -> kind of line of EC2's bill."""
TENTH_OF_A_CENT, CENT = 0.001, 0.01
AROUND_S = 80.0
"""An estimate assumes 20 s from the launch to running and 60 s to shut down, for which volume and address are paid."""


class Walk:
    """A laptop beside an empty account."""

    def __init__(self, folder: Path, aws: FakeCloud) -> None:
        self.aws, self.folder = aws, folder
        folder.mkdir()
        (folder / "digits.yaml").write_text((ROOT / "examples" / "digits.yaml").read_text())
        (folder / "talking.py").write_text(TALKING)
        self.environment = {
            **aws.outside(),
            "PATH": f"{Path(sys.executable).parent}:{aws.environment['PATH']}",
            "PYTHONPATH": str(ROOT),
            "RUBBERBAND_HOME": str(folder / "laptop"),
        }

    def says(self, *command: str) -> str:
        return ran(self.environment, self.folder, "rubberband.cli", *command)

    def refuses(self, *command: str) -> str:
        with pytest.raises(AssertionError) as refused:
            self.says(*command)
        return str(refused.value)

    def killed_once(self, seen: Callable[[], bool], what: str, *command: str) -> None:
        """Kill -9 a command as soon as something is seen."""
        process = subprocess.Popen(
            [sys.executable, "-m", "rubberband.cli", *command],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        try:
            eventually(lambda: seen() or process.poll() is not None, what, within_s=300.0)
            assert process.poll() is None, process.communicate()[0]
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()

    def set_up(self) -> None:
        """As docs/ec2.md says; AWS grants the quotas."""
        self.says("aws", "setup", "-y")
        world = self.aws.fake.world
        for request in world.quota_requests:
            world.quotas_vcpus[request["QuotaCode"]] = request["DesiredValue"]
            request["Status"] = "APPROVED"
        assert "all is there" in self.says("aws", "check")

    def workers(self, *states: str) -> list[Instance]:
        living, now = self.aws.fake.living, time.time()
        ours = [one for one in living if one.tags.get("rubberband:role") == "worker"]
        return [one for one in ours if not states or one.state(now) in states]

    def left(self) -> dict[str, object]:
        """All that costs money or is in the way, and is the user's to delete."""
        fake, found = self.aws.fake, dict[str, object]()
        for region in (fake, *fake.elsewhere.values()):
            world, now = region.world, time.time()
            found |= {
                f"instances of {region.region}": [
                    one.instance_id for one in region.instances if one.state(now) not in ("shutting-down", "terminated")
                ],
                f"groups of {region.region}": [one.name for one in world.groups.values() if one.name != "default"],
                f"placement groups of {region.region}": list(world.placement_groups),
                f"snapshots of {region.region}": list(world.snapshots),
            }
        world = fake.world
        found |= {
            "schedules": list(world.schedules),
            "roles": list(world.roles),
            "instance profiles": list(world.profiles),
            "parameters": [name for name in world.parameters if "rubberband" in name],
            "buckets, with uploads under way": [*world.buckets, *world.uploads],
            "budgets": list(world.budgets),
            "images": [one.image_id for one in world.images.values() if one.owner == "self"],
        }
        return {what: ones for what, ones in found.items() if ones}

    def holds_the_bill(self, report: str, down: str) -> None:
        """A report and the end of its head tell what EC2 charges."""
        bill = self.aws.fake.bill()
        head = {line.instance_id for line in bill.lines if line.tags.get("rubberband:role") == "head"}
        beside = [side for side in bill.beside if side.instance_id not in head]
        charged = {"rent": sum(line.cost_usd for line in bill.lines if line.instance_id not in head)}
        for side in beside:
            charged[side.line] = charged.get(side.line, 0.0) + side.cost_usd
        found = {line["line"]: line["usd"] for line in json.loads(report)["bill"]}
        workers = len({side.instance_id for side in beside})
        for line, kind in LINES.items():
            print(f"{line:22} charged {charged[kind]:.6f} told {found[line]:.6f}")
            assert found[line] == pytest.approx(charged[kind], abs=TENTH_OF_A_CENT), line
        for line, usd_per_hour in (("root volumes", 75 * 0.08 / 720.0), ("public IPv4 addresses", 0.005)):
            most_usd = charged[LINES[line]] + workers * (AROUND_S + 60.0) / 3600.0 * usd_per_hour
            assert charged[LINES[line]] <= found[line] + 1e-9 <= most_usd, line
        ends = re.findall(r"the head ran for .*: (\d+\.\d+) USD with its address", down)
        head_usd = sum(line.cost_usd for line in bill.lines if line.instance_id in head)
        head_usd += sum(side.cost_usd for side in bill.beside if side.instance_id in head and side.line == "address")
        print(f"{'head':22} charged {head_usd:.6f} told {ends}")
        assert float(ends[0]) == pytest.approx(head_usd, abs=TENTH_OF_A_CENT)
        sum_usd = sum(found[line] for line in LINES) + float(ends[0])
        print(f"{'sum':22} charged {bill.total_usd:.6f} told {sum_usd:.6f}")
        assert sum_usd == pytest.approx(bill.total_usd, abs=CENT / 2)


@pytest.fixture
def walk(tmp_path: Path) -> Iterator[Walk]:
    # Usual times of EC2: volumes and addresses are charged for them.
    with fake_cloud(tmp_path / "aws", fake=FakeAws(time.time, pending_s=20.0, shutting_down_s=30.0)) as aws:
        aws.fake.world.empty()
        (tmp_path / "aws" / "home" / "aws.yaml").unlink()
        yield Walk(tmp_path / "code", aws)


def torn_down(walk: Walk, report: str) -> None:
    """End the head and what `aws setup` made: nothing stays, and the bill is what was told."""
    refused = walk.says("cloud", "down", "-y")
    walk.says("aws", "teardown", "-y", "--delete-checkpoints")
    assert "nothing to delete" in walk.says("aws", "teardown", "-y")
    walk.holds_the_bill(report, refused)
    assert walk.left() == {}


def test_a_walk_with_a_set_up_that_was_cut_off_and_a_laptop_that_went_off(walk: Walk) -> None:
    world = walk.aws.fake.world
    walk.killed_once(lambda: bool(world.roles), "a role", "aws", "setup", "-y")
    assert walk.left()
    walk.set_up()
    assert "make:" not in walk.says("aws", "setup", "-y"), "a second one has nothing to do"
    run = ("run", "digits.yaml", "--on", "head", "-y", *words(*ON_EC2, *FEW))
    walk.killed_once(lambda: len(walk.workers("running")) == 2, "both workers", *run)
    assert "which need the roles; run `rubberband cloud down " in walk.refuses("aws", "teardown", "-y")
    assert "runs on the head already" in walk.refuses(*run)
    assert "digits: done in" in walk.says("status", "digits", "--on", "head", "--watch")
    assert "has 1 instance in us-east-1 (head (i-" in walk.refuses("aws", "teardown", "-y"), "it is idle, and costs"
    torn_down(walk, walk.says("report", "digits", "-o", "json", "--on", "head"))


def test_a_walk_on_spot_with_an_interruption_a_cancel_and_a_resume(walk: Walk) -> None:
    walk.set_up()
    run = ("run", "digits.yaml", "--on", "head", "-y", *words(*ON_EC2, *FEW, *SPOT))
    walk.killed_once(lambda: len(walk.workers("running")) == 2, "both workers", *run)
    taken = walk.workers()[0]
    walk.aws.fake.reclaim(taken.instance_id, notice_s=5.0)
    eventually(lambda: taken.instance_id not in {one.instance_id for one in walk.workers()}, "the interruption")
    walk.says("cancel", "digits", "--on", "head")
    eventually(lambda: not walk.workers(), "the end of the workers")
    eventually(lambda: "cancelled" in walk.says("status", "digits", "--on", "head"), "the end of the run")
    assert "digits: done in" in walk.says("resume", "digits", "--on", "head", "-y")
    line = next(one for one in walk.aws.fake.bill().lines if one.instance_id == taken.instance_id)
    assert (name_in(line.tags, line.launch_index) or "").startswith("i-")
    assert line.cost_usd == 0.0, "EC2 charges nothing for what it takes away in the first hour"
    torn_down(walk, walk.says("report", "digits", "-o", "json", "--on", "head"))
