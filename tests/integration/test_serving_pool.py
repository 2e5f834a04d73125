"""A service whose experiments share a pool, on real Ray nodes: promises are kept, and instances go warm to the next."""

from __future__ import annotations

import re
import time
from pathlib import Path

import httpx
import pytest

from rubberband.executor.core.history import Allotted
from rubberband.executor.journal.reading import read_at_once
from tests.integration.command_line import EXPERIMENT, PATIENCE_S, CommandLine

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(420)]

POOL = "name: team\ninstances: 2\ngpus_per_instance: 1\nprice_per_hour: 36\n"
OPTIONS = ("--port", "0", "--pool", "pool.yaml", "--allow", "sleepy:Sleepy", "--code", ".")


def experiment(name: str, constraints: str) -> str:
    changed = EXPERIMENT.replace("gpus_per_instance: 2", "gpus_per_instance: 1").replace(
        "name: sleepy", f"name: {name}"
    )
    return changed.replace("constraints: {deadline: 10m}", f"constraints: {{{constraints}}}")


def allotments(command_line: CommandLine, name: str) -> list[Allotted]:
    from rubberband.executor.journal.folder import ExperimentFolder

    return read_at_once(ExperimentFolder(home=command_line.home, name=name)).controller.state.allotments


def test_promises_are_kept_and_an_experiment_without_one_gets_what_is_left(tmp_path: Path) -> None:
    command_line = CommandLine(tmp_path)
    (tmp_path / "pool.yaml").write_text(POOL)
    server = command_line.start("serve", *OPTIONS)
    try:
        assert server.stderr is not None
        address = re.search(r"http://\S+", server.stderr.readline())
        assert address is not None
        client = httpx.Client(base_url=address[0], timeout=60.0)
        for name, constraints in (("one", "deadline: 90s"), ("two", "deadline: 90s"), ("free", "max_cost: 5")):
            headers = {"content-type": "application/yaml"}
            made = client.post("/v1/experiments", content=experiment(name, constraints), headers=headers)
            assert made.status_code == 201, made.json()
        until = time.monotonic() + 2 * PATIENCE_S
        while time.monotonic() < until:
            rows = {row["name"]: row for row in client.get("/v1/experiments").json()["items"]}
            if all(row["state"] == "done" for row in rows.values()):
                break
            time.sleep(0.5)
        assert {row["state"] for row in rows.values()} == {"done"}, rows
        for name in ("one", "two"):
            assert rows[name]["slack_s"] > 0.0
            assert allotments(command_line, name)[0].max_instances == 0, "it waits for its allotment"
        assert rows["free"]["summary"]["instances"] == 0
        status, _ = command_line("pool", "status", "team")
        assert status.count("m1") == 1
        assert "m3" not in status, "two machines are enough for three experiments"
    finally:
        server.terminate()
        server.wait(60.0)
        command_line("pool", "down", "team")
    assert command_line.nothing_left()
