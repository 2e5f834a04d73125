"""A team that shares a pool of this machine's real instances: commands, a service, and what must hold at the end."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest

from rubberband import Client
from rubberband.cloud.pool import FileJournal, RemotePool
from rubberband.cloud.pool.broker import Broker
from rubberband.executor import ExperimentFolder, Result, is_hosted, read_mark
from rubberband.executor import read_journal as read
from rubberband.spec.pool import PoolFolder
from rubberband.units import parse_deadline
from tests.builders.command_line import TRIALS
from tests.builders.invariants import validate_pool
from tests.builders.server_process import ServerProcess, serving
from tests.builders.waiting import eventually

PATIENCE_S = 400.0
PRICE_USD = 36.0
"""Per hour and instance: a cent a second."""
MINIMUM_S = 60.0
"""The least that an instance is billed for."""


class Team:
    """A pool, and experiments on it; what they need is below one folder."""

    def __init__(self, folder: Path, *, instances: int, gpus_per_instance: int, trials: str = TRIALS) -> None:
        self.folder, self.home = folder, folder / "home"
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment = {**os.environ, "RUBBERBAND_HOME": str(self.home), "PYTHONPATH": os.pathsep.join(paths)}
        self.pool = PoolFolder(path=self.home / "pools" / "team")
        (folder / "trials.py").write_text(trials)
        shape = f"instances: {instances}, gpus_per_instance: {gpus_per_instance}"
        (folder / "team.yaml").write_text(f"{{{shape}, price_per_hour: {PRICE_USD}, idle: 5m}}")

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "rubberband.cli", *words],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def command(self, *words: str) -> None:
        process = self.start(*words)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, f"{words}: {errors}"

    def serve(self, *options: str) -> AbstractContextManager[ServerProcess]:
        """Serve the pool and the experiments of its home, for as long as this lasts."""
        file, code = str(self.folder / "team.yaml"), str(self.folder)
        return serving(self.home, "--pool", file, "--allow", "trials:*", "--code", code, *options)

    def result(self, name: str) -> Result:
        return read(ExperimentFolder(home=self.home, name=name))

    def iterations(self, name: str) -> int:
        folder = ExperimentFolder(home=self.home, name=name)
        return sum(trial.iterations for trial in read(folder).trials) if folder.exists else 0

    def until_training(self, *names: str) -> None:
        eventually(lambda: all(self.iterations(name) > 0 for name in names), f"{', '.join(names)} train")

    def status(self) -> dict[str, Any]:
        """Return a snapshot of the pool: `rubberband pool status -o json`."""
        return RemotePool(self.pool).status()

    @property
    def instance_records(self) -> list[dict[str, Any]]:
        """The provider's records of all instances that were ever started."""
        return [json.loads(path.read_text()) for path in (self.pool.machines / "instances").glob("*.json")]

    def broker(self) -> psutil.Process | None:
        for process in psutil.process_iter():
            try:
                if process.cmdline()[-2:] == ["rubberband.pools.process", str(self.pool.path)]:
                    return process
            except psutil.Error:
                continue
        return None

    def driver(self, name: str) -> int | None:
        """Return the process of an experiment of the service; None if none runs."""
        folder = ExperimentFolder(home=self.home, name=name)
        mark = read_mark(folder) if is_hosted(folder) else None
        return None if mark is None else mark.pid

    def machine(self, rng: random.Random) -> psutil.Process | None:
        living = [one["pid"] for one in self.instance_records if one["ended_at"] is None and one["pid"] is not None]
        return psutil.Process(rng.choice(living)) if living else None

    def check(self, *names: str) -> Mapping[str, float]:
        """End the pool, and check what it lent against what was held, billed and left; return its bill."""
        self.command("pool", "down", "team", "--yes")
        eventually(lambda: not self.processes(), "all processes end", within_s=15.0)
        broker = Broker()
        for event in FileJournal(self.pool.path).events():
            broker.handle(event)
            validate_pool(broker.state, event.at)
        state, now = broker.state, time.time() + 1e6
        assert not state.live
        ran_s = [one["ended_at"] - one["running_at"] for one in self.instance_records if one["running_at"] is not None]
        provider_usd = math.fsum(PRICE_USD / 3600.0 * max(MINIMUM_S, seconds) for seconds in ran_s)
        results = [self.result(name) for name in names]
        for result in results:
            assert result.outcome == "done", result.reason
        own_usd, idle_usd = math.fsum(result.actual_cost_usd for result in results), state.idle_usd(now)
        print(
            f"experiments {own_usd:.4f} USD + idle {idle_usd:.4f} USD; "
            f"pool {state.bill_usd(now):.4f} USD; provider {provider_usd:.4f} USD"
        )
        assert own_usd + idle_usd == pytest.approx(provider_usd, abs=0.005)
        assert state.bill_usd(now) == pytest.approx(provider_usd, abs=0.005)
        return state.lent_usd(now)

    def processes(self) -> list[int]:
        """Return all processes that belong to this team's home: drivers, the broker, the service and instances."""
        found = []
        for process in psutil.process_iter():
            try:
                tags = [value for key, value in process.environ().items() if key.startswith("RUBBERBAND_")]
                is_over = process.status() == psutil.STATUS_ZOMBIE
            except psutil.Error:
                continue
            if not is_over and any(value.startswith(str(self.home)) for value in tags):
                found.append(process.pid)
        return found

    def end(self) -> None:
        if self.pool.is_up:
            self.command("pool", "down", "team", "--yes")


def promises_of(client: Client) -> dict[str, Mapping[str, float]]:
    """Return experiment -> when its promise begins and ends."""
    return {one["name"]: one["promise"] for one in pool_of(client)["experiments"] if one["promise"]}


def pool_of(client: Client) -> dict[str, Any]:
    import httpx

    found: dict[str, Any] = httpx.get(f"{client.url}/v1/pool", timeout=60.0).json()
    return found


def ended(client: Client, names: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    until = time.monotonic() + PATIENCE_S
    return {name: client.wait(name, timeout_s=until - time.monotonic()) for name in names}


def is_late(row: Mapping[str, Any]) -> bool:
    """Whether an experiment ended after its deadline, which began when it was submitted."""
    return bool(row["summary"]["ended_at"] - row["created_at"] > deadline_s(row))


def deadline_s(row: Mapping[str, Any]) -> float:
    """Return the time from an experiment's submission to its deadline; infinite without one."""
    written = row["words"]["constraints"].get("deadline")
    deadline = math.inf if written is None else parse_deadline(written)
    return deadline if isinstance(deadline, float) else deadline.timestamp() - row["created_at"]


def tell(rows: Mapping[str, Any], promises: Mapping[str, Any], loans: Sequence[Mapping[str, Any]]) -> None:
    """Print a line for each experiment; times are since its submission."""
    print("\nexperiment  deadline  promised until  ended  instances  of these warm  cost")
    for name, row in rows.items():
        own, promise = [one for one in loans if one["experiment"] == name], promises.get(name)
        until_s = "-" if promise is None else f"{promise['end_at'] - row['created_at']:.0f} s"
        ended_s = row["summary"]["ended_at"] - row["created_at"]
        warm = sum(one["was_warm"] for one in own)
        print(
            f"{name:10}  {deadline_s(row):6.0f} s  {until_s:>14}  {ended_s:3.0f} s  {len(own):9}  {warm:13}  "
            f"{row['summary']['cost_usd']:.4f} USD"
        )
