"""Signals that ask a driver, a service and a broker to end: what each leaves, whenever it comes.

`pytest -m long -n 0 -s tests/integration/test_ends.py` prints a table: process, when, signals, exit code, seconds until
the process has ended, what is left of it 15 s later.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rubberband.executor import ExperimentFolder
from rubberband.spec.pool import PoolFolder
from tests.builders.command_line import EXPERIMENT, PATIENCE_S, CommandLine
from tests.builders.server_process import serving
from tests.builders.waiting import eventually

pytestmark = [pytest.mark.ray, pytest.mark.timeout(420)]

ENDS = ("SIGINT", "SIGTERM", "SIGHUP")
TWICE = [(name, times) for name in ENDS for times in (1, 2)]
BETWEEN_S = 0.3
"""As a user who presses Ctrl-C twice: the second signal comes while the first is obeyed."""


def _send(process: subprocess.Popen[str], name: str, times: int) -> tuple[int, float]:
    """Send a signal `times` times; return the exit code, and the seconds until the end."""
    began = time.monotonic()
    for turn in range(times):
        if turn:
            time.sleep(BETWEEN_S)
        process.send_signal(signal.Signals[name])
    process.communicate(timeout=PATIENCE_S)
    return process.returncode, time.monotonic() - began


def _row(who: str, phase: str, name: str, times: int, code: int, seconds: float, left: str) -> None:
    print(f"{who:8} {phase:10} {name:8} x{times} {code:5} {seconds:6.1f} s  {left or 'nothing'}")
    assert left == ""


def _held(driver: subprocess.Popen[str], line: str) -> None:
    """Read the driver's lines until one has `line` in it."""
    assert driver.stderr is not None
    while line not in (read := driver.stderr.readline()):
        assert read, f"the driver never said {line!r}"


def _imports(pid: int) -> None:
    """Wait until a process amid its imports has a library of them, and is not through."""
    eventually(lambda: any("pydantic_core" in file.path for file in psutil.Process(pid).memory_maps()), "its imports")


def _left(command_line: CommandLine) -> str:
    """Return the processes and locks that a driver left."""
    gone = command_line.nothing_left()
    folder = ExperimentFolder(home=command_line.home, name="sleepy")
    found = [] if gone else [f"{len(command_line.processes())} processes"]
    if folder.exists and (result := command_line.result()).outcome in (
        "done",
        "cancelled",
    ):  # else a resume counts them
        living = [one for one in result.instances if one.ended_s is None]
        found += [f"{len(living)} instances"] if living else []
    return ", ".join(found + (["its lock"] if folder.exists and folder.driven else []))


PHASES: dict[str, Callable[[CommandLine, subprocess.Popen[str]], object]] = {
    "imports": lambda _, driver: _imports(driver.pid),
    "planned": lambda _, driver: _held(driver, "plan: "),
    "starting": lambda run, driver: run.wait_for(driver, lambda found: bool(found.instances)),
    "training": lambda run, driver: run.wait_for(driver, lambda found: found.trials[0].iterations >= 1),
    "at a SYNC": lambda _, driver: _held(driver, " SYNC "),
    "releasing": lambda run, driver: run.wait_for(driver, lambda found: found.outcome == "done"),
}


def _driver(folder: Path, phase: str, name: str, times: int) -> tuple[CommandLine, int]:
    command_line = CommandLine(folder)
    driver = command_line.start("run", "sleepy.yaml", "--no-check")
    PHASES[phase](command_line, driver)
    code, seconds = _send(driver, name, times)
    _row("driver", phase, name, times, code, seconds, _left(command_line))
    return command_line, code


@pytest.mark.long
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("name", "times"), TWICE)
def test_a_driver_leaves_nothing(tmp_path: Path, phase: str, name: str, times: int) -> None:
    _, code = _driver(tmp_path, phase, name, times)
    # Until the command line has begun, and as Python exits, a signal does what it does by default.
    by_default = {-signal.Signals[name], -signal.SIGINT} if phase in ("imports", "releasing") else set()
    assert code in {130, *by_default, *([0] if phase == "releasing" else [])}


SLOW = """
import time
import rubberband

class Slow(rubberband.Callback):
    def on_end(self, result):
        time.sleep(4)

if __name__ == "__main__":
    result = rubberband.tune(experiment=rubberband.load_experiment("sleepy.yaml"), callbacks=[Slow()], check=False)
    print(result.outcome, flush=True)
"""
"""Ends more slowly than Ray lets a process live after a SIGTERM that it takes for a crash: 3 s."""


def _script(tmp_path: Path, name: str, times: int) -> tuple[int, str]:
    command_line = CommandLine(tmp_path)
    (tmp_path / "slow.py").write_text(SLOW)
    script = subprocess.Popen(
        [sys.executable, "slow.py"],
        cwd=tmp_path,
        env=command_line.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    PHASES["training"](command_line, script)
    code, seconds = _send(script, name, times)
    _row("tune()", "training", name, times, code, seconds, _left(command_line))
    return code, command_line.result().outcome


@pytest.mark.long
def test_sigterm_ends_a_script_as_ctrl_c_does(tmp_path: Path) -> None:
    assert _script(tmp_path, "SIGTERM", 2) == (0, "cancelled")


@pytest.mark.long
@pytest.mark.parametrize(("name", "times"), [("SIGINT", 1), ("SIGINT", 2), ("SIGTERM", 1), ("SIGHUP", 1)])
def test_a_script_leaves_nothing(tmp_path: Path, name: str, times: int) -> None:
    code, outcome = _script(tmp_path, name, times)
    assert code == (0 if times == 1 else -signal.SIGINT)
    assert outcome in ("cancelled", "unfinished")


@pytest.mark.long
@pytest.mark.parametrize(("name", "times"), [("SIGTERM", 1), ("SIGHUP", 1), ("SIGINT", 2)])
def test_a_resumed_driver_leaves_nothing_either(tmp_path: Path, name: str, times: int) -> None:
    """It connects on its main thread, where Ray has a second handler."""
    command_line = CommandLine(tmp_path)
    driver = command_line.start("run", "sleepy.yaml", "--no-check")
    PHASES["training"](command_line, driver)
    driver.kill()
    driver.communicate()
    done = sum(trial.iterations for trial in command_line.result().trials)
    driver = command_line.start("resume", "sleepy")
    command_line.wait_for(driver, lambda found: sum(trial.iterations for trial in found.trials) > done)
    code, seconds = _send(driver, name, times)
    _row("resumed", "training", name, times, code, seconds, _left(command_line))
    assert code == 130


@pytest.mark.long
def test_a_sighup_that_was_ignored_stays_ignored(tmp_path: Path) -> None:
    command_line = CommandLine(tmp_path)
    driver = subprocess.Popen(
        ["nohup", sys.executable, "-m", "rubberband.cli", "run", "sleepy.yaml", "--no-check"],
        cwd=command_line.folder,
        env=command_line.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    PHASES["training"](command_line, driver)
    code, seconds = _send(driver, "SIGHUP", 2)
    _row("nohup", "training", "SIGHUP", 2, code, seconds, _left(command_line))
    assert (code, command_line.result().outcome) == (0, "done")


@pytest.mark.long
@pytest.mark.parametrize("phase", ["starting", "serving"])
@pytest.mark.parametrize(("name", "times"), TWICE)
def test_a_service_leaves_nothing(tmp_path: Path, phase: str, name: str, times: int) -> None:
    if phase == "serving":
        with serving(tmp_path / "home") as server:
            code, seconds = _send(server.process, name, times)  # type: ignore[arg-type]
    else:
        environment = {**CommandLine(tmp_path).environment, "RUBBERBAND_HOME": str(tmp_path / "home")}
        program = [sys.executable, "-m", "rubberband.cli", "serve", "--port", "0"]
        process = subprocess.Popen(program, env=environment, stderr=subprocess.PIPE, text=True)
        _imports(process.pid)
        code, seconds = _send(process, name, times)
    with serving(tmp_path / "home") as again:  # which another server's lock would refuse
        left = "" if again.process.poll() is None else "its lock"
    _row("service", phase, name, times, code, seconds, left)
    # It ends in less than the time between two signals: as Python exits, the second does what it does by default.
    by_default = {-signal.Signals[name]} if times > 1 else set()
    assert code in {0, *by_default, *([130, -signal.SIGINT] if phase == "starting" else [])}


@pytest.mark.long
@pytest.mark.parametrize("phase", ["idle", "lending"])
@pytest.mark.parametrize(("name", "times"), TWICE)
def test_a_broker_leaves_nothing(tmp_path: Path, phase: str, name: str, times: int) -> None:
    command_line = CommandLine(tmp_path)
    (tmp_path / "team.yaml").write_text("{instances: 2, gpus_per_instance: 2, price_per_hour: 36}")
    command_line("pool", "up", "team.yaml")
    folder = PoolFolder(path=command_line.home / "pools" / "team")
    driver = None
    if phase == "lending":
        own = ("gpus_per_instance", "price_per_hour", "max_instances", "minimum_billed")
        lines = [line for line in EXPERIMENT.splitlines() if not line.strip().startswith(own)]
        (tmp_path / "sleepy.yaml").write_text("\n".join(lines))
        driver = command_line.start("run", "sleepy.yaml", "--no-check", "-s", "resources.pool=team")
        PHASES["training"](command_line, driver)
    broker, began = _broker(folder), time.monotonic()
    for turn in range(times):
        time.sleep(BETWEEN_S * turn)
        with suppress(psutil.NoSuchProcess):
            broker.send_signal(signal.Signals[name])
    psutil.wait_procs([broker], timeout=PATIENCE_S)
    seconds = time.monotonic() - began
    if driver is not None:
        driver.kill()
        driver.communicate()
    left = "" if command_line.nothing_left() and not folder.is_up else f"{len(command_line.processes())} processes"
    _row("broker", phase, name, times, 0, seconds, left)


def _broker(folder: PoolFolder) -> psutil.Process:
    for process in psutil.process_iter():
        try:
            if process.cmdline()[-2:] == ["rubberband.pools.process", str(folder.path)]:
                return process
        except psutil.Error:
            continue
    raise AssertionError("the pool has no broker")
