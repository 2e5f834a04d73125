"""An experiment's page: whole without a script in every state, and in a browser up to date, brushed, and acted on."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rubberband.api.app import create_app
from rubberband.api.settings import Settings
from rubberband.api.store import open_store
from rubberband.errors import JournalError
from rubberband.executor import ExperimentFolder, Faults, Inbox
from rubberband.states import ExperimentState
from rubberband.values.submission import Submission, Summary
from rubberband.views.report.page import CHARTS, result_charts
from tests.builders.accessibility import faults
from tests.builders.browser import served, visiting
from tests.builders.fake_runs import FakeService, fake_service
from tests.builders.journalled_runs import Recorded, recorded, words
from tests.builders.results import UPDATES, a_result, cut_short, hostile
from tests.builders.waiting import eventually

BEGUN = Summary(started_at=1000.0, stages=3, forecast_jct_s=200.0, forecast_cost_usd=0.05)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FakeService]:
    with fake_service(tmp_path) as made:
        yield made


def text(html: str) -> str:
    return " ".join(re.sub(r"<script.*?</script>|<[^>]+>", " ", html, flags=re.DOTALL).split())


def page(service: FakeService, path: str = "", status: int = 200) -> str:
    answer = service.client.get(f"/experiments/one{path}", headers={"Accept": "text/html"})
    assert answer.status_code == status
    return answer.text


def test_asynchronous_updates_have_a_table(service: FakeService) -> None:
    result = a_result()
    service.add("one", state=ExperimentState.RUNNING, summary=BEGUN)
    service.runs.results["one"] = result
    assert "Asynchronous updates" not in page(service)
    trials = (dataclasses.replace(result.trials[0], updates=(UPDATES, UPDATES)), *result.trials[1:])
    service.runs.results["one"] = dataclasses.replace(result, trials=trials)
    shown = text(page(service))
    assert "trial workers updates per s staleness most lost compute up waiting server down" in shown
    assert "0 2 100 100 0.96 4 2 10.00 2.00 1.00 4.00 3.00" in shown


@pytest.mark.by_default(10)
@pytest.mark.parametrize("state", list(ExperimentState))
@pytest.mark.parametrize("begun", [True, False])
def test_every_state_has_a_page(service: FakeService, state: ExperimentState, begun: bool) -> None:
    service.add("one", state=state, reason="told why", summary=BEGUN if begun else Summary())
    if begun:
        service.runs.results["one"] = a_result()
    shown = text(page(service))
    assert f"one {state.value}" in shown
    assert ("Progress by stage" in shown) == begun
    assert ("Report" in shown.split("time")[0]) == begun


def test_the_page_says_that_a_journal_cannot_be_read(service: FakeService) -> None:
    service.add("one", state=ExperimentState.UNREADABLE, reason="the journal is no database", summary=BEGUN)
    service.runs.failure = JournalError("the journal is no database")
    assert "The journal is no database." in text(page(service))


def test_a_queued_run_shows_its_submission_and_its_place(service: FakeService) -> None:
    service.add("one", state=ExperimentState.QUEUED, words=words(entrypoint="examples.digits:DigitsTrial"))
    service.add("other", state=ExperimentState.RUNNING)
    html = page(service)
    shown = text(html)
    assert "It waits for a free slot. 1 experiment running, 1 queued." in shown
    assert "runs examples.digits:DigitsTrial" in shown
    assert "max_cost 4.00 USD" in shown
    assert "/v1/experiments/one/report" not in html, "there is none yet"
    assert "data-dialog" in html, "it may be cancelled"


@pytest.mark.by_default(1)
@pytest.mark.parametrize("state", [ExperimentState.RUNNING, ExperimentState.DONE])
def test_the_purchase_instead_of_spot_is_a_sentence(service: FakeService, state: ExperimentState) -> None:
    expected = "2 instances on demand instead of spot: EC2 has no room (InsufficientInstanceCapacity)"
    service.add("one", state=state, summary=BEGUN)
    service.runs.results["one"] = dataclasses.replace(a_result(), instead_of_spot=expected)
    assert f"{expected}." in text(page(service))


def test_why_it_never_began_is_a_sentence(service: FakeService) -> None:
    service.add("one", state=ExperimentState.REFUSED, reason="no plan meets the deadline of 1s")
    assert "It never started. started" in text(page(service))
    assert "No plan meets the deadline of 1s." in text(page(service))


def test_another_like_it_is_planned_from_its_file(service: FakeService) -> None:
    service.add("one", summary=BEGUN, words=words(name="one", entrypoint="</textarea><script>alert(1)</script>"))
    assert 'href="/plan?like=one"' in page(service)
    shown = service.client.get("/plan?like=one", headers={"Accept": "text/html"}).text
    assert "num_samples: 27" in shown
    assert "<script>alert" not in shown
    assert "name: one" not in service.client.get("/plan?like=nobody", headers={"Accept": "text/html"}).text


def test_the_page_is_read_without_a_script(service: FakeService) -> None:
    result = a_result()
    service.add("one", state=ExperimentState.DONE, summary=BEGUN)
    service.runs.results["one"] = result
    shown = text(page(service))
    assert "Done in" in shown
    assert "SYNC of stage 0" in shown
    html = page(service, "?sort=.lr&down=1&status=stopped")
    rows = [int(found) for found in re.findall(r'<tr role="row" data-key="(\d+)"', html.split('id="trials"')[1])]
    assert rows == sorted(rows)
    assert len(rows) == 11


def test_nothing_of_the_user_s_becomes_markup(service: FakeService) -> None:
    service.add("one", summary=BEGUN, reason="</script><b>", words={"x": "</code><script>alert(1)</script>"})
    service.runs.results["one"] = hostile()
    html = page(service)
    assert "<script>alert(1)" not in html
    assert html.count("<script") == 2, "plotly and the page's own"


def test_figures_are_json_that_is_sent_once(service: FakeService) -> None:
    service.add("one", summary=BEGUN)
    assert json.loads(page(service, "/figures/curves")) == {}
    service.runs.results["one"] = a_result()
    answer = service.client.get("/experiments/one/figures/curves")
    assert list(answer.json()) == ["curves"]
    again = service.client.get("/experiments/one/figures/curves", headers={"If-None-Match": answer.headers["etag"]})
    assert again.status_code == 304
    assert service.client.get("/experiments/one/figures/none").status_code == 404


def test_the_page_expects_the_charts_that_have_something_to_show(service: FakeService) -> None:
    service.add("one", summary=BEGUN)
    result = service.runs.results["one"] = a_result()
    expected = re.findall(r'data-expected="(.*?)"', page(service))[0].split()
    drawn = [name for name in CHARTS if name in result_charts(result) or name in ("importance", "contour")]
    assert expected == drawn
    hidden = re.findall(r'id="s-([\w-]+)" class="panel figure" data-keep hidden', page(service))
    assert sorted(hidden + expected) == sorted(CHARTS)


def test_a_large_page_is_sent_compressed(service: FakeService) -> None:
    service.add("one", summary=BEGUN)
    service.runs.results["one"] = a_result()
    plain, zipped = (
        service.client.get("/experiments/one", headers={"Accept": "text/html", "Accept-Encoding": how})
        for how in ("identity", "gzip")
    )
    assert plain.text == zipped.text
    assert "content-encoding" not in plain.headers
    assert int(zipped.headers["content-length"]) < len(plain.content) / 3


@pytest.mark.long
def test_a_contour_and_the_importance_of_parameters_are_asked_for_by_themselves(service: FakeService) -> None:
    service.add("one", summary=BEGUN)
    assert json.loads(page(service, "/contour?x=n&y=lr")) == {}
    assert json.loads(page(service, "/importance")) == {}
    service.runs.results["one"] = a_result()
    assert json.loads(page(service, "/contour?x=n&y=%00"))["contour"]["layout"]["meta"]["chosen"] == ["n", "lr"]
    pytest.importorskip("optuna")
    figure = json.loads(page(service, "/importance"))["importance"]
    assert sorted(figure["data"][0]["y"]) == ["lr", "n"]
    assert "Compared: all 12 trials" in figure["layout"]["meta"]["note"]
    service.runs.results["one"] = cut_short(1, cancel=False)
    assert "needs 8 trials" in json.loads(page(service, "/importance"))["note"]


def test_the_page_links_to_its_tables_once_it_has_begun(service: FakeService) -> None:
    service.add("one", summary=BEGUN)
    assert "/export" not in page(service)
    service.runs.results["one"] = dataclasses.replace(a_result(), provider="local")
    html = page(service)
    assert "nothing is charged" in text(html)
    for link in ("/v1/experiments/one/export", "/v1/experiments/one/export?reports=true"):
        assert f'<a href="{link}" download>' in html
        assert service.client.get(link).text.startswith("trial,")


def test_the_report_is_there_once_it_has_begun(service: FakeService) -> None:
    service.add("one", summary=BEGUN)
    assert "has not started" in text(page(service, "/report", 404))
    service.runs.results["one"] = a_result()
    answer = service.client.get("/experiments/one/report")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "Stages, planned and actual" in answer.text


@pytest.mark.by_default(3)
@pytest.mark.parametrize("path", ["", "/figures/curves", "/report"])
@pytest.mark.parametrize("name", ["nobody", "NO", "..%2f..%2fetc"])
def test_a_missing_resource_is_not_found(service: FakeService, name: str, path: str) -> None:
    assert service.client.get(f"/experiments/{name}{path}").status_code == 404
    assert service.client.get(f"/fragments/experiments/{name}").status_code == 404


@pytest.mark.by_default(2)
@pytest.mark.parametrize("query", ["page=-1", "page=9999999999", "page=٣", "sort=%00", "down=maybe", "status=<b>"])
def test_trials_that_cannot_be_asked_are_ignored(service: FakeService, query: str) -> None:
    service.add("one", summary=BEGUN)
    service.runs.results["one"] = a_result()
    assert "12 trials" in text(page(service, f"?{query}"))


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
        dated = dataclasses.replace(run.named("dated"), setup={**run.setup, "provider": "local"})
        folders["dated"] = dated.put(path, int(HALF * len(run.events)))
        stack.enter_context(folders["dated"].driving())
        store = open_store(None, path)
        address = stack.enter_context(served(create_app(Settings(home=path), store=store)))
        for name in folders:
            eventually(lambda name=name: _is_running(store.submission(name)))
        yield Home(address=address, folders=folders)


def _is_running(found: Submission | None) -> bool:
    return found is not None and found.state is ExperimentState.RUNNING


def drawn(page: Any, name: str) -> None:
    """Scroll to a chart, which draws it. The one of a comparison is drawn at once."""
    page.locator(f"#c-{name}").scroll_into_view_if_needed()
    page.locator(f"#c-{name} .main-svg").first.wait_for()


def chart(name: str) -> str:
    return f"document.querySelector('#c-{name}')"


def test_the_page_follows_a_journal_that_grows(browser: Any, home: Home, run: Recorded) -> None:
    with visiting(browser, home.address) as visit:
        page = visit.open("/experiments/grown")
        page.get_by_text("running", exact=True).first.wait_for()
        for name in ("curves", "spend", "allocation", "parallel"):
            drawn(page, name)
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
        assert page.locator("[data-dialog]").all_inner_texts() == ["Delete"], "nothing is left to cancel"
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
        for name in ("spend", "allocation", "parallel", "slices", "contour"):
            drawn(page, name)
        assert asked.count("slices") >= 1
        assert page.evaluate("shift") <= 0.05
        line_px = page.locator(".jumps").bounding_box()["height"]
        assert line_px < 2 * page.locator(".jumps a").first.bounding_box()["height"]


@pytest.mark.long
def test_the_report_of_a_phone_draws_its_charts_side_by_side(browser: Any, home: Home) -> None:
    with visiting(browser, home.address, phone=True) as visit:
        page = visit.open("/experiments/still/report")
        for name in ("curves", "spend", "allocation", "parallel"):
            page.locator(f"#{name} .main-svg").first.wait_for(state="attached")
        visit.shot("report-phone")
        assert visit.overflow_px() <= 0
        assert page.evaluate("document.documentElement.scrollHeight") < 4050
        assert page.locator("table.sortable tbody tr:visible").count() <= 10


@pytest.mark.long
def test_trials_are_chosen_by_range_by_order_and_by_status(browser: Any, home: Home) -> None:
    with visiting(browser, home.address) as visit:
        page = visit.open("/experiments/still")
        for name in ("curves", "spend", "allocation", "parallel"):  # what is drawn later would move the strip
            drawn(page, name)
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


@pytest.mark.long
def test_experiments_are_compared_on_a_phone(browser: Any, home: Home) -> None:
    with visiting(browser, home.address, phone=True) as visit:
        page = visit.open("/compare?name=still&name=grown")
        drawn(page, "compared")
        page.get_by_role("radio", name="over time").check()
        page.wait_for_function(f"() => {chart('compared')}.layout.xaxis.title.text.includes('time')")
        assert visit.overflow_px() == 0
        assert page.evaluate("document.documentElement.scrollHeight") < 4050
        page.get_by_role("combobox").fill("asked")
        page.get_by_role("button", name="Add").click()
        page.get_by_role("heading", name="Compare 3 experiments").wait_for()
        page.get_by_role("link", name="Leave out grown").click()
        page.get_by_role("heading", name="Compare 2 experiments").wait_for()
        page.wait_for_url(lambda url: url.endswith("?name=still&name=asked"))
        visit.shot("compare-phone")


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
        assert page.evaluate("document.documentElement.scrollHeight") < 4050
        visit.shot("experiment-phone-dark")


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
    ],
)
def test_a_broken_rule_is_found(browser: Any, home: Home, wrong: str, rule: str) -> None:
    with visiting(browser, home.address) as visit:
        page = visit.open("/login?problem=token")
        page.locator("main").evaluate("(main, wrong) => main.insertAdjacentHTML('beforeend', wrong)", wrong)
        assert [fault for fault in faults(page) if fault.startswith(rule)]
