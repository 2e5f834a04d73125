"""Gangs of real processes: a trial learns the same on any number of workers, and its failures are told apart."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from rubberband.executor import Feed, SegmentFailure, SegmentReport, SegmentStarted, reseed, run_segment
from rubberband.executor.training.metrics import EvalLoader
from tests.builders import segments, trials
from tests.builders.processes.segment_worker import Worker, run_gang, run_unequal
from tests.builders.segments import content, reports

REGRESSION = trials.entrypoint("segment_trials:Regression")
ACCUMULATING = trials.entrypoint("segment_trials:Accumulating")
SUMMING = trials.entrypoint("segment_trials:Summing")
WIDE = trials.entrypoint("segment_trials:Wide")
QUASI = trials.entrypoint("segment_trials:Quasi")
WEIGHED = trials.entrypoint("segment_trials:Weighed")
SYNCED = trials.entrypoint("segment_trials:Synced")
NUM_WORKERS = 3
SEGMENT = replace(segments.SEGMENT, until_iterations=6)


@pytest.mark.parametrize(
    ("entrypoint", "config", "tolerance"),
    [
        (REGRESSION, {"dtype": "float64"}, 1e-10),
        (REGRESSION, {"dtype": "float32"}, 1e-4),
        (ACCUMULATING, {"optimizer": "adam", "scheduler": "plateau"}, 1e-10),
        (REGRESSION, {"words": {"gradient_clip_norm": 0.2, "static_graph": True}}, 1e-10),
        (ACCUMULATING, {"words": {"gradient_clip_norm": 0.2, "static_graph": True}}, 1e-10),
        pytest.param(
            REGRESSION,
            {"words": {"compile": True}},
            1e-10,
            marks=[pytest.mark.long, pytest.mark.filterwarnings("ignore::DeprecationWarning")],  # torch's own
        ),
        (REGRESSION, {"words": {"gradient_compression": "bf16"}}, 1e-2),
        (REGRESSION, {"dtype": "float32", "words": {"precision": "bf16"}}, 2e-2),
        (ACCUMULATING, {"dtype": "float32", "words": {"precision": "fp16", "gradient_clip_norm": 0.2}}, 2e-2),
    ],
)
def test_a_resized_trial_learns_what_one_never_resized_learns(workers, store, entrypoint, config, tolerance):
    whole = reports(list(run_segment(entrypoint, replace(SEGMENT, config=config), store)))

    parts: list[SegmentReport] = []
    for num_workers, until in ((1, 2), (2, 4), (3, 5), (1, 6)):
        before = parts[-1] if parts else None
        segment = replace(
            SEGMENT,
            config=config,
            from_iterations=len(parts),
            until_iterations=until,
            checkpoint=before and before.checkpoint,
        )
        if num_workers == 1:
            parts += reports(list(run_segment(entrypoint, segment, store)))
        else:
            first, *others = run_gang(workers[:num_workers], entrypoint, segment, store)
            parts += reports(first)
            assert others == [[]] * (num_workers - 1)

    assert [report.iterations for report in parts] == [1, 2, 3, 4, 5, 6]
    for straight, resized in zip(whole, parts, strict=True):
        assert set(resized.metrics) == {"loss", "train_loss"}
        assert resized.metrics == pytest.approx(dict(straight.metrics), rel=tolerance)
    expected, got = content(store, whole[-1]), content(store, parts[-1])
    for name, weight in expected["model"].items():
        torch.testing.assert_close(got["model"][name], weight, rtol=tolerance, atol=tolerance)
    assert got["sampler"] == expected["sampler"] == (6, 0)


def test_a_gang_ends_with_the_iteration_in_which_rank_0_says_so(workers, store):
    ending = trials.entrypoint("segment_trials:Ending")
    alone = reports(list(run_segment(ending, SEGMENT, store)))
    first, *others = run_gang(workers[:2], ending, SEGMENT, store)
    found = reports(first)
    assert others == [[]]
    assert [(report.iterations, report.ended) for report in found] == [(1, False), (2, True)]
    assert [dict(report.metrics) for report in found] == [pytest.approx(dict(report.metrics)) for report in alone]
    assert content(store, found[-1])["iterations"] == 2


def test_weights_metrics_and_states_do_not_depend_on_the_gang(workers, store):
    whole = reports(list(run_segment(WEIGHED, SEGMENT, store)))
    (first, second) = reports(run_gang(workers[:2], WEIGHED, replace(SEGMENT, until_iterations=2), store)[0])
    rest = replace(SEGMENT, from_iterations=2, checkpoint=second.checkpoint)
    resized = [first, second, *reports(run_gang(workers, WEIGHED, rest, store)[0])]
    for straight, other in zip(whole, resized, strict=True):
        assert set(other.metrics) == {"loss", "twice", "train_loss", "train_twice"}
        assert other.metrics == pytest.approx(dict(straight.metrics), rel=1e-10)
    expected, got = content(store, whole[-1])["trial"], content(store, resized[-1])["trial"]
    assert expected["n_averaged"] == got["n_averaged"] == 6 * 4
    for name, weight in expected.items():
        torch.testing.assert_close(got[name], weight, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["Adversarial", "Quasi", "Experts"])
def test_an_own_step_does_not_depend_on_the_gang(workers, store, name):
    entrypoint = trials.entrypoint(f"segment_trials:{name}")
    segment = replace(SEGMENT, metric="train_loss", until_iterations=4)
    whole = reports(list(run_segment(entrypoint, segment, store)))
    (first, second) = reports(run_gang(workers[:2], entrypoint, replace(segment, until_iterations=2), store)[0])
    rest = replace(segment, from_iterations=2, checkpoint=second.checkpoint)
    resized = [first, second, *reports(run_gang(workers, entrypoint, rest, store)[0])]
    for straight, other in zip(whole, resized, strict=True):
        assert other.metrics == pytest.approx(dict(straight.metrics), rel=1e-10)
    expected, got = content(store, whole[-1])["model"], content(store, resized[-1])["model"]
    for name, weight in expected.items():
        torch.testing.assert_close(got[name], weight, rtol=1e-9, atol=1e-10)


@pytest.mark.by_default(2)
@pytest.mark.parametrize("dataset", [{"shards": 4}, {}, {"shards": 1}], ids=["shards", "positions", "stream"])
def test_augmented_samples_are_the_same_for_every_gang_and_number_of_loader_workers(workers, store, dataset):
    entrypoint = trials.entrypoint("segment_trials:Loaded")

    def segment(num_workers: int, **words: Any) -> Any:
        return replace(SEGMENT, config={**dataset, "num_workers": num_workers}, metric="train_loss", **words)

    whole = reports(list(run_segment(entrypoint, segment(0, until_iterations=3), store)))
    (first,) = reports(run_gang(workers[:2], entrypoint, segment(1, until_iterations=1), store)[0])
    resumed = segment(2, from_iterations=1, until_iterations=2, checkpoint=first.checkpoint)
    (second,) = reports(run_gang(workers, entrypoint, resumed, store)[0])
    resumed = segment(1, from_iterations=2, until_iterations=3, checkpoint=second.checkpoint)
    parts = [first, second, *reports(list(run_segment(entrypoint, resumed, store)))]
    for straight, resized in zip(whole, parts, strict=True):
        assert resized.metrics == pytest.approx(dict(straight.metrics), rel=1e-10)


def test_a_worker_without_a_share_adds_nothing_to_statistics_of_the_gang(workers, monkeypatch):
    name = "_passing_sync_batchnorm_handle"
    monkeypatch.setattr(DistributedDataParallel, name, getattr(DistributedDataParallel, name))  # the trial changes it
    segment = replace(SEGMENT, until_iterations=3)
    shares = [[11, 5], [0, 16], [16, 0]]
    losses, weights, _, _ = run_unequal(SYNCED, segment, shares)
    results = run_gang(workers[:2], SYNCED, segment, shares)
    assert results[0][0] == pytest.approx(losses, rel=1e-10)
    for _, got, _, _ in results:
        for name, weight in weights.items():
            torch.testing.assert_close(got[name], weight, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("entrypoint", [REGRESSION, ACCUMULATING], ids=str)
@pytest.mark.parametrize(
    "shares",
    [
        [[11, 4, 1], [0, 9, 7], [16, 0, 0], [5, 0, 11]],
        [[0, 0, 16]],
        [[1, 1, 14], [14, 1, 1]],
    ],
)
def test_unequal_workers_equal_a_single_process(workers, shares, entrypoint):
    segment = replace(SEGMENT, until_iterations=3)
    losses, weights, _, _ = run_unequal(REGRESSION, segment, shares)
    results = run_gang(workers, entrypoint, segment, shares)
    assert results[0][0] == pytest.approx(losses, rel=1e-12)
    for _, got, _, _ in results:
        for name, weight in weights.items():
            torch.testing.assert_close(got[name], weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("entrypoint", "rank"), [(REGRESSION, 0), (REGRESSION, 1), (WEIGHED, 0), (WEIGHED, 1), (QUASI, 0), (QUASI, 1)]
)
def test_a_worker_that_raises_fails_and_the_others_echo_it(workers, store, entrypoint, rank):
    results = run_gang(workers[:2], entrypoint, replace(SEGMENT, config={"raise_on_rank": rank}), store)
    failure, echo = results[rank][-1], results[1 - rank][-1]
    assert (failure.kind, failure.message, failure.secondary) == ("raised", "ArithmeticError: no more", False)
    assert "segment_trials.py" in failure.details
    assert isinstance(echo, SegmentFailure)
    assert echo.secondary
    assert len(reports(run_gang(workers[:2], REGRESSION, SEGMENT, store)[0])) == 6, "the workers stay warm"


@pytest.mark.parametrize(("evaluate", "kind"), [("raise", "raised"), ("nan", "not_a_number")])
def test_a_failing_evaluation_fails_every_rank(workers, store, evaluate, kind):
    results = run_gang(workers[:2], REGRESSION, replace(SEGMENT, config={"evaluate": evaluate}), store)
    assert isinstance(results[0][0], SegmentStarted)
    assert (results[0][1].kind, results[0][1].secondary) == (kind, False)
    assert [failure.secondary for failure in results[1]] == [True]


def test_a_checkpoint_that_a_gang_cannot_read_fails_every_rank_alone(workers, store, tmp_path):
    (report,) = reports(list(run_segment(REGRESSION, replace(SEGMENT, until_iterations=1), store)))
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    segment = replace(SEGMENT, from_iterations=1, checkpoint=report.checkpoint)
    for (failure,) in run_gang(workers[:2], REGRESSION, segment, store):
        assert failure.kind == "checkpoint"


def test_a_worker_whose_process_ends_leaves_an_echo(store):
    workers = [Worker(), Worker()]
    try:
        survivor, dead = run_gang(workers, REGRESSION, replace(SEGMENT, config={"exit_on_rank": 1}), store)
    finally:
        for worker in workers:
            worker.stop()
    assert dead is None
    assert survivor[-1].secondary


@pytest.mark.parametrize("entrypoint", [SUMMING, WIDE], ids=str)
def test_workers_that_evaluate_their_parts_find_what_one_finds(workers, store, entrypoint):
    (trained,) = reports(list(run_segment(entrypoint, replace(SEGMENT, until_iterations=1), store)))
    segment = replace(SEGMENT, from_iterations=1, until_iterations=2, checkpoint=trained.checkpoint)
    (alone,) = reports(list(run_segment(entrypoint, segment, store)))
    for num_workers in (2, 3):  # Wide's third worker has no batch
        first, *others = run_gang(workers[:num_workers], entrypoint, segment, store)
        (found,) = reports(first)
        assert others == [[]] * (num_workers - 1)
        if entrypoint is WIDE:
            assert found.metrics == pytest.approx(dict(alone.metrics), rel=1e-10)
        else:  # the statistics of BatchNorm are means over micro-batches
            assert set(found.metrics) == {"loss", "ones", "train_loss"}


def test_parts_are_evaluated_with_the_statistics_of_the_checkpoint(workers, store):
    segment = replace(SEGMENT, until_iterations=1)
    (found,) = reports(run_gang(workers[:2], SUMMING, segment, store)[0])
    model = content(store, found)["model"]
    trial = SUMMING.load()()
    module = trial.build_model({})
    module.load_state_dict(model)
    reseed("setup", segment.seed)
    data = trial.eval_dataset({})
    loader = EvalLoader(data, partial(Feed, device=torch.device("cpu"), collate=None, seed=0), batch_size=4)
    with torch.no_grad():
        expected = trial.evaluate(module.eval(), loader)
    assert found.metrics["loss"] == pytest.approx(expected["loss"], rel=1e-10)


def test_an_error_names_the_remedy_where_metrics_cannot_be_joined(workers, store):
    results = run_gang(workers[:2], SUMMING, replace(SEGMENT, config={"evaluate": "float"}), store)
    failure = next(items[-1] for items in results if not items[-1].secondary)
    assert failure.message == (
        "evaluate() returned loss as a Tensor, which the workers cannot join; return rubberband.Mean(sum, count), "
        "or set eval_on_all_ranks = False"
    )
