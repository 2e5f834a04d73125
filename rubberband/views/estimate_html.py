"""An estimate as one page that needs no network: headline figures, charts and tables, as the report's page has them."""

from __future__ import annotations

import html
from collections.abc import Sequence

from rubberband.planner.estimate import Estimate
from rubberband.units import format_duration, format_usd
from rubberband.views.estimate_charts import figures
from rubberband.views.estimate_tables import fixed_cluster, percent
from rubberband.views.report_html import card, chart_section, page, table_section
from rubberband.views.tables import TextTable
from rubberband.views.words import difference, printable

_ALLOCATION = "Instances asked for or held at every moment of the plan, at its expected times; hover for a stage."
_FRONTIER = (
    "The lowest cost at which the job is done by each deadline: with instances that change from stage to stage, and "
    "with a cluster of a fixed size."
)
_TIMES = "Time that the plan takes, over all samples."
_COSTS = "Cost of the plan, over all samples."


def render_estimate(answer: Estimate, lines: Sequence[str], tables: Sequence[TextTable]) -> str:
    """The whole page, from the headlines and tables that a terminal shows."""
    drawn = dict(figures(answer))
    stages, rest = (
        [table for table in tables if "Stages" in table.title],
        [t for t in tables if "Stages" not in t.title],
    )
    body = "\n".join(
        [
            _header(answer, lines),
            chart_section("allocation", "Instances over time", _ALLOCATION, drawn),
            *(table_section(table) for table in stages),
            chart_section("frontier", "Cost against deadline", _FRONTIER, drawn),
            _certain(answer),
            chart_section("times", "Distribution of the time", _TIMES, drawn),
            chart_section("costs", "Distribution of the cost", _COSTS, drawn),
            *(table_section(table) for table in rest),
        ]
    )
    return page(f"{answer.experiment_name} - RubberBand estimate", body, drawn)


def _certain(answer: Estimate) -> str:
    """In place of distributions, where nothing varies."""
    if answer.job is None or answer.job.odds is not None:
        return ""
    prediction = answer.job.prediction
    takes = f"{format_duration(prediction.jct_s)} and costs {format_usd(prediction.cost_usd)}"
    return (
        "<section><h2>How time and cost vary</h2>"
        f'<p class="note">The estimate assumes that nothing varies: every run takes {takes}. Give trial_cv, '
        "iteration_cv or startup_cv in the profile, or delays with a cv, to see distributions.</p></section>"
    )


def _header(answer: Estimate, lines: Sequence[str]) -> str:
    badge, kind = ("within the limits", "done") if answer.feasible else ("not within the limits", "failed")
    told = "".join(
        f'<p class="answer">{html.escape(printable(line).removeprefix(f"{answer.experiment_name}: "))}</p>'
        for line in lines
    )
    return (
        f'<header><h1>{html.escape(answer.experiment_name)} <span class="badge {kind}">{badge}</span></h1>\n'
        f'{told}\n<div class="cards">{"".join(_cards(answer))}</div></header>'
    )


def _cards(answer: Estimate) -> list[str]:
    if answer.job is None:
        assert answer.nearest is not None, "an infeasible answer has a nearest plan"
        return [
            card("shortest time", format_duration(answer.nearest.jct_s), "of any plan"),
            card("lowest cost", format_usd(answer.nearest.cost_usd), "of any plan"),
        ]
    prediction, limits, odds = answer.job.prediction, answer.constraints, answer.job.odds
    time_note = "no deadline" if limits.deadline_s is None else f"deadline {format_duration(limits.deadline_s)}"
    cost_note = "no budget" if limits.max_cost_usd is None else f"budget {format_usd(limits.max_cost_usd)}"
    if prediction.jct is not None and prediction.cost is not None:
        time_note = f"p95 {format_duration(prediction.jct.p95)}; {time_note}"
        cost_note = f"p95 {format_usd(prediction.cost.p95)}; {cost_note}"
    cards = [
        card("expected time", format_duration(prediction.jct_s), time_note),
        card("expected cost", format_usd(prediction.cost_usd), cost_note),
    ]
    if odds is not None:
        cards.append(card("P(both limits kept)", percent(odds.p_both), f"{percent(limits.confidence)} asked"))
    fixed = fixed_cluster(answer)
    if fixed is not None and fixed is not answer.job:
        against = difference(prediction.cost_usd, fixed.prediction.cost_usd)
        cards.append(
            card("against the best fixed cluster", against, f"it costs {format_usd(fixed.prediction.cost_usd)}")
        )
    if answer.fixed_batch is not None:
        than = answer.fixed_batch.prediction
        took = f"it takes {format_duration(than.jct_s)} and {format_usd(than.cost_usd)}"
        cards.append(card("against a fixed batch", difference(prediction.cost_usd, than.cost_usd) or "0 %", took))
    return cards
