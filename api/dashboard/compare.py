"""The page that compares experiments: planned against actual, best trials, configurations, stages and settings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from markupsafe import Markup

from rubberband.api.dashboard.experiment import result_of
from rubberband.api.dashboard.form import file_words
from rubberband.api.dashboard.frame import render
from rubberband.api.dashboard.listing import badge
from rubberband.api.dashboard.trials_table import whole
from rubberband.api.routes import NAME_PATTERN, Reader, Service, Serving
from rubberband.executor.result.parts import StageResult, TrialResult
from rubberband.executor.result.result import Result
from rubberband.states import ACTIVE
from rubberband.units import counted, duration, gpus_each, shown
from rubberband.values.submission import Submission
from rubberband.views import equal_iterations
from rubberband.views.charts.learning import curves_chart
from rubberband.views.charts.parallel_coordinates import parameters
from rubberband.views.charts.parts import STAGE_COLOURS, Figure, button, chart_text, time_unit
from rubberband.views.charts.spending import shares
from rubberband.views.formatting import (
    Card,
    cost_card,
    finite,
    listed,
    number,
    printable,
    ranked,
    setting,
    status,
    time_card,
    usd,
)
from rubberband.views.report.page import script_json

FEWEST, MOST = 2, 8
_MOST_CURVES = 5
"""Trials of each experiment in the chart, the best of them."""
_MOST_REPORTS = 400
"""Reports of a curve from which on it is thinned out."""
_MOST_STAGES = 24
_MOST_TRIALS, _MOST_PARAMETERS = 25, 8
"""Limits of the table of all trials."""
_MOST_SETTINGS = 60
_SUGGESTED = 50


@dataclass(frozen=True, slots=True)
class Compared:
    """An experiment, and its result once it began."""

    row: Submission
    result: Result | None
    after: int = 0
    """Iterations after which its trials are compared; 0: at their latest reports."""

    @property
    def standings(self) -> Result | None:
        """The result as its trials stood then."""
        return None if self.result is None else equal_iterations.after(self.result, self.after)


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """A figure, what it was planned to be (or a similar note), and whether it is the best of its line."""

    text: str = "-"
    note: str = ""
    best: bool = False
    trial: int | None = None
    """The trial that it is of, whose page its note leads to."""


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """A line of a table with a cell for each experiment."""

    title: str
    cells: tuple[ComparedFigure, ...]

    @property
    def differs(self) -> bool:
        """Whether its cells differ."""
        return len({cell.text for cell in self.cells}) > 1


def figures_of(compared: Sequence[Compared]) -> list[ComparedRow]:
    """Return best metrics, time and cost against plan and limits, trials, instances, and how they ended."""
    metrics = _metrics(compared)
    return [
        *(_best_line(compared, metric, mode) for metric, mode in metrics),
        _least("time", compared, lambda result: result.actual_jct_s, lambda result: _of(time_card(result))),
        _least("cost (USD)", compared, lambda result: result.whole_cost_usd, lambda result: _of(cost_card(result))),
        _line("deadline", compared, _deadline),
        _line("max_cost (USD)", compared, _max_cost),
        _line("trials", compared, _trials),
        _line("instances", compared, _instances),
        _line(
            "paid time that trained",
            compared,
            lambda result: ComparedFigure(f"{100 * result.paid.training_share:.0f} %"),
        ),
        _line("replans", compared, _replans),
    ]


def _metrics(compared: Sequence[Compared]) -> list[tuple[str, str]]:
    """Return the metrics and their modes, those of the most experiments first."""
    results = [one.result for one in compared if one.result is not None]
    found = Counter((result.metric, result.mode) for result in results if not result.rehearsal)
    return [metric for metric, _ in found.most_common()]


def _line(title: str, compared: Sequence[Compared], cell: Callable[[Result], ComparedFigure]) -> ComparedRow:
    return ComparedRow(title, tuple(ComparedFigure() if one.result is None else cell(one.result) for one in compared))


def _best_line(compared: Sequence[Compared], metric: str, mode: str) -> ComparedRow:
    def value(result: Result) -> float | None:
        is_ours = (result.metric, result.mode) == (metric, mode) and result.best is not None
        if not is_ours or result.best is None:
            return None
        standing = result.best.standing
        mean = None if standing is None else standing.mean
        return finite(result.best.metrics.get(metric)) if mean is None else mean

    def cell(result: Result) -> ComparedFigure:
        found, best = value(result), result.best
        if found is None or best is None:
            return ComparedFigure()
        note = "" if best.standing is None else best.standing.note
        return ComparedFigure(number(found), f"{counted(best.iterations, 'iteration')}{note}", trial=best.trial)

    def rank(result: Result) -> float | None:
        if (found := value(result)) is None or (result.best is not None and result.best.feasible is False):
            return None
        return result.ranking.signed(found)

    then = [replace(one, result=one.standings) for one in compared]
    after = f" after {compared[0].after}" if compared[0].after else ""
    return _marked(_line(f"best {printable(metric)} ({mode}){after}", then, cell), then, rank)


def _least(title: str, compared: Sequence[Compared], value: Callable[[Result], float], cell: Any) -> ComparedRow:
    """Return a line whose lowest value is marked, of the experiments that are done."""
    done = _line(title, compared, cell)
    return _marked(
        done, compared, lambda result: value(result) if result.outcome == "done" and not result.rehearsal else None
    )


def _marked(line: ComparedRow, compared: Sequence[Compared], rank: Callable[[Result], float | None]) -> ComparedRow:
    ranks = [None if one.result is None else rank(one.result) for one in compared]
    known = [value for value in ranks if value is not None]
    if len(known) < 2 or min(known) == max(known):
        return line
    cells = [replace(cell, best=value == min(known)) for cell, value in zip(line.cells, ranks, strict=True)]
    return ComparedRow(line.title, tuple(cells))


def _of(card: Card) -> ComparedFigure:
    _limit, planned, *_ = card.notes
    return ComparedFigure(card.value, planned if card.is_charged else f"{planned}; not charged")


def _deadline(result: Result) -> ComparedFigure:
    if result.deadline_s is None:
        return ComparedFigure("none")
    left_s = result.deadline_s - result.actual_jct_s
    over = result.outcome == "done"
    note = f"{duration(left_s)} to spare" if left_s >= 0 else f"{duration(-left_s)} late"
    return ComparedFigure(result.deadline, note if over or left_s < 0 else "")


def _max_cost(result: Result) -> ComparedFigure:
    if result.asked_max_cost_usd is None:
        return ComparedFigure("none")
    cap_usd = result.asked_max_cost_usd  # 0 where instances are free
    return ComparedFigure(usd(cap_usd), f"{100 * result.whole_cost_usd / cap_usd:.0f} % spent" if cap_usd else "")


def _trials(result: Result) -> ComparedFigure:
    failed = sum(trial.status == "failed" for trial in result.trials)
    notes = [f"{counted(sum(trial.iterations for trial in result.trials), 'iteration')}"]
    notes += [f"{failed} failed"] if failed else []
    return ComparedFigure(f"{len(result.trials):,}", ", ".join(notes))


def _instances(result: Result) -> ComparedFigure:
    bought = [one for one in result.instances if one.running_s is not None]
    lost = sum(bool(one.reason) for one in bought)
    kinds = listed(sorted({one.instance_type for one in bought}), 3)
    return ComparedFigure(f"{len(bought)} bought", ", ".join(filter(None, (kinds, f"{lost} lost" if lost else ""))))


def _replans(result: Result) -> ComparedFigure:
    """A decision that leaves the plan as it is is no replan."""
    looks = len(result.decisions)
    return ComparedFigure(
        str(sum(decision.changed for decision in result.decisions)), f"of {counted(looks, 'look')}" if looks else ""
    )


def plans_of(compared: Sequence[Compared]) -> list[ComparedRow]:
    """Return the stages: trials and iterations, instances, GPUs per trial, and time."""
    stages = [() if one.result is None else one.result.stages for one in compared]
    most = max((len(found) for found in stages), default=0)
    return [
        ComparedRow(
            f"stage {at}", tuple(_stage(found[at]) if at < len(found) else ComparedFigure("") for found in stages)
        )
        for at in range(min(most, _MOST_STAGES))
    ]


def _stage(stage: StageResult) -> ComparedFigure:
    begun = stage.actual_s is not None
    instances = stage.instances if begun else stage.planned_instances
    where = "" if stage.bracket is None else f"{stage.title}: "
    each = f"{gpus_each(stage.gpus_per_trial, stage.trials_per_gpu)} {stage.place}{'s' * (stage.gpus_per_trial > 1)}"
    planned = f"planned {duration(stage.planned_s)}"
    took = planned if stage.actual_s is None else f"{duration(stage.actual_s)} ({planned})"
    return ComparedFigure(
        f"{where}{counted(stage.trials, 'trial')} x {counted(stage.iterations, 'iteration')}",
        f"{counted(instances, 'instance')}, {each} a trial; {took}",
    )


def configurations_of(compared: Sequence[Compared]) -> list[ComparedRow]:
    """Return the parameters of the best trials; a trial may lack some."""
    then = [one.standings for one in compared]
    best = [result.best_config if result is not None and result.best else {} for result in then]
    names = dict.fromkeys(name for configuration in best for name in configuration)
    return [
        ComparedRow(
            printable(name), tuple(ComparedFigure(setting(of[name])) if name in of else ComparedFigure() for of in best)
        )
        for name in names
    ]


@dataclass(frozen=True, slots=True)
class ComparedTrials:
    """The best trials of all experiments with the most common metric, in one table."""

    parameters: tuple[str, ...]
    rows: tuple[tuple[int, str, int, str, str, str, tuple[str, ...]], ...]
    """Place of the experiment on the page, its name, the trial, its metric, iterations, status and values."""
    left: int
    """Trials that are left out."""


def trials_of(compared: Sequence[Compared]) -> ComparedTrials | None:
    """Return the best trials of all, after equal iterations if that is chosen; None without two metrics."""
    metrics = _metrics(compared)
    ours = [
        (at, one.result, then)
        for at, one in enumerate(compared)
        if one.result is not None and (then := one.standings) is not None and [(then.metric, then.mode)] == metrics[:1]
    ]
    known = [
        (result.ranking.merit(trial.metrics), at, result, trial)
        for at, result, then in ours
        for trial in then.trials
        if not result.rehearsal and finite(trial.metrics.get(result.metric)) is not None
    ]
    known.sort(key=lambda one: (one[0], one[1], one[3].trial))
    shown_trials = [trial for *_, trial in known[:_MOST_TRIALS]]
    if len(known) < 2:
        return None
    varies = parameters(shown_trials)
    names = [name for name in varies if varies[name]][:_MOST_PARAMETERS]
    rows = (
        (
            at,
            result.name,
            trial.trial,
            number(trial.metrics[result.metric]),
            str(trial.iterations),
            status(result, result.trials[trial.trial]),
            tuple(setting(trial.configuration[name]) if name in trial.configuration else "-" for name in names),
        )
        for _, at, result, trial in known[:_MOST_TRIALS]
    )
    return ComparedTrials(tuple(map(printable, names)), tuple(rows), len(known) - len(shown_trials))


def settings_of(compared: Sequence[Compared]) -> list[ComparedRow]:
    """Return the settings of the files that differ: a line for each key, with deadlines from the start."""
    files = [dict(_flat(file_words(one.row))) for one in compared]
    keys = dict.fromkeys(key for file in files for key in file if key != "name")
    every = [
        ComparedRow(
            printable(key), tuple(ComparedFigure(file[key]) if key in file else ComparedFigure() for file in files)
        )
        for key in keys
    ]
    return [line for line in every if line.differs]


def _flat(words: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for key, value in words.items():
        path = f"{above}{key}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}.")
        elif value is not None:
            yield path, value if isinstance(value, str) and value.isprintable() else setting(value)


def curves_of(compared: Sequence[Compared]) -> Figure | None:
    """Return the learning curves of the best trials, a colour for each experiment; of the most common metric."""
    metrics, ours = _metrics(compared), _of_one_metric(compared)
    horizon_s = max((result.actual_jct_s for _, result in ours), default=0.0)
    unit, unit_s = time_unit(horizon_s)
    drawn = [trace for at, result in ours for trace in _curves(at, result, _drawn(compared[at]), unit_s)]
    if not drawn:
        return None
    xs = [trace.pop("xs") for trace in drawn]
    for trace, (iterations, _, _) in zip(drawn, xs, strict=True):
        trace["x"] = iterations
    axes = ("iterations", f"time since the start ({unit})", "the trial's share of the bill (USD)")
    labels = ("over iterations", "over time", "over dollars")
    buttons = [
        button(label, [each[at] for each in xs], {"xaxis.title.text": axes[at], "xaxis.dtick": None})
        for at, label in enumerate(labels)
    ]
    return curves_chart(drawn, axes[0], None, metrics[0][0], buttons)


def _of_one_metric(compared: Sequence[Compared]) -> list[tuple[int, Result]]:
    """Return the results with the most common metric, each with its place."""
    metrics = _metrics(compared)
    results = [(at, one.result) for at, one in enumerate(compared) if one.result is not None]
    return [(at, result) for at, result in results if [(result.metric, result.mode)] == metrics[:1]]


def _drawn(one: Compared) -> list[TrialResult]:
    """Return the best trials, whole, by their metric after the chosen iterations."""
    assert one.result is not None
    assert one.standings is not None
    best = [one.result.trials[trial.trial] for trial in ranked(one.standings)[:_MOST_CURVES]]
    return [trial for trial in best if trial.curve]


def _legend(compared: Sequence[Compared]) -> list[tuple[int, str, int]]:
    """Return place, name and best trial of the experiments whose curves are drawn."""
    ours = _of_one_metric(compared)
    return [(at, result.name, trial.trial) for at, result in ours for trial in _drawn(compared[at])[:1]]


def _curves(at: int, result: Result, best: Sequence[TrialResult], unit_s: float) -> Iterator[Figure]:
    """Iterate over the traces of an experiment: its other good trials, thin, and then its best."""
    costs_usd = shares(result, best)
    for trial in reversed(best):
        last, step = len(trial.curve) - 1, 1 + len(trial.curve) // _MOST_REPORTS
        kept = [n for n in range(last + 1) if n % step == 0 or n == last]
        curve, is_best = [trial.curve[n] for n in kept], trial is best[0]
        yield {
            "type": "scatter",
            "mode": "lines+markers" if is_best and len(kept) <= 60 else "lines",
            "name": f"{chart_text(result.name)}, trial {trial.trial}",
            "legendgroup": result.name,
            "meta": {"href": f"/experiments/{result.name}/trials/{trial.trial}"},
            "showlegend": is_best,
            "xs": (
                [iterations for _, iterations, _ in curve],
                [at_s / unit_s for at_s, _, _ in curve],
                [costs_usd[trial.trial][n] for n in kept],
            ),
            "y": [finite(metrics.get(result.metric)) for _, _, metrics in curve],
            "customdata": [[iterations, duration(at_s)] for at_s, iterations, _ in curve],
            "hovertemplate": f"{chart_text(result.name)}, trial {trial.trial}: %{{y:.6g}}<br>"
            "%{customdata[0]} iterations, at %{customdata[1]}<extra></extra>",
            "line": {"color": STAGE_COLOURS[at % len(STAGE_COLOURS)], "width": 3 if is_best else 1},
            "marker": {"color": STAGE_COLOURS[at % len(STAGE_COLOURS)], "size": 5},
            "opacity": 1.0 if is_best else 0.4,
        }


router = APIRouter(include_in_schema=False)

Names = Annotated[Sequence[str], Query(max_length=100)]
After = Annotated[str, Query(max_length=10)]


@router.get("/compare")
def compare(request: Request, service: Serving, _reader: Reader, name: Names = (), after: After = "") -> Response:
    """Experiments side by side, by `name`, which repeats. `after`: iterations after which trials are compared."""
    return render(request, "compare.html", **_compared(service, name, whole(after)))


@router.get("/fragments/compare")
def compare_live(request: Request, service: Serving, _reader: Reader, name: Names = (), after: After = "") -> Response:
    """Part of the page that reloads."""
    return render(request, "compare_tables.html", **_compared(service, name, whole(after)))


def _compared(service: Service, asked: Sequence[str], iterations: int) -> dict[str, Any]:
    names = list(dict.fromkeys(asked))
    found = [(name, service.store.submission(name) if re.fullmatch(NAME_PATTERN, name) else None) for name in names]
    rows = [row for _, row in found if row is not None]
    compared = [Compared(row, result_of(service, row), iterations) for row in rows[:MOST]]
    kept = [one.row.name for one in compared]
    metrics = _metrics(compared)
    curves = curves_of(compared)
    return {
        "columns": [
            (one.row, *badge(one.row), _address([name for name in kept if name != one.row.name], after=iterations))
            for one in compared
        ],
        "problems": _problems([name for name, row in found if row is None], [row.name for row in rows]),
        "names": kept,
        "known": [
            row.name
            for row in service.store.submissions(archived=False, limit=_SUGGESTED).items
            if row.name not in kept
        ],
        "is_active": any(one.row.state in ACTIVE for one in compared),
        "is_full": len(kept) >= MOST,
        "address": _address(kept, "/fragments/compare", iterations),
        "tables": _tables(compared),
        "trials": trials_of(compared),
        "metrics": _metric_choices(compared, iterations),
        "after": iterations,
        "left_out": [one.row.name for one in compared if one.result and metrics[:1] != _metrics([one])],
        "metric": printable(metrics[0][0]) if metrics else "",
        "legend": _legend(compared),
        "bests": [then.best.trial if (then := one.standings) and then.best else None for one in compared],
        "figures": Markup(script_json({} if curves is None else {"compared": curves})),
    }


def _address(names: Sequence[str], path: str = "/compare", after: int = 0) -> str:
    words = [("name", name) for name in names] + ([("after", str(after))] if after else [])
    return f"{path}?{urlencode(words)}".rstrip("?")


def _metric_choices(compared: Sequence[Compared], iterations: int) -> list[tuple[str, str, bool]]:
    """Return title, address, and whether it is chosen: the latest metrics, or those after iterations of all."""
    names = [one.row.name for one in compared]
    results = [one.result for one in compared if one.result is not None and not one.result.rehearsal]
    ends = [set(equal_iterations.choices(result)) for result in results]
    every = sorted({0, iterations, *set.intersection(*ends)}) if ends else []
    titles = ((f"after {end}" if end else "latest", end) for end in every if len(every) > 1)
    return [(title, _address(names, after=end), end == iterations) for title, end in titles]


def _problems(unknown: Sequence[str], known: Sequence[str]) -> list[str]:
    found = [f"Experiment {shown(name)} not found." for name in unknown[:MOST]]
    if len(known) > MOST:
        found.append(f"{counted(len(known), 'experiment')} are too many; the page shows the first {MOST}.")
    return found


def _tables(compared: Sequence[Compared]) -> list[tuple[str, str, list[ComparedRow]]]:
    """Return id, title and lines of each table that has some."""
    plans, settings = plans_of(compared), settings_of(compared) if len(compared) > 1 else []
    tables = [
        ("figures-of", "Outcome", figures_of(compared) if any(one.result for one in compared) else []),
        ("best", "Configuration of the best trial", configurations_of(compared)),
        ("stages", "Stages", plans),
        ("settings", "Settings that differ", settings[:_MOST_SETTINGS]),
    ]
    return [table for table in tables if table[2]]
