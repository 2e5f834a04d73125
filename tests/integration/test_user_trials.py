"""Trials as users write them: each runs, is resized from one worker to two, and is resumed on one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rubberband.executor import CheckpointStore, SegmentReport, run_segment
from tests.builders import segments, trials
from tests.builders.processes.segment_worker import Worker, run_gang
from tests.builders.segments import content, reports

pytestmark = pytest.mark.long

ITERATIONS = 4


def trained(
    name: str, metric: str, store: CheckpointStore, workers: list[Worker]
) -> tuple[list[SegmentReport], list[SegmentReport]]:
    """Train on one worker throughout; and on one, two and one, each from the checkpoint of the one before."""
    entrypoint = trials.entrypoint(f"user_trials:{name}")
    segment = replace(segments.SEGMENT, metric=metric, until_iterations=ITERATIONS, max_iterations=ITERATIONS)
    straight = reports(list(run_segment(entrypoint, segment, store)))
    resized: list[SegmentReport] = []
    for num_workers, until in ((1, 1), (2, 3), (1, ITERATIONS)):
        part = replace(
            segment,
            from_iterations=len(resized),
            until_iterations=until,
            checkpoint=resized[-1].checkpoint if resized else None,
        )
        resized += reports(
            list(run_segment(entrypoint, part, store))
            if num_workers == 1
            else run_gang(workers[:num_workers], entrypoint, part, store)[0]
        )
    return straight, resized


@pytest.mark.parametrize(
    ("name", "metric"), [("Convolutions", "train_loss"), ("Averaged", "gap"), ("Sentences", "accuracy")]
)
def test_a_trial_without_chance_in_its_passes_learns_the_same_at_every_size(store, workers, name, metric):
    straight, resized = trained(name, metric, store, workers)
    for one, other in zip(straight, resized, strict=True):
        assert other.metrics == pytest.approx(dict(one.metrics), rel=1e-10)
    assert straight[-1].metrics["train_loss"] < straight[0].metrics["train_loss"]
    if name == "Averaged":
        one, other = (content(store, each[-1])["trial"]["average"] for each in (straight, resized))
        assert one["n_averaged"] == other["n_averaged"] == 3 * ITERATIONS
        for weight in one:
            torch.testing.assert_close(other[weight], one[weight], rtol=1e-10, atol=1e-10)


def test_a_small_gpt_in_bf16_warms_up_once_and_learns_about_the_same_at_every_size(store, workers):
    straight, resized = trained("Gpt", "accuracy", store, workers)
    for one, other in zip(straight, resized, strict=True):
        assert other.metrics["train_loss"] == pytest.approx(one.metrics["train_loss"], rel=0.05)
    assert resized[-1].metrics["loss"] < 0.8 * resized[0].metrics["loss"]
    one, other = (content(store, each[-1]) for each in (straight, resized))
    assert one["scheduler"] == other["scheduler"]
    assert other["scheduler"]["last_epoch"] == 6 * ITERATIONS
    assert {weight.dtype for weight in other["model"].values()} == {torch.float32}


def test_frozen_batch_norm_keeps_its_statistics_and_the_other_learns_them(store, workers):
    _, resized = trained("Tuned", "loss", store, workers)
    assert resized[-1].metrics["loss"] < resized[0].metrics["loss"]
    first, last = (content(store, report)["model"] for report in (resized[0], resized[-1]))
    for name in ("running_mean", "running_var", "num_batches_tracked", "weight"):
        assert torch.equal(first[f"0.1.{name}"], last[f"0.1.{name}"])
    assert first["0.1.running_mean"].tolist() == [0.0] * 4
    assert first["1.1.running_mean"].tolist() != last["1.1.running_mean"].tolist()


def test_a_gan_with_two_optimizers_learns_on(store, workers):
    _, resized = trained("Gan", "off", store, workers)
    assert [set(report.metrics) for report in resized] == [{"train_loss", "train_critic", "off"}] * ITERATIONS
    assert all(math.isfinite(value) for report in resized for value in report.metrics.values())
    states = content(store, resized[-1])["optimizer"]
    assert [state["state"][0]["step"].item() for state in states.values()] == [5.0 * ITERATIONS] * 2
