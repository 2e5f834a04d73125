"""REST over the whole service: real processes of experiments (on the virtual provider), real streams of events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rubberband.api.app import create_app
from rubberband.api.settings import Settings
from rubberband.api.store import open_store
from tests.builders.browser import served
from tests.builders.fake_runs import words
from tests.builders.waiting import eventually

PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    home: Path = tmp_path_factory.mktemp("home")
    app = create_app(Settings(home=home), store=open_store(None, home))
    with served(app) as address, httpx.Client(base_url=address, timeout=PATIENCE_S) as client:
        yield client
        app.state.service.feed.close()


def follow(service: httpx.Client, until: Any, **options: Any) -> list[dict[str, Any]]:
    """The events of a stream, up to the first that `until` is true of."""
    found: list[dict[str, Any]] = []
    with service.stream("GET", "/v1/events", **options) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
                if until(found[-1]):
                    return found
    raise AssertionError("the stream ended")


def is_over(event: dict[str, Any]) -> bool:
    return event["kind"] == "state" and event["data"]["state"] not in ("queued", "starting", "running")


def test_an_experiment_from_its_submission_to_its_report(service: httpx.Client) -> None:
    key = {"Idempotency-Key": "once"}
    answer = service.post("/v1/experiments", json=words(name="whole"), headers=key)
    assert answer.status_code == 201, answer.text
    events = follow(service, is_over, params={"experiment": "whole"})
    states = [event["data"]["state"] for event in events if event["kind"] == "state"]
    assert (states[0], states[-1]) == ("queued", "done")
    journalled = [event["seq"] for event in events if event["seq"] is not None]
    assert journalled == list(range(len(journalled)))
    assert [event["id"] for event in events] == sorted({event["id"] for event in events})
    view = service.get("/v1/experiments/whole").json()
    assert view["state"] == "done"
    assert view["slack_s"] > 0.0
    report = service.get("/v1/experiments/whole/report").json()
    assert report["outcome"] == "done"
    assert view["best"]["trial"] == report["best"]["trial"]
    assert view["summary"]["cost_usd"] == pytest.approx(report["actual_cost_usd"])
    assert view["stages"] == report["stages"]
    trials = service.get("/v1/experiments/whole/trials?curves=true&limit=1000").json()["items"]
    assert trials == report["trials"]
    logs = service.get("/v1/experiments/whole/logs?source=process").json()
    assert logs["lines"]
    again = service.get("/v1/experiments/whole/logs", params={"source": "process", "cursor": logs["next"]}).json()
    assert again["lines"] == []
    replayed = service.post("/v1/experiments", json=words(name="whole"), headers=key)
    assert (replayed.status_code, replayed.headers["idempotency-replayed"]) == (201, "true")
    assert 'rubberband_plan_error_ratio{experiment="whole"' in service.get("/metrics").text


def test_a_stream_that_breaks_resumes_and_loses_nothing(service: httpx.Client) -> None:
    service.post("/v1/experiments", json=words(name="broken-stream")).raise_for_status()
    mine = {"experiment": "broken-stream"}
    first = follow(service, lambda event: event["seq"] is not None and event["seq"] >= 3, params=mine)
    second = follow(service, is_over, params=mine, headers={"Last-Event-ID": str(first[-1]["id"])})
    whole = follow(service, is_over, params=mine)
    assert first + second == whole


def test_a_stream_ends_when_its_reader_leaves(service: httpx.Client) -> None:
    until_streams(service, 0)  # earlier tests have left theirs
    with service.stream("GET", "/v1/events?after=latest") as answer:
        lines = answer.iter_lines()
        assert next(lines) == "retry: 1000"
        assert "rubberband_event_streams 1.0" in service.get("/metrics").text
    until_streams(service, 0)


def until_streams(service: httpx.Client, count: int) -> None:
    """Wait until `count` streams of the service are open."""
    eventually(lambda: f"rubberband_event_streams {count}.0" in service.get("/metrics").text, f"{count} streams")


@pytest.mark.long
def test_an_ended_run_is_neither_resumed_nor_extended_nor_run_again(service: httpx.Client) -> None:
    service.post("/v1/experiments", json=words(name="over")).raise_for_status()
    follow(service, is_over, params={"experiment": "over"})
    for action, body in [("resume", None), ("extend", {"deadline": "2h"})]:
        answer = service.post(f"/v1/experiments/over/{action}", json=body)
        assert (answer.status_code, answer.json()["type"]) == (409, "/problems/conflict"), answer.text
    answer = service.post("/v1/experiments", json=words(name="over"))
    assert (answer.status_code, answer.json()["type"]) == (409, "/problems/name-taken")


@pytest.mark.long
def test_a_run_cancelled_before_its_start_never_begins(service: httpx.Client) -> None:
    service.post("/v1/experiments", json=words(name="unwanted")).raise_for_status()
    assert service.post("/v1/experiments/unwanted/cancel").status_code == 202
    events = follow(service, is_over, params={"experiment": "unwanted"})
    assert events[-1]["data"]["state"] in ("cancelled", "done")
