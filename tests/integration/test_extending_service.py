"""Other limits over HTTP: planned in a process of its own, within the limits that previews have, and granted once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import rubberband
from rubberband.api.app import app_of
from rubberband.api.experiments import ExperimentRuns
from rubberband.api.plans.previews import Plans
from rubberband.api.plans.process import RestQuestion
from rubberband.api.problems import HttpProblem
from rubberband.api.routes import Service
from rubberband.api.routes.events import EventFeed
from rubberband.api.settings import ServiceLimits
from rubberband.executor import ExperimentFolder, Inbox, extending
from rubberband.running.run import run_experiment
from rubberband.states import ExperimentState
from tests.builders.plan_services import served as planning
from tests.builders.service_client import ADDRESS, Client, served
from tests.builders.service_runs import DONE, STAND_IN, House, experiment, template

RUNNING = ExperimentState.RUNNING


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return template(tmp_path_factory.mktemp("template"))


@contextmanager
def service(home: Path, journal: Path, **limits: Any) -> Iterator[tuple[Client, House, Plans]]:
    """A service with an experiment `one` that runs, until the house lets it go on."""
    house = House(home, journal)
    house.tell(one="hold")
    house.set(hosts=("*",), limits=ServiceLimits(**limits))
    settings, feed = house.settings, EventFeed()
    runs, plans = ExperimentRuns(settings, house.store, feed.wake, command=STAND_IN), Plans(settings, house.store)
    with served(app_of(Service(settings=settings, store=house.store, plans=plans, runs=runs, feed=feed))) as client:
        runs.submit(experiment())
        house.wait("one", RUNNING)
        try:
            yield client, house, plans
        finally:
            house.go()
            house.wait("one", DONE)


def ask(client: Client, name: str = "one", **words: Any) -> Any:
    return client.post(f"/v1/experiments/{name}/extend", json=words, headers={"idempotency-key": "k"})


def pending(house: House) -> list[str]:
    return [asked.kind for asked in Inbox(ExperimentFolder(home=house.home, name="one").inbox).pending()]


def test_other_limits_are_planned_elsewhere_and_granted_once(tmp_path: Path, journal: Path) -> None:
    with service(tmp_path, journal, max_running=1) as (client, house, plans):
        assert plans.pids == []
        seen = ask(client, deadline="2h")
        assert (seen.status_code, seen.json()["applied"]) == (200, False)
        assert len(plans.pids) == 1
        assert pending(house) == []
        done = ask(client, deadline="2h", dry_run=False)
        assert done.json()["applied"] is True
        assert done.json()["after"]["deadline_s"] == seen.json()["after"]["deadline_s"]
        house.store.free_key("k", owner="")  # as if the server died before the answer was kept
        assert ask(client, deadline="2h", dry_run=False).json()["applied"] is True
        assert pending(house) == ["extend"]
        assert "is before the" in ask(client, deadline="1m").json()["detail"]
        client.post("/v1/experiments", json=experiment("waits").to_words())
        assert ask(client, "waits", deadline="2h").json()["before"]["reason"] == "it is queued; nothing has started"


def test_a_target_is_changed_while_it_runs(tmp_path: Path, journal: Path) -> None:
    with service(tmp_path, journal) as (client, house, _):
        wrong = ask(client, target="low")
        assert wrong.status_code == 422
        seen = ask(client, target=0.01)
        assert (seen.json()["before"]["target"], seen.json()["after"]["target"]) == (None, 0.01)
        assert pending(house) == []
        with rubberband.Client(ADDRESS, transport=httpx.MockTransport(client.relay)) as user:
            assert user.extend("one", target=0.01, dry_run=False)["applied"]
        (asked,) = Inbox(house.folder().inbox).pending()
        assert (asked.kind, asked.target, asked.deadline_s) == ("extend", 0.01, None)


def test_trials_added_to_a_search_that_has_ended_are_shown_until_it_is_resumed_or_they_are_withdrawn(
    tmp_path: Path, journal: Path
) -> None:
    with service(tmp_path, journal) as (client, house, _):
        house.go()
        house.wait("one", DONE)
        address = "/v1/experiments/one"
        assert client.post(f"{address}/cancel").status_code == 409
        assert ask(client, num_samples="+2", dry_run=False).json()["applied"]
        assert client.get(address).json()["summary"]["added_trials"] == 2
        waits = "2 trials added; `rubberband resume one` trains them"
        assert waits.replace("`", "") in client.get("/fragments/experiments/one").text.replace("`", "")
        assert "2 trials added" in client.get("/").text
        answer = client.post(f"{address}/cancel")
        assert (answer.status_code, answer.json()["state"]) == (202, "done")
        assert answer.json()["summary"]["added_trials"] == 0
        assert pending(house) == []
        assert "it is over" in client.post(f"{address}/resume").json()["detail"]


@pytest.mark.long
def test_a_question_that_takes_too_long_is_given_up_like_a_preview(tmp_path: Path, journal: Path) -> None:
    # A process does not even start within so little.
    with service(tmp_path, journal, planning_s=0.001) as (client, house, _):
        for dry_run in (True, False):
            answer = ask(client, deadline="2h", dry_run=dry_run)
            assert (answer.status_code, answer.json()["type"]) == (422, "/problems/planning-too-long")
            assert "rubberband extend one" in answer.json()["detail"]
        assert pending(house) == []


@pytest.mark.long
def test_planners_find_a_store_whose_url_is_hidden_from_the_process_list(tmp_path: Path, postgresql_url: str) -> None:
    folder = ExperimentFolder(home=tmp_path, name="template", store=postgresql_url)
    run_experiment(experiment("template"), folder)

    async def ask_of(plans: Plans) -> None:
        question = RestQuestion(name="template", now=0.0, limits=extending.Limits(deadline_s=7200.0))
        with pytest.raises(HttpProblem, match=r"it has ended \(done\)"):
            await plans.rest(question)
        (pid,) = plans.pids
        assert "postgresql" not in Path(f"/proc/{pid}/cmdline").read_text()

    planning(tmp_path, ask_of, store=postgresql_url)
