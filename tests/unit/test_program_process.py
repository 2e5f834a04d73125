"""The process of a program: it is stopped, ended and waited for with all that it started."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from rubberband.executor.training.guarded_process import GuardedProcess
from rubberband.executor.training.programs.printed import Printed
from rubberband.values.command import Metrics
from tests.builders.waiting import eventually

PAIR = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
pathlib.Path("pid").write_text(str(child.pid))
child.wait()
"""


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[GuardedProcess, int]]:
    """A program that waits for another one, and the number of that one."""
    with open(os.devnull, "w") as output:
        program = GuardedProcess(
            [sys.executable, "-c", PAIR], os.environ, str(tmp_path), *map(os.dup, [output.fileno()] * 2)
        )
    eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    yield program, int((tmp_path / "pid").read_text())
    program.end()


def state(pid: int) -> str:
    return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]


def test_a_pause_stops_what_the_program_started_and_the_end_does_not_wait_for_it(
    pair: tuple[GuardedProcess, int],
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


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("before", ["", " 50%|##   | 1/2\r", "loss=9\r"])
@pytest.mark.parametrize("place", ["stdout", "file"])
def test_a_line_is_read_whatever_it_ends_with_and_from_its_last_return_on(
    end: str, before: str, place: str, tmp_path: Path
) -> None:
    text = f"{before}loss=1{end}{before}loss=2{end}".encode()
    (tmp_path / "checkpoint").mkdir()
    printed = Printed(
        Metrics(source="stdout", file=None if place == "stdout" else str(tmp_path / "log")),
        "loss",
        tmp_path / "checkpoint",
        saves=False,
    )
    if place == "file":
        (tmp_path / "log").write_bytes(text)
    else:
        output, stdout = os.pipe()
        printed.watch(cast("GuardedProcess", SimpleNamespace()), [output])
        os.write(stdout, text)
        os.close(stdout)
        printed.finish()
    assert [line.metrics for line in (printed.wait(), printed.wait()) if line] == [{"loss": 1.0}, {"loss": 2.0}]


LATE = """
import pathlib, sys, time
time.sleep(0.15)
print("loss=1", flush=True)
for name in ("model", "optimizer"):
    time.sleep(float(sys.argv[2]))
    pathlib.Path(sys.argv[1], name).write_text(f"of {name}")
time.sleep(1000)
"""


def taken_beside(source: str, folder: Path, *words: str, lines: int = 1, took_s: float = 0.0) -> list[list[str]]:
    """Return the contents of the files that are taken beside each of the first `lines` of a program."""
    printed = Printed(Metrics(source="stdout"), "loss", folder, saves=False, took_s=took_s)
    (output, stdout), (errors, stderr) = os.pipe(), os.pipe()
    argv = [sys.executable, "-c", source, str(folder), *words]
    program = GuardedProcess(argv, os.environ, str(folder), stdout, stderr)
    printed.watch(program, [output, errors])
    found: list[list[str]] = []
    try:
        for _ in range(lines):
            printed.go_on()
            while (line := printed.wait()) is None:
                pass
            found.append([])
            for _ in printed.settle(
                line, lambda: found[-1].extend(path.read_text() for path in sorted(folder.iterdir()))
            ):
                pass
    finally:
        program.end()
        printed.finish()
    return found


@pytest.mark.parametrize(("took_s", "taken"), [(30.0, ["of model", "of optimizer"]), (1.0, [])])
def test_files_may_come_the_later_the_longer_an_iteration_takes(
    took_s: float, taken: list[str], tmp_path: Path
) -> None:
    assert taken_beside(LATE, tmp_path, "0.4", took_s=took_s) == [taken]


BY_A_THREAD = """
import pathlib, sys, threading, time
def save(epoch):
    with open(pathlib.Path(sys.argv[1], "model"), "w") as file:
        file.write(f"half of {epoch}")
        file.flush()
        time.sleep(0.48)
        file.seek(0)
        file.write(f"whole of {epoch}")
for epoch in (1, 2, 3):
    time.sleep(0.5)
    print(f"loss={epoch}", flush=True)
    if epoch == 1:
        threading.Thread(target=save, args=(epoch,)).start()
time.sleep(1000)
"""


def test_files_that_are_whole_only_at_the_next_line_are_not_of_its_iteration(tmp_path: Path) -> None:
    assert taken_beside(BY_A_THREAD, tmp_path, lines=3) == [[], [], []]
