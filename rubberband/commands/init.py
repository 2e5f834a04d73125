"""`rubberband init`: write an experiment file for a trial or a program."""

from __future__ import annotations

import ast
import inspect
import keyword
import math
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rubberband.commands.common import argument, option
from rubberband.errors import InputError

if TYPE_CHECKING:
    from rubberband.executor.training.check_findings import TrialCheck
    from rubberband.running.check import CheckReport
    from rubberband.running.program_options import ProgramFindings, ProgramOption

DEFAULT_FILE = "experiment.yaml"
MODULE = "my_trial"
CHECK_S = 120.0
"""Time for the iteration that is tried."""
_GUESSED_S = 10.0
"""Seconds of an iteration where none could be tried."""
_USD_PER_HOUR = 3.06
"""Price of an instance with one GPU, which the file names."""
_INSTANCES, _TRIALS, _MOST, _FACTOR = 2, 16, 16, 4
_MOST_PARAMETERS = 8
"""Options of a program beyond which only those with usual names are searched."""


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
) -> None:
    """Write an experiment file for a trial.

    Finds the parameters that the trial reads from its configuration, and the metrics that it reports, and tries one
    iteration. The parameters of a program are the options of its ArgumentParser: it runs until it parses them, and no
    further. Ranges are guesses: adapt them. Without TRIAL, a small trial to start from is written as well. Nothing is
    overwritten.
    """
    from importlib.util import find_spec

    from rubberband.features import parts

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFindings:
    """Findings about a trial: its source, and an iteration."""

    entrypoint: str
    """The lines of the file's entry point, after the key."""
    name: str
    space: Mapping[str, tuple[str, str]]
    """Parameter -> its domain as the file writes it, and a comment."""
    metric: str
    most: int = _MOST
    """Iterations of a trial that trains to the end."""
    remarks: tuple[str, ...] = ()
    iteration_s: float | None = None
    startup_s: float = 0.0
    first_extra_s: float | None = None
    """The part of `startup_s` that passes within a first iteration, and `cold_extra_s` on a fresh worker."""
    cold_extra_s: float = 0.0
    problems: tuple[str, ...] = ()


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

    for programs in parts("programs"):
        if programs.is_program(trial):
            return _of_program(programs.program_of(trial, Path.cwd()), trial, path)
    return _of_code(trial, path)


def _of_code(trial: str, path: Path) -> TrialFindings:
    from rubberband.executor.training.entrypoint import Entrypoint
    from rubberband.executor.training.torch_trial import TorchTrial

    target = Entrypoint.parse(trial, search_path=(path.absolute().parent, Path.cwd())).load()
    classes = inspect.getmro(target) if isinstance(target, type) else (target,)
    trees = [_tree(each) for each in classes if not each.__module__.startswith(("rubberband", "abc", "builtins"))]
    parameters = {name: default for tree in trees for name, default in _parameters(tree)}
    reported = [name for tree in trees for name in _reported(tree)]
    if not reported:
        reported = ["loss"] if isinstance(target, type) and issubclass(target, TorchTrial) else ["score"]
    better = [name for name in reported if _is_maximised(name)]
    return TrialFindings(
        entrypoint=trial,
        name=_name(trial, path),
        space={name: _domain(name, default) for name, default in sorted(parameters.items())},
        metric=(better or reported)[0],
    )


def _of_program(found: ProgramFindings, trial: str, path: Path) -> TrialFindings:
    """Return the findings about a program, for the file at `path`, whose folder is the program's."""
    from rubberband.values.command import script_of

    folder, here = path.absolute().parent, Path.cwd()
    words = [
        os.path.relpath(here / word, folder) if folder != here and (here / word).is_file() else word
        for word in found.words
    ]
    parameters, remarks = _most_telling(found)
    for left in (each for each in found.parameters if each not in parameters):
        if (place := f"${{{left.name}}}") in words:
            at = words.index(place)
            del words[at - (words[at - 1] in left.flags) : at + 1]
    space = {option.name: _domain_of(option) for option in parameters}
    metrics = [name for name in found.reported if re.match("(val|valid|eval|test|dev)", name.lower())] or found.reported
    better = [name for name in metrics if _is_maximised(name)]
    prints = found.prints or script_of(found.words) is None  # another language prints
    source = "stdout # a line with the metric is an iteration" if prints else "report # rubberband.report({...})"
    if not metrics:
        remedy = "" if prints else " call rubberband.report, or write metrics: stdout and let it"
        remarks.append(f"no metric was found in its source: let the program{remedy} print lines such as loss=0.12")
    return TrialFindings(
        entrypoint=f"\n  command: {_command(words)}\n  metrics: {source}",
        name=_name(Path(next((word for word in words if word.endswith((".py", ".sh"))), words[0])).stem, path),
        space=space,
        metric=(better or metrics or ["loss"])[0],
        most=max(2, found.epochs or _MOST),
        remarks=tuple(remarks),
    )


def _most_telling(found: ProgramFindings) -> tuple[list[ProgramOption], list[str]]:
    """Return the parameters that are worth a search, and remarks."""
    known = [
        option for option in found.parameters if any(re.fullmatch(each, option.name.lower()) for each, _ in _KNOWN)
    ]
    remarks = list(found.remarks)
    if len(found.parameters) <= _MOST_PARAMETERS or not known:
        return list(found.parameters), remarks
    remarks.append(f"{len(found.parameters) - len(known)} options are left out, whose names are unusual for a search")
    return known, remarks


def _command(words: Sequence[str]) -> str:
    """Return a command line as YAML reads it back."""
    from rubberband.values.command import line_of

    line = line_of(words)
    is_plain = re.fullmatch(r"[\w./-][^#:'\"]*", line)
    return line if is_plain else "'" + line.replace("'", "''") + "'"


def _domain_of(option: ProgramOption) -> tuple[str, str]:
    """Return the domain of a program's option, and a comment."""
    said = "" if option.default is None else f"the program's default is {option.default}"
    if option.kind == "BooleanOptionalAction":
        on, off = (min(option.flags, key=len), max(option.flags, key=len))
        return f"{{type: choice, values: [{on}, {off}]}}", said
    if option.choices is not None:
        return f"{{type: choice, values: [{', '.join(_key(str(value)) for value in option.choices)}]}}", said
    return _domain(option.name, option.default if option.default is not None else _REQUIRED)


def _tree(target: Any) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(target)))
    except (OSError, TypeError, SyntaxError):
        return ast.Module(body=[], type_ignores=[])


_REQUIRED = object()
"""Default of a parameter that has none."""


def _parameters(tree: ast.AST) -> Iterator[tuple[str, Any]]:
    """Iterate over the parameters that are read from the configuration, with their defaults."""
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=owner, slice=ast.Constant(value=str() as name)) if _is_config(owner):
                yield name, _REQUIRED
            case ast.Call(
                func=ast.Attribute(value=owner, attr="get"), args=[ast.Constant(value=str() as name), *rest]
            ) if _is_config(owner):
                default = rest[0].value if rest and isinstance(rest[0], ast.Constant) else _REQUIRED
                yield name, default


def _is_config(node: ast.AST) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.strip("_") in ("config", "configuration", "cfg", "hparams", "params")


def _reported(tree: ast.AST) -> Iterator[str]:
    """Iterate over the metrics in the results of `iterate` and `evaluate`, and in calls of `report`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in ("iterate", "evaluate"):
            returned = (part.value for part in ast.walk(node) if isinstance(part, ast.Return))
            yield from (name for value in returned for name in _keys(value))
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "report":
            yield from (name for value in node.args[:1] for name in _keys(value))


def _keys(node: ast.AST | None) -> list[str]:
    keys = node.keys if isinstance(node, ast.Dict) else []
    return [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]


def _is_maximised(metric: str) -> bool:
    return re.search(r"acc|auc|f1|score|reward|return|precision|recall|bleu|iou|r2", metric.lower()) is not None


_BELOW_ONE = r"momentum|beta_?\d?|adam_beta\d|(.*_)?dropout(_.*)?|drop_.*"
_KNOWN = (
    (r"lr|learning_rate|.*_lr", "{type: loguniform, lower: 1e-4, upper: 1e-1}"),
    (r"weight_decay|wd|l2|.*_decay", "{type: loguniform, lower: 1e-6, upper: 1e-2}"),
    (r"momentum|beta_?\d?|adam_beta\d", "{type: uniform, lower: 0.5, upper: 0.99}"),
    (r"(.*_)?dropout(_.*)?|drop_.*", "{type: uniform, lower: 0.0, upper: 0.5}"),
    (r"(.*_)?batch_size", "{type: choice, values: [32, 64, 128]}"),
    (r"(.*_)?(layers|depth|num_layers)", "{type: randint, lower: 1, upper: 5}"),
    (r"(.*_)?(hidden|width|units|channels|dim)(_.*)?", "{type: choice, values: [32, 64, 128]}"),
)
"""Usual ranges by the parameter's name."""


def _domain(name: str, default: Any) -> tuple[str, str]:
    """Return a parameter's domain, and a comment."""
    is_number = isinstance(default, int | float) and not isinstance(default, bool)
    said = f"the default is {default}" if default is not _REQUIRED else ""
    if is_number and default > 0 and not re.fullmatch(_BELOW_ONE, name.lower()):
        if isinstance(default, int):
            return f"{{type: choice, values: {sorted({max(1, default // 2), default, 2 * default})}}}", said
        if 0.5 <= default < 1.0:
            return f"{{type: uniform, lower: {default / 2:g}, upper: 1.0}}", said
        return f"{{type: loguniform, lower: {default / 10:g}, upper: {default * 10:g}}}", said
    for pattern, domain in _KNOWN:
        if re.fullmatch(pattern, name.lower()):
            return domain, "a usual range"
    if isinstance(default, bool):
        return "{type: choice, values: [true, false]}", said
    return "{type: uniform, lower: 0.0, upper: 1.0}", "a guess: write its range"


# The iteration that is tried.


def _tried(seen: TrialFindings, path: Path, asked: str | None) -> TrialFindings:
    """Try an iteration, for its seconds, and for the metric if it has another name. Problems are kept."""
    report = _report(seen, path)
    first = report.problems[0].line if report.problems else ""
    missing = re.search(r"the metric .* is missing; the trial reported (.*?)(;| and \d)", first)
    if missing is not None and asked is None and (names := re.findall(r"'([^']+)'", missing.group(1))):
        better = [name for name in names if _is_maximised(name)]
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
    from rubberband.spec.loading import parse_experiment

    experiment = parse_experiment(text_of(seen, path), source=str(path))
    return check_experiment(
        experiment, search_path=(path.absolute().parent, Path.cwd()), limit_s=CHECK_S, output=2, quick=True
    )


# The file.


def text_of(seen: TrialFindings, path: Path) -> str:
    """Return the experiment file at `path`."""
    iteration_s = max(0.01, _GUESSED_S if seen.iteration_s is None else seen.iteration_s)
    serial = _TRIALS + 4 * 4 + seen.most  # iterations of 16 trials of 1, 4 of 4 and 1 to the end
    deadline_s = 600 * math.ceil(max(600.0, 3.0 * serial / _INSTANCES * iteration_s + 300.0) / 600)
    max_cost_usd = 1 + int(1.5 * _INSTANCES * deadline_s / 3600.0 * _USD_PER_HOUR)
    space = "\n".join(
        f"    {_key(name)}: {domain}{f' # {comment}' if comment else ''}"
        for name, (domain, comment) in seen.space.items()
    )
    measured = "guessed" if seen.iteration_s is None else "one iteration on this machine"
    return _FILE.format(
        schema=Path(__file__).parents[1] / "experiment.schema.json",
        name=_key(seen.name),
        entrypoint=seen.entrypoint if seen.entrypoint.startswith("\n") else f" {seen.entrypoint}",
        remarks="".join(f"# Note: {remark}.\n" for remark in seen.remarks),
        space=space or "    lr: {type: loguniform, lower: 1e-4, upper: 1e-1} # no parameter was found: write yours",
        metric=_key(seen.metric),
        mode="max" if _is_maximised(seen.metric) else "min",
        trials=_TRIALS,
        most=seen.most,
        factor=_FACTOR,
        deadline=f"{deadline_s // 60}m",
        max_cost=max_cost_usd,
        instances=_INSTANCES,
        price=_USD_PER_HOUR,
        measured=measured,
        iteration_s=f"{iteration_s:.2g}",
        startup_s=f"{max(0.1, seen.startup_s):.2g}",
        extras="" if seen.first_extra_s is None else _extras(seen.first_extra_s, seen.cold_extra_s),
    )


def _extras(first_s: float, cold_s: float) -> str:
    return (
        f"  first_iteration_extra: {first_s:.2g}s # of trial_startup, within a first iteration: imports, data\n"
        f"  cold_iteration_extra: {max(first_s, cold_s):.2g}s # the same on a fresh worker\n"
    )


def _key(name: str) -> str:
    """Return a name as YAML reads it back."""
    plain = re.fullmatch(r"[A-Za-z_][\w/-]*", name) and name.lower() not in ("true", "false", "null", "n", "y")
    return name if plain else "'" + name.replace("'", "''") + "'"


_GENERIC = frozenset(
    ("experiment", "fit", "main", "model", "my", "null", "objective", "off", "run", "script", "src", "train", "trial")
)
"""Names that say nothing of a project."""


def _name(trial: str, path: Path) -> str:
    """Return the name of the trial, or else of its module, or else of the folder: the first that is not generic."""
    from rubberband.spec.fields import name_of_trial

    module = trial.partition(":")[0]
    found = [name_of_trial(text) for text in (trial, module, path.absolute().parent.name)]
    return next((name for name in found if name and name not in _GENERIC and not keyword.iskeyword(name)), "search")


def _conclude(found: TrialFindings, path: Path) -> None:
    for remark in found.remarks:
        print(f"note: {remark}", file=sys.stderr)
    for problem in found.problems:
        print(f"problem: {problem}", file=sys.stderr)
    print(f"Next: adapt the ranges in {path}, then rubberband {'check' if found.problems else 'estimate'} {path}")


_FILE = """\
# yaml-language-server: $schema={schema}
# An experiment: what to tune, the limits, and the resources. Every key: docs/reference/experiment-file.
#   rubberband check FILE     one iteration, here, in seconds
#   rubberband estimate FILE  time and cost; nothing is spent
#   rubberband run FILE       runs it
version: 1
name: {name}
{remarks}entrypoint:{entrypoint}
search:
  # A configuration is drawn from here. Types: uniform, loguniform, randint, choice, grid and others; a bare value is
  # a constant.
  space:
{space}
  # Successive halving: {trials} trials train for grace_period iterations, one in {factor} goes on, up to max_t of them.
  scheduler: {{type: sha, num_samples: {trials}, grace_period: 1, max_t: {most}, reduction_factor: {factor}}}
  sampler: {{type: random, seed: 1}}
  metric: {metric}
  mode: {mode}
constraints:
  deadline: {deadline} # from the start of the run
  max_cost: {max_cost} # USD, for the whole run
resources:
  provider: local # this machine; aws rents instances, by instance_type in place of the next two lines
  gpus_per_instance: 1 # more let the last trials train on more GPUs
  price_per_hour: {price} # USD, at which the run is metered; nothing is charged
  max_instances: {instances}
  gpus_per_trial: {{min: 1, max: 1}}
# Seconds of an iteration on 1 GPU ({measured}). Without these lines the first run measures them.
profile:
  seconds_per_iteration: {{1: {iteration_s}}}
  trial_startup: {startup_s}s
{extras}"""

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
