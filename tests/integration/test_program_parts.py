"""Checkpoints in parts: what the ranks of a gang save, on one machine and on several, in real processes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rubberband.executor import SegmentEnded, SegmentFailure, SegmentReport
from rubberband.executor.checkpoints.folders import unpack
from tests.builders.processes.segment_worker import Worker, gang_of
from tests.builders.sharded_program import FSDP
from tests.builders.waiting import eventually
from tests.integration.test_program_gangs import Trial, failures, losses

MEETS = """
    import os, pathlib, socket, sys, time, rubberband
    out, rank, size = pathlib.Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, lines = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), []
    if rank == 0:
        listener = socket.create_server(address, backlog=8)
        lines = [listener.accept()[0] for _ in range(size - 1)]
    while rank > 0 and not lines:
        try:
            lines = [socket.create_connection(address)]
        except OSError:
            time.sleep(0.01)
    def barrier():
        for line in lines:
            line.sendall(b"x") if rank else line.recv(1)
        for line in lines:
            line.recv(1) if rank else line.sendall(b"x")
"""
PARTS = f"""
    {MEETS.strip()}
    begin = int((out / "n").read_text()) if (out / "n").exists() else 0
    parts = sorted(path.name for path in out.glob("step-*/*"))
    for epoch in range(begin + 1, 9):
        barrier()  # as gradients are exchanged
        (step := out / f"step-{{epoch}}").mkdir(exist_ok=True)
        (step / f"part-{{rank}}").write_text(f"{{epoch}} of {{rank}}")
        if rank == 0:
            (out / "n").write_text(str(epoch))
        barrier()
        rubberband.report({{"loss": float(len(parts))}})
"""
"""Each rank trains with the others, and saves a part; the metric says how many parts a start has found."""


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    (tmp_path / "trial").mkdir()
    return Trial(tmp_path / "trial")


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Worker]]:
    """Four workers: the first and the third are on one machine, the others on another one."""
    with ExitStack() as stack:
        for number in range(2):
            (tmp_path / str(number)).mkdir()
        found = [
            stack.enter_context(gang_of(1, RUBBERBAND_LEASE=str(tmp_path / str(n % 2) / "lease"))) for n in range(4)
        ]
        yield [worker for [worker] in found]


def files_of(trial: Trial, there: Path) -> dict[str, str]:
    assert trial.last is not None
    assert trial.last.checkpoint is not None
    with trial.store.file(trial.last.checkpoint) as path:
        unpack(path, there)
    return {str(path.relative_to(there)): path.read_text() for path in sorted(there.rglob("*")) if path.is_file()}


def test_a_checkpoint_has_what_all_ranks_saved_on_all_machines(
    trial: Trial, machines: list[Worker], tmp_path: Path
) -> None:
    assert losses(trial.run(machines[:2], PARTS)[0]) == [0.0, 0.0]
    expected = {"n": "2", **{f"step-{n}/part-{rank}": f"{n} of {rank}" for n in (1, 2) for rank in range(2)}}
    assert files_of(trial, tmp_path / "first") == expected
    assert trial.last is not None
    assert trial.last.checkpoint is not None
    assert len(trial.last.checkpoint.parts) == 1
    assert losses(trial.run(machines, PARTS)[0]) == [4.0, 4.0]
    expected |= {"n": "4", **{f"step-{n}/part-{rank}": f"{n} of {rank}" for n in (3, 4) for rank in range(4)}}
    assert files_of(trial, tmp_path / "second") == expected
    assert losses(trial.run(machines[:1], PARTS)[0]) == [12.0, 12.0]
    assert trial.last.checkpoint.parts == (), "one machine has no part"


def test_a_part_that_is_gone_is_a_lost_checkpoint(trial: Trial, machines: list[Worker]) -> None:
    trial.run(machines[:2], PARTS)
    assert trial.last is not None
    assert trial.last.checkpoint is not None
    [part] = trial.last.checkpoint.parts
    trial.store.discard(part)
    found = failures(trial.run(machines[:2], PARTS))
    assert "is missing" in found[0].message
    assert all(failure.lost for failure in found.values() if not failure.secondary)


def test_a_gang_whose_program_ends_while_it_trains_iterations_again_has_ended(
    trial: Trial, machines: list[Worker]
) -> None:
    source = PARTS.replace("    begin =", "    if (out / 'n').exists(): sys.exit(0)\n    begin =", 1)
    unsaved = "if epoch > 1: barrier(), rubberband.report({'loss': 0.0})\n        if epoch > 1: continue"
    source = source.replace("barrier()  # as gradients are exchanged", f"barrier()\n        {unsaved}")
    trial.run(machines[:2], source)
    assert trial.last is not None
    assert (trial.last.iterations, trial.last.saved_iterations) == (2, 1)
    found = trial.run(machines[:2], source)
    assert isinstance(found[0][-1], SegmentEnded)
    assert found[1] == []


def test_ranks_that_save_nothing_on_their_machine_add_no_part(trial: Trial, machines: list[Worker]) -> None:
    alone = PARTS.replace('(step / f"part-{rank}").write_text', 'rank == 0 and (step / "all").write_text')
    for _ in range(2):  # what they started with is no part either
        trial.run(machines[:2], alone)
        assert trial.last is not None
        assert trial.last.checkpoint is not None
        assert trial.last.checkpoint.parts == ()


@pytest.mark.long
def test_a_sharded_program_trains_alike_on_gangs_of_all_sizes_on_two_machines(
    tmp_path: Path, machines: list[Worker], trial: Trial
) -> None:
    (tmp_path / "alone").mkdir()
    expected = losses(Trial(tmp_path / "alone").run(machines[:1], FSDP, until_iterations=8)[0])
    found = [loss for size in (2, 4, 1, 2) for loss in losses(trial.run(machines[:size], FSDP)[0])]
    assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_sharded_program_goes_on_after_kill_9_from_the_last_whole_checkpoint(
    tmp_path: Path, trial: Trial, rank: int
) -> None:
    for name in ("alone", "0", "1"):
        (tmp_path / name).mkdir()
    slow = FSDP.replace(
        "rubberband.report(",
        f"open(f'{tmp_path}/at-{{rank}}', 'w').write(f'{{epoch}} {{os.getpid()}}')\n        rubberband.report(",
    )
    with gang_of(2, RUBBERBAND_LEASE=str(tmp_path / "0" / "lease")) as workers:
        expected = losses(Trial(tmp_path / "alone").run(workers[:1], FSDP, until_iterations=8)[0])
        seen = losses(trial.run(workers, slow)[0])
        found: list[list[object]] = []
        thread = threading.Thread(target=lambda: found.extend(trial.run(workers, slow, until_iterations=8)))
        (tmp_path / f"at-{rank}").unlink()
        thread.start()
        at = tmp_path / f"at-{rank}"
        eventually(lambda: at.exists() and at.read_text().startswith("4 "), "its fourth iteration", within_s=120.0)
        os.kill(int(at.read_text().split()[1]), signal.SIGKILL)
        thread.join(60)
    assert not thread.is_alive()
    assert any(isinstance(items[-1], SegmentFailure) for items in found if items)
    reported = [item for item in found[0] if isinstance(item, SegmentReport)]
    seen += losses(reported)
    assert trial.last is not None
    last = trial.last if not reported else [each for each in reported if each.checkpoint is not None][-1]
    trial.last = last
    with gang_of(1) as workers:
        seen = [*seen[: last.iterations], *losses(trial.run(workers, FSDP, until_iterations=8)[0])]
    assert seen == pytest.approx(expected, abs=1e-9)
