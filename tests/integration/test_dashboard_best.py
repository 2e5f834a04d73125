"""The top of an experiment's page in a browser: the best trial, to be copied, and why others failed."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import yaml

from rubberband.api.app import create_app
from rubberband.api.settings import Settings
from rubberband.api.store import open_store
from rubberband.executor import ExperimentFolder, Faults
from rubberband.executor import read_journal as read
from rubberband.states import ExperimentState
from tests.builders.browser import served, visiting
from tests.builders.journalled_runs import recorded, words
from tests.builders.waiting import eventually

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install playwright")
expect = playwright.expect

RAISED, DIED = (1, 2, 3), 4
"""Trials that fail: alike, and otherwise."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ExperimentFolder]]:
    home = tmp_path_factory.mktemp("home")
    failures: dict[Any, Any] = {(trial, attempt): "raised" for trial in RAISED for attempt in range(1, 9)}
    failures |= {(DIED, attempt): "died" for attempt in range(1, 9)}
    with ExitStack() as stack:
        folder = recorded(words(name="found"), faults=Faults(failures=failures)).put(home)
        store = open_store(None, home)
        address = stack.enter_context(served(create_app(Settings(home=home), store=store)))
        eventually(lambda: (row := store.submission("found")) is not None and row.state is ExperimentState.DONE)
        yield address, folder


def test_the_best_is_above_all_else_with_its_lead_and_is_copied_in_four_forms(
    browser: Any, site: tuple[str, ExperimentFolder]
) -> None:
    address, folder = site
    best = read(folder).best
    assert best is not None
    with visiting(browser, address, permissions=["clipboard-read", "clipboard-write"]) as visit:
        page = visit.open("/experiments/found")
        panel = page.locator("#best")
        expect(panel.get_by_role("heading")).to_have_text(f"Best: trial {best.trial}")
        expect(panel.locator("dl")).to_contain_text(re.compile(r"lead[\d.]+ \([\d.]+ %\) better than trial \d+, "))
        below = page.locator("#best ~ section, #best ~ .charts section, section:has(table)")
        top = panel.bounding_box()["y"]
        assert all(one.bounding_box()["y"] > top for one in below.all() if one.is_visible()), "nothing larger is above"
        copied = {}
        for form in ("YAML", "JSON", "Command line", "Python"):
            panel.get_by_role("radio", name=form, exact=True).check()
            panel.get_by_role("button", name="Copy").click()
            expect(page.get_by_role("status").get_by_text("Copied.")).to_be_visible()
            copied[form] = page.evaluate("navigator.clipboard.readText()")
        visit.shot("experiment-best")
    configuration = json.loads(json.dumps(dict(best.configuration)))
    assert json.loads(copied["JSON"]) == yaml.safe_load(copied["YAML"]) == configuration
    assert ast.literal_eval(copied["Python"].removeprefix("config = ")) == configuration
    assert copied["Command line"].split() == [f"--{name}={value}" for name, value in configuration.items()]


def test_failures_are_a_row_for_each_cause_whose_first_trial_is_a_link(
    browser: Any, site: tuple[str, ExperimentFolder]
) -> None:
    with visiting(browser, site[0]) as visit:
        page = visit.open("/experiments/found")
        failed = len(RAISED) + 1
        panel = page.locator("section.panel", has=page.get_by_role("heading", name=f"Failures: {failed} of 27 trials"))
        rows = panel.locator("tbody tr")
        expect(rows).to_have_count(2)
        cells = [row.locator("td").all_inner_texts() for row in rows.all()]
        assert [(reason, trials) for reason, trials, *_ in cells] == [("raised", "3"), ("died", "1")]
        visit.shot("experiment-failures")
        rows.first.get_by_role("link", name=str(RAISED[0]), exact=True).click()
        expect(page.get_by_role("heading", level=1)).to_have_text(re.compile(f"Trial {RAISED[0]} "))
