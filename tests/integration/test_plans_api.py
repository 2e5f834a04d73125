"""`/v1/plans` over HTTP: previews, as the command line would print them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

import pytest
import yaml

from rubberband.api.app import app_of
from rubberband.api.experiments import ExperimentRuns
from rubberband.api.plans.previews import Plans
from rubberband.api.routes import Service
from rubberband.api.routes.events import EventFeed
from rubberband.api.settings import Settings
from rubberband.api.store import open_store
from tests.builders.fake_runs import FakeRuns, words
from tests.builders.service_client import Client, served


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A service that plans in processes of its own, and runs nothing."""
    home = tmp_path_factory.mktemp("home")
    settings, store, feed = Settings(home=home, hosts=("*",)), open_store(None, home), EventFeed()
    runs = cast("ExperimentRuns", FakeRuns(store=store, clock=settings.clock))
    plans = Plans(settings, store)
    with served(app_of(Service(settings=settings, store=store, plans=plans, runs=runs, feed=feed))) as made:
        yield made


def post(client: Client, body: Any, query: str = "", media_type: str = "application/json") -> Any:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.post(f"/v1/plans{query}", content=content, headers={"Content-Type": media_type})


def test_a_plan_is_previewed_and_found_again(client: Client) -> None:
    answer = post(client, words())
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    plan = answer.json()
    assert plan["schema"] == "rubberband.estimate/1"
    assert plan["feasible"] is True
    where = answer.headers["content-location"]
    assert where == f"/v1/plans/{plan['id']}"
    assert answer.headers["etag"] == f'"{plan["id"]}"'
    assert answer.headers["cache-control"].startswith("private")
    again = client.get(where)
    assert (again.status_code, again.content) == (200, answer.content)
    unchanged = client.get(where, headers={"If-None-Match": again.headers["etag"]})
    assert (unchanged.status_code, unchanged.content) == (304, b"")


def test_the_option_that_is_simulated_is_answered_apart(client: Client) -> None:
    plan = post(client, words()).json()
    (row,) = [option for option in plan["options"] if option.get("pending")]
    assert "prediction" not in row
    answer = client.get(row["url"])
    assert (answer.status_code, answer.headers["content-location"]) == (200, row["url"])
    found = answer.json()
    assert (found["scheduler"], found["feasible"]) == ("asha", True)
    assert found["prediction"]["num_samples"] > 1
    assert client.get(row["url"]).content == answer.content
    unknown = client.get(row["url"].replace("asha", "pbt"))
    assert (unknown.status_code, unknown.json()["type"]) == (404, "/problems/not-found")


def test_the_same_question_has_the_same_answer(client: Client) -> None:
    first = post(client, words())
    assert post(client, words()).content == first.content
    assert post(client, yaml.safe_dump(words()).encode(), media_type="text/yaml").content == first.content
    assert post(client, words(constraints__deadline="1h"), "?set=constraints.deadline%3D20m").content == first.content
    assert post(client, words(), "?policy=static").json()["policy"] == "static"
    assert len(post(client, words(), "?frontier=true").json()["frontier"]) > 1


def test_an_infeasible_experiment_is_reported_with_feasible_limits(client: Client) -> None:
    answer = post(client, words(constraints__deadline="10s"))
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["type"] == "/problems/infeasible"
    assert problem["nearest"]["jct_s"] > 10.0
    assert problem["estimate"]["feasible"] is False
    again = client.get(answer.headers["content-location"])
    assert (again.status_code, again.content) == (422, answer.content)
    later = f"?set=constraints.deadline%3D{problem['nearest_words']['deadline']}"
    assert post(client, words(constraints__deadline="10s"), later).status_code == 200
