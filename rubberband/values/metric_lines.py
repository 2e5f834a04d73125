"""Lines of output with metrics: the numbers in them, and whether two lines come from one place of a program."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)"
_PAIR = re.compile(
    rf"(?<![\w./-])([A-Za-z_][\w./-]*)\s*[=:]\s*({_NUMBER})(?!\w|\.\w|,\d)",  # a comma may be a decimal one
    re.IGNORECASE,
)
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Colours and the like, for terminals."""
_BAR = re.compile(r"^.*?(?:\d+%\|[^|]*\||\d+it )[^\[\]]*\[\d+:\d\d[^\]]*\]")
"""A progress bar of tqdm: with a description or postfix it has the metric of a step, not of an iteration."""


def metrics_in(line: str, pattern: re.Pattern[str] | None = None) -> dict[str, float]:
    """Return the metrics in a line of output: of the pattern's named groups, of a JSON object, or of `name=number`.

    Colours and progress bars are left out, except for a pattern.
    """
    if pattern is not None:
        match = pattern.search(line)
        groups = match.groupdict() if match is not None else {}
        metrics = {name: float(text) for name, text in groups.items() if text is not None and _is_number(text)}
        beside = metrics_in(line) if metrics else {}  # by which a loss that a library has left out is seen
        return {name: value for name, value in beside.items() if not math.isfinite(value)} | metrics
    text = _text_of(line)
    if text.startswith("{"):
        content = _content(text)
        return {
            str(name): float(value)
            for name, value in content.items()
            if isinstance(value, bool) or _is_number(str(value))
        }
    return {name: float(number) for name, number in _PAIR.findall(text)}


def ambiguous(line: str, metric: str) -> list[str]:
    """Return the values of a metric in a line of output that has several, as in `train loss=1 test loss=2`."""
    values = [number for name, number in _PAIR.findall(_text_of(line)) if name == metric]
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
        pair = next((match for match in _PAIR.finditer(text) if match[1] == metric), None)
        before, behind = (text[: pair.start()], text[pair.end() :]) if pair else ("", "")
    words = [word.lower().rstrip("s") for word in re.findall(r"\w+", before) if not _CHANGING.fullmatch(word)]
    ratios = ["%" if ratio == "%" else "/" for ratio in re.findall(r"%|\d\s*/\s*\d", before)]
    names = re.findall(r"[a-z]+", _PAIR.sub(" ", behind.lower()))
    return words + ratios, {_PHASES[word] for word in names if word in _PHASES}


def pattern_of(line: str, metric: str) -> str:
    """Return a pattern by which only lines such as this one have the metric, for an error; empty where none is easy."""
    text = _text_of(line)
    pair = next((match for match in _PAIR.finditer(text) if match[1] == metric), None)
    if pair is None or not metric.isidentifier():
        return ""
    label = re.search(r"(?:[^\W\d_]+ )*$", before := text[: pair.start()])
    assert label is not None, "it may be empty"
    begin = "^" if label[0] == before else r"\b"
    sign = text[pair.start(1) + len(metric) : pair.start(2)]
    return rf"{begin}{label[0]}{metric}{sign}(?P<{metric}>\S+)"


def _text_of(line: str) -> str:
    return _BAR.sub("", _ESCAPE.sub("", line)).strip()


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
    return re.fullmatch(_NUMBER, text.strip(), re.IGNORECASE) is not None
