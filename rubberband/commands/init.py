"""`rubberband init`: write an experiment file for a trial or a program."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rubberband.commands.common import argument, option
from rubberband.errors import InputError

if TYPE_CHECKING:
    from rubberband.executor.training.check_findings import TrialCheck
    from rubberband.running.check import CheckReport
    from rubberband.running.first_file import TrialFindings

DEFAULT_FILE = "experiment.yaml"
MODULE = "my_trial"
CHECK_S = 120.0
"""Time for the iteration that is tried."""


def init(
    trial: Annotated[
        str | None,
        argument(
            "TRIAL",
            "module:Class, module:function, a script such as train.py, or a command line in quotes; without it, a "
            "small trial is written too.",
        ),
    ] = None,
    file: Annotated[Path | None, argument("FILE", f"The file to write. [default: {DEFAULT_FILE}]")] = None,
    metric: Annotated[
        str | None, option("--metric", "NAME", "The metric that ranks trials. [default: as found in the trial]")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Try one iteration, to find its metric and its duration.")
    ] = True,
    patch: Annotated[
        bool,
        typer.Option("--patch", help="Print a diff that gives the script TRIAL lines of checkpoint, and end."),
    ] = False,
    apply: Annotated[bool, typer.Option("--apply", help="With --patch: write the patched script beside it.")] = False,
) -> None:
    """Write an experiment file for a trial.

    Finds the parameters that the trial reads from its configuration, and the metrics that it reports, and tries one
    iteration. The parameters of a program are the options of its ArgumentParser: it runs until it parses them, and no
    further. Ranges are guesses: adapt them. Without TRIAL, a small trial to start from is written as well. Nothing is
    overwritten.
    """
    from importlib.util import find_spec

    from rubberband.features import parts
    from rubberband.running.first_file import text_of

    if patch or apply:
        _patch(trial, apply=apply)
        return
    path = file or Path(DEFAULT_FILE)
    is_file = trial is not None and file is None and ":" not in trial
    if trial is not None and is_file and not any(programs.is_program(trial) for programs in parts("programs")):
        path, trial = Path(trial), None
    _require_new(path)
    made = path.parent / f"{MODULE}.py" if trial is None else None
    if made is not None:
        _write(made, _TORCH if find_spec("torch") is not None else _PLAIN)
        trial = f"{MODULE}:MyTrial"
    assert trial is not None
    try:
        seen = seen_in(trial, path)
        seen = seen if metric is None else replace(seen, metric=metric)
        found = _tried(seen, path, metric) if check else seen
        _write(path, text_of(found, path))
    except BaseException:  # Ctrl-C too: a second try would not overwrite it
        if made is not None:
            made.unlink()
        raise
    _conclude(found, path)


def _patch(script: str | None, *, apply: bool) -> None:
    """Print the lines of checkpoint for a script, or write it with them. Raises InputError where none are known."""
    from rubberband.features import parts

    if script is None:
        raise InputError("--patch needs the script: rubberband init --patch train.py")
    for programs in parts("programs"):
        try:
            found = programs.patch_of(script)
        except InputError as error:
            print(getattr(error, "lines", ""), end="")
            raise
        if apply:
            _write(found.copy, found.after)
        else:
            print(found.diff, end="")
        how = f"use {found.copy} in the command" if apply else f"write it: rubberband init --patch {script} --apply"
        print(f"With these lines {found.remark}. Next: {how}", file=sys.stderr)


def _require_new(path: Path) -> None:
    if path.exists():
        raise InputError(f"{path} exists, and is not overwritten; give another path: rubberband init TRIAL OTHER.yaml")
    if path.suffix not in (".yaml", ".yml", ".json"):
        trial = f"module:Class, such as {path}:MyTrial" if path.with_suffix(".py").exists() else "module:Class"
        raise InputError(
            f"{path} is neither a trial ({trial}, a script, or a command line in quotes) nor the name of an experiment "
            "file; end that with .yaml"
        )


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "x", encoding="utf-8") as target:
            target.write(text)
    except FileExistsError:
        raise InputError(f"{path} exists, and is not overwritten; give another path or move it away") from None
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}); give another path") from None
    print(f"wrote {path}", file=sys.stderr)


# The trial's source.


def seen_in(trial: str, path: Path) -> TrialFindings:
    """Import a trial and read its source, or look at a program, for the file at `path`.

    Raises EntrypointError, or InputError for a program that cannot be run as it is.
    """
    from rubberband.features import parts
    from rubberband.running.trial_source import findings_of_code

    for programs in parts("programs"):
        if programs.is_program(trial):
            found: TrialFindings = programs.findings_of(trial, path)
            return found
    return findings_of_code(trial, path)


# The iteration that is tried.


def _tried(seen: TrialFindings, path: Path, asked: str | None) -> TrialFindings:
    """Try an iteration, for its seconds, and for the metric if it has another name. Problems are kept."""
    from rubberband.running.first_file import is_maximised

    report = _report(seen, path)
    first = report.problems[0].line if report.problems else ""
    missing = re.search(r"the metric .* is missing; the trial reported (.*?)(;| and \d)", first)
    if missing is not None and asked is None and (names := re.findall(r"'([^']+)'", missing.group(1))):
        better = [name for name in names if is_maximised(name)]
        seen = replace(seen, metric=(better or names)[0])
        report = _report(seen, path)
    return replace(
        seen,
        iteration_s=report.trial.seconds.get("iteration") if report.trial.metrics else None,
        startup_s=_startup_s(report.trial),
        first_extra_s=report.trial.first_extra_s,
        cold_extra_s=report.trial.cold_extra_s,
        problems=tuple(problem.line for problem in report.problems),
    )


def _startup_s(found: TrialCheck) -> float:
    """Return the seconds of a start: of a restore, which sets a trial up as well, and of imports in an iteration."""
    seconds, first_extra_s = found.seconds, found.first_extra_s or 0.0
    if "restore" in seconds or found.first_extra_s is None:
        return seconds.get("restore", 0.0) + first_extra_s
    return seconds["set-up"] - found.cold_extra_s + first_extra_s


def _report(seen: TrialFindings, path: Path) -> CheckReport:
    from rubberband.running.check import check_experiment
    from rubberband.running.first_file import text_of
    from rubberband.spec.loading import parse_experiment

    experiment = parse_experiment(text_of(seen, path), source=str(path))
    return check_experiment(
        experiment, search_path=(path.absolute().parent, Path.cwd()), limit_s=CHECK_S, output=2, quick=True
    )


def _conclude(found: TrialFindings, path: Path) -> None:
    for remark in found.remarks:
        print(f"note: {remark}", file=sys.stderr)
    for problem in found.problems:
        print(f"problem: {problem}", file=sys.stderr)
    print(f"Next: adapt the ranges in {path}, then rubberband {'check' if found.problems else 'estimate'} {path}")


_TORCH = '''\
"""A trial to start from: put your model and data in place of these. Every method: docs/write-a-trial."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import rubberband


class MyTrial(rubberband.TorchTrial):
    batch_size = 64  # samples per optimizer step, over all GPUs of the trial

    def build_model(self, config):
        return nn.Sequential(nn.Linear(2, config["hidden"]), nn.Tanh(), nn.Linear(config["hidden"], 1))

    def build_optimizer(self, config, model):
        return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])

    def train_dataset(self, config):  # the same on every worker
        return _points(2048, seed=0)

    def eval_dataset(self, config):  # evaluate() reports the mean loss on it, as "loss"
        return _points(512, seed=1)

    def loss(self, model, batch):  # mean loss over the batch
        x, y = batch
        return nn.functional.mse_loss(model(x), y)


def _points(number, seed):
    x = torch.rand(number, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return TensorDataset(x, torch.sin(3 * x[:, :1]) * x[:, 1:])
'''

_PLAIN = '''\
"""A trial to start from: put your training in place of this. Every method: docs/write-a-trial."""

import random

import rubberband


class MyTrial(rubberband.Trial):
    def setup(self, config, context):
        self.config = config
        self.weight = self.velocity = 0.0

    def iterate(self):  # one iteration: an epoch, for instance; returns its metrics
        for _ in range(1000):
            x = random.uniform(-1.0, 1.0)
            gradient = 2 * x * (self.weight * x - 3.0 * x)
            self.velocity = self.config["momentum"] * self.velocity - self.config["lr"] * gradient
            self.weight += self.velocity
        return {"loss": (self.weight - 3.0) ** 2}

    def save(self):  # everything that load needs
        return self.weight, self.velocity

    def load(self, state):
        self.weight, self.velocity = state
'''
