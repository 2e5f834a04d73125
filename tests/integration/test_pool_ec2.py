"""A pool on the fake EC2 with machines that are real Ray nodes: warm instances, parts, spot, and deaths."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from rubberband import Client
from rubberband.cloud.aws.calls import name_in
from rubberband.cloud.pool import FileJournal
from rubberband.cloud.pool.broker import Broker
from rubberband.executor import Result
from rubberband.spec.loading import read_yaml
from rubberband.spec.pool import PoolFolder
from tests.builders.ec2_runs import TALKATIVE, Ec2CommandLine, each_iteration_once, ec2, iterations, words
from tests.builders.pool_team import ended, is_late, promises_of, tell
from tests.builders.server_process import ServerProcess, serving
from tests.builders.waiting import eventually
from tests.ec2.billing import BillLine
from tests.ec2.principals import BUCKET

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(900)]

SHORT = "search.scheduler={type: stages, stages: [{trials: 2, iterations: 2}, {trials: 1, iterations: 2}]}"
LONG = "search.scheduler={type: stages, stages: [{trials: 2, iterations: 6}, {trials: 1, iterations: 8}]}"
LONGER = LONG.replace("iterations: 8", "iterations: 24")
"""It does not end while its instance is reclaimed, whatever the machine is busy with."""
LOOK_USD = 0.003
"""What EC2's bill and the pool's may differ by for an instance: the seconds of a look, and of its volume's end."""


class Team:
    """A pool on EC2, and the experiments that a user runs on it."""

    def __init__(self, command_line: Ec2CommandLine) -> None:
        self.command_line, self.aws = command_line, command_line.aws
        self.folder = PoolFolder(path=command_line.home / "pools" / "team")
        digits, _ = read_yaml((command_line.folder / "digits.yaml").read_text())
        self._words = {**digits, "resources": {"pool": "team"}, "constraints": {"deadline": "20m"}}

    def up(self, **changes: Any) -> None:
        """Bring it up."""
        assert "pool team is up" in self.command_line("pool", "up", str(self.file(**changes)))[0]

    def file(self, **changes: Any) -> Path:
        """Write its file."""
        pool = {"provider": "aws", "instance_type": "g4dn.xlarge", "instances": 1, "aws": {"install": "none"}}
        pool |= {"checkpoints": f"s3://{BUCKET}/team", "max_usd_per_hour": 10, **changes}
        path = self.command_line.folder / "team.yaml"
        path.write_text(yaml.safe_dump(pool))
        return path

    def serve(self, file: Path) -> AbstractContextManager[ServerProcess]:
        """Serve the pool, in the VPC."""
        options = ("--pool", str(file), "--allow", "talking:*", "--code", str(self.command_line.folder))
        return serving(self.command_line.home, *options, environment=self.command_line.environment)

    def submission(self, name: str, deadline: str) -> dict[str, Any]:
        """Return a short experiment, as a client of the service submits it."""
        return {
            **self._words,
            "name": name,
            "entrypoint": "talking:Talking",
            "profile": {"seconds_per_iteration": {1: 2.0}, "trial_startup": "0.2s"},
            "search": {**self._words["search"], "scheduler": yaml.safe_load(SHORT.partition("=")[2])},
            "constraints": {"deadline": deadline},
            "resources": {"provider": "aws", "max_instances": 1},
        }

    def start(self, name: str, *overrides: str) -> subprocess.Popen[str]:
        """Start an experiment."""
        (self.command_line.folder / f"{name}.yaml").write_text(yaml.safe_dump({**self._words, "name": name}))
        return self.command_line.start("run", f"{name}.yaml", "--no-check", *words(*TALKATIVE, *overrides))

    def result_of(self, name: str, driver: subprocess.Popen[str]) -> Result:
        """Wait for an experiment, and return what it has come to."""
        output, errors = driver.communicate(timeout=600)
        assert driver.returncode == 0, f"{output}\n{errors}"
        return self.whole(name)

    def whole(self, name: str) -> Result:
        """Return an experiment's result, which is without loss."""
        result = self.command_line.result(name)
        assert result.outcome == "done"
        assert each_iteration_once(result)
        assert all(trial.failures == 0 for trial in result.trials)
        return result

    def snapshot(self) -> dict[str, Any]:
        """Return the pool's status; a broker that died is started."""
        found: dict[str, Any] = json.loads(self.command_line("pool", "status", "team", "-o", "json")[0])
        return found

    def broker(self) -> psutil.Process:
        """Return the broker's process."""
        for process in psutil.process_iter():
            try:
                if process.cmdline()[-2:] == ["rubberband.pools.process", str(self.folder.path)]:
                    return process
            except psutil.Error:
                continue
        raise AssertionError("the pool has no broker")

    def machines(self) -> list[str]:
        """Return the names of the pool's instances that EC2 has, living or ended."""
        return [name_in(one.tags, one.launch_index) for one in self.aws.fake.instances]

    def holds_the_bill(self, *results: Result) -> dict[str, BillLine]:
        """End the pool, and check the bills of all against EC2's; return EC2's lines."""
        self.command_line("pool", "down", "team")
        assert not self.aws.fake.living
        assert self.command_line.nothing_left()
        broker = Broker()
        for event in FileJournal(self.folder.path).events():
            broker.handle(event)
        state, bill = broker.state, self.aws.fake.bill()
        assert state.bill_usd(time.time() + 1e6) == pytest.approx(bill.total_usd, abs=LOOK_USD * len(bill.lines))
        own_usd = sum(result.actual_cost_usd for result in results)
        idle_usd = state.idle_usd(state.slices and max(m.ended_at or 0.0 for m in state.machines.values()) + 1.0)
        print(f"experiments {own_usd:.4f} USD + pool {idle_usd:.4f} USD; EC2 {bill.total_usd:.4f} USD")
        assert own_usd + idle_usd == pytest.approx(bill.total_usd, abs=LOOK_USD * len(bill.lines))
        return {name_in(line.tags, line.launch_index): line for line in bill.lines}


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Team]:
    with ec2(tmp_path) as command_line:
        found = Team(command_line)
        yield found
        if found.folder.is_up:
            command_line("pool", "down", "team", "--yes")


def test_a_warm_instance_moves_to_the_next_experiment_also_past_a_killed_broker(team: Team) -> None:
    team.up()
    first = team.result_of("a", team.start("a", SHORT))
    driver = team.start("b", LONG)
    team.command_line.wait_for(driver, lambda result: iterations(result) >= 2, "b")
    killed = team.broker()
    killed.kill()
    killed.wait(10)
    second = team.result_of("b", driver)
    assert team.broker().pid != killed.pid
    assert [loan["was_warm"] for loan in team.snapshot()["loans"]] == [False, True]
    assert (second.interruptions, second.redone_iterations) == (0, 0)
    assert team.machines() == ["m1"], "it was adopted, and no other one was rented"
    assert (team.command_line.home / "experiments" / "b" / "logs" / "trial-000.log").read_text().count("iteration") >= 6
    team.holds_the_bill(first, second)


def test_all_experiments_on_a_reclaimed_spot_instance_get_its_notice(team: Team) -> None:
    team.up(instance_type="g4dn.12xlarge", instances=2, market="spot")
    parts = ("resources.gpus_per_instance=2", "resources.max_instances=1", LONGER)
    drivers = {name: team.start(name, *parts) for name in ("a", "b")}
    for name, driver in drivers.items():
        team.command_line.wait_for(driver, lambda result: iterations(result) >= 2, name)
    (shared,) = team.aws.fake.living
    assert shared.market == "spot", "both are on one"
    team.aws.fake.reclaim(shared.instance_id, notice_s=20.0)
    results = [team.result_of(name, driver) for name, driver in drivers.items()]
    assert [result.interruptions for result in results] == [1, 1]
    assert all(result.redone_iterations <= 2 for result in results)
    assert set(team.machines()) == {"m1", "m2"}
    assert set(team.holds_the_bill(*results)) == {"m1", "m2"}


def test_instances_of_a_pool_without_a_broker_are_swept(team: Team) -> None:
    team.up()
    driver = team.start("a", LONG)
    team.command_line.wait_for(driver, lambda result: iterations(result) >= 1, "a")
    assert "nothing was left behind" in team.command_line("cleanup")[0], "its broker lives"
    broker = team.broker()
    driver.kill()
    driver.communicate()
    broker.kill()
    broker.wait(10)
    assert "m1 of team" in team.command_line("cleanup")[0]
    eventually(lambda: not team.aws.fake.living, "the end of the instance")
    team.result_of("a", team.command_line.start("resume", "a"))
    assert team.machines() == ["m1", "m2"]


def test_a_service_promises_two_experiments_a_pool_on_ec2_and_both_end_in_time(team: Team) -> None:
    with team.serve(team.file(instances=2)) as server, Client(server.address) as client:
        names = ("a", "b")
        for name in names:
            client.submit(team.submission(name, "10m"))
        promises = promises_of(client)
        assert set(promises) == set(names)
        rows = ended(client, names)
        loans = team.snapshot()["loans"]
    tell(rows, promises, loans)
    assert [row["state"] for row in rows.values()] == ["done", "done"], {
        name: row["reason"] for name, row in rows.items()
    }
    assert not any(is_late(row) for row in rows.values())
    results = [team.whole(name) for name in names]
    assert len(team.machines()) == len(team.holds_the_bill(*results)) <= 2


PROGRAM = """
import os, pathlib, sys, time
from words import WORDS

out, until = pathlib.Path(sys.argv[1]), int(sys.argv[2])
begin = int((out / "n").read_text()) if (out / "n").exists() else 0
print(WORDS, "token", os.environ.get("HF_TOKEN"), "data", os.environ.get("DATA"), flush=True)
for iteration in range(begin + 1, until + 1):
    time.sleep(1.8)
    (out / "n").write_text(str(iteration))
    print(f"accuracy={iteration}", flush=True)
"""


def test_programs_of_two_experiments_have_their_own_files_and_secrets_on_a_warm_instance(team: Team) -> None:
    folder, environment = team.command_line.folder, team.command_line.environment
    (folder / "train.py").write_text(PROGRAM)
    environment["HF_TOKEN"] = "hf_aVery$ecret/token"
    team.up()
    results, logs = [], []
    for name, given in (("a", ("resources.secrets=[HF_TOKEN]", "resources.env={DATA: /a}")), ("b", ())):
        (folder / "words.py").write_text(f'WORDS = "the words of {name}"\n')
        entrypoint = "entrypoint={command: 'python train.py ${checkpoint} ${max_t}', metrics: stdout}"
        results.append(team.result_of(name, team.start(name, SHORT, entrypoint, *given)))
        logs.append(team.command_line.shows("logs", name))
    assert "the words of a token *** data /a" in logs[0]
    assert "the words of b token None data None" in logs[1]
    assert [loan["was_warm"] for loan in team.snapshot()["loans"]] == [False, True]
    assert team.machines() == ["m1"]
    team.holds_the_bill(*results)
