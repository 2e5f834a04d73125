"""Called by run.sh: saves every 2 epochs, and resumes from the last of them if there is one."""

import argparse
import pickle
import time
from pathlib import Path

import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, required=True)
parser.add_argument("--depth", type=int, required=True)
parser.add_argument("--epochs", type=int, required=True)
parser.add_argument("--save-dir", type=Path, required=True)
parser.add_argument("--save-every", type=int, default=2)
args = parser.parse_args()

grid = np.linspace(-1, 1, 200)
y = np.sin(4 * grid) + grid**2
basis = np.stack([grid**k for k in range(2 * args.depth + 2)])
w, start = np.zeros(len(basis)), 0
last = args.save_dir / "last.pkl"
if last.exists():
    start, w = pickle.loads(last.read_bytes())
    print(f"resumed from {last} at epoch {start}")
for epoch in range(start, args.epochs):
    for _ in range(20):
        w -= args.lr * basis @ (w @ basis - y) / len(grid)
    time.sleep(0.2)
    print(
        f"[{time.strftime('%H:%M:%S')}] epoch {epoch + 1:03d}/{args.epochs:03d} mse {np.mean((w @ basis - y) ** 2):.6f}"
    )
    if (epoch + 1) % args.save_every == 0:
        last.write_bytes(pickle.dumps((epoch + 1, w)))
