"""The optional methods of a `TorchTrial` on one worker: weights, modes, steps, states, metrics; and bad input."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import rubberband
from rubberband.errors import EntrypointError
from rubberband.executor import Entrypoint
from rubberband.values.adaptive import AdaptiveBatch
from tests.builders import segments
from tests.builders.checks import checked_here
from tests.builders.segments import content, failure, reports, variant


class Tokens(rubberband.TorchTrial):
    """Samples of unequal lengths; the loss is the mean over the valid places of a batch."""

    batch_size = 8
    seen: list[Any]

    def build_model(self, config):
        self.config, self.seen = config, []
        return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 12)).double()

    def build_optimizer(self, config, model):
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train_dataset(self, config):
        inputs = torch.randn(20, 4, dtype=torch.float64)
        labels = torch.randint(3, (20, 4))
        labels[torch.arange(4) >= (torch.arange(20) % 5).unsqueeze(1)] = -100
        return TensorDataset(inputs, labels)

    def eval_dataset(self, config):
        return self.train_dataset(config)

    def loss(self, model, batch):
        inputs, labels = batch
        return torch.nn.functional.cross_entropy(model(inputs).view(-1, 3, 4), labels)

    def weight(self, batch):
        return (batch[1] >= 0).sum()


class Small(Tokens):
    max_batch_size_per_gpu = 3


class One(Tokens):
    """Micro-batches of one, of which some have no valid place: their mean is NaN, and they count nothing."""

    max_batch_size_per_gpu = 1


def test_adaptive_batches_are_weighted_too(store):
    class Adaptive(Small):
        batch_size = 4
        samples_per_iteration = 80

    batch = AdaptiveBatch(initial=4, max=16, interval=8)
    found = reports(train(Adaptive, store, batch=batch, until_iterations=2))
    assert found[-1].batch.batches[-1].noise_scale is not None
    assert found[-1].metrics["loss"] < found[0].metrics["loss"]


class Metrics(Tokens):
    def loss(self, model, batch):
        inputs, labels = batch
        loss = super().loss(model, batch)
        return loss, {"first": inputs[labels >= 0].mean(), "double": 2 * loss, "one": 1}


train = partial(segments.train, until_iterations=3)


@pytest.mark.by_default(1)
@pytest.mark.parametrize("parts", [Small, One])
def test_a_batch_counts_by_its_weight_however_it_is_divided(store, parts):
    whole, divided = reports(train(Tokens, store)), reports(train(parts, store))
    for one, other in zip(whole, divided, strict=True):
        assert other.metrics == pytest.approx(dict(one.metrics), rel=1e-10)


def test_metrics_of_the_loss_are_means_by_weight_over_an_iteration_and_over_the_evaluation_set(store):
    whole = reports(train(Metrics, store))
    divided = reports(train(variant(Metrics, max_batch_size_per_gpu=3), store))
    for one, other in zip(whole, divided, strict=True):
        assert set(one.metrics) == {
            "loss",
            "first",
            "double",
            "one",
            "train_loss",
            "train_first",
            "train_double",
            "train_one",
        }
        assert one.metrics["train_double"] == pytest.approx(2 * one.metrics["train_loss"])
        assert other.metrics == pytest.approx(dict(one.metrics), rel=1e-10)
    plain = reports(train(Tokens, store))
    assert [report.metrics["loss"] for report in whole] == [report.metrics["loss"] for report in plain]


class Frozen(Tokens):
    """BatchNorm frozen in part: the first one keeps its statistics, the second one learns."""

    batch_size = 5
    max_batch_size_per_gpu = 2
    weight = rubberband.TorchTrial.weight

    def build_model(self, config):
        norms = [torch.nn.BatchNorm1d(4, dtype=torch.float64) for _ in range(2)]
        self.norms = norms
        if config.get("all"):
            norms[1] = torch.nn.Identity()
        self.seen = []
        return torch.nn.Sequential(norms[0], torch.nn.Linear(4, 4).double(), norms[1])

    def train_mode(self, model):
        model[0].eval()

    def loss(self, model, batch):
        self.seen.append((len(batch[0]), model.training, [norm.training for norm in self.norms]))
        return model(batch[0]).square().mean()

    def on_step(self, model, step, batch_size):
        Frozen.last = self.seen


@pytest.mark.by_default(1)
@pytest.mark.parametrize(("everything", "sizes"), [(False, {2, 3}), (True, {1, 2})])
def test_frozen_batch_norm_stays_frozen_and_does_not_limit_the_micro_batches(store, everything, sizes):
    last = reports(train(Frozen, store, config={"all": everything}))[-1]
    model = content(store, last)["model"]
    assert model["0.running_mean"].tolist() == [0.0] * 4
    if not everything:
        assert model["2.running_mean"].tolist() != [0.0] * 4
    trained = [size for size, training, (first, _) in Frozen.last if training and not first]
    assert set(trained) == sizes


class Averaged(Tokens):
    """An exponential average of the weights, by which it is evaluated."""

    def build_optimizer(self, config, model):
        self.ema = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        self.ema.eval()
        self.steps: list[tuple[int, int]] = []
        return super().build_optimizer(config, model)

    def on_step(self, model, step, batch_size):
        assert not torch.is_grad_enabled()
        self.ema.update_parameters(model)
        self.steps.append((step, batch_size))

    def state_dict(self):
        return {"ema": self.ema.state_dict(), "steps": self.steps}

    def load_state_dict(self, state):
        self.ema.load_state_dict(state["ema"])
        self.steps = state["steps"]

    def evaluate(self, model, loader):
        return super().evaluate(self.ema, loader)


def test_the_state_of_a_trial_is_in_its_checkpoint_and_counts_go_on(store):
    straight = reports(train(Averaged, store))
    first = reports(train(Averaged, store, until_iterations=1))[-1]
    rest = reports(train(Averaged, store, from_iterations=1, checkpoint=first.checkpoint))
    assert [report.metrics for report in rest] == [report.metrics for report in straight[1:]]
    saved = content(store, rest[-1])
    assert saved["trial"]["steps"] == [(step, 4 if step % 3 == 0 else 8) for step in range(1, 10)]
    assert saved["steps"] == 9
    assert straight[-1].metrics != reports(train(Tokens, store))[-1].metrics


def test_a_checkpoint_without_a_state_still_loads_and_one_with_a_state_needs_the_methods(store, capsys):
    old = reports(train(Tokens, store, until_iterations=1))[-1]
    reports(train(Averaged, store, from_iterations=1, checkpoint=old.checkpoint))
    assert "older than load_state_dict(), which is not called" in capsys.readouterr().err
    new = reports(train(Averaged, store, until_iterations=1))[-1]
    message = failure(train(Tokens, store, from_iterations=1, checkpoint=new.checkpoint)).message
    assert message == (
        "the checkpoint does not fit the trial: ValueError: it holds what state_dict() returned, and Tokens has none"
    )


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"weight": lambda self: 1.0}, "weight(self) cannot be called by rubberband, which calls weight(self, batch):"),
        ({"on_step": lambda self, model: None}, "which calls on_step(self, model, step, batch_size): write it so"),
        ({"train_mode": lambda self: None}, "which calls train_mode(self, model)"),
        ({"state_dict": lambda self: {}}, "state_dict() is there without load_state_dict(): write both"),
        ({"load_state_dict": lambda self, state: {}}, "load_state_dict() is there without state_dict(): write both"),
    ],
)
def test_methods_that_cannot_be_called_are_refused_before_anything_starts(methods, message):
    with pytest.raises(EntrypointError) as refused:
        Entrypoint.from_object(variant(Tokens, **methods))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (None, "TypeError: weight() returned NoneType; return the number that the batch counts"),
        (-1.0, "ValueError: weight() returned -1.0; return a finite number of at least 0, such as the tokens"),
        (float("nan"), "ValueError: weight() returned nan; return a finite number of at least 0"),
        (torch.ones(2), "ValueError: weight() returned a tensor of shape (2,); return one number, its sum"),
        (0, "ValueError: weight() returned 0 for every batch; return what counts in a batch, such as its tokens"),
    ],
)
def test_bad_weights_are_one_line(store, weight, message):
    assert message in failure(train(variant(Tokens, weight=lambda self, batch: weight), store)).message


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda loss: None, "TypeError: loss() returned NoneType; return the mean loss, a tensor, or (loss, mapping"),
        (lambda loss: (loss, 3), "TypeError: loss() returned (Tensor, int); return the mean loss"),
        (lambda loss: loss.expand(2), "ValueError: loss() returned a loss of shape (2,); return its mean, a scalar"),
        (lambda loss: (loss, {"a": "b"}), "TypeError: loss() returned the metric 'a' as str; return a number"),
        (lambda loss: (loss, {"a": torch.ones(2)}), "the metric 'a' of shape (2,); return its mean"),
        (lambda loss: (loss, {"loss": loss}), "a metric named 'loss'; use a text other than 'loss'"),
        (lambda loss: (loss, {3: loss}), "a metric named 3; use a text"),
        (lambda loss: (loss, {str(loss.item()): 1}), "loss() returned other metrics than before ("),
    ],
)
def test_bad_losses_and_metrics_are_one_line(store, returned, message):
    def loss(self, model, batch):
        return returned(Tokens.loss(self, model, batch))

    assert message in failure(train(variant(Tokens, loss=loss), store)).message


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"ema": [torch.zeros(2), torch.ones(2)]}, "state_dict()['ema'][1]"),
        ({"n": 4}, "state_dict()['n']"),
        ({"new": 4}, "state_dict()"),
        ({"ema": []}, "state_dict()['ema']"),
        ({}, None),
    ],
)
def test_a_state_that_is_not_restored_is_found(change, place):
    def state_dict(self):
        state = {"ema": [torch.zeros(2), torch.tensor([0.0, torch.nan])], "n": 3, "of its own": object}
        return {**state, **getattr(self, "change", {})}

    def load_state_dict(self, state):
        self.change = change

    trial = variant(Tokens, state_dict=state_dict, load_state_dict=load_state_dict)
    segment = replace(segments.SEGMENT, until_iterations=1, max_iterations=2)
    problems, _ = checked_here(Entrypoint.from_object(trial), segment)
    lines = [problem.line for problem in problems]
    line = f"restore: after load_state_dict(), {place} is not what was saved; restore it in load_state_dict()"
    assert lines == ([] if place is None else [line])
