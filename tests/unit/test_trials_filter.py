"""Filters and columns of trials: what is written is what is shown, in the table and in the charts."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.api.dashboard.trials_filter import Condition, conditions
from rubberband.api.dashboard.trials_table import Asked, selected, table_page
from rubberband.errors import InputError
from rubberband.executor import Result
from rubberband.states import ExperimentState
from rubberband.values.submission import Summary
from rubberband.views.charts.parallel_coordinates import within
from rubberband.views.formatting import setting
from tests.builders.fake_runs import FakeService
from tests.builders.results import a_result

RESULT = a_result()
COLUMNS = dict.fromkeys(["loss", "lr", "status", "net/width"])
NUMBERS = st.floats(allow_nan=False, allow_infinity=False, width=32)
ORDERS = {"<": lambda a, b: a < b, "<=": lambda a, b: a <= b, ">": lambda a, b: a > b, ">=": lambda a, b: a >= b}


def passing(text: str) -> set[int]:
    page = table_page(RESULT, Asked(filter=text))
    assert page.problem == ""
    return {row.trial for row in page.rows}


def test_conditions_are_read_with_and_without_spaces() -> None:
    found = conditions("loss<0.2 lr > 1e-3  status=completed net/width != 64", COLUMNS)
    assert found == [
        Condition("loss", "<", "0.2"),
        Condition("lr", ">", "1e-3"),
        Condition("status", "=", "completed"),
        Condition("net/width", "!=", "64"),
    ]
    assert conditions("  ", COLUMNS) == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("loss", "'loss' is no condition; write NAME<0.2"),
        ("loss<", "is no condition"),
        ("<0.2", "is no condition"),
        ("loss=<3", "is no condition"),
        ("los<0.2", "'los' is no column; did you mean 'loss'"),
        ("status<completed", "'completed' is no number; compare words with = or !="),
    ],
)
def test_a_word_that_is_no_condition_is_named_in_a_line(text: str, why: str) -> None:
    with pytest.raises(InputError, match=why.replace("(", r"\(")) as refused:
        conditions(text, COLUMNS)
    assert "\n" not in str(refused.value)


@given(found=NUMBERS, limit=NUMBERS, sign=st.sampled_from(sorted(ORDERS)))
def test_numbers_are_compared_as_numbers(found: float, limit: float, sign: str) -> None:
    assert Condition("x", sign, repr(limit)).holds(found) == ORDERS[sign](found, limit)
    assert Condition("x", "=", repr(limit)).holds(found) == (found == limit or setting(found) == repr(limit))
    assert Condition("x", "!=", repr(limit)).holds(found) != Condition("x", "=", repr(limit)).holds(found)


@pytest.mark.parametrize("sign", ["<", "<=", ">", ">=", "=", "!="])
@pytest.mark.parametrize("missing", [None, math.nan])
def test_a_trial_without_a_value_does_not_pass(sign: str, missing: Any) -> None:
    assert not Condition("x", sign, "0").holds(missing)


@given(st.text(max_size=40))
def test_any_text_is_a_filter_or_refused(text: str) -> None:
    with suppress(InputError):
        assert all(condition.name in COLUMNS for condition in conditions(text, COLUMNS))


def test_the_table_has_the_trials_for_which_all_conditions_hold() -> None:
    metric = RESULT.metric
    assert passing("iterations>=3") == {one.trial for one in RESULT.trials if one.iterations >= 3}
    assert passing(f"{metric}>0.5 iterations<7") == {
        one.trial for one in RESULT.trials if one.metrics[metric] > 0.5 and one.iterations < 7
    }
    assert passing("status=winner") == {RESULT.best.trial if RESULT.best else -1}
    assert passing("status!=stopped") < {one.trial for one in RESULT.trials}
    assert passing("iterations>99") == set()


def test_a_faulty_filter_is_named_and_hides_nothing() -> None:
    page = table_page(RESULT, Asked(filter="nosuch>3"))
    assert "'nosuch' is no column" in page.problem
    assert len(page.rows) == len(RESULT.trials)


def test_columns_are_chosen_and_kept_in_addresses() -> None:
    usual = table_page(RESULT, Asked())
    keys = [key for key, *_ in usual.offered]
    assert all(shown and is_usual for _, _, shown, is_usual in usual.offered)
    page = table_page(RESULT, Asked(columns=(keys[-1], keys[0]), filter="iterations>=3"))
    assert [column.title for column in page.columns] == [usual.columns[0].title, usual.columns[1].title, "share (USD)"]
    assert all(len(row.cells) == 2 for row in page.rows)
    for address in (page.columns[1].address, page.choices[0].address):
        assert "columns=cost" in address
        assert "filter=iterations%3E%3D3" in address
    unknown = table_page(RESULT, Asked(columns=("no such",))).columns
    assert [column.title for column in unknown] == [column.title for column in usual.columns]
    wide = [column for column in page.offered if column[0].startswith(".")]
    assert wide, "parameters can be chosen"


def test_charts_have_the_trials_that_the_table_has() -> None:
    chosen = selected(RESULT, Asked(filter="iterations>=3", status="stopped"))
    ours = {one.trial for one in chosen.trials if one.metrics}
    assert ours == {row.trial for row in table_page(RESULT, Asked(filter="iterations>=3", status="stopped")).rows}
    assert chosen.best is None, "the winner is left out"
    assert selected(RESULT, Asked()) is RESULT


def test_a_page_and_its_charts_are_filtered_by_their_address(service: FakeService) -> None:
    service.add("one", state=ExperimentState.DONE, summary=Summary(started_at=1000.0, stages=3))
    service.runs.results["one"] = RESULT
    few = "filter=iterations%3E%3D3"
    for chart, words in (("figures/curves", few), ("figures/parallel", f"{few}&after=1"), ("contour", few)):
        whole, found = (service.client.get(f"/experiments/one/{chart}?{asked}").json() for asked in ("", words))
        assert found != whole
    html = service.client.get("/experiments/one?filter=nosuch%3E3", headers={"Accept": "text/html"}).text
    assert 'id="filter-problem"' in html
    assert "&#39;nosuch&#39; is no column" in html


VALUES = (None, "adam w", True, [64, 64], 0.001234567891, "a=b")


def configured(result: Result, values: Any, name: str) -> Result:
    return replace(
        result,
        trials=tuple(replace(one, configuration={name: values[one.trial % len(values)]}) for one in result.trials),
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('"weight decay"=null', None),
        ('"weight decay" = "adam w"', "adam w"),
        ('"weight decay"=True', True),
        ('"weight decay"=true', True),
        ('"weight decay"="[64, 64]"', [64, 64]),
        ('"weight decay"=0.00123457', 0.001234567891),
        ('"weight decay"="a=b"', "a=b"),
    ],
)
def test_names_and_values_with_blanks_are_quoted_and_each_shown_value_is_found(text: str, value: Any) -> None:
    result = configured(RESULT, VALUES, "weight decay")
    ours = {one.trial for one in result.trials if one.configuration["weight decay"] == value}
    page = table_page(result, Asked(filter=text))
    assert (page.problem, {row.trial for row in page.rows}) == ("", ours)
    others = table_page(result, Asked(filter=text.replace("=", "!=", 1))).rows
    assert {row.trial for row in others} == {one.trial for one in result.trials} - ours


def test_a_metric_or_parameter_with_the_name_of_a_column_is_meant() -> None:
    named = [
        replace(one, metrics={"cost": 5.0 + one.trial}, configuration={"status": one.trial}) for one in RESULT.trials
    ]
    result = replace(RESULT, metric="cost", trials=tuple(named), best=None)
    assert {row.trial for row in table_page(result, Asked(filter="cost<7")).rows} == {0, 1}
    assert {row.trial for row in table_page(result, Asked(filter="status<2")).rows} == {0, 1}
    assert {row.trial for row in table_page(result, Asked(filter="iterations>=7")).rows} == {0}


@pytest.mark.parametrize("text", [f"{RESULT.metric}>0.4", "iterations<3"])
@pytest.mark.parametrize("ranges", [(RESULT.metric, 0.5, 1.0), ("lr", 0.0, 0.3)])
def test_a_range_on_a_filtered_chart_is_that_of_the_table(text: str, ranges: tuple[str, float, float]) -> None:
    chart = selected(RESULT, Asked(filter=text))
    found = table_page(RESULT, Asked(filter=text, brush=(ranges,)))
    assert {row.trial for row in found.rows} == within(chart, (ranges,))
    assert found.rows
