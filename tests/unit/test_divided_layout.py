"""A worker of a divided model, whose gang is a fake: its places, its parts of a checkpoint, and how it builds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from rubberband.executor import CheckpointRef
from rubberband.executor.checkpoints import reference_to
from rubberband.executor.training.sampler import reseed
from rubberband.executor.training.sharding import fsdp, pieces
from rubberband.executor.training.sharding.fsdp import Sharded
from tests.builders.segments import SEGMENT
from tests.builders.trials import counted_trials

WORKERS = 4


def as_worker(rank: int) -> Any:
    """Let this process be one of four workers, whose collectives return at once; return their mesh."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=rank, world_size=WORKERS, store=FakeStore())
    return init_device_mesh("cpu", (WORKERS,))


@pytest.fixture(autouse=True)
def _leaves() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def divided(whole: torch.Tensor, mesh: Any) -> Any:
    """What this worker has of a tensor that is cut as `torch.chunk` cuts it."""
    cut, rank = torch.chunk(whole, mesh.size()), mesh.get_local_rank()
    own = cut[rank] if rank < len(cut) else whole[:0]
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())


@pytest.mark.parametrize(
    ("rows", "starts"), [(8, [0, 2, 4, 6]), (7, [0, 2, 4, 6]), (5, [0, 2, 4, 5]), (1, [0, 1, 1, 1])]
)
@pytest.mark.parametrize("rank", range(WORKERS))
def test_a_worker_has_its_place_also_where_rows_do_not_reach_the_last_ones(
    rows: int, starts: list[int], rank: int
) -> None:
    whole = torch.arange(2.0 * rows).view(rows, 2)
    like = divided(whole, as_worker(rank))
    assert fsdp._start(like) == (starts[rank], 0)
    assert torch.equal(fsdp._part_of(whole, like).to_local(), like.to_local())


def test_states_keep_their_type_where_weights_have_16_bits() -> None:
    like = divided(torch.ones(8, 2, dtype=torch.bfloat16), as_worker(1))
    state = torch.full((8, 2), 1 + 2**-20)
    assert torch.equal(fsdp._part_of(state, like).to_local(), state[:2])


def layout(rank: int, trial: Any = None, **words: Any) -> Any:
    """The layout of one worker of four."""
    gang = SimpleNamespace(rank=rank, num_workers=WORKERS, meet=lambda: None, copy=lambda tensors: None, **words)
    loop = SimpleNamespace(device=torch.device("cpu"), gang=gang, segment=SEGMENT, trial=trial)
    return Sharded(loop)  # type: ignore[arg-type]


def test_a_part_that_is_still_written_keeps_its_values(tmp_path: Path) -> None:
    mesh, told, may_write = as_worker(1), list[str](), threading.Event()
    made = layout(1, tell=lambda subject, text: told.append(subject))
    made._loop.own_state = lambda: None

    def save(iterations: int, payload: Any) -> CheckpointRef:
        assert may_write.wait(20)
        payload(to := tmp_path / str(iterations))
        return reference_to(to.as_uri(), to)

    threading.Timer(0.3, may_write.set).start()
    for iterations in (1, 2):
        weights = divided(torch.full((8, 2), float(iterations)), mesh)
        made._loop.states = lambda weights=weights: {"model": {"w": weights}}
        made.save_part(iterations, save, is_last=False)
    made.close()
    assert told == ["part 1", "part 2"]
    for iterations in (1, 2):
        places = pieces.members(tmp_path / str(iterations))
        at, size = places["rank-1.data"]
        content = (tmp_path / str(iterations)).read_bytes()[at : at + size]
        assert torch.equal(
            torch.frombuffer(bytearray(content), dtype=torch.float32), torch.full((4,), float(iterations))
        )


def test_an_evaluation_leaves_no_weights_whole_on_a_worker() -> None:
    from torch.distributed.fsdp import fully_shard

    from rubberband.executor.training.wrapping import Pass

    mesh, model = as_worker(0), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    made = layout(0)
    made.root = Pass(model)
    fully_shard(made.root, mesh=mesh)
    with torch.no_grad():
        seen = made.within(lambda: [isinstance(each, DTensor) for each in model.parameters()])
    assert not any(seen)
    assert all(isinstance(each, DTensor) for each in model.parameters())


class Drawing(counted_trials.Divided):
    """A model that draws what no checkpoint has, and looks at its weights."""

    def build_model(self, config: Any) -> nn.Module:
        self.drawn = torch.randn(3)
        model = nn.Linear(4, 4)
        assert model.weight.std().item() > 0
        return model


@pytest.mark.parametrize("rank", [0, 3])
def test_workers_that_build_in_turn_draw_alike(rank: int) -> None:
    reseed("setup", SEGMENT.seed)
    (alone := Drawing()).build_model({})
    as_worker(rank)
    made = layout(rank, trial := Drawing(), table=lambda row: [[0.0], [1.0], [1.0], [1.0]])
    reseed("setup", SEGMENT.seed)
    made.build()
    made.close()
    assert torch.equal(trial.drawn, alone.drawn)
