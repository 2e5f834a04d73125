"""The Trainer of Hugging Face in a function trial: epochs are reported, resuming is exact, faults are one line."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rubberband.executor.checkpoints import CheckpointStore, open_store
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.executor.training.folder import FolderCheckpoint
from rubberband.executor.training.run import run_segment
from rubberband.executor.training.segment import SegmentFailure, SegmentReport
from rubberband.integrations.transformers import fit
from tests.builders import segments

transformers = pytest.importorskip("transformers", reason="pip install 'rubberband-tune[transformers]'")
pytest.importorskip("accelerate", reason="pip install 'rubberband-tune[transformers]'")

SEGMENT = replace(segments.SEGMENT, metric="eval_loss", config={"lr": 0.01}, until_iterations=2)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return open_store(str(tmp_path))


class Tiny(torch.nn.Module):
    """A model with dropout, which takes and returns what the Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 2))

    def forward(self, inputs, labels):
        logits = self.body(inputs)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def samples(count: int) -> list[dict[str, Any]]:
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(count))
    return [{"inputs": each, "labels": int(each.sum() > 0)} for each in inputs]


def trainer(config: dict[str, Any], **words: Any) -> Any:
    arguments = {"learning_rate": config["lr"], "num_train_epochs": 3, "per_device_train_batch_size": 8} | words
    return transformers.Trainer(
        model_init=Tiny,
        args=transformers.TrainingArguments(report_to="none", use_cpu=True, disable_tqdm=True, **arguments),
        train_dataset=samples(32),
        eval_dataset=samples(8),
    )


def train(config):
    fit(trainer(config), steps_per_iteration=config.get("steps"))


def run(function: Any, store: CheckpointStore, **changes: Any) -> list[Any]:
    return list(run_segment(Entrypoint.from_object(function), replace(SEGMENT, **changes), store))


def losses(items: list[Any]) -> list[tuple[float, float]]:
    assert all(isinstance(item, SegmentReport) for item in items[1:]), items
    return [(item.metrics["eval_loss"], item.metrics["loss"]) for item in items[1:]]


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"lr": 0.01}, id="epochs"),
        pytest.param({"lr": 0.01, "steps": 3}, id="steps", marks=pytest.mark.long),
    ],
)
def test_a_trial_that_resumes_learns_what_one_never_stopped_learns(store, config):
    whole = run(train, store, config=config)
    first = run(train, store, config=config, until_iterations=1)
    rest = run(train, store, config=config, from_iterations=1, checkpoint=first[-1].checkpoint)
    assert losses(first) + losses(rest) == losses(whole)
    assert losses(whole)[0] != losses(whole)[1]
    assert whole[-1].metrics["epoch"] == (2 if config == {"lr": 0.01} else 1.5)
    kept = pickle.loads(pickle.loads(store.load(first[-1].checkpoint))["state"])
    assert isinstance(kept, FolderCheckpoint)
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"} <= set(
        kept.files
    )


def without_eval_data(config):
    made = trainer(config)
    made.eval_dataset = None
    fit(made)


def one_epoch(config):
    fit(trainer(config, num_train_epochs=1))


def weights_alone(config):
    fit(trainer(config, save_only_model=True))


def no_steps(config):
    fit(trainer(config), steps_per_iteration=0)


def no_trainer(config):
    fit(torch.nn.Linear(1, 1))


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "line"),
    [
        (without_eval_data, "the Trainer has no eval_dataset, so it has no eval_… metric; give it eval_dataset="),
        (
            one_epoch,
            "the Trainer has ended after 1 epochs (4 steps), and the search goes on; set num_train_epochs to the",
        ),
        (weights_alone, "save_only_model=True saves no optimizer, so a trial cannot resume; leave it out"),
        (no_steps, "steps_per_iteration=0 is below 1; give the steps of an iteration"),
        (no_trainer, "fit() got Linear, which is no transformers.Trainer; give one"),
    ],
)
def test_a_trainer_that_cannot_be_a_trial_is_refused_in_one_line(store, function, line):
    last = run(function, store)[-1]
    assert isinstance(last, SegmentFailure)
    assert line in last.message


def test_without_transformers_the_command_that_installs_it_is_named(store, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    last = run(no_trainer, store)[-1]
    assert "transformers is not installed; run pip install 'rubberband-tune[transformers]'" in last.message
