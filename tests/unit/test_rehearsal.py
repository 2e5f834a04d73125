"""A rehearsal: no trial is the best, nothing is charged, and every view says so."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rubberband import load_result
from rubberband.errors import InputError
from rubberband.executor import open_folder
from rubberband.running.run import run_experiment
from rubberband.spec.experiment import Experiment
from rubberband.states import REHEARSAL, ExperimentState
from rubberband.values.submission import Submission, Summary
from tests.builders.cli_runs import CommandLine
from tests.builders.cli_runs import rubberband as rubberband
from tests.builders.fake_runs import FakeService
from tests.builders.journalled_runs import words
from tests.builders.results import a_result

NAME, METRIC = "digits-sha", "accuracy"
PAGES = (f"/experiments/{NAME}", f"/experiments/{NAME}/trials/0", f"/experiments/{NAME}/report")
CHARTS_OF_THE_METRIC = ("curves", "parallel", "trade-off", "slices")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("home")
    run_experiment(Experiment(**words()), open_folder(NAME, made))
    return made


@pytest.fixture
def here(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUBBERBAND_HOME", str(home))


@pytest.fixture
def shown(home: Path, service: FakeService) -> FakeService:
    """The service, with the rehearsal and with a run that trained."""
    summary = Summary(started_at=1000.0, stages=3, cost_usd=1.5, is_rehearsal=True, is_charged=False, metric=METRIC)
    service.add(NAME, state=ExperimentState.DONE, summary=summary, words=words())
    service.runs.results[NAME] = load_result(NAME, home=home)
    service.add("real", state=ExperimentState.DONE, summary=replace(summary, is_rehearsal=False, is_charged=True))
    service.runs.results["real"] = a_result()
    return service


def text(html: str) -> str:
    return " ".join(re.sub(r"<(script|style).*?</\1>|<[^>]+>", " ", html, flags=re.DOTALL).split())


def page(service: FakeService, path: str) -> str:
    answer = service.client.get(path, headers={"Accept": "text/html"})
    assert answer.status_code == 200
    return answer.text


@pytest.mark.parametrize("path", PAGES)
def test_a_page_has_its_badge_and_no_best(shown: FakeService, path: str) -> None:
    html = page(shown, path)
    assert 'class="badge rehearsal"' in html
    assert "card free" in html
    assert "nothing is charged" in text(html)
    shown_first = re.sub(r"<(dialog|pre).*?</\1>", "", html, flags=re.DOTALL)
    assert not re.search(r"\b(best|winner|lead|importance|accuracy)\b", text(shown_first), re.IGNORECASE)
    assert (REHEARSAL.capitalize() in text(html)) == ("/trials/" not in path)


def test_the_list_marks_it_and_its_amount(shown: FakeService) -> None:
    rows = dict(re.findall(r'<tr role="row" data-key="([\w-]+)">(.*?)</tr>', page(shown, "/"), re.DOTALL))
    assert "rehearsal" in text(rows[NAME])
    assert 'class="spend free"' in rows[NAME]
    assert "not charged" in text(rows[NAME])
    assert "rehearsal" not in text(rows["real"])
    assert 'class="spend"' in rows["real"]


def test_a_queued_one_has_the_badge_by_its_file(service: FakeService) -> None:
    service.add(NAME, state=ExperimentState.QUEUED, words=words())
    assert 'class="badge rehearsal"' in page(service, f"/experiments/{NAME}")
    answer = service.client.get(f"/v1/experiments/{NAME}").json()
    assert (answer["rehearsal"], answer["charged"]) == (True, False)


@pytest.mark.parametrize("chart", CHARTS_OF_THE_METRIC)
def test_a_chart_of_the_metric_is_empty(shown: FakeService, chart: str) -> None:
    assert shown.client.get(f"/experiments/{NAME}/figures/{chart}").json() == {}


def test_a_contour_a_curve_of_a_trial_and_an_importance_are_empty(shown: FakeService) -> None:
    for path in ("contour", "trials/0/figures/curves"):
        assert shown.client.get(f"/experiments/{NAME}/{path}").json() == {}
    assert shown.client.get(f"/experiments/{NAME}/importance").json() == {"note": ""}
    assert "spend" in shown.client.get(f"/experiments/{NAME}/figures/spend").json()


def test_compared_it_has_no_best_and_no_curve(shown: FakeService) -> None:
    html = page(shown, f"/compare?name={NAME}&name=real")
    assert html.count('class="badge rehearsal"') == 1
    (row,) = re.findall(r"<tr><th scope=\"row\">best score.*?</tr>", html, re.DOTALL)
    first, second = re.findall(r"<td.*?</td>", row, re.DOTALL)
    assert (text(first), text(second).split()[0]) == ("-", "0.875")
    assert 'class="leads"' not in html, "nothing is faster or cheaper than what was not run"
    (figures,) = re.findall(r'id="figures">(.*?)</script>', html, re.DOTALL)
    assert {trace["legendgroup"] for trace in json.loads(figures)["compared"]["data"]} == {a_result().name}
    assert "best accuracy" not in text(html)
    alone = page(shown, f"/compare?name={NAME}")
    assert "Configuration of the best" not in alone


def test_rest_says_so(shown: FakeService) -> None:
    answer = shown.client.get(f"/v1/experiments/{NAME}").json()
    assert (answer["rehearsal"], answer["charged"], answer["best"]) == (True, False, None)
    assert shown.client.get("/v1/experiments/real").json()["rehearsal"] is False
    report = shown.client.get(f"/v1/experiments/{NAME}/report").json()
    assert (report["rehearsal"], report["best"]) == (True, None)


@pytest.mark.usefixtures("here")
def test_the_command_line_says_so(rubberband: CommandLine, home: Path) -> None:
    (row,) = rubberband.json("ps")["experiments"]
    assert (row["rehearsal"], row["charged"], row["best"]) == (True, False, "")
    assert "done (rehearsal)" in rubberband("ps")
    for command in ("report", "status"):
        said = rubberband(command, NAME)
        assert REHEARSAL in said
        assert "best" not in said
    rubberband("report", NAME, "--html", str(home / "report.html"))
    assert 'class="badge rehearsal"' in (home / "report.html").read_text()


@pytest.mark.usefixtures("here")
def test_its_best_is_refused_in_one_line(rubberband: CommandLine) -> None:
    assert rubberband.refused("best", NAME).count("\n") <= 1
    assert REHEARSAL in rubberband.refused("best", NAME)
    with pytest.raises(InputError, match="metric is invented"):
        load_result(NAME).best_at()


def test_no_search_that_trains_begins_from_it(home: Path) -> None:
    from rubberband.running.warm_start import warm_started

    def asked(**changes: Any) -> Experiment:
        return Experiment(**words(name="next", search={"warm_start": [NAME]}, **changes))

    assert warm_started(asked(), home, str).search.points_to_evaluate, "another rehearsal does"
    local = {"provider": "local", "instance_type": None, "gpus_per_instance": 1}
    with pytest.raises(InputError, match=f"search.warm_start: in {NAME} nothing was trained"):
        warm_started(asked(entrypoint="trials:train", resources=local), home, str)


def test_no_sum_of_money_counts_it() -> None:
    spent = Summary(started_at=1.0, cost_usd=3.0, month_at=0.0, month_cost_usd=3.0)
    assert spent.month_usd(10.0) == 3.0
    assert replace(spent, is_rehearsal=True).month_usd(10.0) == 0.0


@pytest.mark.parametrize(("provider", "charged"), [("aws", True), ("local", False), ("virtual", False)])
def test_a_submission_is_charged_as_its_provider_says(provider: str, charged: bool) -> None:
    made: dict[str, Any] = {"name": "one", "state": ExperimentState.QUEUED, "created_at": 1.0, "changed_at": 1.0}
    words = {"resources": {"provider": provider}}
    assert Submission(**made, words=words).charged == charged
    begun = Summary(started_at=1.0)  # of an earlier version, which knew nothing of it
    assert Submission(**made, words=words, summary=begun).charged == charged
    assert Submission(**made, summary=begun).charged, "one that was started by hand has no words"
