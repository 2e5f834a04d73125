"""The experiment file that `rubberband init` writes."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rubberband.values.command import line_of

_GUESSED_S = 10.0
"""Seconds of an iteration where none could be tried."""
_USD_PER_HOUR = 3.06
"""Price of an instance with one GPU, which the file names."""
_INSTANCES, _TRIALS, MOST, _FACTOR = 2, 16, 16, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFindings:
    """Findings about a trial or a program, for its file."""

    entrypoint: str = ""
    """`module:attribute` of a trial in Python; empty for a program."""
    command: tuple[str, ...] = ()
    """Command line of a program, with `${…}` for parameters and places."""
    start: tuple[str, ...] = ()
    """Command line by which `init` looks at a run, with `${checkpoint}` alone; empty: there is none to look at."""
    metrics: str = ""
    """`entrypoint.metrics` of a program as the file writes it, with a comment: `stdout`, `{pattern: …}`."""
    booleans: str = ""
    """Style of its booleans; empty: true/false."""
    resume: tuple[str, ...] = ()
    """Words that are added where it is started from a checkpoint."""
    name: str
    space: Mapping[str, tuple[str, str]]
    """Parameter -> its domain as the file writes it, and a comment."""
    metric: str
    mode: str = ""
    """min or max; empty: by the metric's name."""
    others: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Parameters that are not searched, which the file names in comments, as `space` does."""
    scheduler: str = ""
    """The line of the scheduler, `  scheduler: {type: …}`, with a comment above it; empty: successive halving."""
    sampler: str = ""
    """The sampler as the file writes it; empty: random."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of the program, in `resources.env`."""
    track: str = ""
    """`track` as the file writes it; empty: none."""
    most: int = MOST
    """Iterations of a trial that trains to the end."""
    trials: int = _TRIALS
    work: int = 0
    """Iterations of all trials, for the deadline; 0: those of the usual scheduler."""
    remarks: tuple[str, ...] = ()
    rank: bool = True
    """Whether one worker of the program has torchrun's variables."""
    launch: str = ""
    """`machine` for a launcher, which starts the workers of a machine itself; empty: each worker starts the program."""
    file: str = ""
    """Name of the file to write; empty: by the program's name."""
    is_known: bool = False
    """Whether the metric and its place are known without a look at a run."""
    missing: str = ""
    """Why the program cannot be started here, in one line with a remedy; empty: it can."""
    line: str = ""
    """The line of a run in which the metric was seen."""
    saves: bool = False
    """Whether a run saved files in the folder of `${checkpoint}`."""
    is_once: bool = False
    """Whether a run printed the metric once, at its end."""
    resumes: bool | None = None
    """Whether a second start went on from the checkpoint; None: it is not known."""
    restart: str = ""
    """One line on what a second start did; empty: there was none."""
    iteration_s: float | None = None
    startup_s: float = 0.0
    first_extra_s: float | None = None
    """The part of `startup_s` that passes within a first iteration, and `cold_extra_s` on a fresh worker."""
    cold_extra_s: float = 0.0
    problems: tuple[str, ...] = ()


NO_FOLDER = (
    "the program has no folder for its checkpoints, so each start trains from zero: let it save to "
    'os.environ["RUBBERBAND_CHECKPOINT"], and load from there when it starts'
)
"""Remark on a program that is given no folder of its trial."""
MORE_IS_BETTER = (
    r"acc\d*|accuracy\d*|top\d",
    r"f1|auc|auroc|auprc|map\d*|miou|iou|dice|bleu\d?|rouge\w*|meteor|rewards?|returns?|r2|mcc|kappa|ndcg|mrr|hits?",
    r"scores?|corr|pearson|spearman|psnr|ssim|ap\d*|fitness|win|success",
    r"precision|recall",
)
LESS_IS_BETTER = (
    r"loss|losses",
    r"ppl|perplexity|wer|cer|bpb|bpc|bpd|rmse|mse|mae|mape|errors?|err|nll|logloss|fid",
    r"ce|bce|cost|energy|regret|l1|l2",
)
"""Words in names of metrics, as patterns; the earlier ones are preferred."""


def words_of_name(name: str) -> list[str]:
    """Return the words of a name: `valLoss` and `val/loss` have two."""
    name = re.sub(r"m?IoU|mAP", lambda each: f" {each[0].lower()}", name)
    return [word.lower() for word in re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+\d*|[A-Z]+\d*|\d+", name)]


def mode_of(metric: str) -> str:
    """Return whether more (max) or less (min) of a metric is better, by its name; empty: that does not say it."""
    words = words_of_name(metric)
    for word in reversed(words):
        if any(re.fullmatch(each, word) for each in MORE_IS_BETTER):
            return "max"
        if any(re.fullmatch(each, word) for each in LESS_IS_BETTER):
            return "max" if "neg" in words else "min"
    return ""


def is_maximised(metric: str) -> bool:
    """Whether more of a metric is better, by its name; False where the name does not say it."""
    return mode_of(metric) == "max"


def text_of(seen: TrialFindings, path: Path) -> str:
    """Return the experiment file at `path`."""
    iteration_s = max(0.01, _GUESSED_S if seen.iteration_s is None else seen.iteration_s)
    work = seen.work or _TRIALS + 4 * 4 + seen.most  # iterations of 16 trials of 1, 4 of 4 and 1 to the end
    serial_s = work * iteration_s + (seen.trials - _TRIALS) * max(1.0, seen.startup_s)
    deadline_s = 600 * math.ceil(max(600.0, 3.0 * serial_s / _INSTANCES + 300.0) / 600)
    max_cost_usd = 1 + int(1.5 * _INSTANCES * deadline_s / 3600.0 * _USD_PER_HOUR)
    space = "".join(f"    {_line(name, *domain)}\n" for name, domain in seen.space.items())
    others = "".join(f"    # {_line(name, *domain)}\n" for name, domain in seen.others.items())
    variables = ", ".join(f"{name}: {yaml_key(value)}" for name, value in seen.env.items())
    measured = "guessed" if seen.iteration_s is None else "one iteration on this machine"
    return _FILE.format(
        schema=Path(__file__).parents[1] / "experiment.schema.json",
        name=yaml_key(seen.name),
        entrypoint=f" {seen.entrypoint}" if seen.entrypoint else _program(seen),
        remarks="".join(f"# Note: {remark}.\n" for remark in seen.remarks),
        space=space + others,
        metric=yaml_key(seen.metric),
        mode=seen.mode or ("max" if is_maximised(seen.metric) else "min"),
        scheduler=seen.scheduler or _SCHEDULER.format(trials=_TRIALS, most=seen.most, factor=_FACTOR),
        sampler=seen.sampler or "{type: random, seed: 1}",
        env=f"  env: {{{variables}}}\n" if variables else "",
        track=f"track: {seen.track}\n" if seen.track else "",
        deadline=f"{deadline_s // 60}m",
        max_cost=max_cost_usd,
        instances=_INSTANCES,
        price=_USD_PER_HOUR,
        measured=measured,
        iteration_s=f"{iteration_s:.2g}",
        startup_s=f"{max(0.1, seen.startup_s):.2g}",
        extras=("" if seen.first_extra_s is None else _extras(seen.first_extra_s, seen.cold_extra_s))
        + (_REPEATS if seen.resumes is False and not seen.is_once else ""),
    )


_REPEATS = (
    "  resumes: false # the program starts from zero at each stage; take the line out once it loads a checkpoint\n"
)


def _program(seen: TrialFindings) -> str:
    booleans = f"\n  booleans: {{style: {seen.booleans}}}" if seen.booleans else ""
    rank = "" if seen.rank else "\n  rank: false # one worker gets no variables of torchrun"
    rank += f"\n  launch: {seen.launch} # once for each machine: the launcher starts the workers" if seen.launch else ""
    resume = f"\n  resume: {_command(seen.resume)} # at each start from a checkpoint" if seen.resume else ""
    return f"\n  command: {_command(seen.command)}\n  metrics: {seen.metrics}{booleans}{resume}{rank}"


def _command(words: Sequence[str]) -> str:
    """Return a command line as YAML reads it back."""
    line = line_of(words)
    is_plain = re.fullmatch(r"[\w./-][^#:'\"]*", line)
    return line if is_plain else "'" + line.replace("'", "''") + "'"


def _line(name: str, domain: str, comment: str) -> str:
    return f"{yaml_key(name)}: {domain}{f' # {comment}' if comment else ''}"


def _extras(first_s: float, cold_s: float) -> str:
    return (
        f"  first_iteration_extra: {first_s:.2g}s # of trial_startup, within a first iteration: imports, data\n"
        f"  cold_iteration_extra: {max(first_s, cold_s):.2g}s # the same on a fresh worker\n"
    )


def yaml_key(name: str) -> str:
    """Return a name as YAML reads it back."""
    plain = re.fullmatch(r"[A-Za-z_][\w/-]*", name) and name.lower() not in ("true", "false", "null", "n", "y")
    return name if plain else "'" + name.replace("'", "''") + "'"


_GENERIC = frozenset(
    ("experiment", "fit", "main", "model", "my", "null", "objective", "off", "run", "script", "src", "train", "trial")
)
"""Names that say nothing of a project."""


def name_of(trial: str, path: Path) -> str:
    """Return the name of the trial, or else of its module, or else of the folder: the first that is not generic."""
    from rubberband.spec.fields import name_of_trial

    module = trial.partition(":")[0]
    found = [name_of_trial(text) for text in (trial, module, path.absolute().parent.name)]
    return next((name for name in found if name and name not in _GENERIC and not keyword.iskeyword(name)), "search")


_SCHEDULER = """\
  # Successive halving: {trials} trials train for grace_period iterations, one in {factor} goes on, up to max_t of them.
  scheduler: {{type: sha, num_samples: {trials}, grace_period: 1, max_t: {most}, reduction_factor: {factor}}}"""

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
{space}{scheduler}
  sampler: {sampler}
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
{env}{track}# Seconds of an iteration on 1 GPU ({measured}). Without these lines the first run measures them.
profile:
  seconds_per_iteration: {{1: {iteration_s}}}
  trial_startup: {startup_s}s
{extras}"""
