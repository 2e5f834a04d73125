"""Programs in a real run: gangs that grow between stages, and processes that are killed."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.builders.command_line import CommandLine
from tests.builders.waiting import eventually

pytestmark = [pytest.mark.ray, pytest.mark.timeout(420)]

PROGRAM = """
import os, pathlib, sys, time, rubberband

rank, out, lr = int(os.environ["RANK"]), pathlib.Path(sys.argv[1]), float(sys.argv[2])
if os.environ["WORLD_SIZE"] != "1":
    import torch.distributed
    torch.distributed.init_process_group("gloo")
begin = int((out / "n").read_text()) if (out / "n").exists() else 0
pathlib.Path(f"pid-{os.getpid()}").write_text(str(os.getppid()))
for iteration in range(begin + 1, int(sys.argv[3]) + 1):
    time.sleep(0.2)
    if rank == 0:
        (out / "n").write_text(str(iteration))
    rubberband.report({"score": lr * iteration, "size": int(os.environ["WORLD_SIZE"])})
    if rank == 0:
        with open("done", "a") as file:
            file.write(f"{lr} {iteration}\\n")
"""


FUNCTION = """
import os, rubberband, torch

IMPORTED_BY = os.getpid()

@rubberband.distributed
def train(config):
    torch.distributed.init_process_group("gloo")
    print("forked" if os.getpid() != IMPORTED_BY else "imported anew", flush=True)
    for iteration in range(2):
        rubberband.report({"score": config["x"]})
"""


def words(command_line: CommandLine, name: str, stages: str) -> list[str]:
    """Return the words of a run of the program."""
    (command_line.folder / "train.py").write_text(PROGRAM)
    settings = (
        f"name={name}",
        f"entrypoint={{command: '{sys.executable} train.py ${{checkpoint}} ${{x}} ${{max_t}}'}}",
        f"search.scheduler={{type: stages, stages: {stages}}}",
        "resources.gpus_per_trial={min: 1, max: 2}",
        "resources.max_instances=1",
        "profile.seconds_per_iteration={1: 0.4, 2: 0.2}",
    )
    return ["run", "sleepy.yaml", "--no-check", *(word for setting in settings for word in ("-s", setting))]


def repeated(command_line: CommandLine) -> Counter[str]:
    """Return the iterations that programs went through more than once, by trial."""
    lines = (command_line.folder / "done").read_text().splitlines()
    return Counter(line.split()[0] for line, times in Counter(lines).items() if times > 1)


@pytest.mark.long
def test_a_program_trains_on_gangs_that_grow(command_line: CommandLine) -> None:
    command_line(*words(command_line, "grows", "[{trials: 2, iterations: 2}, {trials: 1, iterations: 4}]"))
    result = command_line.result("grows")
    assert [trial.iterations for trial in result.trials] in ([2, 6], [6, 2])
    assert result.best is not None
    assert result.best.metrics["size"] == 2.0
    assert not repeated(command_line)
    assert command_line.nothing_left()
    assert "train.py" in command_line.shows("status", "grows", "-o", "json")


@pytest.mark.long
def test_a_function_in_a_gang_is_forked_from_its_imports(command_line: CommandLine) -> None:
    (command_line.folder / "line.py").write_text(FUNCTION)
    settings = (
        "name=line",
        "entrypoint=line:train",
        "search.scheduler={type: stages, stages: [{trials: 1, iterations: 2}]}",
        "resources.gpus_per_trial={min: 2, max: 2}",
        "resources.max_instances=1",
        "profile.seconds_per_iteration={2: 0.2}",
    )
    command_line("run", "sleepy.yaml", "--no-check", *(word for setting in settings for word in ("-s", setting)))
    log = command_line.shows("logs", "line")
    assert "forked" in log
    assert "imported anew" not in log
    assert command_line.nothing_left()


@pytest.mark.long
@pytest.mark.parametrize("victim", ["worker", "driver"])
def test_a_kill_costs_the_iteration_that_is_under_way(command_line: CommandLine, victim: str) -> None:
    import psutil

    driver = command_line.start(*words(command_line, "sleepy", "[{trials: 2, iterations: 12}]"))
    done = command_line.folder / "done"
    eventually(lambda: done.exists() and len(done.read_text().splitlines()) > 4)
    programs = [int(path.name.removeprefix("pid-")) for path in command_line.folder.glob("pid-*")]
    guard = psutil.Process(int((command_line.folder / f"pid-{programs[0]}").read_text()))
    if victim == "worker":
        worker = guard.ppid()
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: not Path("/proc", str(programs[0])).exists(), "the program ends", within_s=5.0)
        driver.communicate(timeout=240)
        assert driver.returncode == 0
    else:
        driver.kill()
        driver.communicate()
        command_line.end_leases(60.0)
        eventually(lambda: not any(Path("/proc", str(pid)).exists() for pid in programs), "the programs end")
        command_line("resume", "sleepy")
    assert [trial.iterations for trial in command_line.result("sleepy").trials] == [12, 12]
    assert set(repeated(command_line).values()) <= {1}  # it was on its way to the journal
    assert command_line.nothing_left()
