"""Programs in gangs: torch's DDP on gloo, in real processes, resized between segments; and how gangs end."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rubberband.executor import Entrypoint, SegmentFailure, SegmentReport, open_store
from rubberband.values.command import Launch, Metrics, ProgramCommand, words_of
from tests.builders.processes.segment_worker import Worker, gang_of, run_gang
from tests.builders.segments import SEGMENT
from tests.builders.waiting import eventually

DDP = """
    import os, sys, torch, rubberband
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model, path = torch.nn.Linear(8, 1).double(), os.path.join(sys.argv[1], "state.pt")
    optimizer, begin = torch.optim.Adam(model.parameters(), lr=0.05), 0
    if os.path.exists(path):
        state = torch.load(path)
        model.load_state_dict(state["model"]), optimizer.load_state_dict(state["optimizer"])
        begin = state["epoch"]
    ddp = DistributedDataParallel(model)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    y = x.sum(1, keepdim=True)
    for epoch in range(begin + 1, 9):
        for batch in torch.arange(64).split(16):
            mine = batch[rank::size]
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(ddp(x[mine]), y[mine]).backward()
            optimizer.step()
        with torch.no_grad():
            loss = torch.nn.functional.mse_loss(model(x), y).item()
        if rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, path)
        rubberband.report({"loss": loss})
"""


TORCHRUN = (
    "python -m torch.distributed.run --nproc-per-node ${gpus} --nnodes ${machines} --node-rank ${machine_rank} "
    "--master-addr ${master_addr} --master-port ${master_port}"
)


class Trial:
    """A program in a folder, and the store of its checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = open_store(str(folder / "store"))
        self.last: SegmentReport | None = None

    def run(
        self, workers: Sequence[Worker], source: str, words: str = "python train.py ${checkpoint}", **changes: Any
    ) -> list[Any]:
        """Run a segment of the program on workers, from where the last one ended; return what each of them got."""
        (self.folder / "train.py").write_text(textwrap.dedent(source))
        launch: Launch = changes.pop("launch", "worker")
        metrics: Metrics = changes.pop("metrics", Metrics())
        command = ProgramCommand(
            words=words_of(words.replace("python", sys.executable, 1)), launch=launch, metrics=metrics
        )
        entrypoint = Entrypoint(module="", attribute="", search_path=(str(self.folder),), command=command)
        begin = 0 if self.last is None else self.last.iterations
        checkpoint = None if self.last is None else self.last.checkpoint
        segment = replace(SEGMENT, from_iterations=begin, checkpoint=checkpoint, max_iterations=8)
        segment = replace(segment, **{"until_iterations": begin + 2, **changes})
        found = run_gang(workers, entrypoint, segment, self.store)
        reports = [item for item in found[0] or () if isinstance(item, SegmentReport)]
        self.last = reports[-1] if reports else self.last
        return found

    def pids(self) -> list[int]:
        """Return the processes of the program that have written their number down."""
        return [int(path.read_text()) for path in self.folder.glob("pid-*")]


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path)


def losses(items: list[Any]) -> list[float]:
    return [item.metrics["loss"] for item in items if isinstance(item, SegmentReport)]


def failures(found: list[Any]) -> dict[int, SegmentFailure]:
    return {rank: items[-1] for rank, items in enumerate(found) if items and isinstance(items[-1], SegmentFailure)}


@pytest.mark.long
def test_a_ddp_program_trains_alike_on_gangs_of_all_sizes(tmp_path: Path, workers: list[Worker]) -> None:
    alone, resized = Trial(tmp_path / "alone"), Trial(tmp_path / "resized")
    expected = losses(alone.run(workers[:1], DDP, until_iterations=6)[0])
    found = [loss for size in (1, 2, 1) for loss in losses(resized.run(workers[:size], DDP)[0])]
    assert found == pytest.approx(expected, abs=1e-6)


def test_a_program_whose_ranks_all_print_trains_on(trial: Trial, workers: list[Worker]) -> None:
    source = """
        import os, sys, time, torch.distributed as dist
        dist.init_process_group("gloo")
        for epoch in range(1, 3):
            time.sleep(0.12)
            print(f"epoch {epoch} loss={1 / epoch}", flush=True)
            dist.barrier()
    """
    assert losses(trial.run(workers[:2], source, metrics=Metrics(source="stdout"))[0]) == [1.0, 0.5]


def test_each_worker_gets_the_variables_of_torchrun(trial: Trial, workers: list[Worker]) -> None:
    source = """
        import json, os, pathlib, rubberband, torch.distributed as dist
        dist.init_process_group("gloo")
        names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK MASTER_ADDR MASTER_PORT"
        pathlib.Path(os.environ["RANK"]).write_text(json.dumps({name: os.environ[name] for name in names.split()}))
        dist.barrier()
        rubberband.report({"loss": 1})
    """
    trial.run(workers, source, until_iterations=1)
    first, second = (json.loads((trial.folder / str(rank)).read_text()) for rank in range(2))
    assert {name: second[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")} == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "0",
    }
    assert (first["MASTER_ADDR"], first["MASTER_PORT"]) == (second["MASTER_ADDR"], second["MASTER_PORT"])


@pytest.mark.long
def test_a_launcher_runs_once_a_machine(trial: Trial, workers: list[Worker]) -> None:
    words = f"{TORCHRUN} train.py ${{checkpoint}}"
    expected = losses(trial.run(workers[:1], DDP)[0])
    trial.last = None
    assert losses(trial.run(workers, DDP, words, launch="machine")[0]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.long
def test_a_metric_that_each_process_of_a_launcher_prints_is_refused(trial: Trial, workers: list[Worker]) -> None:
    source = DDP.replace('rubberband.report({"loss": loss})', 'print(f"loss={loss}"); import time; time.sleep(0.1)')
    words, printed = f"{TORCHRUN} train.py ${{checkpoint}}", Metrics(source="stdout")
    [*_, failure] = trial.run(workers, source, words, launch="machine", metrics=printed)[0]
    assert "prints loss twice within 0.05 s, as each of its 2 processes does" in failure.message
    trial.last = None
    words = f"{TORCHRUN} --local-ranks-filter 0 train.py ${{checkpoint}}"
    assert len(losses(trial.run(workers, source, words, launch="machine", metrics=printed)[0])) == 2


def test_workers_that_train_each_on_its_own_are_refused(trial: Trial, workers: list[Worker]) -> None:
    found = trial.run(workers, "import rubberband\nfor _ in range(9): rubberband.report({'loss': 1})")
    assert "2 workers trained each on its own: call torch.distributed.init_process_group()" in found[0][-1].message
    assert found[1][-1].secondary


@pytest.mark.by_default(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_is_the_failure(trial: Trial, workers: list[Worker], rank: int) -> None:
    source = f"""
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if dist.get_rank() == {rank}:
            raise ValueError("bad data")
        dist.all_reduce(torch.ones(1))
    """
    found = failures(trial.run(workers, source))
    assert "ValueError: bad data" in found[rank].message
    assert not found[rank].secondary
    assert found[1 - rank].secondary


@pytest.mark.parametrize(
    "victim", ["child", *(pytest.param(each, marks=pytest.mark.long) for each in ("guard", "worker"))]
)
def test_nothing_is_left_of_a_gang_whose_process_is_killed(trial: Trial, victim: str) -> None:
    source = """
        import os, pathlib, time, torch.distributed as dist
        dist.init_process_group("gloo")
        pathlib.Path(f"guard-{dist.get_rank()}").write_text(str(os.getppid()))
        pathlib.Path(f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
        time.sleep(1000)
    """
    with gang_of(2) as workers:
        found = list[Any]()
        thread = threading.Thread(target=lambda: found.extend(trial.run(workers, source)))
        thread.start()
        eventually(lambda: len(trial.pids()) == 2 and all(path.read_text() for path in trial.folder.glob("pid-*")))
        pids = trial.pids()
        guards = [int(path.read_text()) for path in trial.folder.glob("guard-*")]
        second = int((trial.folder / "pid-1").read_text()), int((trial.folder / "guard-1").read_text()), workers[1].pid
        os.kill(second[("child", "guard", "worker").index(victim)], signal.SIGKILL)
        began = time.monotonic()
        thread.join(30)
        assert not thread.is_alive()
        eventually(lambda: not any(Path("/proc", str(pid)).exists() for pid in [*pids, *guards]))
        print(f"{victim}: ended in {time.monotonic() - began:.2f} s")
    assert failures(found)[0].secondary


@pytest.mark.long
@pytest.mark.parametrize("phase", ["starts", "saves", "stops"])
def test_nothing_is_left_of_a_program_whose_worker_is_killed_as_it(trial: Trial, phase: str) -> None:
    source = f"""
        import os, pathlib, signal, sys, time
        def here(phase):
            if phase == {phase!r}:
                pathlib.Path("draft").write_text(f"{{os.getpid()}} {{os.getppid()}}")
                os.rename("draft", "here")
                time.sleep(1000)
        here("starts")
        signal.signal(signal.SIGTERM, lambda *_: here("stops"))
        with open(pathlib.Path(sys.argv[1], "state"), "w") as file:
            file.write("half")
            file.flush()
            here("saves")
        import rubberband
        rubberband.report({{"loss": 1.0}})
        time.sleep(1000)
    """
    with gang_of(1) as (worker,):
        thread = threading.Thread(target=lambda: trial.run([worker], source, until_iterations=1))
        thread.start()
        eventually((trial.folder / "here").exists, "the phase")
        pids = [int(word) for word in (trial.folder / "here").read_text().split()]
        os.kill(worker.pid, signal.SIGKILL)
        thread.join(30)
        eventually(lambda: not any(Path("/proc", str(pid)).exists() for pid in pids), "the end", within_s=5.0)
        assert trial.last is None or trial.last.iterations == 1
