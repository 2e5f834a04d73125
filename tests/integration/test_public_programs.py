"""Programs of the kinds that people have become searches: few lines are changed, and winners are as by hand."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from rubberband.executor import Entrypoint, open_store
from rubberband.values.command import Metrics, ProgramCommand, words_of
from tests.builders.processes.segment_worker import Worker, run_gang
from tests.builders.public_programs import PROGRAMS, Door, Program, programs
from tests.builders.segments import SEGMENT

FINISHED = [name for name, program in programs().items() if program.outcome == "finished"]
REFUSED = [name for name, program in programs().items() if program.outcome == "refused"]
MOST_LINES = 5


def program_of(name: str) -> Program:
    program = programs()[name]
    for module in program.needs:
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    return program


def test_the_table_has_each_program_and_few_lines_to_change() -> None:
    folders = {path.name for path in PROGRAMS.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert {program.folder or name for name, program in programs().items()} == folders
    assert len(FINISHED) >= 15
    for program in programs().values():
        assert sum(change.lines for change in program.changes) <= MOST_LINES, program.name
        assert all(change.why for change in program.changes), program.name
        assert (program.outcome == "refused") == bool(program.says), program.name


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FINISHED)
def test_the_winner_equals_the_program_by_hand(name: str, tmp_path: Path) -> None:
    door = Door(program_of(name), tmp_path)
    assert door.init().returncode == 0, door.said[-1]
    door.change()
    door.require_right()
    assert door.check().returncode == 0, door.said[-1]
    door.compare(door.run())


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", REFUSED)
def test_a_program_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    door = Door(program_of(name), tmp_path)
    if door.init().returncode == 0:
        assert door.check().returncode == 1, door.said[-1]
    assert door.refusal(), "\n".join(door.said)


COMMANDS = {
    "ddp_elastic": "python main.py . --epochs ${max_t} --checkpoint-file ${checkpoint}/state.pt --lr ${lr}",
    "ddp_snapshot_printing": "python train.py ${max_t} 1 --batch_size ${batch_size}",
}
CONFIGURATIONS = {"ddp_elastic": {"lr": 0.05}, "ddp_snapshot_printing": {"batch_size": 64}}


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_program_of_torchrun_trains_alike_on_gangs_of_1_2_and_1(
    name: str, tmp_path: Path, workers: list[Worker]
) -> None:
    door = Door(program_of(name), tmp_path)
    door.change_program()
    pattern = door.program.metrics[0][2]
    hand = door.printed(CONFIGURATIONS[name], 0, pattern)
    words = words_of(COMMANDS[name].replace("python", sys.executable, 1))
    command = ProgramCommand(words=words, metrics=Metrics(source="stdout", pattern=f"(?m){named(pattern)}"))
    entrypoint = Entrypoint(module="", attribute="", search_path=(str(door.folder),), command=command)
    store, last, found = open_store(str(tmp_path / "store")), None, []
    for size, until in ((1, 1), (2, 3), (1, 4)):
        begin, checkpoint = (0, None) if last is None else (last.iterations, last.checkpoint)
        segment = replace(
            SEGMENT, config=CONFIGURATIONS[name], metric="value", from_iterations=begin, checkpoint=checkpoint,
            until_iterations=until, max_iterations=4,
        )  # fmt: skip
        reports = [item for item in run_gang(workers[:size], entrypoint, segment, store)[0] if hasattr(item, "metrics")]
        found += [report.metrics["value"] for report in reports]
        last = reports[-1]
    assert found == pytest.approx(hand, abs=door.program.within)


def named(pattern: str) -> str:
    return pattern.replace("(", "(?P<value>", 1)
