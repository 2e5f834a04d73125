"""The torch loop on one worker: exact restores, accumulation, what an iteration is, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset, Subset, TensorDataset

from rubberband.executor import EvalLoader, Feed, Means, SegmentReport
from rubberband.executor import WorkerGang as Gang
from rubberband.executor.training import balancing, loop
from rubberband.executor.training.components import Division
from rubberband.executor.training.data import DatasetBatches
from rubberband.executor.training.loop import warm_kernels
from tests.builders import segments
from tests.builders.loops import Exact, Noisy, assert_identical, content
from tests.builders.segments import failure, reports, train

pytestmark = pytest.mark.usefixtures("one_thread")

SEGMENT = segments.SEGMENT


class EveryBatch(Noisy):
    """The schedule steps after every batch, and an iteration is less than an epoch."""

    scheduler_step = "batch"
    samples_per_iteration = 13


class Accumulating(Exact):
    """Micro-batches of at most three."""

    max_batch_size_per_gpu = 3


class Plateau(Exact):
    """Notes its iterations, and steps the schedule with the loss in training."""

    scheduler_metric: str | None = "train_loss"

    def on_iteration(self, model, iterations):
        assert model.training
        print(f"iteration {iterations}")


@pytest.mark.parametrize(
    ("trial", "config"), [(Noisy, {}), (Noisy, {"optimizer": "adam", "scheduler": "plateau"}), (EveryBatch, {})]
)
def test_restoring_after_every_iteration_equals_a_straight_run_bit_for_bit(store, trial, config):
    straight = reports(train(trial, store, config=config))
    before: SegmentReport | None = None
    for iterations in range(4):
        torch.manual_seed(iterations)  # what the process did before must not matter
        (before,) = reports(
            train(
                trial,
                store,
                config=config,
                from_iterations=iterations,
                until_iterations=iterations + 1,
                max_iterations=4,
                checkpoint=before and before.checkpoint,
            )
        )
        assert before.metrics == straight[iterations].metrics
        assert_identical(content(store, before.checkpoint), content(store, straight[iterations].checkpoint))


class Diverging(Exact):
    """Its evaluation hides what is not a number, as libraries do."""

    spoils_weights = True

    def loss(self, model, batch):
        return super().loss(model, batch) * (torch.nan if self.spoils_weights else 1.0)

    def evaluate(self, model, loader):
        return {name: float(np.nan_to_num(value)) for name, value in super().evaluate(model, loader).items()}


class OneBadBatch(Diverging):
    """A loss that is no number, in a step that is left out as a GradScaler does."""

    spoils_weights = False

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return loss + torch.full((), torch.nan) if model.training else loss  # its gradients are finite


def test_a_trial_that_diverged_is_no_result_though_its_metric_is_finite(store):
    found = failure(train(Diverging, store))
    assert found.kind == "not_a_number"
    assert found.message.startswith("train_loss is nan, and the weights of ")
    assert all(np.isfinite(report.metrics["loss"]) for report in reports(train(OneBadBatch, store)))


def test_accumulation_changes_nothing(store):
    whole, parts = reports(train(Exact, store)), reports(train(Accumulating, store))
    for one, other in zip(whole, parts, strict=True):
        assert other.metrics == pytest.approx(dict(one.metrics), rel=1e-12)


def test_an_iteration_is_an_epoch_or_as_many_samples_as_asked_for(store):
    assert [content(store, r.checkpoint)["sampler"] for r in reports(train(Noisy, store))] == [
        (1, 0),
        (2, 0),
        (3, 0),
        (4, 0),
    ]
    positions = [content(store, report.checkpoint)["sampler"] for report in reports(train(EveryBatch, store))]
    done = [epoch * 20 + position for epoch, position in positions]
    assert done == [16, 28, 40, 56]  # at least 13, 26, 39 and 52, in whole batches of 8, 8 and 4


def test_the_global_batch_size_may_come_from_the_configuration(store):
    class Configured(Exact):
        def global_batch_size(self, config):
            return config["batch"]

    small, large = (reports(train(Configured, store, config={"batch": size}))[0] for size in (2, 20))
    assert small.metrics != large.metrics
    bad = failure(train(Configured, store, config={"batch": 0}))
    assert bad.message == "ValueError: global_batch_size() must be a positive integer, not 0"


class Items(Dataset[Any]):
    def __getitem__(self, index):
        return {"x": torch.tensor([float(index)])}

    def __len__(self):
        return 7


class Batches(Items):
    def __getitems__(self, indices):
        return [{"x": torch.tensor([float(index)])} for index in indices]

    def __getitem__(self, index):
        raise AssertionError("asked one by one")


@pytest.mark.parametrize("dataset", [Items(), Batches()])
def test_datasets_are_collated(dataset):
    assert DatasetBatches(dataset, None).batch(np.array([3, 5]))["x"].tolist() == [[3.0], [5.0]]
    assert DatasetBatches(dataset, len).batch(np.array([3, 5])) == 2


def test_subsets_of_tensors_are_indexed_at_once():
    tensors = TensorDataset(torch.arange(10), torch.arange(10) * 2)
    nested = Subset(Subset(tensors, [9, 7, 5, 3]), [0, 2, 3])
    assert [part.tolist() for part in DatasetBatches(nested, None).batch(np.array([2, 0]))] == [[3, 9], [6, 18]]


def test_the_evaluation_loader_walks_in_order_as_often_as_asked():
    loader = EvalLoader(Items(), partial(Feed, device=torch.device("cpu"), collate=None, seed=0), batch_size=3)
    assert (len(loader), loader.sizes) == (3, [3, 3, 1])
    for _ in range(2):
        assert [batch["x"].flatten().tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize("number", [float, partial(torch.tensor, dtype=torch.float64)])
@pytest.mark.parametrize("mean", [math.nan, math.inf])
def test_a_weight_of_zero_adds_nothing_with_any_mean(number, mean):
    means = Means(torch.device("cpu"))
    means.add(number(2.0), torch.tensor(3.0), {"error": 1.0, "other": torch.tensor(4.0)})
    means.add(number(0.0), torch.tensor(mean), {"error": mean, "other": torch.tensor(mean)})
    assert means.reduce(Gang(0, 1, None)) == {"loss": 3.0, "error": 1.0, "other": 4.0}


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (
            iter([1]),
            "TypeError: train_dataset() returned list_iterator, which is not a map-style dataset (len and [i])",
        ),
        ([], "ValueError: train_dataset() returned an empty dataset"),
    ],
)
def test_unusable_datasets_are_refused(store, dataset, message):
    class Unusable(Noisy):
        def train_dataset(self, config):
            return dataset

    assert failure(train(Unusable, store)).message == message


def test_a_checkpoint_of_more_iterations_is_refused(store):
    last = reports(train(Noisy, store))[-1]
    refused = failure(train(Noisy, store, from_iterations=3, checkpoint=last.checkpoint))
    assert (refused.kind, refused.message) == ("checkpoint", "the checkpoint holds 4 iterations, not 3")


class Drawing(Exact):
    """Tells what it draws at random in training."""

    drawn: ClassVar[list[float]] = []

    def loss(self, model, batch):
        self.drawn.append(float(torch.rand(())))
        return super().loss(model, batch)


def test_every_step_of_every_iteration_draws_anew_and_the_same_after_a_restore(store):
    Drawing.drawn.clear()
    found = reports(train(Drawing, store))
    straight = list(Drawing.drawn)
    assert len(set(straight)) == len(straight) > len(found) > 1
    Drawing.drawn.clear()
    reports(train(Drawing, store, from_iterations=1, checkpoint=found[0].checkpoint))
    assert Drawing.drawn == straight[len(straight) // len(found) :]


def test_a_trial_notes_each_iteration_and_names_the_metric_of_a_plateau(store, capsys):
    train(Plateau, store, config={"scheduler": "plateau"}, until_iterations=2)
    assert capsys.readouterr().out == "iteration 1\niteration 2\n"


def test_a_plateau_of_a_metric_that_is_not_reported_is_refused(store):
    class Missing(Plateau):
        scheduler_metric = "accuracy"

    message = failure(train(Missing, store)).message
    assert message == "ValueError: scheduler_metric 'accuracy' is not reported; the trial reports train_loss, loss"


class Seen(TorchDispatchMode):
    """Notes the operations that are computed, and in which types."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for each in args:
            dtype = getattr(each, "dtype", None)
            self.found.add(f"{function.overloadpacket.__name__} {dtype}")
        return function(*args, **(kwargs or {}))


def test_a_worker_on_a_gpu_begins_with_kernels_that_the_first_measured_step_would_load():
    with Seen() as seen:
        warm_kernels(torch.device("cpu"), bf16=True)
    for dtype in (torch.float32, torch.bfloat16):
        assert {f"convolution {dtype}", f"convolution_backward {dtype}", f"addmm {dtype}"} <= seen.found
    assert any(name.startswith("_foreach_") for name in seen.found)


def test_a_worker_begins_also_where_a_library_is_broken(monkeypatch):
    def broken(*_: Any) -> None:
        raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED")

    monkeypatch.setattr(torch.nn.Conv2d, "forward", broken)
    warm_kernels(torch.device("cpu"), bf16=False)


@pytest.mark.parametrize(("compiles", "workers"), [(False, 0), (True, 0), (False, 1)])
def test_a_change_of_shares_costs_something_with_loader_workers_or_compile(monkeypatch, compiles, workers):
    class Divided(Exact):
        compile = compiles
        num_workers = workers

    said: dict[str, Any] = {}

    def made(*_: Any, **words: Any) -> Any:
        said.update(words)
        return Division()

    monkeypatch.setattr(balancing, "Balancing", made)
    monkeypatch.setattr(loop, "prepare", lambda *_, **__: None)  # compiles
    monkeypatch.setattr(loop.TorchRunner, "_make_step", lambda _: SimpleNamespace(precision=None))
    loop.TorchRunner(Divided(), replace(SEGMENT, num_workers=2), Gang(0, 2, None))
    assert said["is_costly"] is (compiles or workers > 0)


def test_a_checkpoint_has_the_states_of_all_components_that_have_one(store) -> None:
    kept = content(store, reports(train(Exact, store, until_iterations=1))[-1].checkpoint)
    head = ["format", "kind", "iterations", "seed", "data_seed", "metrics"]
    assert list(kept) == [*head, "built", "model", "parameters", "optimizer", "sampler", "steps", "scheduler"]
    assert (kept["format"], kept["kind"]) == (1, "torch")
