"""Trials compared after equal iterations: in the table, in charts of configurations, and between experiments."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.api.dashboard.trials_table import Asked, table_page
from rubberband.executor import Result
from rubberband.executor.result.parts import TrialResult
from rubberband.executor.result.result import Objective
from rubberband.states import ExperimentState
from rubberband.values.submission import Summary
from rubberband.views.equal_iterations import after, choices, metric_after
from rubberband.views.formatting import ranked
from tests.builders.fake_runs import FakeService
from tests.builders.results import a_result

RESULT = a_result()
OF_CONFIGURATIONS = (("figures/parallel", 1), ("figures/slices", 1), ("contour", 3))


def reached(result: Result, iterations: int) -> set[int]:
    return {trial.trial for trial in result.trials if trial.iterations >= iterations}


def test_the_choices_are_the_ends_of_stages_that_two_trials_reached() -> None:
    assert choices(RESULT) == [1, 3]
    assert max(trial.iterations for trial in RESULT.trials) == 7, "only one got there"
    one_stage = replace(RESULT, stages=RESULT.stages[:1])
    assert choices(one_stage) == [1, 2], "powers of two, of a search with one stage"
    assert choices(replace(RESULT, trials=())) == []


@given(st.integers(min_value=1, max_value=9))
def test_each_trial_has_the_metric_that_it_had_then_and_the_best_is_the_best_of_those(iterations: int) -> None:
    then = after(RESULT, iterations)
    known = {trial.trial: trial.metrics[RESULT.metric] for trial in then.trials if trial.metrics}
    assert known.keys() == reached(RESULT, iterations)
    for trial, value in known.items():
        reports = {done: metrics for _, done, metrics in RESULT.trials[trial].curve}
        assert value == reports[min(iterations, max(reports))][RESULT.metric]
        assert value == metric_after(RESULT, RESULT.trials[trial], iterations)
    order = [trial.trial for trial in ranked(then) if trial.metrics]
    assert [known[trial] for trial in order] == sorted(known.values(), reverse=RESULT.mode == "max")
    assert (then.best.trial if then.best else None) == (order[0] if order else None)


def test_the_result_as_it_is_is_that_of_no_iterations() -> None:
    assert after(RESULT, 0) is RESULT


def test_a_failed_trial_is_not_the_best_and_a_trial_without_a_number_is_last() -> None:
    first = after(RESULT, 1).best
    assert first is not None
    failed = replace(RESULT.trials[first.trial], status="failed")
    trials = tuple(failed if one.trial == first.trial else one for one in RESULT.trials)
    found = after(replace(RESULT, trials=trials), 1).best
    assert found is None or found.trial != first.trial
    assert metric_after(RESULT, replace(failed, curve=((1.0, 1, {RESULT.metric: math.nan}),)), 1) is None


def test_the_table_shows_and_sorts_by_it_and_keeps_the_winner() -> None:
    page = table_page(RESULT, Asked(after=1))
    assert page.columns[1].title == f"{RESULT.metric} after 1"
    values = [row.cells[0] for row in page.rows]
    assert "-" not in values, "all have trained once"
    assert values == sorted(values, key=float, reverse=RESULT.mode == "max")
    assert RESULT.best is not None
    assert [row.trial for row in page.rows if row.winner] == [RESULT.best.trial]
    assert {row.trial: row.cells[1] for row in page.rows} == {
        one.trial: str(one.iterations) for one in RESULT.trials
    }, "the iterations are those of the trial"
    assert [choice.title for choice in page.metrics] == ["latest", "after 1", "after 3"]
    assert [choice.title for choice in page.metrics if choice.chosen] == ["after 1"]
    assert page.columns[2].address.count("after=1") == 1, "sorting keeps it"
    later = table_page(RESULT, Asked(after=3))
    assert sum(row.cells[0] != "-" for row in later.rows) == len(reached(RESULT, 3))


@pytest.fixture
def shown(service: FakeService) -> FakeService:
    for name in ("one", "two"):
        service.add(name, state=ExperimentState.DONE, summary=Summary(started_at=1000.0, stages=3))
        service.runs.results[name] = replace(RESULT, name=name)
    return service


@pytest.mark.parametrize(("chart", "iterations"), OF_CONFIGURATIONS)
def test_charts_of_configurations_compare_then(shown: FakeService, chart: str, iterations: int) -> None:
    words = ("", f"?after={iterations}")
    latest, first = (shown.client.get(f"/experiments/one/{chart}{asked}").json() for asked in words)
    assert first != latest
    if chart != "contour":
        ((_, figure),) = first.items()
        assert "metric after 1 iteration" in figure["layout"]["meta"]["note"]
    assert shown.client.get(f"/experiments/one/{chart}?after=nonsense").json() == latest


def test_other_charts_do_not_change(shown: FakeService) -> None:
    for chart in ("curves", "spend", "allocation"):
        latest, first = (
            shown.client.get(f"/experiments/one/figures/{chart}{words}").json() for words in ("", "?after=1")
        )
        assert first == latest


def test_experiments_are_compared_then(shown: FakeService) -> None:
    html = shown.client.get("/compare?name=one&name=two&after=1", headers={"Accept": "text/html"}).text
    best = after(RESULT, 1).best
    assert best is not None
    assert f"best {RESULT.metric} ({RESULT.mode}) after 1" in html
    assert f">trial {best.trial}</a>, 1 iteration<" in html
    assert re.findall(r'<a href="/compare\?name=one&amp;name=two(&amp;after=3)?">(\w+ ?\d?)</a>', html) == [
        ("", "latest"),
        ("&amp;after=3", "after 3"),
    ]
    assert 'data-address="/fragments/compare?name=one&amp;name=two&amp;after=1"' in html
    assert '<input type="hidden" name="after" value="1">' in html, "another one that is added is compared then, too"


def test_trials_of_several_experiments_are_in_one_table_best_first(shown: FakeService) -> None:
    html = shown.client.get("/compare?name=one&name=two&after=3", headers={"Accept": "text/html"}).text
    (table,) = re.findall(r'<section id="all-trials".*?</section>', html, re.DOTALL)
    found = re.findall(r'href="/experiments/(\w+)/trials/(\d+)".*?<td role="cell" data-label="score">([\d.]+)<', table)
    assert len(found) == 2 * len(reached(RESULT, 3))
    assert {name for name, *_ in found} == {"one", "two"}
    values = [float(value) for *_, value in found]
    assert values == sorted(values, reverse=RESULT.mode == "max")
    assert {int(trial) for _, trial, _ in found} == reached(RESULT, 3)
    assert f"{RESULT.metric} after 3" in table


def with_latency(trial: TrialResult) -> TrialResult:
    """Return a trial that is slow after its first iteration if its number is odd, and later if it is even."""
    curve = tuple(
        (at_s, done, {**metrics, "latency": 9.0 if (done == 1) == (trial.trial % 2 == 1) else 1.0})
        for at_s, done, metrics in trial.curve
    )
    return replace(trial, curve=curve, metrics=curve[-1][2])


def test_a_stopped_trial_of_another_bracket_may_be_the_best_then() -> None:
    first = after(RESULT, 1).best
    assert first is not None
    trials = tuple(
        replace(one, bracket=one.trial % 2, status="stopped" if one.trial == first.trial else "completed")
        for one in RESULT.trials
    )
    then = after(replace(RESULT, trials=trials, best=trials[first.trial + 1]), 1)
    assert then.best is not None
    assert then.best.trial == first.trial
    values = [trial.metrics[RESULT.metric] for trial in ranked(then)]
    assert values == sorted(values, reverse=RESULT.mode == "max")


def test_limits_are_those_of_the_metrics_then() -> None:
    also = (Objective(metric="latency", mode="min", at_most=2.0),)
    result = replace(RESULT, also=also, trials=tuple(map(with_latency, RESULT.trials)))
    then = after(result, 1)
    assert {one.trial: one.feasible for one in then.trials} == {one.trial: one.trial % 2 == 0 for one in RESULT.trials}
    assert then.best is not None
    assert then.best.feasible
    page = table_page(result, Asked(after=1))
    titles = [column.title for column in page.columns]
    shown = {row.trial: row.cells[titles.index("latency") - 1] for row in page.rows}
    assert shown == {one.trial: "9" if one.trial % 2 else "1" for one in RESULT.trials}
    assert after(replace(result, trials=result.trials[1:2]), 1).best.feasible is False  # type: ignore[union-attr]


def test_repeats_are_ranked_and_shown_by_their_mean_then() -> None:
    result = replace(RESULT, repeats=2)
    first = {one.trial: one.curve[0][2][RESULT.metric] for one in RESULT.trials}
    page = table_page(result, Asked(after=1))
    means = {pair: (first[2 * pair] + first[2 * pair + 1]) / 2 for pair in range(len(first) // 2)}
    best = max(means, key=lambda pair: means[pair] if RESULT.mode == "max" else -means[pair])
    then = after(replace(result, trials=tuple(replace(one, status="running") for one in result.trials)), 1)
    assert then.best is not None
    assert then.best.trial // 2 == best
    assert then.best.standing is not None
    assert then.best.standing.mean == pytest.approx(means[best])
    titles = [column.title for column in page.columns]
    at = titles.index("mean of 2") - 1
    assert all(row.cells[at].startswith(f"{means[row.trial // 2]:.4g}"[:4]) for row in page.rows if row.trial > 1)
