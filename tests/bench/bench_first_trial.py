"""Prints the time from a program to its first running trial: `rubberband init`, and `rubberband run` until one starts.

python -m tests.bench.bench_first_trial
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_PROGRAM = """
import argparse, json, os, pathlib, time
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--out", default="out")
args = parser.parse_args()
file = pathlib.Path(args.out, "state.json")
file.parent.mkdir(parents=True, exist_ok=True)
if os.path.exists("runs"):
    open("running", "a").close()
epoch, x = json.loads(file.read_text()) if file.exists() else (0, 0.0)
while epoch < args.epochs:
    time.sleep(1.0)
    epoch, x = epoch + 1, x - args.lr * (x - 2.0)
    file.write_text(json.dumps([epoch, x]))
    print(f"epoch {epoch} val_loss={(x - 2.0) ** 2:.6f}")
"""
_LIMIT_S = 180.0


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(_PROGRAM)
        environment = os.environ | {"RUBBERBAND_HOME": str(folder / "home")}
        command = [sys.executable, "-m", "rubberband.cli"]
        began = time.monotonic()
        subprocess.run([*command, "init", "train.py", "--yes"], cwd=folder, env=environment, check=True)
        init_s = time.monotonic() - began
        (folder / "runs").touch()
        run = subprocess.Popen([*command, "run", "train.yaml", "--no-check"], cwd=folder, env=environment)
        while not (folder / "running").exists() and run.poll() is None and time.monotonic() - began < _LIMIT_S:
            time.sleep(0.05)
        total_s = time.monotonic() - began
        has_begun = (folder / "running").exists()
        run.send_signal(signal.SIGINT)
        run.wait()
    print(f"init {init_s:.1f} s; run until the first trial's program starts {total_s - init_s:.1f} s", end="; ")
    print(f"together {total_s:.1f} s (load {os.getloadavg()[0]:.1f})" if has_begun else "no trial began")


if __name__ == "__main__":
    main()
