"""How close is the planned time of a fetch, is each file fetched once, and do trials need no hub afterwards?

Run: python -m tests.bench.bench_fetch [RUNS [MB_PER_S]], such as `5 100`. A stand-in of the hub over HTTP serves 2 GB
at a limited rate and breaks the connection of a file in the middle. Each run is `rubberband run` on this machine with
an empty cache; the first is planned with the guess, the others with what was measured before. Prints planned and taken
seconds, the bytes that were served and the requests of each file; in the end the stand-in refuses all connections, and
another run trains. The files take 2 GB on the disk of TMPDIR.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rubberband.units import parse_duration
from tests.builders.hub import Content, Hub, Repo, served

_FILES, _BYTES = 4, 500_000_000
_TRIAL = """
import rubberband
from huggingface_hub import HfApi, hf_hub_download

def train(config):
    iteration = rubberband.get_checkpoint() or 0
    with open(hf_hub_download("org/base", "model-0.safetensors"), "rb") as file:
        first = file.read(1)[0]
    while True:
        iteration += 1
        rubberband.report({"loss": config["lr"] * (1 + first) / iteration}, checkpoint=iteration)
"""
_EXPERIMENT = """
name: NAME
entrypoint: fetching:train
search:
  space: {lr: {type: uniform, lower: 0.1, upper: 1}}
  scheduler: {type: sha, num_samples: 4, max_t: 4, reduction_factor: 2}
  metric: loss
  mode: min
constraints: {deadline: 10m}
resources: {provider: local, slots: 2, max_instances: 1, fetch: {models: [org/base]}}
profile: {seconds_per_iteration: {1: 0.1}}
"""


def ran(name: str, folder: Path, url: str) -> str:
    """Run an experiment to its end, and return what it printed."""
    (folder / "fetching.py").write_text(_TRIAL)
    (folder / f"{name}.yaml").write_text(_EXPERIMENT.replace("NAME", name))
    done = subprocess.run(
        [sys.executable, "-m", "rubberband.cli", "run", f"{name}.yaml", "--no-check"],
        cwd=folder,
        env={
            **os.environ,
            "HF_ENDPOINT": url,
            "HF_HOME": str(folder / "cache"),
            "HF_HUB_DISABLE_XET": "1",
            "RUBBERBAND_HOME": str(folder / "home"),
            "PYTHONPATH": os.pathsep.join([str(folder), os.getcwd()]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def seconds(pattern: str, output: str) -> float:
    """Return the duration that a line of the output has."""
    found = re.search(pattern, output)
    assert found is not None, output
    return parse_duration(found[1])


def main() -> None:
    """Print a row for each run."""
    runs, rate = (int(sys.argv[at]) if len(sys.argv) > at else given for at, given in ((1, 5), (2, 100)))
    names = [f"model-{number}.safetensors" for number in range(_FILES)]
    hub = Hub({"models/org/base": Repo({name: Content(_BYTES, os.urandom((1 << 20) - 3)) for name in names})})
    with tempfile.TemporaryDirectory(prefix="F-bench-") as place:
        folder = Path(place)
        with served(hub) as hub:
            url, hub.rate = hub.url, rate * 1e6
            for number in range(runs):
                shutil.rmtree(folder / "cache", ignore_errors=True)
                hub.breaks, hub.served = {names[-1]: _BYTES // 2}, 0
                hub.gets.clear()
                output = ran(f"run-{number}", folder, url)
                planned_s = seconds(r"once, about (\S+) at ", output)
                taken_s = seconds(r"fetched 2 GB in (\S+), and verified", output)
                basis = "a guess" if "(a guess)" in output else "measured"
                print(
                    f"run {number}: planned {planned_s:.1f} s ({basis}), taken {taken_s:.1f} s, planned / taken "
                    f"{planned_s / taken_s:.3f}; served {hub.served / 1e9:.3f} GB; requests by file "
                    f"{[hub.gets[name] for name in names]}, of which one broke",
                    flush=True,
                )
            asked = hub.requests
        output = ran("offline", folder, url)
        assert "done: best loss" in output
        print(f"the hub refuses all: 4 trials trained, {hub.requests - asked} requests")


if __name__ == "__main__":
    main()
