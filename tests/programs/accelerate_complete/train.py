"""Accelerate, complete: states in epoch_N folders if it is asked, and --resume_from_checkpoint names one of them."""

import argparse
import os
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--learning_rate", type=float, default=5e-3, help="Initial learning rate")
    parser.add_argument("--weight_decay", type=float, default=0.0, help="Weight decay to use.")
    parser.add_argument("--per_device_train_batch_size", type=int, default=32)
    parser.add_argument("--num_train_epochs", type=int, default=3, help="Total number of training epochs")
    parser.add_argument("--max_train_steps", type=int, default=None, help="If given, overrides num_train_epochs.")
    parser.add_argument("--output_dir", type=str, default=None, help="Where to store the final model.")
    parser.add_argument("--seed", type=int, default=None, help="A seed for reproducible training.")
    parser.add_argument("--checkpointing_steps", type=str, default=None, help="Steps between states, or 'epoch'.")
    parser.add_argument("--resume_from_checkpoint", type=str, default=None, help="If it should continue from a folder.")
    parser.add_argument("--with_tracking", action="store_true", help="Whether to enable experiment trackers.")
    return parser.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator(cpu=True)
    if args.seed is not None:
        set_seed(args.seed)
    x = torch.randn(600, 10, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] * x[:, 1] > 0).long()
    train_dataloader = DataLoader(TensorDataset(x[:400], y[:400]), batch_size=args.per_device_train_batch_size)
    model = torch.nn.Sequential(torch.nn.Linear(10, 24), torch.nn.Tanh(), torch.nn.Linear(24, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    starting_epoch, completed_steps = 0, 0
    if args.resume_from_checkpoint:
        accelerator.print(f"Resumed from checkpoint: {args.resume_from_checkpoint}")
        accelerator.load_state(args.resume_from_checkpoint)
        starting_epoch = int(os.path.basename(args.resume_from_checkpoint).replace("epoch_", "")) + 1
    for epoch in range(starting_epoch, args.num_train_epochs):
        model.train()
        for inputs, labels in train_dataloader:
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            completed_steps += 1
            if args.max_train_steps is not None and completed_steps >= args.max_train_steps:
                break
        model.eval()
        with torch.no_grad():
            accuracy = (model(x[400:]).argmax(-1) == y[400:]).float().mean().item()
        time.sleep(0.2)
        accelerator.print(f"epoch {epoch}: {{'accuracy': {accuracy}}}")
        if args.checkpointing_steps == "epoch":
            output_dir = f"epoch_{epoch}"
            if args.output_dir is not None:
                output_dir = os.path.join(args.output_dir, output_dir)
            accelerator.save_state(output_dir)
    if args.output_dir is not None:
        accelerator.save(accelerator.unwrap_model(model).state_dict(), os.path.join(args.output_dir, "model.bin"))


if __name__ == "__main__":
    main()
