"""The trials of an experiment as pages of a table: filtered, sorted, configurations as columns. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

from rubberband.executor.result import Result, TrialResult
from rubberband.views.charts import CURVES
from rubberband.views.spending import trial_costs_usd
from rubberband.views.tables import ranked, status
from rubberband.views.words import change, mean_efficiency, number, printable, setting, usd, usd_decimals

PAGE_SIZE = 25
_MOST_COLUMNS = 10
_PARAMETER = "."
"""Before the name of a parameter that is sorted by, so that it is not taken for a column of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is to be seen of the trials; whatever does not fit is as if it was not asked."""

    sort: str = ""
    """Key of a column; empty: best first."""
    down: bool = False
    status: str = ""
    """Empty: all."""
    page: int = 1

    def address(self, **changes: str | int | bool) -> str:
        """The part of an address after the path that asks for this, with changes."""
        wanted = replace(self, **changes)  # type: ignore[arg-type]
        told: dict[str, str | int] = {"sort": wanted.sort, "down": int(wanted.down), "status": wanted.status}
        told |= {"page": wanted.page if wanted.page > 1 else 0}
        return f"?{urlencode({key: value for key, value in told.items() if value})}#trials"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column, and the address that sorts by it."""

    title: str
    words: bool
    address: str
    sorted: str
    """ascending, descending or empty"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """A trial; a cell for each column after the first."""

    trial: int
    status: str
    winner: bool
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusChoice:
    """Trials of one status, how many there are, and the address that shows only them."""

    title: str
    count: int
    address: str
    chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTable:
    """One page of the table."""

    columns: tuple[Column, ...]
    rows: tuple[TrialRow, ...]
    choices: tuple[StatusChoice, ...]
    shown: str
    """Such as `26 to 50 of 3,000 trials`."""
    before: str
    """Address of the page before; empty if this is the first."""
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    key: str
    title: str
    words: bool
    value: Callable[[TrialResult], Any]
    text: Callable[[TrialResult], str]


def trial_page(result: Result, asked: Asked) -> TrialTable:
    """The trials that are asked for."""
    kinds = _kinds(result)
    every = Counter(status(result, trial) for trial in result.trials)
    wanted = asked.status if asked.status in every else ""
    found = [trial for trial in ranked(result) if not wanted or status(result, trial) == wanted]
    chosen = next((kind for kind in kinds if kind.key == asked.sort), None)
    if chosen is not None:
        found = _sorted(found, chosen.value, asked.down)
    pages = max(1, math.ceil(len(found) / PAGE_SIZE))
    page = max(1, min(asked.page, pages))
    first = (page - 1) * PAGE_SIZE
    rows = found[first : first + PAGE_SIZE]
    of = f"{len(found):,} {'trial' if len(found) == 1 else 'trials'}"
    return TrialTable(
        columns=tuple(_column(kind, asked) for kind in kinds),
        rows=tuple(_row(result, trial, kinds) for trial in rows),
        choices=_choices(result, every, wanted, asked),
        shown=of if pages == 1 else f"{first + 1:,} to {first + len(rows):,} of {of}",
        before=asked.address(page=page - 1) if page > 1 else "",
        after=asked.address(page=page + 1) if page < pages else "",
    )


def _kinds(result: Result) -> list[_Kind]:
    costs_usd = trial_costs_usd(result)

    def cost_usd(trial: TrialResult) -> float:
        return costs_usd[trial.trial]

    def metric(trial: TrialResult) -> float | None:
        return trial.metrics.get(result.metric)

    decimals = usd_decimals(result.actual_cost_usd / max(1, len(result.trials)))
    return [
        _Kind(key="trial", title="trial", words=False, value=lambda t: t.trial, text=lambda t: str(t.trial)),
        _Kind(
            key="metric",
            title=printable(result.metric),
            words=False,
            value=metric,
            text=lambda t: "-" if (value := metric(t)) is None else number(value),
        ),
        _Kind(
            key="iterations",
            title="iterations",
            words=False,
            value=lambda t: t.iterations,
            text=lambda t: str(t.iterations),
        ),
        _Kind(
            key="status",
            title="status",
            words=True,
            value=lambda t: status(result, t),
            text=lambda t: status(result, t),
        ),
        *_batches(result),
        *(_parameter(name) for name in _names(result.trials)),
        _Kind(key="cost", title="share (USD)", words=False, value=cost_usd, text=lambda t: usd(cost_usd(t), decimals)),
    ]


def _batches(result: Result) -> Iterator[_Kind]:
    """Where batches adapt: how large each was in the end, and how much of its samples counted."""
    if not any(trial.batches for trial in result.trials):
        return
    yield _Kind(
        key="batch",
        title="batch size",
        words=False,
        value=lambda t: t.batches[-1].batch_size if t.batches else None,
        text=lambda t: change(t.batches[0].batch_size, t.batches[-1].batch_size) if t.batches else "-",
    )
    yield _Kind(
        key="efficiency",
        title="efficiency",
        words=False,
        value=lambda t: mean_efficiency(t.batches) if t.batches else None,
        text=lambda t: f"{100 * mean_efficiency(t.batches):.0f} %" if t.batches else "-",
    )


def _names(trials: Sequence[TrialResult]) -> list[str]:
    """Parameters in the order of the file; those that differ come before those that are the same for all."""
    seen: dict[str, set[str]] = {}
    for trial in trials:
        for name, value in trial.configuration.items():
            if len(values := seen.setdefault(name, set())) < 2:
                values.add(setting(value))
    return sorted(seen, key=lambda name: len(seen[name]) < 2)[:_MOST_COLUMNS]


def _parameter(name: str) -> _Kind:
    return _Kind(
        key=f"{_PARAMETER}{name}",
        title=printable(name),
        words=False,
        value=lambda t: t.configuration.get(name),
        text=lambda t: setting(t.configuration[name]) if name in t.configuration else "-",
    )


def _sorted(trials: Sequence[TrialResult], value: Callable[[TrialResult], Any], down: bool) -> list[TrialResult]:
    """Numbers before words, and what is missing last, whichever way."""
    known = [trial for trial in trials if _is_number(value(trial))]
    other = [trial for trial in trials if not _is_number(value(trial)) and not _is_missing(value(trial))]
    missing = [trial for trial in trials if _is_missing(value(trial))]
    known.sort(key=value, reverse=down)
    other.sort(key=lambda trial: setting(value(trial)), reverse=down)
    return [*known, *other, *missing]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


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
