"""Charts of how the metric depends on the parameters: one at a time, two together, and their importance. Pure.

Slices show the latest metric of all trials, coloured by their iterations. A contour compares trials after the same
number of iterations only. Its cells are bars, as plotly's basic bundle has no heat map. The importance is fANOVA's
(Hutter et al., ICML 2014), as Optuna computes it; it needs the extra `optuna` and scikit-learn. As a command, this
module reads a question as JSON from its standard input and prints the shares: the service runs it in a process of its
own, for Optuna's memory and time.

Optuna draws such charts too, but of complete trials only: here, these are the few of the last stage.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rubberband.executor.result.parts import TrialResult
from rubberband.executor.result.result import Result
from rubberband.installation import install_hint
from rubberband.spec.space import canonical
from rubberband.units import counted
from rubberband.views.charts.parallel_coordinates import (
    ABSENT,
    ABSENT_SHARE,
    Axis,
    Space,
    axes_of,
    parameters,
    short_label,
)
from rubberband.views.charts.parts import LABELS_PX, LEGEND, SHADES, Figure, chart_text
from rubberband.views.equal_iterations import metric_after, stage_ends
from rubberband.views.formatting import finite, listed, number, printable, ranked, setting

ENOUGH = 20
"""Trials after which further training counts for more than further trials."""
_MOST_PANELS, _PANELS_IN_A_ROW = 12, 4
_MOST_DRAWN, _MOST_DOTS = 1600, 400
"""Points in all panels together, and in a contour."""
_MOST_GROUPS = 8
_MOST_POINTS = 2000
_CELLS = 24
_BANDWIDTH, _NEAR = 0.3, 2.0
"""Width of the mean around a cell, for one trial; it shrinks with their number (Scott's rule for two dimensions).

The second is the squared distance, in widths, from which on a cell without a trial is blank.
"""
_BEST_COLOUR = "#e08a1e"
_SPREAD_FOR_LOG = 50.0
"""Largest metric over the median from which on the metric's axis is logarithmic."""
SLICES_NOTE = "Each point is a trial at its latest metric; its colour is how long it was trained, the star is the best."
CONTOUR_NOTE = (
    "Colour: the mean metric of the trials nearby; orange is better, and cells without a trial nearby are blank."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparable:
    """Trials with their metric after the same number of iterations."""

    iterations: int
    trials: tuple[TrialResult, ...]
    values: tuple[float, ...]

    def sentence(self, result: Result) -> str:
        """Return which trials are compared."""
        count, every = len(self.trials), len(result.trials)
        compared = f"{count:,} of {every:,}" if count < every else f"all {count:,}"
        return f"Compared: {compared} trials, at their metric after {counted(self.iterations, 'iteration')}."


def comparable(result: Result) -> Comparable | None:
    """Return the trials that reached the furthest end of a stage that `ENOUGH` reached, else that most reached.

    None if there are not two with a finite metric.
    """
    found = [_compared(result, iterations) for iterations in stage_ends(result)]
    found = [one for one in found if len(one.trials) >= 2]
    enough = [one for one in found if len(one.trials) >= ENOUGH]
    return enough[-1] if enough else max(found, key=lambda one: (len(one.trials), one.iterations), default=None)


def _compared(result: Result, iterations: int) -> Comparable:
    reached = [trial for trial in result.trials if trial.iterations >= iterations]
    values = [metric_after(result, trial, iterations) for trial in reached]
    known = [(trial, value) for trial, value in zip(reached, values, strict=True) if value is not None]
    trials, metrics = zip(*known, strict=True) if known else ((), ())
    return Comparable(iterations=iterations, trials=trials, values=metrics)


def slices(result: Result, space: Space = None) -> Figure | None:
    """Return the metric against each parameter; None without two trials that differ."""
    shown = [trial for trial in ranked(result) if finite(trial.metrics.get(result.metric)) is not None]
    varying = [name for name, varies in parameters(shown).items() if varies]
    if len(shown) < 2 or not varying:
        return None
    names = varying[:_MOST_PANELS]
    drawn = _thinned(shown, _MOST_DRAWN // len(names))
    axes = axes_of(names, shown, space)
    groups = _by_iterations(result, drawn)
    data = [trace for at, axis in enumerate(axes) for trace in _panel(result, at, axis, groups)]
    wide, rows = min(len(axes), _PANELS_IN_A_ROW), math.ceil(len(axes) / _PANELS_IN_A_ROW)
    values = [trial.metrics[result.metric] for trial in shown]
    layout = {
        **LEGEND,
        "height": slices_px(len(axes)),
        "showlegend": True,
        "margin": {"l": LABELS_PX, "r": 10, "t": 12, "b": 90},
        "meta": {"least_width_px": 180 * wide, "panels": len(axes), "note": _slices_note(shown, drawn, varying)},
    }
    is_log = min(values) > 0 and max(values) > _SPREAD_FOR_LOG * median(values)
    for at, axis in enumerate(axes):
        layout |= _panel_axes(result, at, axis, wide, rows, is_log)
    return {"data": data, "layout": layout}


def slices_px(varying: int) -> int:
    """Return the height of the slices of that many parameters; 0 without any."""
    rows = math.ceil(min(varying, _MOST_PANELS) / _PANELS_IN_A_ROW)
    return 110 + 240 * rows if rows else 0


def _slices_note(shown: Sequence[TrialResult], drawn: Sequence[TrialResult], varying: Sequence[str]) -> str:
    notes = [SLICES_NOTE]
    if len(drawn) < len(shown):
        notes.append(
            f"Drawn: {len(drawn):,} of {counted(len(shown), 'trial')}, the best trials and an even choice of the rest."
        )
    if len(varying) > _MOST_PANELS:
        notes.append(f"The first {_MOST_PANELS} of {len(varying)} parameters are drawn.")
    return " ".join(notes)


def _thinned(best_first: Sequence[TrialResult], most: int) -> list[TrialResult]:
    """Return all trials, or the best trials and an even choice of the rest."""
    if len(best_first) <= most:
        return list(best_first)
    best = most // 5
    others, left = best_first[best:], most - best
    return [*best_first[:best], *(others[at * len(others) // left] for at in range(left))]


def _by_iterations(result: Result, trials: Sequence[TrialResult]) -> list[tuple[str, list[TrialResult]]]:
    """Return the trials by the end of the stage that they reached or are in, with the group's name."""
    ends = sorted({*stage_ends(result), max(trial.iterations for trial in trials)})
    ends = [ends[math.ceil((at + 1) * len(ends) / _MOST_GROUPS) - 1] for at in range(_MOST_GROUPS)]
    groups: dict[int, list[TrialResult]] = {}
    for trial in trials:
        groups.setdefault(next(end for end in ends if trial.iterations <= end), []).append(trial)
    named = []
    for end, members in sorted(groups.items()):
        least = min(trial.iterations for trial in members)
        span = counted(end, "iteration") if least == end else f"{least} to {counted(end, 'iteration')}"
        named.append((span, members))
    return named


def _panel(result: Result, at: int, axis: Axis, groups: Sequence[tuple[str, list[TrialResult]]]) -> Iterator[Figure]:
    for index, (name, trials) in enumerate(groups):
        shade = SHADES[round(index * (len(SHADES) - 1) / max(1, len(groups) - 1))]
        marker: Figure = {"color": shade, "size": 6, "opacity": 0.75}
        yield _points(result, at, axis, trials, name, marker) | {"showlegend": at == 0, "legendgroup": name}
    if result.best is not None and finite(result.best.metrics.get(result.metric)) is not None:
        star: Figure = {"color": _BEST_COLOUR, "size": 12, "symbol": "star", "line": {"width": 1, "color": "#fff"}}
        yield _points(result, at, axis, [result.best], "best", star) | {"showlegend": at == 0, "legendgroup": "best"}


def _points(result: Result, at: int, axis: Axis, trials: Sequence[TrialResult], name: str, marker: Figure) -> Figure:
    xs = [_jittered(axis, trial) for trial in trials]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [None if x is None else round(x, 4) for x in xs],
        "y": [trial.metrics[result.metric] for trial in trials],
        "xaxis": f"x{at + 1 if at else ''}",
        "yaxis": f"y{at + 1 if at else ''}",
        "customdata": [[trial.trial, _value_text(trial, axis.name), trial.iterations] for trial in trials],
        "hovertemplate": f"trial %{{customdata[0]}}: %{{y:.6g}}<br>{short_label(axis.name)} %{{customdata[1]}}<br>"
        "%{customdata[2]} iterations<extra></extra>",
        "marker": marker,
    }


def _value_text(trial: TrialResult, name: str) -> str:
    return short_label(setting(trial.configuration[name]), 40) if name in trial.configuration else "-"


def _jittered(axis: Axis, trial: TrialResult) -> float | None:
    """Return the place of a trial; of equal categories beside each other, the same at every drawing."""
    place = axis.place(trial.configuration.get(axis.name, ABSENT))
    if place is None or axis.kind != "category" or axis.name not in trial.configuration:
        return place
    return place + ((trial.trial * 0.618034) % 1.0 - 0.5) * 0.5 / max(axis.num_categories, 2)


def _panel_axes(result: Result, at: int, axis: Axis, wide: int, rows: int, is_log: bool) -> Figure:
    row, column = divmod(at, _PANELS_IN_A_ROW)
    gap, titles = 0.02, 0.3 / rows
    across = (1.0 - gap * (wide - 1)) / wide
    down = (1.0 - titles * (rows - 1)) / rows
    top = 1.0 - row * (down + titles)
    name = at + 1 if at else ""
    y: Figure = {"domain": [max(top - down, 0.0), top], "anchor": f"x{name}", "exponentformat": "e"}
    y |= {"type": "log"} if is_log else {}
    y |= {"matches": "y"} if at else {}
    title = chart_text(printable(result.metric))
    y |= {"title": {"text": title, "standoff": 8}} if column == 0 else {"showticklabels": False, "automargin": False}
    left = column * (across + gap)
    return {f"xaxis{name}": _scale(axis) | {"domain": [left, left + across], "anchor": f"y{name}"}, f"yaxis{name}": y}


def _scale(axis: Axis) -> Figure:
    ticks = axis.ticks[:: math.ceil(len(axis.ticks) / 7)] if axis.kind != "category" else axis.ticks
    return {
        "title": {"text": short_label(axis.name, 30), "standoff": 6},
        "range": [-0.05, 1.05],
        "tickvals": [round(place, 4) for place, _ in ticks],
        "ticktext": [short_label(text, 12) for _, text in ticks],
        "zeroline": False,
    }


def contour_names(result: Result) -> list[str]:
    """Return the parameters of which a contour may be drawn."""
    compared = comparable(result)
    found = {} if compared is None else parameters(compared.trials)
    return [name for name, varies in found.items() if varies]


FEWEST_OF_CONTOUR = 10


def few_for_contour(result: Result) -> str:
    """Return why there are too few trials for a contour, in a sentence; empty if there are enough, or no parameters."""
    compared = comparable(result)
    if compared is None or len(contour_names(result)) < 2 or len(compared.trials) >= FEWEST_OF_CONTOUR:
        return ""
    found = f"{len(compared.trials)} after {counted(compared.iterations, 'iteration')}"
    return f"Too few trials: a contour needs {FEWEST_OF_CONTOUR} with a metric after equal iterations; {found}."


def contour(result: Result, space: Space = None, *, x: str = "", y: str = "") -> Figure | None:
    """Return the metric over two parameters, the first two unless others are named; None without two that differ."""
    compared, names = comparable(result), contour_names(result)
    if compared is None or len(names) < 2 or len(compared.trials) < FEWEST_OF_CONTOUR:
        return None
    x = x if x in names else next(name for name in names if name != y)
    y = y if y in names and y != x else next(name for name in names if name != x)
    across, up = axes_of((x, y), result.trials, space)
    layout = {
        "height": 440,
        "showlegend": False,
        "barmode": "overlay",
        "bargap": 0,
        "hovermode": "closest",
        "margin": {"l": LABELS_PX, "r": 116, "t": 16, "b": 44},
        "xaxis": _scale(across) | {"showgrid": False},
        "yaxis": _scale(up) | {"showgrid": False},
        "meta": {
            "note": f"{CONTOUR_NOTE} {compared.sentence(result)}",
            "parameters": [[name, printable(name)] for name in names],
            "chosen": [x, y],
        },
    }
    places = [[axis.place(t.configuration.get(axis.name, ABSENT)) for t in compared.trials] for axis in (across, up)]
    known = [at for at, (px, py) in enumerate(zip(*places, strict=True)) if px is not None and py is not None]
    xs, ys = (np.array([each[at] for at in known], dtype=float) for each in places)
    values = np.array([compared.values[at] for at in known], dtype=float)
    cells = _cell_trace(result, across, up, xs, ys, values)
    return {"data": [cells, *_dots(result, compared, known, xs, ys, across, up)], "layout": layout}


Places = NDArray[np.float64]


def _edges(axis: Axis) -> list[tuple[float, float]]:
    """Return the cells of an axis as (centre, width): its categories, or even steps."""
    steps = axis.num_categories if axis.kind == "category" else _CELLS
    first = ABSENT_SHARE if axis.has_absent else 0.0
    width = (1.0 - first) / steps
    cells = [(first + (at + 0.5) * width, width) for at in range(steps)]
    return [(0.0, ABSENT_SHARE / 2), *cells] if axis.has_absent else cells


def _nearness(axis: Axis, cells: Sequence[tuple[float, float]], places: Places) -> Places:
    """Return the squared distance of each cell to each place, in bandwidths; infinite between categories."""
    centres = np.array([centre for centre, _ in cells])[:, None]
    widths = np.array([width for _, width in cells])[:, None]
    apart = np.abs(centres - places[None, :])
    apart_only = np.full_like(centres, axis.kind == "category", dtype=bool)
    if axis.has_absent:
        apart_only[0] = True
    bandwidth = _BANDWIDTH * max(len(places), 1) ** (-1.0 / 6.0)
    near = (apart / bandwidth) ** 2
    absent = (places == 0.0)[None, :] if axis.has_absent else np.zeros((1, len(places)), dtype=bool)
    near = np.where(apart_only, np.where(apart <= widths / 2, 0.0, np.inf), np.where(absent, np.inf, near))
    return np.asarray(near, dtype=float)


def _cell_trace(result: Result, across: Axis, up: Axis, xs: Places, ys: Places, values: Places) -> Figure:
    if len(values) > _MOST_POINTS:
        kept = np.linspace(0, len(values) - 1, _MOST_POINTS).astype(int)
        xs, ys, values = xs[kept], ys[kept], values[kept]
    columns, rows = _edges(across), _edges(up)
    to_x, to_y = _nearness(across, columns, xs), _nearness(up, rows, ys)
    ends = (0.1, 1.0) if result.mode == "max" else (0.0, 0.9)  # the worst tenth has one colour
    low, high = (float(np.quantile(values, end)) for end in ends)
    found: Figure = {"x": [], "y": [], "base": [], "width": [], "colours": []}
    for (j, (bottom, tall)), (i, (centre, wide)) in itertools.product(enumerate(rows), enumerate(columns)):
        near = to_x[i] + to_y[j]
        if near.size and near.min() <= _NEAR:
            weights = np.exp(-0.5 * near)
            found["x"].append(round(centre, 4))
            found["width"].append(round(wide, 4))
            found["base"].append(round(bottom - tall / 2, 4))
            found["y"].append(round(tall, 4))
            found["colours"].append(float(f"{float(weights @ values / weights.sum()):.5g}"))
    colours = found.pop("colours")
    steps = len(SHADES) - 1
    shades = SHADES if result.mode == "max" else SHADES[::-1]
    return {
        "type": "bar",
        **found,
        "customdata": colours,
        "hovertemplate": f"about %{{customdata:.5g}}<extra>{short_label(result.metric)}</extra>",
        "marker": {
            "color": colours,
            "colorscale": [[at / steps, shade] for at, shade in enumerate(shades)],
            "cmin": low,
            "cmax": high,
            "opacity": 0.8,
            "showscale": True,
            "colorbar": {"thickness": 12, "len": 0.9, "outlinewidth": 0, "title": {"text": short_label(result.metric)}},
            "line": {"width": 0},
        },
    }


def _dots(
    result: Result, compared: Comparable, known: Sequence[int], xs: Places, ys: Places, across: Axis, up: Axis
) -> Iterator[Figure]:
    every = list(zip(known, xs, ys, strict=True))
    step = math.ceil(len(every) / _MOST_DOTS)
    best = result.best.trial if result.best is not None else None
    starred = [point for point in every if compared.trials[point[0]].trial == best]
    for name, points in (("trials", every[::step]), ("best", starred)):
        shape: Figure = {"size": 13, "symbol": "star", "color": _BEST_COLOUR} if name == "best" else {"size": 5}
        trials = [compared.trials[at] for at, _, _ in points]
        yield {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": [round(float(x), 4) for _, x, _ in points],
            "y": [round(float(y), 4) for _, _, y in points],
            "customdata": [
                [trial.trial, number(compared.values[at]), _value_text(trial, across.name), _value_text(trial, up.name)]
                for trial, (at, _, _) in zip(trials, points, strict=True)
            ],
            "hovertemplate": f"trial %{{customdata[0]}}: %{{customdata[1]}}<br>{short_label(across.name)} "
            f"%{{customdata[2]}}<br>{short_label(up.name)} %{{customdata[3]}}<extra></extra>",
            "marker": {"color": "#15191e", "opacity": 1.0 if name == "best" else 0.75, **shape}
            | {"line": {"width": 1, "color": "#fff"}},
        }


def contours(result: Result, space: Space = None) -> Figure | None:
    """Return the contour with a menu of all pairs of the first four parameters, for a page without a service."""
    pairs = list(itertools.combinations(contour_names(result)[:4], 2))
    figures = [figure for x, y in pairs if (figure := contour(result, space, x=x, y=y)) is not None]
    if len(figures) < 2:
        return figures[0] if figures else None
    first = figures[0]
    buttons = [
        {
            "label": f"{short_label(x)} and {short_label(y)}",
            "method": "update",
            "args": [_changes(figure["data"]), _other_axes(figure["layout"])],
        }
        for (x, y), figure in zip(pairs, figures, strict=True)
    ]
    menu = {"type": "dropdown", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "buttons": buttons}
    margin = first["layout"]["margin"] | {"t": 50}
    return {"data": first["data"], "layout": first["layout"] | {"updatemenus": [menu], "margin": margin}}


def _other_axes(layout: Figure) -> Figure:
    changed = {f"{axis}.{key}": layout[axis][key] for axis in ("xaxis", "yaxis") for key in ("tickvals", "ticktext")}
    return changed | {f"{axis}.title.text": layout[axis]["title"]["text"] for axis in ("xaxis", "yaxis")}


def _changes(traces: Sequence[Figure]) -> Figure:
    keys = ("x", "y", "base", "width", "customdata", "hovertemplate")
    return {key: [trace.get(key) for trace in traces] for key in keys} | {
        "marker.color": [trace["marker"]["color"] for trace in traces]
    }


FEWEST, MOST = 8, 300
"""Trials. The time grows with the square of their number: some seconds for the largest."""
_MOST_PARAMETERS = 30
IMPORTANCE_NOTE = (
    "Share of the metric's variance that each parameter explains alone (fANOVA); the rest are interactions and noise."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTrials:
    """Compared trials: the values of each parameter, and the metrics."""

    metrics: list[float]
    values: dict[str, list[Any]]
    """Parameter -> value of each trial; categories as text."""
    kinds: dict[str, str]
    """Parameter -> linear, log or category."""
    note: str


def question_of(result: Result, space: Space = None) -> ComparedTrials | str:
    """Return the trials to compare; or, in a sentence, why none are compared; empty for a rehearsal."""
    if not all(find_spec(name) for name in ("optuna", "sklearn")):
        return f"The importance of parameters needs Optuna and scikit-learn: {install_hint('optuna')}"
    if result.rehearsal:
        return ""
    compared = comparable(result)
    count = 0 if compared is None else len(compared.trials)
    if compared is None or count < FEWEST:
        found = f"; {count} have one" if count else ""
        return f"The importance of parameters needs {FEWEST} trials with a metric after equal iterations{found}."
    if min(compared.values) == max(compared.values):
        return "All compared trials have the same metric, so no parameter explains it."
    step = math.ceil(count / MOST)
    trials, metrics = compared.trials[::step], list(compared.values[::step])
    varying = [name for name, varies in parameters(trials).items() if varies][:_MOST_PARAMETERS]
    partial = [name for name in varying if any(name not in trial.configuration for trial in trials)]
    names = [name for name in varying if name not in partial]
    if not names:
        return "No parameter that all compared trials have differs between them."
    kinds: dict[str, str] = {axis.name: axis.kind for axis in axes_of(names, result.trials, space)}
    values = {name: [trial.configuration[name] for trial in trials] for name in names}
    values |= {name: [*map(canonical, values[name])] for name, kind in kinds.items() if kind == "category"}
    notes = [IMPORTANCE_NOTE, compared.sentence(result)]
    notes += [f"{len(trials)} of these are used, chosen evenly."] if step > 1 else []
    notes += [f"Left out, as not all of them have it: {listed(map(printable, partial))}."] if partial else []
    return ComparedTrials(metrics=metrics, values=values, kinds=kinds, note=" ".join(notes))


def importances(question: ComparedTrials) -> dict[str, float]:
    """Return parameter -> share of the variance, the largest first. Imports Optuna."""
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
    from optuna.importance import FanovaImportanceEvaluator

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    distributions: dict[str, BaseDistribution] = {}
    for name, values in question.values.items():
        if question.kinds[name] == "category":
            distributions[name] = CategoricalDistribution(sorted(set(values)))
        else:
            distributions[name] = FloatDistribution(min(values), max(values), log=question.kinds[name] == "log")
    study = optuna.create_study()
    for at, metric in enumerate(question.metrics):
        params = {name: values[at] for name, values in question.values.items()}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=metric))
    shares = FanovaImportanceEvaluator(seed=0).evaluate(study)
    return {name: float(share) for name, share in sorted(shares.items(), key=lambda item: -item[1])}


def importance_chart(shares: Mapping[str, float], note: str) -> Figure:
    """Return bars of the shares, the largest on top."""
    order = list(shares.items())[::-1]
    layout = {
        "height": 80 + 26 * len(order),
        "showlegend": False,
        "bargap": 0.35,
        "margin": {"l": 10, "r": 10, "t": 10, "b": 40},
        "xaxis": {"title": {"text": "share of the variance"}, "tickformat": ".0%", "range": [0, 1]},
        "yaxis": {"type": "category", "showgrid": False},
        "meta": {"note": note},
    }
    bars = {
        "type": "bar",
        "orientation": "h",
        "y": [short_label(name, 30) for name, _ in order],
        "x": [round(share, 4) for _, share in order],
        "text": [f"{100 * share:.0f} %" for _, share in order],
        "textposition": "outside",
        "cliponaxis": False,
        "hoverinfo": "none",
        "marker": {"color": "#3b82c4"},
    }
    return {"data": [bars], "layout": layout}


def importance(result: Result, space: Space = None) -> Figure | str:
    """Return the chart, computed in this process; or, in a sentence, why there is none."""
    question = question_of(result, space)
    return question if isinstance(question, str) else importance_chart(importances(question), question.note)


def to_json(question: ComparedTrials) -> str:
    """Return a question for the command."""
    return json.dumps(asdict(question), allow_nan=False)


def main() -> None:
    """Answer the question on the standard input."""
    print(json.dumps(importances(ComparedTrials(**json.load(sys.stdin)))))


if __name__ == "__main__":
    main()
