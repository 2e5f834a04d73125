"""The Trainer of Lightning in a function trial: epochs are reported, resuming is exact, callbacks stay, faults are one
line."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rubberband.executor import SegmentFailure, SegmentReport, read_manifest
from rubberband.executor.training import reporting
from rubberband.integrations.lightning import fit
from tests.builders import segments
from tests.builders.tables import cases, table

lightning = pytest.importorskip("lightning.pytorch", reason="pip install 'rubberband-tune[lightning]'")
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
run = partial(segments.train, metric="val_loss", config={"lr": 0.05}, until_iterations=3)

KEPT: list[str] = table("test_lightning")["kept"]
"""Arguments that the Trainer itself acts on, or that `fit` replaces with a line (`devices`, `num_nodes`)."""
REFUSED = "fast_dev_run max_steps barebones"


class Net(lightning.LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 2))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.body(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.body(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


def loader(count: int, *, shuffle: bool = False) -> DataLoader[Any]:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(count))
    return DataLoader(TensorDataset(x, (x.sum(dim=1) > 0).long()), batch_size=8, shuffle=shuffle)


def made(**words: Any) -> Any:
    given = {"max_epochs": 6, "accelerator": "cpu", "logger": False, "enable_checkpointing": False, **words}
    return lightning.Trainer(enable_progress_bar=False, enable_model_summary=False, **given)


def train(config):
    words = {name: value for name, value in config.items() if name != "lr"}
    fit(made(**words), Net(config["lr"]), loader(32, shuffle=True), loader(16))


def losses(items: list[Any]) -> list[tuple[float, float]]:
    assert all(isinstance(item, SegmentReport) for item in items[1:]), items
    return [(item.metrics["val_loss"], item.metrics["train_loss"]) for item in items[1:]]


class Skipping(Net):
    """Leaves out losses that are not finite, so that the training loss stays as it was logged before."""

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.body(batch[0]), batch[1])
        if not loss.isfinite():
            return None
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss


def test_a_training_loss_beside_an_evaluation_that_has_diverged_is_no_result(store):
    def train(config):
        fit(made(), Skipping(config["lr"]), loader(32, shuffle=True), loader(16))

    *_, failure = run(train, store, config={"lr": 1e38}, metric="train_loss")
    assert isinstance(failure, SegmentFailure)
    assert failure.kind == "not_a_number"
    assert failure.message.endswith("beside val_loss=nan: training has diverged")


def files(store: Any, report: Any) -> set[str]:
    listed = read_manifest(store.load(report.checkpoint))["files"]
    return {file["path"].removeprefix("0/") for file in listed} - {"state.pickle"}


def test_a_trainer_that_resumes_learns_what_one_never_stopped_learns(store):
    whole = run(train, store)
    first = run(train, store, until_iterations=1)
    rest = run(train, store, from_iterations=1, checkpoint=first[-1].checkpoint)
    assert losses(first) + losses(rest) == losses(whole)
    assert len(set(losses(whole))) == 3
    assert [item.metrics["epoch"] for item in whole[1:]] == [1, 2, 3]
    assert files(store, first[-1]) == {"trainer.ckpt", "random-states.pt"}


class Accurate(Net):
    """Its one metric is an accuracy, which is a number when its weights are none."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (torch.nan if self.global_step == 5 else 1.0)

    def validation_step(self, batch, batch_idx):
        self.log("accuracy", (self.body(batch[0]).argmax(dim=1) == batch[1]).float().mean())


def diverging(config):
    fit(made(), Accurate(0.05), loader(32), loader(16))


def test_weights_that_are_no_numbers_fail_a_trial_with_any_metric(store):
    _, first, failure = run(diverging, store, metric="accuracy")
    assert isinstance(first, SegmentReport)
    assert (failure.kind, failure.message) == (
        "not_a_number",
        "the weights of body.0.weight are not finite: training has diverged",
    )


def with_callbacks(config):
    stopping = EarlyStopping("val_loss", patience=2, min_delta=100.0)
    trainer = made(
        callbacks=[stopping, ModelCheckpoint(monitor="val_loss", filename="{epoch}")], enable_checkpointing=True
    )
    fit(trainer, Net(0.05), loader(32, shuffle=True), loader(16))


@pytest.mark.long
def test_early_stopping_ends_the_trial_and_its_patience_goes_on_after_a_resume(store):
    whole = run(with_callbacks, store, until_iterations=6)
    assert [type(item) for item in whole[1:]] == [SegmentReport] * 3
    assert whole[-1].ended
    first = run(with_callbacks, store, until_iterations=2)
    assert not first[-1].ended
    rest = run(with_callbacks, store, from_iterations=2, until_iterations=6, checkpoint=first[-1].checkpoint)
    assert [item.ended for item in rest[1:]] == [True]
    assert rest[-1].metrics == whole[-1].metrics


def test_the_best_file_of_a_model_checkpoint_is_kept_in_the_trials_checkpoint(store):
    first = run(with_callbacks, store, until_iterations=2)
    rest = run(with_callbacks, store, from_iterations=2, until_iterations=6, checkpoint=first[-1].checkpoint)
    best = min(range(3), key=lambda at: [*first[1:], *rest[1:]][at].metrics["val_loss"])
    kept = [name for name in files(store, rest[-1]) if name.startswith("kept/")]
    assert kept == [f"kept/checkpoints-0/epoch={best}.ckpt"]


def every_second(config):
    fit(made(check_val_every_n_epoch=2), Net(0.05), loader(32, shuffle=True), loader(16))


def test_an_iteration_ends_with_a_validation(store):
    assert [item.metrics["epoch"] for item in run(every_second, store, until_iterations=2)[1:]] == [2, 4]


@cases("config", "line")
def test_a_trainer_that_cannot_be_a_trial_is_refused_in_one_line(store, config, line):
    last = run(train, store, config={"lr": 0.05, **config})[-1]
    assert isinstance(last, SegmentFailure)
    assert line in last.message


def test_a_module_in_place_of_a_trainer_is_refused():
    with pytest.raises(TypeError, match="fit\\(\\) got Net, which is no Trainer of Lightning; give one"):
        fit(Net(0.1), Net(0.1))


def test_outside_a_search_the_trainer_trains_as_it_would():
    trainer = made(max_epochs=2)
    fit(trainer, Net(0.05), loader(32, shuffle=True), loader(16))
    assert trainer.current_epoch == 2


def test_every_argument_of_a_trainer_is_known():
    found = {name for name in inspect.signature(lightning.Trainer.__init__).parameters if name != "self"}
    assert found == {*KEPT, *REFUSED.split()}, "is a new one kept, or refused by its name?"


@pytest.fixture
def in_gang(monkeypatch):
    """The variables of a worker among two, as a gang's process has them."""
    place = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    monkeypatch.setenv(reporting.LINE, "any")
    monkeypatch.setattr(lightning.Trainer, "fit", lambda *_, **__: None)


@cases("words", "line")
def test_a_trainer_takes_the_workers_of_its_gang(in_gang, capsys, words, line):
    trainer = made(**words)
    fit(trainer, Net(0.1))
    assert (trainer.world_size, trainer.num_devices, trainer.num_nodes) == (2, 2, 1)
    assert type(trainer.strategy) is lightning.strategies.DDPStrategy
    assert trainer.strategy._ddp_kwargs == ({"find_unused_parameters": True} if "num_nodes" in words else {})
    assert line in capsys.readouterr().err


def test_a_trainer_that_cannot_take_its_gang_is_refused_in_one_line(in_gang):
    class Own(lightning.strategies.DDPStrategy):
        """A strategy that `fit` does not know."""

    with pytest.raises(ValueError, match="Own has devices=1 and num_nodes=1, and the gang has 2 and 1; use strategy="):
        fit(made(strategy=Own(), devices=1), Net(0.1))
