"""The page of experiments and the frame of all pages, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rubberband.states import ExperimentState
from rubberband.values.submission import Labels, Summary
from tests.builders.browser import expect, visiting
from tests.builders.dashboard_site import BEGUN, Site, service


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with service(tmp_path_factory.mktemp("home")) as found:
        fill(found)
        yield found


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Site]:
    with service(tmp_path) as found:
        yield found


def fill(site: Site) -> None:
    done = Summary(**{**_words(BEGUN), "jct_s": 290.0, "stage": 2, "iterations": 90, "cost_usd": 0.77})
    site.add("a-name-that-is-as-long-as-names-may-be-and-does-not-fit-a-line", "done", summary=done, owner="ci")
    site.add("resnet-sweep", "failed", reason="trial 3 failed 4 times: <b>CUDA</b> out of memory; lower batch_size")
    site.add("digits-late", summary=Summary(**{**_words(BEGUN), "forecast_jct_s": 500.0, "cost_usd": 0.97}))
    site.add("bert-base", "budget", reason="max_cost 1.00 USD is spent; extend it and resume")
    site.add("digits", owner="anna")
    site.add("digits-next", "queued", words={"constraints": {"max_cost": 3.0}})


def _words(summary: Summary) -> dict[str, Any]:
    return {name: getattr(summary, name) for name in Summary.__dataclass_fields__}


@pytest.mark.parametrize(("phone", "dark"), [pytest.param(False, False, marks=pytest.mark.long), (True, True)])
def test_the_list_fits_desks_and_phones(browser: Any, site: Site, phone: bool, dark: bool) -> None:
    with visiting(browser, site.address, phone=phone, dark=dark) as visit:
        page = visit.open("/")
        expect(page.get_by_role("row", name=re.compile("bert-base"))).to_contain_text("max_cost 1.00 USD is spent")
        expect(page.get_by_role("row", name=re.compile("resnet"))).to_contain_text("<b>CUDA</b> out of memory")
        assert page.locator("#rows b").count() == 0, "names and reasons are text"
        assert visit.overflow_px() <= 0
        visit.shot(f"list-{'phone' if phone else 'desk'}-{'dark' if dark else 'light'}")


def test_a_name_with_tags_and_a_note_keeps_its_width_on_a_phone(browser: Any, site: Site) -> None:
    name = "resnet50-imagenet-lr-sweep-17"
    site.add(name, labels=Labels(tags=("baseline", "team:perception", "weekly"), note="The baseline of all others."))
    with visiting(browser, site.address, phone=True) as visit:
        page = visit.open("/")
        link = page.get_by_role("link", name=name)
        letter_px = link.evaluate("(one) => parseFloat(getComputedStyle(one).fontSize) / 2")
        assert link.bounding_box()["width"] >= 12 * letter_px
        assert link.evaluate("(one) => one.getClientRects().length") == 1, "it is on one line"
        assert visit.overflow_px() <= 0


def test_the_list_follows_what_happens_and_keeps_the_focus(browser: Any, site: Site) -> None:
    site.add("followed")
    with visiting(browser, site.address) as visit:
        page = visit.open("/")
        link = page.get_by_role("link", name="followed")
        link.focus()
        site.add("another", "queued")
        site.feed.wake()
        expect(page.get_by_role("link", name="another")).to_be_visible()
        site.change("followed", state=ExperimentState.DONE)
        expect(page.get_by_role("row", name=re.compile("followed"))).to_contain_text("done")
        expect(link).to_be_focused()


def test_a_list_has_states_pages_and_a_search_also_without_javascript(browser: Any, site: Site) -> None:
    for at in range(30):
        site.add(f"found-{at:02}", "cancelled", created_at=1000.0 + at)
    with visiting(browser, site.address, java_script_enabled=False) as visit:
        page = visit.open("/")
        page.get_by_role("link", name="Stopped").click()
        expect(page.locator("#rows tr")).to_have_count(25)
        page.get_by_role("link", name="Older").click()
        expect(page.locator("#rows tr")).to_have_count(6)
        page.get_by_role("link", name="Newest").click()
        expect(page.locator("#rows tr")).to_have_count(25)
        page.get_by_role("link", name="Needs attention").click()
        expect(page.locator("#rows tr")).to_have_count(1)
        page.get_by_role("link", name="All").click()
        page.get_by_role("searchbox").fill("FOUND cancelled")
        page.get_by_role("button", name="Search").click()
        expect(page.get_by_role("link", name="Stopped 30")).to_be_visible()
        page.get_by_role("link", name="Older").click()
        expect(page.locator("#rows tr")).to_have_count(5)
        assert "search=found+cancelled" in page.url
        visit.open("/?search=%3Cb%3E")
        expect(page.locator("main")).to_contain_text("No experiment matches “<b>”")


def test_the_list_follows_the_words_of_a_search_and_keeps_what_is_chosen(browser: Any, site: Site) -> None:
    site.add("kept-one")
    site.add("kept-two", "queued")
    with visiting(browser, site.address) as visit:
        page = visit.open("/")
        expect(page.get_by_role("button", name="Compare")).to_be_disabled()
        page.get_by_role("searchbox").press_sequentially("kept")
        expect(page.locator("#rows tr")).to_have_count(2)
        page.get_by_role("checkbox", name="Compare kept-one").check()
        site.change("kept-one", reason="changed meanwhile")
        site.change("kept-two", state=ExperimentState.RUNNING)
        expect(page.locator("#rows .badge.running")).to_have_count(2)
        expect(page.get_by_role("checkbox", name="Compare kept-one")).to_be_checked()
        page.get_by_role("checkbox", name="Compare kept-two").check()
        visit.shot("list-search")
        expect(page.get_by_role("button", name="Compare 2")).to_be_enabled()
        assert page.evaluate("window.location.search") == "?search=kept"


def test_a_new_user_is_reported_what_to_do(browser: Any, empty: Site) -> None:
    with visiting(browser, empty.address, permissions=["clipboard-read", "clipboard-write"]) as visit:
        page = visit.open("/")
        visit.shot("list-empty")
        page.get_by_role("button", name="Copy").click()
        expect(page.get_by_role("status")).to_contain_text("Copied")
        command = page.evaluate("navigator.clipboard.readText()")
        assert command == f"rubberband submit experiment.yaml --server {empty.address}"
        page.get_by_role("link", name="Preview a plan").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Preview a plan")


def test_an_unknown_page_leads_back(browser: Any, site: Site) -> None:
    with visiting(browser, site.address) as visit:
        page = visit.open("/nowhere")
        expect(page.get_by_role("heading", level=1)).to_have_text("Not found")
        visit.errors.clear()
        visit.shot("problem")
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("#main")).to_be_focused()
        page.get_by_role("link", name="All experiments").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Experiments")


def test_labels_are_text_and_lead_to_their_like(browser: Any, site: Site) -> None:
    hostile = "<img src=x onerror=alert(1)> & a note"
    site.add("tagged", "done", labels=Labels(tags=("a/b", "vision"), note=hostile))
    site.add("tagged-too", "done", labels=Labels(tags=("vision",)))
    site.add("kept-away", "done", labels=Labels(tags=("vision",), archived=True))
    with visiting(browser, site.address) as visit:
        page = visit.open("/?search=tagged")
        expect(page.get_by_role("row", name=re.compile("a note"))).to_contain_text(hostile)
        visit.shot("list-tags")
        page.get_by_role("link", name="vision", exact=True).first.click()
        page.wait_for_url(re.compile(r"\?tag=vision$"))  # the page before it has two rows as well
        expect(page.locator("#rows tr")).to_have_count(2)
        page.get_by_role("searchbox").press_sequentially("a note")
        expect(page.locator("#rows tr")).to_have_count(1)
        assert page.evaluate("window.location.search") == "?tag=vision&search=a+note"
        page.reload()
        expect(page.locator("#rows tr")).to_have_count(1)
        page.get_by_role("searchbox").fill("")
        expect(page.locator("#rows tr")).to_have_count(2)
        page.get_by_role("link", name="Archived 1").click()
        expect(page.locator("#rows tr")).to_have_count(1)
        page.get_by_role("link", name="Show those without the tag vision, too").click()
        expect(page.locator("#rows tr")).to_have_count(1)


@pytest.mark.long
def test_several_are_archived_and_deleted_after_it_is_said(browser: Any, site: Site) -> None:
    for name in ("care-one", "care-two", "care-busy"):
        site.add(name, "running" if name == "care-busy" else "done")
    with visiting(browser, site.address, phone=True) as visit:
        page = visit.open("/?search=care")
        delete = page.get_by_role("button", name="Delete", exact=True)
        expect(delete).to_be_hidden()
        page.get_by_role("checkbox", name="Compare care-one").check()
        page.get_by_role("button", name="Archive").click()
        expect(page.get_by_role("link", name="Archived 1")).to_be_visible()
        expect(page.locator("#rows tr")).to_have_count(2)
        page.get_by_role("checkbox", name="Compare care-two").check()
        page.get_by_role("checkbox", name="Compare care-busy").check()
        delete.click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("care-two: deletes its journal, logs, report and 2 checkpoint files (5 KB)")
        expect(dialog).to_contain_text("'care-busy' is running: cancel it first")
        expect(dialog.get_by_role("button", name="Delete")).to_be_disabled()
        visit.shot("list-delete-refused")
        dialog.get_by_role("button", name="Keep them").click()
        page.get_by_role("checkbox", name="Compare care-busy").uncheck()
        delete.click()
        dialog.get_by_role("button", name="Delete").click()
        expect(page.locator("#rows tr")).to_have_count(1)
        expect(delete).to_be_hidden()
        assert site.store.submission("care-two") is None
        visit.errors.clear()  # the refusal
        assert visit.overflow_px() <= 0
