"""Trials of LightningModules for gangs of processes, in float64 and without anything random."""

from __future__ import annotations

import torch
from lightning import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from rubberband.integrations.lightning import LightningTrial


class Net(LightningModule):
    """A classifier whose parts are called in `training_step`, and not by `forward` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 6), nn.Tanh()), nn.Linear(6, 2)
        self.double()

    def forward(self, inputs):
        return self.head(self.body(inputs))

    def training_step(self, batch, batch_idx):
        outputs = self.head(self.body(batch[0]))
        self.log("accuracy", (outputs.argmax(dim=1) == batch[1]).double().mean())
        return nn.functional.cross_entropy(outputs, batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Data(LightningDataModule):
    """Samples that are divided at random."""

    def setup(self, stage):
        inputs = torch.randn(60, 4, dtype=torch.float64)
        self.train, self.val = random_split(TensorDataset(inputs, (inputs.sum(dim=1) > 0).long()), [46, 14])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=4)


class Classifier(LightningTrial):
    """Evaluates on rank 0."""

    def build_module(self, config):
        return Net()

    def build_datamodule(self, config):
        return Data()


class OnAll(Classifier):
    """Evaluates on all ranks, and accumulates."""

    eval_on_all_ranks = True
    max_batch_size_per_gpu = 3
