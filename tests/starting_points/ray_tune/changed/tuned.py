"""Tune a small network on handwritten digits with Ray Tune: python tuned.py."""

import os
import tempfile

import torch
from ray import tune
from ray.tune import Checkpoint
from ray.tune.schedulers import ASHAScheduler
from sklearn.datasets import load_digits
from torch import nn

from rubberband.integrations import ray_tune

EPOCHS = 7


def load_data():
    digits = load_digits()
    data, target = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    return data[:1437], target[:1437], data[1437:], target[1437:]


def train_digits(config):
    torch.manual_seed(0)
    data, target, test_data, test_target = load_data()
    net = nn.Sequential(nn.Linear(64, config["l1"]), nn.ReLU(), nn.Linear(config["l1"], 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"], momentum=0.9)

    start_epoch = 0
    checkpoint = tune.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "checkpoint.pt"))
            start_epoch = state["epoch"]
            net.load_state_dict(state["net"])
            optimizer.load_state_dict(state["optimizer"])

    for epoch in range(start_epoch, EPOCHS):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(config["batch_size"]):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(data[batch]), target[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            output = net(test_data)
        loss = nn.functional.cross_entropy(output, test_target).item()
        accuracy = (output.argmax(1) == test_target).float().mean().item()
        with tempfile.TemporaryDirectory() as folder:
            state = {"epoch": epoch + 1, "net": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, os.path.join(folder, "checkpoint.pt"))
            tune.report({"loss": loss, "accuracy": accuracy}, checkpoint=Checkpoint.from_directory(folder))


def main():
    tuner = ray_tune.Tuner(
        train_digits,
        param_space={
            "lr": tune.loguniform(1e-3, 3e-1),
            "l1": tune.choice([32, 64]),
            "batch_size": tune.choice([32, 64]),
        },
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            num_samples=4,
            scheduler=ASHAScheduler(max_t=EPOCHS, grace_period=1, reduction_factor=2),
        ),
        constraints={"deadline": "10m"},
        resources={"provider": "local", "gpus_per_instance": 2, "price_per_hour": 6.12, "max_instances": 1},
        search={"scheduler": {"type": "sha", "num_samples": 4, "max_t": EPOCHS, "reduction_factor": 2}},
    )
    results = tuner.fit()
    best = results.get_best_result()
    print("best config:", best.config)
    print("best loss:", best.metrics["loss"])


if __name__ == "__main__":
    main()
