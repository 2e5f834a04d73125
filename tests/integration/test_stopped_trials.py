"""Trials that the user stops in a real run: by the command line, while a driver runs and while none does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.builders.command_line import CommandLine
from tests.builders.waiting import eventually

pytestmark = [pytest.mark.ray, pytest.mark.timeout(420)]

PROGRAM = """
import os, pathlib, signal, sys, time, rubberband

import torch.distributed

rank, out, lr = int(os.environ["RANK"]), pathlib.Path(sys.argv[1]), float(sys.argv[2])
torch.distributed.init_process_group("gloo")

def end(*_):
    pathlib.Path("ended-by-sigterm").write_text(str(os.getpid()))
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
begin = int((out / "n").read_text()) if (out / "n").exists() else 0
for iteration in range(begin + 1, int(sys.argv[3]) + 1):
    time.sleep(0.2)
    if rank == 0:
        (out / "n").write_text(str(iteration))
    rubberband.report({"score": lr * iteration})
"""


def of(*settings: str) -> list[str]:
    return ["run", "sleepy.yaml", "--no-check", *(word for setting in settings for word in ("-s", setting))]


@pytest.mark.long
def test_a_stopped_trial_leaves_its_gpu_to_others_and_is_the_best_if_it_was(command_line: CommandLine) -> None:
    stages = "search.scheduler={type: stages, stages: [{trials: 4, iterations: 12}, {trials: 2, iterations: 3}]}"
    driver = command_line.start(*of(stages, "resources.max_instances=1"))
    begun = command_line.wait_for(driver, lambda result: sum(trial.iterations > 1 for trial in result.trials) == 2)
    going = next(trial.trial for trial in begun.trials if trial.iterations)
    waiting = next(trial.trial for trial in begun.trials if trial.status == "queued")
    command_line("stop", "sleepy", str(going), str(waiting))
    command_line.wait_for(driver, lambda result: all(result.trials[n].is_over for n in (going, waiting)))
    assert f"trial {going} is over (stopped (by the user at" in command_line.refuses("stop", "sleepy", str(going))
    assert "it has no trial 9; it has 0 to 3" in command_line.refuses("stop", "sleepy", "9")
    _, errors = driver.communicate(timeout=240)
    assert driver.returncode == 0, errors
    assert f"trial {going} stopped by the user after" in errors
    result = command_line.result()
    stopped = result.trials[going]
    assert (stopped.status, result.trials[waiting].iterations) == ("stopped", 0)
    assert 0 < stopped.iterations < 12
    assert stopped.checkpoint is not None
    assert Path(stopped.checkpoint.url.removeprefix("file://")).exists()
    assert sorted(trial.iterations for trial in result.trials)[2:] == [15, 15]
    assert "is over" in command_line.refuses("stop", "sleepy", str(going))
    assert command_line.nothing_left()


@pytest.mark.long
def test_a_gang_of_a_program_gets_sigterm_and_a_driver_that_is_killed_before_stops_it_after_a_resume(
    command_line: CommandLine,
) -> None:
    import psutil

    (command_line.folder / "train.py").write_text(PROGRAM)
    program = f"entrypoint={{command: '{sys.executable} train.py ${{checkpoint}} ${{x}} ${{max_t}}'}}"
    stages = "search.scheduler={type: stages, stages: [{trials: 3, iterations: 30}]}"
    gangs = ("resources.gpus_per_trial={min: 2, max: 2}", "profile.seconds_per_iteration={2: 0.3}")
    driver = command_line.start(*of(program, stages, *gangs))
    begun = command_line.wait_for(driver, lambda result: sum(trial.iterations > 1 for trial in result.trials) == 2)
    first, second = (trial.trial for trial in begun.trials if trial.iterations)
    command_line("stop", "sleepy", str(first))
    eventually(lambda: (command_line.folder / "ended-by-sigterm").exists(), "the program gets SIGTERM")
    command_line.wait_for(driver, lambda result: result.trials[first].status == "stopped")

    psutil.Process(driver.pid).suspend()  # it takes in no request any more
    command_line("stop", "sleepy", str(second))
    driver.kill()
    driver.communicate()
    assert command_line.result().trials[second].status != "stopped"
    command_line.end_leases(60.0)
    command_line("resume", "sleepy")
    result = command_line.result()
    statuses = [result.trials[trial].status for trial in (first, second)]
    assert (result.outcome, statuses) == ("done", ["stopped", "stopped"])
    left = next(trial for trial in result.trials if trial.trial not in (first, second))
    assert (left.status, left.iterations) == ("completed", 30)
    assert command_line.nothing_left()
