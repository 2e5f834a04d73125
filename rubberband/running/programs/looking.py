"""Looks at a run of a program: starts it, reads what it prints, and stops it in its second epoch."""

from __future__ import annotations

import json
import os
import re
import selectors
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from rubberband.errors import RubberbandError
from rubberband.executor.training.failures import error_in
from rubberband.executor.training.guard import NOT_STARTED
from rubberband.executor.training.guarded_process import GuardedProcess
from rubberband.executor.training.programs import own_files
from rubberband.executor.training.programs.gang import Place
from rubberband.executor.training.programs.runner import WITHOUT_GPU, WITHOUT_SANITY_CHECK
from rubberband.executor.training.reporting import CHECKPOINT, CONFIG
from rubberband.running.first_file import NO_FOLDER, TrialFindings, text_of
from rubberband.running.programs.seen_lines import Choice, Kind, SeenLines
from rubberband.spec.loading import parse_experiment
from rubberband.spec.samplers import configured
from rubberband.units import format_duration, shown
from rubberband.values.command import ProgramCommand, line_of

_LOOK_S = 0.1
_CHUNK = 2**16
_TIMES_AS_LONG = 5.0
"""The longest look, in times of the wait for a first metric: for lines of epochs where those of batches come."""
_GRACE_S = 0.2
"""Time for the rest of an epoch's lines after the one that is seen again."""
_LOOK_ON_S = 1.0
"""Least time for which a line of another kind is waited for: a test after many batches."""
_LONG_S = 3.0
_EPOCHS_OF_BATCHES = 3
"""Epochs after which no line of a whole epoch is expected any more."""
_FOLD = re.compile(r"\bfold\W{0,3}[01]\b", re.IGNORECASE)
_UNKNOWN_S = 15.0
"""Time for which a metric with a known name is waited for."""
_LAST_LINES = 60
_MOST_SHOWN = 300


@dataclass(frozen=True, slots=True)
class Look:
    """Findings of a look at a run."""

    choices: tuple[Choice, ...]
    """The metrics, the best first."""
    is_once: bool
    """Whether the best was printed once, and the program ended."""
    epochs: int | None
    """Number of the program's epochs, as far as it has said it."""
    startup_s: float
    iteration_s: float
    saves: bool
    """Whether it saved files in the folder of its checkpoint."""
    has_ended: bool
    """Whether it ended by itself."""
    has_folds: bool
    """Whether it said that it trains the first of several folds."""
    has_rank: bool
    """Whether it had torchrun's variables; it failed with these if not."""
    lines: int
    seconds: float


def look(
    seen: TrialFindings, folder: Path, *, wait_s: float, show: Callable[[str], None], metric: str | None = None
) -> Look:
    """Start a program in its `folder`, and look at it until a metric has come twice, or until it ends.

    `show` gets each line. `metric`: the one that is wanted. Raises RubberbandError if the program fails, or prints no
    metric for `wait_s` seconds.
    """
    order = _Order(seen, wait_s, metric, show)
    if not seen.rank or seen.launch:
        return _looked(order, folder, has_rank=False)
    try:
        return _looked(order, folder, has_rank=True)
    except _Failed as failure:
        if not _DISTRIBUTED.search(str(failure)):
            raise
    return _looked(order, folder, has_rank=False)


class _Failed(RubberbandError):
    """The program ended with an error."""


@dataclass(frozen=True, slots=True)
class _Order:
    """The order of a look."""

    seen: TrialFindings
    wait_s: float
    metric: str | None
    show: Callable[[str], None]


def _looked(order: _Order, folder: Path, *, has_rank: bool) -> Look:
    with tempfile.TemporaryDirectory(prefix="rubberband-") as scratch:
        checkpoint = Path(scratch, "checkpoint")
        checkpoint.mkdir()
        with closing(_Run(order, folder, checkpoint, has_rank=has_rank)) as run:
            run.follow()
        return run.found()


class _Run:
    """One start of the program; `close` must be called in the end."""

    def __init__(self, order: _Order, folder: Path, checkpoint: Path, *, has_rank: bool) -> None:
        """`has_rank`: whether it has torchrun's variables."""
        self._seen, self._wait_s, self._metric, self._show = order.seen, order.wait_s, order.metric, order.show
        self._checkpoint, self._has_rank = checkpoint, has_rank
        words = yaml.safe_load(self._seen.metrics) if self._seen.metrics.startswith("{") else {}
        self._pattern = re.compile(words["pattern"]) if "pattern" in words else None
        self._lines, self._is_stopped = SeenLines(self._pattern), False
        command, place, middle = ProgramCommand(words=self._seen.start), Place.alone(), _middle(self._seen)
        most = str(max(4, self._seen.most))
        places = {"checkpoint": str(checkpoint), "iterations": "0", "max_t": most, "seed": "0", **place.words()}
        self._words = command.line({}, places)
        environment = {
            "WANDB_MODE": "disabled",  # else the look would be a run in the user's account
            **WITHOUT_SANITY_CHECK,
            **({} if any(Path("/dev").glob("nvidia[0-9]*")) else WITHOUT_GPU),
            **os.environ,
            **(place.variables("rubberband-init") if has_rank else {}),
            **{name: command.filled(value, middle, places) for name, value in self._seen.env.items()},
            "PYTHONUNBUFFERED": "1",
            CHECKPOINT: str(checkpoint),
            CONFIG: json.dumps(middle),
        }
        (output, printing), (errors, complaining) = os.pipe(), os.pipe()
        self._outputs = (output, errors)
        self._began = time.monotonic()
        self._process = GuardedProcess(self._words, environment, str(folder), printing, complaining)

    def follow(self) -> None:
        """Read its lines until they say enough."""
        rests = dict.fromkeys(self._outputs, b"")
        with selectors.DefaultSelector() as selector:
            for output in self._outputs:
                selector.register(output, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(_LOOK_S)
                for output in (key.fd for key, _ in ready):
                    content = os.read(output, _CHUNK)
                    if not content:
                        selector.unregister(output)
                    *lines, rests[output] = (rests[output] + content).split(b"\n")
                    rests[output] = rests[output][-_CHUNK:]
                    for line in lines:
                        self._add(line)
                if not ready and self._process.poll() is not None:  # a process that it left has its output
                    break
                if self._is_enough(time.monotonic()):
                    self._is_stopped = True
                    return
        for rest in filter(None, rests.values()):
            self._add(rest)

    def close(self) -> None:
        """End it, and all that it started."""
        self._process.end()
        for output in self._outputs:
            with suppress(OSError):
                os.close(output)

    def found(self) -> Look:
        """Return what was found. Raises RubberbandError where that is nothing."""
        seconds, code = time.monotonic() - self._began, self._process.poll()
        if not self._is_stopped and code:
            raise _Failed(self._failure(code, seconds))
        kinds = [kind for kind in self._kinds() if kind.knows is not None or kind.repeats or not self._is_stopped]
        choices = tuple(filter(None, map(self._choice_of, kinds)))
        if not choices:
            raise RubberbandError(self._nothing(seconds))
        best = choices[0].kind
        times = [each.at for each in best.seen]
        period_s = statistics.median([later - at for at, later in pairwise(times)] or [0.0])
        first_at = min(each.seen[0].at for each in kinds)
        if best.is_between:
            period_s = times[0] - first_at
        is_once = not best.repeats and not self._is_stopped
        epochs = self._lines.epochs
        if not self._is_stopped and not is_once:
            epochs = len(best.seen)
        return Look(
            choices=choices,
            is_once=is_once,
            epochs=epochs,
            startup_s=max(0.0, times[0] - self._began - period_s),
            iteration_s=period_s or times[0] - self._began,
            saves=any(self._checkpoint.iterdir()),
            has_ended=not self._is_stopped,
            has_folds=any(map(_FOLD.search, self._lines.lines)),
            has_rank=self._has_rank,
            lines=len(self._lines.lines),
            seconds=seconds,
        )

    def _add(self, content: bytes) -> None:
        line = content.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
        self._lines.add(line, time.monotonic())
        if line.strip():
            self._show(line)

    def _kinds(self) -> list[Kind]:
        """Return the kinds that may be chosen, the best first."""
        if self._metric is not None:
            return [kind for kind in self._lines.kinds() if is_named(self._metric, kind)]
        settings = {name for name, (domain, _) in self._seen.space.items() if "lower:" in domain}
        return [kind for kind in self._lines.kinds() if kind.name not in settings]

    def _choice_of(self, kind: Kind) -> Choice | None:
        if self._seen.metrics.startswith("report"):
            is_report = re.fullmatch(r"(?:[^\s=]+=\S+(?: |$))+", kind.text.strip())
            return Choice(kind.name, self._seen.metrics, kind) if is_report else None
        return self._lines.choice_of(kind) if self._pattern is None else Choice(kind.name, self._seen.metrics, kind)

    def _is_enough(self, now: float) -> bool:
        """Whether no more is needed, or no more is to be expected."""
        kinds, passed = self._kinds(), now - self._began
        if self._lines.is_full or not kinds:
            return self._lines.is_full or passed > self._wait_s
        if passed > _TIMES_AS_LONG * self._wait_s:
            return True
        best = kinds[0]
        first_at = best.seen[0].at
        if len(best.seen) == 1:
            is_late = now - first_at > max(self._wait_s, 2.0 * (first_at - self._began))
            return is_late or (best.is_between and passed > self._wait_s)
        second_at = best.seen[1].at
        period_s = max(best.seen[-1].at - best.seen[-2].at, second_at - first_at)
        if best.is_batch:
            return len({each.epoch for each in best.seen if each.epoch is not None}) > _EPOCHS_OF_BATCHES
        if best.is_in_parts and best.phase == "held-out":  # a whole test is two epochs away
            return now - second_at > min(self._wait_s, max(_LONG_S, 2.0 * (second_at - self._began)))
        if best.knows is None:
            return now - second_at > min(self._wait_s, _UNKNOWN_S)
        if best.may_be_of_a_batch and best.phase != "held-out":
            return now - second_at > min(self._wait_s, max(_LONG_S, 10.0 * period_s))
        if self._metric is None and any(not each.repeats and each.could_be_before(best) for each in kinds):
            return now - second_at > 2.0 * period_s + _LOOK_ON_S
        if best.phase == "held-out" or self._metric is not None:
            return now - second_at > max(_GRACE_S, min(period_s / 2.0, _LOOK_ON_S))
        took_s = max(_LOOK_ON_S, min(second_at - self._began, self._wait_s / 4.0))
        return now - second_at > took_s

    def _failure(self, code: int, seconds: float) -> str:
        last = [line for line in self._lines.lines[-_LAST_LINES:] if line.strip()]
        program, begin = shown(line_of(self._words)), f"{self._words[0]}: "
        if code == NOT_STARTED and last and last[-1].startswith(begin):
            return f"{self._words[0]} cannot be started ({last[-1].removeprefix(begin)}); install it, or give its path"
        error = error_in(last)
        why = f": {error[:_MOST_SHOWN]}" if error else self._last_lines()
        return f"{program} ended with exit code {code} after {seconds:.1f} s{why}; correct it, and try again"

    def _nothing(self, seconds: float) -> str:
        program = shown(line_of(self._words))
        wanted = f"no {self._metric or 'metric'}"
        others = list(dict.fromkeys(kind.name for kind in self._lines.kinds()))
        if self._metric is not None and others:
            there = ", ".join(others[:8])
            return (
                f"{program} printed no {self._metric}, but {there}; give one of these by --metric, or call "
                f'rubberband.report({{"{self._metric}": …}}) where it is known'
            )
        example = f"{self._metric or 'loss'}=0.12"
        advice = f"print a line such as {example} after each epoch, or call rubberband.report"
        if self._seen.metrics.startswith("report"):
            advice = "call rubberband.report after each epoch"
        if not self._is_stopped:
            last = self._last_lines()
            return f"{program} ended after {seconds:.1f} s, and printed {wanted}{last}; {advice}"
        waited = format_duration(self._wait_s)
        longer = f"if it needs longer, --wait {format_duration(_TIMES_AS_LONG * self._wait_s)}; if not, {advice}"
        if not any(line.strip() for line in self._lines.lines):
            return f"{program} printed nothing within {waited}, and {wanted}; {longer}"
        return f"{program} printed {wanted} within {waited}{self._last_lines()}; {longer}"

    def _last_lines(self) -> str:
        last = " | ".join(line.strip() for line in self._lines.lines[-_LAST_LINES:] if line.strip())
        return last and f"; its last lines: {last if len(last) <= _MOST_SHOWN else f'…{last[-_MOST_SHOWN:]}'}"


_DISTRIBUTED = re.compile(r"nccl|gloo|process ?group|init_process|distributed|rendezvous|\bRANK\b|cuda", re.IGNORECASE)
"""In the error of a program that may only not be able to train in a group."""


def _middle(seen: TrialFindings) -> Mapping[str, Any]:
    """Return the configuration in the middle of all ranges, for a program that reads it from its environment."""
    text = text_of(replace(seen, metric="loss", mode="min"), Path("experiment.yaml"))
    space = parse_experiment(text, source="experiment.yaml").search.space
    return configured(space, lambda _, domain: domain.draw(0.5))


def is_named(metric: str, kind: Kind) -> bool:
    """Whether a name that a user gave means a kind."""
    names = {kind.name, kind.full_name, f"{kind.phase_word}_{kind.name}"}
    return metric in names or metric.lower() in {name.lower() for name in names}


# Files that a look leaves behind.

_STATE = re.compile(r"(.*[_-])?(state|checkpoint|ckpt|resume|progress)\.json", re.IGNORECASE)


@contextmanager
def tidied(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Move what a program saves into its folder meanwhile out of it, and `say` it in a remark if that is something.

    Its next start would go on from it. It is moved and not deleted, as another program may have written it.
    """
    before = own_files.files_in(folder)
    try:
        yield
    finally:
        new = [path for path in own_files.written(before, own_files.files_in(folder)) if path not in (before or ())]
        models = own_files.models(new)
        beside = {os.path.dirname(name) for name in models}
        saved = [
            name
            for name in new
            if name in models
            or _STATE.fullmatch(os.path.basename(name))
            or (name.endswith((".json", ".bin")) and os.path.dirname(name) in beside)
        ]
        if saved:
            say(
                f"the program saved {own_files.shown(saved)} into its own folder, from which its next start might go "
                f"on: moved to {_moved(saved, folder)}; let it save below ${{checkpoint}}, as trials would share these"
            )
        for path in reversed([path for path in new if path.endswith("/")]):
            with suppress(OSError):  # it is not empty
                (folder / path).rmdir()


def _moved(paths: Sequence[str], folder: Path) -> str:
    """Move files of a folder to a new one, and return its path."""
    place = tempfile.mkdtemp(prefix="rubberband-init-")
    for path in paths:
        target = Path(place, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            shutil.move(folder / path, target)
    return place


# What the file says.


def with_look(seen: TrialFindings, found: Look, choice: Choice, mode: str) -> TrialFindings:
    """Return the findings with the metric that was chosen."""
    most, command, kind = seen.most, seen.command, choice.kind
    needs_folder = not (found.saves or found.is_once)
    remarks = [remark for remark in seen.remarks if needs_folder or remark != NO_FOLDER]
    stride = kind.stride if kind.repeats else 1
    has_place = any("${max_t}" in word for word in command)
    if seen.is_known and not found.is_once:
        most = min(most, found.epochs or most) if found.has_ended else most
    elif found.is_once:
        command, most = _without_max_t(command), 1
        remarks.append(
            f"the program printed {choice.name} once, at its end: an iteration is a whole training, which no scheduler "
            "stops early; print it after each epoch (docs/commands.md)"
        )
    elif has_place and kind.is_batch and kind.an_epoch is not None:
        command, most = _without_max_t(command), kind.an_epoch * most
    elif has_place and stride > 1:
        command = _without_max_t(command)
        most = max(2, most // stride)
        remarks.append(
            f"the metric comes every {stride} epochs or steps, and an iteration is one such line: the number of epochs "
            "stays as the program has it"
        )
    elif not has_place and found.epochs is not None:
        most = max(1, found.epochs)
    if found.has_folds and not found.is_once:
        remarks.append(
            f"the program trains several folds, and a trial is ranked by {choice.name} of its first one: "
            "print one number of all folds alone, or let a trial train one fold"
        )
    if not seen.is_known and (kind.is_batch or (_TWO_RATIOS.search(kind.before) and not kind.is_whole)):
        remarks.append(
            f"the line with {choice.name} comes several times an epoch, and each is an iteration: print a line of an "
            "epoch if you want that"
        )
    return replace(
        seen,
        command=command,
        metrics=choice.metrics,
        metric=choice.name,
        mode=mode,
        most=most,
        scheduler=_for_once(seen.scheduler) if found.is_once else seen.scheduler,
        line=choice.line,
        saves=found.saves,
        rank=found.has_rank or bool(seen.launch),
        is_once=found.is_once,
        iteration_s=found.iteration_s,
        startup_s=found.startup_s,
        remarks=tuple(remarks),
    )


_ONCE = "  scheduler: {type: none, num_samples: 16, max_t: 1} # the program prints its metric once, at its end"


_TWO_RATIOS = re.compile(r"\d/\d+\W+\d+/\d")
"""The numbers of an epoch and of a batch, as in `[1/25][3/790] Loss_D: 0.4`."""


def _for_once(scheduler: str) -> str:
    """Return the line of a scheduler that lets each trial train once; that of a sweep keeps its number of trials."""
    return re.sub(r"max_t: \d+", "max_t: 1", scheduler) if "type: none" in scheduler else _ONCE


def _without_max_t(words: Sequence[str]) -> tuple[str, ...]:
    kept = list[str]()
    for word in words:
        if "${max_t}" not in word:
            kept.append(word)
        elif word == "${max_t}" and kept and kept[-1].startswith("-"):
            kept.pop()
    return tuple(kept)
