"""The page of an experiment with thousands of trials, in a browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rubberband.api.app import create_app
from rubberband.api.settings import Settings
from rubberband.api.store import open_store
from rubberband.states import ExperimentState
from tests.bench.bench_pages import run_of
from tests.builders.browser import served, visiting
from tests.builders.waiting import eventually

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install playwright")
expect = playwright.expect


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("trials", [2_000, 20_000])
def test_thousands_of_trials_open_as_a_small_page_whose_charts_and_last_trials_are_there(
    browser: Any, tmp_path: Path, trials: int
) -> None:
    run = run_of(trials)
    run.put(tmp_path)
    store = open_store(None, tmp_path)
    with served(create_app(Settings(home=tmp_path), store=store)) as address:
        eventually(
            lambda: (row := store.submission(run.name)) is not None and row.state is ExperimentState.DONE,
            within_s=300.0,
        )
        with visiting(browser, address) as visit:
            page = visit.open(f"/experiments/{run.name}")
            expect(page.locator("#best").get_by_role("heading")).to_have_text(re.compile(r"Best: trial \d+"))
            expect(page.locator("#trials .head")).to_contain_text(f"{trials:,} trials")
            sent = page.evaluate("performance.getEntriesByType('navigation')[0].transferSize")
            assert sent < 150_000
            page.locator("#c-curves").scroll_into_view_if_needed()
            page.locator("#c-curves .main-svg").first.wait_for()
            assert page.evaluate("document.getElementsByTagName('*').length") < 10_000
            first = page.locator("table.trials tbody th").first
            before = first.inner_text()
            page.get_by_role("navigation", name="More trials").get_by_role("link", name="Next").click()
            expect(first).not_to_have_text(before)
            visit.shot(f"experiment-of-{trials}")
            page.goto(f"{address}/experiments/{run.name}/trials/{trials - 1}")
            expect(page.get_by_role("heading", level=1)).to_have_text(re.compile(f"Trial {trials - 1}"))
            visit.shot(f"trial-of-{trials}")
