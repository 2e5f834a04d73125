"""`/v1/experiments`: submitted, listed, seen, acted on."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import yaml

from rubberband.executor import PrintedLine, rows
from rubberband.states import ExperimentState
from rubberband.values.submission import Summary
from tests.builders.fake_runs import FakeService, virtual_result, words


def submit(service: FakeService, document: dict[str, Any], query: str = "", **headers: str) -> Any:
    return service.client.post(f"/v1/experiments{query}", json=document, headers=headers)


def test_a_submission_is_planned_and_answered_with_its_address(service: FakeService) -> None:
    answer = submit(service, words())
    assert answer.status_code == 201
    assert answer.headers["location"] == "/v1/experiments/small"
    view = answer.json()
    assert (view["name"], view["state"], view["provider"], view["policy"]) == ("small", "queued", "virtual", "optimal")
    assert service.client.get(f"/v1/plans/{view['plan']}").json()["feasible"] is True
    seen = service.client.get(answer.headers["location"])
    assert view.pop("notes") == []
    assert seen.json().items() >= view.items()


def test_a_submission_in_yaml_with_values_set_is_the_same(service: FakeService) -> None:
    answer = service.client.post(
        "/v1/experiments?set=name=other&set=constraints.deadline=30m&policy=static",
        content=yaml.safe_dump(words()),
        headers={"content-type": "application/yaml"},
    )
    assert answer.status_code == 201
    assert answer.json()["name"] == "other"
    assert answer.json()["policy"] == "static"


def test_an_infeasible_answer_is_not_kept(service: FakeService) -> None:
    answer = submit(service, words(constraints__deadline="10s"))
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["type"] == "/problems/infeasible"
    assert problem["nearest"]["jct_s"] > 10.0
    assert problem["nearest"]["cost_usd"] > 0.0
    assert service.store.submissions().items == []
    again = submit(service, words(constraints__deadline=problem["nearest"]["jct_s"] + 1.0))
    assert again.status_code == 201


def test_a_submission_without_a_profile_is_accepted_unplanned(service: FakeService) -> None:
    document = words(profile=None, entrypoint="examples.digits:DigitsTrial", resources__provider="local")
    document["resources"].pop("instance_type")
    answer = submit(service, document)
    assert answer.status_code == 201, answer.text
    assert answer.json()["plan"] is None
    assert answer.json()["entrypoint"] == "examples.digits:DigitsTrial"


def test_a_plan_that_is_named_is_kept_with_it(service: FakeService) -> None:
    id = service.client.post("/v1/plans", json=words()).json()["id"]
    assert submit(service, words(), f"?plan={id}").json()["plan"] == id


def test_one_of_many_submissions_of_one_name_is_accepted(service: FakeService) -> None:
    answers = service.client.together(*[("POST", "/v1/experiments", {"json": words()})] * 12)
    assert sorted(answer.status_code for answer in answers) == [201] + [409] * 11
    assert {answer.json().get("type") for answer in answers} == {None, "/problems/name-taken"}
    assert len(service.store.submissions().items) == 1


def test_pages_hold_each_experiment_once_newest_first(service: FakeService) -> None:
    for number in range(7):
        service.add(f"e{number}", created_at=float(number), state=ExperimentState.DONE)
    service.add("now", created_at=99.0)
    seen: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        page = service.client.get("/v1/experiments", params={"limit": "3", "state": "done", **cursor}).json()
        seen += [item["name"] for item in page["items"]]
        if page["next"] is None:
            break
        cursor = {"cursor": page["next"]}
    assert seen == [f"e{number}" for number in reversed(range(7))]
    both = service.client.get("/v1/experiments?state=done&state=running&limit=500").json()
    assert len(both["items"]) == 8
    found = service.client.get("/v1/experiments?search=E5+done").json()
    assert [item["name"] for item in found["items"]] == ["e5"]


def test_the_slack_is_to_the_forecast_while_it_runs_and_to_the_end_after_it(service: FakeService) -> None:
    summary = Summary(started_at=5.0, jct_s=50.0, forecast_jct_s=90.0, deadline_s=100.0)
    service.add("runs", summary=summary)
    service.add("ran", state=ExperimentState.DONE, summary=summary)
    service.add("free", summary=replace(summary, deadline_s=None))
    slack = {item["name"]: item["slack_s"] for item in service.client.get("/v1/experiments").json()["items"]}
    assert slack == {"runs": 10.0, "ran": 50.0, "free": None}


PARTS: dict[str, Any] = {
    "trials": {"items": [], "next": None},
    "allocations": {"instances": [], "busy": [], "planned": []},
    "decisions": {"items": [], "extensions": [], "worths": []},
    "logs": {"lines": [], "next": "0"},
}


def test_a_run_before_its_start_is_empty_costs_nothing_and_has_no_report(service: FakeService) -> None:
    service.add("new", state=ExperimentState.QUEUED)
    assert {part: service.client.get(f"/v1/experiments/new/{part}").json() for part in PARTS} == PARTS
    costs = service.client.get("/v1/experiments/new/costs").json()
    assert (costs["cost_usd"], costs["stages"], costs["paid"]) == (0.0, [], {})
    detail = service.client.get("/v1/experiments/new").json()
    assert (detail["stages"], detail["best"]) == ([], None)
    for part in ("report", "export"):
        assert service.client.get(f"/v1/experiments/new/{part}").json()["type"] == "/problems/conflict"
    assert "has not started" in service.client.get("/v1/experiments/new/trials/0").json()["detail"]


def test_trials_are_exported_as_csv(service: FakeService) -> None:
    service.add("test", state=ExperimentState.DONE)
    result = service.runs.results["test"] = virtual_result()
    found = service.client.get("/v1/experiments/test/export")
    assert found.text == rows.to_csv(rows.trial_rows(result))
    assert found.headers["Content-Type"].startswith("text/csv")
    assert found.headers["Content-Disposition"] == 'attachment; filename="test.csv"'
    reports = service.client.get("/v1/experiments/test/export?reports=true")
    assert reports.text == rows.to_csv(rows.report_rows(result))


def test_the_parts_of_a_result_are_those_of_its_report(service: FakeService) -> None:
    service.add("test", state=ExperimentState.DONE)
    result = service.runs.results["test"] = virtual_result()

    def get(part: str) -> Any:
        return service.client.get(f"/v1/experiments/test{part}").json()

    report = get("/report")
    assert report == json.loads(json.dumps(result.to_json()))
    detail = get("")
    assert detail["stages"] == report["stages"]
    assert detail["planned"] == {"jct_s": result.planned_jct_s, "cost_usd": result.planned_cost_usd}
    assert detail["best"]["trial"] == report["best"]["trial"]
    trials = get("/trials?curves=true")["items"]
    assert trials == report["trials"]
    assert "curve" not in get("/trials")["items"][0]
    allocations = get("/allocations")
    assert allocations["busy"] == report["busy"]
    assert allocations["instances"] == report["instances"]
    planned = allocations["planned"]
    assert planned[0]["start_s"] == 0.0
    assert [one["start_s"] for one in planned[1:]] == [one["end_s"] for one in planned[:-1]]
    assert planned[-1]["end_s"] == pytest.approx(result.planned_jct_s)
    costs = get("/costs")
    assert costs["cost_usd"] == result.actual_cost_usd
    assert sum(stage["actual_cost_usd"] for stage in costs["stages"]) == pytest.approx(result.actual_cost_usd)
    assert get("/decisions")["items"] == report["decisions"]


def test_trials_come_page_by_page_and_by_status(service: FakeService) -> None:
    service.add("test")
    result = service.runs.results["test"] = virtual_result()
    first = service.client.get("/v1/experiments/test/trials?limit=3").json()
    rest = service.client.get(f"/v1/experiments/test/trials?cursor={first['next']}").json()
    assert [trial["trial"] for trial in first["items"] + rest["items"]] == [trial.trial for trial in result.trials]
    assert rest["next"] is None
    stopped = service.client.get("/v1/experiments/test/trials?status=stopped&limit=1").json()
    assert [trial["status"] for trial in stopped["items"]] == ["stopped"]
    more = service.client.get(f"/v1/experiments/test/trials?status=stopped&cursor={stopped['next']}").json()
    expected = [trial.trial for trial in result.trials if trial.status == "stopped"]
    assert [trial["trial"] for trial in stopped["items"] + more["items"]] == expected


def test_nan_becomes_null(service: FakeService) -> None:
    service.add("test")
    result = virtual_result()
    odd = replace(result.trials[0], metrics={"loss": float("nan"), "score": float("inf")})
    service.runs.results["test"] = replace(result, trials=(odd, *result.trials[1:]))
    trial = service.client.get("/v1/experiments/test/trials").json()["items"][0]
    assert trial["metrics"] == {"loss": None, "score": None}


def test_logs_continue_where_a_reader_was(service: FakeService) -> None:
    service.add("test")
    service.runs.printed = [PrintedLine(trial=3, text=f"line {number} é\ud800") for number in range(5)]
    first = service.client.get("/v1/experiments/test/logs?limit=3").json()
    rest = service.client.get(f"/v1/experiments/test/logs?cursor={first['next']}").json()
    assert len(first["lines"]) == 3
    assert len(rest["lines"]) == 2
    service.runs.printed.append(PrintedLine(trial=None, text="more"))
    more = service.client.get(f"/v1/experiments/test/logs?cursor={rest['next']}").json()
    assert more["lines"] == [{"trial": None, "rank": None, "text": "more"}]


def test_lines_of_a_gang_have_ranks_and_are_read_by_one(service: FakeService) -> None:
    service.add("test")
    service.runs.printed = [PrintedLine(trial=3, rank=number % 2, text=f"line {number}") for number in range(4)]
    of_one = service.client.get("/v1/experiments/test/logs?rank=1").json()["lines"]
    assert of_one == [{"trial": 3, "rank": 1, "text": f"line {number}"} for number in (1, 3)]


def test_cancel_is_accepted_again_and_resume_once_there_is_something_to_resume(service: FakeService) -> None:
    service.add("test")
    assert service.client.post("/v1/experiments/test/resume").json()["type"] == "/problems/conflict"
    for action, state in (("cancel", "cancelled"), ("cancel", "cancelled"), ("resume", "queued")):
        answer = service.client.post(f"/v1/experiments/test/{action}")
        assert (answer.status_code, answer.json()["state"]) == (202, state)


def test_extend_only_looks_unless_asked_to_do_it(service: FakeService) -> None:
    service.add("test")
    looked = service.client.post("/v1/experiments/test/extend", json={"deadline": "40m"})
    assert (looked.status_code, looked.json()["applied"], service.runs.extended) == (200, False, [])
    done = service.client.post("/v1/experiments/test/extend", json={"max_cost": "$5", "dry_run": False}).json()
    assert done["applied"] is True
    assert done["after"]["max_cost_usd"] == 5.0
    assert (done["added_s"], done["added_usd"], done["stage"]) == (0.0, 0.0, 1)
    assert len(service.runs.extended) == 1


def test_a_trial_is_only_looked_at_unless_asked_for(service: FakeService) -> None:
    service.add("test")
    asked = {"configuration": {"lr": 0.1}, "clone_of": 3}
    looked = service.client.post("/v1/experiments/test/trials", json=asked)
    assert (looked.status_code, looked.json()["applied"], service.runs.extended) == (200, False, [])
    assert looked.json()["trials"] == [{"lr": 0.1}]
    assert service.client.post("/v1/experiments/test/trials", json={**asked, "dry_run": False}).json()["applied"]
    assert len(service.runs.extended) == 1
    assert service.client.post("/v1/experiments/test/trials", json={"lr": 0.1}).status_code == 422
    assert service.client.post("/v1/experiments/test/extend", json={}).status_code == 422


def test_a_limit_is_a_number_of_instances_or_none(service: FakeService) -> None:
    service.add("test")
    for most in (2, 0, None):
        assert service.client.post("/v1/experiments/test/limit", json={"max_instances": most}).status_code == 202
    assert service.runs.limited == [2, 0, None]
