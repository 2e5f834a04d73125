"""The page of the REST API: every operation and type of the document is on it, and it needs no script to be read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rubberband.api.app import create_app
from rubberband.api.settings import Settings
from rubberband.api.store import open_store
from tests.builders.accessibility import faults
from tests.builders.browser import PHONE, chromium, served, visiting
from tests.builders.fake_runs import fake_service


def test_the_page_has_every_operation_and_every_type_of_the_document(tmp_path: Path) -> None:
    with fake_service(tmp_path) as service:
        document = service.client.get("/openapi.json").json()
        answer = service.client.get("/docs", headers={"Accept": "text/html"})
    ids = set(re.findall(r' id="([^"]*)"', answer.text))
    operations = [one for methods in document["paths"].values() for one in methods.values()]
    assert {one["operationId"] for one in operations} <= ids
    assert {f"type-{name}" for name in document["components"]["schemas"]} <= ids
    assert set(re.findall(r'href="#([^"]*)"', answer.text)) <= ids, "each link within the page leads somewhere"
    for operation in operations:
        assert all(f"<code>{one['name']}</code>" in answer.text for one in operation.get("parameters", ()))
    assert "{name}" not in "".join(re.findall(r"curl [^<]*", answer.text)), "curl expands braces"


def test_the_page_is_light(tmp_path: Path) -> None:
    with fake_service(tmp_path) as service:
        answer = service.client.get("/docs", headers={"Accept": "text/html", "Accept-Encoding": "gzip"})
        assert int(answer.headers["Content-Length"]) < 60_000


@pytest.mark.long
def test_a_reader_opens_copies_and_follows_an_operation(tmp_path: Path) -> None:
    app: Any = create_app(Settings(home=tmp_path), store=open_store(None, tmp_path))
    with (
        served(app) as address,
        chromium() as browser,
        visiting(browser, address, permissions=["clipboard-read", "clipboard-write"]) as visit,
    ):
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


@pytest.mark.long
def test_the_page_is_read_without_a_script(tmp_path: Path) -> None:
    app: Any = create_app(Settings(home=tmp_path), store=open_store(None, tmp_path))
    with served(app) as address, chromium() as browser, visiting(browser, address, java_script_enabled=False) as visit:
        page = visit.open("/docs")
        page.locator("#getTrial summary").click()
        page.locator("#getTrial pre").first.wait_for()
