"""Charts as a reader wants them: log axes, smoothing, the best few, files; ranges filter the table; one address."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.builders.browser import drawn, expect, visiting
from tests.builders.dashboard_site import journals
from tests.builders.journalled_runs import recorded, words

CURVES = "document.querySelector('#c-curves')"


_MANY = {"type": "sha", "num_samples": 540, "grace_period": 4, "max_t": 36, "reduction_factor": 3}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("home")
    limits = {"deadline": "9h", "max_cost": 99}
    for run in (words(name="done"), words(name="many", search={"scheduler": _MANY}, constraints=limits)):
        recorded(run).put(home)
    with journals(home, "done", "many") as found:
        yield found


def test_curves_are_smoothed_on_log_axes_and_the_best_few_and_the_link_shows_the_same(
    browser: Any, address: str
) -> None:
    with visiting(browser, address) as visit:
        page = visit.open("/experiments/done")
        drawn(page, "curves")
        reported = page.evaluate(f"{CURVES}.data.at(-1).y")
        begins = (
            "({ y, customdata }) => y"
            ".filter((value, at) => value !== null && (at === 0 || customdata[at - 1] === null))"
            ".map((value) => value.toPrecision(9))"
        )
        first = page.evaluate(f"{CURVES}.data.map({begins})")
        page.get_by_role("checkbox", name="log y").check()
        page.wait_for_function(f"() => {CURVES}.layout.yaxis.type === 'log'")
        page.get_by_role("slider", name="smooth").fill("0.9")
        page.wait_for_function(f"() => {CURVES}.data.some((trace) => trace.showlegend === false)")
        smooth = page.evaluate(f"{CURVES}.data.at(-1).y")
        assert smooth[0] == reported[0]
        assert max(map(len, first)) > 1, "a line has the curves of several trials"
        averaged = page.evaluate(f"{CURVES}.data.slice(-{len(first)}).map({begins})")
        assert averaged == first, "none goes on from another"
        assert len(smooth) == len(reported)
        assert smooth[-2] < reported[-2], "an average lags behind a curve that rises"
        page.get_by_role("combobox", name="Trials shown").select_option("5")
        trials = f"new Set({CURVES}.data.flatMap((one) => one.customdata).filter(Boolean).map((one) => one[0])).size"
        page.wait_for_function(f"() => {trials} === 5")
        visit.shot("curves", whole=False)
        link = page.evaluate("location.pathname + location.search")
        assert "top=5" in link
        page.get_by_role("link", name="momentum", exact=True).click()
        page.wait_for_url(re.compile("sort=.momentum"))
        assert "smooth=0.9" in page.url, "sorting the table keeps it"

        page = visit.open(link)
        drawn(page, "curves")
        page.wait_for_function(f"() => {trials} === 5 && {CURVES}.layout.yaxis.type === 'log'")
        expect(page.get_by_role("slider", name="smooth")).to_have_value("0.9")


def test_a_range_of_configurations_filters_the_table_and_is_in_the_link(browser: Any, address: str) -> None:
    with visiting(browser, address) as visit:
        page = visit.open("/experiments/done")
        drawn(page, "curves", "spend", "allocation", "parallel")
        page.get_by_label("accuracy, from, percent of the axis").focus()
        for _ in range(3):
            page.keyboard.press("PageUp")
        found = page.locator("#s-parallel [aria-live]").filter(has_text=" of ")
        found.wait_for()
        few = int(re.findall(r"\d+", found.inner_text())[0])
        expect(page.locator("#trials .head")).to_contain_text(f"{few} trial")
        page.wait_for_url(re.compile("brush=accuracy"))
        assert 0 < page.locator("table.trials tbody tr").count() == min(few, 25)
        link = page.evaluate("location.pathname + location.search")

        page = visit.open(link)
        drawn(page, "curves", "spend", "allocation", "parallel")
        expect(page.locator("#s-parallel [aria-live]")).to_contain_text(f"{few} of ")
        visit.shot("brushed-table")
        page.locator("#trials .head").get_by_role("link", name="Clear").click()
        expect(page.locator("#s-parallel [aria-live]")).to_contain_text("pull along")
        expect(page.locator("#trials .head")).to_contain_text("27 trials")
        assert "brush" not in page.url


@pytest.mark.long
def test_lines_of_many_trials_are_few_elements_that_a_reader_hovers_and_hides(browser: Any, address: str) -> None:
    with visiting(browser, address) as visit:
        page = visit.open("/experiments/many")
        drawn(page, "curves")
        assert page.locator("#c-curves .js-line").count() < 10
        x, y, trial = page.evaluate(_FIRST_POINT)
        page.mouse.move(x - 3, y)
        page.mouse.move(x, y)
        expect(page.locator("#c-curves .hoverlayer")).to_contain_text("iterations, at")
        assert trial is not None
        entry = page.locator("#c-curves .legendtoggle").first
        entry.scroll_into_view_if_needed()
        entry.click()
        page.wait_for_function(f"() => {_PATHS}[0].visible === 'legendonly'")
        page.wait_for_function(f"() => {_DRAWN} === 2")
        before = page.evaluate(f"{CURVES}.layout.font.color")
        page.emulate_media(color_scheme="dark")
        page.wait_for_function(f"() => {CURVES}.layout.font.color !== '{before}'")
        assert page.evaluate(f"{_PATHS}[0].visible") == "legendonly", "what is drawn again is still hidden"
        assert page.evaluate(_DRAWN) == 2
        visit.shot("curves-many", whole=False)


@pytest.mark.parametrize(("kind", "begin"), [("PNG", b"\x89PNG"), ("SVG", b"<svg")])
@pytest.mark.long
def test_a_chart_with_lines_of_many_trials_is_saved_as_a_file(
    browser: Any, address: str, kind: str, begin: bytes
) -> None:
    with visiting(browser, address) as visit:
        page = visit.open("/experiments/many")
        drawn(page, "curves")
        with page.expect_download() as download:
            page.locator("#s-curves").get_by_role("button", name=f"Save as {kind}").click()
        assert download.value.suggested_filename == f"many-curves.{kind.lower()}"
        saved = Path(download.value.path()).read_bytes()
    assert saved.startswith(begin)
    if kind == "SVG":
        longest = max(re.findall(r' d="([^"]*)"', saved.decode()), key=len)
        assert longest.count("M") > 300, "the lines of the trials are in the picture"


@pytest.mark.long
def test_a_point_among_the_lines_of_many_trials_leads_to_its_trial(browser: Any, address: str) -> None:
    with visiting(browser, address) as visit:
        page = visit.open("/experiments/many")
        drawn(page, "curves")
        x, y, _ = page.evaluate(_FIRST_POINT)
        page.mouse.move(x, y)  # once: a text that is of another point would be read
        hover = page.locator("#c-curves .hoverlayer .hovertext").first
        expect(hover).to_contain_text("iterations, at")
        trial = re.search(r"trial (\d+): ", hover.text_content() or "")
        assert trial is not None
        page.mouse.click(x, y)
        page.wait_for_url(f"**/experiments/many/trials/{trial[1]}")


@pytest.mark.long
def test_the_report_draws_the_lines_of_many_trials_as_paths_over_each_axis(browser: Any, address: str) -> None:
    with visiting(browser, address) as visit:
        page = visit.open("/experiments/many/report")
        page.locator("#curves .main-svg").first.wait_for()
        path = "document.querySelector('#curves').layout.shapes.find((one) => one.type === 'path').path"
        over_iterations = page.evaluate(path)
        assert over_iterations.count("M") > 300
        assert page.locator("#curves .js-line").count() < 10
        page.locator("#curves .updatemenu-button").nth(1).click()
        page.wait_for_function(f"(before) => {path} !== before", arg=over_iterations)
        assert page.evaluate("document.querySelector('#curves').layout.xaxis.title.text").startswith("time since")


_PATHS = f"{CURVES}._fullLayout.shapes.filter((one) => one.type === 'path')"
_DRAWN = f"{CURVES}.querySelectorAll('.shapelayer path').length"
_FIRST_POINT = f"""() => {{
    const {{ _fullLayout: {{ xaxis, yaxis }}, data: [trace] }} = {CURVES};
    const box = {CURVES}.querySelector(".nsewdrag").getBoundingClientRect();
    return [box.x + xaxis.d2p(trace.x[1]), box.y + yaxis.d2p(trace.y[1]), trace.customdata[1][0]];
}}"""
