"""Iterations per second, planned and seen, of a small model of which 1, 2 and 4 trials share one GPU.

Each run measures its profile first, with as many trials side by side as train later, in a fresh home. Both figures are
of all trials together, from the first start-up to the last end. Without a GPU it is a logical one: trials compute on
this machine's CPUs, so more trials than CPUs are no faster together. Prints figures, asserts none.

Run: python -m tests.bench.bench_trials_per_gpu [1 2 4 ...] [--trials N] [--iterations N]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rubberband.executor import ExperimentFolder, Journal, sqlite_url
from rubberband.executor import read_journal as read

ROOT = Path(__file__).parents[2]

TRIAL = """
import torch

import rubberband


def train(config):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device, steps = ("cuda", 500) if torch.cuda.is_available() else ("cpu", 200)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    inputs = torch.randn(256, 64, device=device)
    iteration = 0
    if state := rubberband.get_checkpoint():
        iteration, weights = state
        model.load_state_dict(weights)
    while True:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = (model(inputs).squeeze(1) - inputs[:, 0]).square().mean()
            loss.backward()
            optimizer.step()
        iteration += 1
        rubberband.report({"loss": float(loss)}, checkpoint=(iteration, model.state_dict()))
"""

EXPERIMENT = """
name: shared
entrypoint: small:train
search:
  space: {{lr: {{type: loguniform, lower: 1.0e-3, upper: 0.1}}}}
  scheduler: {{type: none, num_samples: {trials}, max_t: {iterations}}}
  metric: loss
  mode: min
resources: {{provider: local, gpus_per_instance: 1, max_instances: 1, price_per_hour: 1, trials_per_gpu: {shared}}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("counts", nargs="*", type=int, default=[1, 2, 4])
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=12)
    chosen = parser.parse_args()
    print("trials per GPU  s/iteration  planned it/s  seen it/s  difference  spread", flush=True)
    for count in chosen.counts:
        with tempfile.TemporaryDirectory() as place:
            print_run(count, chosen.trials, chosen.iterations, Path(place))


def print_run(shared: int, trials: int, iterations: int, place: Path) -> None:
    """Run the search with `shared` trials on the GPU, and print its row."""
    (place / "small.py").write_text(TRIAL)
    (place / "shared.yaml").write_text(EXPERIMENT.format(trials=trials, iterations=iterations, shared=shared))
    home, said = place / "home", place / "said"
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"RUBBERBAND_HOME": str(home), "PYTHONPATH": paths}
    command = [sys.executable, "-m", "rubberband.cli", "run", "shared.yaml"]
    with open(said, "w") as output:
        code = subprocess.run(command, cwd=place, env=environment, stdout=output, stderr=output).returncode
    if code:
        raise SystemExit(f"{' '.join(command)} ended with {code}:\n{said.read_text()}")
    folder = ExperimentFolder(home=home, name="shared")
    journal = Journal(sqlite_url(folder.journal), folder.name)
    header = journal.header()
    journal.close()
    assert header is not None
    job, result, total = header.job, read(folder), trials * iterations
    planned = total / job.prediction.stages[0].duration_s
    seen = total / (max(use.end_s for use in result.busy) - min(use.start_s for use in result.busy))
    print(
        f"{shared:>14} {job.profile.iteration_s(1):>12.3f} {planned:>13.2f} {seen:>10.2f}"
        f" {100.0 * (seen / planned - 1.0):>+9.1f} % {job.profile.iteration_cv:>6.0%}",
        flush=True,
    )


if __name__ == "__main__":
    main()
