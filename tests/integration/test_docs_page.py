"""The page of the REST API in a browser; it needs no script to be read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.builders.accessibility import faults
from tests.builders.browser import PHONE, visiting
from tests.builders.dashboard_site import service

pytestmark = pytest.mark.long


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with service(tmp_path) as site:
        yield site.address


def test_a_reader_opens_copies_and_follows_an_operation(browser: Any, address: str) -> None:
    with visiting(browser, address, permissions=["clipboard-read", "clipboard-write"]) as visit:
        page = visit.open("/docs#submitExperiment")
        operation = page.locator("#submitExperiment")
        operation.get_by_role("button", name="Copy").click()
        page.get_by_text("Copied.").wait_for()
        copied = page.evaluate("navigator.clipboard.readText()")
        assert copied.startswith(f"curl {address}/v1/experiments")
        assert "--data-binary @experiment.yaml" in copied
        operation.get_by_role("link", name="SubmittedView").first.click()
        page.locator("#type-SubmittedView table").wait_for()
        assert faults(page) == [], faults(page)
        assert visit.overflow_px() <= 0
        visit.shot("docs")
        page.set_viewport_size(PHONE)
        assert visit.overflow_px() <= 0
        assert faults(page) == [], faults(page)
        visit.shot("docs-phone", whole=False)


def test_the_page_is_read_without_a_script(browser: Any, address: str) -> None:
    with visiting(browser, address, java_script_enabled=False) as visit:
        page = visit.open("/docs")
        page.locator("#getTrial summary").click()
        page.locator("#getTrial pre").first.wait_for()
