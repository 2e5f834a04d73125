"""The check trains a gang of two workers beside one process, and names what differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from rubberband.executor import Segment, SegmentFailure, checkpoint
from rubberband.executor.training import comparing, wrapping
from rubberband.executor.training.comparing import Comparison
from rubberband.values.balance import Balance
from tests.builders import segments, trials

SEGMENT = replace(segments.SEGMENT, max_iterations=6)
Plant = Callable[[pytest.MonkeyPatch], None]


def compared(name: str, segment: Segment = SEGMENT) -> tuple[list[str], list[str]]:
    entrypoint = trials.entrypoint(name)
    entrypoint.load()
    comparison = Comparison(entrypoint, segment)
    try:
        found, remarks = comparison.run()
    finally:
        comparison.close()
    return [each.message if isinstance(each, SegmentFailure) else each for each in found], remarks


def follows_nothing(plant: pytest.MonkeyPatch) -> None:
    follow = wrapping.GradientExchange.follow
    plant.setattr(wrapping.GradientExchange, "follow", lambda self, **how: self.ddp is None and follow(self, **how))


def averages_nothing(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(wrapping.GradientExchange, "run", lambda self, compute: compute())


def shares_no_buffers(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(wrapping.SharedBuffers, "share", lambda self, source: None)


def forgets_what_is_trained(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(checkpoint.TrainedParameters, "load_state_dict", lambda self, state: None)


def waits_briefly(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(comparing, "GANG_LIMIT_S", 2.0)


@pytest.mark.by_default(8)
@pytest.mark.parametrize(
    ("name", "plant", "line"),
    [
        ("planted_trials:Dropped", None, "after step 1 of iteration 1, 0.weight differs between worker 0 and"),
        ("planted_trials:Scaled", None, "are not those of one worker on two; write loss(), hooks and the optimizer"),
        ("planted_trials:Summed", None, "after iteration 1, two workers report loss="),
        ("planted_trials:Unseeded", None, "build_model() gives other values of "),
        ("planted_trials:Forgetting", None, "and were before a restore; keep in state_dict() what hooks"),
        ("planted_trials:Leaving", None, "set find_unused_parameters = True"),
        ("gang_trials:Thawing", forgets_what_is_trained, "the weights of 0.weight are not those of one worker on two"),
        ("planted_trials:Freezing", follows_nothing, "Expected to have finished reduction"),
        ("planted_trials:Remembering", None, "after step 2 of iteration 1, "),
        ("planted_trials:Communicating", waits_briefly, "two workers do not go on after "),
        ("gang_trials:Thawing", follows_nothing, "after step 1 of iteration 2, 0.weight differs between worker 0 and"),
        ("gang_trials:Calling", averages_nothing, "after step 1 of iteration 1, "),
        ("gang_trials:Twice", shares_no_buffers, "after step 2 of iteration 1, buffer scale differs between worker 0"),
        ("gang_trials:Sparse", None, "the gradient of table is sparse"),
        ("gang_trials:ByRank", None, "worker 0 begins or ceases to train 0.weight, and not every worker does"),
    ],
)
def test_a_planted_fault_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, name: str, plant: Plant | None, line: str
) -> None:
    if plant is not None:
        plant(monkeypatch)
    (found,), remarks = compared(name)
    assert line in found
    assert "\n" not in found
    assert not remarks


@pytest.mark.by_default(3)
@pytest.mark.parametrize(
    "name",
    [
        *(f"planted_trials:{name}" for name in ("Overflowing", "Usual", "Freezing", "OwnUsual", "Unused", "Buffered")),
        *(f"gang_trials:{name}" for name in ("ByLayer", "Recalibrating", "Lazily", "Beside")),
    ],
)
def test_a_gang_that_trains_what_one_worker_trains_passes(name: str) -> None:
    assert compared(name) == ([], [])


@pytest.mark.long
def test_a_loss_that_compares_samples_of_all_workers_needs_equal_shares() -> None:
    ((line,), _) = compared("planted_trials:Contrasting")
    assert "needs equal shares: batch: {balance: {policy: equal}}" in line
    found, (remark,) = compared("planted_trials:Contrasting", replace(SEGMENT, balance=Balance(policy="equal")))
    assert not found
    assert remark.startswith("two workers of a gang were compared with each other, and not with one process")


def test_workers_with_equal_shares_are_compared_with_each_other() -> None:
    ((line,), _) = compared("planted_trials:Dropped", replace(SEGMENT, balance=Balance(policy="equal")))
    assert "0.weight differs between worker 0 and worker 1" in line


def test_a_layer_that_needs_gpus_is_no_fault_of_the_trial() -> None:
    found, (remark,) = compared("planted_trials:Synchronised")
    assert not found
    assert "SyncBatchNorm needs GPUs" in remark
