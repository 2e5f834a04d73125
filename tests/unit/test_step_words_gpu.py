"""The words of a trial about its step on a real GPU: half precision, compiled kernels, layouts, and resuming."""

from __future__ import annotations

import os
import shutil
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rubberband.executor import CheckpointStore, Entrypoint, SegmentReport, SegmentStarted, open_store, run_segment
from rubberband.executor.training.loop import first_step
from rubberband.values.adaptive import AdaptiveBatch
from tests.bench.training_models import ImagesTrial, TextTrial
from tests.builders.segments import SEGMENT

pytestmark = pytest.mark.gpu

IMAGES = {"width": 16, "batch": 64, "steps": 8}
TEXT = {"width": 64, "layers": 2, "length": 64, "batch": 32, "steps": 8}
FAST = {"precision": "bf16", "compile": True, "channels_last": True}
COMPILERS = {"CC": ("gcc", "clang"), "CXX": ("g++", "clang++")}
CAN_COMPILE = Path(sysconfig.get_path("include"), "Python.h").exists() and all(
    name in os.environ or any(map(shutil.which, usual)) for name, usual in COMPILERS.items()
)
compiled = pytest.mark.skipif(not CAN_COMPILE, reason="Triton needs a C and a C++ compiler and Python.h here")


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return open_store(str(tmp_path))


class Images(ImagesTrial):
    """ResNet-18, from the module of the tests."""


class Text(TextTrial):
    """A small GPT, from the module of the tests."""


def train(trial: type, store: CheckpointStore, config: dict[str, Any], **changes: Any) -> list[SegmentReport]:
    segment = replace(SEGMENT, metric="train_loss", device="cuda", config=config, max_iterations=4, **changes)
    items = list(run_segment(Entrypoint.from_object(trial), segment, store))
    assert isinstance(items[0], SegmentStarted), items
    assert all(isinstance(item, SegmentReport) for item in items[1:]), items
    return items[1:]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.parametrize(
    ("trial", "size", "words"),
    [
        (Images, IMAGES, {"precision": "bf16", "channels_last": True}),
        (Images, IMAGES, {"precision": "fp16", "gradient_clip_norm": 1.0}),
        pytest.param(Images, IMAGES, FAST, marks=compiled),
        (Text, TEXT, {"precision": "bf16", "gradient_clip_norm": 1.0}),
        (Text, TEXT, {"precision": "fp16", "gradient_clip_norm": 1.0}),
        pytest.param(Text, TEXT, {**FAST, "channels_last": False}, marks=compiled),
    ],
)
def test_fast_words_learn_what_single_precision_learns(store, trial, size, words):
    clipped = {"gradient_clip_norm": words.get("gradient_clip_norm")}
    plain, fast = (train(trial, store, {**size, "words": each}) for each in (clipped, words))
    expected = [report.metrics["train_loss"] for report in plain]
    assert [report.metrics["train_loss"] for report in fast] == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_resumed_trial_goes_on_as_one_that_never_stopped(store, precision):
    config = {**TEXT, "words": {"precision": precision, "gradient_clip_norm": 1.0}}
    straight = train(Text, store, config)
    (first,) = train(Text, store, config, until_iterations=1)
    rest = train(Text, store, config, from_iterations=1, checkpoint=first.checkpoint)
    expected = [report.metrics["train_loss"] for report in straight[1:]]
    assert [report.metrics["train_loss"] for report in rest] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("precision", ["32", "bf16", "fp16"])
def test_adaptive_batches_find_a_noise_scale_in_each_precision(store, precision):
    config = {**IMAGES, "steps": 40, "words": {"precision": precision, "channels_last": True}}
    # A profile measures at once; in training, so few and short steps leave hardly any time for it.
    *_, last = train(Images, store, config, batch=AdaptiveBatch(max=64), batch_mode="hold")
    scale = last.batch.batches[-1].noise_scale
    assert scale is not None
    assert 0.0 < scale < 1e7


def test_a_trial_gives_its_memory_back(store):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    train(Images, store, {**IMAGES, "words": {"precision": "bf16", "channels_last": True}})
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + (64 << 20)


def test_a_worker_begins():
    first_step("cuda")
