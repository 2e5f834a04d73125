"""Programs in a real run: gangs that grow between stages, processes that are killed, and trials that are stopped."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from tests.builders.command_line import CommandLine
from tests.builders.processes.segment_worker import gang_of
from tests.builders.sharded_program import FSDP
from tests.builders.waiting import eventually
from tests.integration.test_program_gangs import Trial, losses

pytestmark = [pytest.mark.long, pytest.mark.ray, pytest.mark.timeout(420)]

PROGRAM = """
import os, pathlib, signal, sys, time, rubberband

def end(*_):
    pathlib.Path("ended-by-sigterm").write_text(str(os.getpid()))
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
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


def of(*settings: str) -> list[str]:
    return ["run", "sleepy.yaml", "--no-check", *(word for setting in settings for word in ("-s", setting))]


def words(command_line: CommandLine, name: str, stages: str, *more: str) -> list[str]:
    """Return the words of a run of the program."""
    (command_line.folder / "train.py").write_text(PROGRAM)
    return of(
        f"name={name}",
        f"entrypoint={{command: '{sys.executable} train.py ${{checkpoint}} ${{x}} ${{max_t}}'}}",
        f"search.scheduler={{type: stages, stages: {stages}}}",
        "resources.gpus_per_trial={min: 1, max: 2}",
        "resources.max_instances=1",
        "profile.seconds_per_iteration={1: 0.4, 2: 0.2}",
        *more,
    )


def repeated(command_line: CommandLine) -> Counter[str]:
    """Return the iterations that programs went through more than once, by trial."""
    lines = (command_line.folder / "done").read_text().splitlines()
    return Counter(line.split()[0] for line, times in Counter(lines).items() if times > 1)


def test_a_program_trains_on_gangs_that_grow(command_line: CommandLine) -> None:
    command_line(*words(command_line, "grows", "[{trials: 2, iterations: 2}, {trials: 1, iterations: 4}]"))
    result = command_line.result("grows")
    assert [trial.iterations for trial in result.trials] in ([2, 6], [6, 2])
    assert result.best is not None
    assert result.best.metrics["size"] == 2.0
    assert not repeated(command_line)
    assert command_line.nothing_left()
    assert "train.py" in command_line.shows("status", "grows", "-o", "json")


def test_a_sharded_program_is_checked_and_trains_on_gangs_of_two_machines_though_one_of_its_ranks_is_killed(
    command_line: CommandLine, tmp_path: Path
) -> None:
    source = textwrap.dedent(FSDP).replace("rubberband.report(", "killed(rank, epoch, size), rubberband.report(")
    killed = """
        import os, pathlib, signal
        def killed(rank, epoch, size):
            with open("seen", "a") as file:
                file.write(f"{size}\\n")
            if (rank, epoch, size) == (1, 3, 4) and not os.path.exists("was-killed"):
                pathlib.Path("was-killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
    """
    (command_line.folder / "train.py").write_text(textwrap.dedent(killed) + source)
    run = of(
        "name=sharded",
        f"entrypoint={{command: '{sys.executable} train.py ${{checkpoint}} ${{x}}'}}",
        "search.space={x: {type: uniform, lower: 0.01, upper: 0.03}}",
        "search.scheduler={type: stages, stages: [{trials: 2, iterations: 2}, {trials: 1, iterations: 6}]}",
        "search.metric=loss",
        "search.mode=min",
        "constraints.objective=min_time",
        "resources.gpus_per_instance=2",
        "resources.max_instances=2",
        "resources.gpus_per_trial={min: 2, max: 4}",
        "profile.seconds_per_iteration={2: 4, 4: 1}",
    )
    run.remove("--no-check")
    command_line(*run)
    best = command_line.result("sharded").best
    assert best is not None
    assert best.iterations == 8
    assert {"1", "2", "4"} <= set((command_line.folder / "seen").read_text().split()), "the check has one worker"
    assert (command_line.folder / "was-killed").exists()
    alone = Trial(tmp_path)
    with gang_of(1) as workers:
        words = f"python train.py ${{checkpoint}} {best.config['x']}"
        by_hand = losses(alone.run(workers, FSDP, words, until_iterations=8)[0])
    assert [metrics["loss"] for *_, metrics in best.curve] == pytest.approx(by_hand, abs=1e-6)
    assert command_line.nothing_left()
    command_line("best", "sharded", "--out", "best")
    assert sorted(path.name for path in (command_line.folder / "best" / "state").iterdir())[:3] == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
    ]


def test_a_function_in_a_gang_is_forked_from_its_imports(command_line: CommandLine) -> None:
    (command_line.folder / "line.py").write_text(FUNCTION)
    run = of(
        "name=line",
        "entrypoint=line:train",
        "search.scheduler={type: stages, stages: [{trials: 1, iterations: 2}]}",
        "resources.gpus_per_trial={min: 2, max: 2}",
        "resources.max_instances=1",
        "profile.seconds_per_iteration={2: 0.2}",
    )
    command_line(*run)
    log = command_line.shows("logs", "line")
    assert "forked" in log
    assert "imported anew" not in log
    assert command_line.nothing_left()


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


def test_trials_are_added_to_a_run_on_ray_and_after_its_end_also_by_a_killed_driver(command_line: CommandLine) -> None:
    stages = "search.scheduler={type: stages, stages: [{trials: 2, iterations: 12}, {trials: 1, iterations: 3}]}"
    driver = command_line.start(*of(stages, "resources.max_instances=1"))
    begun = command_line.wait_for(driver, lambda result: sum(trial.iterations > 1 for trial in result.trials) == 2)
    configuration = {**begun.trials[0].configuration}
    name, value = next((name, value) for name, value in configuration.items() if isinstance(value, float))
    command_line("add", "sleepy", f"{name}={value}", "--yes")
    command_line.wait_for(driver, lambda result: len(result.trials) == 3)
    driver.kill()
    driver.communicate()
    command_line.end_leases(60.0)
    command_line("resume", "sleepy")
    result = command_line.result()
    assert (result.outcome, result.trials[2].configuration[name]) == ("done", value)
    assert result.trials[2].iterations in (12, 15)
    command_line("clone", "sleepy", "0", "--yes")
    command_line("extend", "sleepy", "--num-samples", "+1", "--yes")
    command_line("resume", "sleepy")
    result = command_line.result()
    assert [trial.iterations for trial in result.trials[3:]] == [15, 15]
    assert result.trials[3].configuration == result.trials[0].configuration
    assert command_line.nothing_left()


def test_a_gang_of_a_program_gets_sigterm_and_a_driver_that_is_killed_before_stops_it_after_a_resume(
    command_line: CommandLine,
) -> None:
    import psutil

    gangs = ("resources.gpus_per_trial={min: 2, max: 2}", "resources.max_instances=2")
    stages = "[{trials: 3, iterations: 30}]"
    driver = command_line.start(
        *words(command_line, "sleepy", stages, *gangs, "profile.seconds_per_iteration={2: 0.3}")
    )
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
