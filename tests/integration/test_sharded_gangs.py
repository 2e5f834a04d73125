"""Divided models on gangs of real processes: they learn what whole ones learn, through every change of the gang."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from rubberband.executor import CheckpointStore, SegmentFailure, SegmentReport, run_segment
from rubberband.executor.training.checkpoint import read
from tests.builders import segments, trials
from tests.builders.processes.segment_worker import Worker, gang_of, resized, run_again, run_gang, run_unequal
from tests.builders.segments import failure, reports

SEGMENT = replace(segments.SEGMENT, until_iterations=6, max_iterations=6)


def trial(name: str) -> Any:
    return trials.entrypoint(f"sharded_trials:{name}")


def content(store: CheckpointStore, report: SegmentReport) -> dict[str, Any]:
    """The checkpoint of a report with all of its files, whole."""
    assert report.checkpoint is not None
    with store.file(report.checkpoint) as path:
        found: dict[str, Any] = read(path)
    return found


def assert_same(
    store: CheckpointStore, got: list[SegmentReport], expected: list[SegmentReport], tolerance: float
) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.metrics == pytest.approx(dict(other.metrics), rel=10 * tolerance)
    ones, others = content(store, got[-1]), content(store, expected[-1])
    for part in ("model", "optimizer"):
        torch.testing.assert_close(ones[part], others[part], rtol=0, atol=tolerance)
    for part in ("sampler", "scheduler", "parameters", "steps"):
        assert ones[part] == others[part]


def undivided(store: CheckpointStore, **config: Any) -> list[SegmentReport]:
    return reports(list(run_segment(trial("Whole"), replace(SEGMENT, config=config), store)))


@pytest.mark.parametrize(
    ("dtype", "tolerance", "config"),
    [
        ("float64", 1e-12, {}),
        ("float32", 1e-6, {}),
        ("float64", 1e-12, {"experts": True}),
        ("float64", 1e-12, {"shares": True}),
        ("float64", 1e-12, {"leaves": True}),
        ("float64", 1e-12, {"wraps": True}),
        pytest.param("float64", 1e-12, {"thaws": True, "optimizer": "sgd"}, marks=pytest.mark.long),
        pytest.param("float64", 1e-12, {"reads": True}, marks=pytest.mark.long),
        pytest.param("float64", 1e-12, {"forgets": True}, marks=pytest.mark.long),
        *(
            pytest.param("float64", 1e-12, {"optimizer": name}, marks=pytest.mark.long)
            for name in ("Adagrad", "RMSprop", "Adadelta", "Adamax", "RAdam")
        ),
    ],
)
def test_a_divided_model_learns_on_two_one_and_two_what_a_whole_one_learns_on_one(
    workers: list[Worker], store: CheckpointStore, dtype: str, tolerance: float, config: dict[str, Any]
) -> None:
    config = {"dtype": dtype, **config}
    parts = resized(workers, trial("Divided"), replace(SEGMENT, config=config), store, [(2, 2), (1, 3), (2, 6)])
    assert [len(part.checkpoint.parts) for part in parts if part.checkpoint] == [1, 1, 0, 1, 1, 1]
    assert_same(store, parts, undivided(store, **config), tolerance)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")  # torch's own
@pytest.mark.parametrize(
    ("config", "tolerance"),
    [
        ({"words": {"compile": True}}, 1e-10),
        ({"words": {"compile": True}, "experts": True}, 1e-10),
        ({"words": {"precision": "bf16"}}, 2e-2),
    ],
)
def test_a_divided_model_is_compiled_and_computes_in_16_bits(
    workers: list[Worker], store: CheckpointStore, config: dict[str, Any], tolerance: float
) -> None:
    config = {"dtype": "float32" if tolerance > 1e-3 else "float64", **config}
    parts = resized(workers, trial("Divided"), replace(SEGMENT, config=config), store, [(2, 2), (1, 3), (2, 6)])
    assert_same(store, parts, undivided(store, **config), tolerance)


SHARES = [[11, 5], [0, 16], [16, 0], [3, 13], [8, 8]]


def test_a_divided_model_learns_with_any_shares(workers: list[Worker]) -> None:
    segment = replace(SEGMENT, until_iterations=3, metric="train_loss")
    losses, weights, _, _ = run_unequal(trial("Whole"), segment, [])
    first, second = run_gang(workers, trial("Divided"), segment, SHARES)
    assert first[0] == pytest.approx(losses, rel=1e-12)
    for each in (first, second):
        torch.testing.assert_close(each[1], weights, rtol=0, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("sizes", [[(2, 2), (4, 4), (1, 6)], [(4, 3), (3, 6)]], ids=["2-4-1", "4-3"])
def test_a_divided_model_fits_gangs_of_any_size(store: CheckpointStore, sizes: list[tuple[int, int]]) -> None:
    with gang_of(4) as workers:
        parts = resized(workers, trial("Divided"), SEGMENT, store, sizes)
    assert_same(store, parts, undivided(store), 1e-12)


def test_a_trial_divides_and_evaluates_by_itself_and_begins_whole(
    workers: list[Worker], store: CheckpointStore
) -> None:
    """The checkpoint of a whole model is taken over, and that of a divided one by a whole one."""
    first = reports(list(run_segment(trial("Whole"), replace(SEGMENT, until_iterations=2), store)))
    part = replace(SEGMENT, from_iterations=2, until_iterations=4, checkpoint=first[-1].checkpoint)
    (_, *second), rest = run_gang(workers, trial("Divided"), part, store)
    assert rest == []
    third = run_segment(trial("Whole"), replace(SEGMENT, from_iterations=4, checkpoint=second[-1].checkpoint), store)
    assert_same(store, [*first, *second, *reports(list(third))], undivided(store), 1e-12)
    by_hand = resized(workers, trial("ByHand"), SEGMENT, store, [(2, 3), (1, 4), (2, 6)])
    torch.testing.assert_close(
        content(store, by_hand[-1])["model"], content(store, undivided(store)[-1])["model"], rtol=0, atol=1e-12
    )
    assert by_hand[0].metrics["loss"] > by_hand[-1].metrics["loss"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_runs_out_of_memory_begins_again_with_all_others(
    workers: list[Worker], store: CheckpointStore, rank: int
) -> None:
    segment = replace(SEGMENT, config={"fits": 2, "at": rank}, until_iterations=3)
    found, failures = run_again(workers, trial("Divided"), segment, store)
    assert failures == []
    assert_same(store, found, undivided(store)[:3], 1e-12)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", ["raise_on_rank", "killed_rank"])
def test_a_worker_that_fails_ends_the_others(store: CheckpointStore, fault: str, rank: int) -> None:
    with gang_of(2) as workers:
        ends = run_gang(workers, trial("Divided"), replace(SEGMENT, config={fault: rank}), store)
    failures = [None if end is None else failure(end) for end in ends]
    own, other = failures[rank], failures[1 - rank]
    assert isinstance(other, SegmentFailure)
    assert other.secondary
    if fault == "raise_on_rank":
        assert own is not None
        assert "no more" in own.message
    else:
        assert own is None


@pytest.mark.parametrize(("version", "is_refused"), [("2.6.0+cpu", True), ("2.7.1", False), ("2.15.0", False)])
def test_a_torch_that_cannot_divide_is_refused(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, version: str, is_refused: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    found = list(run_segment(trial("Divided"), replace(SEGMENT, until_iterations=1), store))
    assert isinstance(found[-1], SegmentFailure) is is_refused
    if is_refused:
        assert failure(found).message == (
            'sharding = "fsdp" needs torch 2.7 or later on CPUs, and this is 2.6.0+cpu; install a later one'
        )


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("OwnStep", {}, "own step"),
    *[
        ("Divided", {"words": {word: value}}, word)
        for word, value in {
            "precision": "fp16",
            "gradient_compression": "bf16",
            "static_graph": True,
            "find_unused_parameters": True,
            "channels_last": True,
            "eval_on_all_ranks": True,
        }.items()
    ],
    *[("Divided", {"optimizer": name}, name) for name in ("Adafactor", "LBFGS", "Muon", "Rprop")],
    ("Divided", {"layer": ["SyncBatchNorm", 3]}, "SyncBatchNorm"),
    ("Divided", {"layer": ["LazyLinear", 3]}, "lazy"),
    ("Divided", {"counts": []}, r"cannot divide count of shape ()"),
    ("Divided", {"counts": [2], "type": "complex64"}, "cannot divide count of torch.complex64"),
    ("Divided", {"counts": [2], "type": "float16"}, "and count of torch.float16 in one part"),
    ("Whole", {"words": {"sharding": "fsdp"}}, "too late; set it in the class"),
]


@pytest.mark.parametrize(("name", "config", "word"), REFUSED, ids=[word for _, _, word in REFUSED])
def test_a_trial_that_cannot_be_divided_is_refused_on_one_worker_already(
    store: CheckpointStore, name: str, config: dict[str, Any], word: str
) -> None:
    found = failure(list(run_segment(trial(name), replace(SEGMENT, config=config), store)))
    assert word in found.message
    assert re.search(r"; (use|write|leave|set|pass|give|keep) |; .*; set", found.message), found.message


@pytest.mark.parametrize(
    ("name", "config", "line"),
    [
        ("ByHand", {"keeps": "divided"}, "state_dict.*kept/0.*divided among the workers"),
        ("Divided", {"beside": True}, "is trained and not divided"),
        ("Divided", {"adds": True}, "more.weight is trained and not divided"),
        ("ByHand", {"shares": True}, "blocks.0.up.weight and blocks.2.up.weight, which are one parameter"),
        ("Divided", {"calls": "forward"}, r"call the part, and not its forward\(\)"),
        ("Divided", {"calls": "in place"}, "changes its input in place: set inplace=False"),
        ("Divided", {"calls": "gradients"}, r"loss\(\) computes gradients itself"),
        *[
            ("Divided", {"writes": each}, "writes to a part of last.weight, .* mul_|assigns to .data of last.weight")
            for each in ("a row", "a row of data", "init", "narrow", "data")
        ],
        ("Divided", {"optimizer": "summing"}, "state/0/sum is not divided as weights are, but .*AdamW or SGD$"),
    ],
)
def test_tensors_that_only_one_worker_would_have_are_refused(
    workers: list[Worker], store: CheckpointStore, name: str, config: dict[str, Any], line: str
) -> None:
    ends = run_gang(workers, trial(name), replace(SEGMENT, config=config), store)
    assert any(re.search(line, failure(end).message) for end in ends), [failure(end).message for end in ends]


@pytest.mark.parametrize("writes", ["in place", "a copy", "init of all"])
def test_a_hook_changes_weights_as_a_whole_and_copies(
    workers: list[Worker], store: CheckpointStore, writes: str
) -> None:
    (_, *found), *_ = run_gang(workers, trial("Divided"), replace(SEGMENT, config={"writes": writes}), store)
    assert all(isinstance(each, SegmentReport) for each in found), found
