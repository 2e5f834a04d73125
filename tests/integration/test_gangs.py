"""Gangs of real processes: a trial learns on any number of workers what it learns on one; failures are reported.

One table of trials and schedules runs on one gang of two warm workers.
"""

from __future__ import annotations

import io
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from rubberband.executor import (
    Entrypoint,
    EvalLoader,
    Feed,
    GlobalBatchSampler,
    SegmentFailure,
    SegmentStarted,
    reseed,
    run_segment,
)
from rubberband.values.balance import Balance
from tests.builders import segments, trials
from tests.builders.processes.segment_worker import Worker, gang_of, resized, run_gang, run_unequal
from tests.builders.segments import content, reports

SEGMENT = replace(segments.SEGMENT, until_iterations=6, max_iterations=6)
SHARES = [[11, 5], [0, 16], [16, 0], [3, 13], [8, 8]]
UNUSED, STATIC = {"find_unused_parameters": True}, {"static_graph": True, "gradient_clip_norm": 0.2}


def trial(name: str) -> Entrypoint:
    return trials.entrypoint(name if ":" in name else f"segment_trials:{name}")


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gang_trials:Thawing", {}),
        ("gang_trials:ThawingByStep", {}),
        ("gang_trials:OwnThawing", {}),
        ("gang_trials:ByLayer", {}),
        ("gang_trials:Resetting", {}),
        ("gang_trials:Recalibrating", {}),
        ("gang_trials:Patient", {}),
        ("gang_trials:OneCycle", {}),
        ("gang_trials:Calling", {}),
        ("gang_trials:Twice", {}),
        ("gang_trials:Lazily", {}),
        ("gang_trials:Beside", {}),
        ("gang_trials:ByHand", {}),
        ("Synced", {}),
        ("Weighed", {}),
        ("Adversarial", {}),
        ("Quasi", {}),
        ("Experts", {}),
        ("Regression", {"words": UNUSED}),
        ("Accumulating", {"words": STATIC, "optimizer": "adam", "scheduler": "plateau"}),
    ],
)
def test_a_trial_learns_on_one_two_and_one_with_unequal_shares_what_it_learns_on_one(
    workers: list[Worker], monkeypatch: pytest.MonkeyPatch, name: str, config: dict[str, Any]
) -> None:
    handle = "_passing_sync_batchnorm_handle"
    monkeypatch.setattr(DistributedDataParallel, handle, getattr(DistributedDataParallel, handle))  # Synced changes it
    segment = replace(SEGMENT, config=config, metric="train_loss")
    straight, weights, whole, _ = run_unequal(trial(name), segment, [])
    losses, _, payload, _ = run_unequal(trial(name), replace(segment, until_iterations=2), [])
    part = replace(segment, from_iterations=2, until_iterations=4)
    results = run_gang(workers, trial(name), part, SHARES, payload)
    losses += results[0][0]
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=0)
    rest, got, last, _ = run_unequal(trial(name), replace(segment, from_iterations=4), [], results[0][2])
    assert [*losses, *rest] == pytest.approx(straight, rel=1e-8)
    torch.testing.assert_close(got, weights, rtol=0, atol=1e-8)
    torch.testing.assert_close(own_state(last), own_state(whole), rtol=1e-8, atol=1e-8)


def test_a_wider_gang_continues_from_a_checkpoint_of_another_configuration_as_one_worker_does(
    workers: list[Worker],
) -> None:
    """As at an exchange of a population whose next generation has more GPUs for each trial."""
    winner = replace(SEGMENT, config={"lr": 0.05, "momentum": 0.9}, metric="train_loss", until_iterations=2)
    _, _, checkpoint, _ = run_unequal(trial("Regression"), winner, [])
    taker = replace(winner, trial=2, config={"lr": 0.01, "momentum": 0.5}, from_iterations=2, until_iterations=5)
    losses, weights, _, _ = run_unequal(trial("Regression"), taker, [], checkpoint)
    wide = run_gang(workers, trial("Regression"), taker, SHARES, checkpoint)
    assert wide[0][0] == pytest.approx(losses, rel=1e-8)
    torch.testing.assert_close(wide[0][1], weights, rtol=0, atol=1e-8)
    as_before, _, _, _ = run_unequal(trial("Regression"), replace(taker, config=winner.config), [], checkpoint)
    assert as_before != pytest.approx(losses, rel=1e-3)


def own_state(payload: bytes) -> Any:
    return torch.load(io.BytesIO(payload), weights_only=False).get("trial")


@pytest.mark.parametrize(
    ("name", "config", "gangs", "tolerance"),
    [
        ("Regression", {}, "121", 1e-10),
        ("Weighed", {}, "212", 1e-10),
        ("Regression", {"words": {"gradient_compression": "bf16"}}, "121", 1e-2),
        ("Regression", {"dtype": "float32", "words": {"precision": "bf16"}}, "121", 2e-2),
        ("Accumulating", {"dtype": "float32", "words": {"precision": "fp16", "gradient_clip_norm": 0.2}}, "121", 2e-2),
        pytest.param(
            "Regression",
            {"words": {"compile": True}},
            "121",
            1e-10,
            marks=[pytest.mark.long, pytest.mark.filterwarnings("ignore::DeprecationWarning")],  # torch's own
        ),
        pytest.param("Weighed", {}, "1231", 1e-10, marks=pytest.mark.long),
    ],
)
def test_reports_and_checkpoints_of_a_resized_trial_are_those_of_one_never_resized(
    workers: list[Worker], store: Any, name: str, config: dict[str, Any], gangs: str, tolerance: float
) -> None:
    segment = replace(SEGMENT, config=config)
    whole = reports(list(run_segment(trial(name), segment, store)))
    sizes = [(int(size), min(2 * at, 6)) for at, size in enumerate(gangs, start=1)]
    if "3" in gangs:
        with gang_of(3) as more:
            parts = resized(more, trial(name), segment, store, sizes)
    else:
        parts = resized(workers, trial(name), segment, store, sizes)
    for straight, other in zip(whole, parts, strict=True):
        assert {"loss", "train_loss"} <= set(other.metrics)
        assert other.metrics == pytest.approx(dict(straight.metrics), rel=tolerance)
    expected, got = content(store, whole[-1]), content(store, parts[-1])
    torch.testing.assert_close(got["model"], expected["model"], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got.get("trial"), expected.get("trial"), rtol=tolerance, atol=tolerance)
    assert got["sampler"] == expected["sampler"]


@pytest.mark.by_default(2)
@pytest.mark.parametrize("dataset", [{"shards": 4}, {}, {"shards": 1}], ids=["shards", "positions", "stream"])
def test_augmented_samples_are_the_same_for_every_gang_and_number_of_loader_workers(workers, store, dataset):
    loaded, metric = trial("Loaded"), "train_loss"
    segment = replace(SEGMENT, config={**dataset, "num_workers": 0}, metric=metric, until_iterations=3)
    whole = reports(list(run_segment(loaded, segment, store)))
    parts = resized(workers, loaded, segment, store, [(2, 1, {"num_workers": 1}), (1, 2, {"num_workers": 2}), (2, 3)])
    assert [each.metrics[metric] for each in parts] == pytest.approx([each.metrics[metric] for each in whole])


def test_a_gang_ends_with_the_iteration_in_which_rank_0_says_so(workers, store):
    alone = reports(list(run_segment(trial("Ending"), SEGMENT, store)))
    first, second = run_gang(workers, trial("Ending"), SEGMENT, store)
    found = reports(first)
    assert second == []
    assert [(report.iterations, report.ended) for report in found] == [(1, False), (2, True)]
    assert [dict(report.metrics) for report in found] == [pytest.approx(dict(report.metrics)) for report in alone]
    assert content(store, found[-1])["iterations"] == 2


# Unequal shares.


def test_a_worker_without_samples_takes_no_pass(workers):
    results = run_gang(workers, trial("Regression"), replace(SEGMENT, until_iterations=2), [[16, 0]])
    assert [passes for *_, passes in results] == [2 * 4 + 8, 1], "rank 1's shows the names; rank 0 also evaluates"


def test_fp16_with_a_worker_without_samples_changes_little(workers):
    config = {"words": {"precision": "fp16", "gradient_clip_norm": 0.2}, "dtype": "float32"}
    segment = replace(SEGMENT, config=config, until_iterations=2)
    losses, weights, *_ = run_unequal(trial("Regression"), segment, [])
    # The gradient of a larger share is larger before it is averaged, so that fp16 may skip another first step.
    found, got, *_ = run_gang(workers, trial("Regression"), segment, [[0, 16], [9, 7]])[0]
    assert found == pytest.approx(losses, rel=5e-2)
    torch.testing.assert_close(got, weights, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("shares", [[12, 4], [0, 16]], ids=str)
def test_running_statistics_are_those_of_all_samples(workers, shares):
    normed, segment = trial("balance_trials:Normed"), replace(SEGMENT, until_iterations=1)
    reseed("data", segment.data_seed)
    inputs = normed.load()().train_dataset({}).tensors[0]
    seen = inputs[GlobalBatchSampler(len(inputs), segment.seed).next_batch([48]).indices]
    for _, got, _, _ in run_gang(workers, normed, segment, [shares]):
        torch.testing.assert_close(got["0.running_mean"], seen.mean(0), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["Sleepy", "SleepyOwn"])
def test_a_worker_is_not_slow_because_it_waits_for_another(workers, store, name):
    segment = replace(SEGMENT, until_iterations=2, config={"pass_s": [0.0, 0.2]}, metric="train_loss")
    report, last = reports(run_gang(workers, trial(f"balance_trials:{name}"), segment, store)[0])
    quick, slow = report.batch.balance.compute_s
    assert quick < 0.75 * slow, "it would be as slow; on a busy machine a pass takes a while"
    (use,) = last.use
    assert use.peers_s > 0.2 * use.seconds, "rank 0 is the quick one, and waits"


def test_shares_follow_the_speed_and_it_learns_the_same_through_a_resize(workers, store):
    sleepy = trial("balance_trials:SleepyLoaded")
    config = {"num_workers": 1, "sample_s": [0.001, 0.008]}
    segment = replace(SEGMENT, config=config, metric="train_loss")
    whole = reports(list(run_segment(sleepy, replace(segment, config={"num_workers": 0}), store)))
    found = resized(workers, sleepy, segment, store, [(2, 4), (1, 5), (2, 6)])
    for straight, balanced in zip(whole, found, strict=True):
        assert balanced.metrics == pytest.approx(dict(straight.metrics), rel=1e-12)
    uses = [each.batch.balance for each in found if each.batch.balance is not None]
    assert all(sum(use.shares) == 16 for use in uses)
    # On a busy machine, the other worker may be slower still for a while.
    assert any(use.shares[1] <= 4 and use.equal_step_s > use.step_s for use in uses), uses


def test_shares_are_equal_on_demand(workers, store):
    config, balance = {"pass_s": [0.0, 0.01]}, Balance(policy="equal")
    segment = replace(SEGMENT, until_iterations=2, config=config, balance=balance)
    found = reports(run_gang(workers, trial("balance_trials:Sleepy"), segment, store)[0])
    assert [each.batch.balance for each in found] == [None, None]


# Failures.


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "Sparse",
            "the gradient of table is sparse, and a gang averages dense ones; build the embedding with sparse=False, "
            "or set resources.gpus_per_trial.max to 1",
        ),
        (
            "ByRank",
            "worker 0 begins or ceases to train 0.weight, and not every worker does; on_iteration(), on_step() and "
            "train_mode() must do the same on every worker",
        ),
        (
            "Drifting",
            "0.weight differs between worker 0 (norm N) and worker 1 (N); change weights in the same way "
            "on every worker: no random draws in on_step() or the optimizer, nothing that depends on the rank or on "
            "evaluate()",
        ),
    ],
)
def test_a_gang_that_would_drift_apart_fails_in_one_line(workers, store, name, line):
    results = run_gang(workers, trial(f"gang_trials:{name}"), SEGMENT, store)
    failure = next(items[-1] for items in results if not items[-1].secondary)
    assert isinstance(failure, SegmentFailure)
    assert re.sub(r"norm [\d.]+", "norm N", re.sub(r"\(\d[\d.]+\)", "(N)", failure.message)) == line


@pytest.mark.parametrize(("name", "rank"), [("Regression", 0), ("Weighed", 1), ("Quasi", 1)])
def test_a_worker_that_raises_fails_and_the_others_echo_it(workers, store, name, rank):
    results = run_gang(workers, trial(name), replace(SEGMENT, config={"raise_on_rank": rank}), store)
    failure, echo = results[rank][-1], results[1 - rank][-1]
    assert (failure.kind, failure.message, failure.secondary) == ("raised", "ArithmeticError: no more", False)
    assert "segment_trials.py" in failure.details
    assert isinstance(echo, SegmentFailure)
    assert echo.secondary
    segment = replace(SEGMENT, until_iterations=1)
    assert len(reports(run_gang(workers, trial("Regression"), segment, store)[0])) == 1, "the workers stay warm"


@pytest.mark.parametrize(("evaluate", "kind"), [("raise", "raised"), ("nan", "not_a_number")])
def test_a_failing_evaluation_fails_every_rank(workers, store, evaluate, kind):
    results = run_gang(workers, trial("Regression"), replace(SEGMENT, config={"evaluate": evaluate}), store)
    assert isinstance(results[0][0], SegmentStarted)
    assert (results[0][1].kind, results[0][1].secondary) == (kind, False)
    assert [failure.secondary for failure in results[1]] == [True]


def test_a_checkpoint_that_a_gang_cannot_read_fails_every_rank_alone(workers, store, tmp_path):
    regression = trial("Regression")
    (report,) = reports(list(run_segment(regression, replace(SEGMENT, until_iterations=1), store)))
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    segment = replace(SEGMENT, from_iterations=1, checkpoint=report.checkpoint)
    for (failure,) in run_gang(workers, regression, segment, store):
        assert failure.kind == "checkpoint"


def test_a_worker_whose_process_ends_leaves_an_echo(store):
    with gang_of(2) as workers:
        survivor, dead = run_gang(workers, trial("Regression"), replace(SEGMENT, config={"exit_on_rank": 1}), store)
    assert dead is None
    assert survivor[-1].secondary


# Evaluation by all workers.


@pytest.mark.parametrize("size", [25, 50], ids=["two batches", "one batch"])
def test_workers_that_evaluate_their_parts_find_what_one_finds(workers, store, size):
    segment = replace(SEGMENT, until_iterations=1, config={"words": {"eval_batch_size": size}})
    (alone,) = reports(list(run_segment(trial("Wide"), segment, store)))
    first, second = run_gang(workers, trial("Wide"), segment, store)
    (found,) = reports(first)
    assert second == []
    assert found.metrics == pytest.approx(dict(alone.metrics), rel=1e-10)


def test_parts_are_evaluated_with_the_statistics_of_the_checkpoint(workers, store):
    segment, summing = replace(SEGMENT, until_iterations=1), trial("Summing")
    (found,) = reports(run_gang(workers, summing, segment, store)[0])
    assert set(found.metrics) == {"loss", "ones", "train_loss"}
    own = summing.load()()
    module = own.build_model({})
    module.load_state_dict(content(store, found)["model"])
    reseed("data", segment.data_seed)
    data = own.eval_dataset({})
    loader = EvalLoader(data, partial(Feed, device=torch.device("cpu"), collate=None, seed=0), batch_size=4)
    with torch.no_grad():
        expected = own.evaluate(module.eval(), loader)
    assert found.metrics["loss"] == pytest.approx(expected["loss"], rel=1e-10)


def test_an_error_names_the_remedy_where_metrics_cannot_be_joined(workers, store):
    results = run_gang(workers, trial("Summing"), replace(SEGMENT, config={"evaluate": "float"}), store)
    failure = next(items[-1] for items in results if not items[-1].secondary)
    assert failure.message == (
        "evaluate() returned loss as a Tensor, which the workers cannot join; return rubberband.Mean(sum, count), "
        "or set eval_on_all_ranks = False"
    )
