"""The pages of a service that shares a pool, in a real browser: a preview's promise, and the pool."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rubberband.api.settings import SharedPool
from rubberband.spec.pool import PoolFile
from tests.builders.accessibility import faults
from tests.builders.browser import expect, visiting
from tests.builders.dashboard_site import service
from tests.builders.fake_runs import NearPlans, words
from tests.builders.pools import broker, lending_pool

FILE = PoolFile(
    name="team", instances=2, gpus_per_instance=1, provider="virtual", instance_type="p3.2xlarge", price_per_hour=3.6
)
TIGHT = {
    "constraints__deadline": "23m",
    "constraints__objective": "min_cost",
    "profile__seconds_per_iteration": {"1": 100},
}
"""Both instances are needed all the time: 20 minutes. The pages count on the real clock; a busy machine has minutes."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("home")
    with broker(lending_pool(), FILE, home) as folder:
        shape = {"instances": 2, "gpus_per_instance": 1, "max_usd_per_month": 5.5}
        pool = SharedPool(name="team", provider="virtual", folder=str(folder.path), **shape)
        with service(home, NearPlans, entrypoints=("examples.digits:*",), pool=pool, clock=time.time) as site:
            yield site.address


@pytest.mark.long
def test_a_preview_shows_its_promise_and_the_deadline_that_would_do(browser: Any, address: str) -> None:
    file = json.dumps(words(entrypoint="examples.digits:DigitsTrial", **TIGHT))
    with visiting(browser, address) as visit:
        page = visit.open("/plan")
        page.get_by_label("Experiment file").fill(file)
        page.get_by_role("button", name="Preview").click()
        expect(page.locator("#headline .promise")).to_have_text(
            re.compile(r"The pool promises it: starts now, ends by \d\d:\d\d:\d\d \(in (19|20)m(\d+s)?\)\.")
        )
        visit.shot("plan-promise")
        made = page.request.post(f"{address}/v1/experiments", data=words(name="first", **TIGHT))
        assert made.status == 201, made.text()
        visit.open("/plan")
        page.get_by_label("Experiment file").fill(file)
        page.get_by_role("button", name="Preview").click()
        expect(page.locator("#headline")).to_contain_text("The pool has no room by this deadline")
        later = page.get_by_role("button", name=re.compile("^Move the deadline to (39|40|41)m"))
        expect(page.get_by_label("Deadline", exact=True)).to_have_value("23m")
        visit.shot("plan-too-late")
        later.click()
        expect(page.locator("#headline .promise")).to_contain_text(re.compile("starts in (19|20)m"))
        visit.shot("plan-promised-later")
        dear = words(**{**TIGHT, "constraints__deadline": "20h", "constraints__objective": "min_time"})
        dear["search"]["scheduler"]["num_samples"] = 64
        visit.open("/plan")
        page.get_by_label("Experiment file").fill(json.dumps(dear))
        page.get_by_role("button", name="Preview").click()
        expect(page.locator("#headline")).to_contain_text("The pool has no money for this plan")
        expect(page.locator("#fixes")).to_contain_text(re.compile("Pool team's max_usd_per_month: .* are left"))
        expect(page.locator("#may")).to_contain_text("the pool has no money for the plan")
        visit.shot("plan-too-dear")
        page.get_by_role("link", name="Pool").click()
        expect(page.get_by_role("row", name=re.compile("first"))).to_contain_text(
            re.compile("now, ends in (18|19|20)m")
        )
        for chart in ("promises", "loans", "spend"):
            page.locator(f"#c-{chart} .plotly").first.wait_for(state="attached")
        assert faults(page) == []
        assert visit.overflow_px() <= 0
        visit.shot("pool")
    with visiting(browser, address, phone=True, dark=True) as visit:
        page = visit.open("/pool")
        page.locator("#c-loans .plotly").first.wait_for(state="attached")
        assert faults(page) == []
        assert visit.overflow_px() <= 0
        visit.shot("pool-phone-dark")
