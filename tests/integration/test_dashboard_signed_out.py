"""A page that is open when its reader is signed out, or its stream refused: it says so, or goes on by itself."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from rubberband.api import security as tokens_module
from rubberband.api.app import app_of
from rubberband.api.experiments import ExperimentRuns
from rubberband.api.plans.previews import Plans
from rubberband.api.routes import Service, events
from rubberband.api.routes.events import EventFeed
from rubberband.api.security import Tokens
from rubberband.api.settings import ServiceLimits, Settings
from rubberband.api.store import Store, open_store
from rubberband.states import ExperimentState
from rubberband.values.submission import Submission
from tests.builders.browser import served, visiting
from tests.builders.fake_runs import FakeRuns

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install playwright")
expect = playwright.expect


class NoPlans(Plans):
    """Starts no process: nothing is planned here."""

    async def start(self) -> None:
        pass


@pytest.fixture
def store(tmp_path: Path) -> Store:
    opened = open_store(None, tmp_path)
    add(opened, "digits")
    return opened


@pytest.fixture
def feed() -> EventFeed:
    return EventFeed()


@pytest.fixture
def address(store: Store, feed: EventFeed, tmp_path: Path) -> Iterator[str]:
    settings = Settings(home=tmp_path, auth=True, limits=ServiceLimits(streams=1))
    runs = cast("ExperimentRuns", FakeRuns(store=store, clock=settings.clock))
    parts = Service(settings=settings, store=store, plans=NoPlans(settings, store), runs=runs, feed=feed)
    with served(app_of(parts)) as found:
        yield found


def add(store: Store, name: str) -> None:
    now = time.time()
    store.add(Submission(name=name, state=ExperimentState.QUEUED, created_at=now, changed_at=now))


def sign_in(page: Any, token: str) -> None:
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Experiments")


@pytest.mark.long
def test_a_page_whose_token_is_revoked_by_another_process_asks_for_another(
    browser: Any, address: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens_module, "REMEMBERED_S", 0.1)
    monkeypatch.setattr(events, "CHECK_S", 0.1)
    tokens = Tokens(store)
    record, text = tokens.create("anna", "read")
    with visiting(browser, address) as visit:
        page = visit.open("/")
        with page.expect_response(re.compile("/v1/events")):
            sign_in(page, text)
        tokens.revoke(record.id)
        expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
        visit.errors.clear()


@pytest.mark.long
def test_a_page_whose_stream_is_refused_for_a_while_resumes(
    browser: Any, address: str, store: Store, feed: EventFeed
) -> None:
    _, text = Tokens(store).create("anna", "read")
    with visiting(browser, address) as first, visiting(browser, address) as visit:
        page, other = first.open("/"), visit.open("/")
        with page.expect_response(re.compile("/v1/events")):
            sign_in(page, text)
        with other.expect_response(lambda answer: "/v1/events" in answer.url and answer.status == 429):
            sign_in(other, text)
        with other.expect_response(lambda answer: "/v1/events" in answer.url and answer.status == 200):
            page.close()
        add(store, "another")
        feed.wake()
        expect(other.get_by_role("link", name="another")).to_be_visible()
        visit.errors.clear()
