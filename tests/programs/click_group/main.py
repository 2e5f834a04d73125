"""A group of click with train and evaluate: options with defaults and no type; saves the best model only."""

import time
from pathlib import Path

import click
import numpy as np


def points(seed, number):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(number, 7))
    return x, (x[:, 0] - x[:, 3] + rng.normal(size=number) / 3 > 0).astype(float)


@click.group()
def cli():
    """Command line interface."""


@click.command()
@click.option("--lr", default=1e-2, help="learning rate to use for training")
@click.option("-bs", "--batch-size", default=32, show_default=True)
@click.option("--epochs", "-e", default=8, type=int)
@click.option("--optim", type=click.Choice(["sgd", "sign"]), default="sgd")
@click.option("--shuffle/--no-shuffle", default=True)
@click.option("--seed", default=0)
@click.argument("model_path", type=click.Path(), default="models/best.npy")
def train(lr, batch_size, epochs, optim, shuffle, seed, model_path):
    """Train a model and save the best one."""
    click.echo(f"Training with lr={lr} on cpu")
    (x, y), (tx, ty) = points(0, 480), points(1, 160)
    rng, w, best = np.random.default_rng(seed), np.zeros(7), 0.0
    Path(model_path).parent.mkdir(parents=True, exist_ok=True)
    for epoch in range(epochs):
        order = rng.permutation(480) if shuffle else np.arange(480)
        running_loss = 0.0
        for rows in np.array_split(order, 480 // batch_size):
            p = 1 / (1 + np.exp(-x[rows] @ w))
            g = x[rows].T @ (p - y[rows]) / len(rows)
            w -= lr * (np.sign(g) if optim == "sign" else g)
            running_loss -= np.log(np.where(y[rows] > 0, p, 1 - p)).mean()
        acc = np.mean((tx @ w > 0) == ty)
        test_loss = np.mean(np.log1p(np.exp(-(2 * ty - 1) * (tx @ w))))
        time.sleep(0.15)
        click.echo(
            f"Epoch: {epoch + 1}/{epochs}.. Training Loss: {running_loss * batch_size / 480:.3f}.. "
            f"Test Loss: {test_loss:.4f}.. Test Accuracy: {acc:.3f}"
        )
        if acc > best:
            best = acc
            np.save(model_path, w)


@click.command()
@click.argument("model_checkpoint")
def evaluate(model_checkpoint):
    """Evaluate a trained model."""
    tx, ty = points(1, 160)
    click.echo(f"accuracy {np.mean((tx @ np.load(model_checkpoint) > 0) == ty)}")


cli.add_command(train)
cli.add_command(evaluate)

if __name__ == "__main__":
    cli()
