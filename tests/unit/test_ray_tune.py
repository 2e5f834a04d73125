"""A function of Ray Tune as a trial, and `Tuner`: what it makes of Ray Tune's objects."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray import tune
from ray.tune import Checkpoint, get_checkpoint, report
from ray.tune.schedulers import ASHAScheduler, HyperBandScheduler, MedianStoppingRule
from ray.tune.search import ConcurrencyLimiter
from ray.tune.search.optuna import OptunaSearch

import rubberband
from rubberband.errors import InputError
from rubberband.executor.checkpoints import CheckpointStore, open_store
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.executor.training.folder import FolderCheckpoint
from rubberband.executor.training.run import run_segment
from rubberband.executor.training.segment import SegmentReport, SegmentStarted
from rubberband.integrations.ray_tune import Tuner
from rubberband.spec.experiment import Experiment
from tests.builders import segments

SEGMENT = replace(segments.SEGMENT, until_iterations=4, config={"lr": 0.25})


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return open_store(str(tmp_path))


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


def test_a_folder_is_kept_file_by_file(tmp_path):
    (tmp_path / "one" / "below").mkdir(parents=True)
    (tmp_path / "one" / "below" / "weights").write_bytes(b"\0\1")
    (tmp_path / "one" / "config.json").write_text("{}")
    there = FolderCheckpoint.from_directory(tmp_path / "one").to_directory(tmp_path / "other")
    assert (there / "below" / "weights").read_bytes() == b"\0\1"
    assert (there / "config.json").read_text() == "{}"


SPACE = {"lr": tune.loguniform(1e-3, 1.0), "epochs": 9}
OBJECTIVE = {"metric": "loss", "mode": "min"}


def words_of(monkeypatch: pytest.MonkeyPatch, **given: Any) -> dict[str, Any]:
    """The words that `fit` tunes with; they make an experiment."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(rubberband, "tune", lambda trainable, **words: found.update(words))
    monkeypatch.setattr("rubberband.integrations.ray_tune.ResultGrid", lambda result, trainable: result)
    Tuner(train, **{"param_space": SPACE, "constraints": {"deadline": "20m"}, **given}).fit()
    resources = {"provider": "local", "instance_type": "p3.2xlarge", **found["resources"]}
    Experiment(**{"entrypoint": "script:train", **found, "resources": resources})
    return found


ASHA = {"type": "asha", "num_samples": 9, "grace_period": 1, "max_t": 9, "reduction_factor": 3}


@pytest.mark.parametrize(
    ("scheduler", "words"),
    [
        (ASHAScheduler(max_t=9, reduction_factor=3, **OBJECTIVE), ASHA),
        (
            ASHAScheduler(max_t=16, grace_period=2, reduction_factor=2.0),
            {**ASHA, "max_t": 16, "grace_period": 2, "reduction_factor": 2},
        ),
        (HyperBandScheduler(max_t=9), {"type": "hyperband", "max_t": 9, "reduction_factor": 3}),
    ],
)
def test_schedulers_have_their_counterparts(monkeypatch, scheduler, words):
    objective = {} if scheduler._metric else OBJECTIVE
    config = tune.TuneConfig(num_samples=9, scheduler=scheduler, **objective)
    search = words_of(monkeypatch, tune_config=config)["search"]
    assert search["scheduler"] == words
    assert (search["metric"], search["mode"]) == ("loss", "min")


def test_without_a_scheduler_all_trials_train_until_the_stop(monkeypatch):
    config = tune.TuneConfig(time_budget_s=600, **OBJECTIVE)
    grid = {"lr": tune.grid_search([0.1, 0.2]), "width": tune.grid_search([8, 16, 32])}
    run = tune.RunConfig(name="ours", stop={"training_iteration": 5})
    words = words_of(monkeypatch, param_space=grid, tune_config=config, run_config=run, constraints={})
    assert words["search"]["scheduler"] == {"type": "stages", "stages": [{"trials": 6, "iterations": 5}]}
    assert words["name"] == "ours"
    assert words["constraints"] == {"deadline": "600s"}


def test_searchers_are_samplers(monkeypatch):
    searcher = OptunaSearch(points_to_evaluate=[{"lr": 0.1}], seed=3)
    config = tune.TuneConfig(
        num_samples=9, search_alg=ConcurrencyLimiter(searcher, 4), scheduler=ASHAScheduler(max_t=9), **OBJECTIVE
    )
    search = words_of(monkeypatch, tune_config=config)["search"]
    assert search["sampler"] == {"type": "optuna", "seed": 3}
    assert search["points_to_evaluate"] == [{"lr": 0.1}]


def test_as_many_samples_as_the_limits_allow(monkeypatch):
    config = tune.TuneConfig(num_samples=-1, scheduler=ASHAScheduler(max_t=9), **OBJECTIVE)
    assert words_of(monkeypatch, tune_config=config)["search"]["scheduler"]["num_samples"] == "auto"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({}, "the search has no metric or mode; write tune.TuneConfig"),
        ({"tune_config": tune.TuneConfig(**OBJECTIVE)}, "the length of a trial is not known"),
        (
            {"tune_config": tune.TuneConfig(scheduler=MedianStoppingRule(), **OBJECTIVE)},
            "MedianStoppingRule counts time_total_s; RubberBand counts iterations",
        ),
        (
            {"tune_config": tune.TuneConfig(scheduler=MedianStoppingRule(time_attr="training_iteration"), **OBJECTIVE)},
            "MedianStoppingRule has no counterpart; use ASHAScheduler or HyperBandScheduler",
        ),
        (
            {"tune_config": tune.TuneConfig(scheduler=ASHAScheduler(brackets=3), **OBJECTIVE)},
            "ASHAScheduler has 3 brackets; use brackets=1, or HyperBandScheduler",
        ),
    ],
)
def test_objects_without_a_counterpart_are_refused(given, line):
    with pytest.raises(InputError, match=re.escape(line)):
        Tuner(train, param_space=SPACE, **given)


def test_a_class_of_ray_tune_is_refused():
    with pytest.raises(InputError, match="Trainable is a class; write a"):
        Tuner(tune.Trainable)
