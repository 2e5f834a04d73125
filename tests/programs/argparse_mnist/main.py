"""A classifier of points as digits; options and lines as in the usual first example of a library."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR


def points(number, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, 8, generator=generator)
    return x, (x[:, 0] * x[:, 1] > 0).long() + 2 * (x[:, 2] > 0).long()


def train(args, model, data, optimizer, epoch):
    model.train()
    x, y = data
    order = torch.randperm(len(x))
    for batch_idx, chosen in enumerate(order.split(args.batch_size)):
        optimizer.zero_grad()
        loss = F.nll_loss(model(x[chosen]), y[chosen])
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            done = batch_idx * args.batch_size
            print(f"Train Epoch: {epoch} [{done}/{len(x)} ({100.0 * done / len(x):.0f}%)]\tLoss: {loss.item():.6f}")
            if args.dry_run:
                break


def test(model, data):
    model.eval()
    x, y = data
    with torch.no_grad():
        output = model(x)
        test_loss = F.nll_loss(output, y, reduction="sum").item() / len(x)
        correct = (output.argmax(dim=1) == y).sum().item()
    share = 100.0 * correct / len(x)
    print(f"\nTest set: Average loss: {test_loss:.4f}, Accuracy: {correct}/{len(x)} ({share:.0f}%)\n")


def main():
    parser = argparse.ArgumentParser(description="Digits of points")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="samples per step (default: 64)")
    parser.add_argument("--test-batch-size", type=int, default=1000, metavar="N")
    parser.add_argument("--epochs", type=int, default=14, metavar="N", help="epochs to train (default: 14)")
    parser.add_argument("--lr", type=float, default=1.0, metavar="LR", help="learning rate (default: 1.0)")
    parser.add_argument("--gamma", type=float, default=0.7, metavar="M", help="step of the learning rate")
    parser.add_argument("--no-accel", action="store_true", help="disables accelerators")
    parser.add_argument("--dry-run", action="store_true", help="one step only")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="random seed (default: 1)")
    parser.add_argument("--log-interval", type=int, default=10, metavar="N")
    parser.add_argument("--save-model", action="store_true", help="saves the model at the end")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.25), nn.Linear(32, 4), nn.LogSoftmax(dim=1))
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    train_data, test_data = points(1920, 0), points(500, 1)
    for epoch in range(1, args.epochs + 1):
        time.sleep(0.15)
        train(args, model, train_data, optimizer, epoch)
        test(model, test_data)
        scheduler.step()
    if args.save_model:
        torch.save(model.state_dict(), "digits.pt")


if __name__ == "__main__":
    main()
