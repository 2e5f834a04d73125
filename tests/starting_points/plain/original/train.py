"""Train a small network on handwritten digits: python train.py --lr 0.1 --resume runs/checkpoint.pt."""

import argparse
import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(0.2), nn.Linear(hidden, 10))

    def forward(self, x):
        return self.layers(x)


def train(model, loader, optimizer):
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()


def test(model, loader):
    model.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for data, target in loader:
            output = model(data)
            loss += nn.functional.cross_entropy(output, target, reduction="sum").item()
            correct += (output.argmax(1) == target).sum().item()
    return loss / len(loader.dataset), correct / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description="Digits")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--gamma", type=float, default=0.9)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", default="", help="a checkpoint to go on from")
    parser.add_argument("--out", default="runs")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    digits = load_digits()
    data, target = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    train_loader = DataLoader(TensorDataset(data[:1437], target[:1437]), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(TensorDataset(data[1437:], target[1437:]), batch_size=360)

    model = Net(args.hidden)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    start_epoch = 0
    if os.path.isfile(args.resume):
        checkpoint = torch.load(args.resume)
        start_epoch = checkpoint["epoch"]
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])

    os.makedirs(args.out, exist_ok=True)
    for epoch in range(start_epoch, args.epochs):
        train(model, train_loader, optimizer)
        scheduler.step()
        loss, accuracy = test(model, test_loader)
        print(f"Epoch {epoch + 1}: test loss {loss:.8f}, accuracy {accuracy:.4f}")
        state = {
            "epoch": epoch + 1,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        }
        torch.save(state, os.path.join(args.out, "checkpoint.pt"))


if __name__ == "__main__":
    main()
