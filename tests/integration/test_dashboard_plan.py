"""The page that previews a plan, in a real browser against the real service: plans are made, nothing is run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rubberband.api.plans.previews import Plans
from tests.builders.accessibility import faults
from tests.builders.browser import Visit, expect, visiting
from tests.builders.dashboard_site import service
from tests.builders.waiting import eventually

MOVED = """(slider, steps) => {
  for (let step = 0; step < steps; step += 1) {
    slider.stepDown();
    slider.dispatchEvent(new Event("input", { bubbles: true }));
  }
}"""
"""Faster than any plan is made."""
ASKED = {"deadline": "72s", "provision_delay": "1s", "init_delay": "15s"}
SCALING = re.sub(
    rf"({'|'.join(ASKED)}): .*",
    lambda found: f"{found[1]}: {ASKED[found[1]]}",
    (Path(__file__).parents[2] / "examples" / "scaling.yaml").read_text(encoding="utf-8"),
)
"""The example with these figures, whatever its own are."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with service(tmp_path_factory.mktemp("home"), Plans, entrypoints=("examples.scaling:*",)) as site:
        yield site.address


def preview(visit: Visit, text: str = SCALING) -> Any:
    page = visit.open("/plan")
    page.get_by_label("Experiment file").fill(text)
    expect(page.get_by_role("button", name="Preview")).to_be_enabled()
    page.keyboard.press("Control+Enter")
    return page


def planned(page: Any) -> None:
    """Wait until the plan and the curve are there."""
    expect(page.locator("#headline .badge")).to_have_text("within the limits")
    page.locator("#frontier .scatterlayer").wait_for(state="attached")
    expect(page.get_by_role("button", name="Submit…")).to_be_enabled()


@pytest.mark.parametrize(("phone", "dark"), [pytest.param(False, True, marks=pytest.mark.long), (True, False)])
def test_a_preview_fits_desks_and_phones(browser: Any, address: str, phone: bool, dark: bool) -> None:
    with visiting(browser, address, phone=phone, dark=dark) as visit:
        page = preview(visit)
        planned(page)
        expect(page.locator("#headline")).to_contain_text("1m9s and 0.6467 USD")
        expect(page.get_by_role("table", name="The plan by stage").get_by_role("row")).to_have_count(6)
        expect(page.get_by_role("table", name="Options")).to_contain_text("fixed cluster of the best size")
        page.locator("#rests > summary").click()
        assert faults(page) == []
        assert visit.overflow_px() <= 0
        visit.shot(f"plan-{'phone' if phone else 'desk'}-{'dark' if dark else 'light'}")


def test_the_row_of_asha_is_filled_in_by_itself(browser: Any, address: str) -> None:
    with visiting(browser, address) as visit:
        page = preview(visit, SCALING.replace("deadline: 72s", "deadline: 20m"))
        planned(page)
        row = page.get_by_role("table", name="Options").get_by_role("row").filter(has_text="asha: no SYNC")
        expect(row).to_contain_text(re.compile(r"\d+s.*0\.\d+"))
        expect(row).not_to_contain_text("simulating")


def test_a_row_that_cannot_be_simulated_says_why(browser: Any, address: str) -> None:
    with visiting(browser, address) as visit:
        busy = json.dumps({"title": "Busy", "status": 422, "detail": "all planning processes are busy"})
        visit.page.route(
            "**/v1/plans/*/options/asha",
            lambda route: route.fulfill(status=422, content_type="application/problem+json", body=busy),
        )
        page = preview(visit)
        planned(page)
        row = page.get_by_role("table", name="Options").get_by_role("row").filter(has_text="asha: no SYNC")
        expect(row).to_contain_text("not known: all planning processes are busy")


def test_the_plan_follows_the_slider(browser: Any, address: str) -> None:
    with visiting(browser, address) as visit:
        page = preview(visit)
        planned(page)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url) if "/v1/plans" in request.url else None)
        slider = page.get_by_role("slider", name="Deadline, by slider")
        slider.focus()
        star, line = page.locator("#at-plan"), page.locator("#at-deadline")
        for mark in (star, line):  # they are placed once the curve is drawn
            expect(mark).to_be_visible()
        star_px, line_px = star.bounding_box()["x"], line.bounding_box()["x"]
        page.keyboard.press("End")
        expect(page.locator("#headline")).to_contain_text("0.4729 USD")
        eventually(lambda: star.bounding_box()["x"] > star_px)
        eventually(lambda: line.bounding_box()["x"] > line_px)
        expect(page.get_by_label("Deadline", exact=True)).to_have_value("2m41s")
        slider.evaluate(MOVED, 30)
        page.keyboard.press("Home")
        expect(page.locator("#headline")).to_contain_text("No plan meets these limits")
        expect(star).to_be_hidden()
        expect(page.get_by_role("button", name="Submit…")).to_be_disabled()
        assert asked, "the service planned again"
        assert len(asked) < 32, "questions that were overtaken are not asked"
        page.get_by_role("button", name="Move the deadline to 56s").click()
        expect(page.locator("#headline")).to_contain_text("0.8184 USD")
        expect(page.get_by_label("Deadline", exact=True)).to_have_value("56s")
        page.get_by_label("Budget (USD)").fill("0.5")
        expect(page.locator("#headline")).to_contain_text("No plan meets these limits")
        visit.shot("plan-infeasible")
        page.get_by_role("button", name="Move the deadline to 2m21s").click()
        expect(page.locator("#headline")).to_contain_text("0.4729 USD")
        page.get_by_role("button", name="As in the file").click()
        expect(page.locator("#headline")).to_contain_text("1m9s and 0.6467 USD")
        expect(slider).to_be_focused()


@pytest.mark.long
@pytest.mark.parametrize(("phone", "dark"), [(False, True), (True, False)])
def test_a_button_makes_a_plan_possible(browser: Any, address: str, phone: bool, dark: bool) -> None:
    narrow = SCALING.replace("max_instances: 6", "max_instances: 2")
    with visiting(browser, address, phone=phone, dark=dark) as visit:
        page = preview(visit, narrow.replace("max_cost: 5", "max_cost: 0.3"))
        both = page.get_by_role("button", name="Up to 4 instances and raise the budget to 0.68 USD")
        expect(both).to_contain_text("1m9s, 0.6467 USD")
        assert visit.overflow_px() <= 0
        visit.shot(f"plan-remedies-{'phone' if phone else 'desk'}-{'dark' if dark else 'light'}")
        both.focus()
        page.keyboard.press("Enter")
        planned(page)
        expect(page.get_by_label("Budget (USD)")).to_have_value("0.68")
        expect(page.get_by_label("Budget (USD)")).to_be_focused()
        expect(page.locator("#more")).to_have_text("Set here: up to 4 instances.")
        visit.shot(f"plan-remedied-{'phone' if phone else 'desk'}-{'dark' if dark else 'light'}")
        page.get_by_role("button", name="As in the file").click()
        expect(both).to_be_visible()
        expect(page.locator("#more")).to_be_hidden()


@pytest.mark.long
def test_a_remedy_that_concedes_nothing_comes_first_and_is_submitted(browser: Any, address: str) -> None:
    with visiting(browser, address) as visit:
        narrow = SCALING.replace("max_instances: 6", "max_instances: 2")
        page = preview(visit, narrow.replace("name: scaling", "name: remedied"))
        expect(page.locator("#fixes button")).to_have_text(
            [re.compile("^Up to 4 instances"), re.compile("^Move the deadline to 1m21s")]
        )
        page.locator("#fixes button").first.click()
        planned(page)
        expect(page.get_by_role("button", name="As in the file")).to_be_focused()
        sent: list[str] = []
        page.on("request", lambda request: sent.append(request.url) if "/v1/experiments" in request.url else None)
        page.get_by_role("button", name="Submit…").click()
        page.get_by_role("button", name="Start it").click()
        expect(page.locator("h1")).to_contain_text("remedied")
        assert "set=resources.max_instances%3D4" in sent[0]


def test_a_typed_deadline_moves_the_slider_and_a_wrong_one_is_reported_there(browser: Any, address: str) -> None:
    with visiting(browser, address) as visit:
        page = preview(visit)
        planned(page)
        slider = page.get_by_role("slider", name="Deadline, by slider")
        before = int(slider.input_value())
        page.get_by_label("Deadline", exact=True).fill("2m")
        expect(page.locator("#headline")).to_contain_text("0.5239 USD")
        assert int(slider.input_value()) > before
        page.get_by_label("Deadline", exact=True).fill("soon")
        expect(page.locator("#limit-wrong")).to_contain_text("'soon' is not a duration")
        expect(page.get_by_label("Deadline", exact=True)).to_have_attribute("aria-invalid", "true")
        page.get_by_label("Deadline", exact=True).fill("")
        expect(page.locator("#headline")).to_contain_text("no deadline")


def test_errors_of_the_file_appear_beside_it(browser: Any, address: str) -> None:
    cases = [
        (SCALING.replace("upper: 0.5", "uper: 0.5"), _line_of("upper: 0.5"), "unknown key 'uper'"),
        (SCALING.replace("  mode: min", "  mode: least"), _line_of("mode: min"), "search.mode"),
        ('{"name": "x",\n"name": 3}', 0, "occurs twice"),
        ('{"name": "x",\n"search" 3}', 2, "is not JSON"),
    ]
    with visiting(browser, address) as visit:
        page = visit.open("/plan")
        expect(page.get_by_role("button", name="Preview")).to_be_enabled()
        for text, line, message in cases:
            page.get_by_label("Experiment file").fill(text)
            page.keyboard.press("Control+Enter")
            expect(page.get_by_role("alert").filter(has_text=message)).to_be_visible()
            expect(page.locator("#gutter .marked")).to_have_text([str(line)] if line else [])
            expect(page.get_by_label("Experiment file")).to_have_attribute("aria-invalid", "true")


def _line_of(words: str) -> int:
    return SCALING[: SCALING.index(words)].count("\n") + 1


def test_a_link_shows_a_colleague_the_same_plan(browser: Any, address: str) -> None:
    with visiting(browser, address, permissions=["clipboard-read", "clipboard-write"]) as visit:
        page = preview(visit)
        planned(page)
        page.get_by_label("Deadline", exact=True).fill("2m30s")
        expect(page.locator("#headline")).to_contain_text("0.4729 USD")
        page.wait_for_url("**/plan#plan=*")
        page.get_by_role("button", name="Copy link").click()
        expect(page.get_by_role("status").filter(has_text="Copied")).to_be_visible()
        link = page.evaluate("navigator.clipboard.readText()")
    with visiting(browser, "") as visit:
        page = visit.open(link)
        visit.address = address
        visit.foreign.clear()
        expect(page.locator("#headline")).to_contain_text("0.4729 USD")
        expect(page.get_by_label("Deadline", exact=True)).to_have_value("2m30s")
        expect(page.get_by_label("Experiment file")).to_have_value(SCALING)
        page.goto(f"{address}/plan#plan=broken")
        expect(page.get_by_role("alert").filter(has_text="Broken link")).to_be_visible()


def test_a_simulated_submission_rents_nothing_in_words_and_leads_to_its_page(browser: Any, address: str) -> None:
    with visiting(browser, address) as visit:
        simulated = SCALING.replace("provider: local", "provider: virtual")
        page = preview(visit, simulated.replace("name: scaling", "name: simulated"))
        planned(page)
        page.get_by_role("button", name="Submit…").click()
        words = page.locator("#confirm-words")
        expect(words).to_contain_text("RubberBand simulates it, and nothing is rented: about")
        page.get_by_role("button", name="Start it").click()
        page.wait_for_url("**/experiments/simulated")
        expect(page.locator("h1 .badge").first).to_have_text("queued")


@pytest.mark.long
@pytest.mark.parametrize("width", [1440, 1024])
def test_the_plan_s_tables_show_their_costs_whole(browser: Any, address: str, width: int) -> None:
    with visiting(browser, address) as visit:
        visit.page.set_viewport_size({"width": width, "height": 900})
        page = preview(visit)
        planned(page)
        beyond = "(table) => table.scrollWidth - table.clientWidth"
        assert page.locator("#stages").evaluate(beyond) <= 1
        assert page.locator("#options").evaluate(beyond) <= 1


@pytest.mark.long
def test_a_person_without_a_mouse_submits_what_was_previewed(browser: Any, address: str) -> None:
    with visiting(browser, address) as visit:
        sent: list[Any] = []
        page = preview(visit)
        planned(page)
        page.on("request", lambda request: sent.append(request) if request.method == "POST" else None)
        page.get_by_role("slider", name="Deadline, by slider").focus()
        page.keyboard.press("ArrowRight")
        expect(page.get_by_role("button", name="Submit…")).to_be_enabled()
        expect(page.get_by_label("Deadline", exact=True)).to_have_value("1m13s")
        for _ in range(4):  # The budget, the size, "As in the file"
            page.keyboard.press("Tab")
        expect(page.get_by_role("button", name="Submit…")).to_be_focused()
        page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog", name="Start this experiment?")
        expect(dialog).to_contain_text("spends at most")
        expect(dialog.get_by_label("Name")).to_have_value("scaling")
        visit.shot("plan-confirm", whole=False)
        dialog.get_by_label("Name").fill("scaling-mine")
        dialog.get_by_role("button", name="Start it").focus()
        page.keyboard.press("Enter")
        page.wait_for_url("**/experiments/scaling-mine")
        [request] = [request for request in sent if "/v1/experiments" in request.url]
        assert re.fullmatch(r"[0-9a-f]{32}", request.headers["idempotency-key"])
        assert "constraints.deadline%3D1m13s" in request.url
        made = page.request.get(f"{address}/v1/experiments/scaling-mine").json()
        assert made["state"] == "queued"
        visit.errors.clear()


def test_a_run_without_a_preview_shows_its_limits_before_the_start(browser: Any, address: str) -> None:
    with visiting(browser, address) as visit:
        page = preview(visit, SCALING[: SCALING.index("profile:")])
        expect(page.locator("#headline")).to_contain_text("a submission measures one first")
        expect(page.locator("#wrong")).to_have_class("hint")
        page.get_by_role("button", name="Submit…").click()
        dialog = page.get_by_role("dialog", name="Start this experiment?")
        expect(dialog).to_contain_text("first measures a profile")
        expect(dialog).to_contain_text("1m12s from now")
        expect(dialog).to_contain_text("5.00 USD")


def test_a_passed_deadline_and_a_forbidden_entry_point_cannot_be_submitted(browser: Any, address: str) -> None:
    with visiting(browser, address) as visit:
        late = SCALING[: SCALING.index("profile:")].replace("deadline: 72s", "deadline: 2020-01-01T00:00:00Z")
        page = preview(visit, late)
        expect(page.locator("#may")).to_contain_text("has passed")
        expect(page.get_by_role("button", name="Submit…")).to_be_disabled()
        page = preview(visit, SCALING.replace("examples.scaling:", "os:"))
        expect(page.locator("#headline")).to_contain_text("1m9s and 0.6467 USD")
        expect(page.locator("#may")).to_contain_text("'os:ScalingTrial' is not allowed here")
        expect(page.get_by_role("button", name="Submit…")).to_be_disabled()


@pytest.mark.long
def test_the_text_stays_in_the_tab_alone_and_files_are_opened(browser: Any, address: str, tmp_path: Path) -> None:
    words = tmp_path / "words.json"
    profile = {"seconds_per_iteration": {"1": 6.0}}
    stages = [{"trials": 4, "iterations": 2}]
    search = {"space": {"x": 1}, "scheduler": {"type": "stages", "stages": stages}, "metric": "loss", "mode": "min"}
    resources = {"provider": "virtual", "instance_type": "p3.2xlarge", "max_instances": 4}
    words.write_text(
        json.dumps({"version": 1, "name": "words", "search": search, "resources": resources, "profile": profile})
    )
    with visiting(browser, address) as visit:
        page = visit.open("/plan")
        expect(page.get_by_role("button", name="Preview")).to_be_enabled()
        page.locator("#chosen").set_input_files(words)
        expect(page.locator("#headline")).to_contain_text("no limits set")
        page.reload()
        expect(page.locator("#headline")).to_contain_text("no limits set")
        expect(page.locator("#at-plan"), "the plan is marked, however late plotly comes").to_be_visible()
        assert page.evaluate("localStorage.length") == 0
    with visiting(browser, address) as visit:
        expect(visit.open("/plan").get_by_label("Experiment file")).not_to_have_value(re.compile("words"))


def test_an_empty_editor_has_an_example_which_a_paste_replaces(browser: Any, address: str) -> None:
    with visiting(browser, address) as visit:
        page = visit.open("/plan")
        field = page.get_by_label("Experiment file")
        expect(field).to_have_value(re.compile("name: digits"))
        expect(page.locator("#hello"), "nothing is planned before it is asked for").to_be_visible()
        field.focus()
        page.wait_for_function("() => getSelection().toString().includes('name: digits')")
        page.keyboard.insert_text("name: mine")
        expect(field).to_have_value("name: mine")
        page.reload()
        expect(field).to_have_value("name: mine")
        page.evaluate("sessionStorage.clear()")
        page.goto(f"{address}/plan")
        expect(field).to_have_value(re.compile("name: digits"))
        page.get_by_role("button", name="Preview").click()
        expect(page.locator("#headline .badge")).to_have_text("within the limits")


@pytest.mark.long
def test_a_search_is_sized_to_the_limits_and_follows_them(browser: Any, address: str) -> None:
    with visiting(browser, address) as visit:
        page = preview(visit)
        planned(page)
        page.get_by_role("button", name="Size the search to these limits").click()
        expect(page.locator("#headline")).to_contain_text("31 configurations fit")
        expect(page.locator("#more")).to_have_text("Set here: as many configurations as the limits allow.")
        expect(page.locator("#frontier")).to_be_hidden()
        assert visit.overflow_px() <= 0
        visit.shot("plan-sized")
        page.get_by_label("Deadline", exact=True).fill("10m")
        expect(page.locator("#headline")).to_contain_text("175 configurations fit")
        page.get_by_role("button", name="As in the file").click()
        expect(page.locator("#headline")).to_contain_text("1m9s and 0.6467 USD")
        expect(page.locator("#frontier")).to_be_visible()
