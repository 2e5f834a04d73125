"""A person's path through the service, whole: a server process, a browser, experiments in processes of their own.

Open the page, preview a plan, move the deadline, submit, watch it finish, open the report. With RUBBERBAND_SCREENSHOTS
naming a folder, pictures of it are kept there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.builders.browser import Visit, drawn, visiting
from tests.builders.server_process import ROOT, ServerProcess, serving
from tests.builders.waiting import eventually

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install playwright")
expect = playwright.expect
OVER = ("done", "cancelled", "budget", "failed", "refused")
PATIENCE_S = 240.0

DIGITS = """
version: 1
name: digits
entrypoint: examples.digits:DigitsTrial
search:
  space:
    lr: {type: loguniform, lower: 1e-3, upper: 0.3}
    momentum: {type: uniform, lower: 0.5, upper: 0.95}
    weight_decay: {type: loguniform, lower: 1e-6, upper: 1e-3}
    width: {type: choice, values: [8, 12]}
  scheduler: {type: sha, num_samples: 4, grace_period: 1, max_t: 3, reduction_factor: 2}
  sampler: {type: random, seed: 7}
  metric: accuracy
  mode: max
constraints: {deadline: 10m, max_cost: 2}
resources:
  provider: local
  gpus_per_instance: 1
  price_per_hour: 3.06
  max_instances: 2
  gpus_per_trial: {min: 1, max: 1}
  provision_delay: 1s
  init_delay: 10s
profile: {seconds_per_iteration: {1: 1.5}, trial_startup: 3s}
"""


@contextmanager
def service(home: Path) -> Iterator[ServerProcess]:
    """A server whose experiments are over when it ends, whatever became of the test."""
    with serving(home, "--allow", "examples.digits:*", "--code", str(ROOT)) as server:
        try:
            yield server
        finally:
            _end_all(server.address)


def _end_all(address: str) -> None:

    def all_over() -> bool:
        items = httpx.get(f"{address}/v1/experiments", timeout=60).json()["items"]
        running = [item["name"] for item in items if item["state"] not in (*OVER, "interrupted")]
        for name in running:
            httpx.post(f"{address}/v1/experiments/{name}/cancel", timeout=60)
        return not running

    eventually(all_over, "the end of all runs")


def walk(visit: Visit, text: str, name: str) -> None:
    """All of the path but its end."""
    page = visit.open("/")
    page.get_by_role("link", name="New experiment").click()
    page.get_by_label("Experiment file").fill(text)
    page.get_by_role("button", name="Preview").click()
    headline = page.locator("#headline")
    expect(headline).to_contain_text("within the limits")
    page.locator("#frontier .scatterlayer").wait_for(state="attached")
    slider = page.get_by_role("slider", name="Deadline, by slider")
    slider.focus()
    page.keyboard.press("Home")
    expect(headline).to_contain_text("No plan meets these limits")
    page.keyboard.press("End")
    expect(headline).to_contain_text("before the deadline")
    page.get_by_role("button", name="As in the file").click()
    expect(page.get_by_role("button", name="Submit…")).to_be_enabled()
    visit.shot(f"{name}-1-plan")
    page.get_by_role("button", name="Submit…").click()
    visit.shot(f"{name}-2-confirm", whole=False)
    page.get_by_role("button", name="Start it").click()
    page.wait_for_url(f"**/experiments/{name}")


def watch(visit: Visit, name: str) -> None:
    """Until it is done and its report is read; nothing is loaded again by hand."""
    page = visit.page
    badge = page.locator("h1 .badge")
    expect(badge).to_have_text(re.compile(f"^(running|{'|'.join(OVER)})"), timeout=1000 * PATIENCE_S)
    visit.shot(f"{name}-3-running")
    expect(badge).to_have_text(re.compile(f"^({'|'.join(OVER)})"), timeout=1000 * PATIENCE_S)
    assert badge.inner_text().startswith("done"), badge.inner_text()
    visit.shot(f"{name}-4-done")
    page.get_by_role("link", name="Report", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_contain_text(name)
    expect(page.get_by_role("heading", name="Learning curves")).to_be_visible()
    visit.shot(f"{name}-5-report")


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_person_previews_submits_and_watches_digits_on_local_instances(browser: Any, tmp_path: Path) -> None:
    with service(tmp_path) as server, visiting(browser, server.address) as visit:
        walk(visit, DIGITS, "digits")
        watch(visit, "digits")
        best = httpx.get(f"{server.address}/v1/experiments/digits", timeout=60).json()["summary"]["best_value"]
        assert best > 0.3, "the digits are learned"
        with visiting(browser, server.address, phone=True, dark=True) as phone:
            phone.open("/experiments/digits")
            expect(phone.page.locator("h1 .badge")).to_have_text(re.compile("^done"))
            drawn(phone.page, "curves")
            assert phone.overflow_px() <= 0
            phone.shot("digits-6-phone")
            phone.open("/")
            phone.shot("digits-7-phone-list")
