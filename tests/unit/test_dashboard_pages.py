"""Pages of an experiment, of its trials and of the REST API, whole without a script, as the service sends them."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from rubberband.errors import JournalError
from rubberband.states import ExperimentState
from rubberband.values.submission import Summary
from rubberband.views.report.page import CHARTS, result_charts
from tests.builders.fake_runs import FakeService
from tests.builders.journalled_runs import words
from tests.builders.results import UPDATES, a_result, cut_short, hostile

BEGUN = Summary(started_at=1000.0, stages=3, forecast_jct_s=200.0, forecast_cost_usd=0.05)
HTML = {"Accept": "text/html"}


def text(html: str) -> str:
    return " ".join(re.sub(r"<script.*?</script>|<[^>]+>", " ", html, flags=re.DOTALL).split())


def page(service: FakeService, path: str = "", status: int = 200) -> str:
    answer = service.client.get(f"/experiments/one{path}", headers=HTML)
    assert answer.status_code == status
    return answer.text


@pytest.mark.by_default(10)
@pytest.mark.parametrize("state", list(ExperimentState))
@pytest.mark.parametrize("begun", [True, False])
def test_every_state_has_a_page(service: FakeService, state: ExperimentState, begun: bool) -> None:
    service.add("one", state=state, reason="told why", summary=BEGUN if begun else Summary())
    if begun:
        service.runs.results["one"] = a_result()
    shown = text(page(service))
    assert f"one {state.value}" in shown
    assert ("Progress by stage" in shown) == begun
    assert ("Report" in shown.split("time")[0]) == begun


def test_why_it_did_not_begin_cannot_be_read_or_was_bought_otherwise_is_a_sentence(service: FakeService) -> None:
    service.add("one", state=ExperimentState.REFUSED, reason="no plan meets the deadline of 1s")
    assert "It never started. started" in text(page(service))
    assert "No plan meets the deadline of 1s." in text(page(service))
    service.store.change("one", at=2.0, state=ExperimentState.UNREADABLE, reason="the journal is no database")
    service.runs.failure = JournalError("the journal is no database")
    assert "The journal is no database." in text(page(service))
    bought = "2 instances on demand instead of spot: EC2 has no room (InsufficientInstanceCapacity)"
    service.store.change("one", at=3.0, state=ExperimentState.RUNNING, summary=BEGUN)
    service.runs.results["one"] = dataclasses.replace(a_result(), instead_of_spot=bought)
    assert f"{bought}." in text(page(service))


def test_a_queued_run_shows_its_submission_and_its_place(service: FakeService) -> None:
    service.add("one", state=ExperimentState.QUEUED, words=words(entrypoint="examples.digits:DigitsTrial"))
    service.add("other", state=ExperimentState.RUNNING)
    assert "in the queue" not in text(page(service)), "it starts at once"
    service.runs.slots = 1
    html = page(service)
    shown = text(html)
    assert "It waits for a free slot. 1st in the queue; its start is not known, as one ahead of it" in shown
    assert "runs examples.digits:DigitsTrial" in shown
    assert "max_cost 4.00 USD" in shown
    assert "/v1/experiments/one/report" not in html, "there is none yet"
    assert "data-dialog" in html, "it may be cancelled"


def test_another_like_it_is_planned_from_its_file(service: FakeService) -> None:
    service.add("one", summary=BEGUN, words=words(name="one", entrypoint="</textarea><script>alert(1)</script>"))
    assert 'href="/plan?like=one"' in page(service)
    shown = service.client.get("/plan?like=one", headers=HTML).text
    assert "num_samples: 27" in shown
    assert "<script>alert" not in shown
    assert "name: one" not in service.client.get("/plan?like=nobody", headers=HTML).text


def test_decisions_updates_and_trials_in_order_are_tables(service: FakeService) -> None:
    result = service.runs.results["one"] = a_result()
    service.add("one", state=ExperimentState.DONE, summary=BEGUN)
    shown = text(page(service))
    assert "Done in" in shown
    assert "SYNC of stage 0" in shown
    assert "Asynchronous updates" not in shown
    html = page(service, "?sort=.lr&down=1&status=stopped")
    rows = [int(found) for found in re.findall(r'<tr role="row" data-key="(\d+)"', html.split('id="trials"')[1])]
    assert rows == sorted(rows)
    assert len(rows) == 11
    for query in ("page=-1", "page=9999999999", "page=٣", "sort=%00", "down=maybe", "status=<b>"):
        assert "12 trials" in text(page(service, f"?{query}")), "what cannot be asked is ignored"
    trials = (dataclasses.replace(result.trials[0], updates=(UPDATES, UPDATES)), *result.trials[1:])
    service.runs.results["one"] = dataclasses.replace(result, trials=trials)
    shown = text(page(service))
    assert "trial workers updates per s staleness most lost compute up waiting server down" in shown
    assert "0 2 100 100 0.96 4 2 10.00 2.00 1.00 4.00 3.00" in shown


def test_a_run_that_is_over_shows_where_its_paid_time_went(service: FakeService) -> None:
    result = service.runs.results["one"] = a_result()
    service.add("one", state=ExperimentState.DONE, summary=BEGUN)
    html = page(service)
    shown = text(html)
    assert f"paid GPU time that trained {100 * result.paid.training_share:.0f} %" in shown
    assert "instances now" not in shown
    widths = re.findall(r'<i class="part\d" style="width:([\d.]+)%"', html)
    assert sum(map(float, widths)) == pytest.approx(100.0)
    assert html.index('id="s-spend"') < html.index('id="paid"') < html.index('id="s-allocation"')
    service.add("two", summary=BEGUN)
    service.runs.results["two"] = cut_short(1, cancel=False)
    assert "instances now" in text(service.client.get("/experiments/two", headers=HTML).text)


def test_figures_are_json_that_is_sent_once_of_the_charts_that_have_something_to_show(service: FakeService) -> None:
    service.add("one", summary=BEGUN)
    assert json.loads(page(service, "/figures/curves")) == {}
    result = service.runs.results["one"] = a_result()
    answer = service.client.get("/experiments/one/figures/curves")
    assert list(answer.json()) == ["curves"]
    again = service.client.get("/experiments/one/figures/curves", headers={"If-None-Match": answer.headers["etag"]})
    assert again.status_code == 304
    assert service.client.get("/experiments/one/figures/none").status_code == 404
    html = page(service)
    expected = re.findall(r'data-expected="(.*?)"', html)[0].split()
    assert expected == [name for name in CHARTS if name in result_charts(result) or name in ("importance", "contour")]
    hidden = re.findall(r'id="s-([\w-]+)" class="panel figure" data-keep hidden', html)
    assert sorted(hidden + expected) == sorted(CHARTS)


def test_a_large_page_is_sent_compressed(service: FakeService) -> None:
    service.add("one", summary=BEGUN)
    service.runs.results["one"] = a_result()
    plain, zipped = (
        service.client.get("/experiments/one", headers=HTML | {"Accept-Encoding": how}) for how in ("identity", "gzip")
    )
    assert plain.text == zipped.text
    assert "content-encoding" not in plain.headers
    assert int(zipped.headers["content-length"]) < len(plain.content) / 3


@pytest.mark.long
def test_a_contour_and_the_importance_of_parameters_are_asked_for_by_themselves(service: FakeService) -> None:
    service.add("one", summary=BEGUN)
    assert json.loads(page(service, "/contour?x=n&y=lr")) == {}
    assert json.loads(page(service, "/importance")) == {}
    service.runs.results["one"] = a_result()
    assert json.loads(page(service, "/contour?x=n&y=%00"))["contour"]["layout"]["meta"]["chosen"] == ["n", "lr"]
    pytest.importorskip("optuna")
    figure = json.loads(page(service, "/importance"))["importance"]
    assert sorted(figure["data"][0]["y"]) == ["lr", "n"]
    assert "Compared: all 12 trials" in figure["layout"]["meta"]["note"]
    service.runs.results["one"] = cut_short(1, cancel=False)
    assert "needs 8 trials" in json.loads(page(service, "/importance"))["note"]


def test_tables_and_the_report_are_there_once_it_has_begun(service: FakeService) -> None:
    service.add("one", summary=BEGUN)
    assert "/export" not in page(service)
    assert "has not started" in text(page(service, "/report", 404))
    service.runs.results["one"] = dataclasses.replace(a_result(), provider="local")
    html = page(service)
    assert "nothing is charged" in text(html)
    for link in ("/v1/experiments/one/export", "/v1/experiments/one/export?reports=true"):
        assert f'<a href="{link}" download>' in html
        assert service.client.get(link).text.startswith("trial,")
    answer = service.client.get("/experiments/one/report")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "Stages, planned and actual" in answer.text
    assert '<a href="/experiments/one">&larr; one</a>' in answer.text, "there is a way back"
    assert '<nav aria-label="Pages">' in answer.text, "it is part of the site"


def test_nothing_of_the_user_s_becomes_markup_and_trials_are_linked(service: FakeService) -> None:
    service.add("one", summary=BEGUN, reason="</script><b>", words={"x": "</code><script>alert(1)</script>"})
    result = service.runs.results["one"] = hostile()
    last = len(result.trials) - 1
    around = {0: {"Next": 1}, 1: {"Previous": 0, "Next": 2}, last: {"Previous": last - 1}}
    report = page(service, "/report")
    for path in ("", *(f"/trials/{trial.trial}" for trial in result.trials)):
        html = page(service, path)
        assert "<script>alert(1)" not in html
        assert html.count("<script") == 2, "plotly and the page's own"
        assert not path or f'href="/experiments/one{path}"' in report
    for at, expected in around.items():
        found = re.findall(
            r'href="/experiments/one/trials/(\d+)"[^>]*>(Previous|Next)<', page(service, f"/trials/{at}")
        )
        assert {word: int(number) for number, word in found} == expected
    assert "<script>" not in page(service, "/trials/0/figures/curves")
    page(service, "/trials/0/figures/none", 404)


def test_the_page_of_rest_is_light_and_has_every_operation_and_type(service: FakeService) -> None:
    document = service.client.get("/openapi.json").json()
    answer = service.client.get("/docs", headers=HTML | {"Accept-Encoding": "gzip"})
    assert int(answer.headers["Content-Length"]) < 60_000
    ids = set(re.findall(r' id="([^"]*)"', answer.text))
    operations = [one for methods in document["paths"].values() for one in methods.values()]
    assert {one["operationId"] for one in operations} <= ids
    assert {f"type-{name}" for name in document["components"]["schemas"]} <= ids
    assert set(re.findall(r'href="#([^"]*)"', answer.text)) <= ids, "each link within the page leads somewhere"
    for operation in operations:
        assert all(f"<code>{one['name']}</code>" in answer.text for one in operation.get("parameters", ()))
    assert "{name}" not in "".join(re.findall(r"curl [^<]*", answer.text)), "curl expands braces"
