"""Pages of the dashboard, as the server makes them."""

from __future__ import annotations

import dataclasses
import json
import re
from datetime import UTC, datetime
from html import unescape
from importlib import resources
from typing import Any

import pytest

from rubberband.api.body import read_experiment
from rubberband.api.dashboard.compare import Compared, configurations_of, curves_of, figures_of, settings_of
from rubberband.api.dashboard.experiment import facts
from rubberband.api.dashboard.experiment_texts import sentence
from rubberband.api.dashboard.form import file_of
from rubberband.api.dashboard.frame import ago
from rubberband.api.dashboard.listing import CHOICES, Row, counted_choices, row
from rubberband.executor import DecisionResult, Result
from rubberband.spec.experiment import Experiment
from rubberband.states import ExperimentState
from rubberband.units import format_instant, instant_text
from rubberband.values.submission import Submission, Summary
from rubberband.views.experiment import experiment_view
from rubberband.views.formatting import ranked
from rubberband.views.live.status import headline
from tests.builders.fake_runs import FakeService
from tests.builders.journalled_runs import words
from tests.builders.results import ATTACK, EVERY_RESULT, a_job, a_result, hostile
from tests.builders.tables import cases

NOW = 10_000.0
BEGUN: dict[str, Any] = {
    "trials": 16,
    "stages": 4,
    "stage": 1,
    "iterations": 30,
    "target_iterations": 120,
    "started_at": NOW - 100.0,
    "planned_jct_s": 300.0,
    "forecast_jct_s": 320.0,
    "deadline_s": 400.0,
    "cost_usd": 0.25,
    "max_cost_usd": 1.0,
    "metric": "accuracy",
    "best_value": 0.912345678,
}


def line(state: str = "running", *, words: dict[str, Any] | None = None, reason: str = "", **changes: Any) -> Row:
    summary = Summary(**(BEGUN | changes)) if state not in ("queued", "starting") else Summary()
    submission = Submission(
        name="digits",
        state=ExperimentState(state),
        created_at=NOW - 130.0,
        changed_at=NOW,
        words=words or {},
        reason=reason,
        summary=summary,
    )
    return row(submission, NOW)


@cases("state", "changes", "shown")
def test_a_row_of_the_list_says_where_its_run_is_and_what_it_costs(
    state: str, changes: dict[str, Any], shown: dict[str, Any]
) -> None:
    found = dataclasses.asdict(line(state, **changes))
    assert {key: found[key] for key in shown} == {
        key: tuple(value) if isinstance(value, list) else value for key, value in shown.items()
    }


@pytest.mark.parametrize(
    ("state", "forecast_s", "slack_s", "shown"),
    [
        ("running", 320.0, 80.0, "1m20s to spare"),
        ("running", 90.0, 290.0, "4m50s to spare"),  # no end lies before what has passed: by the summary, or by now
        ("interrupted", 320.0, 80.0, "1m20s to spare"),  # a resume goes on with it: it has not ended where it stands
        ("interrupted", 420.0, -20.0, "20s late"),
        ("done", 420.0, 290.0, "4m50s to spare"),
    ],
)
def test_slack_follows_one_rule_in_rest_and_in_the_list(
    state: str, forecast_s: float, slack_s: float, shown: str
) -> None:
    summary = Summary(**(BEGUN | {"jct_s": 110.0, "forecast_jct_s": forecast_s}))
    found = Submission(name="one", state=ExperimentState(state), created_at=0.0, changed_at=0.0, summary=summary)
    assert experiment_view(found)["slack_s"] == slack_s
    assert row(found, NOW).slack == shown
    assert row(found, NOW + 330.0).slack == ("30s late" if state != "done" else shown)


def test_a_queued_run_that_waits_for_money_says_so_in_every_view() -> None:
    why = "it waits for money: budget of ann: 0.35 USD of 0.30 USD are spent or planned in"
    found = line("queued", reason=why)
    assert (found.progress, found.reason) == ("waits", why)
    waiting = Submission(name="one", state=ExperimentState.QUEUED, created_at=0.0, changed_at=0.0, reason=why)
    assert sentence(waiting, None) == f"I{why[1:]}."
    assert headline(experiment_view(waiting)) == f"one: queued: {why}"


def test_every_state_is_in_one_list_besides_all() -> None:
    found = [state for _, states in CHOICES.values() if states for state in states]
    assert sorted(found) == sorted(ExperimentState)


@cases("passed_s", "words")
def test_how_long_ago(passed_s: float, words: str) -> None:
    assert ago(NOW - passed_s, NOW) == words


def test_an_instant_is_in_utc() -> None:
    assert instant_text(0.9) == "1970-01-01T00:00:00Z"


def test_every_choice_is_counted() -> None:
    counts = counted_choices({"running": 2, "queued": 1, "failed": 3, "done": 4})
    assert counts == {"all": 10, "active": 3, "done": 4, "stopped": 0, "attention": 3}


CSS = resources.files("rubberband.api.dashboard").joinpath("static", "dashboard.css").read_text(encoding="utf-8")
LIGHT, DARK = (
    dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6});", part)) for part in re.findall(r":root \{(.*?)\}", CSS, re.S)
)
TEXTS = [
    *((ink, ground) for ink in ("text", "faint", "accent", "good", "warn", "bad") for ground in ("back", "raised")),
    *((ink, "sunk") for ink in ("text", "faint")),
    *((mood, f"{mood}-soft") for mood in ("good", "warn", "bad", "calm", "accent")),
    ("faint", "none-soft"),
    ("on-accent", "accent"),
    ("text", "warn-soft"),
    ("text", "bad-soft"),
    ("raised", "bad"),
    ("back", "text"),
]
EDGES = [("edge", "back"), ("edge", "raised"), ("accent", "raised"), ("accent", "none-soft"), ("bad", "raised")]


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, LIGHT | DARK], ids=["light", "dark"])
def test_text_stands_out_by_4_5_and_edges_by_3(theme: dict[str, str]) -> None:
    weak_texts = {pair: contrast(theme[pair[0]], theme[pair[1]]) for pair in TEXTS}
    weak_edges = {pair: contrast(theme[pair[0]], theme[pair[1]]) for pair in EDGES}
    assert {pair: ratio for pair, ratio in weak_texts.items() if ratio < 4.5} == {}
    assert {pair: ratio for pair, ratio in weak_edges.items() if ratio < 3.0} == {}


def test_black_on_white_is_twenty_one() -> None:
    assert contrast("#fff", "#000000") == pytest.approx(21.0)


AT = 1_800_000_000.0
"""2027-01-15T08:00:00Z"""


def facts_of(said: dict[str, Any]) -> dict[str, str]:
    row = Submission(name="one", state=ExperimentState.QUEUED, created_at=AT - 600.0, changed_at=AT, words=said)
    return dict(facts(row, AT))


def test_code_place_search_and_limits_are_reported() -> None:
    assert facts_of(words(entrypoint="examples.digits:DigitsTrial")) == {
        "runs": "examples.digits:DigitsTrial",
        "on": "up to 8 x p3.8xlarge (virtual)",
        "searches": "27 configurations (sha), for the highest accuracy",
        "deadline": "2027-01-15T08:15:00Z (25m after its submission), in 15m",
        "max_cost": "4.00 USD",
    }


@cases("deadline", "words_of_it")
def test_a_queued_one_has_its_deadline_with_the_time_that_is_left(deadline: str | None, words_of_it: str) -> None:
    assert facts_of({"constraints": {"deadline": deadline}})["deadline"] == words_of_it


@pytest.mark.parametrize("said", [{}, {"search": None, "resources": 3, "constraints": "x"}])
def test_unknown_values_are_left_out(said: dict[str, Any]) -> None:
    assert set(facts_of(said)) <= {"deadline", "max_cost", "profile"}


def test_a_file_that_is_planned_again_has_its_deadline_from_the_start() -> None:
    said = words(constraints={"deadline": "2027-01-15T08:25:00.4Z", "max_cost": 4.0, "confidence": None})
    again = file_of(Submission(name="one", state=ExperimentState.DONE, created_at=AT, changed_at=AT, words=said))
    experiment = read_experiment(again.encode(), "application/yaml", [])
    assert experiment.constraints.deadline == 1500.0
    assert experiment.to_words() == Experiment(**words()).to_words()
    assert file_of(Submission(name="one", state=ExperimentState.DONE, created_at=AT, changed_at=AT)) == ""


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


@pytest.mark.by_default(4)
@pytest.mark.parametrize("which", list(EVERY_RESULT))
def test_any_two_results_are_compared(service: FakeService, which: str) -> None:
    service.runs.results = {"one": EVERY_RESULT[which](), "two": a_result()}
    for name in service.runs.results:
        service.add(name, summary=Summary(started_at=1.0, stages=3), state=ExperimentState.DONE)
    html = shown(service, "one", "two")
    assert "Compare 2 experiments" in text(html)
    figures = json.loads(re.findall(r'id="figures">(.*?)</script>', html, re.DOTALL)[0])
    assert list(figures) == ["compared"]


def test_every_name_of_an_experiment_and_a_trial_leads_to_its_page(service: FakeService) -> None:
    results = {"ann": a_result(), "ben": better(a_result(), 0.1), "cal": a_result(a_job(metric="loss"))}
    for name, result in results.items():
        service.runs.results[name] = dataclasses.replace(result, name=name)
        service.add(name, summary=Summary(started_at=1.0, stages=3), state=ExperimentState.DONE)
    html = re.sub(
        r"<script.*?</script>|<datalist.*?</datalist>", "", shown(service, "ann", "ben", "cal"), flags=re.DOTALL
    )
    best = results["ann"].best
    assert best is not None
    at = f'<a href="/experiments/ann/trials/{best.trial}">'
    assert html.count(f"{at}trial {best.trial}</a>") == 3, "below the curves, as the best, and above its configuration"
    assert 'left out: <a href="/experiments/cal">cal</a>.' in html
    unlinked = re.sub(r"<a .*?</a>|<[^>]+>", "", html, flags=re.DOTALL)
    assert not re.search(r"\b(ann|ben|cal)\b|trial \d", unlinked.partition("Compare 3 experiments")[2])


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


def test_deadlines_are_compared_from_the_start_and_domains_key_by_key() -> None:
    def submitted(at: float, upper: float) -> Compared:
        made = format_instant(datetime.fromtimestamp(at + 1800, UTC))
        space = {"lr": {"type": "uniform", "lower": 0.0, "upper": upper}}
        found = one("a", words=words(name="a", constraints={"deadline": made}, search={"space": space}))
        return dataclasses.replace(found, row=dataclasses.replace(found.row, created_at=at))

    lines = {
        line.title: [cell.text for cell in line.cells]
        for line in settings_of([submitted(0.0, 1.0), submitted(9e8, 2.0)])
    }
    assert lines == {"search.space.lr.upper": ["1", "2"]}


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


def test_the_thick_curve_is_of_the_best_after_the_chosen_iterations() -> None:
    result = a_result()
    curves = {0: (0.1, 0.9), 1: (0.8, 0.2)}
    trials = [
        dataclasses.replace(
            trial,
            iterations=2,
            metrics={result.metric: curves[trial.trial][-1]},
            curve=tuple((float(n), n, {result.metric: value}) for n, value in enumerate(curves[trial.trial], start=1)),
        )
        for trial in result.trials[:2]
    ]
    result = dataclasses.replace(result, trials=tuple(trials), best=trials[0])
    thick = {}
    for after in (0, 1):
        figure = curves_of([dataclasses.replace(one("a", result), after=after)])
        assert figure is not None
        thick[after] = [trace["y"] for trace in figure["data"] if trace["showlegend"]]
    assert thick == {0: [[0.1, 0.9]], 1: [[0.8, 0.2]]}, "whole curves in both"


@pytest.mark.parametrize("reports", [1, 2, 399, 400, 401, 799, 800, 3000])
def test_a_curve_of_any_length_is_drawn_from_its_first_report_to_its_last(reports: int) -> None:
    result = a_result()
    best = ranked(result)[0]
    curve = tuple((float(n), n, {result.metric: n / reports}) for n in range(1, reports + 1))
    trials = [dataclasses.replace(one, curve=curve if one is best else ()) for one in result.trials]
    figure = curves_of([one("a", dataclasses.replace(result, trials=tuple(trials)))])
    assert figure is not None
    (drawn,) = figure["data"]
    assert (drawn["x"][0], drawn["x"][-1], drawn["y"][-1]) == (1, reports, 1.0)
    assert len(drawn["x"]) <= 401


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
    figures = {"present_jct_s": 60.0, "present_cost_usd": 1.0, "jct_s": 60.0, "cost_usd": 1.0}
    stayed = DecisionResult(stage=1, at_s=9.0, changed=False, reason="", plan=a_job().plan, **figures)
    changed = dataclasses.replace(stayed, changed=True)
    for decisions, text, note in (((stayed,), "0", "of 1 look"), ((stayed, changed), "1", "of 2 looks")):
        found = dataclasses.replace(result, decisions=decisions)
        (line,) = [line for line in figures_of([one("a", found)]) if line.title == "replans"]
        assert (line.cells[0].text, line.cells[0].note) == (text, note)


def test_the_deadline_is_the_one_that_was_asked_for() -> None:
    results = [a_result(a_job(deadline_s=7200.0 - spent_s, profiling_s=spent_s)) for spent_s in (0, 27)]
    lines = figures_of([one("a", results[0]), one("b", results[1])])
    (line,) = [line for line in lines if line.title == "deadline"]
    assert [cell.text for cell in line.cells] == ["2h", "2h"]
    assert not line.differs
