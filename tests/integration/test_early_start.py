"""Ray nodes and the fork server start while a trial is checked here; without a run nothing of them is left."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from rubberband.executor import ExperimentFolder
from tests.builders.command_line import PATIENCE_S, CommandLine
from tests.builders.waiting import eventually

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

BROKEN = (
    "\n\nclass Broken(Sleepy):\n    def iterate(self):\n        time.sleep(6)\n        raise ValueError('bad data')\n"
)
_LEASE_S = 20.0
_LONGEST_S = 20.0
"""Ctrl-C comes at any time until a run of the file has long begun."""


@pytest.fixture
def command_line(tmp_path: Path) -> CommandLine:
    made = CommandLine(tmp_path)
    with (tmp_path / "sleepy.py").open("a") as file:
        file.write(BROKEN)
    return made


def _temporary_folders() -> set[Path]:
    return set(Path("/tmp").glob("rb-*"))


def _names(command_line: CommandLine) -> set[str]:
    folder = ExperimentFolder(home=command_line.home, name="sleepy")
    return {path.name for path in folder.instances.glob("*/*.json") if '"pid": null' not in path.read_text()}


def _ours(command_line: CommandLine) -> set[Path]:
    """Return the folders of Ray that records of this home name, and those made since that none names."""
    folder = ExperimentFolder(home=command_line.home, name="sleepy").instances
    texts = [path.read_text() for path in folder.glob("*/*.json")]
    return {path for path in _temporary_folders() if any(str(path) in text for text in texts)}


def test_a_failing_check_leaves_nothing_of_what_started_beside_it(command_line: CommandLine) -> None:
    with command_line.start("run", "sleepy.yaml", "-s", "entrypoint=sleepy:Broken") as driver:
        eventually(lambda: _names(command_line) == {"head-0.json", "i-001.json"}, "nodes that start")
        folders = _ours(command_line)
        assert folders
        _, errors = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 2
    assert "does not pass the check: iteration: ValueError: bad data" in errors
    assert command_line.nothing_left()
    assert not folders & _temporary_folders()
    assert not (command_line.home / "experiments" / "sleepy").exists()


def test_a_killed_start_ends_by_itself_and_its_name_is_free(command_line: CommandLine) -> None:
    with command_line.start("run", "sleepy.yaml", "-s", "entrypoint=sleepy:Broken") as driver:
        eventually(lambda: len(_names(command_line)) == 2, "nodes that start")
        folders = _ours(command_line)
        driver.kill()
    command_line.end_leases(_LEASE_S)
    assert command_line.nothing_left()
    assert folders
    assert not folders & _temporary_folders()
    command_line("run", "sleepy.yaml", "--no-check", "-s", "search.scheduler.stages=[{trials: 2, iterations: 1}]")
    assert command_line.result().outcome == "done"
    assert command_line.nothing_left()


def test_instances_that_started_early_are_paid_from_when_they_are_asked_for(command_line: CommandLine) -> None:
    command_line("run", "sleepy.yaml", "-s", "search.scheduler.stages=[{trials: 4, iterations: 1}]")
    result = command_line.result()
    assert result.outcome == "done"
    (instance,) = result.instances
    assert instance.running_s is not None
    assert 0.0 <= instance.requested_s <= instance.running_s


def test_a_launch_is_not_over_where_workers_have_to_import_the_trial(command_line: CommandLine) -> None:
    with (command_line.folder / "sleepy.py").open("a") as file:
        file.write("\n\nFILE = open(__file__)  # a fork would share its place\n")
    short = "search.scheduler.stages=[{trials: 4, iterations: 1}]"
    command_line("run", "sleepy.yaml", "-s", short)
    assert command_line.result().planned_jct_s > 2.0, "provision_delay and init_delay of the file"


@pytest.mark.long
@pytest.mark.parametrize("turn", range(20))
def test_ctrl_c_at_any_moment_leaves_nothing(command_line: CommandLine, turn: int) -> None:
    chosen = random.Random(turn)
    before = _temporary_folders()
    with command_line.start("run", "sleepy.yaml") as driver:
        time.sleep(chosen.uniform(0.0, _LONGEST_S))
        driver.send_signal(signal.SIGINT)
        if turn % 2:
            time.sleep(chosen.uniform(0.0, 1.0))
            driver.send_signal(signal.SIGINT)
        driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode in (130, -signal.SIGINT, 0)
    assert command_line.nothing_left()
    folder = ExperimentFolder(home=command_line.home, name="sleepy")
    assert folder.exists or not folder.instances.exists()
    assert not _ours(command_line)
    eventually(lambda: not _made_by(before), "folders of Ray that are removed")


def _made_by(before: set[Path]) -> set[Path]:
    """Return the new folders of Ray without a process that has it open: others' runs have theirs."""
    import psutil

    new = {path for path in _temporary_folders() if path not in before}
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    return {path for path in new if not any(str(path) in line for line in lines)}
