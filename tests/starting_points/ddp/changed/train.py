"""Train on several GPUs: torchrun --standalone --nproc-per-node 2 train.py 7 --lr 0.1."""

import argparse
import os

import torch
from sklearn.datasets import load_digits
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import rubberband


class Trainer:
    def __init__(self, model: torch.nn.Module, train_data: DataLoader, test_data: Dataset, optimizer, snapshot_path):
        self.rank = int(os.environ["RANK"])
        self.model = model
        self.train_data = train_data
        self.test_data = test_data
        self.optimizer = optimizer
        self.snapshot_path = snapshot_path
        self.epochs_run = 0
        if os.path.exists(snapshot_path):
            print("Loading snapshot")
            self._load_snapshot()
        self.model = DDP(self.model)

    def _load_snapshot(self):
        snapshot = torch.load(self.snapshot_path)
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]
        print(f"Resuming training from snapshot at epoch {self.epochs_run}")

    def _save_snapshot(self, epoch):
        snapshot = {
            "MODEL_STATE": self.model.module.state_dict(),
            "OPTIMIZER_STATE": self.optimizer.state_dict(),
            "EPOCHS_RUN": epoch + 1,
        }
        torch.save(snapshot, self.snapshot_path)
        print(f"Epoch {epoch} | snapshot saved at {self.snapshot_path}")

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.model(source), targets)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            self._run_batch(source, targets)

    def _test(self):
        source, targets = self.test_data.tensors
        with torch.no_grad():
            return torch.nn.functional.cross_entropy(self.model.module(source), targets).item()

    def train(self, max_epochs: int):
        for epoch in range(self.epochs_run, max_epochs):
            self._run_epoch(epoch)
            if self.rank == 0:
                self._save_snapshot(epoch)
                rubberband.report({"loss": self._test()})


def load_train_objs(lr):
    digits = load_digits()
    data, target = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    train_set, test_set = TensorDataset(data[:1408], target[:1408]), TensorDataset(data[1408:], target[1408:])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return train_set, test_set, model, optimizer


def prepare_dataloader(dataset: Dataset, batch_size: int):
    return DataLoader(dataset, batch_size=batch_size, shuffle=False, sampler=DistributedSampler(dataset))


def main(total_epochs: int, batch_size: int, lr: float, snapshot_path: str = "snapshot.pt"):
    init_process_group(backend="gloo")
    train_set, test_set, model, optimizer = load_train_objs(lr)
    train_data = prepare_dataloader(train_set, batch_size)
    trainer = Trainer(model, train_data, test_set, optimizer, snapshot_path)
    trainer.train(total_epochs)
    destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="simple distributed training job")
    parser.add_argument("total_epochs", type=int, help="Total epochs to train the model")
    parser.add_argument("--batch_size", type=int, default=32, help="Input batch size on each device")
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    snapshot_path = os.path.join(os.environ.get("RUBBERBAND_CHECKPOINT", ""), "snapshot.pt")
    main(args.total_epochs, rubberband.per_worker(64), args.lr, snapshot_path)
