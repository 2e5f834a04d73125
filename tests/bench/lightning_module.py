"""A LightningModule for `bench_training.py lightning`, as a trial and under Lightning's own Trainer."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rubberband.integrations.lightning import LightningTrial

BATCH_SIZE = 64


class Classifier(LightningModule):
    """A step of some milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.body(batch[0]), batch[1])
        self.log("fit_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Data(LightningDataModule):
    """Random samples in memory."""

    def train_dataloader(self) -> DataLoader[Any]:
        samples = TensorDataset(torch.randn(16_384, 256), torch.randint(0, 10, (16_384,)))
        return DataLoader(samples, batch_size=BATCH_SIZE, shuffle=True)


class ClassifierTrial(LightningTrial):
    """The module in RubberBand's loop."""

    def build_module(self, config: Any) -> Classifier:
        return Classifier()

    def build_datamodule(self, config: Any) -> Data:
        return Data()


class _Epochs(Callback):
    def __init__(self) -> None:
        self.began: list[float] = []
        self.ended: list[float] = []

    def on_train_epoch_start(self, *_: Any) -> None:
        self.began.append(time.perf_counter())

    def on_train_epoch_end(self, *_: Any) -> None:
        self.ended.append(time.perf_counter())


def epoch_of_trainer() -> float:
    """Return the seconds of the second epoch of Lightning's Trainer, without loggers, checkpoints and progress bar."""
    epochs = _Epochs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Trainer(
            accelerator="cpu",
            max_epochs=2,
            callbacks=[epochs],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(Classifier(), Data())
    return epochs.ended[1] - epochs.began[1]
