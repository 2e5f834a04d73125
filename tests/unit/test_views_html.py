"""The report's page: it needs no network, shows every kind of result, and nothing of the user's becomes markup."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
from html.parser import HTMLParser
from typing import Any

import pytest

from rubberband.views.charts.allocation import allocation
from rubberband.views.charts.learning import learning_curves
from rubberband.views.report import page as report_html
from rubberband.views.report.page import render_html, script_json
from rubberband.views.report.text import tables
from tests.builders.results import EVERY_RESULT, a_result, cut_short, hostile
from tests.builders.special_results import SPECIAL_RESULTS

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
