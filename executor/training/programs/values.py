"""Tries a program with other values: whether each parameter has an effect, and what extreme values and booleans do."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from rubberband.executor.training.check_findings import CheckOrder, TrialCheck, TrialFault, brief, read_alike
from rubberband.executor.training.entrypoint import files_of
from rubberband.executor.training.failures import TrialFailure
from rubberband.executor.training.programs.source_use import reads_configuration, use_of
from rubberband.values.command import Booleans, ProgramCommand, switch_of, text_of, unused

SPARE_S = 2.0
"""Time of the check that is left for its answer."""
_TIMES_AS_LONG = 2.0
"""The longest iteration with other values, in times of the first one."""
_MORE_S = 1.0
_DEEP_S = 4.0
"""Time of the iterations for which a parameter that changes nothing in the first is looked at."""
_MOST_ITERATIONS = 16
_AT_ONCE = re.compile(
    r"lr|lr0|learning_?rate|(base|init|initial|max|peak)_lr|(.*_)?batch_?size|(.*_)?(hidden|width|units|channels)(_.*)?|"
    r"(num_|n_)?layers|depth",
    re.IGNORECASE,
)
"""Names of parameters that have an effect from the first step on."""
_LATER = "an effect comes later, or there is none"
_TELLING = 4
"""Digits of a metric that two trainings do not share by chance."""
_OF_PARSER = re.compile(r"^\S+: error: (argument|unrecognized|ambiguous|the following) ")
_TIME = re.compile(r"time|(^|[^a-z])(sec|eta|dur|ms)|elapsed|speed|per_s|/s$|_s$|throughput|mem", re.IGNORECASE)
"""Names of metrics that differ from run to run."""
_CHANGES = re.compile(
    r"\d+:\d\d(:\d\d)?([.,]\d+)?|\d{4}[-/]\d\d[-/]\d\d|\S*rubberband-\S*|0x[0-9a-f]+|\bpid\W+\d+|"
    r"(time|elapsed|eta|took|speed|throughput)\W{0,3}[\d.]+|[\d.]+\s*(it/s|s/it|[mun]?s|secs?|seconds?|mins?|[kmg]?i?b)\b",
    re.IGNORECASE,
)
"""Times, sizes and paths in a line."""
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?", re.IGNORECASE)

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Trained:
    """Iterations of one start."""

    metrics: Sequence[Metrics]
    lines: Sequence[str] = ()
    """Output before the last of them, up to its line."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Word such as epoch -> the number beside the first."""


Outcome = Trained | TrialFailure | None
"""None: it took too long."""
Train = Callable[[ProgramCommand, Mapping[str, Any], int, float], Outcome]
"""Trains that many iterations of a program by a command line and a configuration, until a monotonic time."""


class ProgramValues:
    """Trains the first iteration of a program with other values, as long as the time lasts."""

    def __init__(self, order: CheckOrder, found: TrialCheck, first: Trained, train: Train, until: float) -> None:
        """`first`: the first iteration, by the order's configuration. `until`: monotonic time of the check's end."""
        command = order.entrypoint.command
        assert command is not None
        self._order, self._found, self._first, self._command = order, found, first, command
        self._config, self._train_by = order.segment.config, train
        self._until = min(until - SPARE_S, time.monotonic() + order.values_s)
        self._took_s = found.seconds["set-up"] + found.seconds["iteration"]
        self._iteration_s = found.seconds.get("next", self._took_s)
        self._repeated: dict[int, Outcome] = {}
        self._without: dict[str, list[str]] = {}
        """Why parameters have no effect -> a line for each."""

    def run(self) -> None:
        """Add what is wrong to the findings: each parameter first, then the extreme values."""
        names = [name for name in self._order.values if name in self._config]
        extremes = self._order.extremes
        self._found.to_try, problems = len(names) + len(extremes), self._found.problems
        for number in range(self._found.to_try):
            if time.monotonic() >= self._until:
                break
            found: TrialFault | str | None = None
            if number < len(names):
                found = self._try(names[number])
            else:
                found = of_extremes(self._first_of, self._command, extremes[number - len(names)])
            self._found.tried += 1
            if isinstance(found, TrialFault) and found not in problems:
                problems.append(found)
            elif isinstance(found, str):
                self._found.remarks.append(found)
        for why, lines in self._without.items():
            line = lines[0] if len(lines) == 1 else _joined([line.partition(" ")[0] for line in lines])
            if why == _LATER:
                self._found.remarks.append(f"{line}: {why}")
            else:
                problems.append(TrialFault(line=f"values: {line}; {why}"))

    def _try(self, name: str) -> TrialFault | None:
        """Note if two other values of a parameter give the same output; return how a boolean is read instead."""
        own = self._config[name]
        others = _apart([value for value in self._order.values[name] if value != own], own)[:2]
        if not others or not all(self._is_same(name, other, self._first, 1) for other in others):
            return None
        if isinstance(own, bool) and name in self._order.booleans:
            fault = of_boolean(self._first_of, self._command, self._config, name)
            if fault is not None:
                return fault
        most = self._order.segment.max_iterations or 1
        number = min(max(2, int(_DEEP_S / max(self._iteration_s, 1e-3))), most, _MOST_ITERATIONS)
        base = self._base(number)
        if isinstance(base, Trained) and all(self._is_same(name, other, base, number) for other in others):
            is_whole = len(base.metrics) < number or number == most
            shown = " and ".join(
                f"{value:.3g}" if isinstance(value, float) else str(value) for value in (*others, own)[:2]
            )
            line = f"{name} changes nothing: {shown} give the same output in {_counted(len(base.metrics))}"
            self._without.setdefault(self._why(name, base, is_whole=is_whole), []).append(line)
        return None

    def _why(self, name: str, base: Trained, *, is_whole: bool) -> str:
        """Return why a parameter has no effect, with the fix; `_LATER` where that is not sure."""
        files = [Path(path) for path in files_of(self._order.entrypoint)]
        use = use_of(_names_of(name, self._command), files)
        if unused(self._command.words, [name]) and files and not any(map(reads_configuration, files)):
            return (
                "the command never names it, and the program does not read RUBBERBAND_CONFIG: write "
                f"${{{name}}} where it belongs, or ${{args}}"
            )
        if use == "nothing":
            return "the program reads no arguments: read them with argparse, from sys.argv or from RUBBERBAND_CONFIG"
        if use == "unread":
            return "the program has the option and never uses it: use it, or leave it out of search.space"
        at_once = _AT_ONCE.fullmatch(name) and any(map(_is_telling, base.metrics))
        if at_once and (use == "unknown" or is_whole):
            return "let the program use it (a file or a constant may replace it), or leave it out of search.space"
        return _LATER

    def _is_same(self, name: str, value: Any, base: Trained, number: int) -> bool:
        """Whether the program does the same with another value, as far as it prints."""
        other = self._train(self._command, {**self._config, name: value}, number)
        if not isinstance(other, Trained) or len(other.metrics) != len(base.metrics):
            return False
        values = (self._config[name], value)
        if not all(_is_equal(*pair, values) for pair in zip(base.metrics, other.metrics, strict=True)):
            return False
        differing = _differing(base.lines, other.lines, values)
        again = self._base(number) if differing else None
        return not differing or (
            isinstance(again, Trained)
            and bool(again.lines)
            and differing <= _differing(self._first.lines if number == 1 else base.lines, again.lines, values)
        )

    def _base(self, number: int) -> Outcome:
        """Return iterations of the configuration once more."""
        if number not in self._repeated:
            self._repeated[number] = self._train(self._command, self._config, number)
        return self._repeated[number]

    def _train(self, command: ProgramCommand, config: Mapping[str, Any], number: int) -> Outcome:
        most_s = _TIMES_AS_LONG * (self._took_s + (number - 1) * self._iteration_s) + _MORE_S
        return self._train_by(command, config, number, min(time.monotonic() + most_s, self._until))

    def _first_of(self, command: ProgramCommand, config: Mapping[str, Any]) -> Metrics | TrialFailure | None:
        outcome = self._train(command, config, 1)
        return outcome.metrics[0] if isinstance(outcome, Trained) else outcome


def _joined(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]} change nothing: two values of each give the same output"


def _counted(number: int) -> str:
    return "the first iteration" if number == 1 else f"the first {number} iterations"


def _apart(values: Sequence[Any], own: Any) -> list[Any]:
    """Return the values, those first that are farthest from a parameter's own."""
    if all(isinstance(value, int | float) for value in (*values, own)):
        return sorted(values, key=lambda value: -abs(value - own))
    return list(values)


def _names_of(name: str, command: ProgramCommand) -> set[str]:
    """Return the names by which a program may know a parameter: its own, and that of its option."""
    pairs = zip(("", *command.words), command.words, strict=False)
    options = {found[0] for pair in pairs if (found := switch_of(*pair)) and found[1] == name}
    return {name, *(option.lstrip("-") for option in options)}


def _is_equal(one: Metrics, other: Metrics, values: tuple[Any, Any]) -> bool:
    """Whether metrics are the same, but for times and the parameter itself."""

    def is_echo(name: str) -> bool:
        return all(_is_close(metrics[name], value) for metrics, value in zip((one, other), values, strict=True))

    if one.keys() != other.keys():
        return False
    return all(
        one[name] == other[name] or one[name] != one[name] or _TIME.search(name) or is_echo(name) for name in one
    )


def _is_close(number: float, value: Any) -> bool:
    return isinstance(value, int | float) and abs(number - value) <= 1e-2 * abs(value)


def _is_telling(metrics: Metrics) -> bool:
    digits = (f"{abs(value):.11e}".partition("e")[0].rstrip("0").replace(".", "") for value in metrics.values())
    return any(len(each) >= _TELLING for each in digits)


def _differing(lines: Sequence[str], others: Sequence[str], values: tuple[Any, Any]) -> set[str]:
    """Return the forms of lines that only one of two outputs has, but for times and the parameter's own value."""
    one, two = ({_plain(line, value) for line in each} for each, value in zip((lines, others), values, strict=True))
    return {re.sub(r"\d+", "0", line) for line in one ^ two}


def _plain(line: str, value: Any) -> str:
    def masked(number: re.Match[str]) -> str:
        return "<value>" if _is_close(float(number[0]), value) else number[0]

    line = _CHANGES.sub("<>", line)
    if isinstance(value, bool | str):
        return re.sub(rf"\b{re.escape(str(value))}\b", "<value>", line, flags=re.IGNORECASE)
    return _NUMBER.sub(masked, line)


First = Callable[[ProgramCommand, Mapping[str, Any]], Metrics | TrialFailure | None]
"""Trains the first iteration of a program by a command line and a configuration."""


def of_extremes(train: First, command: ProgramCommand, config: Mapping[str, Any]) -> TrialFault | str | None:
    """Return what is wrong with extreme values, as a problem or a remark; None if nothing is known to be."""
    failure = train(command, config)
    if not _fails(failure):
        return None
    joined, words = list[str](), list[str]()
    for before, word in zip(("", *command.words), command.words, strict=False):
        name = word.removeprefix("${").removesuffix("}")
        if word == f"${{{name}}}" and text_of(config.get(name), command.booleans).startswith("-"):
            if switch_of(before, word) is not None:
                words.pop()
                joined.append(word := f"{before}={word}")
            elif "--" not in words:
                words.append("--")
                joined.append(f"-- {word}")
        words.append(word)
    if joined and not _fails(train(replace(command, words=tuple(words)), config)):
        why, _, _ = str(failure).partition(" (")
        return TrialFault(
            line=f"values: the program takes a value that begins with - for an option: {why}; write {' '.join(joined)} "
            "in entrypoint.command"
        )
    line = f"with {brief(config)} the program fails: {failure}"
    return TrialFault(line=f"values: {line}") if _OF_PARSER.search(str(failure)) else line


def of_boolean(train: First, command: ProgramCommand, config: Mapping[str, Any], name: str) -> TrialFault | None:
    """Return how the program reads a boolean whose two values train the same; None if no style makes a difference."""
    other = {**config, name: not config[name]}

    def differ(style: str) -> bool:
        styled = replace(command, booleans=style)
        one, two = train(styled, config), train(styled, other)
        return isinstance(one, Mapping) and isinstance(two, Mapping) and one != two

    for style in (each for each in get_args(Booleans) if each != command.booleans):
        if differ(style):
            return TrialFault(line=f"values: {read_alike(name, 'the program', command.booleans, style)}")
    if differ("1/"):
        return TrialFault(line=f"values: {read_alike(name, 'the program', command.booleans, None)}")
    return None


def _fails(outcome: Metrics | TrialFailure | None) -> bool:
    """Whether the program fails by itself; training that diverges belongs to a search."""
    return isinstance(outcome, TrialFailure) and outcome.kind != "not_a_number"
