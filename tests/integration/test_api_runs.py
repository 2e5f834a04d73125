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


@pytest.mark.long
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
