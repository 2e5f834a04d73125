"""The process of a program: it is stopped, ended and waited for with all that it started."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rubberband.executor.training.program import ProgramProcess
from tests.builders.waiting import eventually

PAIR = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
pathlib.Path("pid").write_text(str(child.pid))
child.wait()
"""


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[ProgramProcess, int]]:
    """A program that waits for another one, and the number of that one."""
    with open(os.devnull, "w") as output:
        program = ProgramProcess(
            [sys.executable, "-c", PAIR], os.environ, str(tmp_path), *map(os.dup, [output.fileno()] * 2)
        )
    eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    yield program, int((tmp_path / "pid").read_text())
    program.end()


def state(pid: int) -> str:
    return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]


def test_a_pause_stops_what_the_program_started_and_the_end_does_not_wait_for_it(
    pair: tuple[ProgramProcess, int],
) -> None:
    program, child = pair
    program.pause()
    assert state(child) == "T"
    program.go_on()
    eventually(lambda: state(child) in "RS")
    program.pause()
    program.end()
    assert program.poll() == 143  # of SIGTERM: a stopped program gets it as well
    assert not Path("/proc", str(child)).exists()
