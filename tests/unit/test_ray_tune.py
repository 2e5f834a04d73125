"""What Ray Tune trains, as a trial, and a define-by-run space of Optuna."""

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
from rubberband.integrations.ray_tune_options import space_of_function
from rubberband.integrations.ray_tune_trials import Stop, trial_of, unwrapped
from rubberband.spec.samplers import sample
from rubberband.spec.space import choice, loguniform, quniform, randint, uniform
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


def nested(trial: Any) -> dict[str, Any]:
    """Parameters that depend on a choice, which may depend on another."""
    trial.suggest_float("width", 0, 20)
    if trial.suggest_categorical("kind", ["linear", "deep"]) == "deep":
        trial.suggest_int("depth", 1, 4)
        if trial.suggest_categorical("norm", ["batch", "none"]) == "batch":
            trial.suggest_float("momentum", 0.1, 0.9, step=0.1)
    trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    return {"epochs": 9}


def test_parameters_that_follow_a_choice_belong_to_its_options():
    deep = {"depth": randint(1, 5), "norm": choice([{"name": "batch", "space": {"momentum": MOMENTUM}}, "none"])}
    assert space_of_function(nested) == {
        "kind": choice(["linear", {"name": "deep", "space": deep}]),
        "width": uniform(0, 20),
        "lr": loguniform(1e-4, 1e-1),
        "epochs": 9,
    }
    drawn = sample(space_of_function(nested), "random", 50, 0)
    assert all(("momentum" in each) == (each.get("norm") == "batch") for each in drawn)


MOMENTUM = quniform(0.1, 0.9, 0.1)


def plain(trial: Any) -> None:
    """A space without conditions."""
    trial.suggest_categorical("batch", [16, 32])
    trial.suggest_categorical("flag", [True, None])


def test_a_function_without_conditions_is_a_flat_space():
    assert space_of_function(plain) == {"batch": choice([16, 32]), "flag": choice([True, None])}


def by_number(trial: Any) -> None:
    """As many parameters as a number says."""
    for layer in range(trial.suggest_int("layers", 1, 3)):
        trial.suggest_int(f"units_{layer}", 8, 64)


def by_two(trial: Any) -> None:
    """A parameter that follows from two choices together."""
    one, other = trial.suggest_categorical("one", ["a", "b"]), trial.suggest_categorical("other", ["a", "b"])
    if one == other == "b":
        trial.suggest_float("both", 0, 1)


def by_flag(trial: Any) -> None:
    """A choice whose option with parameters is no text."""
    if trial.suggest_categorical("flag", [False, True]):
        trial.suggest_float("rate", 0, 1)


def by_range(trial: Any) -> None:
    """A range that follows from a choice."""
    trial.suggest_float("rate", 0, 10 if trial.suggest_categorical("kind", ["low", "high"]) == "high" else 1)


def unequal(trial: Any) -> dict[str, Any]:
    """Other constants for other trials."""
    return {"epochs": 9 if trial.suggest_categorical("kind", ["short", "long"]) == "short" else 90}


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (by_number, "by_number: which parameters a trial has depends on more than a choice"),
        (by_two, "by_two: which parameters a trial has depends on more than a choice"),
        (by_flag, "by_flag: the option True of flag has parameters of its own; name it by a text"),
        (by_range, "by_range: rate has other bounds for other trials; give it another name in each case"),
        (unequal, "unequal returns other constants for other trials; suggest them instead"),
    ],
)
def test_a_space_that_cannot_be_written_is_refused(function, line):
    with pytest.raises(InputError, match=re.escape(line)):
        space_of_function(function)
