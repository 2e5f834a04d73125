"""Every command, in this folder, on an installation of the core alone: prints faults, and exits with 1 for any.

It needs nothing but rubberband: `.ci/run` runs it where the wheel is installed without extras.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from rubberband import cli

TRIALS = """\
import rubberband

def train(config):
    for step in range(99):
        rubberband.report({"loss": config["lr"] / (1 + step)}, checkpoint=step)
"""
EXPERIMENT = """\
version: 1
name: NAME
entrypoint: trials:train
search:
  space: {lr: {type: uniform, lower: 0, upper: 1}}
  scheduler: {type: sha, num_samples: 4, grace_period: 1, max_t: 4, reduction_factor: 2}
  sampler: {type: random, seed: 1}
  metric: loss
  mode: min
constraints: {deadline: 1h}
resources: {provider: NAME, instance_type: p3.2xlarge, max_instances: 2, gpus_per_trial: {min: 1, max: 1}}
profile: {seconds_per_iteration: {1: 10}, trial_startup: 1s}
"""
FILES = {
    "trials.py": TRIALS,
    "broken.py": "import torch\n\ndef train(config): ...\n",
    **{f"{name}.yaml": EXPERIMENT.replace("NAME", name) for name in ("virtual", "local", "aws")},
    "pool.yaml": "name: team\nprovider: local\ninstance_type: p3.2xlarge\ninstances: 2\n",
    "shared.yaml": "name: shared\nprovider: virtual\ngpus_per_instance: 2\nprice_per_hour: 3\ninstances: 2\n",
    "jobs.csv": "at,name,kind,iterations\n0,a,k,10\n60,b,k,20\n",
    "k.json": '{"schema": "rubberband.profile/1", "seconds_per_iteration": {"1": 1.0, "2": 0.6}}',
}
DONE = (
    "init",
    "estimate local.yaml",
    "estimate aws.yaml",
    "cloud prices",
    "check virtual.yaml",
    "run virtual.yaml",
    "resume virtual",
    "report virtual --html report.html",
    "best --help",
    "export virtual trials.csv",
    "simulate shared.yaml jobs.csv",
    "ps",
    "status virtual",
    "logs virtual",
    "artifacts virtual 0",
    "cancel virtual",
    "cleanup",
    "pool up --help",
    "token list",
    "mcp --skill",
    "backup saved",
    "restore saved",
    "run virtual.yaml -s name=gone",
    "tag virtual +vision --note baseline",
    "rm gone --yes",
)
"""What the core does alone, in this order."""
LACKS = {
    "init broken:train --file broken.yaml": "ray",
    "estimate --live aws.yaml": "aws",
    "profile local.yaml": "ray",
    "run local.yaml": "ray",
    "run aws.yaml": "ray,aws",
    "run virtual.yaml -s name=learns -s 'search.sampler={type: optuna}'": "optuna",
    "export virtual trials.parquet": "pandas",
    "serve": "server",
    "submit virtual.yaml": "client",
    "mcp": "mcp,client",
    "ps --server http://127.0.0.1:1": "client",
    "extend virtual --deadline 2h --server http://127.0.0.1:1": "client",
    "add virtual lr=0.1 --server http://127.0.0.1:1": "client",
    "clone virtual 0 lr=0.1 --server http://127.0.0.1:1": "client",
    "stop virtual 0 --server http://127.0.0.1:1": "client",
    "scale virtual --max-instances 1 --server http://127.0.0.1:1": "client",
    "tag virtual +vision --server http://127.0.0.1:1": "client",
    "rm virtual --server http://127.0.0.1:1": "client",
    "aws setup": "aws",
    "aws check": "aws",
    "aws teardown": "aws",
    "cloud up aws.yaml": "aws",
    "cloud down": "aws",
    "cloud image list": "aws",
    "pool up pool.yaml": "ray",
}
"""Command -> the extras that it names, and leaves nothing behind."""


def ran(command: str) -> tuple[int, str]:
    """Run a command of rubberband in this process. Returns its exit code (-1: a trace-back) and stderr."""
    sys.argv = ["rubberband", *shlex.split(command)]
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            cli.main()
        except SystemExit as end:
            return int(end.code or 0), errors.getvalue()
        except Exception:
            return -1, traceback.format_exc()
    return 0, errors.getvalue()


def files() -> set[Path]:
    """Return all files of the folder, and of the home, which is in it."""
    return {path for path in Path().rglob("*") if path.suffix != ".pyc"}


def faults() -> Iterator[str]:
    for command in DONE:
        code, errors = ran(command)
        if code:
            yield f"{command}: exit code {code}: {errors}"
    for command, extras in LACKS.items():
        before = files()
        code, errors = ran(command)
        lines = [line for line in errors.splitlines() if not line.startswith("reading ")]
        if code != 2 or len(lines) != 1 or not lines[0].endswith(f"run pip install 'rubberband-tune[{extras}]'"):
            yield f"{command}: exit code {code}: {errors}"
        if left := files() - before:
            yield f"{command}: leaves {', '.join(map(str, sorted(left)))}"
    if missed := set(cli.COMMANDS) - {command.split()[0] for command in (*DONE, *LACKS)}:
        yield f"not tried: {', '.join(sorted(missed))}"


if __name__ == "__main__":
    os.environ["RUBBERBAND_HOME"] = "home"
    sys.path.insert(0, os.getcwd())
    for name, text in FILES.items():
        Path(name).write_text(text)
    found = list(faults())
    print("\n".join(found) or f"{len(DONE) + len(LACKS)} commands are as they should be")
    sys.exit(bool(found))
