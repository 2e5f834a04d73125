"""Accelerate, simplest: options for the machine only; the hyperparameters are a dict in main(); nothing is saved."""

import argparse
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset


def get_dataloaders(batch_size):
    x = torch.randn(480, 12, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] + x[:, 1] * x[:, 2] > 0).long()
    train, evaluation = TensorDataset(x[:320], y[:320]), TensorDataset(x[320:], y[320:])
    return DataLoader(train, shuffle=True, batch_size=batch_size), DataLoader(evaluation, batch_size=32)


def training_function(config, args):
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    lr, num_epochs, seed = config["lr"], int(config["num_epochs"]), int(config["seed"])
    train_dataloader, eval_dataloader = get_dataloaders(int(config["batch_size"]))
    set_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    optimizer = AdamW(params=model.parameters(), lr=lr)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    for epoch in range(num_epochs):
        model.train()
        for inputs, labels in train_dataloader:
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        right = total = hits = marked = 0
        for inputs, labels in eval_dataloader:
            with torch.no_grad():
                predictions = model(inputs).argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, labels))
            right, total = right + int((predictions == references).sum()), total + len(references)
            hits, marked = hits + int((predictions * references).sum()), marked + int((predictions + references).sum())
        time.sleep(0.1)
        eval_metric = {"accuracy": right / total, "f1": 2 * hits / marked}
        accelerator.print(f"epoch {epoch}:", eval_metric)
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser(description="Simple example of training script.")
    parser.add_argument("--mixed_precision", type=str, default=None, choices=["no", "fp16", "bf16", "fp8"])
    parser.add_argument("--cpu", action="store_true", help="If passed, will train on the CPU.")
    args = parser.parse_args()
    config = {"lr": 2e-3, "num_epochs": 3, "seed": 42, "batch_size": 16}
    training_function(config, args)


if __name__ == "__main__":
    main()
