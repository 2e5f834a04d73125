"""`LightningTrial`: it learns what a TorchTrial learns, resumes exactly, and honours hooks or refuses them by name."""

from __future__ import annotations

import inspect
import random
import re
import sys
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, Subset, TensorDataset, random_split

import rubberband
from rubberband.executor import CheckpointStore, Entrypoint, SegmentFailure, SegmentReport, TrialResult, run_segment
from rubberband.executor.result.restoring import restore_trial
from rubberband.executor.training.checking import _is_ours
from rubberband.integrations.lightning import LightningTrial, _TrainerSubstitute
from rubberband.integrations.lightning_hooks import CALLED, OPTIONS, OWN, REFUSED, EarlyStops, hooks_of
from tests.builders import segments

pytestmark = pytest.mark.usefixtures("one_thread")

L = pytest.importorskip("lightning.pytorch", reason="pip install 'rubberband-tune[lightning]'")
callbacks = pytest.importorskip("lightning.pytorch.callbacks")
torchmetrics = pytest.importorskip("torchmetrics")

SEGMENT = replace(segments.SEGMENT, metric="val_loss", config={"lr": 0.1})


def samples() -> TensorDataset:
    inputs = torch.randn(60, 4)
    return TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())


class Net(L.LightningModule):
    """A small classifier that logs numbers, a torchmetrics.Metric and how far it is."""

    def __init__(self, lr: float, schedule: str = "none") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=2, average="micro")

    def forward(self, inputs):
        return self.body(inputs)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self(inputs), targets)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        outputs = self(inputs)
        self.accuracy(outputs, targets)
        self.log_dict({"val_loss": nn.functional.cross_entropy(outputs, targets), "val_acc": self.accuracy})
        self.log("seen", float(len(targets)), reduce_fx="sum")

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        if self.hparams.schedule == "plateau":
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_acc"}}
        if self.hparams.schedule == "step":
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=100)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]
        return optimizer


class Data(L.LightningDataModule):
    """Divides its samples at random in `setup`, as many do."""

    def setup(self, stage):
        self.train, self.val = random_split(samples(), [45, 15])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=4)


class Classifier(LightningTrial):
    """Its configuration says how the learning rate goes."""

    def build_module(self, config):
        return Net(**config)

    def build_datamodule(self, config):
        return Data()


class ByHand(rubberband.TorchTrial):
    """The same training, written as a TorchTrial."""

    batch_size = 8

    def build_model(self, config):
        return Net(config["lr"])

    def build_optimizer(self, config, model):
        return torch.optim.Adam(model.parameters(), lr=config["lr"])

    def train_dataset(self, config):
        return random_split(samples(), [45, 15])[0]

    def eval_dataset(self, config):
        return random_split(samples(), [45, 15])[1]

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train(trial: type, store: CheckpointStore, **changes: Any) -> list[SegmentReport]:
    items = list(run_segment(Entrypoint.from_object(trial), replace(SEGMENT, **changes), store))
    assert not isinstance(items[-1], SegmentFailure), items
    return items[1:]


def failure(trial: type, store: CheckpointStore, **changes: Any) -> str:
    last = list(run_segment(Entrypoint.from_object(trial), replace(SEGMENT, **changes), store))[-1]
    assert isinstance(last, SegmentFailure), last
    return last.message


def test_it_learns_what_the_same_torch_trial_learns(store):
    by_hand = train(ByHand, store, metric="loss", config={"lr": 0.02})
    module = train(Classifier, store, config={"lr": 0.02})
    for one, other in zip(by_hand, module, strict=True):
        assert other.metrics["val_loss"] == pytest.approx(one.metrics["loss"], rel=1e-6)
        assert other.metrics["train_loss"] == pytest.approx(one.metrics["train_loss"], rel=1e-6)
        assert other.metrics["seen"] == 15
        assert other.metrics["val_acc"] * 15 == pytest.approx(round(other.metrics["val_acc"] * 15), abs=1e-5)
    assert len({report.metrics["val_acc"] for report in module}) > 1, "the metric is reset after each iteration"


@pytest.mark.by_default(1)
@pytest.mark.parametrize("schedule", ["none", "plateau", "step"])
def test_resuming_is_exact(store, schedule):
    config = {"lr": 0.1, "schedule": schedule}
    whole = train(Classifier, store, config=config)
    first = train(Classifier, store, config=config, until_iterations=2)
    rest = train(Classifier, store, config=config, from_iterations=2, checkpoint=first[-1].checkpoint)
    assert [report.metrics for report in first + rest] == [report.metrics for report in whole]


def test_a_plateau_is_one_of_the_metric_that_is_monitored(store):
    class Watching(Classifier):
        def build_module(self, config):
            module = Net(config["lr"], "plateau")
            module.validation_step = lambda batch, index: module.log_dict(
                {"val_loss": 1.0, "val_acc": 0.5, "lr": rate()}
            )
            rate = lambda: module.trainer.optimizers[0].param_groups[0]["lr"]  # noqa: E731
            return module

    rates = [report.metrics["lr"] for report in train(Watching, store)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.001])


class Counting(Net):
    """Logs how far the trainer is, in the hooks."""

    def on_train_start(self):
        self.log("began", 1.0)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["kept"] = float(self.global_step)

    def on_load_checkpoint(self, checkpoint):
        self.kept = checkpoint["kept"]

    def on_train_epoch_start(self):
        assert self.training
        assert not self.accuracy.training
        assert self.trainer.max_epochs == SEGMENT.until_iterations
        assert self.trainer.estimated_stepping_batches == 6 * SEGMENT.until_iterations
        self.log("kept", getattr(self, "kept", 0.0))
        self.log("epoch", float(self.current_epoch))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("last_step", float(self.global_step), reduce_fx="max")
        self.log("last_batch", float(batch_idx), reduce_fx="max")

    def on_before_optimizer_step(self, optimizer):
        assert any(parameter.grad is not None for parameter in self.parameters())
        self.log("steps", 1.0, reduce_fx="sum")

    def on_validation_epoch_end(self):
        assert self.trainer.validating
        assert self.trainer.datamodule is not None
        assert not hasattr(self.trainer, "nothing")


class CountingTrial(Classifier):
    def build_module(self, config):
        module = Counting(**config)
        module.accuracy.eval()  # as frozen parts are
        return module


def test_hooks_are_called_and_know_how_far_it_is(store):
    reports = train(CountingTrial, store, until_iterations=2, max_iterations=SEGMENT.until_iterations)
    wanted = {"epoch", "last_step", "last_batch", "steps"}
    assert [{name: report.metrics[name] for name in wanted} for report in reports] == [
        {"epoch": 0, "last_step": 6, "last_batch": 5, "steps": 6},
        {"epoch": 1, "last_step": 12, "last_batch": 5, "steps": 6},
    ]
    assert ["began" in report.metrics for report in reports] == [True, False]
    rest = train(
        CountingTrial,
        store,
        from_iterations=2,
        checkpoint=reports[-1].checkpoint,
        until_iterations=3,
        max_iterations=SEGMENT.until_iterations,
    )
    assert (rest[0].metrics["epoch"], rest[0].metrics["last_step"], rest[0].metrics["kept"]) == (2, 18, 12)


@pytest.mark.long
def test_a_loader_for_evaluation_has_a_collate_function_of_its_own(store):
    class Apart(Data):
        def train_dataloader(self):
            return DataLoader(self.train, batch_size=8, collate_fn=lambda each: torch.utils.data.default_collate(each))

        def val_dataloader(self):
            return DataLoader(self.val, batch_size=4, collate_fn=lambda each: [torch.zeros(len(each), 4), torch.ones(
                len(each)).long()])  # fmt: skip

    class Trial(Classifier):
        def build_datamodule(self, config):
            return Apart()

    plain, apart = train(Classifier, store), train(Trial, store)
    assert [report.metrics["train_loss"] for report in apart] == [report.metrics["train_loss"] for report in plain]
    assert {report.metrics["val_acc"] for report in apart} <= {0.0, 1.0}


def test_the_module_may_have_the_loaders_itself(store):
    class Whole(Net):
        def train_dataloader(self):
            return DataLoader(samples(), batch_size=8, shuffle=True)

        def val_dataloader(self):
            return DataLoader(samples(), batch_size=8)

    class Trial(LightningTrial):
        def build_module(self, config):
            return Whole(config["lr"])

    assert train(Trial, store)[-1].metrics["val_loss"] < 0.5


class Split:
    """Draws in `prepare_data`, and divides at random in `setup`."""

    def prepare_data(self):
        torch.rand(1), random.random(), np.random.rand()

    def setup(self, stage):
        self.fit_part, self.val_part = random_split(samples(), [45, 15])

    def train_dataloader(self):
        return DataLoader(self.fit_part, batch_size=8)

    def val_dataloader(self):
        return DataLoader(self.val_part, batch_size=4)


class SplitData(Split, L.LightningDataModule):
    """Has its data apart from the module."""


class Drawing(Net):
    """Notes its data and its random numbers."""

    drawn: ClassVar[list[Any]] = []

    def configure_model(self):
        numbers = [self.body[0].bias[0].item(), torch.rand(1).item(), random.random(), np.random.rand()]
        self.drawn.append(numbers)

    def on_train_start(self):
        source = self.trainer.datamodule or self
        self.drawn.append([source.val_part.indices])


class SplitDrawing(Split, Drawing):
    """Has its data itself."""


class SplitTrial(LightningTrial):
    """Its configuration says where the data are."""

    def build_module(self, config):
        return SplitDrawing(0.1) if config["in_module"] else Drawing(0.1)

    def build_datamodule(self, config):
        return None if config["in_module"] else SplitData()


@pytest.mark.by_default(1)
@pytest.mark.parametrize("in_module", [False, True])
def test_all_trials_have_the_same_data_and_weights_of_their_own(store, in_module):
    found = []
    for seed, data_seed in ((11, 3), (12, 3), (12, 4)):
        Drawing.drawn.clear()
        train(SplitTrial, store, until_iterations=1, seed=seed, data_seed=data_seed, config={"in_module": in_module})
        found.append(list(Drawing.drawn))
    (numbers, data), (other_numbers, other_data), (same_numbers, elsewhere) = found
    assert data == other_data != elsewhere
    assert numbers != other_numbers == same_numbers, "the trial's random states do not depend on its data"


@pytest.mark.long
def test_all_workers_may_evaluate_where_means_are_logged(store):
    class OnAll(Classifier):
        eval_on_all_ranks = True

    assert "'val_acc' is no mean, which workers could join; set eval_on_all_ranks = False" in failure(OnAll, store)

    class Means(OnAll):
        def build_module(self, config):
            module = Net(**config)
            module.validation_step = lambda batch, index: module.log(
                "val_loss", nn.functional.cross_entropy(module(batch[0]), batch[1])
            )
            return module

    plain, on_all = train(Classifier, store, until_iterations=1), train(Means, store, until_iterations=1)
    assert on_all[0].metrics["val_loss"] == pytest.approx(plain[0].metrics["val_loss"])


def test_a_model_that_is_loaded_can_go_to_a_trainer(store):
    last = train(CountingTrial, store, until_iterations=2, max_iterations=SEGMENT.until_iterations)[-1]
    found = TrialResult(
        trial=4,
        status="completed",
        configuration=SEGMENT.config,
        iterations=2,
        metrics=last.metrics,
        failures=0,
        failure=None,
        checkpoint=last.checkpoint,
        curve=(),
    )
    module = restore_trial(found, CountingTrial, is_simulated=False).model
    assert not module.training
    assert module._trainer is None
    assert "log" not in vars(module)
    assert module.kept == 12, "what on_save_checkpoint has kept is there"


def test_adaptive_batches_train_it(store):
    from rubberband.values.adaptive import AdaptiveBatch

    batch = AdaptiveBatch(initial=8, max=32, max_per_gpu=32)
    reports = train(Classifier, store, batch=batch, until_iterations=2)
    assert reports[-1].batch.samples_per_iteration


class Logging(Net):
    """Logs in `training_step`: under several names, and a metric of torchmetrics."""

    def training_step(self, batch, batch_idx):
        outputs = self(batch[0])
        self.accuracy(outputs, batch[1])
        loss = nn.functional.cross_entropy(outputs, batch[1])
        self.log_dict({"train_loss": loss, "train_twice": 2 * loss, "accuracy": self.accuracy})
        return {"loss": loss}


def test_metrics_of_the_training_step_are_means_over_the_samples(store):
    class Trial(Classifier):
        def build_module(self, config):
            return Logging(**config)

    for report in train(Trial, store, until_iterations=2):
        assert report.metrics["train_twice"] == pytest.approx(2 * report.metrics["train_loss"])
        right = report.metrics["train_accuracy"] * 45
        assert right == pytest.approx(round(right), abs=1e-4)


def test_words_of_the_data_loader_are_kept():
    class Loaded(Data):
        def train_dataloader(self):
            return DataLoader(
                self.train, batch_size=8, num_workers=2, prefetch_factor=3, timeout=9, drop_last=True, shuffle=True
            )

    class Trial(Classifier):
        def build_datamodule(self, config):
            return Loaded()

    trial = Trial()
    assert trial.global_batch_size({"lr": 0.1}) == 8
    assert (trial.num_workers, trial.prefetch_factor, trial.loader_timeout_s, trial.drop_last) == (2, 3, 9, True)
    assert trial.eval_batch_size == 4


def optimized(**words: Any) -> dict[str, Any]:
    """A module whose optimizer comes with these keys; `schedule` has those of an LR schedule."""

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), **words.get("schedule", {})}
        rest = {key: value for key, value in words.items() if key != "schedule"}
        return {"optimizer": optimizer, **({"lr_scheduler": schedule} if "schedule" in words else {}), **rest}

    return {"configure_optimizers": configure_optimizers}


def logged(step: str, name: str, value: Any = 1.0, batches: Any = range(99), **words: Any) -> dict[str, Any]:
    """A module whose step logs something, in some batches."""

    def log(self: Any, batch: Any, batch_idx: int) -> Any:
        if batch_idx in batches:
            self.log(name, value, **words)
        return getattr(Net, step)(self, batch, batch_idx) if step == "training_step" else None

    return {step: log}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (None, "Trial.build_module() returned Linear, which is no LightningModule; return one, or write a TorchTrial"),
        ({"automatic_optimization": False}, "Odd sets automatic_optimization = False; write a rubberband.TorchTrial"),
        (
            {"configure_optimizers": lambda self: [torch.optim.SGD(self.parameters(), lr=0.1)] * 2},
            "configure_optimizers() returned 2 optimizers; a LightningTrial steps one",
        ),
        (optimized(schedule={"frequency": 3}), "the LR schedule has frequency 3; use 1, and a schedule that counts"),
        (optimized(schedule={"intervall": "step"}), "the LR schedule has a key 'intervall', which has no effect here"),
        (optimized(schedule={"reduce_on_plateau": True}), "has reduce_on_plateau = True, which has no effect here"),
        (optimized(frequency=3), "configure_optimizers() returned a key 'frequency', which has no effect here; use"),
        ({"training_step": lambda *_: None}, "Odd.training_step() returned NoneType; return the loss, or a dict with"),
        (logged("training_step", "rare", batches=[2]), "training_step() logs 'rare' in some batches only; log it in"),
        (logged("training_step", "most", reduce_fx="max"), "training_step() logs 'most' by reduce_fx=max; use mean,"),
        ({"optimizer_step": lambda *_, **__: None}, "Odd overrides optimizer_step(), which RubberBand's loop does not"),
        (logged("validation_step", "val_loss", "low"), "self.log('val_loss') got str; log a number, or a torchmetrics"),
        (logged("validation_step", "val_los"), "the trial reported 'train_loss', 'val_los'; did you mean"),
    ],
)
def test_a_module_that_cannot_be_trained_is_refused_in_one_line(store, changes, line):
    class Trial(Classifier):
        def build_module(self, config):
            return nn.Linear(1, 1) if changes is None else type("Odd", (Net,), changes)(config["lr"])

    message = failure(Trial, store)
    assert line in message
    assert "\n" not in message


def loader(**words: Any) -> Any:
    return DataLoader(samples(), **words)


@pytest.mark.parametrize(
    ("made", "line"),
    [
        (lambda: [loader(), loader()], "train_dataloader() returned 2 loaders; return one, such as of a ConcatDataset"),
        (lambda: samples(), "train_dataloader() returned TensorDataset; return a torch.utils.data.DataLoader"),
        (lambda: loader(batch_size=None), "train_dataloader() has no batch_size"),
        (lambda: loader(sampler=RandomSampler(range(9), replacement=True)), "draws by a RandomSampler"),
    ],
)
def test_a_loader_that_cannot_be_shared_is_refused_in_one_line(store, made, line):
    class Odd(Data):
        def train_dataloader(self):
            return made()

    class Trial(Classifier):
        def build_datamodule(self, config):
            return Odd()

    assert line in failure(Trial, store)


def test_a_module_without_data_is_refused(store):
    class Trial(Classifier):
        build_datamodule = LightningTrial.build_datamodule

    assert "Net has no train_dataloader(); write it, or return a data module that has it" in failure(Trial, store)


def test_without_lightning_the_command_that_installs_it_is_named(store, monkeypatch):
    class Trial(LightningTrial):
        def build_module(self, config):
            return nn.Linear(1, 1)

    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr("rubberband.integrations.lightning_hooks.find_spec", lambda name: None)
    assert re.search(r"Lightning is not installed; run pip install '.*\[lightning\]'", failure(Trial, store))


def test_prepare_data_is_called_once_a_time(store, tmp_path):
    class Prepared(Data):
        calls: ClassVar[list[str]] = []

        def prepare_data(self):
            self.calls.append("prepare")

        def setup(self, stage):
            self.calls.append(stage)
            super().setup(stage)

        def train_dataloader(self):
            return DataLoader(Subset(self.train, range(40)), batch_size=8, shuffle=True)

    class Trial(Classifier):
        def build_datamodule(self, config):
            return Prepared()

    train(Trial, store, until_iterations=1)
    assert Prepared.calls == ["prepare", "fit"]


NINE = replace(segments.SEGMENT, metric="val_loss", until_iterations=9, max_iterations=9)


class HookNet(L.LightningModule):
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


class Patient(HookNet):
    def configure_callbacks(self):
        return [callbacks.EarlyStopping("val_loss", patience=3)]


class PatientTrial(LightningTrial):
    def build_module(self, config):
        return Patient()


class SeldomTrial(PatientTrial):
    eval_every = 2


class Stopping(HookNet):
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


def trained_by(trial: type, store: CheckpointStore, **changes: Any) -> list[SegmentReport]:
    items = list(run_segment(Entrypoint.from_object(trial), replace(NINE, **changes), store))
    assert not isinstance(items[-1], SegmentFailure), items
    return items[1:]


def refusal(store: CheckpointStore, changes: dict[str, Any]) -> str:
    """The line that refuses a module with these attributes."""
    module = type("Odd", (HookNet,), changes)

    class Trial(LightningTrial):
        def build_module(self, config):
            return module()

    last = list(run_segment(Entrypoint.from_object(Trial), NINE, store))[-1]
    assert isinstance(last, SegmentFailure), last
    assert "\n" not in last.message
    return last.message


def test_early_stopping_ends_the_trial(store):
    reports = trained_by(PatientTrial, store)
    assert [report.ended for report in reports] == [False, False, False, True]


@pytest.mark.by_default(1)
@pytest.mark.parametrize("until", [1, 2, 3])
def test_patience_goes_on_after_a_resume(store, until):
    before = trained_by(PatientTrial, store, until_iterations=until)
    assert not before[-1].ended
    rest = trained_by(PatientTrial, store, from_iterations=until, checkpoint=before[-1].checkpoint)
    assert [report.iterations for report in rest] == list(range(until + 1, 5))
    assert rest[-1].ended


def test_patience_counts_evaluations_and_not_iterations(store):
    reports = trained_by(SeldomTrial, store)
    assert [report.metrics["evaluated_at"] for report in reports if report.ended] == [6]  # evaluated at 1, 2, 4, 6
    assert len(reports) == 6


def test_a_module_may_stop_its_trainer_read_its_optimizer_and_tear_down(store):
    HookNet.done.clear()
    reports = trained_by(StoppingTrial, store)
    assert [report.ended for report in reports] == [False, True]
    assert reports[0].metrics["lr"] == 0.25
    assert HookNet.done == ["fit"]


def test_a_metric_of_training_may_be_monitored():
    module = type("Own", (HookNet,), {"configure_callbacks": lambda self: callbacks.EarlyStopping("loss", patience=1)})
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
        ({"configure_callbacks": lambda self: callbacks.LearningRateMonitor()}, "works here; do what it does in hooks"),
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
        ({"on_train_start": lambda self: self.log("x", 1.0, colour="red")}, "self.log('x') has an option colour,"),
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
    assert trained_by(PatientTrial, store, until_iterations=1)


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
