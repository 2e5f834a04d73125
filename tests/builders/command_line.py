"""The command line as a user runs it: a process of its own, with a home and a folder of experiment files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import click.testing
import pytest
from typer.testing import CliRunner

from rubberband import cli
from rubberband.errors import RubberbandError
from rubberband.executor import ExperimentFolder, Result
from rubberband.executor import read_journal as read
from tests.builders.waiting import eventually

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0
LESS_THAN_A_LEASE_S = 15.0
"""What is gone by then was ended; it did not just outlive its lease, which is of 30 s where nothing else is said."""

TRIALS = '''
import os, threading, time
from pathlib import Path
import rubberband

class Sleepy(rubberband.Trial):
    """Sleeps 0.4 s an iteration on one worker; trial i does what its `behaviour` says."""

    def setup(self, config, context):
        self.config, self.workers = config, context.num_workers
        self.iterations, self.trial = context.iterations, context.trial

    def iterate(self):
        while Path(__file__).with_name(f"held-after-{self.iterations}").exists():
            time.sleep(0.05)
        time.sleep(0.4 / self.workers)  # a profile times it: twice the workers take half as long
        self.iterations += 1
        print(f"iteration {self.iterations}", flush=True)
        score = self.config["x"] * self.iterations
        match self.config.get("behaviour", "good"):
            case "raise":
                raise ValueError("the data is bad")
            case "nan":
                score = float("nan")
            case "hang":
                threading.Event().wait()
            case "exit":
                os._exit(7)
        return {"score": score}

    def save(self):
        return self.iterations

    def load(self, state):
        assert state == self.iterations

def forgetful(config):
    """Passes no checkpoint."""
    for iteration in range(1, 1000):
        time.sleep(0.2)
        print(f"iteration {iteration}", flush=True)
        rubberband.report({"score": config["x"] * iteration})

def patient(config):
    """Converges after five iterations, and returns."""
    for iteration in range(rubberband.get_checkpoint() or 0, 5):
        rubberband.report({"score": config["x"]}, checkpoint=iteration + 1)
'''

EXPERIMENT = """
version: 1
name: sleepy
entrypoint: sleepy:Sleepy
search:
  space: {x: {type: uniform, lower: 0, upper: 1}}
  scheduler: {type: stages, stages: [{trials: 4, iterations: 4}, {trials: 2, iterations: 10}]}
  sampler: {type: random, seed: 3}
  metric: score
  mode: max
constraints: {deadline: 10m}
resources:
  provider: local
  gpus_per_instance: 2
  gpus_per_trial: {min: 1, max: 1}
  price_per_hour: 36
  max_instances: 2
  minimum_billed: 0s
  provision_delay: 1s
  init_delay: 1s
profile: {seconds_per_iteration: {1: 0.4}, trial_startup: 0.1s}
"""


class CommandLine:
    """Runs `rubberband` below one folder, and looks into what it keeps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        (folder / "sleepy.py").write_text(TRIALS)
        (folder / "sleepy.yaml").write_text(EXPERIMENT)
        search = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.environment = {**os.environ, "RUBBERBAND_HOME": str(self.home), "PYTHONPATH": search}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "rubberband.cli", *arguments],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def hold(self, *, after: int) -> None:
        """Let no trial train more than so many iterations, however late this process looks: until `go`."""
        (self.folder / f"held-after-{after}").touch()

    def go(self) -> None:
        for file in self.folder.glob("held-after-*"):
            file.unlink()

    def __call__(self, *arguments: str, exit_code: int = 0) -> tuple[str, str]:
        """Run a command to its end; its stdout and stderr."""
        with self.start(*arguments) as process:
            output, errors = process.communicate(timeout=2 * PATIENCE_S)
        assert process.returncode == exit_code, f"exit {process.returncode}\n{output}\n{errors}"
        return output, errors

    def shows(self, *arguments: str, exit_code: int = 0) -> str:
        """Run a command that only reads, in this process, which spares an interpreter's start; what it prints."""
        done = self._invoke(*arguments)
        assert done.exit_code == exit_code, done.output
        return done.stdout

    def _invoke(self, *arguments: str) -> click.testing.Result:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RUBBERBAND_HOME", str(self.home))
            patch.chdir(self.folder)
            return CliRunner().invoke(cli.app, arguments)

    def refused(self, *arguments: str, exit_code: int = 2) -> str:
        """Run a command that must be refused in one line; that line."""
        output, errors = self(*arguments, exit_code=exit_code)
        lines = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, errors
        assert "Traceback" not in errors
        assert output == ""
        return lines[0]

    def refuses(self, *arguments: str, exit_code: int = 2) -> str:
        """Run a command that must be refused, in this process; the error without what surrounds it."""
        done = self._invoke(*arguments)
        assert isinstance(done.exception, RubberbandError), done.output
        assert done.exception.exit_code == exit_code, done.output
        assert done.stdout == ""
        return str(done.exception)

    def result(self, name: str = "sleepy") -> Result:
        return read(ExperimentFolder(home=self.home, name=name))

    def wait_for(
        self, driver: subprocess.Popen[str], condition: Callable[[Result], bool], name: str = "sleepy"
    ) -> Result:
        """Poll the journal until it shows what is waited for, while the driver runs."""

        def look() -> Result | None:
            assert driver.poll() is None, driver.communicate()
            with suppress(RubberbandError):
                return result if condition(result := self.result(name)) else None
            return None

        return eventually(look, "what the journal was to show")

    def processes(self) -> list[int]:
        """Processes that carry a tag of this home."""
        import psutil

        found = []
        for process in psutil.process_iter():
            try:
                tags = [value for key, value in process.environ().items() if key.startswith("RUBBERBAND_")]
            except (psutil.Error, OSError):
                continue
            mine = any(value.startswith(str(self.home.resolve() / "")) for value in tags)
            if mine and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        return found

    def end_leases(self, lease_s: float) -> None:
        """Let the leases end that a killed driver gave, which are of at most `lease_s`: now, not in real time."""
        lease = ExperimentFolder(home=self.home, name="sleepy").instances / "lease"
        assert lease.stat().st_mtime <= time.time() + lease_s + 1.0
        os.utime(lease, (0.0, 0.0))

    def nothing_left(self, within_s: float = LESS_THAN_A_LEASE_S) -> bool:
        """Whether no such process is left, now or soon."""
        with suppress(AssertionError):
            eventually(lambda: not self.processes(), within_s=within_s)
        return not self.processes()


def interrupt(process: subprocess.Popen[str]) -> None:
    """What Ctrl-C on a terminal does: a signal to the driver and all else in its process group."""
    os.killpg(process.pid, signal.SIGINT)
