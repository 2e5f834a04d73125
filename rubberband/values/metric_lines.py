"""Lines of output with metrics: the numbers in them, and whether two lines come from one place of a program."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)"
_NAME = r"(?<![\w./@-])(?P<name>[A-Za-z_][\w./@-]*)"
_VALUE = rf"(?P<value>{_NUMBER})(?:\s*/\s*(?P<whole>\d+)(?!\.?\d|/))?(?!\w|\.\w|[,:/-]\d)"
"""A number, or one of another: a comma may be a decimal one, and `12:30`, `2026-11-28` and `1.2.3` are none."""
_SIGNED = re.compile(rf"{_NAME}['\"]?\s*[=:]\s*{_VALUE}", re.IGNORECASE)
_BESIDE = re.compile(rf"{_NAME}(?<=\w)(?<=..)[ \t]+{_VALUE}", re.IGNORECASE)
_NO_NAME = re.compile(
    r"about|after|all|at|best|by|every|for|from|in|is|of|on|only|over|than|the|to|took|top|up|was|with|version|v",
    re.IGNORECASE,
)
"""Words before a number that it does not belong to, as in `3 of 10`."""
_COUNTED = re.compile(
    r"(?:.*[^a-z])?(?:epoch|ep|step|iter|iteration|round|episode|batch|batche|fold|trial|run)s?", re.IGNORECASE
)
"""Names whose `3/10` is the third."""
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Colours and the like, for terminals."""
_BAR = re.compile(r"^.*?(?:\d+%\|[^|]*\||\d[A-Za-z]+ (?=\[\d+:\d\d, ))[^\[\]]*\[\d+:\d\d[^\]]*\]")
"""A progress bar of tqdm: with a description or postfix it has the metric of a step, not of an iteration."""
_WRAPPED = re.compile(
    r"\b(?:\w+\.)*(?:b?float\d*|u?int\d*|tensor|array|DeviceArray|Parameter|Decimal)"
    rf"\(\s*[\['\"]*\s*({_NUMBER})\s*[\]'\"]*\s*(?:,(?:[^()]|\([^()]*\))*)?\)",
    re.IGNORECASE,
)
"""A number as libraries print it: `np.float64(0.1)`, `tensor(0.1, device='cuda:0')`."""


class _Pair(NamedTuple):
    name: str
    number: str
    value: float
    place: re.Match[str]


def _pairs(text: str) -> list[_Pair]:
    """Return the numbers in a line's text that have a name before them: `loss=0.5`; without any sign, `loss 0.5`.

    The latter counts where the line has no number with a sign for that name, and not for a count, as in `epoch 3`.
    `83/100` is a part, and `98%` is 98.
    """
    signed = list(_SIGNED.finditer(text))
    names = {match["name"] for match in signed}
    beside = [match for match in _BESIDE.finditer(text) if match["name"] not in names and _is_name(match["name"])]
    return [
        _Pair(match["name"], match["value"], _number_of(match), match)
        for match in sorted(signed + beside, key=lambda match: match.start())
    ]


def _is_name(word: str) -> bool:
    is_unit = _CHANGING.fullmatch(word) and word.isalpha()
    return not (is_unit or _NO_NAME.fullmatch(word) or _COUNTED.fullmatch(word))


def _number_of(match: re.Match[str]) -> float:
    number, whole = float(match["value"]), float(match["whole"] or 0)
    is_part = match["value"].isdigit() and number <= whole > 0 and not _COUNTED.fullmatch(match["name"])
    return number / whole if is_part else number


def metrics_in(line: str, pattern: re.Pattern[str] | None = None) -> dict[str, float]:
    """Return the metrics in a line of output: of the pattern's named groups, of a JSON object, or of `name=number`.

    Colours and progress bars are left out, except for a pattern.
    """
    if pattern is not None:
        metrics: dict[str, float] = {}
        for text in (line, _WRAPPED.sub(r"\1", line)):
            match = pattern.search(text)
            groups = match.groupdict() if match is not None else {}
            metrics |= {name: _value_of(text) for name, text in groups.items() if text and _is_number(text)}
        beside = metrics_in(line) if metrics else {}  # by which a loss that a library has left out is seen
        return {name: value for name, value in beside.items() if not math.isfinite(value)} | metrics
    text = _text_of(line)
    if text.startswith("{"):
        content = _content(text)
        return {
            str(name): float(value) if isinstance(value, bool) else _value_of(str(value))
            for name, value in content.items()
            if isinstance(value, bool) or _is_number(str(value))
        }
    return {pair.name: pair.value for pair in _pairs(text)}


def is_signed(line: str, metric: str) -> bool:
    """Whether a line has the metric with a sign, as in `loss: 0.5`, or in JSON, and not just as `loss 0.5`."""
    text = _text_of(line)
    return text.startswith("{") or any(match["name"] == metric for match in _SIGNED.finditer(text))


def ambiguous(line: str, metric: str) -> list[str]:
    """Return the values of a metric in a line of output that has several, as in `train loss=1 test loss=2`."""
    values = [pair.number for pair in _pairs(_text_of(line)) if pair.name == metric]
    return values if len(set(values)) > 1 and not _text_of(line).startswith("{") else []


_UNREAD = re.compile(
    r"null|none|n/?a|-{1,3}|\*+|nan\d+|undefined|(?P<comma>[-+]?\d+,\d[\d,.]*)(?:[eE][-+]?\d+)?", re.IGNORECASE
)


def unread(line: str, metric: str, pattern: re.Pattern[str] | None = None) -> tuple[str, bool]:
    """Return what stands for a metric in a line of output without its number: `null` or `1,234.5`; empty for neither.

    With it goes whether it has a comma.
    """
    if pattern is not None:
        match = pattern.search(line)
        text = (match.groupdict().get(metric) if match else None) or ""
    elif (whole := _text_of(line)).startswith("{"):
        content = _content(whole)
        text = ("null" if content[metric] is None else str(content[metric])) if metric in content else ""
    else:
        match = re.search(rf"(?<![\w./-]){re.escape(metric)}\s*[=:]\s*([^\s;|)]+)", whole)
        text = match[1].rstrip(",.") if match else ""
    stand_in = _UNREAD.fullmatch(text.strip())
    return (text.strip(), stand_in["comma"] is not None) if stand_in else ("", False)


_PHASES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "eval", "evaluation", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_COUNT = re.compile(
    r"(?<![a-z])(epoch|ep|step|iter|iteration|round|episode)s?\W{0,3}(\d+(?:\.\d+)?)(?![a-z])", re.IGNORECASE
)
"""The number of an iteration, as in `Epoch 3/8`, `step: 20` or `"epoch": 1.5`."""
_NUMBERED = re.compile(
    r"(?<![a-z])(epoch|episode|ep|round|iteration|iter|it|update|step|batch)(?:\W{0,3}|['\"]: ['\"])"
    r"(\d+(?:\.\d+)?)(?!,\d|\.?\w)"
)
_NO_NUMBER = re.compile(r"(best|total|max|num|per|last|warmup)[\W_]{0,2}$")
"""Words before such a number that make it another one."""
_WORDS = ("epoch", "episode", "round", "iteration", "update", "step", "batch")
"""Words beside the number of an iteration, the coarser ones first: batches begin again with each epoch."""
_SHORT = {"ep": "epoch", "it": "iteration", "iter": "iteration"}
ITERATION = "iteration"
"""Group of a pattern with the number of an iteration."""
_DIFFERING = re.compile(
    r"time|sec|elapsed|\beta|speed|per_s|/s$|_s$|mem|^(\w+_)?(epoch|episode|round|iteration|iter|update|step)$",
    re.IGNORECASE,
)
"""Names of metrics that may differ when the same is evaluated again."""
_TELLING = 4
"""Digits of metrics that two lines do not share by chance."""


def numbers_in(line: str, pattern: re.Pattern[str] | None = None) -> dict[str, float]:
    """Return the numbers of an iteration in a line, as in `Epoch [3/8], Step [20/90]` or `{"epoch": 1.5}`, by word.

    The pattern's group `iteration` is the only one where there is such a group.
    """
    if pattern is not None and ITERATION in pattern.groupindex:
        match = pattern.search(line)
        number = re.match(_NUMBER, (match[ITERATION] if match else None) or "", re.IGNORECASE)
        return {ITERATION: float(number[0])} if number else {}
    found, lower = dict[str, float](), line.lower()
    for found_at in _NUMBERED.finditer(lower):
        name, digits, begin = _SHORT.get(found_at[1], found_at[1]), found_at[2], found_at.start()
        if (name == "epoch" or "." not in digits) and not _NO_NUMBER.search(lower, max(0, begin - 12), begin):
            found.setdefault(name, float(digits))
    return {} if found.keys() == {"batch"} else found  # it may be their size


def passes(numbers: Mapping[str, float], before: Mapping[str, float]) -> bool | None:
    """Whether the numbers of an iteration are later ones than those before; None where nothing is compared."""
    words = [word for word in _WORDS if word in numbers and word in before]
    return [numbers[word] for word in words] > [before[word] for word in words] if words else None


def is_alike(metrics: Mapping[str, float], others: Mapping[str, float], metric: str) -> bool:
    """Whether two lines have the same metrics, but for times, with more digits than are the same by chance."""
    if metric not in metrics or metrics[metric] != others.get(metric):
        return False
    names = [name for name in metrics if name in others and (name == metric or not _DIFFERING.search(name))]
    digits = sum(len(f"{abs(metrics[name]):.11e}".partition("e")[0].rstrip("0.").replace(".", "")) for name in names)
    return digits >= _TELLING and all(metrics[name] == others[name] for name in names)


_CHANGING = re.compile(
    r"\w*\d\w*|nan|inf|infinity|true|false|none|yes|no|and|[ap]m|[kmgt]i?b|m?s|h|secs?|seconds?|mins?|minutes?|hours?|days?|"
    r"(mon|tue|wed|thu|fri|sat|sun|jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*",
    re.IGNORECASE,
)
"""Numbers, units and parts of dates, which differ between lines of one kind."""


def is_another_kind(line: str, before: str, metric: str) -> bool:
    """Whether two lines with a metric come from different places of a program, as `Train loss: 1` and `Val loss: 2` do.

    The words before the metric differ then, apart from what changes from line to line, or `(train)` and `(val)` behind
    it. A line whose iteration is a later one, as in `Epoch 4, new best loss: 1`, may have other words.
    """
    earlier, later = _COUNT.search(before), _COUNT.search(line)
    if earlier and later and earlier[1].lower() == later[1].lower() and float(earlier[2]) < float(later[2]):
        return False
    (words, phases), (other_words, other_phases) = _kind_of(before, metric), _kind_of(line, metric)
    return words != other_words or bool(phases and other_phases and phases.isdisjoint(other_phases))


def _kind_of(line: str, metric: str) -> tuple[list[str], set[str]]:
    """Return the words before a metric that do not change, with the number of ratios, and the phases named after it."""
    text, before = _text_of(line), ""
    if text.startswith("{"):
        behind = " ".join(value for value in _content(text).values() if isinstance(value, str))
    else:
        pair = next((pair.place for pair in _pairs(text) if pair.name == metric), None)
        before, behind = (text[: pair.start()], text[pair.end() :]) if pair else ("", "")
    words = [word.lower().rstrip("s") for word in re.findall(r"\w+", before) if not _CHANGING.fullmatch(word)]
    ratios = ["%" if ratio == "%" else "/" for ratio in re.findall(r"%|\d\s*/\s*\d", before)]
    names = re.findall(r"[a-z]+", _SIGNED.sub(" ", behind.lower()))
    return words + ratios, {_PHASES[word] for word in names if word in _PHASES}


def pattern_of(line: str, metric: str, number: int = 0) -> str:
    """Return a pattern by which only lines such as this one have the metric, for an error; empty where none is easy.

    `number`: which one of several in the line.
    """
    text = _text_of(line)
    places = [pair.place for pair in _pairs(text) if pair.name == metric]
    pair = places[number] if number < len(places) else None
    if pair is None or not metric.isidentifier():
        return ""
    label = re.search(r"(?:[^\W\d_]+ )*$", before := text[: pair.start()])
    assert label is not None, "it may be empty"
    begin = "^" if label[0] == before else r"\b"
    sign = re.sub(r"\s\s+", r"\\s+", text[pair.end("name") : pair.start("value")])
    return rf"{begin}{label[0]}{metric}{sign}(?P<{metric}>\S+)"


def _text_of(line: str) -> str:
    return _WRAPPED.sub(r"\1", _BAR.sub("", _ESCAPE.sub("", line))).strip()


_BARE = re.compile(r"(?<=: )(-?inf|nan)(?=[,}])")
"""Numbers that Python prints so in a dict."""


def _content(text: str) -> Mapping[Any, Any]:
    """Return the object that is written as JSON, or as Python prints a dict: the Trainer of transformers does."""
    for read in (json.loads, ast.literal_eval, lambda text: ast.literal_eval(_BARE.sub(r"'\1'", text))):
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            content = read(text)
            return content if isinstance(content, dict) else {}
    return {}


def _is_number(text: str) -> bool:
    return re.fullmatch(rf"{_NUMBER}(\s*/\s*\d+)?\s*%?[,;|)\].]*", text.strip(), re.IGNORECASE) is not None


def _value_of(text: str) -> float:
    """Return the number of a pattern's group, which may have the sign behind it: `0.5,`, `98%`, `83/100`."""
    number, _, whole = text.strip().rstrip("%,;|)].").partition("/")
    return float(number) / float(whole) if whole and float(whole) else float(number)


def plain_text(line: str) -> str:
    """Return a line of output without colours, progress bars, and blanks around it."""
    return _text_of(line)
