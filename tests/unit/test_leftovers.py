"""A trial finds its process as the import of its module left it, whatever the trials before it left there."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import socket
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

import rubberband
from rubberband.executor import (
    Entrypoint,
    Leftovers,
    SegmentFailure,
    SegmentReport,
    gang,
    open_store,
    run_segment,
    run_server,
)
from rubberband.values.asynchronous import AsyncTraining
from tests.builders import segments
from tests.builders.segments import reports
from tests.builders.trials.leftover_trials import leave_everything

PRECISIONS = tuple(
    name for name in Leftovers("cpu").switches if name.endswith(("fp32_precision", "allow_tf32", "matmul precision"))
)


@pytest.fixture(autouse=True)
def process(one_thread: None, tmp_path: Path) -> Iterator[None]:
    """Put the process back even where a test fails; a default device of the script is none of a trial's."""
    before = Leftovers("cpu")
    multiprocessing.set_start_method(None, force=True)  # as in a worker, where no other test has used the default
    yield
    before.close()


def spoil(folder: str) -> None:
    leave_everything()
    os.chdir(folder)


def seen() -> Any:
    found = Leftovers("cpu")
    hooked = torch.nn.Identity()(torch.ones(2)).shape
    lists = list(logging.root.handlers), list(warnings.filters), hooked  # copies, whatever is noted
    return found.switches, found.settings, lists, dict(os.environ), Path.cwd(), dist.is_initialized()


def function(config: dict[str, Any]) -> None:
    spoil(config["folder"])
    rubberband.report({"loss": 1.0}, checkpoint=1)


class Broken(rubberband.Trial):
    def setup(self, config, context):
        spoil(config["folder"])
        raise ValueError("it fails after that")

    def iterate(self):
        return {}

    def save(self):
        return None

    def load(self, state):
        pass


class Regression(rubberband.TorchTrial):
    batch_size = 4

    def build_model(self, config):
        return torch.nn.Linear(2, 1, device="cpu")

    def build_optimizer(self, config, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def train_dataset(self, config):
        return TensorDataset(torch.zeros(8, 2), torch.zeros(8, 1))

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()


class Spoiling(Regression):
    def build_model(self, config):
        spoil(config["folder"])
        raise ValueError("it fails after that")


@pytest.mark.by_default(2)
@pytest.mark.parametrize(
    ("trial", "training"),
    [(function, None), (Broken, None), (Spoiling, None), (Spoiling, AsyncTraining(servers=1))],
    ids=["function", "Trial", "TorchTrial", "asynchronous"],
)
def test_a_trial_leaves_its_process_as_it_found_it(trial: Any, training: AsyncTraining | None, tmp_path: Path) -> None:
    config = {"folder": str(tmp_path)}
    segment = replace(
        segments.SEGMENT, until_iterations=1, config=config, training=training, servers=("localhost:1",), secret="00"
    )
    before = seen()
    items = list(run_segment(Entrypoint.from_object(trial), segment, open_store(str(tmp_path / "store"))))
    assert seen() == before
    assert isinstance(items[-1], SegmentReport if trial is function else SegmentFailure)


def test_a_trial_leaves_the_process_of_a_parameter_server_as_it_found_it(tmp_path: Path) -> None:
    segment = replace(segments.SEGMENT, config={"folder": str(tmp_path)}, training=AsyncTraining(servers=1))
    before = seen()
    failure = run_server(Entrypoint.from_object(Spoiling), segment, 0, socket.create_server(("127.0.0.1", 0)))
    assert failure is not None
    assert failure.message == "ValueError: it fails after that"
    assert seen() == before


def test_a_step_of_putting_back_that_fails_keeps_no_other_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("pretended")

    left = Leftovers("cpu")
    torch.set_default_dtype(torch.float64)
    monkeypatch.setattr(os, "chdir", fails)
    left.close()
    assert torch.get_default_dtype() is torch.float32


def test_an_alarm_that_a_trial_leaves_finds_a_handler_until_it_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    alarms: list[tuple[float, float]] = []
    signal.setitimer(signal.ITIMER_REAL, 0.0)  # pytest's own
    real, left = signal.signal, Leftovers("cpu")
    signal.setitimer(signal.ITIMER_REAL, 3600.0)
    signal.signal(signal.SIGALRM, lambda *_: None)
    monkeypatch.setattr(
        signal, "signal", lambda *handled: [alarms.append(signal.getitimer(signal.ITIMER_REAL)), real(*handled)][1]
    )
    left.close()
    assert set(alarms) == {(0.0, 0.0)}


def test_a_group_of_gpus_that_a_trial_leaves_is_aborted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """To destroy it would wait for workers that may be gone."""
    asked: list[Any] = []
    monkeypatch.setattr(gang, "leave_group", lambda device, *, in_order: asked.append((device, in_order)))
    left = Leftovers("cuda")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    left.close()
    dist.destroy_process_group()
    assert asked == [("cuda", False)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PRECISIONS), st.sampled_from(["tf32", "ieee", "none"])), max_size=6))
def test_precisions_are_put_back_by_whichever_of_their_names_they_were_set(changes: list[tuple[str, str]]) -> None:
    before = Leftovers("cpu")
    for name, value in changes:
        owner, _, attribute = name.rpartition(".")
        with contextlib.suppress(RuntimeError):  # not every value fits each
            if not owner:
                torch.set_float32_matmul_precision({"tf32": "high", "ieee": "highest", "none": "medium"}[value])
            else:
                setattr(attrgetter(owner)(torch), attribute, value == "tf32" if attribute == "allow_tf32" else value)
    gc.freeze()  # a collection of all that the tests have made takes long
    before.close()
    gc.unfreeze()
    assert Leftovers("cpu").switches == before.switches


_models: list[weakref.ref[Any]] = []


def keeps_a_model(config: dict[str, Any]) -> None:
    model = torch.nn.Linear(2, 1)
    _models.append(weakref.ref(model))
    rubberband.report({"loss": 1.0}, checkpoint=1)
    raise ValueError("its trace-back holds the model")


def test_a_failed_function_s_model_is_freed_before_the_next_trial(tmp_path: Path) -> None:
    gc.disable()
    try:
        segment = replace(segments.SEGMENT, until_iterations=2)
        items = list(run_segment(Entrypoint.from_object(keeps_a_model), segment, open_store(str(tmp_path))))
        left = [model() for model in _models]  # before Python may collect by itself
    finally:
        gc.enable()
    assert isinstance(items[-1], SegmentFailure)
    assert left == [None]


def of_the_thread(config: dict[str, Any]) -> None:
    device = torch.empty(0).device.type
    assert (device, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")) == ("meta", False, True)
    rubberband.report({"loss": 1.0}, checkpoint=1)


def test_a_function_finds_the_switches_that_its_script_has_set(tmp_path: Path) -> None:
    """It runs in a thread, which inherits none of them."""
    segment = replace(segments.SEGMENT, until_iterations=1)
    torch.set_default_device("meta")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        items = list(run_segment(Entrypoint.from_object(of_the_thread), segment, open_store(str(tmp_path))))
    assert len(reports(items)) == 1


class Numbers(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.zeros(2) + index / 8, torch.ones(1)


class Loaded(Regression):
    num_workers = 1

    def train_dataset(self, config):
        return Numbers()


@pytest.mark.by_default(1)
@pytest.mark.parametrize("trial", [Loaded, Regression])
def test_a_torch_trial_trains_and_is_saved_as_ever_where_its_script_sets_a_default_device(trial, tmp_path) -> None:
    def trained() -> list[Any]:
        items = list(run_segment(Entrypoint.from_object(trial), segment, open_store(str(tmp_path))))
        return [(each.metrics, each.checkpoint and each.checkpoint.size_bytes) for each in reports(items)]

    segment = replace(segments.SEGMENT, until_iterations=2, metric="train_loss")
    alone = trained()
    if trial is Regression:
        trial.train_dataset = lambda *_: TensorDataset(torch.zeros(8, 2, device="cpu"), torch.zeros(8, 1, device="cpu"))
    torch.set_default_device("meta")
    assert trained() == alone
