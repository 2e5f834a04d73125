"""The table of an experiment's trials: sorted, filtered, and a page at a time, as an address says. Pure."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import Depends, Query

from rubberband.api.dashboard.trials_filter import conditions
from rubberband.errors import InputError
from rubberband.executor.result.parts import TrialResult
from rubberband.executor.result.result import Result
from rubberband.views.charts.parallel_coordinates import Range, Space, is_number, parameters, within
from rubberband.views.charts.parts import CURVES
from rubberband.views.charts.spending import trial_costs_usd
from rubberband.views.equal_iterations import after, choices
from rubberband.views.formatting import change, mean_efficiency, printable, ranked, setting, status, usd, usd_decimals
from rubberband.views.report.headlines import measured

PAGE_SIZE = 25
_MOST_COLUMNS = 10
_PARAMETER = "."
"""Prefix of parameters in sort keys; the other columns have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Requested view of the trials; values that do not fit are ignored."""

    sort: str = ""
    """Key of a column; empty: best first."""
    down: bool = False
    status: str = ""
    """Empty: all."""
    page: int = 1
    after: int = 0
    """Iterations after which metrics are compared; 0: the latest ones."""
    brush: tuple[Range, ...] = ()
    """Ranges on the axes of the chart of configurations, through which the trials pass; empty: all."""
    filter: str = ""
    """Conditions of columns, such as `loss<0.2 status=completed`; empty: all."""
    columns: tuple[str, ...] = ()
    """Keys of the shown columns; empty: those that are usual."""

    def address(self, **changes: str | int | bool | tuple[()]) -> str:
        """Return the query and fragment of the address of this view, with changes."""
        wanted = replace(self, **changes)  # type: ignore[arg-type]
        query: dict[str, Any] = {"sort": wanted.sort, "down": int(wanted.down), "status": wanted.status}
        query |= {"page": wanted.page if wanted.page > 1 else 0, "after": wanted.after}
        query |= {"filter": wanted.filter, "columns": wanted.columns}
        query |= {"brush": [f"{name}:{100 * low:.0f}-{100 * high:.0f}" for name, low, high in wanted.brush]}
        return f"?{urlencode({key: value for key, value in query.items() if value}, doseq=True)}#trials"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Column, and the address that sorts by it."""

    title: str
    words: bool
    address: str
    sorted: str
    """`ascending`, `descending` or empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """Row of a trial, with a cell for each column after the first."""

    trial: int
    status: str
    winner: bool
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusChoice:
    """Filter by status: its number of trials, and its address."""

    title: str
    count: int
    address: str
    chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricChoice:
    """Metric to compare trials by: the latest one, or that after equal iterations."""

    title: str
    after: int
    address: str
    chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTable:
    """Page of the table."""

    columns: tuple[Column, ...]
    rows: tuple[TrialRow, ...]
    choices: tuple[StatusChoice, ...]
    metrics: tuple[MetricChoice, ...]
    """Empty without a choice."""
    shown: str
    """Such as `26 to 50 of 3,000 trials`."""
    before: str
    """Address of the previous page; empty on the first."""
    after: str
    clear: str
    """Address without ranges; empty if there are none."""
    offered: tuple[tuple[str, str, bool, bool], ...]
    """Columns to choose from: key, title, whether it is shown, and whether it is shown without a choice."""
    problem: str
    """Why the filter is not one, in a line; then it has no effect. Empty for a filter."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Kind of column: its values for sorting, and its texts."""

    key: str
    title: str
    value: Callable[[TrialResult], Any]
    text: Callable[[TrialResult], str]
    words: bool = False
    named: str = ""
    """Name in filters, beside the key."""

    def sought(self, trial: TrialResult) -> Any:
        """Return the value for filters; that of a parameter may be null, which is not to lack one."""
        return "null" if self.text(trial) == "null" else self.value(trial)


def table_page(result: Result, asked: Asked, space: Space = None) -> TrialTable:
    """Return a page of trials; `space` is the search space in the words of the file, which has the scales of ranges."""
    kinds = _kinds(result, asked.after)
    usual = {kind.key for kind in _usual(result, kinds)}
    wanted_keys = {kinds[0].key, *asked.columns} if {kind.key for kind in kinds} & {*asked.columns} else usual
    compared, chosen_trials, problem = _selected(result, asked, kinds, space)
    every = Counter(status(result, trial) for trial in result.trials)
    at = {trial.trial: trial for trial in result.trials}
    found = [at[trial.trial] for trial in ranked(compared) if trial.trial in chosen_trials]
    chosen = next((kind for kind in kinds if kind.key == asked.sort), None)
    if chosen is not None:
        found = _sorted(found, chosen.value, asked.down)
    pages = max(1, math.ceil(len(found) / PAGE_SIZE))
    first = PAGE_SIZE * ((page := max(1, min(asked.page, pages))) - 1)
    rows = found[first : first + PAGE_SIZE]
    offered = tuple((kind.key, kind.title, kind.key in wanted_keys, kind.key in usual) for kind in kinds[1:])
    kinds = [kind for kind in kinds if kind.key in wanted_keys]
    of = f"{len(found):,} {'trial' if len(found) == 1 else 'trials'}"
    return TrialTable(
        columns=tuple(_column(kind, asked) for kind in kinds),
        rows=tuple(_row(result, trial, kinds) for trial in rows),
        choices=_choices(result, every, asked.status if asked.status in every else "", asked),
        metrics=_metric_choices(result, asked),
        shown=of if pages == 1 else f"{first + 1:,} to {first + len(rows):,} of {of}",
        before=asked.address(page=page - 1) if page > 1 else "",
        after=asked.address(page=page + 1) if page < pages else "",
        clear=asked.address(brush=(), page=1) if asked.brush else "",
        offered=offered,
        problem=problem,
    )


def selected(result: Result, asked: Asked, space: Space = None) -> Result:
    """Return the result with metrics and curves of only the trials that the table has, for charts."""
    if not (asked.status or asked.filter or asked.brush):
        return result
    _, chosen, _ = _selected(result, asked, _kinds(result, asked.after), space)
    return _only(result, chosen)


def _only(result: Result, chosen: Collection[int]) -> Result:
    blank = (one if one.trial in chosen else replace(one, metrics={}, curve=()) for one in result.trials)
    best = result.best if result.best is not None and result.best.trial in chosen else None
    return replace(result, trials=tuple(blank), best=best)


def _selected(result: Result, asked: Asked, kinds: Sequence[_Kind], space: Space) -> tuple[Result, frozenset[int], str]:
    """Return the result to rank by, the trials that pass status, filter and ranges, and why the filter is none."""
    compared, problem = after(result, asked.after), ""
    columns = {kind.key: kind for kind in kinds} | {kind.named: kind for kind in reversed(kinds) if kind.named}
    known = {status(result, trial) for trial in result.trials}
    found = [one for one in result.trials if asked.status not in known or status(result, one) == asked.status]
    try:
        for condition in conditions(asked.filter, columns):
            kind = columns[condition.name]
            found = [one for one in found if condition.holds(kind.sought(one))]
    except InputError as error:
        problem = str(error)
    if asked.brush:
        passing = within(_only(compared, {one.trial for one in found}), asked.brush, space)  # axes as in the chart
        found = [trial for trial in found if trial.trial in passing]
    return compared, frozenset(trial.trial for trial in found), problem


def _usual(result: Result, kinds: Sequence[_Kind]) -> list[_Kind]:
    """Return the columns without a choice: all, but for parameters beyond a number, the first those that differ."""
    first = _names(result.trials)[:_MOST_COLUMNS]
    return [kind for kind in kinds if not kind.key.startswith(_PARAMETER) or kind.named in first]


def _kinds(result: Result, iterations: int) -> list[_Kind]:
    costs_usd = trial_costs_usd(result)
    decimals = usd_decimals(result.actual_cost_usd / max(1, len(result.trials)))

    def cost_usd(trial: TrialResult) -> float:
        return costs_usd[trial.trial]

    compared = after(result, iterations).trials
    title = printable(result.metric) + (f" after {iterations}" if iterations else "")

    def then(kind: _Kind) -> _Kind:
        """Return a column of the trials as they stood after the iterations."""
        return replace(kind, value=lambda t: kind.value(compared[t.trial]), text=lambda t: kind.text(compared[t.trial]))

    def status_of(trial: TrialResult) -> str:
        return status(result, trial)

    def status_text(trial: TrialResult) -> str:
        return trial.with_end(status_of(trial))

    measures = (
        replace(_also(result.metric), key="metric", title=title),
        *(_mean(result) if result.repeats > 1 else ()),
        *(_also(one.metric) for one in result.also),
    )
    return [
        _Kind("trial", "trial", lambda t: t.trial, lambda t: str(t.trial)),
        *(() if result.rehearsal else map(then, measures)),
        _Kind("iterations", "iterations", lambda t: t.iterations, lambda t: str(t.iterations)),
        _Kind("status", "status", status_of, status_text, words=True),
        *(_BATCH_KINDS if any(trial.batches for trial in result.trials) else ()),
        *(_parameter(name) for name in _names(result.trials)),
        _Kind("cost", "share (USD)", cost_usd, lambda t: usd(cost_usd(t), decimals)),
    ]


_BATCH_KINDS = (
    _Kind(
        "batch",
        "batch size",
        lambda t: t.batches[-1].batch_size if t.batches else None,
        lambda t: change(t.batches[0].batch_size, t.batches[-1].batch_size) if t.batches else "-",
    ),
    _Kind(
        "efficiency",
        "efficiency",
        lambda t: mean_efficiency(t.batches) if t.batches else None,
        lambda t: f"{100 * mean_efficiency(t.batches):.0f} %" if t.batches else "-",
    ),
)
"""Columns of adaptive batches: the last batch size, and the share of samples that counted."""


def _names(trials: Sequence[TrialResult]) -> list[str]:
    """Return parameters in the order of the file, first those that differ between trials."""
    varies = parameters(trials)
    return sorted(varies, key=lambda name: not varies[name])


def _mean(result: Result) -> tuple[_Kind, ...]:
    """Return the columns of the configuration's number, and of the mean of its repeats."""

    def mean(trial: TrialResult) -> float | None:
        return None if trial.standing is None else trial.standing.mean

    def text(trial: TrialResult) -> str:
        return "-" if trial.standing is None or trial.standing.mean is None else trial.standing.mean_text

    def configuration(trial: TrialResult) -> int:
        return trial.trial // result.repeats

    return (
        _Kind("configuration", "configuration", configuration, lambda t: str(configuration(t))),
        _Kind("mean", f"mean of {result.repeats}", mean, text),
    )


def _also(metric: str) -> _Kind:
    """Return the column of another metric."""
    title = printable(metric)
    return _Kind(f"also:{metric}", title, lambda t: t.metrics.get(metric), lambda t: measured(t, metric), named=metric)


def _parameter(name: str) -> _Kind:
    return _Kind(
        f"{_PARAMETER}{name}",
        printable(name),
        lambda t: t.configuration.get(name),
        lambda t: setting(t.configuration[name]) if name in t.configuration else "-",
        named=name,
    )


def _sorted(trials: Sequence[TrialResult], value: Callable[[TrialResult], Any], down: bool) -> list[TrialResult]:
    """Sort numbers before words, and missing values last in both directions."""
    known = [trial for trial in trials if is_number(value(trial))]
    other = [trial for trial in trials if not is_number(value(trial)) and not _is_missing(value(trial))]
    missing = [trial for trial in trials if _is_missing(value(trial))]
    known.sort(key=value, reverse=down)
    other.sort(key=lambda trial: setting(value(trial)), reverse=down)
    return [*known, *other, *missing]


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def _column(kind: _Kind, asked: Asked) -> Column:
    here = kind.key == asked.sort
    return Column(
        title=kind.title,
        words=kind.words,
        address=asked.address(sort=kind.key, down=here and not asked.down, page=1),
        sorted=("descending" if asked.down else "ascending") if here else "",
    )


def _row(result: Result, trial: TrialResult, kinds: Sequence[_Kind]) -> TrialRow:
    return TrialRow(
        trial=trial.trial,
        status=status(result, trial),
        winner=result.best is not None and trial.trial == result.best.trial,
        cells=tuple(kind.text(trial) for kind in kinds[1:]),
    )


def _choices(result: Result, every: Mapping[str, int], wanted: str, asked: Asked) -> tuple[StatusChoice, ...]:
    def choice(name: str, title: str, count: int) -> StatusChoice:
        return StatusChoice(title=title, count=count, address=asked.address(status=name, page=1), chosen=name == wanted)

    order = sorted(every, key=lambda name: (list(CURVES).index(name) if name in CURVES else len(CURVES), name))
    return (choice("", "All", len(result.trials)), *(choice(name, name, every[name]) for name in order))


def _metric_choices(result: Result, asked: Asked) -> tuple[MetricChoice, ...]:
    if result.rehearsal or not (ends := choices(result)):
        return ()
    every = sorted({0, *ends, asked.after})
    return tuple(
        MetricChoice(
            title=f"after {end}" if end else "latest",
            after=end,
            address=asked.address(after=end, brush=(), page=1),
            chosen=end == asked.after,
        )
        for end in every
    )


_MOST_RANGES = 20
_RANGE = re.compile(r"(.{1,200}):(\d{1,3})-(\d{1,3})", re.ASCII | re.DOTALL)


def asked_trials(
    sort: Annotated[str, Query(max_length=200)] = "",
    down: Annotated[str, Query(max_length=10)] = "",
    status: Annotated[str, Query(max_length=40)] = "",
    page: Annotated[str, Query(max_length=10)] = "",
    iterations: Annotated[str, Query(alias="after", max_length=10)] = "",
    brush: Annotated[Sequence[str], Query(max_length=_MOST_RANGES)] = (),
    filter: Annotated[str, Query(max_length=400)] = "",
    columns: Annotated[Sequence[str], Query(max_length=100)] = (),
) -> Asked:
    """Dependency: the requested view of the trials."""
    ranges = tuple(found for text in brush if (found := _range(text)) is not None)
    return Asked(
        sort=sort,
        down=down == "1",
        status=status,
        page=whole(page) or 1,
        after=whole(iterations),
        brush=ranges,
        filter=filter.strip(),
        columns=tuple(columns),
    )


def whole(text: str) -> int:
    """Return the number in an address; 0 for what is no number."""
    return int(text) if text.isascii() and text.isdigit() else 0


def _range(text: str) -> Range | None:
    """Return the range of `NAME:20-80`, in percent of the axis; None for anything else."""
    found = _RANGE.fullmatch(text)
    return None if found is None else (found[1], int(found[2]) / 100, int(found[3]) / 100)


Trials = Annotated[Asked, Depends(asked_trials)]
