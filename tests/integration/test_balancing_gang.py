"""Gangs of real processes with unequal shares: what a worker without samples does, and that learning is the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rubberband.executor import Entrypoint, GlobalBatchSampler, SegmentReport, reseed, run_segment
from rubberband.values.balance import Balance
from tests.builders import segments, trials
from tests.builders.processes.segment_worker import Shares, Worker, run_gang, run_unequal
from tests.builders.segments import reports

SLEEPY = trials.entrypoint("balance_trials:Sleepy")
NORMED = trials.entrypoint("balance_trials:Normed")
WEIGHED = trials.entrypoint("segment_trials:Weighed")
NUM_WORKERS = 3
SEGMENT = replace(segments.SEGMENT, until_iterations=2)
SHARES = [[11, 4, 1], [0, 9, 7], [16, 0, 0], [5, 0, 11]]


def test_a_worker_without_samples_takes_no_pass(workers):
    shares = [[8, 8, 0]] * 3 + [[16, 0, 0]]
    results = run_gang(workers, SLEEPY, SEGMENT, shares)
    steps = 2 * 4
    assert [passes for *_, passes in results] == [steps + 8, 6, 1], (
        "rank 2 takes one pass, which shows the names of the metrics; rank 0 also evaluates"
    )


@pytest.mark.parametrize(
    "words",
    [{"find_unused_parameters": True}, {"static_graph": True}, {"precision": "fp16", "gradient_clip_norm": 0.2}],
    ids=["unused", "static", "fp16"],
)
def test_a_worker_without_samples_changes_nothing(workers, words):
    config = {"words": words, "dtype": "float32"} if "precision" in words else {"words": words}
    # The gradient of a larger share is larger before it is averaged, so that fp16 may skip another first step.
    tolerance = 5e-2 if "precision" in words else 1e-12
    segment = replace(SEGMENT, config=config)
    losses, weights, *_ = run_unequal(SLEEPY, segment, [[16]])
    for got_losses, got, *_ in run_gang(workers, SLEEPY, segment, [[0, 16, 0], [9, 0, 7]])[:1]:
        assert got_losses == pytest.approx(losses, rel=tolerance)
        for name, weight in weights.items():
            torch.testing.assert_close(got[name], weight, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("entrypoint", [SLEEPY, WEIGHED], ids=str)
@pytest.mark.parametrize(
    "shares",
    [SHARES, pytest.param([[6, 5, 5]], marks=pytest.mark.long), pytest.param([[0, 0, 16]], marks=pytest.mark.long)],
)
def test_balanced_and_unbalanced_workers_and_one_learn_the_same_through_a_resize_and_a_resume(
    workers: list[Worker], entrypoint: Entrypoint, shares: Shares
) -> None:
    whole = replace(SEGMENT, until_iterations=6)
    losses, weights, *_ = run_unequal(entrypoint, whole, [[16]])
    found: list[float] = []
    payload = None
    for num_workers, until in ((3, 2), (2, 3), (3, 4), (3, 6)):
        segment = replace(SEGMENT, from_iterations=len(found), until_iterations=until)
        own = [[sum(each[: 4 - num_workers]), *each[4 - num_workers :]] for each in shares]
        got: Any
        (part, got, payload, _), *_ = run_gang(workers[:num_workers], entrypoint, segment, own, payload)
        found += part
    assert found == pytest.approx(losses, rel=1e-12)
    for name, weight in weights.items():
        torch.testing.assert_close(got[name], weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shares", [[8, 4, 4], [0, 12, 4]], ids=str)
def test_running_statistics_are_those_of_all_samples(workers, shares):
    segment = replace(SEGMENT, until_iterations=1)
    reseed("setup", segment.seed)
    inputs = NORMED.load()().train_dataset({}).tensors[0]
    seen = inputs[GlobalBatchSampler(len(inputs), segment.seed).next_batch([48]).indices]
    for _, got, _, _ in run_gang(workers, NORMED, segment, [shares]):
        torch.testing.assert_close(got["0.running_mean"], seen.mean(0), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["Sleepy", "SleepyOwn"])
def test_a_worker_is_not_slow_because_it_waits_for_another(workers, store, name):
    segment = replace(SEGMENT, config={"pass_s": [0.0, 0.2, 0.0]}, metric="train_loss")
    entrypoint = trials.entrypoint(f"balance_trials:{name}")
    report, *_ = reports(run_gang(workers, entrypoint, segment, store)[0])
    first, slow, third = report.batch.balance.compute_s
    assert max(first, third) < 0.75 * slow, "it would be as slow; on a busy machine a pass takes a while"


def test_shares_follow_the_speed_and_the_report_says_what_that_saves(workers, store):
    segment = replace(SEGMENT, until_iterations=8, config={"sample_s": [0.001, 0.001, 0.008]})
    found = reports(run_gang(workers, SLEEPY, segment, store)[0])
    uses = [each.batch.balance for each in found if each.batch.balance is not None]
    assert all(sum(use.shares) == 16 for use in uses)
    # On a busy machine, another worker may be slower still for a while.
    assert any(use.shares[2] < 16 // 3 and use.equal_step_s > use.step_s for use in uses), uses


def test_shares_are_equal_on_demand(workers, store):
    segment = replace(SEGMENT, config={"pass_s": [0.0, 0.0, 0.01]}, balance=Balance(policy="equal"))
    found = reports(run_gang(workers, SLEEPY, segment, store)[0])
    assert [each.batch.balance for each in found] == [None, None]


@pytest.mark.parametrize("num_workers", [1, pytest.param(0, marks=pytest.mark.long)])
def test_balanced_by_speed_they_learn_the_same_through_a_resize_and_a_resume(workers, store, num_workers):
    entrypoint = trials.entrypoint("balance_trials:SleepyLoaded")
    config = {"num_workers": num_workers, "sample_s": [0.0002, 0.003, 0.0005]}
    segment = replace(SEGMENT, until_iterations=6, config=config, metric="train_loss")
    whole = reports(list(run_segment(entrypoint, replace(segment, config={"num_workers": 0}), store)))
    found: list[SegmentReport] = []
    for size, until in ((3, 2), (2, 4), (3, 5), (3, 6)):
        checkpoint = found[-1].checkpoint if found else None
        part = replace(segment, from_iterations=len(found), until_iterations=until, checkpoint=checkpoint)
        found += reports(run_gang(workers[:size], entrypoint, part, store)[0])
    for straight, balanced in zip(whole, found, strict=True):
        assert balanced.metrics == pytest.approx(dict(straight.metrics), rel=1e-12)
    used = [each.batch.balance for each in found if each.batch.balance is not None]
    assert any(len(set(use.shares)) > 1 for use in used), "shares follow the speed"
