"""Notices of the browser about an experiment whose page is open."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rubberband.states import ExperimentState
from tests.builders.browser import visiting
from tests.builders.dashboard_site import BEGUN, Site, service

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install playwright")
expect = playwright.expect
_NOTED = """
    window.notices = [];
    window.Notification = class {
        static permission = "granted";
        static requestPermission = async () => "granted";
        constructor(title, words) { window.notices.push([title, words.body, words.tag]); }
    };
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with service(tmp_path) as found:
        found.add("digits")
        yield found


def looked_at(page: Any) -> list[Any]:
    """The notices after half a minute."""
    with page.expect_response("**/v1/experiments/digits"):
        page.clock.run_for(30_000)
    page.wait_for_timeout(50)
    return list(page.evaluate("window.notices"))


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
