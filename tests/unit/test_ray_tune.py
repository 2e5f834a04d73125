"""What Ray Tune trains, as a trial: functions, bound arguments, class trainables, and rules that end a trial."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ray import tune
from ray.tune import Checkpoint, get_checkpoint, report

from rubberband.errors import InputError
from rubberband.executor import CheckpointStore, Entrypoint, SegmentFailure, SegmentReport, SegmentStarted, run_segment
from rubberband.integrations.ray_tune_trials import Stop, trial_of, unwrapped
from tests.builders import segments

SEGMENT = replace(segments.SEGMENT, until_iterations=4, config={"lr": 0.25})


def train(config, tmp=Path("/tmp")):
    """Train, as Ray Tune's documentation writes it, with the names of the module and with imported ones."""
    step, loss = 0, 1.0
    checkpoint = tune.get_checkpoint()
    assert (checkpoint is None) == (get_checkpoint() is None)
    if checkpoint:
        with checkpoint.as_directory() as folder:
            step, loss = json.loads(Path(folder, "below", "state.json").read_text())
    context = tune.get_context()
    assert context.get_trial_id() == "00004"
    folder = Path(context.get_trial_dir())
    (folder / "below").mkdir(exist_ok=True)
    while True:
        step, loss = step + 1, loss * (1 - config["lr"])
        (folder / "below" / "state.json").write_text(json.dumps([step, loss]))
        metrics = {"loss": loss, "step": step}
        if step % 2:
            tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(str(folder)))
        else:
            report(metrics, checkpoint=Checkpoint.from_directory(str(folder)))


def test_a_function_of_ray_tune_is_a_trial_as_it_is(store):
    started, *whole = run_segment(Entrypoint.from_object(train), SEGMENT, store)
    assert isinstance(started, SegmentStarted)
    first = list(run_segment(Entrypoint.from_object(train), replace(SEGMENT, until_iterations=3), store))[1:]
    assert isinstance(first[-1], SegmentReport)
    rest = replace(SEGMENT, from_iterations=3, checkpoint=first[-1].checkpoint)
    resumed = list(run_segment(Entrypoint.from_object(train), rest, store))[1:]
    assert [each.metrics["loss"] for each in whole] == [0.75**step for step in (1, 2, 3, 4)]
    assert [each.metrics for each in first + resumed] == [each.metrics for each in whole]
    with pytest.warns(UserWarning, match="meant to only be called inside"):
        assert tune.get_checkpoint() is None, "Ray Tune has its own session again"


def trained(trainable: Any, store: CheckpointStore, stop: Stop | None = None, until: int = 4) -> list[SegmentReport]:
    """The reports of a trainable of Ray Tune, pickled as it is sent to the workers; one segment for two iterations."""
    found = Entrypoint.from_object(trial_of(unwrapped(trainable), stop, 1))
    reports: list[SegmentReport] = []
    for end in range(2, until + 1, 2):
        checkpoint = reports[-1].checkpoint if reports else None
        segment = replace(SEGMENT, from_iterations=len(reports), until_iterations=end, checkpoint=checkpoint)
        for each in run_segment(found, segment, store):
            assert not isinstance(each, SegmentFailure), each.details
            reports += [each] if isinstance(each, SegmentReport) else []
        if reports[-1].ended:
            break
    return reports


def scaled(config: dict[str, Any], factor: float, data: Any = (0.0,)) -> None:
    """A function with arguments beside the configuration."""
    step = 0
    while True:
        step += 1
        tune.report({"loss": config["lr"] * factor + sum(data), "step": step, "nested": {"step": step}})


class Scaled:
    """Holds a method that trains."""

    factor = 3.0

    def train(self, config: dict[str, Any]) -> None:
        scaled(config, self.factor)


@pytest.mark.by_default(2)
@pytest.mark.parametrize(
    ("bound", "loss"),
    [
        (lambda: partial(scaled, factor=2.0), 0.5),
        (lambda: tune.with_parameters(scaled, factor=2.0, data=[1.0, 2.0]), 3.5),
        (lambda: tune.with_parameters(partial(scaled, factor=4.0), data=[1.0]), 2.0),
        (lambda: tune.with_resources(tune.with_parameters(scaled, factor=1.0), {"cpu": 1}), 0.25),
        (lambda: Scaled().train, 0.75),
    ],
)
def test_bound_arguments_reach_the_trial(bound, loss, store):
    trainable = bound()  # Ray Tune moves the arguments to a cluster that other tests start, and lose
    (*_, last) = trained(trainable, store, until=2)
    assert (last.metrics["loss"], last.metrics["nested/step"]) == (loss, 2)


class Counting(tune.Trainable):
    """Counts its steps, and what is called."""

    def setup(self, config: dict[str, Any], start: int = 0) -> None:
        self.count, self.lr = start, config["lr"]
        Path(self.logdir, "file").write_text("in a folder of its own")

    def step(self) -> dict[str, Any]:
        self.count += 1
        return {"loss": self.lr / self.count, "count": self.count, "iteration": self.iteration, "done": self.count == 6}

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any] | None:
        return {"count": self.count}

    def load_checkpoint(self, checkpoint: Any) -> None:
        self.count = checkpoint["count"]


class CountingInFiles(Counting):
    """Keeps its state in files."""

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "count").write_text(str(self.count))

    def load_checkpoint(self, checkpoint: str) -> None:
        self.count = int(Path(checkpoint, "count").read_text())


@pytest.mark.by_default(1)
@pytest.mark.parametrize("trainable", [Counting, CountingInFiles, tune.with_resources(Counting, {"gpu": 1})])
def test_a_class_trainable_resumes_and_ends_when_it_is_done(trainable, store):
    reports = trained(trainable, store, until=8)
    assert [each.metrics["count"] for each in reports] == [1, 2, 3, 4, 5, 6]
    assert [each.metrics["iteration"] for each in reports] == [0, 1, 2, 3, 4, 5], "counted on after each checkpoint"
    assert [each.ended for each in reports] == [False] * 5 + [True]


def test_parameters_reach_the_setup_of_a_class(store):
    (first, *_) = trained(tune.with_parameters(Counting, start=3), store, until=2)
    assert first.metrics["count"] == 4


class Unsaved(tune.Trainable):
    """Lacks the methods of a checkpoint."""

    def step(self) -> dict[str, Any]:
        return {"loss": 0.0}


@pytest.mark.parametrize(
    ("trainable", "line"),
    [
        (Unsaved, "Unsaved has no save_checkpoint(); write it"),
        (dict, "dict is no subclass of tune.Trainable"),
        ("registered", "Tuner got the registered name 'registered'; give the function"),
        (3, "Tuner got int; give the function"),
    ],
)
def test_an_object_that_is_no_trainable_is_refused(trainable, line):
    with pytest.raises(InputError, match=re.escape(line)):
        unwrapped(trainable)


def above_two(trial_id: str, result: dict[str, Any]) -> bool:
    """A rule that is a function."""
    return bool(result["step"] > 2)


@pytest.mark.by_default(2)
@pytest.mark.parametrize(
    ("stop", "iterations"),
    [
        (Stop({"step": 3}), 3),
        (Stop({"nested/step": 2.5}), 3),
        (Stop({"training_iteration": 1}), 1),
        (Stop({"loss": 9.0, "missing": 1}, (above_two,)), 3),
        (Stop({"loss": 9.0}), 4),
        (None, 4),
    ],
)
def test_a_threshold_ends_a_trial_at_the_report_that_reaches_it(stop, iterations, store, capfd):
    reports = trained(partial(scaled, factor=1.0), store, stop)
    assert len(reports) == iterations
    assert [each.ended for each in reports] == [False] * (iterations - 1) + [iterations < 4]


def done_at_two(config: dict[str, Any]) -> None:
    """A function that says itself when it is done."""
    for step in range(1, 9):
        tune.report({"loss": config["lr"], "done": step == 2})


def test_done_in_a_report_ends_the_trial(store):
    assert [each.ended for each in trained(done_at_two, store)] == [False, True]
