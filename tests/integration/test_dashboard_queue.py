"""The queue of a service in a real browser: before a submission, while it waits, and once it waits too long."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rubberband.api.plans.previews import Plans
from rubberband.values.submission import Summary
from tests.builders.accessibility import faults
from tests.builders.browser import Visit, expect, visiting
from tests.builders.clocks import MID_MONTH, Clock
from tests.builders.dashboard_site import Site, service

WORDS = {"resources": {"provider": "local"}}
EXAMPLE = (Path(__file__).parents[2] / "examples" / "scaling.yaml").read_text(encoding="utf-8")
SCALING = re.sub(r"deadline: .*", "deadline: 72s", re.sub(r"provision_delay: .*", "provision_delay: 1s", EXAMPLE))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A service of one slot, which is free in 8 minutes, and of an experiment before all others that takes one."""
    with service(tmp_path, Plans, entrypoints=("examples.scaling:*",), clock=Clock()) as site:
        site.runs.slots = 1
        running = Summary(started_at=MID_MONTH - 60.0, planned_jct_s=540.0, forecast_jct_s=540.0)
        site.add("busy", words=WORDS, summary=running)
        site.add("before", "queued", words=WORDS, summary=Summary(planned_jct_s=60.0))
        yield site


def asked(visit: Visit) -> Any:
    """The dialog of a submission."""
    page = visit.open("/plan")
    page.get_by_label("Experiment file").fill(SCALING)
    page.keyboard.press("Control+Enter")
    expect(page.locator("#headline .badge")).to_have_text("within the limits")
    page.get_by_role("button", name="Submit…").click()
    return page.get_by_role("dialog")


@pytest.mark.parametrize(("phone", "dark"), [(False, False), pytest.param(True, True, marks=pytest.mark.long)])
def test_a_submission_that_queues_too_long_is_offered_a_later_deadline(
    browser: Any, site: Site, phone: bool, dark: bool
) -> None:
    with visiting(browser, site.address, phone=phone, dark=dark) as visit:
        dialog = asked(visit)
        line = dialog.locator("#confirm-queue")
        expect(line).to_have_text("2 are ahead; it starts in about 9m, so the deadline of 1m12s cannot be met.")
        expect(dialog.get_by_role("button", name="Start anyway")).to_be_enabled()
        visit.shot(f"queue-dialog-{'phone' if phone else 'desk'}", whole=False)
        dialog.get_by_role("button", name="Deadline 11m").click()
        expect(line).to_have_text("2 are ahead; it starts in about 9m.")
        expect(dialog.locator("#confirm-facts")).to_contain_text("11m from now")
        expect(dialog.get_by_role("button", name="Deadline")).to_be_hidden()
        dialog.get_by_role("button", name="Queue it").click()
        page = visit.page
        expect(page.locator("#sentence")).to_have_text(
            "It waits for a free slot. 2nd in the queue; starts in about 9m."
        )
        expect(page.locator("#late")).to_have_count(0)
        visit.shot(f"queue-page-{'phone' if phone else 'desk'}")
        page.goto(f"{site.address}/")
        expect(page.get_by_role("row", name=re.compile("scaling"))).to_contain_text(
            "2nd in the queue; starts in about 9m"
        )


def test_a_queued_experiment_says_when_its_deadline_is_lost_and_takes_a_later_one(browser: Any, site: Site) -> None:
    with visiting(browser, site.address) as visit:
        asked(visit).get_by_role("button", name="Start anyway").click()
        page = visit.page
        late = page.locator("#late")
        expect(late).to_contain_text("cannot be met then, so it is refused at its turn unless extended.")
        assert faults(page) == []
        site.clock.now += 60.0  # type: ignore[attr-defined]
        site.feed.wake()
        expect(late).to_contain_text("can no longer be met")
        expect(page.locator("#sentence")).to_contain_text("starts in about 8m")
        visit.shot("queue-late")
        late.get_by_role("button", name="Deadline 11m").click()
        dialog = page.get_by_role("dialog")
        expect(dialog.get_by_label("Deadline")).to_have_value("11m")
        dialog.get_by_role("button", name="Show what it changes").click()
        dialog.get_by_role("button", name="Extend", exact=True).click()
        expect(dialog).to_be_hidden()
        page.goto(f"{site.address}/")
        expect(page.get_by_role("row", name=re.compile("scaling"))).to_contain_text("cannot be met")


def test_a_start_behind_an_experiment_without_a_plan_is_not_guessed(browser: Any, site: Site) -> None:
    site.add("unplanned", "queued", words=WORDS)
    with visiting(browser, site.address) as visit:
        line = asked(visit).locator("#confirm-queue")
        expect(line).to_have_text("3 are ahead; its start is not known, as one ahead of it has no plan yet.")
        expect(visit.page.get_by_role("button", name="Queue it")).to_be_enabled()
