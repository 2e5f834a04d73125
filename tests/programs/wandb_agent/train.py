"""A run of W&B that reads wandb.config alone: no parser; its defaults are overridden by the sweep's agent."""

import time

import numpy as np
import wandb

defaults = {"learning_rate": 0.05, "batch_size": 16, "epochs": 6}


def main():
    wandb.init(project="points", config=defaults)
    config = wandb.config
    rng = np.random.default_rng(1)
    x = rng.normal(size=(320, 5))
    y, w = x @ np.ones(5), np.zeros(5)
    for epoch in range(config.epochs):
        for rows in np.array_split(rng.permutation(256), 256 // config.batch_size):
            w -= config.learning_rate * x[rows].T @ (x[rows] @ w - y[rows]) / len(rows)
        val_loss = float(np.mean((x[256:] @ w - y[256:]) ** 2))
        time.sleep(0.15)
        wandb.log({"val_loss": val_loss, "epoch": epoch})
        print(f"epoch {epoch + 1}/{config.epochs} val_loss={val_loss:.6f}")


if __name__ == "__main__":
    main()
