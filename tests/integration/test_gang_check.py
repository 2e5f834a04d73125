"""The check trains a gang of two workers beside one worker, and names what differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rubberband.executor.training import check_workers, wrapping
from rubberband.values.balance import Balance
from tests.builders.checks import SEGMENT, compared

Plant = Callable[[pytest.MonkeyPatch], None]


def follows_nothing(plant: pytest.MonkeyPatch) -> None:
    follow = wrapping.GradientExchange.follow
    plant.setattr(wrapping.GradientExchange, "follow", lambda self, **how: self.ddp is None and follow(self, **how))


def waits_briefly(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(check_workers, "GANG_LIMIT_S", 2.0)


@pytest.mark.by_default(8)
@pytest.mark.parametrize(
    ("name", "plant", "line"),
    [
        ("planted_trials:Dropped", None, "0.weight differs between worker 0 (norm "),
        ("planted_trials:Scaled", None, "after an iteration on two workers, model['0.weight'] is not that of one"),
        ("planted_trials:Summed", None, "metrics['loss'] is not that of one worker; return means"),
        ("planted_trials:Forgetting", None, "model['0.weight'] is another one after a restart, as at each SYNC;"),
        ("planted_trials:Leaving", None, "set find_unused_parameters = True"),
        ("planted_trials:Freezing", follows_nothing, "Expected to have finished reduction"),
        ("planted_trials:Remembering", None, "0.weight differs between worker 0 (norm "),
        ("planted_trials:Communicating", waits_briefly, "two workers do not go on after iteration 1; loss() and hooks"),
        ("sharded_trials:Apart", None, "workers call different parts of the model"),
        ("gang_trials:Thawing", follows_nothing, "0.weight differs between worker 0 (norm "),
        ("gang_trials:Sparse", None, "the gradient of table is sparse"),
        ("gang_trials:ByRank", None, "worker 0 begins or ceases to train 0.weight, and not every worker does"),
    ],
)
def test_a_planted_fault_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, name: str, plant: Plant | None, line: str
) -> None:
    if plant is not None:
        plant(monkeypatch)
    (found,), remarks = compared(name, is_gang=True)
    assert line in found
    assert "\n" not in found
    assert not remarks


@pytest.mark.by_default(4)
@pytest.mark.parametrize(
    "name",
    [
        *(f"planted_trials:{name}" for name in ("Usual", "Overflowing", "Freezing", "Unused")),
        *(f"gang_trials:{name}" for name in ("ByHand", "ByLayer", "Recalibrating", "Lazily", "Beside", "OneCycle")),
    ],
)
def test_a_gang_that_trains_what_one_worker_trains_passes(name: str) -> None:
    assert compared(name, is_gang=True) == ([], [])


def test_a_divided_model_is_compared_with_a_whole_one() -> None:
    assert compared("sharded_trials:Divided", is_gang=True) == ([], [])


@pytest.mark.long
def test_a_model_with_divided_weights_in_16_bits_is_compared_after_a_restart() -> None:
    faults, (remark,) = compared("sharded_trials:Rounded", is_gang=True)
    assert not faults
    assert 'gangs round divided weights with precision = "bf16"' in remark


@pytest.mark.by_default(2)
@pytest.mark.parametrize(
    ("name", "policy", "why"),
    [
        ("planted_trials:Buffered", "speed", "buffers of its model change with each pass"),
        ("planted_trials:OwnUsual", "speed", "its own step() gets whole batches"),
        ("planted_trials:Contrasting", "equal", "losses that communicate are others on a gang"),
    ],
)
def test_a_gang_may_train_otherwise_than_one_worker(name: str, policy: Any, why: str) -> None:
    found, (remark,) = compared(name, is_gang=True, segment=replace(SEGMENT, balance=Balance(policy=policy)))
    assert not found
    assert remark.startswith(
        "two workers of a gang were compared with each other and after a restart, and not with one"
    )
    assert remark.endswith(why)


@pytest.mark.long
def test_a_loss_that_compares_samples_of_all_workers_needs_equal_shares() -> None:
    ((line,), _) = compared("planted_trials:Contrasting", is_gang=True)
    assert "needs equal shares: batch: {balance: {policy: equal}}" in line


def test_a_layer_that_needs_gpus_is_no_fault_of_the_trial() -> None:
    found, (remark,) = compared("planted_trials:Synchronised", is_gang=True)
    assert not found
    assert "SyncBatchNorm needs GPUs" in remark


def test_a_trial_that_does_not_repeat_itself_is_named() -> None:
    found, (remark,) = compared("planted_trials:Unseeded", is_gang=True)
    assert not found
    assert remark.startswith("not repeatable: two runs from one seed differ in model['0.weight']; draw from the global")
