"""Prints the time from the command to the first running trial, for README's main job, by cause, and for a program.

The job's trial is checked each time, in a home of its own. Medians of some rounds: seconds until the first line and
until the first trial trains, their causes from the journal (the waits of `report --verbose`), and CPU seconds of the
command and its children until Ctrl-C a second later. The program: `rubberband init`, and `rubberband run` until one
starts.

python -m tests.bench.bench_first_trial [rounds]
"""

from __future__ import annotations

import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from rubberband.executor import ExperimentFolder, read_journal
from rubberband.views.report.waits import parts_of

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


ROOT = Path(__file__).parents[2]


def job() -> dict[str, float]:
    """Run README's job until a trial has reported; return its waits in seconds by name, and CPU seconds."""
    with tempfile.TemporaryDirectory() as home:
        environment = os.environ | {"RUBBERBAND_HOME": home}
        command = [sys.executable, "-m", "rubberband.cli", "run", "examples/digits.yaml"]
        began, before = time.time(), os.times()
        run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        assert run.stderr is not None
        select.select([run.stderr], [], [], _LIMIT_S)
        found = {"first line": time.time() - began}
        for line in run.stderr:
            if b"training 64 trials" in line:
                break
        found["Enter to the first iteration"] = time.time() - began
        time.sleep(1.0)
        run.send_signal(signal.SIGINT)
        run.stderr.read()
        run.wait()
        after = os.times()
        found["CPU of the command and its children"] = (
            after.children_user + after.children_system - before.children_user - before.children_system
        )
        for name, parts in parts_of(read_journal(ExperimentFolder(home=Path(home), name="digits")))[:2]:
            found |= {f"  {name}: {cause}": seconds for cause, seconds in parts.items()}
    return found


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    taken: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for name, seconds in job().items():
            taken[name].append(seconds)
    for name, each in taken.items():
        print(f"{name:<45} median {statistics.median(each):6.2f} s   least {min(each):6.2f} s   ({len(each)} rounds)")
    program()


def program() -> None:
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
