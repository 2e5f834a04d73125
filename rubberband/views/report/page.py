"""Report as one page that needs no network: headline figures, charts and tables, in light or dark colours.

plotly is in it compressed, and figures are rounded, so that a report of many trials is small enough to be mailed.

Values of the user never become markup: text is escaped, and figures are JSON in which no tag can end.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from types import NoneType
from typing import Any

from rubberband import views
from rubberband.executor.core.forecast import Forecast
from rubberband.executor.result.result import Result
from rubberband.features import made_by
from rubberband.states import REHEARSAL
from rubberband.units import in_unit
from rubberband.views.charts.allocation import ALLOCATION_NOTE, allocation, allocation_px
from rubberband.views.charts.learning import CURVES_NOTE, CURVES_PX, PARETO_NOTE, learning_curves, trade_off
from rubberband.views.charts.parallel_coordinates import PARALLEL_NOTE, Space, parallel_coordinates, parameters
from rubberband.views.charts.parts import Figure
from rubberband.views.charts.search import (
    CONTOUR_NOTE,
    IMPORTANCE_NOTE,
    SLICES_NOTE,
    contour_names,
    contours,
    slices,
    slices_px,
)
from rubberband.views.charts.spending import SPEND_NOTE, spend
from rubberband.views.formatting import Card, TextTable, best_card, bill, cost_card, finite, time_card, timed
from rubberband.views.report.headlines import failed_alike, outcome, schedule, tells_start_failures
from rubberband.views.report.tables import (
    batch_sizes,
    comparison,
    decisions,
    exchanges,
    failures,
    incidents,
    paid_card,
    paid_parts,
    paid_time,
    pareto,
    purchases,
    stages,
    trials,
    updates,
    workers,
    worths,
)

PLOTLY = "plotly-basic.min.js"
"""Basic bundle of plotly.js (lines and bars), from npm's plotly.js-basic-dist-min.

Its first line is ours: browsers that know it compile the script beside the page, which then starts it in 30 ms of CPU
time instead of 200.
"""
DENSE = "charts_dense.js"
"""Script for charts of very many trials, of the report and of the service's pages."""
NARROW = "charts_narrow.js"
"""Script for charts on a phone, of both."""
MOST_TRIALS = 200
"""Limit of trials in the tables of the page, as a row takes 250 bytes; `rubberband export` has all."""
CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"


_BATCHES = (
    "Each line is a trial, coloured as its learning curve; gaps are waits for the next stage. Efficiency: how much a "
    "sample counts, against one at the initial batch size. Noise scale: the larger, the larger a batch pays off. "
    "Dotted lines are the ends of stages."
)
CHARTS = {
    "curves": ("Learning curves", CURVES_NOTE),
    "spend": ("Spend", SPEND_NOTE),
    "allocation": ("Instances and GPUs", ALLOCATION_NOTE),
    "batches": ("Batch sizes", _BATCHES),
    "parallel": ("Configurations", PARALLEL_NOTE),
    "importance": ("Importance of parameters", IMPORTANCE_NOTE),
    "trade-off": ("Trade-off between metrics", PARETO_NOTE),
    "slices": ("Metric by parameter", SLICES_NOTE),
    "contour": ("Metric by two parameters", CONTOUR_NOTE),
}
"""Charts of a result, in their order: name -> title and note."""
OF_CONFIGURATIONS = frozenset({"parallel", "importance", "trade-off", "slices", "contour"})
"""Charts that compare the metrics of configurations: the latest ones, or those after equal iterations."""


def result_charts(result: Result, space: Space = None) -> dict[str, Figure]:
    """Return the charts that have something to show, but for those that take long or have a service to ask:
    `importance` and `contour`."""
    drawn = {name: draw() for name, draw in result_drawings(result, space).items()}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def result_drawings(
    result: Result, space: Space = None, forecast: Forecast | None = None
) -> dict[str, Callable[[], Figure | None]]:
    """Return the functions that draw the charts of `result_charts`, each by itself. `forecast`: see `spend`."""
    return {
        "curves": lambda: learning_curves(result),
        "spend": lambda: spend(result, forecast),
        "allocation": lambda: allocation(result),
        "batches": lambda: made_by("batches over time", result),
        "parallel": lambda: parallel_coordinates(result, space),
        "trade-off": lambda: trade_off(result),
        "slices": lambda: slices(result, space),
    }


def charts_to_expect(result: Result) -> dict[str, int]:
    """Return the names of the charts that have something to show, and their heights in pixels, without drawing them.

    One may turn out to be empty.
    """
    measured = [trial for trial in result.trials if finite(trial.metrics.get(result.metric)) is not None]
    varying = sum(parameters(measured).values()) if len(measured) >= 2 else 0
    heights_px = {
        "curves": CURVES_PX if any(trial.curve for trial in result.trials) else 0,
        "spend": 340 if result.instances else 0,
        "allocation": allocation_px(result),
        "batches": 800 if any(trial.batches for trial in result.trials) else 0,
        "parallel": 400 if varying else 0,
        "importance": 80 + 26 * varying if varying else 0,
        "trade-off": 380 if result.also and len(measured) >= 2 else 0,
        "slices": slices_px(varying),
        "contour": 440 if varying and len(contour_names(result)) >= 2 else 0,
    }
    return {name: height_px for name, height_px in heights_px.items() if height_px}


def charts_of(result: Result, charts: Mapping[str, tuple[str, str]] = CHARTS) -> dict[str, tuple[str, str]]:
    """Return titles and notes of the charts that a result may have, with its word for a GPU."""
    return {
        name: (title.replace("GPU", result.place), note.replace("GPU", result.place))
        for name, (title, note) in charts.items()
        if not (result.rehearsal and name in OF_CONFIGURATIONS | {"curves"})
    }


def render_html(
    result: Result, importance: Figure | str = "", trials_at: str = "", space: Space = None, frame: str = ""
) -> str:
    """Return the page; `importance` is the chart of the parameters' importance, or why there is none.

    `frame` is markup above it, of the site that it is part of. `trials_at` is the address of the trials' pages, to
    which their numbers and points lead; empty: there are none. The axes of parameters are logarithmic where the `space`
    says so; without it, where values span decades.
    """
    result = result.shown
    shares, reason = (None, importance) if isinstance(importance, str) else (importance, "")
    by_gpus = made_by("batches by GPUs", result)
    is_modelled = by_gpus is not None and any(trace["mode"] == "lines" for trace in by_gpus["data"])
    more = {"importance": shares, "contour": contours(result, space), "batches-by-gpus": by_gpus}
    drawn = result_charts(result, space) | {name: figure for name, figure in more.items() if figure is not None}
    by_gpus_section = "Batch sizes by GPUs and stage", _BY_GPUS + _BY_MODEL * is_modelled
    body = "\n".join(
        [
            _header(result),
            _best(result, trials_at),
            STRIP,
            *(chart_section(name, *titled, drawn) for name, titled in charts_of(result).items()),
            chart_section("batches-by-gpus", *by_gpus_section, drawn),
            STRIP_END,
            f'<p class="note">{html.escape(reason)}</p>' if reason else "",
            table_section(batch_sizes(result, MOST_TRIALS), sortable=True, trials_at=trials_at),
            table_section(workers(result, MOST_TRIALS), sortable=True, trials_at=trials_at),
            table_section(updates(result, MOST_TRIALS), sortable=True, trials_at=trials_at),
            table_section(pareto(result, MOST_TRIALS), sortable=True, trials_at=trials_at),
            table_section(schedule(result), trials_at=trials_at),
            table_section(exchanges(result), trials_at=trials_at),
            table_section(comparison(result)),
            table_section(stages(result)),
            table_section(purchases(result)),
            table_section(bill(result.bill)),
            table_section(decisions(result)),
            table_section(worths(result)),
            _paid(result),
            table_section(failures(result), trials_at=trials_at),
            table_section(incidents(result)),
            table_section(trials(result, MOST_TRIALS), sortable=True, trials_at=trials_at),
        ]
    )
    return in_unit(page(f"{result.name} - RubberBand report", body, drawn, trials_at, frame), result.unit)


STRIP, STRIP_END = '<div class="charts">', "</div>"
"""Around charts that lie side by side on a phone."""
_BY_GPUS = (
    "Batch sizes of the trials in each stage: the median, with bars from the smallest to the largest. Larger batches "
    "pay off where gradients are noisier, as later in training, and where more GPUs share them."
)
_BY_MODEL = " Dashed: the best batch by the profile's model, at the median noise scale of the stage's trials."


def page(title: str, body: str, figures: Mapping[str, Any], trials_at: str = "", frame: str = "") -> str:
    """Return a page around `body`, with the script that draws the figures if there are any. The rest: see above."""
    script = f'<script type="text/plain" id="plotly">{_packed(PLOTLY)}</script>' if figures else ""
    data = f'<script type="application/json" id="figures">{script_json(short(figures))}</script>'
    led = f' data-trials="{html.escape(trials_at)}"' if trials_at else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">
<title>{html.escape(title)}</title>
<style>{asset("report.css")}</style>
{script}
</head>
<body>
{frame}<main{led}>
{body}
</main>
{data}
<script type="module">{asset(DENSE)}{asset(NARROW)}{asset("report.js")}</script>
</body>
</html>
"""


def asset(name: str) -> str:
    """Return a style or script of the pages."""
    return resources.files(views).joinpath(name).read_text(encoding="utf-8")


@lru_cache
def _packed(name: str) -> str:
    """Return a script compressed (gzip, base64)."""
    return base64.b64encode(gzip.compress(asset(name).encode(), mtime=0)).decode()


_WHOLE = (str, int, NoneType)


def short(value: Any) -> Any:
    """Return figures with numbers of six digits, which is finer than any screen."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {name: short(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [one if isinstance(one, _WHOLE) else short(one) for one in value]
    return value


def script_json(value: Any) -> str:
    """Return JSON for a script element: no tag or comment can begin in it. Raises ValueError on NaN."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _header(result: Result) -> str:
    best = () if result.rehearsal else (best_card(result),)
    cards = [*best, time_card(result), cost_card(result), paid_card(result)]
    kind = "late" if result.late and result.outcome == "done" else result.outcome
    badge = "done, after the deadline" if kind == "late" else result.outcome
    answers = [
        *([REHEARSAL.capitalize()] if result.rehearsal else []),
        outcome(result),
        *failed_alike(result),
        *([result.start_failures] if tells_start_failures(result) else []),
    ]
    badges = {kind: badge} | ({"rehearsal": "rehearsal"} if result.rehearsal else {})
    return page_header(result.name, badges, answers, cards)


def page_header(name: str, badges: Mapping[str, str], answers: Sequence[str], cards: Sequence[Card]) -> str:
    """Return the top of a page: name and badges (kind that the style knows -> text), lines of text, and cards."""
    shown = "".join(f' <span class="badge {kind}">{badge}</span>' for kind, badge in badges.items())
    lines = "".join(f'<p class="answer">{timed(line)}</p>\n' for line in answers)
    return (
        f"<header><h1>{html.escape(name)}{shown}</h1>\n"
        f'{lines}<div class="cards">{"".join(map(_card, cards))}</div></header>'
    )


def _card(card: Card) -> str:
    notes = "".join(f"<small>{timed(note)}</small>" for note in card.notes if note)
    kind = "card" if card.is_charged else "card free"
    return f'<div class="{kind}"><span>{html.escape(card.title)}</span><b>{html.escape(card.value)}</b>{notes}</div>'


def _best(result: Result, trials_at: str) -> str:
    best = result.best
    if best is None:
        return ""
    values = json.dumps(dict(best.configuration), indent=2, ensure_ascii=False, default=str)
    checkpoint = ""
    if best.checkpoint is not None:
        checkpoint = f'<p class="note">Checkpoint: <code>{html.escape(best.checkpoint.url)}</code></p>'
    trial = _linked(str(best.trial), trials_at)
    return f"<section><h2>Best configuration (trial {trial})</h2><pre>{html.escape(values)}</pre>{checkpoint}</section>"


def chart_section(name: str, title: str, note: str, drawn: Mapping[str, Any]) -> str:
    """Return a section for one of the figures in `drawn`; empty if it is not there."""
    if name not in drawn:
        return ""
    layout = drawn[name]["layout"]
    meta = layout.get("meta", {})
    least_px, note = meta.get("least_width_px", 0), html.escape(meta["note"]) if "note" in meta else note
    return (
        f'<section><h2>{title}</h2><p class="note">{note}</p>{_wide(title)}'
        f'<div class="chart" id="{name}" style="height:{layout["height"]}px;min-width:{least_px}px"></div>'
        "</div></section>"
    )


_FEW_ROWS = 2
"""Rows of more lie side by side on a phone."""


def table_section(table: TextTable, sortable: bool = False, trials_at: str = "") -> str:
    """Return a section with a table; empty if it has no rows. Trials lead to their pages, below `trials_at`."""
    if not table.rows:
        return ""
    head = "".join(
        f"<th{_kind(table, i)}>{html.escape(cell)}</th>" if cell else "<td></td>" for i, cell in enumerate(table.header)
    )
    rows = "".join(f"<tr>{_cells(table, row, trials_at)}</tr>" for row in table.rows)
    total = f"<tfoot><tr>{_cells(table, table.total)}</tr></tfoot>" if table.total else ""
    notes = "".join(f'<p class="note">{timed(note)}</p>' for note in table.notes)
    kind = ' class="sortable"' if sortable else ' class="aside"' if len(table.rows) > _FEW_ROWS else ""
    title = html.escape(table.title)
    return (
        f"<section><h2>{title}</h2>{_wide(title)}<table{kind}><thead><tr>{head}</tr></thead>"
        f"<tbody>{rows}</tbody>{total}</table></div>{notes}</section>"
    )


def _wide(title: str) -> str:
    """Return the begin of an element that scrolls sideways, which a keyboard reaches."""
    return f'<div class="wide" tabindex="0" role="region" aria-label="{title}">'


def _cells(table: TextTable, row: tuple[str, ...], trials_at: str = "") -> str:
    labelled = enumerate(zip(table.header, row, strict=True))
    return "".join(
        f'<td data-label="{html.escape(title)}"{_kind(table, i)}>'
        f"{_linked(cell, trials_at if title == 'trial' else '')}</td>"
        for i, (title, cell) in labelled
    )


def _linked(trial: str, trials_at: str) -> str:
    text = timed(trial)
    return f'<a href="{html.escape(trials_at)}/{text}">{text}</a>' if trials_at else text


def _kind(table: TextTable, column: int) -> str:
    return ' class="words"' if column in table.words else ""


def _paid(result: Result) -> str:
    """Return the table of the paid time, under a bar that shows it."""
    table = paid_time(result)
    if not table.rows:
        return ""
    parts = paid_parts(table)
    bar = "".join(
        f'<i class="part{index}" style="width:{percent}%" title="{name}: {percent} %"></i>'
        for index, (name, percent) in enumerate(parts)
    )
    key = "".join(
        f'<li><i class="part{index}"></i>{name} {percent} %</li>' for index, (name, percent) in enumerate(parts)
    )
    shown = f'<div class="paid">{bar}</div><ul class="key">{key}</ul>'
    return table_section(table).replace(begin := _wide(table.title), f"{shown}{begin}", 1)
