"""Pages by http from another host, where a browser gives neither a clipboard nor random ids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.builders.browser import ELSEWHERE, visiting
from tests.builders.dashboard_site import Site, service

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install playwright")
expect = playwright.expect


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with service(tmp_path, hosts=(ELSEWHERE,)) as found:
        yield found


@pytest.fixture
def page(browser: Any, site: Site) -> Iterator[Any]:
    with visiting(browser, site.address.replace("127.0.0.1", ELSEWHERE)) as visit:
        page = visit.open("/")
        assert not page.evaluate("window.isSecureContext || Boolean(navigator.clipboard || crypto.randomUUID)")
        yield page


def test_a_command_is_copied_or_selected_where_it_cannot_be(page: Any) -> None:
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


def test_an_experiment_is_cancelled_and_no_notices_are_offered(page: Any, site: Site) -> None:
    site.add("digits")
    page.goto(page.url + "experiments/digits")
    expect(page.get_by_role("button", name="Cancel", exact=True)).to_be_visible()
    expect(page.locator("#notify")).to_be_hidden()
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.get_by_role("button", name="Cancel the experiment").click()
    expect(page.locator("h1 .badge")).to_have_text("cancelled")
