"""Data that are made at random: the same in all trials of an experiment, in every gang, resume and restored trial."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset, random_split

import rubberband
from rubberband.executor import (
    CheckpointStore,
    Entrypoint,
    ExperimentFolder,
    RunSpec,
    SegmentReport,
    TrialResult,
    run_segment,
)
from rubberband.executor.result.restoring import restore_trial
from rubberband.spec.search import Sampler
from rubberband.values.plan import Spent
from tests.builders import segments
from tests.builders.experiments import experiment

pytestmark = pytest.mark.usefixtures("one_thread")

SEGMENT = replace(segments.SEGMENT, data_seed=5, until_iterations=2)


class Split(rubberband.TorchTrial):
    """Holds out a part at random, in each of the two methods; notes the parts, the first weights and the order."""

    batch_size = 8
    seen: ClassVar[dict[str, Any]] = {}

    def build_model(self, config):
        model = nn.Linear(1, 1)
        self.seen["weight"] = model.weight.item()
        return model

    def build_optimizer(self, config, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def parts(self):
        return random_split(TensorDataset(torch.arange(40.0).unsqueeze(1)), [30, 10])

    def train_dataset(self, config):
        train = self.parts()[0]
        self.seen["train"] = list(train.indices)
        return train

    def eval_dataset(self, config):
        held_out = self.parts()[1]
        self.seen["eval"] = list(held_out.indices)
        return held_out

    def loss(self, model, batch):
        self.seen.setdefault("order", batch[0].flatten().tolist())
        return model(batch[0] / 40).square().mean()


def trained(store: CheckpointStore, **changes: Any) -> tuple[Mapping[str, Any], SegmentReport]:
    Split.seen.clear()
    last = list(run_segment(Entrypoint.from_object(Split), replace(SEGMENT, **changes), store))[-1]
    assert isinstance(last, SegmentReport), last
    return dict(Split.seen), last


def test_trials_have_the_same_parts_and_their_own_weights_and_order(store):
    one, _ = trained(store, seed=11)
    other, _ = trained(store, seed=12)
    assert one["train"] == other["train"]
    assert one["eval"] == other["eval"]
    assert sorted(one["train"] + one["eval"]) == list(range(40)), "the parts are of one division"
    assert one["weight"] != other["weight"]
    assert one["order"] != other["order"]


def test_a_resumed_trial_has_the_same_parts(store):
    whole, report = trained(store)
    resumed, _ = trained(store, from_iterations=2, until_iterations=3, checkpoint=report.checkpoint)
    assert resumed["train"] == whole["train"]
    assert resumed["eval"] == whole["eval"]


def test_a_restored_trial_makes_the_parts_that_it_was_trained_with(store):
    seen, report = trained(store)
    found = TrialResult(
        trial=4,
        status="completed",
        configuration={},
        iterations=2,
        metrics=report.metrics,
        failures=0,
        failure=None,
        checkpoint=report.checkpoint,
        curve=(),
    )
    trial = restore_trial(found, Split, is_simulated=False)
    torch.manual_seed(0)
    assert list(trial.eval_dataset({}).indices) == seen["eval"]
    assert list(trial.train_dataset(config={}).indices) == seen["train"]


def test_a_run_has_the_seed_of_its_sampler(tmp_path):
    asked = experiment()
    search = asked.search.model_copy(update={"sampler": Sampler(type="random", seed=9)})
    asked = asked.model_copy(update={"search": search})
    setup = RunSpec.of(asked, None, ExperimentFolder(home=tmp_path, name="test"), Spent())
    assert RunSpec.from_json(json.loads(json.dumps(setup.to_json()))).data_seed == 9


def splits(config: dict[str, Any]) -> None:
    """Holds out a part at random at each start, as a script does, and reports its first sample."""
    done = rubberband.get_checkpoint() or 0
    _, held = random_split(range(1000), [900, 100])
    while True:
        done += 1
        rubberband.report({"loss": held.indices[0]}, checkpoint=done)


def test_a_function_holds_out_the_same_part_after_a_resume(store):
    first = segments.reports(segments.train(splits, store, until_iterations=1))
    rest = segments.train(splits, store, from_iterations=1, until_iterations=2, checkpoint=first[-1].checkpoint)
    assert segments.reports(rest)[0].metrics == first[0].metrics
