"""`/metrics`, `/healthz`, `/readyz` and `/v1/prices`: how the service and its experiments do, and what AWS asks."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rubberband.api.routes import service as prices
from rubberband.api.routes.metrics import MAX_ENDED
from rubberband.cloud.catalogue import LiveTable, catalogue
from rubberband.cloud.pool import Pool, PoolLimits, PoolServer
from rubberband.cloud.virtual import VirtualClock, VirtualProvider
from rubberband.errors import JournalError
from rubberband.spec.pool import pool_folder
from rubberband.states import ExperimentState
from rubberband.values.submission import Summary
from tests.builders.fake_runs import FakeService, fake_service, virtual_result
from tests.builders.memory import MemoryPoolJournal
from tests.builders.pools import OFFER
from tests.builders.waiting import eventually

Samples = dict[tuple[str, ...], float]


def scraped(service: FakeService) -> Samples:
    """(name, label values...) -> value, as Prometheus reads it."""
    answer = service.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


SUMMARY = Summary(
    instances=3,
    started_at=1.0,
    jct_s=60.0,
    cost_usd=2.5,
    planned_jct_s=100.0,
    planned_cost_usd=4.0,
    forecast_jct_s=110.0,
    forecast_cost_usd=5.0,
    deadline_s=120.0,
    max_cost_usd=10.0,
)


def test_a_running_experiment_is_measured(service: FakeService) -> None:
    service.add("test", summary=SUMMARY)
    result = service.runs.results["test"] = virtual_result()
    found = scraped(service)
    assert found["rubberband_spend_usd", "test"] == 2.5
    assert found["rubberband_max_cost_usd", "test"] == 10.0
    assert found["rubberband_deadline_slack_seconds", "test"] == 10.0
    assert found["rubberband_instances", "test"] == 3.0
    assert found["process_resident_memory_bytes",] > 0.0
    assert found["rubberband_plan_error_ratio", "test", "time"] == pytest.approx(0.1)
    assert found["rubberband_plan_error_ratio", "test", "cost"] == pytest.approx(0.25)
    assert found["rubberband_experiments", "running"] == 1.0
    assert found["rubberband_experiments", "failed"] == 0.0
    trials = {key[2]: value for key, value in found.items() if key[0] == "rubberband_trials"}
    assert sum(trials.values()) == len(result.trials)


def test_unknown_values_are_left_out(service: FakeService) -> None:
    service.add("new", state=ExperimentState.QUEUED)
    found = scraped(service)
    assert found["rubberband_spend_usd", "new"] == 0.0
    assert ("rubberband_max_cost_usd", "new") not in found
    assert ("rubberband_deadline_slack_seconds", "new") not in found


def test_the_plan_error_of_what_is_done_is_that_of_what_came(service: FakeService) -> None:
    service.add("test", state=ExperimentState.DONE, summary=replace(SUMMARY, jct_s=90.0))
    found = scraped(service)
    assert found["rubberband_plan_error_ratio", "test", "time"] == pytest.approx(-0.1)
    assert ("rubberband_instances", "test") not in found


def test_labels_stay_bounded(service: FakeService) -> None:
    for number in range(MAX_ENDED + 20):
        service.add(f"e{number}", state=ExperimentState.DONE, created_at=float(number))
    found = scraped(service)
    assert sum(key[0] == "rubberband_spend_usd" for key in found) == MAX_ENDED
    assert ("rubberband_spend_usd", f"e{MAX_ENDED + 19}") in found
    assert found["rubberband_experiments", "done"] == MAX_ENDED + 20


def test_requests_are_counted_by_route_and_not_by_what_was_asked(service: FakeService) -> None:
    for path in ("/v1/experiments/a", "/v1/experiments/b", "/secret/x", "/secret/y"):
        service.client.get(path)
    service.client.request("BREW", "/healthz")
    found = scraped(service)
    assert found["rubberband_requests_total", "GET", "/v1/experiments/{name}", "404"] == 2.0
    assert found["rubberband_requests_total", "GET", "(none)", "404"] == 2.0
    assert found["rubberband_requests_total", "(other)", "/healthz", "405"] == 1.0
    assert found["rubberband_request_seconds_count", "GET", "/v1/experiments/{name}"] == 2.0
    assert "secret" not in str(list(found))


def test_alive_and_ready(service: FakeService) -> None:
    assert service.client.get("/healthz").json()["status"] == "ok"
    assert service.client.get("/readyz").json()["checks"] == {"store": "ok", "watcher": "ok", "planner": "ok"}
    service.runs.alive = False
    answer = service.client.get("/readyz")
    assert (answer.status_code, answer.json()["status"]) == (503, "unavailable")
    assert answer.json()["checks"]["watcher"] != "ok"
    assert service.client.get("/healthz").status_code == 200


def test_not_ready_without_the_store_and_no_details(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    def away() -> None:
        raise JournalError("postgresql://rubberband@db.internal does not answer")

    monkeypatch.setattr(service.store, "check", away)
    answer = service.client.get("/readyz")
    assert (answer.status_code, answer.json()["checks"]["store"]) == (503, "does not answer")
    assert "internal" not in answer.text


def test_a_pool_that_is_up_is_measured(service: FakeService, tmp_path: Path) -> None:
    folder, clock = pool_folder("team", tmp_path), VirtualClock(1_700_000_000.0)
    folder.write({"instances": 2, "gpus_per_instance": 4})
    assert ("rubberband_pool_instances", "team") not in scraped(service), "no broker answers"
    limits = PoolLimits(instances=2, gpus=4, price_usd_per_hour=3.6)
    pool = Pool(
        VirtualProvider("team", clock, offer=OFFER), MemoryPoolJournal(), limits, clock.now, start=lambda work: work()
    )
    pool.launch("a.1", "a", "i", 1, 600.0)
    server = PoolServer(folder, pool, look_s=0.01)
    serving = threading.Thread(target=server.run)
    serving.start()
    try:
        held = ("rubberband_pool_gpus", "team", "held")
        found = eventually(lambda: seen if held in (seen := scraped(service)) else None, "the broker's figures")
    finally:
        server.stop()
        serving.join()
    assert found["rubberband_pool_instances", "team"] == 1.0
    assert found["rubberband_pool_waiting_requests", "team"] == 0.0
    assert found["rubberband_pool_gpus", "team", "held"] + found["rubberband_pool_gpus", "team", "free"] == 4.0


def test_all_with_gpus_cheapest_first(service: FakeService) -> None:
    listed = service.client.get("/v1/prices").json()
    assert (listed["schema"], listed["region"]) == ("rubberband.prices/1", "us-east-1")
    each = [row["on_demand_usd_per_hour"] / row["gpus"] for row in listed["types"]]
    assert each == sorted(each)
    assert "AWS" in listed["notes"][0]


def test_some_in_a_region(service: FakeService) -> None:
    listed = service.client.get("/v1/prices?type=p3.2xlarge&type=p3.8xlarge&type=p3.2xlarge&region=us-west-2").json()
    assert [row["instance_type"] for row in listed["types"]] == ["p3.2xlarge", "p3.8xlarge"]


def test_aws_is_asked_where_the_service_rents_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def answer(types: Any, region: str, _home: Any) -> LiveTable:
        asked.append((types, region))
        return LiveTable(catalogue())

    monkeypatch.setattr(prices, "prices_of", answer)
    with fake_service(tmp_path, providers=("aws",)) as service:
        listed = service.client.get("/v1/prices?type=p3.2xlarge").json()
    assert asked == [(["p3.2xlarge"], "us-east-1")]
    assert listed["notes"] == []
