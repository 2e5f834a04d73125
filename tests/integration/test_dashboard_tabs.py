"""Tabs stay up to date: many share one stream of events, whatever happens to one; and a tab shows notices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rubberband.states import ExperimentState
from tests.builders.browser import expect, visiting
from tests.builders.dashboard_site import BEGUN, Site, service
from tests.builders.waiting import eventually

_TABS = 9
_EVENTS_ONLY = """
    const every = window.setInterval;
    window.setInterval = (work, ms, ...more) => ms < 5000 ? every(work, ms, ...more) : 0;
"""
"""Without the looks that pages take now and then, only events keep them up to date."""
_HIDDEN = "hidden => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true }); %s }"
_HIDE = _HIDDEN % "document.dispatchEvent(new Event('visibilitychange'))"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with service(tmp_path) as found:
        found.add("digits")
        yield found


@pytest.fixture
def tabs(browser: Any, site: Site) -> Iterator[list[Tab]]:
    """Nine tabs of a running experiment."""
    with visiting(browser, site.address) as visit:
        context = visit.page.context
        context.add_init_script(_EVENTS_ONLY)
        found = [Tab(page, site) for page in (visit.page, *(context.new_page() for _ in range(_TABS - 1)))]
        for tab in found:
            tab.open("/experiments/digits")
        yield found


class Tab:
    """One of many pages, and the streams of events that it has open."""

    def __init__(self, page: Any, site: Site) -> None:
        self.page, self._site = page, site
        self.streams: list[Any] = []
        page.on("request", lambda request: self.streams.append(request) if "/v1/events" in request.url else None)
        page.on("requestfinished", self._over)
        page.on("requestfailed", self._over)

    def _over(self, request: Any) -> None:
        if request in self.streams:
            self.streams.remove(request)

    def open(self, path: str) -> None:
        self.page.goto(self._site.address + path)


def listening(tabs: list[Tab]) -> list[Tab]:
    return [tab for tab in tabs if tab.streams]


def settled(tabs: list[Tab]) -> Tab:
    """The only tab that listens, once it is the only one."""

    def is_one() -> bool:
        tabs[-1].page.wait_for_timeout(50)  # playwright hears of requests while it waits
        return len(listening(tabs)) == 1

    eventually(is_one, "one tab that listens")
    return listening(tabs)[0]


def start(site: Site, attempt: int) -> None:
    """Add an event: only a new state is one."""
    state = ExperimentState.STARTING if attempt % 2 == 0 else ExperimentState.RUNNING
    site.change("digits", state=state, attempt=attempt)


def require_live(tabs: list[Tab], site: Site, attempt: int) -> None:
    start(site, attempt)
    for tab in tabs:
        expect(tab.page.get_by_text(f"started {attempt} times")).to_be_visible()


@pytest.mark.long
def test_nine_tabs_are_live_over_one_connection(tabs: list[Tab], site: Site) -> None:
    require_live(tabs, site, 2)
    settled(tabs)
    require_live(tabs, site, 3)


@pytest.mark.long
def test_tabs_stay_live_when_the_one_that_listens_is_closed(tabs: list[Tab], site: Site) -> None:
    first = settled(tabs)
    first.page.close()
    tabs.remove(first)
    require_live(tabs, site, 2)
    settled(tabs)


@pytest.mark.long
def test_tabs_stay_live_when_the_one_that_listens_sleeps(tabs: list[Tab], site: Site) -> None:
    first = settled(tabs)
    lifecycle = first.page.context.new_cdp_session(first.page)
    lifecycle.send("Page.setWebLifecycleState", {"state": "frozen"})
    others = [tab for tab in tabs if tab is not first]
    require_live(others, site, 2)
    lifecycle.send("Page.setWebLifecycleState", {"state": "active"})
    require_live(tabs, site, 3)
    settled(tabs)


@pytest.mark.long
def test_tabs_stay_live_when_the_one_that_listens_crashes(tabs: list[Tab], site: Site) -> None:
    first = settled(tabs)
    with suppress(Exception):  # playwright says that it crashed
        first.page.goto("chrome://crash")
    tabs.remove(first)
    require_live(tabs, site, 2)


@pytest.mark.long
def test_a_hidden_tab_lets_another_listen_and_is_up_to_date_when_it_is_seen(tabs: list[Tab], site: Site) -> None:
    for tab in tabs:
        tab.page.evaluate(_HIDE, True)
    eventually(lambda: _pumped(tabs) == [], "no tab that listens")
    start(site, 2)
    tabs[3].page.evaluate(_HIDE, False)
    expect(tabs[3].page.get_by_text("started 2 times")).to_be_visible()
    assert settled(tabs) is tabs[3]
    require_live(tabs[3:4], site, 3)


@pytest.mark.long
def test_the_page_of_a_finished_experiment_does_not_listen(browser: Any, site: Site) -> None:
    with visiting(browser, site.address) as visit:
        tab = Tab(visit.page, site)
        tab.open("/experiments/digits")
        settled([tab])
        site.change("digits", state=ExperimentState.DONE)
        expect(visit.page.locator("h1 .badge")).to_contain_text("done")
        eventually(lambda: _pumped([tab]) == [], "the end of its stream")
        other = Tab(visit.page.context.new_page(), site)
        other.open("/")
        settled([other])
        site.change("digits", state=ExperimentState.RUNNING)
        expect(visit.page.locator("h1 .badge")).to_have_text("running")


def _pumped(tabs: list[Tab]) -> list[Tab]:
    tabs[-1].page.wait_for_timeout(50)
    return listening(tabs)


_NOTED = """
    window.notices = [];
    window.Notification = class {
        static permission = "granted";
        static requestPermission = async () => "granted";
        constructor(title, words) { window.notices.push([title, words.body, words.tag]); }
    };
"""


def looked_at(page: Any) -> list[Any]:
    """The notices after half a minute."""
    with page.expect_response("**/v1/experiments/digits"):
        page.clock.run_for(30_000)
    page.wait_for_timeout(50)
    return list(page.evaluate("window.notices"))


@pytest.mark.long
def test_a_page_shows_a_notice_when_its_experiment_is_late_and_when_it_ends(browser: Any, site: Site) -> None:
    with visiting(browser, site.address) as visit:
        visit.page.add_init_script(_NOTED)
        visit.page.clock.install()
        page = visit.open("/experiments/digits")
        button = page.get_by_role("button", name="Notify me")
        button.click()
        expect(page.locator("#notify")).to_have_text("Notices on")
        assert looked_at(page) == []
        page.reload()
        expect(page.locator("#notify")).to_have_text("Notices on")
        site.change("digits", summary=replace(BEGUN, deadline_s=60.0, forecast_jct_s=90.0))
        late = ["digits is late", "It is expected to end after its deadline.", "digits late"]
        assert looked_at(page) == [late]
        assert looked_at(page) == [late]
        site.change("digits", state=ExperimentState.DONE, reason="all trials are done")
        assert looked_at(page) == [late, ["digits: done", "all trials are done", "digits end"]]
