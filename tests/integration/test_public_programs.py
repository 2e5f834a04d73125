"""Programs of the kinds that people have become searches: few lines are changed, and winners are as by hand."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.builders.public_programs import PROGRAMS, Door, Program, programs

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
