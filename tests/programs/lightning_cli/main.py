"""LightningCLI: subcommands, nested options, a bar with the metrics; checkpoints below lightning_logs."""

import time

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader, TensorDataset


class PointsModel(LightningModule):
    def __init__(self, hidden_dim: int = 16, learning_rate: float = 1e-2, weight_decay: float = 0.0):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(6, hidden_dim), torch.nn.Tanh(), torch.nn.Linear(hidden_dim, 1))

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        time.sleep(0.1)
        self.log("val_loss", torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]), prog_bar=True)

    def configure_optimizers(self):
        hp = self.hparams
        return torch.optim.AdamW(self.parameters(), lr=hp.learning_rate, weight_decay=hp.weight_decay)


class PointsData(LightningDataModule):
    def __init__(self, batch_size: int = 32, num_workers: int = 0):
        super().__init__()
        self.save_hyperparameters()
        x = torch.randn(384, 6, generator=torch.Generator().manual_seed(0))
        self.data = x, (x[:, :1] * x[:, 1:2]).sin()

    def _loader(self, part):
        return DataLoader(TensorDataset(*(each[part] for each in self.data)), batch_size=self.hparams.batch_size)

    def train_dataloader(self):
        return self._loader(slice(0, 320))

    def val_dataloader(self):
        return self._loader(slice(320, 384))


if __name__ == "__main__":
    LightningCLI(PointsModel, PointsData, seed_everything_default=42)
