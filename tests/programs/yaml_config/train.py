"""Everything is in a file of settings, the only option; a checkpoint per epoch in a folder with a date; tqdm bars."""

import argparse
import time
from datetime import datetime
from pathlib import Path

import numpy as np
import yaml
from tqdm import tqdm

parser = argparse.ArgumentParser()
parser.add_argument("--config", type=str, default="config.yaml", help="path to the config file")
args = parser.parse_args()
cfg = yaml.safe_load(Path(args.config).read_text())
print(f"Using config: {args.config}")

run_dir = Path(cfg["logging"]["dir"], datetime.now().strftime("%Y-%m-%d_%H-%M-%S"))
run_dir.mkdir(parents=True, exist_ok=True)
rng = np.random.default_rng(cfg["seed"])
x = rng.normal(size=(320, 6))
y, w = x @ rng.normal(size=6), np.zeros(6)
for epoch in range(cfg["training"]["epochs"]):
    bar = tqdm(np.array_split(rng.permutation(256), 16), desc=f"Epoch {epoch}", ncols=80)
    for rows in bar:
        w -= cfg["optimizer"]["lr"] * (x[rows].T @ (x[rows] @ w - y[rows]) / 16 + cfg["optimizer"]["weight_decay"] * w)
        bar.set_postfix(loss=f"{np.mean((x[rows] @ w - y[rows]) ** 2):.4f}")
        time.sleep(0.01)
    val_loss = np.mean((x[256:] @ w - y[256:]) ** 2)
    print(f"Validation loss: {val_loss:.6f}")
    np.save(run_dir / f"epoch_{epoch}.npy", w)
