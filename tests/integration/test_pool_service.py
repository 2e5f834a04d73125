"""Digits experiments that share a pool of four real instances through a service: promises, warm instances, bills."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from rubberband import Client
from tests.builders.pool_team import Team, ended, is_late, pool_of, promises_of, tell
from tests.builders.waiting import eventually

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]

TRIALS = '''
import time

from examples.digits import DigitsTrial

class PacedDigits(DigitsTrial):
    """The digits where four instances have two cores: an iteration trains less, and waits as if for a GPU."""

    samples_per_iteration = 640

    def on_iteration(self, model, iterations):
        time.sleep(0.8)  # deadlines of real training count real time
'''
EXPERIMENT = """
version: 1
name: {name}
entrypoint: trials:PacedDigits
search:
  space:
    lr: {{type: loguniform, lower: 0.001, upper: 0.3}}
    momentum: {{type: uniform, lower: 0.5, upper: 0.95}}
    weight_decay: {{type: loguniform, lower: 0.000001, upper: 0.001}}
  scheduler: {{type: sha, num_samples: {trials}, grace_period: 2, max_t: 8, reduction_factor: 2}}
  sampler: {{type: random, seed: 7}}
  metric: accuracy
  mode: max
constraints: {constraints}
profile: {{seconds_per_iteration: {{1: 1.1}}, iteration_cv: 0.1, trial_startup: 1, startup_cv: 0.5}}
resources:
  provider: local
  gpus_per_trial: {{min: 1, max: 1}}
  provision_delay: 4s
  init_delay: 9s
"""
FIVE: dict[str, dict[str, Any]] = {
    "a": {"trials": 12, "instances": 2, "deadline": "5m", "objective": "min_time"},
    "b": {"trials": 12, "instances": 2, "deadline": "5m", "objective": "min_time"},
    "c": {"trials": 6, "deadline": "5m"},
    "d": {"trials": 6, "deadline": "5m"},
    "e": {"trials": 8, "deadline": "6m"},
}
"""The first two take all four instances at first. The deadlines leave time for processes that start slowly."""


def experiment(name: str, trials: int, *, instances: int | None = None, **constraints: str | float) -> dict[str, Any]:
    words: dict[str, Any] = yaml.safe_load(EXPERIMENT.format(name=name, trials=trials, constraints=constraints))
    if instances is not None:
        words["resources"]["max_instances"] = instances
    return words


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Team]:
    found = Team(tmp_path, instances=4, gpus_per_instance=1, trials=TRIALS)
    yield found
    found.end()


def test_experiments_that_are_submitted_at_once_keep_their_promises_on_warm_instances(team: Team) -> None:
    with team.serve() as server, Client(server.address) as client:
        names, launches = list(FIVE), 0
        for name in names:
            words = experiment(name, **FIVE[name])
            launches += launches_of(client.plan(words))
            client.submit(words)
        promises = promises_of(client)
        assert sorted(promises) == names
        rows = ended(client, names)
    loans = team.status()["loans"]
    tell(rows, promises, loans)
    assert [name for name in names if is_late(rows[name])] == []
    started = len(team.instance_records)
    print(f"{started} instances started; clusters of their own would have started {launches}")
    assert started == most_at_once(loans) <= 4
    assert started < launches
    team.check(*names)


def test_a_tight_deadline_is_kept_beside_long_experiments(team: Team) -> None:
    with team.serve() as server, Client(server.address) as client:
        for name in ("long-a", "long-b"):
            client.submit(experiment(name, 16, deadline="6m"))
        client.submit(experiment("free", 24, max_cost=100, objective="min_time"))
        team.until_training("long-a", "long-b", "free")
        eventually(lambda: held(client)["free"] == 2, "the one without a promise gets the rest of the pool")
        client.submit(experiment("tight", 6, deadline="90s"))
        promises = promises_of(client)
        assert sorted(promises) == ["long-a", "long-b", "tight"]
        rows = ended(client, ["long-a", "long-b", "tight", "free"])
    loans = team.status()["loans"]
    tell(rows, promises, loans)
    assert [name for name in promises if is_late(rows[name])] == []
    assert all(loan["was_warm"] for loan in loans if loan["experiment"] == "tight")
    assert len(team.instance_records) == most_at_once(loans) == 4
    team.check(*rows)


def launches_of(estimate: Mapping[str, Any]) -> int:
    """Return how many instances a plan starts on a cluster of its own."""
    counts = [0, *(stage["instances"] for stage in estimate["plan"]["stages"])]
    return sum(max(0, after - before) for before, after in pairwise(counts))


def held(client: Client) -> dict[str, int]:
    """Return experiment -> the instances that it holds."""
    return {one["name"]: one["instances"] for one in pool_of(client)["experiments"]}


def most_at_once(loans: Sequence[Mapping[str, Any]]) -> int:
    """Return the most instances that were lent at one time, those included that waited for a new one."""
    begins = "running_at", "requested_at"
    edges = [(loan[begins[not loan["was_warm"]]], 1) for loan in loans] + [(loan["ended_at"], -1) for loan in loans]
    held, most = 0, 0
    for _, change in sorted(edges):
        held += change
        most = max(most, held)
    return most
