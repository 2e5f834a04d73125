"""The page that compares experiments: what it sets side by side, and what it says of those that do not fit."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest

from rubberband.api.dashboard.compare import Compared, configurations_of, curves_of, figures_of, settings_of
from rubberband.executor.core.history import DecisionResult
from rubberband.executor.result.result import Result
from rubberband.states import ExperimentState
from rubberband.values.submission import Submission, Summary
from tests.builders.fake_runs import FakeService, fake_service
from tests.builders.journalled_runs import words
from tests.builders.results import ATTACK, EVERY_RESULT, a_job, a_result, hostile


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FakeService]:
    with fake_service(tmp_path) as made:
        yield made


def shown(service: FakeService, *names: str, path: str = "/compare") -> str:
    answer = service.client.get(path, params={"name": list(names)}, headers={"Accept": "text/html"})
    assert answer.status_code == 200
    return answer.text


def text(html: str) -> str:
    return " ".join(unescape(re.sub(r"<script.*?</script>|<[^>]+>", " ", html, flags=re.DOTALL)).split())


def one(name: str, result: Result | None = None, **changes: object) -> Compared:
    row = Submission(name=name, state=ExperimentState.DONE, created_at=1.0, changed_at=1.0, words={})
    return Compared(dataclasses.replace(row, **changes), result and dataclasses.replace(result, name=name))


def better(result: Result, by: float) -> Result:
    assert result.best is not None
    metrics = {result.metric: result.best.metrics[result.metric] + by}
    return dataclasses.replace(result, best=dataclasses.replace(result.best, metrics=metrics))


@pytest.mark.parametrize("which", list(EVERY_RESULT))
def test_any_two_results_are_compared(service: FakeService, which: str) -> None:
    service.runs.results = {"one": EVERY_RESULT[which](), "two": a_result()}
    for name in service.runs.results:
        service.add(name, summary=Summary(started_at=1.0, stages=3), state=ExperimentState.DONE)
    html = shown(service, "one", "two")
    assert "Compare 2 experiments" in text(html)
    figures = json.loads(re.findall(r'id="figures">(.*?)</script>', html, re.DOTALL)[0])
    assert list(figures) == ["compared"]


def test_the_best_of_a_line_is_marked_of_one_metric_and_of_what_is_done() -> None:
    result = a_result()
    cheap = dataclasses.replace(result, actual_cost_usd=0.001, outcome="budget")
    other = dataclasses.replace(better(result, 9.0), metric="loss", mode="min")
    lines = {line.title: line for line in figures_of([one("a", better(result, 0.1)), one("b", cheap), one("c", other)])}
    assert [cell.best for cell in lines["best score (max)"].cells] == [True, False, False]
    assert lines["best score (max)"].cells[2].text == "-"
    assert [cell.best for cell in lines["cost (USD)"].cells] == [False, False, False], "equal, and one is not done"


def test_parameters_that_a_best_trial_lacks_are_dashes() -> None:
    result = a_result()
    assert result.best is not None
    lacking = dataclasses.replace(
        result, best=dataclasses.replace(result.best, configuration={"lr": 0.1, "beta": True})
    )
    lines = {
        line.title: [cell.text for cell in line.cells]
        for line in configurations_of([one("a", result), one("b", lacking), one("c")])
    }
    assert lines["n"][1:] == ["-", "-"]
    assert lines["beta"] == ["-", "true", "-"]


def test_only_settings_that_differ_are_listed() -> None:
    other = words(name="b", constraints={"max_cost": 9}, resources={"market": "spot"})
    lines = {
        line.title: [cell.text for cell in line.cells]
        for line in settings_of([one("a", words=words(name="a")), one("b", words=other)])
    }
    assert lines == {"constraints.max_cost": ["4", "9"], "resources.market": ["-", "spot"]}


def test_curves_are_of_the_metric_of_the_most() -> None:
    result = a_result()
    other = a_result(a_job(metric="loss", mode="min"))
    figure = curves_of([one("a", other), one("b", result), one("c", result), one("d")])
    assert figure is not None
    assert {trace["legendgroup"] for trace in figure["data"]} == {"b", "c"}
    assert sum(trace["showlegend"] for trace in figure["data"]) == 2
    for button in figure["layout"]["updatemenus"][0]["buttons"]:
        assert [len(xs) for xs in button["args"][0]["x"]] == [len(trace["y"]) for trace in figure["data"]]
    assert curves_of([one("a")]) is None


def test_the_page_says_which_names_do_not_fit(service: FakeService) -> None:
    for number in range(10):
        service.add(f"e{number}")
    assert "tick them in the list" in text(shown(service))
    assert "Experiment 'nosuch' not found." in text(shown(service, "e1", "nosuch", "e1"))
    many = text(shown(service, *(f"e{number}" for number in range(10))))
    assert "10 experiments are too many; the page shows the first 8." in many
    for name in ("", "\0", "a" * 80, "Ü", "e1\n"):
        assert "not found" in text(shown(service, name, "e1", path="/fragments/compare"))


def test_nothing_of_the_user_s_becomes_markup(service: FakeService) -> None:
    for name in ("one", "two"):
        service.add(name, summary=Summary(started_at=1.0), words={"x": f"{name}{ATTACK}", name + ATTACK: 1})
        service.runs.results[name] = hostile()
    assert "<script>alert(1)" not in shown(service, "one", "two")


def test_replans_are_decisions_that_changed_the_plan() -> None:
    result = a_result()
    stayed = DecisionResult(
        stage=1,
        at_s=9.0,
        changed=False,
        reason="",
        plan=a_job().plan,
        present_jct_s=60.0,
        present_cost_usd=1.0,
        jct_s=60.0,
        cost_usd=1.0,
    )
    changed = dataclasses.replace(stayed, changed=True)
    for decisions, text, note in (((stayed,), "0", "of 1 look"), ((stayed, changed), "1", "of 2 looks")):
        told = dataclasses.replace(result, decisions=decisions)
        (line,) = [line for line in figures_of([one("a", told)]) if line.title == "replans"]
        assert (line.cells[0].text, line.cells[0].note) == (text, note)


def test_the_deadline_is_the_one_that_was_asked_for() -> None:
    results = [dataclasses.replace(a_result(), deadline_s=7200.0 - spent_s, profiling_s=spent_s) for spent_s in (0, 27)]
    lines = figures_of([one("a", results[0]), one("b", results[1])])
    (line,) = [line for line in lines if line.title == "deadline"]
    assert [cell.text for cell in line.cells] == ["2h", "2h"]
    assert not line.differs
