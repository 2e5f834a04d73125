"""Hooks, callbacks and attributes of Lightning: each is honoured, or refused by its name."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rubberband.executor import CheckpointStore, Entrypoint, SegmentFailure, SegmentReport, run_segment
from rubberband.executor.training.checking import _is_ours
from rubberband.integrations.lightning import LightningTrial, _TrainerSubstitute
from rubberband.integrations.lightning_hooks import CALLED, OPTIONS, OWN, REFUSED, EarlyStops, hooks_of
from tests.builders import segments

pytestmark = pytest.mark.usefixtures("one_thread")

L = pytest.importorskip("lightning.pytorch", reason="pip install 'rubberband-tune[lightning]'")
callbacks = pytest.importorskip("lightning.pytorch.callbacks")

SEGMENT = replace(segments.SEGMENT, metric="val_loss", until_iterations=9, max_iterations=9)


class Net(L.LightningModule):
    """Logs the same loss after every epoch."""

    done: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 1.0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.25)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=4)

    val_dataloader = train_dataloader


class Patient(Net):
    def configure_callbacks(self):
        return [callbacks.EarlyStopping("val_loss", patience=3)]


class PatientTrial(LightningTrial):
    def build_module(self, config):
        return Patient()


class SeldomTrial(PatientTrial):
    eval_every = 2


class Stopping(Net):
    def on_validation_epoch_end(self):
        if self.current_epoch == 1:
            self.trainer.should_stop = True

    def on_train_epoch_start(self):
        self.log("lr", self.optimizers().param_groups[0]["lr"])

    def teardown(self, stage):
        self.done.append(stage)


class StoppingTrial(LightningTrial):
    def build_module(self, config):
        return Stopping()


def train(trial: type, store: CheckpointStore, **changes: Any) -> list[SegmentReport]:
    items = list(run_segment(Entrypoint.from_object(trial), replace(SEGMENT, **changes), store))
    assert not isinstance(items[-1], SegmentFailure), items
    return items[1:]


def refusal(store: CheckpointStore, changes: dict[str, Any]) -> str:
    """The line that refuses a module with these attributes."""
    module = type("Odd", (Net,), changes)

    class Trial(LightningTrial):
        def build_module(self, config):
            return module()

    last = list(run_segment(Entrypoint.from_object(Trial), SEGMENT, store))[-1]
    assert isinstance(last, SegmentFailure), last
    assert "\n" not in last.message
    return last.message


def test_early_stopping_ends_the_trial(store):
    reports = train(PatientTrial, store)
    assert [report.ended for report in reports] == [False, False, False, True]


@pytest.mark.by_default(1)
@pytest.mark.parametrize("until", [1, 2, 3])
def test_patience_goes_on_after_a_resume(store, until):
    before = train(PatientTrial, store, until_iterations=until)
    assert not before[-1].ended
    rest = train(PatientTrial, store, from_iterations=until, checkpoint=before[-1].checkpoint)
    assert [report.iterations for report in rest] == list(range(until + 1, 5))
    assert rest[-1].ended


def test_patience_counts_evaluations_and_not_iterations(store):
    reports = train(SeldomTrial, store)
    assert [report.metrics["evaluated_at"] for report in reports if report.ended] == [6]  # evaluated at 1, 2, 4, 6
    assert len(reports) == 6


def test_a_module_may_stop_its_trainer_read_its_optimizer_and_tear_down(store):
    Net.done.clear()
    reports = train(StoppingTrial, store)
    assert [report.ended for report in reports] == [False, True]
    assert reports[0].metrics["lr"] == 0.25
    assert Net.done == ["fit"]


def test_a_metric_of_training_may_be_monitored():
    module = type("Own", (Net,), {"configure_callbacks": lambda self: callbacks.EarlyStopping("loss", patience=1)})
    stops = EarlyStops(module())
    assert [stops.are_over({"train_loss": value}, 0) for value in (2.0, 1.0, 1.0)] == [False, False, True]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"on_train_end": lambda self: None}, "Odd overrides on_train_end(), which RubberBand's loop does not call"),
        ({"on_fit_end": lambda self: None}, "Odd overrides on_fit_end(), which RubberBand's loop does not call; use"),
        ({"on_validation_model_eval": lambda self: None}, "call train() or eval() of its parts in on_validation_"),
        ({"log": lambda self, *args: None}, "Odd overrides log(), which RubberBand's loop does not call; log"),
        (
            {"configure_callbacks": lambda self: [callbacks.ModelCheckpoint(monitor="val_loss")]},
            "Odd.configure_callbacks() returned ModelCheckpoint, and only EarlyStopping works here; the trial keeps "
            "its checkpoints itself; leave it out",
        ),
        (
            {"configure_callbacks": lambda self: callbacks.LearningRateMonitor()},
            "returned LearningRateMonitor, and only EarlyStopping works here; do what it does in hooks of the module",
        ),
        (
            {"configure_callbacks": lambda self: type("Mine", (callbacks.EarlyStopping,), {})("val_loss")},
            "returned Mine, and only EarlyStopping works here",
        ),
        (
            {"configure_callbacks": lambda self: callbacks.EarlyStopping("val_acc")},
            "Odd: EarlyStopping monitors 'val_acc', which is not reported; the trial reports train_loss, val_loss",
        ),
        ({"on_train_batch_start": lambda self, *args: -1}, "Odd.on_train_batch_start() returned -1, which ends an"),
        ({"strict_loading": False}, "Odd sets strict_loading = False, and checkpoints hold the whole module; leave it"),
        (
            {"on_train_start": lambda self: setattr(self.trainer, "limit_val_batches", 1)},
            "self.trainer.limit_val_batches is not there in a LightningTrial, which has no Trainer",
        ),
        (
            {"on_train_start": lambda self: self.log("x", 1.0, colour="red")},
            "self.log('x') has an option colour, which has no effect here; leave it out",
        ),
        (
            {"on_train_start": lambda self: self.log("x", 1.0, False, True, False, True, "median")},
            "self.log('x') has reduce_fx=median; use mean, sum, min, max or a torchmetrics.Metric",
        ),
    ],
)  # fmt: skip
def test_a_hook_or_callback_that_is_not_run_is_refused_by_its_name(store, changes, line):
    assert line in refusal(store, changes)


def test_a_hook_that_a_later_version_adds_is_refused_by_its_name(store, monkeypatch):
    monkeypatch.setattr(L.LightningModule, "on_new_moon", lambda self: None, raising=False)
    L.LightningModule.on_new_moon.__module__ = "lightning.pytorch.core.hooks"
    assert "Odd overrides on_new_moon()" in refusal(store, {"on_new_moon": lambda self: None})
    assert train(PatientTrial, store, until_iterations=1)


def test_every_hook_of_lightning_is_called_or_refused():
    found = {*hooks_of(L.LightningModule), *hooks_of(L.LightningDataModule)}
    assert found - CALLED - OWN - REFUSED.keys() == set()
    assert not (CALLED & REFUSED.keys() | OWN & REFUSED.keys() | CALLED & OWN)
    own = {"training_step", "validation_step", "state_dict", "load_state_dict", "configure_sharded_model"}
    assert (CALLED | OWN | REFUSED.keys()) - found <= own, "a hook that is gone is a word too many"


def test_every_option_of_log_is_known():
    assert tuple(inspect.signature(L.LightningModule.log).parameters)[3:] == OPTIONS


def test_every_attribute_of_a_trainer_is_there_or_is_refused_by_its_name():
    class Trial:
        ended = False

    place, trial = _TrainerSubstitute.__new__(_TrainerSubstitute), Trial()
    place._trial = trial
    names = [name for name in dir(L.Trainer) if not name.startswith("_")]
    absent = [name for name in names if not hasattr(_TrainerSubstitute, name)]
    assert {"should_stop", "callbacks", "fast_dev_run"} <= set(dir(_TrainerSubstitute))
    assert {"strategy", "callback_metrics", "save_checkpoint"} <= set(absent)
    for name in absent:
        with pytest.raises(AttributeError, match=f"self.trainer.{name} is not there in a LightningTrial"):
            getattr(place, name)
        with pytest.raises(AttributeError, match=f"self.trainer.{name} is not there in a LightningTrial"):
            setattr(place, name, None)
    place.should_stop = True
    assert trial.ended


def test_a_refusal_of_a_hook_shows_no_code_but_the_users():
    assert _is_ours(inspect.getfile(EarlyStops))
    assert not _is_ours(__file__)
