"""An experiment's page in a browser: up to date, brushed, acted on, with its best trial, and of thousands of trials."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from rubberband.executor import ExperimentFolder, Faults, Inbox
from rubberband.executor import read_journal as read
from tests.bench.bench_pages import run_of
from tests.builders.accessibility import faults
from tests.builders.browser import drawn, expect, visiting
from tests.builders.dashboard_site import journals
from tests.builders.journalled_runs import Recorded, recorded, words
from tests.builders.waiting import eventually

HALF = 0.6


@pytest.fixture(scope="module")
def run() -> Recorded:
    faults = Faults(failures={(2, 1): "raised", (2, 2): "died", (7, 1): "not_a_number"})
    return recorded(words(name="grown"), faults=faults)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Home:
    """A service of real journals, each of which has half of its events, and a driver."""

    address: str
    folders: Mapping[str, ExperimentFolder]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, run: Recorded) -> Iterator[Home]:
    path = tmp_path_factory.mktemp("home")
    with ExitStack() as stack:
        folders = {}
        for name in ("grown", "asked", "still"):
            folder = folders[name] = run.named(name).put(path, int(HALF * len(run.events)))
            stack.enter_context(folder.driving())
        unlimited = {key: value for key, value in words(name="ended").items() if key != "constraints"}
        folders["ended"] = recorded(unlimited).put(path)
        with folders["ended"].driving():
            pass
        dated = dataclasses.replace(run.named("dated"), setup={**run.setup, "provider": "local"})
        folders["dated"] = dated.put(path, int(HALF * len(run.events)))
        stack.enter_context(folders["dated"].driving())
        yield Home(address=stack.enter_context(journals(path, *folders)), folders=folders)


def chart(name: str) -> str:
    return f"document.querySelector('#c-{name}')"


def one_below_another(page: Any) -> bool:
    """Whether the charts of a phone are as wide as the page, and each begins where the one before has ended."""
    boxes = page.evaluate(
        "[...document.querySelectorAll('.charts > section:not([hidden])')]"
        ".map((one) => { const box = one.getBoundingClientRect(); return [box.left, box.right, box.top, box.bottom]; })"
    )
    wide = all(right - left > 340 for left, right, *_ in boxes)
    return len(boxes) > 3 and wide and all(one[3] <= other[2] + 1 for one, other in pairwise(boxes))


def test_the_page_follows_a_journal_that_grows(browser: Any, home: Home, run: Recorded) -> None:
    with visiting(browser, home.address) as visit:
        page = visit.open("/experiments/grown")
        page.get_by_text("running", exact=True).first.wait_for()
        drawn(page, "curves", "spend", "allocation", "parallel")
        page.get_by_role("radio", name="over dollars").check()
        page.wait_for_function(f"() => {chart('curves')}.layout.xaxis.title.text.includes('bill')")
        page.get_by_role("link", name="accuracy", exact=True).focus()
        page.evaluate(f"{chart('curves')}.kept = true")
        where = page.evaluate("document.activeElement.getBoundingClientRect().top")
        visit.shot("experiment-running")

        run.named("grown").grow(home.folders["grown"], int(HALF * len(run.events)), len(run.events))
        page.locator(".badge.done").wait_for()
        page.get_by_text("SYNC of stage 3").wait_for()
        assert page.evaluate("document.activeElement.textContent") == "accuracy", "focus is kept"
        moved_px = page.evaluate("document.activeElement.getBoundingClientRect().top") - where
        assert abs(moved_px) < 100, "what is looked at stays in the window"
        drawn(page, "curves")
        page.wait_for_function(f"() => {chart('curves')}.data.at(-1).name.startsWith('winner')")
        assert page.evaluate(f"{chart('curves')}.kept"), "charts are changed in place"
        assert "bill" in page.evaluate(f"{chart('curves')}.layout.xaxis.title.text")
        assert page.locator("[data-dialog]").all_inner_texts() == ["Delete", "Add trials"], "nothing is left to cancel"
        assert page.get_by_role("link", name="Report", exact=True).get_attribute("href") == "/experiments/grown/report"
        visit.shot("experiment-done")


_SHIFTS = """
    window.shift = 0;
    const add = (one) => { if (!one.hadRecentInput) shift += one.value; };
    new PerformanceObserver((list) => list.getEntries().forEach(add)).observe({ type: "layout-shift", buffered: true });
"""


@pytest.mark.long
def test_charts_are_asked_for_when_they_are_scrolled_to_and_move_nothing(browser: Any, home: Home) -> None:
    with visiting(browser, home.address) as visit:
        visit.page.add_init_script(_SHIFTS)
        asked: list[str] = []
        visit.page.on("request", lambda request: asked.append(request.url.rpartition("/")[2]))
        page = visit.open("/experiments/still")
        drawn(page, "curves")
        assert "slices" not in asked
        drawn(page, "spend", "allocation", "parallel", "slices", "contour")
        assert asked.count("slices") >= 1
        assert page.evaluate("shift") <= 0.1  # "good" by the Core Web Vitals
        line_px = page.locator(".jumps").bounding_box()["height"]
        assert line_px < 2 * page.locator(".jumps a").first.bounding_box()["height"]


def test_all_charts_are_drawn_before_the_page_is_printed(browser: Any, home: Home, tmp_path: Path) -> None:
    with visiting(browser, home.address) as visit:
        page = visit.open("/experiments/still")
        drawn(page, "curves")
        assert page.locator("#c-contour .main-svg").count() == 0, "it is not in sight"
        assert page.locator("#c-contour").evaluate("(one) => getComputedStyle(one, '::before').content") == '"Drawing…"'
        page.pdf(path=tmp_path / "page.pdf")
        expected = page.locator(".charts").get_attribute("data-expected").split()
        assert len(expected) > 5
        for name in expected:
            assert page.locator(f"#c-{name} .main-svg").count() > 0 or page.locator(f"#s-{name}").is_hidden(), name


def test_a_chart_grows_to_the_window_and_its_address_has_it(browser: Any, home: Home) -> None:
    with visiting(browser, home.address) as visit:
        page = visit.open("/experiments/still")
        drawn(page, "curves")
        page.keyboard.press("f")
        grown = page.locator(".figure.grown")
        expect(grown).to_have_count(1)
        window = page.viewport_size
        box = grown.bounding_box()
        assert (box["x"], box["y"], box["width"], box["height"]) == (0, 0, window["width"], window["height"])
        chart_px = grown.locator(".main-svg").first.bounding_box()["height"]
        assert chart_px > 0.7 * window["height"]
        assert "chart=" in page.url
        with visiting(browser, home.address) as other:
            link = other.open(page.url.removeprefix(home.address))
            expect(link.locator(".figure.grown")).to_have_attribute("id", grown.get_attribute("id"))
        page.keyboard.press("Escape")
        expect(grown).to_have_count(0)
        assert "chart=" not in page.url
        page.get_by_role("link", name="momentum", exact=True).click()
        page.locator("th[aria-sort=ascending]").wait_for()
        page.locator("#s-curves").get_by_role("button", name="Window").click()
        expect(page.locator("#s-curves.grown")).to_have_count(1)
        page.go_back()
        expect(grown).to_have_count(0)
        assert page.locator("html.covered").count() == 0, "the page scrolls again"
        page.go_forward()
        expect(page.locator("#s-curves.grown")).to_have_count(1)


def test_the_line_of_jumps_is_whole_stays_and_marks_where_one_reads(browser: Any, home: Home) -> None:
    with visiting(browser, home.address) as visit:
        page = visit.open("/experiments/still")
        page.set_viewport_size({"width": 1280, "height": 800})
        jumps = page.locator(".jumps")
        assert jumps.evaluate("(one) => one.scrollWidth <= one.clientWidth")
        jumps.get_by_role("link", name="Trials").click()
        expect(jumps.locator("[aria-current]")).to_have_text("Trials")
        assert 0 <= jumps.bounding_box()["y"] < 100, "it is in sight"
        assert page.locator("#trials-title").bounding_box()["y"] > jumps.bounding_box()["y"] + 20, (
            "what was jumped to, too"
        )
        curves, spend = (page.locator(f"#s-{name}").bounding_box() for name in ("curves", "spend"))
        assert curves["y"] == spend["y"], "two charts stand beside each other"


@pytest.mark.long
def test_the_report_of_a_phone_draws_its_charts_one_below_another(browser: Any, home: Home) -> None:
    with visiting(browser, home.address, phone=True) as visit:
        page = visit.open("/experiments/still/report")
        for name in ("curves", "spend", "allocation", "parallel"):
            page.locator(f"#{name} .main-svg").first.wait_for(state="attached")
        visit.shot("report-phone")
        assert visit.overflow_px() <= 0
        assert one_below_another(page)
        unnamed = "[...document.querySelectorAll('td:not([data-label])')].filter((one) => one.textContent).length"
        assert page.evaluate(unnamed) == 0, "each value has its name beside it"
        assert page.locator("table.sortable tbody tr:visible").count() <= 10


@pytest.mark.long
def test_trials_are_chosen_by_range_by_order_and_by_status(browser: Any, home: Home) -> None:
    with visiting(browser, home.address) as visit:
        page = visit.open("/experiments/still")
        drawn(page, "curves", "spend", "allocation", "parallel")  # what is drawn later would move the strip
        found = page.locator("#s-parallel [aria-live]")
        chosen, all_of_them = found.filter(has_text=" of "), found.filter(has_text="pull along")
        strip = page.get_by_role("group", name="Range of accuracy")
        strip.scroll_into_view_if_needed()
        box = strip.bounding_box()
        middle = box["x"] + box["width"] / 2
        page.mouse.move(middle, box["y"] + 1)
        page.mouse.down()
        page.mouse.move(middle, box["y"] + box["height"] / 3, steps=2)
        page.mouse.up()
        chosen.wait_for()
        few, every = map(int, re.findall(r"\d+", found.inner_text()))
        assert 0 < few < every
        page.get_by_role("button", name="Clear").click()
        all_of_them.wait_for()
        page.get_by_label("accuracy, from, percent of the axis").focus()
        for _ in range(3):
            page.keyboard.press("PageUp")
        chosen.wait_for()
        visit.shot("experiment-brushed")
        page.keyboard.press("Escape")
        all_of_them.wait_for()

        page.evaluate("window.same = true")
        page.get_by_role("link", name="momentum", exact=True).press("Enter")
        page.locator("th[aria-sort=ascending]").wait_for()
        page.get_by_role("link", name=re.compile("^stopped")).press("Enter")
        page.locator(".chips [aria-current]", has_text="stopped").wait_for()
        assert set(page.locator("table.trials .state").all_inner_texts()) == {"stopped"}
        assert page.evaluate("window.same"), "the page was not loaded anew"
        assert "sort=.momentum" in page.url


def test_trials_are_compared_after_equal_iterations_in_the_table_and_in_charts(browser: Any, home: Home) -> None:
    with visiting(browser, home.address) as visit:
        page = visit.open("/experiments/still")
        drawn(page, "parallel")
        section = page.locator("#s-parallel")
        section.get_by_label("metric").select_option(label="after 2")
        page.wait_for_function("() => document.querySelector('#n-parallel').textContent.includes('after 2 iterations')")
        page.get_by_role("columnheader", name="accuracy after 2").wait_for()
        assert "after=2" in page.url
        values = [
            float(text) for text in page.locator("table.trials td[data-label='accuracy after 2']").all_inner_texts()
        ]
        assert values == sorted(values, reverse=True)
        assert len(values) == 25, "every trial of a page has trained for two"
        drawn(page, "slices")
        assert "after 2 iterations" in page.locator("#n-slices").inner_text()
        with visiting(browser, home.address) as other:
            link = other.open(page.url.removeprefix(home.address))
            link.get_by_role("columnheader", name="accuracy after 2").wait_for()
            drawn(link, "parallel")
            assert "after 2 iterations" in link.locator("#n-parallel").inner_text()
        page.locator("#metrics").get_by_role("link", name="latest").click()
        page.locator("#s-parallel").scroll_into_view_if_needed()
        page.wait_for_function("() => document.querySelector('#n-parallel').textContent.includes('latest metric')")
        page.get_by_role("columnheader", name="accuracy", exact=True).wait_for()
        assert "after" not in page.url
        visit.shot("experiment-equal-iterations")


def test_a_link_shows_a_colleague_the_same_trials_columns_and_charts(browser: Any, home: Home) -> None:
    with visiting(browser, home.address) as visit:
        page = visit.open("/experiments/still")
        drawn(page, "curves")
        page.get_by_label("Filter trials").fill("accuracy>0.5 iterations>=6")
        page.get_by_label("Filter trials").press("Enter")
        page.wait_for_function("() => document.querySelectorAll('table.trials tbody tr').length < 20")
        page.get_by_text("Columns", exact=True).click()
        page.get_by_label("momentum", exact=True).uncheck()
        expect(page.get_by_role("columnheader", name="momentum")).to_have_count(0)
        shown = page.locator("table.trials tbody th").all_inner_texts()
        with visiting(browser, home.address) as other:
            link = other.open(page.url.removeprefix(home.address))
            assert link.locator("table.trials tbody th").all_inner_texts() == shown
            expect(link.get_by_role("columnheader", name="momentum")).to_have_count(0)
            drawn(link, "curves")
            points = f"{chart('curves')}.data.flatMap(({{ customdata }}) => customdata ?? [])"
            assert {str(one[0]) for one in link.evaluate(points) if one} == {*shown}
        page.get_by_label("Filter trials").fill("nosuch>3")
        page.get_by_label("Filter trials").press("Enter")
        expect(page.locator("#filter-problem")).to_contain_text("'nosuch' is no column")
        visit.shot("experiment-filtered")


def filter_by(page: Any, text: str, rows: int) -> None:
    page.get_by_label("Filter trials").fill(text)
    page.get_by_label("Filter trials").press("Enter")
    expect(page.locator("table.trials tbody tr")).to_have_count(rows)


def test_a_filter_shows_the_first_of_its_trials_from_any_page_of_the_table(browser: Any, home: Home) -> None:
    with visiting(browser, home.address) as visit:
        page = visit.open("/experiments/still?page=2")
        expect(page.locator("#trials .head")).to_contain_text("26 to ")
        filter_by(page, "trial>=0", 25)
        expect(page.locator("#trials .head")).to_contain_text("1 to 25 of ")
        assert "page=" not in page.url


def test_a_page_is_printed_with_the_chosen_trials_also_in_charts_out_of_sight(
    browser: Any, home: Home, tmp_path: Path
) -> None:
    with visiting(browser, home.address) as visit:
        page = visit.open("/experiments/still")
        drawn(page, "curves", "parallel")
        filter_by(page, "trial<3", 3)
        trials = f"new Set({chart('parallel')}.data.flatMap(({{ customdata }}) => customdata ?? [])).size"
        page.evaluate(f"() => addEventListener('afterprint', () => {{ window.printed = {trials}; }})")
        page.pdf(path=tmp_path / "page.pdf")
        assert page.evaluate("window.printed") <= 4, "three and the gap"


def test_a_chart_that_a_filter_leaves_nothing_is_back_without_the_filter(browser: Any, home: Home) -> None:
    with visiting(browser, home.address) as visit:
        page = visit.open("/experiments/still")
        drawn(page, "parallel")
        filter_by(page, "trial=1", 1)
        page.evaluate("() => document.getElementById('s-parallel').scrollIntoView()")
        page.locator("#s-parallel").wait_for(state="hidden")
        filter_by(page, "", 25)
        drawn(page, "parallel")


def test_the_latest_choice_is_shown_though_an_earlier_one_is_answered_later(browser: Any, home: Home) -> None:
    with visiting(browser, home.address) as visit:
        page = visit.open("/experiments/still")
        drawn(page, "curves")
        held: list[Any] = []
        page.route(re.compile("filter=trial%3C9"), lambda route: held.append(route))
        page.get_by_label("Filter trials").fill("trial<9")
        page.get_by_label("Filter trials").press("Enter")
        page.wait_for_function("() => location.search.includes('trial')")
        filter_by(page, "trial<3", 3)
        page.evaluate("""() => {
            const count = () => document.querySelectorAll("table.trials tbody tr").length;
            window.most = count();
            new MutationObserver(() => { window.most = Math.max(window.most, count()); }).observe(
                document.getElementById("live"), { subtree: true, childList: true });
        }""")
        with page.expect_response(re.compile("fragments/.*filter=trial%3C9")) as answered:
            for route in held:
                route.continue_()
        answered.value.finished()
        page.wait_for_timeout(500)
        assert page.evaluate("window.most") == 3, "the rows of the earlier choice never came"


def test_experiments_are_compared_on_a_phone(browser: Any, home: Home) -> None:
    with visiting(browser, home.address, phone=True) as visit:
        page = visit.open("/compare?name=still&name=grown")
        drawn(page, "compared")
        page.get_by_role("radio", name="over time").check()
        page.wait_for_function(f"() => {chart('compared')}.layout.xaxis.title.text.includes('time')")
        assert visit.overflow_px() == 0
        assert page.evaluate("document.documentElement.scrollHeight") < 4050
        assert page.locator(".search").bounding_box()["height"] < 60
        page.get_by_role("combobox").fill("asked")
        page.get_by_role("button", name="Add").click()
        page.get_by_role("heading", name="Compare 3 experiments").wait_for()
        page.get_by_role("link", name="Leave out grown").click()
        page.get_by_role("heading", name="Compare 2 experiments").wait_for()
        page.wait_for_url(lambda url: url.endswith("?name=still&name=asked"))
        visit.shot("compare-phone")


def test_a_curve_and_the_line_below_lead_from_a_comparison_to_a_trial(browser: Any, home: Home) -> None:
    with visiting(browser, home.address) as visit:
        page = visit.open("/compare?name=still&name=grown")
        drawn(page, "compared")
        link = page.locator("#n-compared").get_by_role("link", name=re.compile("^trial ")).first
        address = link.get_attribute("href")
        page.locator("#c-compared").scroll_into_view_if_needed()
        at = f"{chart('compared')}.data.findIndex((trace) => trace.meta.href === '{address}')"
        curve = page.evaluate(at)
        page.evaluate(
            f"{chart('compared')}.emit('plotly_click', {{ points: [{{ data: {chart('compared')}.data[{curve}] }}] }})"
        )
        page.wait_for_url(lambda url: url.endswith(address))


def test_actions_are_done_by_keyboard_and_an_extension_is_looked_at_first(browser: Any, home: Home) -> None:
    inbox = Inbox(home.folders["asked"].inbox)
    with visiting(browser, home.address) as visit:
        page = visit.open("/experiments/asked")
        page.get_by_role("button", name="Extend").press("Enter")
        deadline = page.get_by_role("textbox", name="Deadline")
        apply = page.get_by_role("dialog").get_by_role("button", name="Extend", exact=True)
        deadline.press_sequentially("soon")
        page.keyboard.press("Enter")
        page.get_by_role("alert").filter(has_text="soon").wait_for()
        beside = "document.querySelector('#extend [data-problem]').previousElementSibling.id"
        assert page.evaluate(beside) == "extend-deadline", "what is wrong stands after its field"
        deadline.fill("40m")
        assert apply.is_disabled()
        page.keyboard.press("Enter")
        page.locator("#extend-told strong").wait_for()
        visit.shot("experiment-extend", whole=False)
        assert "expected" in page.locator("#extend-told").inner_text()
        assert inbox.pending() == [], "it was only looked at"
        apply.press("Enter")
        page.get_by_text("The limits were changed.").wait_for()
        assert [request.kind for request in inbox.pending()] == ["extend"]

        cancel = page.get_by_role("button", name="Cancel", exact=True)
        cancel.press("Enter")
        page.keyboard.press("Escape")
        page.get_by_role("dialog").wait_for(state="hidden")
        cancel.press("Enter")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.get_by_text("Cancellation requested.").wait_for()
        assert sorted(request.kind for request in inbox.pending()) == ["cancel", "extend"]


def test_a_target_is_changed_on_the_page_of_a_search_that_runs(browser: Any, home: Home) -> None:
    inbox = Inbox(home.folders["still"].inbox)
    with visiting(browser, home.address) as visit:
        page = visit.open("/experiments/still")
        page.get_by_role("button", name="Extend").press("Enter")
        page.get_by_role("textbox", name="Target").fill("low")
        page.keyboard.press("Enter")
        page.get_by_role("alert").filter(has_text="target").wait_for()
        page.get_by_role("textbox", name="Target").fill("1e-9")
        page.keyboard.press("Enter")
        page.locator("#extend-told").get_by_text("target 1e-9").wait_for()
        page.get_by_role("dialog").get_by_role("button", name="Extend", exact=True).press("Enter")
        page.get_by_text("The limits were changed.").wait_for()
    (asked,) = inbox.pending()
    assert (asked.kind, asked.target) == ("extend", 1e-9)


def test_trials_that_were_added_after_the_end_are_shown_and_withdrawn(browser: Any, home: Home) -> None:
    with visiting(browser, home.address) as visit:
        page = visit.open("/experiments/ended")
        assert page.get_by_role("button", name="Withdraw").count() == 0
        page.get_by_role("button", name="Add trials").press("Enter")
        dialog = page.get_by_role("dialog")
        dialog.get_by_role("textbox", name="Number").fill("2")
        page.keyboard.press("Enter")
        page.locator("#add-told strong").wait_for()
        dialog.get_by_role("button", name="Add", exact=True).press("Enter")
        page.locator("#sentence").get_by_text("2 trials added; `rubberband resume ended` trains them").wait_for()
        visit.shot("experiment-added")
        page.get_by_role("button", name="Withdraw", exact=True).press("Enter")
        page.get_by_role("button", name="Withdraw them").press("Enter")
        page.get_by_text("Withdrawn.").wait_for()
        expect(page.locator("#sentence")).not_to_contain_text("added")
    assert Inbox(home.folders["ended"].inbox).pending() == []


def test_an_end_is_in_the_reader_s_time_zone(browser: Any, home: Home) -> None:
    with visiting(browser, home.address, timezone_id="Asia/Kathmandu") as visit:
        page = visit.open("/experiments/dated")
        found = page.locator("#sentence time")
        minutes = page.evaluate("new Date(document.querySelector('#sentence time').dateTime).getMinutes()")
        assert re.search(rf"\b\d\d:{minutes:02}$", found.inner_text())
        assert "ends" in page.locator("#sentence").inner_text()
        assert "UTC" not in found.inner_text()


@pytest.mark.long
def test_a_phone_shows_all_of_it_in_its_width(browser: Any, home: Home) -> None:
    folder = home.folders["still"]
    folder.logs.mkdir(exist_ok=True)
    (folder.logs / "trial-003.log").write_text("epoch 1\nepoch 2\n")
    with visiting(browser, home.address, phone=True, dark=True) as visit:
        page = visit.open("/experiments/still")
        drawn(page, "contour")
        page.get_by_role("combobox", name="y").select_option("hidden")
        page.wait_for_function(f"() => {chart('contour')}.layout.yaxis.title.text === 'hidden'")
        page.get_by_text("epoch 2").wait_for()
        assert visit.overflow_px() == 0
        assert one_below_another(page)
        drawn(page, "slices", "curves")
        axes = f"Object.entries({chart('slices')}.layout).filter(([key]) => /^xaxis/.test(key))"
        assert page.evaluate(f"{axes}.map(([, axis]) => axis.domain)") == [[0, 1]] * 4, "a column of panels"
        legend, plot = (page.locator(f"#c-curves {part}").first.bounding_box() for part in (".legend", ".nsewdrag"))
        assert legend["y"] + legend["height"] <= plot["y"] + 1, "the legend is above the curves"
        notes = "[...document.querySelectorAll('.charts .note')]"
        assert page.evaluate(f"{notes}.every((one) => one.scrollHeight <= one.clientHeight + 1)"), "notes are whole"
        page.get_by_role("combobox", name="Configuration as").select_option("Python")
        page.get_by_text("config = {").wait_for()
        visit.shot("experiment-phone-dark")


@pytest.mark.long
def test_a_phone_s_first_screen_says_how_it_goes_and_has_the_ways_to_change_it(browser: Any, home: Home) -> None:
    with visiting(browser, home.address, phone=True) as visit:
        page = visit.open("/experiments/still")
        height_px = page.viewport_size["height"]
        shown = [page.locator("#sentence"), page.get_by_text("best accuracy"), page.get_by_text("spent (USD)")]
        shown += [page.get_by_role("button", name=name, exact=True) for name in ("Extend", "Cancel")]
        for one in shown:
            box = one.bounding_box()
            assert box["y"] + box["height"] <= height_px, one


def test_a_phone_jumps_to_the_trials_and_another_order_begins_with_its_first(browser: Any, home: Home) -> None:
    with visiting(browser, home.address, phone=True) as visit:
        page = visit.open("/experiments/still")
        page.locator(".jumps").get_by_role("link", name="Trials", exact=True).click()
        page.wait_for_timeout(3000)  # charts above it are drawn meanwhile
        top = page.locator("#trials").bounding_box()["y"]
        assert 0 <= top < 200, "its title is in sight, below the bars"
        cards = page.locator("table.trials tbody")
        cards.evaluate("(cards) => cards.scrollTo({ left: 700 })")
        page.get_by_role("link", name="after 2", exact=True).click()
        page.wait_for_function("() => location.search.includes('after=2')")
        eventually(lambda: cards.evaluate("(cards) => cards.scrollLeft") == 0, "the first card comes first")


@pytest.mark.long
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1440, 1024, 390])
def test_pages_break_no_rule_for_readers_who_do_not_see_them(browser: Any, home: Home, width: int, dark: bool) -> None:
    with visiting(browser, home.address, dark=dark) as visit:
        visit.page.set_viewport_size({"width": width, "height": 900})
        for shot, path in PAGES.items():
            page = visit.open(path)
            page.wait_for_load_state("networkidle" if path in ("/plan", "/login") else "load")
            for name in DRAWN.get(shot, ()):
                drawn(page, name)
            assert faults(page) == [], path
            assert visit.overflow_px() <= 0, path
            page.evaluate("window.scrollTo(0, 0)")
            visit.shot(f"{shot}-{width}-{'dark' if dark else 'light'}")


PAGES = {
    "list": "/",
    "plan": "/plan",
    "experiment": "/experiments/still",
    "trial": "/experiments/still/trials/2",
    "compare": "/compare?name=still&name=asked",
    "report": "/experiments/still/report",
    "docs": "/docs",
    "login": "/login",
}
DRAWN = {"experiment": ("curves", "spend", "allocation", "parallel", "slices", "contour"), "trial": ("gangs",)}


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ("<p style='color: #999; background: #fff'>pale</p>", "contrast"),
        ("<button></button>", "name"),
        ("<h4>too deep</h4>", "heading's order"),
        ("<div style='overflow: auto; width: 50px'><p style='width: 500px'>wide</p></div>", "scrolled, not reached"),
        ("<p aria-labelledby='gone'>x</p>", "aria-labelledby of nothing"),
        ("<section aria-label='x'>a</section><div role='region' aria-label='x'>b</div>", "two landmarks of one name"),
    ],
)
def test_a_broken_rule_is_found(browser: Any, home: Home, wrong: str, rule: str) -> None:
    with visiting(browser, home.address) as visit:
        page = visit.open("/login?problem=token")
        page.locator("main").evaluate("(main, wrong) => main.insertAdjacentHTML('beforeend', wrong)", wrong)
        assert [fault for fault in faults(page) if fault.startswith(rule)]


RAISED, DIED = (1, 2, 3), 4
"""Trials that fail: alike, and otherwise."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ExperimentFolder]]:
    home = tmp_path_factory.mktemp("home")
    failures: dict[Any, Any] = {(trial, attempt): "raised" for trial in RAISED for attempt in range(1, 9)}
    failures |= {(DIED, attempt): "died" for attempt in range(1, 9)}
    folder = recorded(words(name="found"), faults=Faults(failures=failures)).put(home)
    with journals(home, "found") as address:
        yield address, folder


def test_the_best_is_above_all_else_with_its_lead_and_is_copied_in_four_forms(
    browser: Any, found: tuple[str, ExperimentFolder]
) -> None:
    address, folder = found
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
    browser: Any, found: tuple[str, ExperimentFolder]
) -> None:
    with visiting(browser, found[0]) as visit:
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


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("trials", [2_000, 20_000])
def test_thousands_of_trials_open_as_a_small_page_whose_charts_and_last_trials_are_there(
    browser: Any, tmp_path: Path, trials: int
) -> None:
    run = run_of(trials)
    run.put(tmp_path)
    with journals(tmp_path, run.name, within_s=300.0) as address, visiting(browser, address) as visit:
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


def test_trials_are_added_once_their_effect_was_looked_at(browser: Any, home: Home) -> None:
    inbox = Inbox(home.folders["asked"].inbox)
    before = len(inbox.pending())
    with visiting(browser, home.address) as visit:
        page = visit.open("/experiments/asked")
        page.get_by_role("button", name="Add trials").press("Enter")
        dialog = page.get_by_role("dialog")
        apply = dialog.get_by_role("button", name="Add", exact=True)
        dialog.get_by_role("textbox", name="Values").fill("nosuch=1")
        page.keyboard.press("Enter")
        page.get_by_role("alert").filter(has_text="unknown parameter 'nosuch'").wait_for()
        assert apply.is_disabled()
        dialog.get_by_role("textbox", name="Values").fill("")
        dialog.get_by_role("textbox", name="Clone of trial").fill("0")
        page.keyboard.press("Enter")
        page.locator("#add-told strong").wait_for()
        visit.shot("experiment-add", whole=False)
        assert len(inbox.pending()) == before, "it was only looked at"
        apply.press("Enter")
        page.get_by_text("The trials were added.").wait_for()
        asked = inbox.pending()[-1]
        assert (asked.kind, asked.trials and asked.trials.clone_of) == ("add", 0)
