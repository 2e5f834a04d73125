"""Programs on EC2, with real boot scripts and Ray nodes: their files, gangs over instances, variables and secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders.ec2_runs import ON_EC2, Ec2CommandLine, each_iteration_once, ec2, words
from tests.builders.secret_watch import watched

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(900)]

TOKEN = "hf_aVery$ecret/token"
PROGRAM = """
import os, pathlib, socket, sys, time, rubberband
from lib.words import WORDS

out, machine, machines, address, port, until = pathlib.Path(sys.argv[1]), *sys.argv[2:5], *map(int, sys.argv[5:7])
place = f"machine {machine} of {machines}, {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')}"
print(place, "in", os.getcwd(), WORDS, os.environ["DATA"], "token", os.environ["HF_TOKEN"], flush=True)
rank, size = os.environ.get("RANK", machine), os.environ.get("WORLD_SIZE", machines)
if size != "1":  # as init_process_group does: the first one listens, and the others connect
    if rank == "0":
        server = socket.create_server((address, port))
        connection, _ = server.accept()
    else:
        deadline = time.monotonic() + 60.0
        while True:
            try:
                connection = socket.create_connection((address, port))
                break
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
    connection.sendall(rank.encode())
    print("process", rank, "met process", connection.recv(1).decode(), flush=True)
if rank != "0":
    time.sleep(600)
begin = int((out / "n").read_text()) if (out / "n").exists() else 0
for iteration in range(begin + 1, until + 1):
    time.sleep(1.0)
    (out / "n").write_text(str(iteration))
    rubberband.report({"accuracy": len(os.environ["HF_TOKEN"]), "machines": int(machines)})
"""
WORDS = "./start ${checkpoint} ${machine_rank} ${machines} ${master_addr} ${master_port} ${max_t}"


@pytest.fixture
def command_line(tmp_path: Path) -> Iterator[Ec2CommandLine]:
    with ec2(tmp_path) as driver:
        folder = driver.folder
        (folder / "train.py").write_text(PROGRAM)
        (folder / "lib").mkdir()
        (folder / "lib" / "words.py").write_text('WORDS = "imported words"\n')
        (folder / "start").write_text('#!/bin/sh\nexec python train.py "$@"\n')
        (folder / "start").chmod(0o755)
        yield driver


def settings(launch: str) -> tuple[str, ...]:
    return words(
        *ON_EC2,
        "resources.max_instances=2",
        f"entrypoint={{command: '{WORDS}', launch: {launch}}}",
        "profile={seconds_per_iteration: {1: 2.0, 2: 1.0}, trial_startup: 0.2s}",
        "search.scheduler={type: stages, stages: [{trials: 2, iterations: 2}, {trials: 1, iterations: 3}]}",
        "constraints={deadline: 20m, max_cost: 5, objective: min_time}",
        "resources.gpus_per_trial={min: 1, max: 2}",
        "resources.env={DATA: /data}",
        "resources.secrets=[HF_TOKEN]",
    )


@pytest.mark.parametrize("launch", ["worker", "machine"])
def test_a_program_trains_on_two_instances_and_nothing_keeps_its_secret(
    command_line: Ec2CommandLine, launch: str, tmp_path: Path
) -> None:
    command_line.environment["HF_TOKEN"] = TOKEN
    with watched([TOKEN], tmp_path) as seen:
        output, errors = command_line("run", "digits.yaml", *settings(launch))
    result = command_line.result("digits")
    assert result.outcome == "done"
    assert each_iteration_once(result)
    assert [trial.failures for trial in result.trials] == [0, 0]
    assert result.best is not None
    assert result.best.metrics["machines"] == 2.0
    assert result.best.metrics["accuracy"] == len(TOKEN)
    log = command_line.shows("logs", "digits", str(result.best.trial))
    assert re.search(r"machine 0 of 1, .* in \S+/code/\w+/0 imported words /data token \*\*\*", log)
    assert "process 0 met process 1" in log
    report = command_line.shows("report", "digits", "--verbose")
    command_line.shows("report", "digits", "--html", "report.html")
    told = {"output": output, "errors": errors, "log": log, "report": report}
    told |= {one.instance_id: one.user_data for one in command_line.aws.fake.instances}
    told |= {name: str(value) for name, value in command_line.aws.fake.world.parameters.items()}
    assert [name for name, text in told.items() if TOKEN in text] == []
    assert seen == []
    assert command_line.nothing_left()
