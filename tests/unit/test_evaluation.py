"""Evaluation on one worker: sums, its own batch, iterations without it, and memory that runs out."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import TensorDataset

import rubberband
from rubberband.executor import CheckpointStore, Entrypoint, SegmentReport, run_segment
from tests.builders.segments import SEGMENT


class Line(rubberband.TorchTrial):
    """A line through twelve points; counts its evaluations and notes the sizes of their batches."""

    batch_size = 4
    evaluations: ClassVar[list[list[int]]] = []

    def build_model(self, config):
        return torch.nn.Linear(1, 1).double()

    def build_optimizer(self, config, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def train_dataset(self, config):
        inputs = torch.linspace(-1, 1, 12, dtype=torch.float64).unsqueeze(1)
        return TensorDataset(inputs, 3 * inputs)

    def eval_dataset(self, config):
        return self.train_dataset(config)

    def loss(self, model, batch):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(model(inputs), targets)

    def evaluate(self, model, loader):
        self.evaluations.append([len(batch[0]) for batch in loader])
        return super().evaluate(model, loader)


@pytest.fixture(autouse=True)
def forgotten() -> None:
    Line.evaluations.clear()


def train(trial: type, store: CheckpointStore, **changes: Any) -> list[Any]:
    return list(run_segment(Entrypoint.from_object(trial), replace(SEGMENT, **changes), store))[1:]


def variant(base: type = Line, **attributes: Any) -> type:
    place = {"__module__": __name__, "__qualname__": "variant.<locals>.Variant"}
    return type("Variant", (base,), {**place, **attributes})


def test_a_mean_is_a_float_that_knows_its_parts():
    mean = rubberband.Mean(torch.tensor(6.0), 4)
    assert (mean, mean.sum, mean.count, mean / 2) == (1.5, 6.0, 4.0, 0.75)
    again = pickle.loads(pickle.dumps(mean))
    assert (again, again.sum, again.count) == (1.5, 6.0, 4.0)
    assert math.isnan(rubberband.Mean(1.0, 0))
    with pytest.raises(TypeError, match="takes two numbers, not 'much' and 3; give the sum over the samples"):
        rubberband.Mean("much", 3)


def test_an_evaluation_has_a_batch_of_its_own(store):
    whole = train(Line, store)
    assert Line.evaluations[-1] == [4, 4, 4]
    apart = train(variant(eval_batch_size=9), store)
    assert Line.evaluations[-1] == [9, 3]
    for one, other in zip(whole, apart, strict=True):
        assert other.metrics == pytest.approx(dict(one.metrics), rel=1e-10)
    train(variant(max_batch_size_per_gpu=3), store)
    assert Line.evaluations[-1] == [3, 3, 3, 3]


def test_iterations_between_evaluations_report_the_latest_with_its_iteration(store):
    every = [report.metrics["loss"] for report in train(Line, store, until_iterations=8)]
    Line.evaluations.clear()
    trial = variant(eval_every=3)
    found = train(trial, store, until_iterations=8)
    assert len(Line.evaluations) == 4
    assert [report.metrics["evaluated_at"] for report in found] == [1, 1, 3, 3, 3, 6, 6, 8]
    assert [report.metrics["loss"] for report in found] == [every[at - 1] for at in (1, 1, 3, 3, 3, 6, 6, 8)]
    assert len({report.metrics["train_loss"] for report in found}) == 8
    resumed = train(trial, store, from_iterations=4, until_iterations=7, checkpoint=found[3].checkpoint)
    assert [report.metrics["evaluated_at"] for report in resumed] == [3, 6, 7]
    assert [report.metrics["train_loss"] for report in resumed] == [r.metrics["train_loss"] for r in found[4:7]]


def test_a_schedule_by_the_metric_counts_regular_evaluations_wherever_a_segment_ends(store):
    def build_scheduler(self, config, optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e3, threshold_mode="abs")

    trial = variant(eval_every=2, build_scheduler=build_scheduler)
    whole = train(trial, store, until_iterations=7)
    before: SegmentReport | None = None
    for report in whole:  # every iteration is the end of a segment, and so evaluated
        (before,) = train(
            trial,
            store,
            from_iterations=report.iterations - 1,
            until_iterations=report.iterations,
            checkpoint=before and before.checkpoint,
        )
        assert before.metrics["train_loss"] == report.metrics["train_loss"]


@pytest.mark.parametrize("precision", ["32", "bf16"])
def test_weights_that_evaluate_swaps_are_those_that_it_measures(store, precision):
    class Swaps(Line):
        def build_model(self, config):
            return torch.nn.Linear(1, 1)

        def train_dataset(self, config):
            return TensorDataset(*(tensor.float() for tensor in super().train_dataset(config).tensors))

        def evaluate(self, model, loader):
            raw = rubberband.TorchTrial.evaluate(self, model, loader)["loss"]
            kept = {name: each.clone() for name, each in model.state_dict().items()}
            for each in model.parameters():
                each.fill_(100.0)
            averaged = rubberband.TorchTrial.evaluate(self, model, loader)["loss"]
            model.load_state_dict(kept)
            return {"loss": raw, "averaged": averaged}

    trial = variant(Swaps, precision=precision)
    assert all(report.metrics["averaged"] > 1e3 > report.metrics["loss"] for report in train(trial, store))


@pytest.mark.by_default(1)
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("pretended"), RuntimeError("CUDA error: out of memory")])
def test_an_evaluation_without_memory_goes_on_in_smaller_batches(store, capfd, error):
    class Large(Line):
        eval_batch_size = 12

        def evaluate(self, model, loader):
            for batch in loader:
                if len(batch[0]) > 4:
                    raise error
            return super().evaluate(model, loader)

    exact, found = train(Line, store), train(Large, store)
    for one, other in zip(exact, found, strict=True):
        assert other.metrics == pytest.approx(dict(one.metrics), rel=1e-10)
    assert capfd.readouterr().out.splitlines() == [
        f"rubberband: evaluation ran out of memory; its batches have {size} samples now" for size in (6, 3)
    ]


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"eval_batch_size": 0}, "ValueError: eval_batch_size must be a positive integer, not 0"),
        ({"eval_every": 1.5}, "ValueError: eval_every must be a positive integer, not 1.5"),
        (
            {"eval_on_all_ranks": True, "evaluate": lambda self, model, loader: {"loss": 1.0}},
            "evaluate() returned loss as a float, which the workers cannot join; return rubberband.Mean(sum, count), "
            "or set eval_on_all_ranks = False",
        ),
    ],
)
def test_bad_words_of_an_evaluation_are_one_line(store, attributes, message):
    found = list(run_segment(Entrypoint.from_object(variant(**attributes)), SEGMENT, store))
    assert found[-1].message == message
