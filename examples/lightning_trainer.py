"""A `Trainer` of Lightning with early stopping and a checkpoint of the best epoch, searched on one to two workers per
trial; it takes two minutes.

    python examples/lightning_trainer.py

`train` is the script as it was, but for the five lines that are marked. Its `devices=2` may stay: a trial has the
workers that its gang has. The digits come with scikit-learn.
"""

from __future__ import annotations

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rubberband
from rubberband.integrations.lightning import fit  # 1

EPOCHS = 9


class Digits(lightning.LightningDataModule):
    """1,408 training and 352 validation images of 8 x 8 pixels, in the order of the data set."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        images, labels = load_digits(return_X_y=True)
        x, y = torch.tensor(images[:1760] / 16, dtype=torch.float32), torch.tensor(labels[:1760])
        self.train, self.val = TensorDataset(x[:1408], y[:1408]), TensorDataset(x[1408:], y[1408:])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, batch_size=self.batch_size)


class Classifier(lightning.LightningModule):
    """A network of two layers."""

    def __init__(self, lr: float, width: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.body(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        logits = self.body(batch[0])
        self.log("val_loss", nn.functional.cross_entropy(logits, batch[1]))
        self.log("val_accuracy", (logits.argmax(dim=1) == batch[1]).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)]


@rubberband.distributed  # 2
def train(config: dict[str, float]) -> None:  # 3: it was `def main():`
    lightning.seed_everything(7)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        devices=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        callbacks=[EarlyStopping("val_loss", patience=3), ModelCheckpoint(monitor="val_loss", filename="best")],
    )
    model, data = Classifier(config["lr"], config["width"]), Digits(rubberband.per_worker(64))  # 4
    fit(trainer, model, data)  # 5: it was trainer.fit(model, data)


def search() -> rubberband.Result:
    """Search for a learning rate and a width, with all that a trial may get on this machine."""
    return rubberband.tune(
        train,
        search={
            "space": {"lr": rubberband.loguniform(1e-4, 1e-1), "width": rubberband.choice([16, 64])},
            "scheduler": {"type": "sha", "num_samples": 4, "grace_period": 1, "max_t": EPOCHS, "reduction_factor": 3},
            "metric": "val_loss",
            "mode": "min",
        },
        constraints={"deadline": "15m"},
        resources={
            "provider": "local",
            "gpus_per_instance": 2,
            "max_instances": 1,
            "gpus_per_trial": {"min": 1, "max": 2},
            "price_per_hour": 3.06,
        },
    )


if __name__ == "__main__":
    result = search()
    print(result.best_config)
