"""Signing in to the dashboard, and whether its pages can be used by everybody: names, order, contrast."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from rubberband.api.app import app_of
from rubberband.api.experiments import ExperimentRuns
from rubberband.api.plans.previews import Plans
from rubberband.api.routes import Service
from rubberband.api.routes.events import EventFeed
from rubberband.api.security import Tokens
from rubberband.api.settings import Settings
from rubberband.api.store import Store, open_store
from rubberband.states import ExperimentState
from rubberband.values.submission import Submission
from tests.builders.browser import served, visiting
from tests.builders.fake_runs import FakeRuns

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install playwright")
expect = playwright.expect
SCALING = (Path(__file__).parents[2] / "examples" / "scaling.yaml").read_text(encoding="utf-8")

FAULTS = """() => {
  const faults = [];
  const seen = (element) => element.checkVisibility({ visibilityProperty: true });
  const named = (element) => element.getAttribute("aria-label") || element.getAttribute("aria-labelledby")
    || element.labels?.length || element.textContent.trim() || element.title;
  const all = (selector) => [...document.querySelectorAll(selector)].filter(seen);
  for (const field of all("input:not([type=hidden]), select, textarea")) {
    if (!field.labels?.length && !field.getAttribute("aria-label")) faults.push(`no label: ${field.outerHTML}`);
  }
  for (const control of all("a[href], button, summary")) {
    if (!named(control)) faults.push(`no name: ${control.outerHTML}`);
  }
  for (const part of all("[onclick], div[role=button], [tabindex]:not([tabindex='0']):not([tabindex='-1'])")) {
    faults.push(`not for keyboards: ${part.outerHTML.slice(0, 80)}`);
  }
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  for (const id of new Set(ids.filter((one, at) => ids.indexOf(one) !== at))) faults.push(`id twice: ${id}`);
  let level = 0;
  for (const heading of all("h1, h2, h3, h4")) {
    const next = Number(heading.tagName[1]);
    if (next > level + 1) faults.push(`heading skips a level: ${heading.textContent}`);
    level = next;
  }
  if (all("h1").length !== 1) faults.push("not one h1");
  for (const landmark of ["main", "header"]) if (!all(landmark).length) faults.push(`no ${landmark}`);
  for (const table of all("table")) if (!table.caption && !table.ariaLabel) faults.push("a table without a name");
  for (const picture of all("[role=img]")) {
    if (!picture.ariaLabel && !picture.getAttribute("aria-labelledby")) faults.push("a picture without a name");
  }
  if (!document.documentElement.lang) faults.push("no language");
  return faults;
}"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return open_store(None, tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def address(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    settings = Settings(home=tmp_path_factory.mktemp("home"), auth=True, entrypoints=("examples.scaling:*",))
    runs = cast("ExperimentRuns", FakeRuns(store=store, clock=settings.clock))
    now = time.time()
    store.add(Submission(name="digits", state=ExperimentState.QUEUED, created_at=now, changed_at=now))
    parts = Service(settings=settings, store=store, plans=Plans(settings, store), runs=runs, feed=EventFeed())
    with served(app_of(parts)) as found:
        yield found


@pytest.mark.long
def test_a_reader_signs_in_previews_may_not_submit_and_signs_out(browser: Any, address: str, store: Store) -> None:
    _, token = Tokens(store).create("anna", "read")
    with visiting(browser, address) as visit:
        page = visit.open("/plan")
        expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
        assert page.evaluate(FAULTS) == []
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
def test_every_page_has_names_landmarks_and_headings_in_order(browser: Any, address: str, store: Store) -> None:
    _, token = Tokens(store).create("ops", "admin")
    with visiting(browser, address, phone=True) as visit:
        page = visit.open("/login")
        page.get_by_label("Token").fill(token)
        page.get_by_role("button", name="Sign in").click()
        expect(page.locator("#rows tr")).to_have_count(1)
        assert visit.overflow_px() <= 0
        found = {"/": page.evaluate(FAULTS)}
        visit.open("/plan")
        page.get_by_label("Experiment file").fill(SCALING)
        page.get_by_role("button", name="Preview").click()
        expect(page.get_by_role("button", name="Submit…")).to_be_enabled()
        page.locator("summary", has_text="Assumptions").click()
        found["/plan"] = page.evaluate(FAULTS)
        page.get_by_role("button", name="Submit…").click()
        found["dialog"] = page.evaluate(FAULTS)
        visit.open("/experiments/digits")
        found["/experiments/digits"] = page.evaluate(FAULTS)
        visit.open("/nowhere")
        found["/nowhere"] = page.evaluate(FAULTS)
        visit.errors.clear()
    assert found == {path: [] for path in found}
