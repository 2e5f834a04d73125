"""The gang of a program: who is where, which GPUs each program sees, and whose report counts."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rubberband.executor import CheckpointStore, Entrypoint, SegmentUse, TrialFailure, run_segment, worker_process
from rubberband.executor.checkpoints.scratch import Scratch
from rubberband.executor.training import reporting
from rubberband.executor.training.lifeline import connected
from rubberband.executor.training.programs import runner as command_runner
from rubberband.executor.training.programs.gang import Place, ProgramGang
from rubberband.values.command import Metrics, ProgramCommand
from rubberband.values.environment import Environment
from tests.builders.segments import SEGMENT
from tests.builders.waiting import eventually

GPUS = {0: "10", 1: "9", 2: "0", 3: "3"}
"""By rank: ranks 0 and 2 are on one machine, 1 and 3 on another one."""


def said(line: socket.socket) -> Any:
    with line.makefile("rb") as file:
        return json.loads(file.readline())


def say(line: socket.socket, content: Any) -> None:
    line.sendall(json.dumps(content).encode() + b"\n")


def place_of(rank: int, answer: Any) -> Place:
    """The place that a worker takes which gets this answer from rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as other:
        rendezvous = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        joined = other.submit(
            ProgramGang.join, replace(SEGMENT, rank=rank, num_workers=4, rendezvous=rendezvous), Path("/own")
        )
        line, _ = listener.accept()
        assert int(line.recv(4)) == rank
        assert said(line).keys() == {"machine", "gpus", "folder"}
        say(line, answer)
        gang = joined.result()
    gang.close()
    line.close()
    return gang.place


def test_workers_that_come_in_any_order_have_their_places_and_the_gpus_of_their_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", GPUS[0])

    def meet(machine_of: Callable[[int], str]) -> tuple[ProgramGang, Any]:
        port = worker_process.reserve_port()
        lines = {rank: connected("127.0.0.1", port, rank, 5.0)[0] for rank in (3, 1, 2)}
        for rank, line in lines.items():
            say(line, {"machine": machine_of(rank), "gpus": GPUS[rank], "folder": f"/{rank}"})
        segment = replace(SEGMENT, num_workers=4, rendezvous=f"tcp://127.0.0.1:{port}", device="cuda")
        gang, answer = ProgramGang.join(segment, Path("/0")), said(lines[2])
        for line in lines.values():
            line.close()
        gang.close()
        return gang, answer

    here = meet(lambda rank: "elsewhere")[1]["workers"][0][0]
    gang, answer = meet(lambda rank: "elsewhere" if rank % 2 else here)
    assert answer["workers"] == [["elsewhere" if rank % 2 else here, GPUS[rank], f"/{rank}"] for rank in range(4)]
    places = [gang.place, *(place_of(rank, answer) for rank in (1, 2, 3))]
    assert [place.gpus for place in places] == ["10,0", "9,3", "10,0", "9,3"]
    assert [place.folder for place in places] == ["/0", "/1", "/0", "/1"], "that of the first worker on the machine"
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE")
    found = [[place.variables("run")[name] for name in names] for place in places]
    assert found == [
        ["0", "4", "0", "2", "0", "0", "2"],
        ["1", "4", "0", "2", "1", "1", "2"],
        ["2", "4", "1", "2", "0", "0", "2"],
        ["3", "4", "1", "2", "1", "1", "2"],
    ]


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
        gang = ProgramGang.join(segment, tmp_path)
        (tmp_path / "checkpoint").mkdir()  # of the machine
        eventually((tmp_path / "guard").exists, "the program")
        guard = Path("/proc", (tmp_path / "guard").read_text().strip())
        eventually(lambda: not guard.exists(), "the end of the program, which its worker has seen")
        gang.leave()
        assert [item for item in second.result() if not isinstance(item, SegmentUse)] == []
        gang.close()


@pytest.mark.parametrize(("launch", "rank"), [("worker", True), ("worker", False), ("machine", True)])
def test_the_word_of_a_gang_counts_with_any_variables_of_its_worker(
    launch: Any, rank: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(
        rank=0,
        size=2,
        local_rank=0,
        local_size=2,
        machine=0,
        machines=1,
        address="10.0.0.1",
        port=4711,
        gpus="10,0",
        folder="",
    )
    own = place.variables("rubberband-4-1") if launch == "worker" else place.address_variables()
    own |= {"CUDA_VISIBLE_DEVICES": "10,0", "PYTHONUNBUFFERED": "1"}
    for name in (*own, reporting.LINE, reporting.CHECKPOINT, reporting.CONFIG, "PL_TRAINER_STRATEGY"):
        monkeypatch.setenv(name, "the worker's")
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    started: list[dict[str, str]] = []

    class Started:
        began = 0.0

        def __init__(self, words: Any, environment: dict[str, str], folder: str, *outputs: int, forks: bool) -> None:
            started.append(environment)
            for output in outputs:
                os.close(output)

        def poll(self) -> int:
            return 0

        def end(self) -> None: ...

        go_on = end

    monkeypatch.setattr(command_runner, "GuardedProcess", Started)
    scratch = Scratch()
    place = replace(place, folder=str(scratch.path))
    (scratch.path / "checkpoint").mkdir()
    gang: Any = SimpleNamespace(place=place, check=lambda: None, has_formed=lambda: True, broken="", is_over=True)
    program = ProgramCommand(words=("true",), metrics=Metrics(source="stdout"), launch=launch, rank=rank)
    runner = command_runner.CommandRunner(
        program, replace(SEGMENT, num_workers=2), str(tmp_path), gang, Environment(), scratch
    )
    with pytest.raises(TrialFailure, match="without a report"):
        list(runner.steps(1))
    runner.close()
    assert {name: started[0][name] for name in own} == own
    assert "the worker's" not in {started[0][name] for name in (reporting.LINE, reporting.CHECKPOINT, reporting.CONFIG)}
    assert started[0]["PL_TRAINER_STRATEGY"] == "the worker's", "a default only"
    assert started[0]["ACCELERATE_USE_CPU"] == "true", "else each worker trains alone where there is no GPU"
