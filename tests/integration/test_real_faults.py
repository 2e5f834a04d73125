"""Faults of the machine that are tried for real: its clock is set, the driver is paused, a trial eats the memory."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rubberband.executor import RAN_OUT, ExperimentFolder, JournalFollower, Result
from tests.builders.command_line import PATIENCE_S, CommandLine

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(420)]

STEPPED = """
import os, time
_real = time.time
def _stepped():
    with open(os.environ["STEP_FILE"]) as file:
        return _real() + float(file.read() or 0.0)
time.time = _stepped
"""
"""Python's `sitecustomize`: the clock is as far off as a file says."""

MEMCG = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES = 2_600 * 2**20


def iterations(result: Result) -> int:
    return sum(trial.iterations for trial in result.trials)


def check_the_bill(command_line: CommandLine, held_at_most_s: float) -> None:
    """It is what the instances wrote down, and no instance was held longer than it took."""
    folder = ExperimentFolder(home=command_line.home, name="sleepy")
    result, billed_s = command_line.result(), 0.0
    for instance in result.instances:
        record = json.loads((folder.instances / "instances" / f"{instance.instance}.json").read_text())
        assert 0.0 < record["ended_at"] - record["running_at"] < held_at_most_s
        billed_s += record["ended_at"] - record["running_at"]
    assert result.actual_cost_usd == pytest.approx(billed_s * 36.0 / 3600.0, abs=0.001)
    follower = JournalFollower(folder)
    try:
        instants = [event.occurred_at for _, event in follower.journal.events()]
    finally:
        follower.close()
    assert instants == sorted(instants)


@pytest.mark.parametrize("by_s", [1800, -1800])
def test_a_step_of_the_clock_ends_no_instance_fails_no_trial_and_is_not_billed(
    command_line: CommandLine, by_s: int
) -> None:
    offset = command_line.folder / "offset"
    offset.write_text("0")
    site = command_line.folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(STEPPED)
    path = os.pathsep.join([str(site), command_line.environment["PYTHONPATH"]])
    command_line.environment |= {"PYTHONPATH": path, "STEP_FILE": str(offset)}
    begun_at = time.monotonic()
    driver = command_line.start("run", "sleepy.yaml", "-s", "resources.lease=20s", "-s", "constraints.max_cost=5")
    command_line.wait_for(driver, lambda result: iterations(result) >= 6)
    (command_line.folder / "stepped").write_text(str(by_s))
    (command_line.folder / "stepped").replace(offset)
    output, errors = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 0, output + errors
    result = command_line.result()
    assert [trial.failures for trial in result.trials] == [0, 0, 0, 0]
    assert [instance.reason for instance in result.instances if instance.reason] == []
    check_the_bill(command_line, time.monotonic() - begun_at)
    assert command_line.nothing_left()


def test_a_driver_that_was_paused_buys_again_what_ended_itself_and_mentions_it(command_line: CommandLine) -> None:
    driver = command_line.start("run", "sleepy.yaml", "-s", "resources.lease=8s", "-s", "constraints.max_cost=5")
    cut = command_line.wait_for(driver, lambda result: iterations(result) >= 6)
    driver.send_signal(signal.SIGSTOP)
    try:
        time.sleep(45.0)  # longer than a lease, and than what counts as standing still (30 s)
        assert command_line.processes() == [driver.pid], "instances outlived their lease"
    finally:
        driver.send_signal(signal.SIGCONT)
    output, errors = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 0, output + errors
    assert "the driver stood still for" in output
    result = command_line.result()
    assert [trial.failures for trial in result.trials] == [0, 0, 0, 0]
    assert len(result.instances) > len(cut.instances)
    check_the_bill(command_line, 60.0)
    assert command_line.nothing_left()


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A control group whose processes have little memory; the test is skipped where none can be made."""
    group = MEMCG / f"rubberband-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    except OSError:
        pytest.skip("needs root and the memory controller of cgroups (version 1)")
    yield group
    group.rmdir()


def test_a_trial_that_eats_the_memory_fails_alone_and_by_its_cause(
    command_line: CommandLine, small_memory: Path
) -> None:
    trials = command_line.folder / "sleepy.py"
    eat = "        while self.trial == 1 and self.iterations == 3:\n            kept.append(bytearray(b'x' * 2**25))\n"
    trials.write_text(trials.read_text().replace("        match self", f"        kept = []\n{eat}        match self"))
    driver = command_line.start("run", "sleepy.yaml")
    (small_memory / "cgroup.procs").write_text(str(driver.pid))
    output, errors = driver.communicate(timeout=2 * PATIENCE_S)
    assert driver.returncode == 0, output + errors
    result = command_line.result()
    assert [trial.status for trial in result.trials].count("failed") == 1
    hungry = result.trials[1]
    assert (hungry.status, hungry.iterations) == ("failed", 2)
    assert RAN_OUT in output
    assert [trial.failures for trial in result.trials if trial.trial != 1] == [0, 0, 0]
    assert [instance.reason for instance in result.instances if instance.reason] == []
    assert command_line.nothing_left()
