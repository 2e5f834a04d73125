"""The report as text and as a page: figures add up, failures are named, and nothing of the user's becomes markup."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import html
import json
import re
import sys
from collections.abc import Container, Sequence
from datetime import datetime
from html.parser import HTMLParser
from io import StringIO
from itertools import chain
from typing import Any

import pytest

from rubberband.executor import Result
from rubberband.states import ExperimentState
from rubberband.units import duration, parse_duration
from rubberband.values.submission import Submission
from rubberband.views import formatting
from rubberband.views.charts.allocation import allocation
from rubberband.views.charts.learning import learning_curves
from rubberband.views.document import print_document
from rubberband.views.experiment import costs
from rubberband.views.formatting import ranked
from rubberband.views.report import page as report_html
from rubberband.views.report.headlines import headlines
from rubberband.views.report.page import render_html, script_json
from rubberband.views.report.tables import failures, paid_time, stages
from rubberband.views.report.text import tables
from rubberband.views.report.waits import waits
from tests.builders.jobs import JOB
from tests.builders.results import EVERY_RESULT, FAULTS, a_result, cut_short, hostile, render
from tests.builders.special_results import SPECIAL_RESULTS
from tests.builders.tables import cases


def money(cells: list[str]) -> float:
    return sum(float(cell) for cell in cells if cell)


@pytest.fixture(params=[*EVERY_RESULT, *SPECIAL_RESULTS])
def any_result(request: pytest.FixtureRequest) -> Result:
    return (EVERY_RESULT | SPECIAL_RESULTS)[request.param]()


def test_stage_rows_add_up_to_the_total_and_the_total_is_the_bill(any_result: Result) -> None:
    table = stages(any_result)
    assert table.total is not None
    rows, total = table.rows, table.total
    decimals = formatting.usd_decimals(max(any_result.actual_cost_usd, any_result.planned_cost_usd))
    for column, whole_usd in ((7, any_result.planned_cost_usd), (8, any_result.actual_cost_usd)):
        assert money([row[column] for row in rows]) == pytest.approx(money([total[column]]))
        assert total[column] in ("", formatting.usd(whole_usd, decimals))


def test_paid_time_adds_up(any_result: Result) -> None:
    if any_result.paid.total_gpu_s == 0:
        assert not paid_time(any_result).rows
        return
    table = paid_time(any_result)
    assert table.total is not None
    rows, total = table.rows, table.total
    for column in (1, 2, 3):
        parts = [row[column].replace(",", "") for row in rows]
        assert money(parts) == pytest.approx(money([total[column].replace(",", "")]))
    assert total[2] == "100.0"
    assert float(total[3]) == pytest.approx(any_result.actual_cost_usd, abs=1e-4)


def with_failed(result: Result, why: str, trials: Container[int], **configuration: object) -> Result:
    """The result with trials that failed, each with its number as `shift`, less 4, and more of a configuration."""
    return dataclasses.replace(
        result,
        trials=tuple(
            dataclasses.replace(
                trial,
                iterations=1,
                configuration={"lr": 0.1, "shift": trial.trial - 4, **configuration},
                **({"status": "failed", "failure": why} if trial.trial in trials else {"status": "completed"}),
            )
            for trial in result.trials[:8]
        ),
    )


OF_PARSER = (
    "raised: train.py: error: argument --shift: expected one argument (python train.py --shift ${shift} ended with "
    "exit code 2 after 0.1 s on i-001)"
)


@pytest.mark.parametrize(
    ("trials", "line"),
    [
        (range(4), "4 of 8 trials failed: argument --shift: expected one argument (shift < 0)"),
        (range(5, 8), "3 of 8 trials failed: argument --shift: expected one argument (shift > 0)"),
        ((1, 3, 5), "3 of 8 trials failed: argument --shift: expected one argument"),
        ((7,), "deadline 20m met"),
    ],
)
def test_trials_that_failed_alike_are_the_second_line_and_on_the_page(trials: Sequence[int], line: str) -> None:
    result = with_failed(a_result(), OF_PARSER, trials)
    assert headlines(result)[1].startswith(line)
    assert len(trials) == 1 or f'<p class="answer">{html.escape(line)}</p>' in render_html(result)


def test_the_reason_of_a_failed_run_is_not_repeated() -> None:
    result = with_failed(a_result(), OF_PARSER, range(8))
    ended = dataclasses.replace(result, outcome="failed", reason="every trial of stage 0 failed; the first one raised")
    assert not any("of 8 trials failed" in line for line in headlines(ended))


def test_some_of_the_failed_trials_may_have_failed_alike() -> None:
    result = with_failed(a_result(), "raised: ValueError: heads", (1, 2))
    trials = (dataclasses.replace(result.trials[0], status="failed", failure="died"), *result.trials[1:])
    line = "3 of 8 trials failed, 2 of them alike: ValueError: heads"
    assert headlines(dataclasses.replace(result, trials=trials))[1] == line


def test_failures_that_differ_in_numbers_are_one_row_of_the_table_and_of_the_text() -> None:
    result = a_result(faults=FAULTS)
    causes = {2: "raised: ValueError: size 31 > 8", 7: "raised: ValueError: size 6 > 8", 9: "died"}
    failed = tuple(
        dataclasses.replace(trial, status="failed", failures=1, failure=causes[trial.trial], iterations=trial.trial)
        if trial.trial in causes
        else trial
        for trial in result.trials
    )
    result = dataclasses.replace(result, trials=failed)
    assert failures(result).rows == (
        ("raised", "2", "2", "2", "2 to 7", "ValueError: size … > …", "lr=0.0333333 n=2"),
        ("died", "1", "9", "1", "9", "", "lr=0.01 n=9"),
    )
    assert "ValueError: size … > …" in render(result)


def test_with_a_metric_to_minimise_the_lowest_comes_first() -> None:
    result = dataclasses.replace(a_result(), mode="min", best=None)
    values = [trial.metrics["score"] for trial in ranked(result)]
    assert values == sorted(values)


def test_the_cost_of_profiling_is_in_the_bill() -> None:
    result = dataclasses.replace(a_result(), profiling_s=31.0, profiling_cost_usd=0.0123)
    message = costs(Submission(name="one", state=ExperimentState.DONE, created_at=0.0, changed_at=0.0), result)
    assert message["cost_usd"] == pytest.approx(sum(line["usd"] for line in message["bill"]))
    assert message["cost_usd"] == result.whole_cost_usd == pytest.approx(result.actual_cost_usd + 0.0123)


def test_text_from_a_user_cannot_steer_the_terminal() -> None:
    result = a_result(JOB, note="\x1b[2J\nfake line", tags=["[bold]", "\x07"])
    assert "\x1b" not in render(result)
    assert "\x07" not in render(result)
    assert not any(line.startswith("fake") for line in render(result).splitlines())


@cases("amount_usd", "text")
def test_small_bills_keep_their_digits(amount_usd: float, text: str) -> None:
    assert formatting.usd(amount_usd) == text


@cases("actual", "planned", "text")
def test_differences_are_in_percent(actual: float, planned: float, text: str) -> None:
    assert formatting.difference(actual, planned) == text


def test_a_terminal_obeys_no_output_of_a_trial_but_its_colours() -> None:
    hostile = "\x1b[31mred\x1b[0m\tx\x1b]0;title\x07 \x1b[2J\x9b2J \u202egnp.exe\u2066 \U0001f469\u200d\U0001f52c"
    shown = formatting.harmless(hostile)
    assert shown == "\x1b[31mred\x1b[0m\tx ]0;title   [2J 2J  gnp.exe  \U0001f469\u200d\U0001f52c"
    assert formatting.harmless("epoch 3: 10 %\repoch 3: 50 %") == "epoch 3: 50 %"


def test_a_line_that_wraps_is_indented_below_its_text() -> None:
    folded = formatting.hanging("time      13s of 30m (deadline); ends 02:21 (in 36s)", 40).splitlines()
    assert folded == ["time      13s of 30m (deadline); ends", "          02:21 (in 36s)"]
    assert formatting.hanging("digits: done in 13s for 0.20 USD", 20).splitlines()[1].startswith("  ")


@pytest.mark.parametrize(("left_s", "day"), [(60.0, ""), (90000.0, "Jan 3 "), (31 * 86400.0, "Feb 2 ")])
def test_an_end_is_an_instant_and_the_time_until_then(left_s: float, day: str) -> None:
    now = datetime(1970, 1, 2, 10).timestamp()
    hour = {60.0: "10:01", 90000.0: "11:00"}.get(left_s, "10:00")
    assert formatting.ends(now + left_s, left_s) == f"ends {day}{hour} (in {formatting.duration(left_s)})"
    assert formatting.ends(None, left_s) == f"ends in {formatting.duration(left_s)}"


@pytest.mark.parametrize("width", [40, 60, 72, 80, 95])
def test_a_folded_table_loses_no_column_and_cuts_no_figure(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    table = stages(a_result())
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys, "stdout", output := StringIO())
    monkeypatch.setattr(output, "isatty", lambda: True)
    print_document([], [table], [])
    printed = re.sub(r"\x1b\[[0-9;]*m", "", output.getvalue())
    assert max(map(len, printed.splitlines())) <= width
    words = printed.split()
    assert {word for name in table.header for word in name.split()} <= set(words)
    cells = chain.from_iterable([*table.rows, *([table.total] if table.total else [])])
    assert {word for cell in cells for word in cell.split()} <= set(words)
    assert "\u2026" not in printed


@pytest.mark.parametrize(
    ("left", "day"), [("4m16s", ""), ("16h42m", ""), ("16h43m", "Mar 14 "), ("28d", "Mar 14 "), ("365d", "Mar 14 ")]
)
def test_an_end_on_another_day_has_its_day(left: str, day: str) -> None:
    at = datetime(2026, 3, 14, 16, 42).timestamp()
    assert formatting.ends(at, parse_duration(left)) == f"ends {day}16:42 (in {left})"


CHART_ORDER = ["curves", "spend", "allocation", "batches", "parallel", "slices", "contour", "batches-by-gpus"]


class Page(HTMLParser):
    """What a browser would make of the page: tags with attributes, and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts[-1] += data
        else:
            self.text += data


@pytest.fixture(autouse=True)
def _small_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte less to parse in every test."""
    monkeypatch.setattr(report_html, "PLOTLY", "report.js")


@pytest.mark.parametrize("which", [*EVERY_RESULT, *SPECIAL_RESULTS])
def test_any_result_is_a_page_with_all_its_tables(which: str) -> None:
    result = (EVERY_RESULT | SPECIAL_RESULTS)[which]()
    page = Page(render_html(result))
    figures = json.loads(next(script for script in page.scripts if script.startswith("{")))
    charts = [attrs["id"] for tag, attrs in page.tags if tag == "div" and attrs.get("class") == "chart"]
    assert charts == sorted(charts, key=CHART_ORDER.index)
    assert set(charts) == set(figures)
    for table in tables(result):
        assert not table.rows or table.title in page.text
    assert "Stages, planned and actual" in page.text
    assert f"Trials, best first: {len(result.trials)}" in page.text


def test_the_page_asks_nothing_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    text = render_html(a_result())
    assert 400_000 < len(text) < 700_000, "plotly is in the page, compressed, and only what charts need of it"
    page = Page(text)
    packed = max(page.scripts, key=len)
    assert "Plotly" in gzip.decompress(base64.b64decode(packed)).decode()
    assert not [attrs for _, attrs in page.tags if "src" in attrs or "href" in attrs]
    assert not [tag for tag, _ in page.tags if tag in ("link", "img", "iframe", "base", "object")]
    assert "@import" not in text
    assert "default-src 'none'" in text


def test_a_report_of_ten_thousand_trials_has_the_best_and_stays_small() -> None:
    one = a_result()
    trials = tuple(dataclasses.replace(one.trials[n % 12], trial=n) for n in range(10_000))
    text = render_html(dataclasses.replace(one, trials=trials, best=trials[0]))
    assert len(text) < 950_000, "with plotly it is less than 1.5 MB"
    assert "Trials, best first: 200 of 10,000" in text
    assert "9800 more trials not shown; `rubberband export digits` has all." in text


def test_nothing_of_the_user_s_becomes_markup() -> None:
    harmless, page = Page(render_html(a_result())), Page(render_html(hostile()))
    assert len(page.scripts) == len(harmless.scripts)
    assert all("alert" not in script for script in page.scripts if not script.startswith("{"))
    assert "<script>alert(1)</script>" in page.text, "shown as it was written"


def test_json_cannot_leave_its_script() -> None:
    value: dict[str, Any] = {"a": "</script><!-- &amp;"}
    assert "<" not in script_json(value)
    assert json.loads(script_json(value)) == value
    with pytest.raises(ValueError, match="JSON"):
        script_json(float("nan"))


def test_text_in_charts_is_escaped() -> None:
    text = json.dumps([learning_curves(hostile()), allocation(hostile())])
    assert "<script" not in text


def test_instances_that_follow_each_other_are_counted_in_whole_numbers() -> None:
    """As on the spot market, where one replaces the other: few are held at once."""
    result = a_result()
    first, *_ = [one for one in result.instances if one.running_s is not None]
    in_turn = tuple(
        dataclasses.replace(first, instance=f"i-{n}", requested_s=60.0 * n, running_s=60.0 * n, ended_s=60.0 * n + 60)
        for n in range(9)
    )
    figure = allocation(dataclasses.replace(result, instances=in_turn, busy=()))
    assert figure is not None
    assert figure["layout"]["yaxis2"]["dtick"] == 1


def test_before_the_first_event_s_consequences_there_is_no_curve() -> None:
    assert learning_curves(cut_short(1, cancel=False)) is None


def test_waits_are_shown_by_cause_before_the_run_and_before_each_stage() -> None:
    assert not waits(a_result()).rows, "a run that noted none"
    result = dataclasses.replace(a_result(), waited_s={"check": 6.25, "imports": 0.75, "plan": 0.001})
    rows = waits(result).rows
    assert rows[0] == ("before the run", "7s", "check 6.25s, imports 0.75s")
    assert [row[0] for row in rows[1:]] == [stage.title for stage in result.stages]
    first = min(each.training_s for each in result.busy if each.stage == 0 and each.training_s is not None)
    assert rows[1][1] == duration(first)
    assert "instances" in rows[1][2]
    assert waits(result) in tables(result)
