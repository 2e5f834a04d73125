"""The gang of a program: who is where, which GPUs each program sees, and whose report counts."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rubberband.executor import CheckpointStore, Entrypoint, run_segment
from rubberband.executor.training import command_runner, program_gang, reporting, worker_process
from rubberband.executor.training.lifeline import connected
from rubberband.executor.training.program_gang import ProgramGang
from rubberband.values.command import Metrics, ProgramCommand
from rubberband.values.environment import Environment
from tests.builders.segments import SEGMENT
from tests.builders.waiting import eventually

GPUS = {0: "10", 1: "9", 2: "0", 3: "3"}
"""By rank: ranks 0 and 2 are on one machine, 1 and 3 on another one."""


def test_workers_that_come_in_any_order_have_their_places_and_the_gpus_of_their_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = program_gang._Worker(0, "machine 0", GPUS[0])
    monkeypatch.setattr(program_gang._Worker, "here", lambda segment: mine)
    port = worker_process.reserve_port()
    others = {rank: connected("127.0.0.1", port, rank, 5.0)[0] for rank in (3, 1, 2)}
    for rank, line in others.items():
        program_gang._write(line, {"machine": f"machine {rank % 2}", "gpus": GPUS[rank]})
    gang = ProgramGang.join(replace(SEGMENT, num_workers=4, rendezvous=f"tcp://127.0.0.1:{port}", device="cuda"))
    answer: Any = program_gang._read(others[2])
    assert answer["workers"] == [[f"machine {rank % 2}", GPUS[rank]] for rank in range(4)]
    workers = [program_gang._Worker(rank, *words) for rank, words in enumerate(answer["workers"])]
    places = program_gang._places(workers, "127.0.0.1", answer["port"])
    assert places[0] == gang.place
    assert [place.gpus for place in places] == ["10,0", "9,3", "10,0", "9,3"]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE")
    found = [[place.variables("run")[name] for name in names] for place in places]
    assert found == [
        ["0", "4", "0", "2", "0", "0", "2"],
        ["1", "4", "0", "2", "1", "1", "2"],
        ["2", "4", "1", "2", "0", "0", "2"],
        ["3", "4", "1", "2", "1", "1", "2"],
    ]
    for line in others.values():
        line.close()
    gang.close()


def test_only_the_first_worker_of_the_gang_reports_not_the_first_of_each_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(reporting.LINE, "/nowhere/line")
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    reporting.report({"loss": 1.0})
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(FileNotFoundError):
        reporting.report({"loss": 1.0})


def test_a_program_whose_collective_breaks_as_rank_0_ends_in_order_has_not_failed(
    store: CheckpointStore, tmp_path: Path
) -> None:
    words = ("sh", "-c", "echo $PPID > draft; mv draft guard; echo gloo: Connection closed by peer >&2; exit 1")
    command = ProgramCommand(words=words)
    entrypoint = Entrypoint(module="", attribute="", search_path=(str(tmp_path),), command=command)
    segment = replace(SEGMENT, num_workers=2, rendezvous=f"tcp://127.0.0.1:{worker_process.reserve_port()}")
    with ThreadPoolExecutor(1) as other:
        second = other.submit(lambda: list(run_segment(entrypoint, replace(segment, rank=1), store)))
        gang = ProgramGang.join(segment)
        eventually((tmp_path / "guard").exists, "the program")
        guard = Path("/proc", (tmp_path / "guard").read_text().strip())
        eventually(lambda: not guard.exists(), "the end of the program, which its worker has seen")
        gang.leave()
        assert second.result() == []
        gang.close()


@pytest.mark.parametrize("launch", ["worker", "machine"])
def test_the_word_of_a_gang_counts_with_any_variables_of_its_worker(
    launch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = program_gang.Place(
        rank=0, size=2, local_rank=0, local_size=2, machine=0, machines=1, address="10.0.0.1", port=4711, gpus="10,0"
    )
    own = place.variables("rubberband-4-1") if launch == "worker" else place.address_variables()
    own |= {"CUDA_VISIBLE_DEVICES": "10,0", "PYTHONUNBUFFERED": "1"}
    for name in (*own, reporting.LINE, reporting.CHECKPOINT, reporting.CONFIG, "PL_TRAINER_STRATEGY"):
        monkeypatch.setenv(name, "the worker's")
    started: list[dict[str, str]] = []

    class Started:
        def __init__(self, words: Any, environment: dict[str, str], folder: str, *outputs: int, forks: bool) -> None:
            started.append(environment)
            for output in outputs:
                os.close(output)

        def poll(self) -> int:
            return 0

        def end(self) -> None: ...

    monkeypatch.setattr(command_runner, "ProgramProcess", Started)
    gang: Any = SimpleNamespace(place=place)
    program = ProgramCommand(words=("true",), metrics=Metrics(source="stdout"), launch=launch)
    runner = command_runner.CommandRunner(program, replace(SEGMENT, num_workers=2), str(tmp_path), gang, Environment())
    runner._start()
    runner.close()
    assert {name: started[0][name] for name in own} == own
    assert "the worker's" not in {started[0][name] for name in (reporting.LINE, reporting.CHECKPOINT, reporting.CONFIG)}
    assert started[0]["PL_TRAINER_STRATEGY"] == "the worker's", "a default only"
