"""A slot whose trials lose their CUDA context or leave everything behind: a good trial has the curve it has alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from rubberband.executor import Entrypoint, SegmentFailure, SegmentReport, open_store
from tests.builders.command_line import CommandLine
from tests.builders.processes.segment_worker import Worker
from tests.builders.segments import SEGMENT

ORDERS = [*permutations(("bad", "leaver", "good"))]


class Slot:
    """A process that stays warm, and is replaced where a failure says that its context is lost."""

    def __init__(self, folder: Path) -> None:
        self._store = open_store(str(folder))
        self._worker = Worker()
        self.started = 1

    def train(self, trial: str, role: str) -> list[Any]:
        """Train a trial to its third iteration; its items."""
        metric = "train_loss" if trial == "Torch" else "loss"
        segment = replace(SEGMENT, until_iterations=3, config={"role": role}, metric=metric)
        entrypoint = Entrypoint.parse(f"tests.builders.trials.leftover_trials:{trial}", [Path(__file__).parents[2]])
        self._worker.send(entrypoint, segment, self._store)
        items: list[Any] = self._worker.receive()
        if isinstance(items[-1], SegmentFailure) and items[-1].context_lost:
            self.stop()
            self._worker, self.started = Worker(), self.started + 1
        return items

    def stop(self) -> None:
        self._worker.stop()


def curve(items: Sequence[Any]) -> list[Any]:
    return [item.metrics if isinstance(item, SegmentReport) else item for item in items[1:]]


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[Slot]:
    found = Slot(tmp_path)
    yield found
    found.stop()


@pytest.mark.parametrize(
    "trial", ["function", *(pytest.param(each, marks=pytest.mark.long) for each in ("Torch", "Plain"))]
)
def test_a_good_trial_has_the_curve_that_it_has_alone_whatever_ran_before_it(slot: Slot, trial: str) -> None:
    alone = curve(slot.train(trial, "good"))
    assert len(alone) == 3
    for roles in ORDERS:
        found = {role: curve(slot.train(trial, role)) for role in roles}
        assert found["good"] == alone, roles
        (failure,) = found["bad"]
        assert "device-side assert triggered; a label or index is probably out of range" in failure.message
        assert failure.context_lost
        assert not any(getattr(item, "context_lost", False) for item in found["leaver"])
    assert slot.started == 1 + len(ORDERS)


TRIALS_OF_A_RUN = """
import torch
import rubberband
from tests.builders.lost_context import cuda_error, lose, use_gpu

def train(config):
    done = rubberband.get_checkpoint()
    for at in range(0 if done is None else done + 1, 9):
        use_gpu()
        if at == 1 and config["x"] < 2:
            try:
                lose(cuda_error("device-side assert triggered", 710))
            except RuntimeError:
                if config["x"] == 0:
                    raise
        rubberband.report({"score": config["x"] + at}, checkpoint=at)
"""


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(420)
def test_a_bad_label_costs_one_trial_of_six_on_real_workers(tmp_path: Path) -> None:
    """The second one loses its context too, and catches the error: it is done, and its process goes."""
    command_line = CommandLine(tmp_path)
    (tmp_path / "bad.py").write_text(TRIALS_OF_A_RUN)
    command_line(
        *("run", "sleepy.yaml", "-s", "entrypoint=bad:train", "-s", "constraints.max_failures=1"),
        *("-s", "search.space={x: {type: grid, values: [0, 1, 2, 3, 4, 5]}}", "-s", "search.sampler={type: grid}"),
        *("-s", "search.scheduler={type: stages, stages: [{trials: 6, iterations: 2}, {trials: 2, iterations: 2}]}"),
        *("-s", "resources.gpus_per_instance=1", "-s", "resources.max_instances=1"),
    )
    result = command_line.result()
    assert result.outcome == "done"
    bad, *others = result.trials
    assert bad.status == "failed"
    assert "device-side assert triggered; a label or index is probably out of range" in (bad.failure or "")
    assert [trial.failures for trial in result.trials] == [2, 0, 0, 0, 0, 0]
    assert [trial.iterations for trial in others] == [2, 2, 2, 4, 4][: len(others)]
