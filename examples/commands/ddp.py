"""A DDP script, as torchrun starts it. Its new lines are `report` and the file below --out, from which it resumes.

torchrun --nproc-per-node 2 ddp.py --epochs 3
rubberband run examples/commands/ddp.yaml
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import rubberband

BATCH = 64  # over all workers, so that a trial learns the same on any number of them


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="out")
    args = parser.parse_args()
    dist.init_process_group("gloo")  # nccl on GPUs, with torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)

    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    train, test = TensorDataset(x[:1408], y[:1408]), (x[1408:], y[1408:])
    sampler = DistributedSampler(train, seed=args.seed)
    loader = DataLoader(train, batch_size=BATCH // dist.get_world_size(), sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)

    first, file = 0, Path(args.out, "state.pt")
    if file.exists():  # the trial goes on, maybe on another number of workers
        state = torch.load(file)
        first = state["epoch"]
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for epoch in range(first + 1, args.epochs + 1):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            state = {"epoch": epoch, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, file)
        with torch.no_grad():
            logits = model.module(test[0])
        loss, accuracy = nn.functional.cross_entropy(logits, test[1]), (logits.argmax(1) == test[1]).float().mean()
        rubberband.report({"loss": loss.item(), "accuracy": accuracy.item()})  # of rank 0; others may call it too
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
