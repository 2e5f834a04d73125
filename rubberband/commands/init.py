"""`rubberband init`: write an experiment file for a trial or a program."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
import typer.core

from rubberband.commands.common import argument, option
from rubberband.commands.folding import Folded
from rubberband.errors import InputError, RubberbandError

if TYPE_CHECKING:
    from rubberband.executor.training.check_findings import TrialCheck
    from rubberband.running.check import CheckReport
    from rubberband.running.first_file import TrialFindings

DEFAULT_FILE = "experiment.yaml"
MODULE = "my_trial"
CHECK_S = 120.0
"""Time for the iteration that is tried."""
_LONG_S = 30.0
"""A longer iteration is not tried after the look."""
_MOST_CHOICES = 6
_LAST_LINES = 12
"""Lines of a program that are shown where it failed, and no terminal shows them as they come."""


class _Init(typer.core.TyperCommand):
    """Command whose last words are those of a program: its own options may stand among them, or before a --."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Move the command's own options before the program."""
        takes = {
            name: not getattr(each, "is_flag", False)
            for each in self.get_params(ctx)
            for name in each.opts + each.secondary_opts
        }
        own, words, rest = list[str](), list[str](), list(args)
        while rest and (word := rest.pop(0)) != "--":
            name, _, value = word.partition("=")
            if name in takes and name.startswith("-"):
                behind = int(takes[name] and not value)  # its value is the next word
                own += [word, *rest[:behind]]
                del rest[:behind]
            else:
                (words if words or not word.startswith("-") else own).append(word)
        words += rest
        return super().parse_args(ctx, [*own, *(["--", *words] if words else [])])


init = typer.Typer(add_completion=False, rich_markup_mode=None)


WordsArgument = Annotated[
    list[str] | None,
    argument(
        "PROGRAM [WORDS]",
        "A script such as train.py, or a command, with its words; module:Class or module:function; without it, a "
        "small trial is written too.",
    ),
]
FileOption = Annotated[
    Path | None,
    option("--file", "FILE", f"The file to write. [default: the program's name with .yaml, else {DEFAULT_FILE}]"),
]
MetricOption = Annotated[
    str | None, option("--metric", "NAME", "The metric that ranks trials. [default: the best that was seen]")
]
ModeOption = Annotated[
    Literal["min", "max"] | None,
    option("--mode", "min|max", "Whether less or more of it is better. [default: by its name]"),
]
WaitOption = Annotated[
    str, typer.Option("--wait", metavar="DURATION", help="How long a program may take until its first metric.")
]
CheckOption = Annotated[
    bool, typer.Option("--check/--no-check", help="Try one iteration, to find its duration and its checkpoint.")
]
PatchOption = Annotated[
    bool, typer.Option("--patch", help="Print a diff that gives the script PROGRAM lines of checkpoint, and end.")
]


@init.command("init", cls=_Init)
def _init(
    words: WordsArgument = None,
    file: FileOption = None,
    metric: MetricOption = None,
    mode: ModeOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: take the best metric.")] = False,
    wait: WaitOption = "60s",
    check: CheckOption = True,
    patch: PatchOption = False,
    apply: Annotated[bool, typer.Option("--apply", help="With --patch: write the patched script beside it.")] = False,
) -> None:
    """Write an experiment file for a trial.

    The trial is a program, or a class or function in Python. Starts the program, finds its metric in what it prints,
    and stops it in its second epoch. Its parameters are the options of its parser, and those of a trial in Python what
    it reads from its configuration. Then one iteration is tried. Ranges are guesses: adapt them. Options of init may
    stand anywhere; all words after -- are the program's. Without PROGRAM, a small trial to start from is written as
    well. Nothing is overwritten. Exit code 1: something that a search needs was not found, and nothing was written.
    """
    from rubberband.running.first_file import text_of
    from rubberband.units import parse_duration

    trial = _trial_of(words or [])
    if patch or apply:
        _patch(trial, apply=apply)
        return
    made = (file or Path(DEFAULT_FILE)).parent / f"{MODULE}.py" if trial is None else None
    if file is not None:
        _require_new(file)
    if made is not None:
        _require_new(path := file or Path(DEFAULT_FILE))
        _write(made, _template())
        trial = f"{MODULE}:MyTrial"
    assert trial is not None
    try:
        seen = seen_in(trial, file or Path(DEFAULT_FILE))
        path = file or Path(_named_after(seen))
        _require_new(path)
        found, report = _found(seen, path, metric, mode, wait_s=parse_duration(wait), asks=not yes, check=check)
        _write(path, text_of(found, path))
    except BaseException:  # Ctrl-C too: a second try would not overwrite it
        if made is not None:
            made.unlink()
        raise
    _conclude(found, report, path)


def _trial_of(words: Sequence[str]) -> str | None:
    """Return the trial or the program that the words name, as a text; None: they are empty."""
    from rubberband.features import parts
    from rubberband.values.command import line_of

    if not words:
        return None
    first, *rest = words
    is_line = " " in first.strip() and not Path(first).exists()
    text = " ".join([first, *([line_of(rest)] if rest else [])]) if is_line else line_of(words) if rest else first
    name = rest[0] if rest else first
    if not is_line and len(rest) < 2 and name.endswith((".yaml", ".yml", ".json")) and not Path(name).exists():
        program = f"{shlex.quote(first)} " if rest else ""
        raise InputError(f"there is no {name}; the file to write is named by --file: init {program}--file {name}")
    is_trial = rest and re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", first)
    if not is_trial and any(programs.is_program(text) for programs in parts("programs")):
        return text
    if rest:
        raise InputError(f"{first} is no program, and takes no words such as {rest[0]}; leave them out")
    if Path(first).is_file() and first.endswith((".yaml", ".yml")):
        raise InputError(_unread_file(first))
    if ":" not in first:
        trial = f"module:Class, such as {first}:MyTrial" if Path(f"{first}.py").exists() else "module:Class"
        raise InputError(f"{first} is neither a trial ({trial}) nor a program (a script, or a command with its words)")
    return first


def _unread_file(file: str) -> str:
    """Return why `init` does not read a file of YAML, with the remedy."""
    text = Path(file).read_text(encoding="utf-8", errors="replace")
    if re.search(r"^search:", text, re.MULTILINE):
        return f"{file} is an experiment already; check it: rubberband check {shlex.quote(file)}"
    return (
        f"{file} is no config of TRL, Axolotl or LLaMA-Factory and no sweep of W&B, by its keys; name the command that "
        f"takes it, such as: rubberband init 'trl sft --config {file}'"
    )


def _named_after(seen: TrialFindings) -> str:
    """Return the name of the file for a program: train.yaml for train.py, and for python -m pkg.train."""
    from rubberband.values.command import script_of

    words = list(seen.command)
    if seen.file or not words:
        return seen.file or DEFAULT_FILE
    scripts = (match[1] for word in words if (match := re.fullmatch(r"(.+\.(?:py|sh))(:\w+)?", word)))
    named = script_of(words) or next(scripts, None)
    if named is None:
        named = words[words.index("-m") + 1].replace(".", "/") if "-m" in words[:-1] else words[0]
    return f"{Path(named).stem}.yaml"


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
        raise InputError(f"{path} exists, and is not overwritten; give another path: --file OTHER.yaml")
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise InputError(f"--file {path}: an experiment file ends with .yaml; words of the program stand after --")


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
    """Import a trial and read its source, or that of a program, for the file at `path`.

    Raises EntrypointError, or InputError for a program that cannot be run as it is.
    """
    from rubberband.features import parts
    from rubberband.running.trial_source import findings_of_code

    for programs in parts("programs"):
        if programs.is_program(trial):
            found: TrialFindings = programs.findings_of(trial, path)
            return found
    return findings_of_code(trial, path)


def _require_parameters(seen: TrialFindings) -> None:
    """Raise RubberbandError where there is nothing to search."""
    from rubberband.values.command import line_of

    if seen.space:
        return
    trial = line_of(seen.start) or seen.entrypoint
    why = "".join(f" ({remark})" for remark in seen.remarks[:1])
    if seen.command:
        raise RubberbandError(
            f"no parameter was found in {trial}{why}; give some with their values, as in: rubberband init {trial} --lr "
            "0.1"
        )
    raise RubberbandError(f'no parameter was found in {trial}; read one from its configuration, as in config["lr"]')


# A look at a run of a program.


def looked_at(
    seen: TrialFindings,
    path: Path,
    metric: str | None = None,
    mode: str | None = None,
    *,
    wait_s: float = 60.0,
    asks: bool = False,
) -> TrialFindings:
    """Look at a run of a program, and return the findings with its metric. Raises RubberbandError if it has none."""
    from rubberband.features import part
    from rubberband.values.command import line_of

    _require_parameters(seen)
    if not seen.start:
        return seen
    if seen.missing:
        raise RubberbandError(seen.missing)
    programs, line, folder = part("programs"), line_of(seen.start), path.absolute().parent
    with programs.tidied(folder, _note), Folded(f"looking at {line}") as folded:
        found = programs.look(seen, folder, wait_s=wait_s, show=folded.add, metric=metric or seen.metric or None)
    print(f"looked at {line}: {found.lines} lines in {found.seconds:.1f} s", file=sys.stderr)
    choice, better = _chosen(found.choices, mode or seen.mode, asks=asks and metric is None)
    looked: TrialFindings = programs.with_look(seen, found, choice, better)
    return looked


def _chosen(choices: Sequence[Any], mode: str, *, asks: bool) -> tuple[Any, str]:
    """Return the metric and its mode: the best, or on a terminal the one that the user chooses."""
    from rubberband.running.first_file import mode_of

    known = [(choice, mode or mode_of(choice.name)) for choice in choices]
    open_ones = [(choice, each) for choice, better in known for each in ([better] if better else ["max", "min"])][
        :_MOST_CHOICES
    ]
    if asks and len(open_ones) > 1 and sys.stdin.isatty() and sys.stderr.isatty():
        return open_ones[_asked([_shown(*each) for each in open_ones])]
    choice, better = known[0]
    if not better:
        raise RubberbandError(
            f"the name of {choice.name} ({choice.line}) does not say whether more of it is better; add --mode max or "
            "--mode min"
        )
    if len(known) > 1:
        others = ", ".join(dict.fromkeys(each.name for each, _ in known[1:_MOST_CHOICES] if each.name != choice.name))
        print(f"took {choice.name} ({better})" + (f"; --metric takes {others}" if others else ""), file=sys.stderr)
    return choice, better


def _shown(choice: Any, mode: str) -> str:
    more = "more" if mode == "max" else "less"
    return f"{choice.name} ({more} is better)  {choice.line}"


def _asked(choices: Sequence[str]) -> int:
    """Ask which choice is meant, by its number; the first by default. Raises KeyboardInterrupt at its end."""
    print("Which metric ranks the trials?", file=sys.stderr)
    for number, choice in enumerate(choices, start=1):
        print(f"  {number}  {choice}", file=sys.stderr)
    numbers = [str(number) for number in range(1, len(choices) + 1)]
    try:
        while (answer := typer.prompt("metric", default="1", err=True).strip()) not in numbers:
            print(f"{answer} is not among the choices; give a number from 1 to {len(choices)}", file=sys.stderr)
    except typer.Abort:
        raise KeyboardInterrupt from None
    return numbers.index(answer)


# The iteration that is tried.


def _found(
    seen: TrialFindings, path: Path, metric: str | None, mode: str | None, *, wait_s: float, asks: bool, check: bool
) -> tuple[TrialFindings, CheckReport | None]:
    """Look at a run of a program, and try one iteration of it, or of a trial."""
    if seen.is_known and not check:
        seen = replace(seen, metric=metric or seen.metric, mode=mode or seen.mode)
    elif seen.start:
        seen = looked_at(seen, path, metric, mode, wait_s=wait_s, asks=asks)
        if check and (seen.iteration_s or 0.0) > _LONG_S:
            _note(f"no iteration was tried, as one takes {seen.iteration_s:.0f} s")
            check = False
    else:
        _require_parameters(seen)
        seen = replace(seen, metric=metric or seen.metric, mode=mode or seen.mode)
    return _tried(seen, path, renames=metric is None and not seen.start) if check else (seen, None)


def _tried(seen: TrialFindings, path: Path, *, renames: bool) -> tuple[TrialFindings, CheckReport]:
    """Try an iteration, for its seconds and its checkpoint. Problems are kept.

    `renames`: whether the metric is that of the trial where its source seemed to have another name.
    """
    from rubberband.running.first_file import is_maximised

    report = _report(seen, path)
    first = report.problems[0].line if report.problems else ""
    missing = re.search(r"the metric .* is missing; the trial reported (.*?)(;| and \d)", first)
    if missing is not None and renames and (names := re.findall(r"'([^']+)'", missing.group(1))):
        seen = replace(seen, metric=next(filter(is_maximised, names), names[0]))
        report = _report(seen, path)
    trial = report.trial
    found = replace(
        seen,
        problems=tuple(problem.line for problem in report.problems),
        resumes=trial.resumes,
        restart=trial.restart,
        is_once=seen.is_once or trial.is_once,
    )
    if trial.metrics:
        found = replace(
            found,
            iteration_s=trial.seconds.get("iteration"),
            startup_s=_startup_s(trial),
            first_extra_s=trial.first_extra_s,
            cold_extra_s=trial.cold_extra_s,
        )
    return found, report


def _startup_s(found: TrialCheck) -> float:
    """Return the seconds of a start: of a restore, which sets a trial up as well, and of imports in an iteration."""
    seconds, first_extra_s = found.seconds, found.first_extra_s or 0.0
    if "restore" in seconds or found.first_extra_s is None:
        return seconds.get("restore", 0.0) + first_extra_s
    return seconds["set-up"] - found.cold_extra_s + first_extra_s


def _report(seen: TrialFindings, path: Path) -> CheckReport:
    from rubberband.features import part
    from rubberband.running.check import check_experiment
    from rubberband.running.first_file import text_of
    from rubberband.spec.loading import parse_experiment

    experiment, folder = parse_experiment(text_of(seen, path), source=str(path)), path.absolute().parent
    tidied = part("programs").tidied(folder, _note) if seen.start else nullcontext()
    with tidied, Folded("trying one iteration") as folded, folded.pipe() as output:
        report = check_experiment(
            experiment, search_path=(folder, Path.cwd()), limit_s=CHECK_S, output=output, quick=True
        )
    if report.problems:
        folded.show_last(_LAST_LINES)
    return report


# The answer.


def _note(remark: str) -> None:
    print(f"note: {remark}", file=sys.stderr)


def _conclude(found: TrialFindings, report: CheckReport | None, path: Path) -> None:
    from rubberband.running.first_file import NO_FOLDER

    said = () if report is None or not report.trial.unsaved else (NO_FOLDER, report.trial.unsaved)  # by the answer
    for remark in dict.fromkeys((*found.remarks, *(report.remarks if report is not None else ()))):
        if not remark.endswith(said):
            _note(remark)
    for problem in found.problems:
        print(f"problem: {problem}", file=sys.stderr)
    sys.stderr.flush()
    for name, text in _answer(found, report, path):
        print(f"{name:<11} {text}")


def _answer(found: TrialFindings, report: CheckReport | None, path: Path) -> Collection[tuple[str, str]]:
    from rubberband.running.first_file import mode_of

    trial = None if report is None else report.trial
    mode = found.mode or mode_of(found.metric) or "min"
    read = f", read from: {found.line}" if found.line else ""
    more = f" ({len(found.others)} more stand as comments)" if found.others else ""
    unit = "a whole training" if found.is_once else "an iteration"
    measured = "not measured: the first run does it"
    if found.iteration_s is not None:
        measured = f"{found.iteration_s:.2g} s {unit}, {found.startup_s:.2g} s a start"
    command = "check" if found.problems else "estimate"
    return (
        ("metric", f"{found.metric} ({mode}){read}"),
        ("parameters", f"{', '.join(found.space)}{more}"),
        ("checkpoint", _checkpoint(found, trial)),
        ("resume", _resume(found, trial)),
        ("time", measured),
        ("next", f"adapt the ranges in {path}, then: rubberband {command} {shlex.quote(str(path))}"),
    )


def _checkpoint(found: TrialFindings, trial: TrialCheck | None) -> str:
    from rubberband.values.command import script_of

    if trial is not None and trial.checkpoint_bytes is not None:
        return f"{trial.checkpoint_bytes / 1e6:.3g} MB"
    if found.is_once:
        return "none is needed: the metric comes once, at the end"
    why = trial.unsaved if trial is not None else ""
    if trial is not None and why and not why.startswith("saved nothing"):
        return f"none: the {trial.kind} {why}"
    if found.saves or not found.start:
        return "saved below ${checkpoint}" if found.saves else "not tried"
    script = script_of(found.command)
    patch = f"; lines for it: rubberband init --patch {script}" if script else ""
    return f"none: the program saved nothing in ${{checkpoint}}{patch}"


def _resume(found: TrialFindings, trial: TrialCheck | None) -> str:
    if found.restart or trial is None:
        return found.restart or "not tried"
    if found.is_once:
        return "none is needed: a trial is one start"
    return "was restored from its checkpoint" if "restore" in trial.seconds else "was not started a second time"


def _template() -> str:
    from importlib.util import find_spec

    return _TORCH if find_spec("torch") is not None else _PLAIN


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
