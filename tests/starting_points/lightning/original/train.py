"""Train a classifier of handwritten digits on two devices: python train.py --lr 0.01."""

import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Digits(L.LightningDataModule):
    def __init__(self, batch_size=32):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        digits = load_digits()
        data, target = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
        self.train_set = TensorDataset(data[:1408], target[:1408])
        self.val_set = TensorDataset(data[1408:1792], target[1408:1792])

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.batch_size)


class Classifier(L.LightningModule):
    def __init__(self, lr, hidden):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def training_step(self, batch, batch_idx):
        data, target = batch
        loss = nn.functional.cross_entropy(self.layers(data), target)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        data, target = batch
        output = self.layers(data)
        self.log("val_loss", nn.functional.cross_entropy(output, target), sync_dist=True)
        self.log("val_accuracy", (output.argmax(1) == target).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)]


def train(config):
    L.seed_everything(42)
    model = Classifier(config["lr"], config["hidden"])
    datamodule = Digits(batch_size=32)
    trainer = L.Trainer(
        max_epochs=7,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_progress_bar=False,
        callbacks=[
            EarlyStopping(monitor="val_loss", mode="min", patience=3),
            ModelCheckpoint(monitor="val_loss", mode="min", save_top_k=1, filename="best"),
        ],
    )
    trainer.fit(model, datamodule=datamodule)
    if trainer.is_global_zero:
        print(f"val_loss {trainer.callback_metrics['val_loss'].item():.8f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--hidden", type=int, default=32)
    train(vars(parser.parse_args()))
