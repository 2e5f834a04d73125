"""Tags, note, archive and deletion on the page of an experiment, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rubberband.values.submission import Labels
from tests.builders.accessibility import faults
from tests.builders.browser import expect, visiting
from tests.builders.dashboard_site import Site, service

HOSTILE = "</p><img src=x onerror=alert(1)> ${x} {{ 7 * 7 }}\nsecond line"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with service(tmp_path_factory.mktemp("home")) as found:
        yield found


def labels(site: Site, name: str) -> Labels:
    found = site.store.submission(name)
    assert found is not None
    return found.labels


def test_tags_and_a_hostile_note_are_changed_in_place_and_are_text(browser: Any, site: Site) -> None:
    site.add("noted", "done")
    with visiting(browser, site.address) as visit:
        page = visit.open("/experiments/noted")
        field = page.get_by_role("textbox", name="Add a tag")
        for tag in ("Vision", "old"):
            field.fill(tag)
            field.press("Enter")
            expect(page.get_by_role("link", name=tag.lower(), exact=True)).to_be_visible()
            expect(field).to_have_value("")
        field.fill("<b>")
        field.press("Enter")
        expect(page.get_by_role("status").filter(has_text="a tag has 1 to 32 letters")).to_be_visible()
        expect(field).to_have_value("<b>")
        page.get_by_role("button", name="Remove the tag old").click()
        expect(page.get_by_role("link", name="old", exact=True)).to_have_count(0)
        page.get_by_role("button", name="Add a note").click()
        page.get_by_role("textbox", name="Note").fill(HOSTILE)
        site.change("noted", reason="it goes on meanwhile")
        page.get_by_role("button", name="Save the note").click()
        expect(page.locator("#remark")).to_have_text(HOSTILE)
        visit.shot("experiment-labels")
        assert page.locator("#remark *").count() == 0
        assert labels(site, "noted") == Labels(tags=("vision",), note=HOSTILE)
        page.get_by_role("button", name="Edit the note").click()
        expect(page.get_by_role("textbox", name="Note")).to_have_value(HOSTILE)
        page.get_by_role("button", name="Leave it").click()
        expect(page.locator("#remark")).to_be_visible()
        page.reload()
        expect(page.locator("#remark")).to_have_text(HOSTILE)
        assert faults(page) == []
        page.get_by_role("link", name="vision", exact=True).click()
        expect(page.locator("#rows tr")).to_have_count(1)


@pytest.mark.long
def test_other_tabs_see_labels_at_once(browser: Any, site: Site) -> None:
    site.add("shared", "done")
    with visiting(browser, site.address) as visit:
        page = visit.open("/experiments/shared")
        others = [visit.page.context.new_page() for _ in range(2)]
        others[0].goto(f"{site.address}/experiments/shared")
        others[1].goto(f"{site.address}/")
        for other in others:
            other.wait_for_load_state("networkidle")
        field = page.get_by_role("textbox", name="Add a tag")
        field.fill("seen")
        field.press("Enter")
        for other in others:
            expect(other.get_by_role("link", name="seen", exact=True)).to_be_visible(timeout=20_000)


@pytest.mark.long
def test_one_is_archived_and_deleted_from_its_page(browser: Any, site: Site) -> None:
    site.add("leaves", "done")
    with visiting(browser, site.address, phone=True, dark=True) as visit:
        page = visit.open("/experiments/leaves")
        page.get_by_role("button", name="Archive").click()
        expect(page.get_by_role("button", name="Unarchive")).to_be_visible()
        assert labels(site, "leaves").archived
        page.get_by_role("button", name="Delete", exact=True).click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("leaves: deletes its journal, logs, report and 2 checkpoint files (5 KB)")
        visit.shot("experiment-delete")
        dialog.get_by_role("button", name="Keep it").click()
        assert site.store.submission("leaves") is not None
        page.get_by_role("button", name="Delete", exact=True).click()
        dialog.get_by_role("button", name="Delete").click()
        expect(page).to_have_url(re.compile(r"/$"))
        assert site.store.submission("leaves") is None


@pytest.mark.long
def test_a_page_of_one_that_was_deleted_elsewhere_says_so(browser: Any, site: Site) -> None:
    site.add("gone", "done")
    with visiting(browser, site.address) as visit:
        page = visit.open("/experiments/gone")
        expect(page.get_by_role("heading", name="gone")).to_be_visible()
        assert httpx.delete(f"{site.address}/v1/experiments/gone").is_success
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # someone looks at the tab again
        expect(page.get_by_role("main")).to_contain_text("Experiment 'gone' not found")
        assert all("404" in error for error in visit.errors)
        visit.errors.clear()


@pytest.mark.long
def test_a_note_that_another_one_changed_meanwhile_is_not_replaced_unseen(browser: Any, site: Site) -> None:
    site.add("shared", "done")
    with visiting(browser, site.address) as visit:
        page = visit.open("/experiments/shared")
        page.get_by_role("button", name="Add a note").click()
        page.get_by_role("textbox", name="Note").fill("mine")
        assert httpx.patch(f"{site.address}/v1/experiments/shared", json={"note": "theirs"}).is_success
        page.get_by_role("button", name="Save the note").click()
        expect(page.get_by_role("status").filter(has_text="changed meanwhile, to “theirs”")).to_be_visible()
        assert labels(site, "shared").note == "theirs"
        assert all("409" in error for error in visit.errors)
        visit.errors.clear()
        page.get_by_role("button", name="Save the note").click()
        expect(page.locator("#remark")).to_have_text("mine")
        assert labels(site, "shared").note == "mine"
