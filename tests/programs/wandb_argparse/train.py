"""A run of W&B with options of argparse: the sweep calls it with them; it logs to W&B and prints a line an epoch."""

import argparse
import time

import numpy as np
import wandb

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=9)
parser.add_argument("--batch_size", type=int, default=32)
parser.add_argument("--learning_rate", type=float, default=0.05)
parser.add_argument("--optimizer", type=str, default="sgd")
parser.add_argument("--nesterov", type=lambda text: text == "True", default=False)


def train(config):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(480, 6))
    y, w, v = x @ np.arange(6) + rng.normal(size=480) / 5, np.zeros(6), np.zeros(6)
    for epoch in range(config.epochs):
        for rows in np.array_split(np.arange(400), 400 // config.batch_size):
            at = w + 0.8 * v if config.nesterov else w
            g = x[rows].T @ (x[rows] @ at - y[rows]) / len(rows)
            g = np.sign(g) * 0.3 if config.optimizer == "sign" else g
            v = 0.8 * v - config.learning_rate * g
            w = w + v
        val_loss = float(np.mean((x[400:] @ w - y[400:]) ** 2))
        time.sleep(0.15)
        wandb.log({"epoch": epoch, "val_loss": val_loss, "train/grad": float(np.abs(g).mean())})
        print(f"Epoch {epoch}: val_loss {val_loss:.5f}")


if __name__ == "__main__":
    args = parser.parse_args()
    with wandb.init(project="points", config=vars(args)):
        train(wandb.config)
