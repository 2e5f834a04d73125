"""Who sees the dashboard, and how: signed in and out, and by http from another host."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rubberband.api import security
from rubberband.api.plans.previews import Plans
from rubberband.api.routes import events
from rubberband.api.settings import ServiceLimits
from tests.builders.browser import ELSEWHERE, expect, visiting
from tests.builders.dashboard_site import Site, service
from tests.builders.documents import ROOT

SCALING = (ROOT / "examples" / "scaling.yaml").read_text(encoding="utf-8")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A service that asks for tokens."""
    with service(tmp_path, auth=True, clock=time.time, limits=ServiceLimits(streams=1)) as found:
        found.add("digits", "queued")
        yield found


def sign_in(page: Any, token: str) -> None:
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Experiments")


@pytest.mark.long
def test_a_reader_signs_in_previews_may_not_submit_and_signs_out(browser: Any, tmp_path: Path) -> None:
    with (
        service(tmp_path, Plans, auth=True, entrypoints=("examples.scaling:*",)) as site,
        visiting(browser, site.address) as visit,
    ):
        _, token = site.tokens.create("anna", "read")
        page = visit.open("/plan")
        expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
        visit.shot("login")
        page.get_by_label("Token").fill("rb_wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("The token is unknown")
        expect(page.get_by_label("Token")).to_be_focused()
        visit.shot("login-wrong")
        page.get_by_label("Token").fill(token)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Preview a plan")
        expect(page.get_by_text("anna")).to_be_visible()
        page.get_by_label("Experiment file").fill(SCALING)
        page.get_by_role("button", name="Preview").click()
        expect(page.locator("#headline")).to_contain_text("within the limits")
        expect(page.locator("#may")).to_contain_text("the token 'anna' may only read")
        expect(page.locator("#submit")).to_be_hidden()
        page.get_by_role("link", name="Experiments").click()
        expect(page.get_by_role("link", name="New experiment")).to_have_count(0)
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
        visit.open("/")
        expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")


@pytest.mark.long
def test_a_page_whose_token_is_revoked_by_another_process_asks_for_another(
    browser: Any, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "REMEMBERED_S", 0.1)
    monkeypatch.setattr(events, "CHECK_S", 0.1)
    record, text = site.tokens.create("anna", "read")
    with visiting(browser, site.address) as visit:
        page = visit.open("/")
        with page.expect_response(re.compile("/v1/events")):
            sign_in(page, text)
        site.tokens.revoke(record.id)
        expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
        visit.errors.clear()


@pytest.mark.long
def test_a_page_whose_stream_is_refused_for_a_while_resumes(browser: Any, site: Site) -> None:
    _, text = site.tokens.create("anna", "read")
    with visiting(browser, site.address) as first, visiting(browser, site.address) as visit:
        page, other = first.open("/"), visit.open("/")
        with page.expect_response(re.compile("/v1/events")):
            sign_in(page, text)
        with other.expect_response(lambda answer: "/v1/events" in answer.url and answer.status == 429):
            sign_in(other, text)
        with other.expect_response(lambda answer: "/v1/events" in answer.url and answer.status == 200):
            page.close()
        site.add("another", "queued")
        site.feed.wake()
        expect(other.get_by_role("link", name="another")).to_be_visible()
        visit.errors.clear()


def test_by_http_a_command_is_copied_or_selected_and_an_experiment_cancelled(browser: Any, tmp_path: Path) -> None:
    """From another host a browser gives neither a clipboard nor random ids then."""
    with (
        service(tmp_path, hosts=(ELSEWHERE,)) as site,
        visiting(browser, site.address.replace("127.0.0.1", ELSEWHERE)) as visit,
    ):
        page = visit.open("/")
        assert not page.evaluate("window.isSecureContext || Boolean(navigator.clipboard || crypto.randomUUID)")
        page.get_by_role("button", name="Copy").click()
        expect(page.get_by_role("status")).to_contain_text("Copied.")
        field = page.get_by_role("searchbox")
        field.press("Control+V")
        expect(field).to_have_value(f"rubberband submit experiment.yaml --server {page.url.rstrip('/')}")
        page.reload()
        page.evaluate("document.execCommand = () => false")
        page.get_by_role("button", name="Copy").click()
        expect(page.get_by_role("status")).to_contain_text("press Ctrl+C")
        assert page.evaluate("String(getSelection())").startswith("rubberband submit experiment.yaml")
        site.add("digits")
        visit.open("/experiments/digits")
        expect(page.get_by_role("button", name="Cancel", exact=True)).to_be_visible()
        expect(page.locator("#notify"), "no notices are offered").to_be_hidden()
        page.get_by_role("button", name="Cancel", exact=True).click()
        page.get_by_role("button", name="Cancel the experiment").click()
        expect(page.locator("h1 .badge")).to_have_text("cancelled")
