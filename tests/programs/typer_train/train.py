"""typer: enums, a path for the output, a checkpoint each epoch, resumed by --resume."""

import time
from enum import Enum
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

app = typer.Typer()


class Schedule(str, Enum):
    constant = "constant"
    cosine = "cosine"


@app.command()
def main(
    output_dir: Annotated[Path, typer.Option(help="where checkpoints go")] = Path("checkpoints"),
    num_epochs: int = 8,
    learning_rate: Annotated[float, typer.Option("--learning-rate", "--lr")] = 0.1,
    weight_decay: float = 0.0,
    schedule: Schedule = Schedule.constant,
    augment: bool = False,
    resume: bool = False,
    seed: int = 0,
):
    """Train a small regression."""
    output_dir.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(300, 9))
    y = x @ np.linspace(-1, 1, 9)
    w, first, path = np.zeros(9), 0, output_dir / "last.npz"
    if resume and path.exists():
        state = np.load(path)
        w, first = state["w"], int(state["epoch"])
        typer.echo(f"resumed at epoch {first}")
    for epoch in range(first, num_epochs):
        cosine = 0.5 + 0.5 * np.cos(np.pi * epoch / num_epochs)
        lr = learning_rate * (cosine if schedule is Schedule.cosine else 1)
        for rows in np.array_split(np.arange(240), 15):
            data = x[rows] + (0.1 * np.sin(epoch + rows[:, None]) if augment else 0)
            w -= lr * (data.T @ (data @ w - y[rows]) / len(rows) + weight_decay * w)
        rmse = float(np.sqrt(np.mean((x[240:] @ w - y[240:]) ** 2)))
        time.sleep(0.2)
        np.savez(path, w=w, epoch=epoch + 1)
        typer.secho(f"epoch={epoch + 1} rmse={rmse:.5f} lr={lr:.4g}", fg="green")


if __name__ == "__main__":
    app()
