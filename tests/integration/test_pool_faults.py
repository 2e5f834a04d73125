"""A pool of this machine's real instances: experiments after and beside each other, and `kill -9` of what they need."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rubberband.cloud.local.instance import DIRECTORY_TAG
from rubberband.cloud.pool import FileJournal
from rubberband.cloud.pool.broker import Broker
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.journal.reading import read
from rubberband.executor.result import Result
from rubberband.spec.pool import PoolFolder
from tests.integration.command_line import TRIALS

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(900)]

PATIENCE_S = 400.0
PRICE_USD = 36.0
"""Per hour and instance: a cent a second."""

EXPERIMENT = """
version: 1
name: {name}
entrypoint: trials:Sleepy
search:
  space: {{x: {{type: uniform, lower: 0, upper: 1}}}}
  scheduler: {{type: sha, num_samples: 6, grace_period: 4, max_t: 12, reduction_factor: 3}}
  metric: score
  mode: max
constraints: {{deadline: 15m}}
profile: {{seconds_per_iteration: {{1: 0.4}}, trial_startup: 0.1}}
resources:
  pool: team
  gpus_per_instance: {gpus}
  gpus_per_trial: {{min: 1, max: 1}}
  lease: 20s
"""


class Team:
    """A pool, and experiments that a user runs on it, each from a shell of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment = {**os.environ, "RUBBERBAND_HOME": str(self.home), "PYTHONPATH": os.pathsep.join(paths)}
        self.pool = PoolFolder(path=self.home / "pools" / "team")
        (folder / "trials.py").write_text(TRIALS)
        words = f"{{instances: 2, gpus_per_instance: 2, price_per_hour: {PRICE_USD}, idle: 5m}}"
        (folder / "team.yaml").write_text(words)
        self.command("pool", "up", "team.yaml")

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start a command."""
        return subprocess.Popen(
            [sys.executable, "-m", "rubberband.cli", *words],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def command(self, *words: str) -> None:
        """Run a command that succeeds."""
        process = self.start(*words)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, f"{words}: {errors}"

    def run(self, name: str, gpus: int = 2) -> subprocess.Popen[str]:
        """Start an experiment."""
        (self.folder / f"{name}.yaml").write_text(EXPERIMENT.format(name=name, gpus=gpus))
        return self.start("run", f"{name}.yaml", "--no-check")

    def result(self, name: str) -> Result:
        """Return what is known of an experiment."""
        return read(ExperimentFolder(home=self.home, name=name))

    def until_training(self, *names: str) -> None:
        """Wait until all of them have passed an iteration."""
        for name in names:
            self._until(lambda name=name: self._iterations(name) > 0, f"{name} trains")

    def _iterations(self, name: str) -> int:
        folder = ExperimentFolder(home=self.home, name=name)
        return sum(trial.iterations for trial in read(folder).trials) if folder.exists else 0

    def _until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, f"it did not happen that {what}"
            time.sleep(0.2)

    def broker(self) -> psutil.Process | None:
        """Return the process of the broker."""
        for process in psutil.process_iter():
            try:
                if process.cmdline()[-2:] == ["rubberband.app.pool", str(self.pool.path)]:
                    return process
            except psutil.Error:
                continue
        return None

    def machine(self, rng: random.Random) -> psutil.Process | None:
        """Return the process that is one of the machines."""
        records = [json.loads(path.read_text()) for path in (self.pool.machines / "instances").glob("*.json")]
        living = [record["pid"] for record in records if record["ended_at"] is None and record["pid"] is not None]
        return psutil.Process(rng.choice(living)) if living else None

    def check(self, *names: str) -> dict[str, float]:
        """End the pool, and check what it lent against what was held, billed and left; return its bill."""
        self.command("pool", "down", "team", "--yes")
        assert not _tagged(self.home), "processes of the pool are left"
        broker = Broker()
        for event in FileJournal(self.pool.path).events():
            broker.handle(event)
            broker.validate(event.at)
        state, now = broker.state, time.time() + 1e6
        assert not state.live
        ran_s = [
            record["ended_at"] - record["running_at"]
            for path in (self.pool.machines / "instances").glob("*.json")
            if (record := json.loads(path.read_text()))["running_at"] is not None
        ]
        provider_usd = math.fsum(PRICE_USD / 3600.0 * max(60.0, seconds) for seconds in ran_s)
        results = [self.result(name) for name in names]
        for result in results:
            assert result.outcome == "done", result.reason
        own_usd = math.fsum(result.actual_cost_usd for result in results)
        print(f"experiments {own_usd:.4f} USD + idle {state.idle_usd(now):.4f} USD; provider {provider_usd:.4f} USD")
        assert own_usd + state.idle_usd(now) == pytest.approx(provider_usd, abs=0.005)
        return state.lent_usd(now)


def _tagged(home: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(DIRECTORY_TAG, "").startswith(str(home)):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def _ends(*runs: subprocess.Popen[str]) -> None:
    for run in runs:
        _, errors = run.communicate(timeout=PATIENCE_S)
        assert run.returncode == 0, errors


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Team]:
    found = Team(tmp_path)
    yield found
    if found.pool.is_up:
        found.command("pool", "down", "team", "--yes")


def test_experiments_beside_and_after_each_other_share_warm_instances(team: Team) -> None:
    _ends(team.run("a"), team.run("b"))
    started = len(list((team.pool.machines / "instances").glob("*.json")))
    _ends(team.run("c"))
    loans = _loans(team)
    assert [each["was_warm"] for each in loans if each["experiment"] == "c"] == [True]
    assert len(list((team.pool.machines / "instances").glob("*.json"))) == started <= 2, "none was started for c"
    assert all(team.result(name).actual_jct_s < 900.0 for name in "abc")
    team.check("a", "b", "c")


def test_two_experiments_train_on_parts_of_one_instance(team: Team) -> None:
    _ends(team.run("a", gpus=1), team.run("b", gpus=1))
    assert len({each["machine"] for each in _loans(team)}) <= 2
    team.check("a", "b")


def _loans(team: Team) -> list[dict[str, Any]]:
    from rubberband.cloud.pool import RemotePool

    found: list[dict[str, Any]] = RemotePool(team.pool).status()["loans"]
    return found


VICTIMS = ("broker", "driver a", "driver b", "machine")
PAIRS = [(one, other) for index, one in enumerate(VICTIMS) for other in VICTIMS[index + 1 :]]
SEEDS = int(os.environ.get("RUBBERBAND_POOL_SEEDS", "1"))


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("pair", PAIRS, ids=["-and-".join(pair).replace(" ", "-") for pair in PAIRS])
def test_two_deaths_at_once_lose_nothing(team: Team, pair: tuple[str, str], seed: int) -> None:
    rng = random.Random(f"{pair} {seed}")
    runs = {"a": team.run("a"), "b": team.run("b")}
    team.until_training("a", "b")
    time.sleep(rng.uniform(0.0, 3.0))
    for victim in pair:
        _kill(team, runs, victim, rng)
        time.sleep(rng.choice((0.0, 0.0, 1.0)))
    for name, run in runs.items():
        if f"driver {name}" in pair:
            run.communicate(timeout=30)
            if team.result(name).outcome != "done":
                time.sleep(rng.choice((0.0, 3.0)))
                runs[name] = team.start("resume", name)
    for name, run in runs.items():
        _, errors = run.communicate(timeout=PATIENCE_S)
        assert team.result(name).outcome == "done", errors
    team.check("a", "b")


def _kill(team: Team, runs: dict[str, subprocess.Popen[str]], victim: str, rng: random.Random) -> None:
    if victim.startswith("driver"):
        runs[victim[-1]].send_signal(signal.SIGKILL)
        return
    process = team.broker() if victim == "broker" else team.machine(rng)
    if process is not None:
        process.send_signal(signal.SIGKILL)
