"""What may be done with an experiment in which state: the page offers what the service grants to its client."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import httpx
import pytest

from rubberband.api.app import app_of
from rubberband.api.experiments import ExperimentRuns
from rubberband.api.plans.process import RestAnswer, RestQuestion, answered, read_answer
from rubberband.api.problems import problem_of
from rubberband.api.routes import Service
from rubberband.api.routes.events import EventFeed
from rubberband.api.settings import Settings
from rubberband.api.store import Store, open_store
from rubberband.client.client import Client
from rubberband.errors import InputError
from rubberband.executor import ExperimentFolder, Faults, Inbox
from rubberband.states import ACTIVE, OVER, Action, ExperimentState, State, obstacle
from rubberband.values.submission import Submission, Summary
from tests.builders.fake_runs import NearPlans
from tests.builders.journalled_runs import Recorded, recorded, words
from tests.builders.service_client import served

ACTIONS: tuple[Action, ...] = tuple(action for action in get_args(Action) if action != "stop")
"""Those of an experiment; a trial is stopped on its own page."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """An experiment in a state, and what may be done with it."""

    state: ExperimentState
    journal: str = ""
    """half, unlimited, budget, failed, blameless or done; empty: it has not begun."""
    words: Mapping[str, Any] | None = None
    may: str = ""


def title(case: Case) -> str:
    return f"{case.state.value} {case.journal or 'unbegun'}: {case.may or 'nothing'}"


WORDS, UNLIMITED = words(), {key: value for key, value in words().items() if key != "constraints"}
UNPROFILED = {key: value for key, value in words().items() if key != "profile"}
RENTS = UNPROFILED | {"constraints": {"max_cost": 5}, "resources": {"provider": "aws"}}
CASES = [
    Case(state=ExperimentState.QUEUED, words=WORDS, may="cancel extend"),
    Case(state=ExperimentState.QUEUED, words=UNLIMITED, may="cancel extend"),
    Case(state=ExperimentState.QUEUED, words=UNPROFILED, may="cancel"),
    Case(state=ExperimentState.QUEUED, journal="half", may="cancel extend"),
    Case(state=ExperimentState.STARTING, words=WORDS, may="cancel"),
    Case(state=ExperimentState.STARTING, journal="half", words=WORDS, may="cancel extend"),
    Case(state=ExperimentState.RUNNING, journal="half", words=WORDS, may="cancel extend add limit"),
    Case(state=ExperimentState.RUNNING, journal="unlimited", words=UNLIMITED, may="cancel extend add limit"),
    Case(state=ExperimentState.INTERRUPTED, words=WORDS, may="resume"),
    Case(state=ExperimentState.INTERRUPTED, words=RENTS, may=""),
    Case(state=ExperimentState.INTERRUPTED, journal="half", words=WORDS, may="resume extend add"),
    Case(state=ExperimentState.DONE, journal="done", words=WORDS, may="add delete"),
    Case(state=ExperimentState.CANCELLED, words=WORDS, may="resume delete"),
    Case(state=ExperimentState.CANCELLED, journal="half", words=WORDS, may="resume extend"),
    Case(state=ExperimentState.BUDGET, journal="budget", words=WORDS, may="extend delete"),
    Case(state=ExperimentState.BUDGET, journal="half", words=WORDS, may="resume extend"),
    Case(state=ExperimentState.FAILED, journal="failed", words=WORDS, may="delete"),
    Case(state=ExperimentState.FAILED, journal="blameless", words=WORDS, may="resume extend delete"),
    Case(state=ExperimentState.REFUSED, words=WORDS, may="delete"),
    Case(state=ExperimentState.UNREADABLE, words=WORDS, may=""),
]


@pytest.fixture(scope="module")
def journals() -> Mapping[str, Recorded]:
    trials = [(trial, attempt) for trial in range(27) for attempt in range(1, 9)]
    done = recorded()
    return {
        "done": done,
        "half": done,
        "unlimited": recorded(UNLIMITED),
        "budget": recorded(slowdown=4.0),
        "failed": recorded(faults=Faults(failures=dict.fromkeys(trials, "raised"))),
        "blameless": recorded(faults=Faults(failures=dict.fromkeys(trials, "died"))),
    }


class RestNear(NearPlans):
    """Plans rests in this process, too."""

    async def rest(self, question: RestQuestion, caller: str = "") -> RestAnswer:
        try:
            return read_answer(answered(asdict(question), self.settings.home))
        except InputError as error:
            raise problem_of(error) from None


@dataclass(frozen=True, kw_only=True)
class House:
    """A service whose watcher sleeps, so that states stay as a test sets them."""

    settings: Settings
    store: Store
    ask: Callable[[httpx.Request], httpx.Response]
    journals: Mapping[str, Recorded]

    def put(self, case: Case, name: str) -> None:
        given = dict(case.words or {}) | ({"name": name} if case.words else {})
        made = Submission(name=name, state=case.state, created_at=time.time(), changed_at=1.0, words=given)
        attempt = 1 if case.journal or case.state not in (ExperimentState.QUEUED, ExperimentState.REFUSED) else 0
        summary = Summary(deadline_s=9.0 if case.words is None else None, stages=3)
        assert self.store.add(replace(made, attempt=attempt, summary=summary))
        if case.journal:
            run = self.journals[case.journal].named(name)
            folder = run.put(
                self.settings.home, len(run.events) // 2 if case.journal in ("half", "unlimited") else None
            )
            with folder.driving():
                pass


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, journals: Mapping[str, Recorded]) -> Iterator[House]:
    settings = Settings(home=tmp_path_factory.mktemp("home"), hosts=("*",), providers=("virtual", "aws"))
    store, feed = open_store(None, settings.home), EventFeed()
    runs = ExperimentRuns(settings, store, feed.wake)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "start", lambda: None)
        app = app_of(Service(settings=settings, store=store, plans=RestNear(settings, store), runs=runs, feed=feed))
        with served(app) as client:
            yield House(settings=settings, store=store, ask=client.relay, journals=journals)


def granted(house: House, name: str, action: Action, *, has_limits: bool = True) -> str:
    """Empty if the client is granted it; else why not. Without limits it is extended by a target."""
    with Client("http://127.0.0.1:8642", transport=httpx.MockTransport(house.ask)) as client:
        try:
            match action:
                case "cancel":
                    client.cancel(name)
                case "resume":
                    client.resume(name)
                case "extend" if not has_limits:
                    client.extend(name, target=1e-9)
                case "extend":
                    client.extend(name, deadline="10h", max_cost=50.0)
                case "add" if not has_limits:
                    client.extend(name, num_samples="+1")
                case "add":
                    client.extend(name, num_samples="+1", deadline="10h", max_cost=50.0)
                case "limit":
                    client.limit(name, 1)
                case "delete":
                    client.delete(name)
        except InputError as refused:
            return str(refused)
    return ""


@pytest.mark.by_default(6)
@pytest.mark.parametrize("case", CASES, ids=title)
def test_the_page_offers_and_the_client_is_granted_the_same(house: House, case: Case) -> None:
    at = CASES.index(case)
    for action in ACTIONS:
        name = f"{action}-{at}"
        house.put(case, name)
        page = house.ask(httpx.Request("GET", f"http://127.0.0.1:8642/experiments/{name}"))
        assert set(re.findall(r'data-dialog="(\w+)"', page.text)) == set(case.may.split()), "the page offers it"
        why = granted(house, name, action, has_limits=case.words is not UNLIMITED)
        is_repeated = (case.state, action) == (ExperimentState.CANCELLED, "cancel")  # answered as before, not offered
        assert (not why) == (action in case.may.split() or is_repeated), why or action


@pytest.mark.parametrize("case", [case for case in CASES if case.journal], ids=title)
def test_a_trial_is_stopped_where_its_page_offers_it(house: House, case: Case) -> None:
    name = f"stop-{CASES.index(case)}"
    house.put(case, name)
    with Client("http://127.0.0.1:8642", transport=httpx.MockTransport(house.ask)) as client:
        trials = list(client.trials(name))
        going = {one["trial"] for one in trials if one["status"] in ("queued", "running", "paused")}
        may = "limit" in case.may.split()
        assert not may or case.journal != "half" or 0 < len(going) < len(trials)
        for trial in (min(going, default=0), next(one["trial"] for one in trials if one["trial"] not in going)):
            page = house.ask(httpx.Request("GET", f"http://127.0.0.1:8642/experiments/{name}/trials/{trial}"))
            is_offered = may and trial in going
            assert ('data-dialog="stop"' in page.text) == is_offered
            if is_offered:
                client.stop(name, trial)
            else:
                with pytest.raises(InputError, match="there is nothing to stop" if may else "is "):
                    client.stop(name, trial)
        inbox = Inbox(ExperimentFolder(home=house.settings.home, name=name).inbox)
        asked = [(request.kind, request.trial) for request in inbox.pending()]
        assert asked == ([("stop", min(going))] if may and going else [])


@pytest.mark.parametrize("state", ExperimentState)
@pytest.mark.parametrize("action", ACTIONS)
def test_every_state_is_tried_and_answers_every_action(state: ExperimentState, action: Action) -> None:
    assert state in {case.state for case in CASES}
    is_always_possible = state in ACTIVE or (state, action) == (ExperimentState.BUDGET, "extend")
    assert obstacle(state, action, lambda fact: False) or is_always_possible
    assert not (state in OVER and action == "cancel" and not obstacle(state, action, lambda fact: fact != "asked"))


def test_json_has_the_same_states() -> None:
    assert set(get_args(State)) == set(ExperimentState)
