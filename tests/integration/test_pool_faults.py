"""A pool of this machine's real instances: experiments after and beside each other, and `kill -9` of what they need."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from rubberband import Client
from tests.builders.pool_team import PATIENCE_S, Team
from tests.builders.server_process import ServerProcess

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(900)]

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


def _run(team: Team, name: str, gpus: int = 2) -> subprocess.Popen[str]:
    """Start an experiment by hand."""
    (team.folder / f"{name}.yaml").write_text(EXPERIMENT.format(name=name, gpus=gpus))
    return team.start("run", f"{name}.yaml", "--no-check")


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Team]:
    found = Team(tmp_path, instances=2, gpus_per_instance=2)
    yield found
    found.end()


@pytest.fixture
def team_with_pool(team: Team) -> Team:
    team.command("pool", "up", "team.yaml")
    return team


SEEDS = int(os.environ.get("RUBBERBAND_POOL_SEEDS", "1"))
"""Runs of each pair of victims; they differ in the moments and the order of the deaths."""


def pairs_of(*victims: str) -> pytest.MarkDecorator:
    """Give a test every pair of victims as `pair`."""
    pairs = list(combinations(victims, 2))
    return pytest.mark.parametrize("pair", pairs, ids=["-and-".join(pair).replace(" ", "-") for pair in pairs])


@pytest.mark.parametrize("seed", range(SEEDS))
@pairs_of("broker", "driver a", "driver b", "machine")
def test_two_deaths_at_once_lose_nothing(team_with_pool: Team, pair: tuple[str, str], seed: int) -> None:
    team, rng = team_with_pool, random.Random(f"{pair} {seed}")
    runs = {"a": _run(team, "a"), "b": _run(team, "b")}
    team.until_training("a", "b")
    time.sleep(rng.uniform(0.0, 3.0))  # this sleep and those below: any moment is to be as good
    for victim in pair:
        _kill(runs[victim[-1]].pid if victim.startswith("driver") else _victim(team, victim, rng))
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


@pytest.mark.parametrize("seed", range(SEEDS))
@pairs_of("broker", "driver", "service", "machine")
def test_two_deaths_at_once_lose_nothing_of_a_service(team: Team, pair: tuple[str, str], seed: int) -> None:
    rng = random.Random(f"{pair} {seed}")
    with ExitStack() as stack:
        server = stack.enter_context(team.serve())
        with Client(server.address) as client:
            for name in "ab":
                client.submit(_submitted(name))
        if rng.random() < 0.7:
            team.until_training("a", "b")
        time.sleep(rng.uniform(0.0, 6.0))  # this sleep and those below: any moment is to be as good
        for victim in rng.sample(pair, 2):
            print(f"kill -9 of the {victim}")
            _kill(server.process.pid if victim == "service" else _victim(team, victim, rng))
            time.sleep(rng.choice((0.0, 0.0, 1.0)))
        if "service" in pair:
            time.sleep(rng.choice((0.0, 5.0)))
            server = stack.enter_context(team.serve())
        for name in "ab":
            _ends_in_service(server, name)
    results = [team.result(name) for name in "ab"]
    assert not any(result.late for result in results)
    team.check("a", "b")


def _submitted(name: str) -> dict[str, Any]:
    words: dict[str, Any] = yaml.safe_load(
        EXPERIMENT.format(name=name, gpus=2).replace("pool: team", "provider: local")
    )
    return words


def _ends_in_service(server: ServerProcess, name: str) -> None:
    """Wait until an experiment is done; resume it once if its driver died before any progress."""
    with Client(server.address) as client:
        found = client.wait(name, timeout_s=PATIENCE_S)
        if found["state"] == "interrupted":
            print(f"{name} is resumed by hand: {found['reason']}")
            client.resume(name)
            found = client.wait(name, timeout_s=PATIENCE_S)
        assert found["state"] == "done", found["reason"]


def _victim(team: Team, victim: str, rng: random.Random) -> int | None:
    """Return the process of a victim; None if it has none now."""
    if victim == "driver":
        return team.driver(rng.choice("ab"))
    process = team.broker() if victim == "broker" else team.machine(rng)
    return None if process is None else process.pid


def _kill(pid: int | None) -> None:
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
