"""The check of a trial in a run comes from the fork server of its workers, which no trial can harm."""

from __future__ import annotations

import os
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rubberband.cloud.ray_head.worker_start import is_ready
from rubberband.executor import Entrypoint, ForkServer
from rubberband.executor.training.check_findings import CheckOrder, TrialCheck
from rubberband.executor.training.checking import check
from rubberband.values.environment import Environment
from tests.builders.segments import SEGMENT
from tests.builders.waiting import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="checks are forked on Linux only")

HEAD = """
    import ctypes, os, signal, sys, threading, time
    from pathlib import Path
    import rubberband

    HERE = Path(__file__).parent
    with open(HERE / "imports", "a") as file:
        file.write(os.environ["PYTHONHASHSEED"])

    class Trial(rubberband.Trial):
        def setup(self, config, context):
            self.done = 0

        def iterate(self):
            self.harm()
            self.done += 1
            return {"loss": 1.0 / self.done, "here": float(os.environ.get("HARMED") is None)}

        def save(self):
            return self.done

        def load(self, state):
            self.done = state

        def harm(self):
            if (HERE / "harm").exists():
                exec((HERE / "harm").read_text())
"""
ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0
DIGITS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}


class Checked:
    """A trial in a folder, with a fork server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server: ForkServer | None = None
        self.entrypoint = Entrypoint.parse("checked_code:Trial", search_path=[folder])

    def serve(self, source: str = "", **variables: str) -> None:
        """Write the trial's module, and start the server."""
        (self.folder / "checked_code.py").write_text(textwrap.dedent(HEAD) + textwrap.dedent(source))
        self.entrypoint = replace(self.entrypoint, environment=Environment(variables=variables))
        self.server = ForkServer("test", self.folder, self.entrypoint)

    def check(
        self, harm: str = "", limit_s: float = LIMIT_S, cancelled: Callable[[], bool] = lambda: False
    ) -> TrialCheck:
        """Check it, by a trial that does that in its iterations."""
        (self.folder / "harm").unlink(missing_ok=True)
        if harm:
            (self.folder / "harm").write_text(harm)
        segment = replace(SEGMENT, metric="loss", until_iterations=1, max_iterations=4)
        order = CheckOrder(entrypoint=self.entrypoint, segment=segment, max_gpus=1)
        with open(self.folder / "output", "wb") as output:
            return check(order, limit_s=limit_s, output=output, cancelled=cancelled, fork_server=self.folder)

    @property
    def seeds(self) -> str:
        """PYTHONHASHSEED of each process that has imported the module."""
        return (self.folder / "imports").read_text()


@pytest.fixture
def checked(tmp_path: Path) -> Iterator[Checked]:
    found = Checked(tmp_path)
    yield found
    if found.server is not None:
        found.server.close()


def test_a_long_folder_for_temporary_files_does_not_stop_a_check(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = checked.folder / ("long" * 40)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    segment = replace(SEGMENT, metric="accuracy", config=DIGITS, until_iterations=1, max_iterations=4)
    order = CheckOrder(entrypoint=Entrypoint.parse("examples.digits:DigitsTrial", [ROOT]), segment=segment, max_gpus=1)
    with open(checked.folder / "output", "wb") as output:
        found = check(order, limit_s=LIMIT_S, output=output)
    assert found.is_finished
    assert not found.problems
    assert not found.remarks
    assert "restart" in found.seconds, "a second process has trained"


@pytest.mark.parametrize(
    ("harm", "line"),
    [
        pytest.param("os._exit(3)", "iteration: the trial ended its process with exit code 3", id="ends itself"),
        pytest.param("ctypes.string_at(0)", "iteration: the trial's process was ended by SIGSEGV", id="crashes"),
        pytest.param(
            "os.kill(0, signal.SIGKILL)", "iteration: the trial's process was ended by SIGKILL", id="is killed"
        ),
        pytest.param(
            "print('printed'); os.environ['HARMED'] = '1'; os.chdir('/'); sys.path[:] = []",
            "",
            id="changes its process",
        ),
        pytest.param("self.held = bytearray(1 << 29); self.held[::4096] = b'1' * (1 << 17)", "", id="takes memory"),
        pytest.param(
            "[threading.Thread(target=time.sleep, args=(600,)).start() for _ in range(8)]", "", id="leaves threads"
        ),
    ],
)
def test_a_harmful_trial_harms_no_later_check(checked: Checked, harm: str, line: str) -> None:
    checked.serve()
    folder, variables = os.getcwd(), dict(os.environ)
    found = checked.check(harm)
    assert [problem.line for problem in found.problems if line not in problem.line] == []
    assert bool(found.problems) == bool(line)
    assert ("printed" in (checked.folder / "output").read_text()) == ("printed" in harm)
    found = checked.check()
    assert not found.problems
    assert found.metrics == {"loss": 1.0, "here": 1.0}
    assert (os.getcwd(), dict(os.environ)) == (folder, variables)
    assert checked.seeds == "0", "all of it is of the server's import"


def test_a_hanging_trial_ends_at_the_limit_and_harms_no_later_check(checked: Checked) -> None:
    checked.serve()
    assert is_ready(checked.folder, lambda: True)
    found = checked.check("time.sleep(600)", limit_s=1.0)
    assert (found.step, found.is_finished) == ("iteration", False)
    assert not checked.check().problems
    assert checked.seeds == "0"


def test_a_check_waits_for_the_imports_until_its_limit_or_until_it_is_cancelled(checked: Checked) -> None:
    checked.serve("time.sleep(600)\n")
    began = time.monotonic()
    assert checked.check(limit_s=0.5) == TrialCheck()
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    assert checked.check(cancelled=stop.is_set) == TrialCheck()
    assert time.monotonic() - began < LIMIT_S / 2.0


@pytest.mark.parametrize(
    ("source", "seeds", "problem"),
    [
        pytest.param("NAMES = sorted(set('abc'))\n", "01", "", id="has a set"),
        pytest.param(
            "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n", "01", "", id="starts a thread"
        ),
        pytest.param("raise ValueError('broken')\n", "01", "ValueError: broken", id="cannot be imported"),
        pytest.param("WANDB = os.environ.get('WANDB_MODE')\n", "00", "", id="would find another variable"),
        pytest.param("DATA = os.environ['DATA']\n", "0", "", id="reads its own variables"),
    ],
)
def test_a_trial_that_no_server_can_fork_is_checked_in_a_process_of_its_own(
    checked: Checked, source: str, seeds: str, problem: str
) -> None:
    checked.serve(source, DATA="/data")
    found = checked.check()
    assert [problem in each.line for each in found.problems] == [True] * bool(problem)
    eventually(lambda: sorted(checked.seeds) == sorted(seeds), f"imports with the seeds {seeds}")
