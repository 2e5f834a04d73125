"""The pieces of divided models: any cut of a tensor is read as any other; models without weights; what is divided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rubberband.errors import CheckpointError
from rubberband.executor import CheckpointStore, run_segment
from rubberband.executor.checkpoints import folders
from rubberband.executor.training.failures import describe
from rubberband.executor.training.sharding import fsdp, pieces
from rubberband.executor.training.sharding.pieces import Divided, Piece, Whole
from rubberband.executor.training.sharding.weightless import without_weights
from rubberband.values.adaptive import AdaptiveBatch
from rubberband.values.asynchronous import AsyncTraining
from rubberband.values.balance import Balance
from tests.builders import trials
from tests.builders.segments import SEGMENT, failure

SIZES = st.integers(0, 9)


def cuts(size: int, parts: int) -> list[tuple[int, int]]:
    """Begin and length of each part, as `torch.chunk` and FSDP divide a dimension."""
    length = -(-size // parts)
    return [(min(size, at * length), max(0, min(length, size - at * length))) for at in range(parts)]


@settings(max_examples=200, deadline=None)
@given(st.tuples(SIZES, SIZES), st.integers(1, 5), st.integers(1, 5), st.booleans(), st.booleans())
def test_a_tensor_cut_for_one_gang_is_read_by_another(
    shape: tuple[int, int], before: int, after: int, is_turned: bool, is_turned_then: bool
) -> None:
    whole = torch.arange(float(shape[0] * shape[1])).view(shape)
    found = []
    for start, size in cuts(shape[is_turned], before):
        place = (0, start) if is_turned else (start, 0)
        found.append(Piece(shape, place, whole.narrow(int(is_turned), start, size)))
    divided = Divided(found)
    assert divided.is_complete
    torch.testing.assert_close(divided.whole(), whole, rtol=0, atol=0)
    for start, size in cuts(shape[is_turned_then], after):
        expected = whole.narrow(int(is_turned_then), start, size)
        box = torch.full_like(expected, torch.nan)
        divided.fill(box, (0, start) if is_turned_then else (start, 0))
        torch.testing.assert_close(box, expected, rtol=0, atol=0)


def write(folder: Path, workers: int, **changes: Any) -> list[Path]:
    """The files of a checkpoint of that many workers."""
    whole, files = torch.arange(12.0).view(6, 2), []
    for rank, (start, size) in enumerate(cuts(6, workers)):
        own = {"model/w": Piece((6, 2), (start, 0), whole[start : start + size])}
        words = {"iterations": 1, "rank": rank, "workers": workers, "wait": lambda: None, **changes}
        files.append(folder / str(rank))
        pieces.write({"model": {"w": Whole("model/w")}}, own, files[-1], **words)
    return files


def test_a_checkpoint_that_lacks_a_file_is_not_read(tmp_path: Path) -> None:
    first, *parts = write(tmp_path, 3)
    assert pieces.read_whole(first, parts)["model"]["w"].sum() == 66.0
    assert pieces.read_whole(first.read_bytes(), [part.read_bytes() for part in parts])["model"]["w"].sum() == 66.0
    for some in (parts[:1], parts[1:], []):
        with pytest.raises(CheckpointError, match=r"is of 3 workers, and lacks rank-\d.json; a file of it is missing"):
            pieces.read_whole(first, some)
    with pytest.raises(CheckpointError, match=r"lacks state.pt|lacks rank-0"):
        pieces.read_whole(parts[0], parts[1:])


def test_tensors_of_several_types_are_read_as_they_were_written(tmp_path: Path) -> None:
    tensors = {str(kind): torch.arange(3).to(kind) for kind in (torch.int8, torch.float64, torch.bool, torch.bfloat16)}
    own = {name: Piece((3,), (0,), each) for name, each in tensors.items()}
    state = {name: Whole(name) for name in tensors}
    pieces.write(state, own, tmp_path / "0", iterations=1, rank=0, workers=1, wait=lambda: None)
    torch.testing.assert_close(pieces.read_whole(tmp_path / "0"), tensors, rtol=0, atol=0)


def test_a_part_is_written_when_its_copy_is_there(tmp_path: Path) -> None:
    copy = torch.zeros(3)
    own = {"w": Piece((3,), (0,), copy)}
    pieces.write({"w": Whole("w")}, own, tmp_path / "0", iterations=1, rank=0, workers=1, wait=lambda: copy.fill_(7))
    assert pieces.read_whole(tmp_path / "0")["w"].tolist() == [7.0] * 3


def test_an_operation_that_torch_cannot_do_with_divided_weights_names_optimizers_that_it_can() -> None:
    error = RuntimeError("aten.pow_.Scalar: in-place operations that require placement changes are not supported.")
    assert describe(error, in_gang=True).message.endswith(
        "with divided weights; use an optimizer that treats each element alone, such as AdamW or SGD"
    )


def changed_rows(change: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    original = pieces._write_data

    def write_data(*given: Any) -> list[dict[str, Any]]:
        rows = original(*given)
        for row in rows:
            change(row)
        return rows

    return write_data


def no_such_tensor(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a newer format,\n  in two lines")


UNREADABLE: dict[str, tuple[Any, str, Any, str]] = {
    "format": (folders, "FORMAT", 2, r"has format 2; this version reads format 1"),
    "state": (None, "", None, r"a newer format, in two lines"),
    "type": (pieces, "_write_data", {"dtype": "float3"}, r"model/w has the unknown type float3"),
    "word": (pieces, "_write_data", {"dtype": "nn"}, r"model/w has the unknown type nn"),
    "shape": (pieces, "_write_data", {"size": [5, 7]}, r"RuntimeError"),
    "place": (pieces, "_write_data", {"at": 2**40}, r"RuntimeError|IndexError"),
    "key": (pieces, "_write_data", None, r"KeyError: 'start'"),
    "data": (pieces, "_DATA", ".later", r"KeyError: 'rank-0.data'"),
}
"""A change of a file, and the reason in the refusal."""


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_checkpoint_of_another_version_that_cannot_be_read_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    module, name, value, reason = UNREADABLE[case]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "9.1.0")
        if name == "_write_data":
            patch.setattr(pieces, name, changed_rows(lambda row: row.update(value) if value else row.pop("start")))
        elif module is not None:
            patch.setattr(module, name, value)
        first, *parts = write(tmp_path, 2)
    if module is None:
        monkeypatch.setattr(torch, "load", no_such_tensor)
    with pytest.raises(CheckpointError, match=reason) as refused:
        pieces.read(first, parts)
    line = str(refused.value)
    assert "\n" not in line
    if case != "format":
        assert line.endswith("; it is of torch 9.1.0: install that version")
        assert line.startswith(f"the checkpoint cannot be read by torch {torch.__version__} (")


def test_a_checkpoint_whose_worker_has_no_piece_of_a_tensor_is_refused(tmp_path: Path) -> None:
    first, *parts = write(tmp_path, 2)
    pieces.write(None, {}, parts[0], iterations=1, rank=1, workers=2, wait=lambda: None)
    with pytest.raises(CheckpointError, match="has only a part of model/w; a file of it is missing"):
        pieces.read(first, parts)


def test_a_trial_whose_checkpoint_is_of_another_version_fails_in_one_line(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = store.save(4, 2, lambda to: write(to.parent, 1)[0].rename(to) and None)
    segment = replace(SEGMENT, from_iterations=2, checkpoint=ref)
    monkeypatch.setattr(torch, "load", no_such_tensor)
    found = failure(list(run_segment(trials.entrypoint("sharded_trials:Divided"), segment, store)))
    assert (found.kind, found.lost) == ("checkpoint", False)
    assert "a newer format, in two lines" in found.message


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.layers[0].weight
        self.scale = nn.Parameter(torch.randn(3))
        self.register_buffer("shift", torch.randn(3))


class Random(Plain):
    """Draws what no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = torch.randn(3, 3)


class Forgetful(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.randn(3), persistent=False)


class Looking(Plain):
    def __init__(self) -> None:
        super().__init__()
        assert self.scale.std().item() > 0


class Constant(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.ones(3, 3).tril()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"balance": Balance(policy="paper")}, "has equal shares of a batch, and batch.balance.policy is paper; set"),
        ({"batch": AdaptiveBatch()}, "does not go with batch.policy: goodput; set"),
        ({"training": AsyncTraining()}, "does not go with training.mode: async; set"),
    ],
    ids=["paper", "goodput", "async"],
)
def test_another_way_to_divide_a_batch_or_a_model_is_refused_before_it_trains(
    store: CheckpointStore, changes: dict[str, Any], line: str
) -> None:
    entrypoint = trials.entrypoint("sharded_trials:Divided")
    assert line in failure(list(run_segment(entrypoint, replace(SEGMENT, **changes), store))).message


def test_a_model_is_built_without_weights_unless_it_would_be_another() -> None:
    model = without_weights(Plain)
    assert all(each.is_meta for each in model.parameters())
    assert not model.shift.is_meta
    assert model.tied.weight is model.layers[0].weight
    assert nn.Linear(1, 1).weight.device.type == "cpu"
    for kind in (Random, Forgetful, Looking, Constant):
        assert without_weights(kind) is None


def test_parts_are_the_outermost_repeated_layers() -> None:
    block = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    other = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.LayerNorm(2))
    model = nn.ModuleDict(
        {"blocks": nn.ModuleList([block, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))]), "other": other}
    )
    assert fsdp.repeated(model) == [*model["blocks"]]
    assert fsdp.repeated(nn.Linear(2, 2)) == []
