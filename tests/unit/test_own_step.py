"""Trials that take their steps by their own method, on one worker: several optimizers, closures, and bad input."""

from __future__ import annotations

import io
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import rubberband
from rubberband.errors import EntrypointError
from rubberband.executor import Entrypoint, Group
from rubberband.values.adaptive import AdaptiveBatch
from tests.builders import segments
from tests.builders.segments import failure, reports, variant
from tests.builders.trials.segment_trials import Adversarial, Quasi

train = partial(segments.train, metric="train_loss")


@pytest.mark.by_default(1)
@pytest.mark.parametrize("trial", [Adversarial, Quasi])
def test_a_resumed_trial_learns_what_a_straight_one_learns(store, trial):
    straight = reports(train(trial, store))
    assert straight[-1].metrics["train_loss"] != straight[0].metrics["train_loss"]
    first = reports(train(trial, store, until_iterations=2))[-1]
    rest = reports(train(trial, store, from_iterations=2, checkpoint=first.checkpoint))
    assert [report.metrics for report in rest] == [report.metrics for report in straight[2:]]


def test_all_optimizers_and_schedules_are_in_the_checkpoint_by_their_names(store):
    last = reports(train(Adversarial, store))[-1]
    saved = torch.load(io.BytesIO(store.load(last.checkpoint)), weights_only=False)
    assert list(saved["optimizer"]) == ["critic", "maker"]
    assert saved["scheduler"][0]["last_epoch"] == 4
    assert saved["steps"] == 4 * 4
    assert set(last.metrics) == {"train_loss", "train_critic"}


def test_batches_are_fixed_which_is_said_before_anything_starts(store):
    entrypoint = Entrypoint.from_object(Adversarial)
    line = (
        "overrides step(), so its batches are fixed and batch.policy: goodput cannot change them; set batch.policy to"
    )
    with pytest.raises(EntrypointError) as refused:
        entrypoint.check(1, adaptive=True)
    assert line in str(refused.value)
    assert line in failure(train(Adversarial, store, batch=AdaptiveBatch())).message


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"max_batch_size_per_gpu": 4}, "leave it out, and divide the batch in step()"),
        ({"precision": "bf16"}, "leave it out, and compute under torch.autocast in step()"),
        ({"gradient_clip_norm": 1.0}, "leave it out, and clip in step() after backward()"),
        ({"gradient_compression": "bf16"}, "gradient_compression has no effect on an own step(); leave it out"),
        ({"static_graph": True}, "static_graph has no effect on an own step(); leave it out"),
        (
            {"build_optimizer": lambda *_: []},
            "build_optimizer() returned []; return a torch.optim.Optimizer, or several",
        ),
        ({"build_optimizer": lambda *_: [3]}, "build_optimizer() returned [3]; return a torch.optim.Optimizer"),
        ({"build_scheduler": lambda *_: [3]}, "build_scheduler() returned [3]; return a schedule of torch.optim"),
        ({"step": lambda *_: None}, "TypeError: step() returned NoneType; return the mean loss"),
        ({"step": lambda *_: (1.0, 2)}, "TypeError: step() returned (Tensor, int); return the mean loss"),
        ({"step": lambda *_: torch.ones(2)}, "ValueError: step() returned a loss of shape (2,); return its mean"),
    ],
)
def test_bad_input_is_one_line(store, members, message):
    assert message in failure(train(variant(Adversarial, **members), store)).message


def test_a_step_that_cannot_be_called_or_a_class_without_a_loss_is_refused():
    with pytest.raises(
        EntrypointError, match=r"which calls step\(self, model, optimizers, batch\): write it so, or ren"
    ):
        Entrypoint.from_object(variant(Adversarial, step=lambda self, x: x))
    with pytest.raises(EntrypointError, match=r"lacks loss\(\)"):
        Entrypoint.from_object(variant(Adversarial, step=rubberband.TorchTrial.step))


def test_the_default_evaluation_needs_a_loss(store):
    def eval_dataset(self, config):
        return TensorDataset(torch.zeros(4, 2))

    message = failure(train(variant(Adversarial, eval_dataset=eval_dataset), store)).message
    assert message == "NotImplementedError: Variant has no loss() for the default evaluate(); write one of them"


def test_lack_of_memory_names_the_samples(store):
    def step(self, model, optimizers, batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    message = failure(train(variant(Adversarial, step=step), store)).message
    assert message.endswith("step() takes 16 samples at once: use a smaller batch_size, or divide the batch in step()")


def test_states_of_other_optimizers_are_refused():
    weights = [torch.zeros(2, requires_grad=True)]
    two = Group[Any]([torch.optim.SGD(weights), torch.optim.SGD(weights)])
    three = Group[Any]([*two.members, torch.optim.SGD(weights)])
    with pytest.raises(ValueError, match=r"it has the states of \[0, 1\], and the trial builds \[0, 1, 2\]"):
        three.load_state_dict(two.state_dict())
