"""The check of a trial that trains asynchronously: with servers, and with what is refused later refused here."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from rubberband.executor import Entrypoint
from rubberband.executor.training.check_findings import TrialFault
from rubberband.values.asynchronous import AsyncTraining
from tests.builders.checks import checked_here
from tests.builders.segments import SEGMENT
from tests.builders.trials import segment_trials


def checked(
    name: str, config: dict[str, Any], training: AsyncTraining, max_gpus: int = 1
) -> tuple[list[TrialFault], dict[str, Any]]:
    entrypoint = Entrypoint.parse(f"tests.builders.trials.segment_trials:{name}", (os.getcwd(),))
    segment = replace(SEGMENT, config=config, until_iterations=1, max_iterations=2, training=training)
    return checked_here(entrypoint, segment, max_gpus)


@pytest.mark.parametrize("staleness", [None, 0, 2])
def test_a_trial_is_checked_with_its_servers(staleness: int | None) -> None:
    training = AsyncTraining(servers=3, max_staleness=staleness)
    problems, found = checked("Counted", {"optimizer": "adam", "scheduler": "plateau"}, training, max_gpus=4)
    assert problems == []
    assert list(found["seconds"]) == ["import", "set-up", "iteration", "save", "restore", "continue"]
    assert found["metrics"]["loss"] > 0.0


@pytest.mark.parametrize(
    ("words", "training", "line"),
    [
        ({}, AsyncTraining(servers=5), "set-up: training.servers=5 are more than the tensors that are trained (4)"),
        ({"precision": "fp16"}, AsyncTraining(), 'set-up: precision = "fp16" does not go with training.mode: async'),
        (
            {"gradient_clip_norm": 1.0},
            AsyncTraining(max_staleness=0),
            "set-up: gradient_clip_norm with max_staleness: 0 does not go with training.mode: async",
        ),
    ],
)
def test_the_check_refuses_what_a_gang_would_be_refused(
    words: dict[str, Any], training: AsyncTraining, line: str
) -> None:
    (problem,), _ = checked("Regression", {"words": words}, training, max_gpus=2)
    assert problem.line.startswith(line)
    assert not problem.may_be_here


def test_servers_are_refused_that_have_too_little_memory_for_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=12_000))
    assert checked("Regression", {}, AsyncTraining())[0] == []
    (problem,), _ = checked("Regression", {}, AsyncTraining(), max_gpus=64)
    assert problem.line.startswith("set-up: a parameter server needs 0.0 GB for its shard")
    assert problem.may_be_here


def test_an_error_of_the_optimizer_is_reported_where_a_worker_has_only_lost_its_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Diverging(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ArithmeticError("the step is not finite")

    monkeypatch.setattr(segment_trials.Regression, "build_optimizer", lambda *_: Diverging(_[-1].parameters(), lr=0.1))
    (problem,), _ = checked("Regression", {}, AsyncTraining())
    assert problem.line == "iteration: ArithmeticError: the step is not finite"
