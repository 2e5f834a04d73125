"""Charts of an experiment's page that a reader hides, orders and sets: his browser keeps them, a link shows them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.builders.accessibility import faults
from tests.builders.browser import drawn, expect, visiting
from tests.builders.dashboard_site import journals
from tests.builders.journalled_runs import recorded, words

CURVES = "document.querySelector('#c-curves')"
USUAL = ["curves", "spend", "paid", "allocation", "parallel", "importance", "slices", "contour"]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("home")
    run = recorded(words(name="done"))
    run.put(home)
    run.named("other").put(home)
    replace(run, name="rehearsed", job=replace(run.job, name="rehearsed", trains=False)).put(home)
    driven = run.named("still").put(home, int(0.6 * len(run.events)))
    with driven.driving(), journals(home, "done", "other", "rehearsed", "still") as found:
        yield found


def charts(page: Any) -> list[str]:
    """Names of the charts that are shown, from the top of the page's order."""
    shown = page.locator(".charts > section:visible").evaluate_all("(all) => all.map(({ id }) => id)")
    return [name.removeprefix("s-") for name in shown]


def opened(visit: Any, path: str) -> Any:
    """Open a page, and its list of charts."""
    page = visit.open(path)
    page.locator("#view summary").click()
    return page


def link_of(page: Any) -> str:
    page.get_by_role("button", name="Copy link").click()
    found = page.locator("#view details > code").inner_text()
    return str(re.sub(r"^https?://[^/]+", "", found))


def test_a_link_shows_another_browser_the_same_charts_settings_and_trials_and_keeps_nothing_there(
    browser: Any, address: str
) -> None:
    with visiting(browser, address) as visit, visiting(browser, address) as other:
        page = opened(visit, "/experiments/done")
        page.get_by_role("checkbox", name="Spend").uncheck()
        page.get_by_role("button", name="Move Metric by two parameters up").click()
        drawn(page, "curves", "contour")
        page.get_by_role("radio", name="over dollars").check()
        page.get_by_role("checkbox", name="log y").check()
        page.get_by_role("combobox", name="y", exact=True).select_option("hidden")
        page.get_by_label("Filter trials").fill("trial<20")
        page.get_by_label("Filter trials").press("Enter")
        page.get_by_text("Columns", exact=True).click()
        page.get_by_label("momentum", exact=True).uncheck()
        expect(page.get_by_role("columnheader", name="momentum")).to_have_count(0)
        page.locator("#metrics").get_by_role("link", name="after 2", exact=True).click()
        page.get_by_role("columnheader", name="accuracy after 2").wait_for()
        order = charts(page)
        assert order == ["curves", "paid", "allocation", "parallel", "importance", "contour", "slices"]
        link = link_of(page)
        assert "view=curves+paid+allocation" in link, "it is readable"

        other.open("/experiments/done")
        mine = opened(other, "/experiments/done")
        mine.get_by_role("checkbox", name="Configurations").uncheck()
        kept = mine.evaluate("JSON.stringify(localStorage)")
        his = opened(other, link)
        assert charts(his) == order
        drawn(his, "curves", "contour")
        his.wait_for_function(f"() => {CURVES}.layout.xaxis.title.text.includes('bill')")
        assert his.evaluate(f"{CURVES}.layout.yaxis.type") == "log"
        assert his.evaluate("document.querySelector('#c-contour').layout.yaxis.title.text") == "hidden"
        assert (
            his.locator("table.trials tbody th").all_inner_texts()
            == page.locator("table.trials tbody th").all_inner_texts()
        )
        expect(his.get_by_role("columnheader", name="momentum")).to_have_count(0)
        his.get_by_role("columnheader", name="accuracy after 2").wait_for()
        his.get_by_role("checkbox", name="Importance").uncheck()
        his.get_by_role("checkbox", name="log x").check()
        assert "log=xy" in his.url
        assert "importance" not in his.url, "the link is changed"
        assert his.evaluate("JSON.stringify(localStorage)") == kept, "and this browser keeps its own"
        other.shot("view-of-a-link")
        his.get_by_role("button", name="Show mine").click()
        his.wait_for_url(lambda url: "view=" not in url)
        his.wait_for_function("() => document.querySelector('#s-parallel').classList.contains('off')")
        assert charts(his) == [name for name in USUAL if name != "parallel"]
        assert "filter=" in his.url, "the trials are still those of the link"


def test_a_browser_keeps_its_charts_for_all_experiments_until_they_are_as_before(browser: Any, address: str) -> None:
    with visiting(browser, address) as visit:
        page = opened(visit, "/experiments/done")
        assert charts(page) == USUAL
        page.get_by_role("checkbox", name="Metric by parameter").uncheck()
        page.get_by_role("button", name="Move Spend up").click()
        drawn(page, "curves")
        page.get_by_role("radio", name="over time").check()
        page.get_by_role("slider", name="smooth").fill("0.9")
        order = ["spend", *(name for name in USUAL if name not in ("spend", "slices"))]
        assert charts(page) == order
        for path in ("/experiments/done", "/experiments/other"):
            page = opened(visit, path)
            assert charts(page) == order, path
            expect(page.locator("#view summary")).to_have_text("Charts: 1 of 8 hidden")
            drawn(page, "curves")
            page.wait_for_function(f"() => {CURVES}.layout.xaxis.title.text.includes('time')")
            expect(page.get_by_role("slider", name="smooth")).to_have_value("0.9")
            assert "By parameter" not in page.locator(".jumps").inner_text()
        page.get_by_role("button", name="As it was").click()
        page.wait_for_function("() => document.querySelector('#view summary').textContent === 'Charts'")
        assert charts(page) == USUAL
        drawn(page, "curves")
        expect(page.get_by_role("slider", name="smooth")).to_have_value("0")


def test_a_link_is_kept_as_own_once_it_is_said_so(browser: Any, address: str) -> None:
    with visiting(browser, address) as visit:
        page = visit.open("/experiments/done?view=contour+curves&curves=dollars")
        assert charts(page) == ["contour", "curves"]
        page.get_by_role("button", name="Keep these").click()
        page.wait_for_url(lambda url: url.endswith("/experiments/done"))
        page = opened(visit, "/experiments/other")
        assert charts(page) == ["contour", "curves"]
        drawn(page, "curves")
        expect(page.get_by_role("radio", name="over dollars")).to_be_checked()


def test_unknown_names_in_a_link_are_passed_over_and_named(browser: Any, address: str) -> None:
    with visiting(browser, address) as visit:
        page = visit.open(
            "/experiments/done?view=spend+nosuch+curves+-worse&curves=parsecs&x=%00&top=x&log=%F0&smooth=no"
        )
        assert charts(page) == ["spend", "curves"]
        said = page.locator("#view [role=status]")
        expect(said).to_contain_text("passed over: “nosuch”, “worse”")
        drawn(page, "curves")
        expect(said).to_contain_text("“curves=parsecs”")
        expect(page.get_by_role("radio", name="over iterations")).to_be_checked()
        for broken in ("view=", "view=%3Cb%3E+__proto__+constructor", "view=%FF%00", "view=-", f"view={'x' * 4000}"):
            page = visit.open(f"/experiments/done?{broken}")
            assert charts(page) == USUAL, broken
            assert said.is_hidden() == (broken == "view="), broken
            assert visit.overflow_px() <= 0
        page.evaluate("localStorage.setItem('charts', 'view=%%%+-curves+%26&x=&&=')")
        page = visit.open("/experiments/done")
        assert charts(page) == USUAL[1:]
        expect(said).to_contain_text("“%%%”")


def test_a_browser_that_keeps_nothing_shows_and_changes_its_charts_all_the_same(browser: Any, address: str) -> None:
    with visiting(browser, address) as visit:
        visit.page.add_init_script(
            "Object.defineProperty(window, 'localStorage', { get() { throw new Error('refused'); } })"
        )
        page = visit.open("/experiments/done?view=curves+spend")
        page.locator("#view summary").click()
        page.get_by_role("checkbox", name="Spend").uncheck()
        assert charts(page) == ["curves"]


def test_a_view_lacks_the_charts_that_an_experiment_has_not_and_keeps_their_places(browser: Any, address: str) -> None:
    with visiting(browser, address) as visit:
        page = visit.open("/experiments/rehearsed?view=contour+curves+allocation+spend")
        assert charts(page) == ["allocation", "spend"]
        assert page.locator("#view [role=status]").is_hidden(), "they are known"
        page.get_by_role("button", name="Keep these").click()
        page.wait_for_url(lambda url: "view=" not in url)
        page = opened(visit, "/experiments/rehearsed")
        page.get_by_role("button", name="Move Spend up").click()
        page = visit.open("/experiments/done")
        assert charts(page) == ["contour", "curves", "spend", "allocation"]


def test_a_hidden_chart_is_neither_asked_for_nor_printed(browser: Any, address: str, tmp_path: Path) -> None:
    with visiting(browser, address) as visit:
        asked: list[str] = []
        visit.page.on("request", lambda request: asked.append(request.url))
        page = visit.open("/experiments/done?view=contour+slices+curves")
        drawn(page, "contour", "slices", "curves")
        page.locator("#log").scroll_into_view_if_needed()
        page.pdf(path=tmp_path / "page.pdf")
        figures = {
            found[1] for url in asked if (found := re.search(r"/experiments/done/(?:figures/)?([a-z-]+)(?:\?|$)", url))
        }
        assert figures & {*USUAL} == {"contour", "slices", "curves"}
        page.emulate_media(media="print")
        assert charts(page) == ["contour", "slices", "curves"]
        boxes = [page.locator(f"#s-{name}").bounding_box() for name in charts(page)]
        assert boxes == sorted(boxes, key=lambda box: (box["y"], box["x"]))
        assert page.locator("#view").is_hidden()


@pytest.mark.parametrize(
    "reached", ["#s-slices", "?chart=slices", "?view=curves+spend#s-slices", "?view=curves&chart=slices"]
)
def test_a_link_to_a_hidden_chart_shows_it_for_this_visit(browser: Any, address: str, reached: str) -> None:
    with visiting(browser, address) as visit:
        page = opened(visit, "/experiments/done")
        page.get_by_role("checkbox", name="Metric by parameter").uncheck()
        page = visit.open("/")
        page = visit.open(f"/experiments/done{reached}")
        page.locator("#c-slices .main-svg").first.wait_for()
        expect(page.locator("#s-slices")).to_be_in_viewport()
        expect(page.locator("#s-slices.grown")).to_have_count(int("chart=" in reached))
        page = visit.open("/")
        page = visit.open("/experiments/done")
        assert "slices" not in charts(page)
        page.evaluate("window.location.hash = 's-slices'")
        page.locator("#c-slices .main-svg").first.wait_for()
        page.locator("#view summary").click()
        page.get_by_role("checkbox", name="Spend").uncheck()
        assert "slices" in charts(page)
        page = visit.open("/")
        page = visit.open("/experiments/done")
        assert not {"slices", "spend"} & {*charts(page)}, "another change keeps nothing of the visit"


def test_charts_are_ordered_by_keyboard_and_the_page_keeps_their_order_as_it_reloads(
    browser: Any, address: str
) -> None:
    with visiting(browser, address) as visit:
        page = visit.open("/experiments/still")
        focused = "document.activeElement.getAttribute('aria-label')"
        page.locator("#view summary").press("Enter")
        page.get_by_role("button", name="Move Instances and GPUs up").press("Enter")
        assert page.evaluate(focused) == "Move Instances and GPUs up", "the focus stays for the next step"
        page.keyboard.press("Enter")
        page.keyboard.press("Space")
        assert page.evaluate(focused) == "Move Instances and GPUs down", "it is the first"
        page.get_by_role("checkbox", name="Spend").press("Space")
        order = charts(page)
        assert order[:3] == ["allocation", "curves", "paid"]
        assert faults(page) == []
        with page.expect_response(lambda answer: "/fragments/" in answer.url):
            page.locator("#metrics").get_by_role("link", name="after 2", exact=True).click()
        page.get_by_role("columnheader", name="accuracy after 2").wait_for()
        assert charts(page) == order
        jumps = page.locator(".jumps a:visible").all_inner_texts()
        assert jumps[:3] == ["Stages", "Instances", "Curves"]
        visit.shot("view-open", whole=False)


def test_a_phone_has_the_list_of_charts_in_its_width(browser: Any, address: str) -> None:
    with visiting(browser, address, phone=True) as visit:
        page = opened(visit, "/experiments/done?view=curves+nosuch+contour")
        page.get_by_role("button", name="Move Metric by two parameters up").tap()
        page.get_by_role("checkbox", name="Spend").check()
        assert charts(page)[:2] == ["contour", "curves"]
        link_of(page)
        assert visit.overflow_px() <= 0
        assert faults(page) == []
        visit.shot("view-phone")


def test_a_step_back_undoes_the_latest_choice_of_trials(browser: Any, address: str) -> None:
    with visiting(browser, address) as visit:
        visit.open("/")
        page = visit.open("/experiments/done")
        rows = page.locator("table.trials tbody tr")
        every = rows.count()
        page.get_by_label("Filter trials").fill("trial<3")
        page.get_by_label("Filter trials").press("Enter")
        expect(rows).to_have_count(3)
        page.get_by_text("Columns", exact=True).click()
        page.get_by_label("momentum", exact=True).uncheck()
        expect(page.get_by_role("columnheader", name="momentum")).to_have_count(0)
        page.locator("#metrics").get_by_role("link", name="after 2", exact=True).click()
        page.get_by_role("columnheader", name="accuracy after 2").wait_for()
        drawn(page, "curves")
        page.get_by_role("checkbox", name="log y").check()
        page.go_back()
        expect(page.get_by_role("columnheader", name="accuracy after 2")).to_have_count(0)
        expect(page.get_by_role("columnheader", name="momentum")).to_have_count(0)
        page.go_back()
        expect(page.get_by_role("columnheader", name="momentum")).to_have_count(1)
        expect(page.get_by_label("momentum", exact=True)).to_be_checked()
        expect(rows).to_have_count(3)
        page.go_back()
        expect(rows).to_have_count(every)
        expect(page.get_by_label("Filter trials")).to_have_value("")
        expect(page.get_by_role("checkbox", name="log y")).to_be_checked()
        assert "log=y" in page.url, "the charts stay as they are set"
        page.go_forward()
        expect(rows).to_have_count(3)
        expect(page.get_by_label("Filter trials")).to_have_value("trial<3")
        page.go_back()
        page.go_back()
        page.wait_for_url(f"{address}/")
