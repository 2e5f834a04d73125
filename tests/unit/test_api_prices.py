"""`/v1/prices`: what `rubberband cloud prices` prints, without asking AWS where the service does not rent there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rubberband.api.routes import service as prices
from rubberband.cloud.aws.prices import LiveTable
from rubberband.cloud.catalogue import catalogue
from tests.builders.fake_runs import FakeService, fake_service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeService]:
    with fake_service(tmp_path_factory.mktemp("home")) as made:
        yield made


def test_all_with_gpus_cheapest_first(service: FakeService) -> None:
    listed = service.client.get("/v1/prices").json()
    assert (listed["schema"], listed["region"]) == ("rubberband.prices/1", "us-east-1")
    each = [row["on_demand_usd_per_hour"] / row["gpus"] for row in listed["types"]]
    assert each == sorted(each)
    assert "AWS" in listed["notes"][0]


def test_some_in_a_region(service: FakeService) -> None:
    listed = service.client.get("/v1/prices?type=p3.2xlarge&type=p3.8xlarge&type=p3.2xlarge&region=us-west-2").json()
    assert [row["instance_type"] for row in listed["types"]] == ["p3.2xlarge", "p3.8xlarge"]


@pytest.mark.parametrize(
    "query", ["type=p3.9xlarge", "type=../x", "type=", "region=xx-nowhere-9", "region=", "type=" + "a" * 99 + ".b"]
)
def test_an_unknown_token_is_invalid(service: FakeService, query: str) -> None:
    answer = service.client.get(f"/v1/prices?{query}")
    assert (answer.status_code, answer.json()["type"]) == (422, "/problems/invalid")


def test_aws_is_asked_where_the_service_rents_there(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def answer(types: Any, region: str, _home: Any) -> LiveTable:
        asked.append((types, region))
        return LiveTable(catalogue())

    monkeypatch.setattr(prices, "prices_of", answer)
    with fake_service(tmp_path_factory.mktemp("home"), providers=("aws",)) as service:
        listed = service.client.get("/v1/prices?type=p3.2xlarge").json()
    assert asked == [(["p3.2xlarge"], "us-east-1")]
    assert listed["notes"] == []
