"""The page of a trial: reached from everywhere, up to date, copied from, and searched."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from rubberband.executor import (
    ExperimentFolder,
    Faults,
    Inbox,
    Journal,
    LogPump,
    TrialLog,
    TrialStopRequested,
    sqlite_url,
)
from rubberband.executor import read_journal as read
from rubberband.views.trial import most_workers
from tests.builders.browser import drawn, expect, visiting
from tests.builders.dashboard_site import journals
from tests.builders.journalled_runs import Recorded, recorded, words

TRIAL = 12


@pytest.fixture(scope="module")
def run() -> Recorded:
    return recorded(words(name="grown"), faults=Faults(failures={(2, 1): "raised"}))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, run: Recorded) -> Iterator[tuple[str, ExperimentFolder]]:
    path = tmp_path_factory.mktemp("home")
    with ExitStack() as stack:
        folder = run.put(path, len(run.events) // 2)
        folder.logs.mkdir(exist_ok=True)
        lines = [f"epoch {n} <b>bold</b>" for n in range(2500)]
        (folder.logs / f"trial-{TRIAL:03}.log").write_text("\n".join(lines) + "\n")
        stack.enter_context(folder.driving())
        yield stack.enter_context(journals(path, "grown")), folder


def test_a_row_leads_to_its_trial_which_is_searched_copied_and_followed(
    browser: Any, site: tuple[str, ExperimentFolder], run: Recorded
) -> None:
    address, folder = site
    with visiting(browser, address, permissions=["clipboard-read", "clipboard-write"]) as visit:
        page = visit.open("/experiments/grown")
        page.locator("table.trials").get_by_role("link", name=str(TRIAL), exact=True).click()
        expect(page.get_by_role("heading", level=1)).to_have_text(re.compile(f"Trial {TRIAL} "))
        expect(page.get_by_text("Its curve among the others")).to_be_visible()
        drawn(page, "curves", "gangs")
        assert page.evaluate("document.querySelector('#c-curves').data.at(-1).name") == f"trial {TRIAL}"

        texts = {}
        for title in ("YAML", "JSON", "Command line", "Python"):
            page.get_by_role("radio", name=title, exact=True).check()
            page.get_by_role("button", name="Copy").click()
            expect(page.get_by_role("status").get_by_text("Copied.")).to_be_visible()
            texts[title] = page.evaluate("navigator.clipboard.readText()")
        configuration = run.setup["configurations"][TRIAL]
        assert json.loads(texts["JSON"]) == yaml.safe_load(texts["YAML"]) == configuration
        assert f"--momentum={configuration['momentum']}" in texts["Command line"]
        assert str(configuration) in texts["Python"].replace("\n    ", " ").replace("{ ", "{").replace(",\n}", "}")

        page.get_by_role("searchbox").fill("EPOCH 7")
        expect(page.locator("#log-note")).to_have_text("The last 111 lines with “EPOCH 7”.")
        expect(page.locator("#log-lines mark").first).to_have_text("epoch 7")
        assert page.locator("#log-lines b").count() == 0, "lines are text"
        visit.shot("trial")

        before = page.locator(".cards").inner_text()
        run.grow(folder, len(run.events) // 2, len(run.events))
        expect(page.locator(".cards")).not_to_have_text(before)
        expect(page.locator("h1 .live")).to_have_count(0)
        visit.shot("trial-done")
        page.locator("#c-curves").scroll_into_view_if_needed()


def test_a_point_of_a_chart_leads_to_its_trial(browser: Any, site: tuple[str, ExperimentFolder]) -> None:
    with visiting(browser, site[0]) as visit:
        page = visit.open("/experiments/grown")
        drawn(page, "curves", "spend", "allocation", "parallel")
        page.locator("#c-curves").scroll_into_view_if_needed()
        point = page.locator("#c-curves .trace").last.locator(".point").last
        box = point.bounding_box()
        page.mouse.move(box["x"] + 2, box["y"] + 2)
        page.locator("#c-curves .hovertext").first.wait_for()
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.wait_for_url(re.compile(r"/experiments/grown/trials/\d+$"))


@pytest.mark.long
@pytest.mark.parametrize("dark", [False, True])
def test_a_trial_fits_a_phone(browser: Any, site: tuple[str, ExperimentFolder], dark: bool) -> None:
    with visiting(browser, site[0], phone=True, dark=dark) as visit:
        page = visit.open(f"/experiments/grown/trials/{TRIAL}")
        drawn(page, "curves")
        assert visit.overflow_px() <= 0
        visit.shot(f"trial-phone-{'dark' if dark else 'light'}")


@pytest.mark.by_default(1)
@pytest.mark.parametrize("dark", [False, True])
def test_a_trial_is_stopped_by_a_button_after_a_question(
    browser: Any, tmp_path: Path, run: Recorded, dark: bool
) -> None:
    with ExitStack() as stack:
        half = len(run.events) // 2
        folder = run.put(tmp_path, half)
        stack.enter_context(folder.driving())
        address = stack.enter_context(journals(tmp_path, "grown"))
        result = read(folder)
        over = next(trial.trial for trial in result.trials if trial.is_over)
        going = next(trial.trial for trial in result.trials if trial.status == "running")
        visit = stack.enter_context(visiting(browser, address, dark=dark))
        page = visit.open(f"/experiments/grown/trials/{over}")
        button = page.get_by_role("button", name="Stop", exact=True)
        expect(button).to_have_count(0)
        page = visit.open(f"/experiments/grown/trials/{going}")
        button.click()
        visit.shot(f"trial-stop-{'dark' if dark else 'light'}", whole=False)
        page.get_by_role("button", name="Keep it running").click()
        assert Inbox(folder.inbox).pending() == []
        button.click()
        page.get_by_role("button", name="Stop the trial").click()
        expect(page.get_by_role("status").get_by_text("The trial stops.")).to_be_visible()
        (asked,) = Inbox(folder.inbox).pending()
        assert (asked.kind, asked.trial) == ("stop", going)
        with closing(Journal(sqlite_url(folder.journal), "grown")) as journal:
            now = list(journal.events())[-1][1].occurred_at
            journal.append([TrialStopRequested(occurred_at=now, request=asked.id, trial=going)])
        expect(page.locator("h1 .badge")).to_have_text("stopped")
        expect(button).to_have_count(0)
        expect(page.locator("#checkpoints li")).to_have_count(1)


def test_the_log_of_a_gang_shows_ranks_and_is_filtered_by_one(browser: Any, tmp_path: Path, run: Recorded) -> None:
    folder = run.put(tmp_path)
    largest = most_workers(read(folder), TRIAL)
    assert largest > 1, "the run has a gang of several"
    log = folder.logs / f"trial-{TRIAL:03}.log"
    for rank in (None, 1, 0):
        line = "".join(f"step {step}\n" for step in range(6000)) if rank == 0 else f"begun by {rank}\n"
        with closing(LogPump()) as pump, pump.redirected(TrialLog(path=log, limit_bytes=10**6, rank=rank)):
            print(line, end="")
    with journals(tmp_path, "grown") as address, visiting(browser, address) as visit:
        page = visit.open(f"/experiments/grown/trials/{TRIAL}")
        lines, choice = page.locator("#log-lines > div"), page.get_by_role("combobox", name="rank")
        expect(lines.last).to_have_text("rank 0 | step 5999")
        expect(choice.locator("option")).to_have_text(["all ranks", *(f"rank {rank}" for rank in range(largest))])
        choice.select_option("rank 1")
        expect(lines).to_have_text(["begun by 1"])
        expect(page.locator("#log-note")).to_have_text("The last line of rank 1.")
        page.get_by_role("searchbox").fill("step")
        expect(page.locator("#log-note")).to_have_text("No line of rank 1 has “step”.")
        choice.select_option("all ranks")
        expect(page.locator("#log-note")).to_have_text("The last 2000 lines with “step”.")
        page.get_by_role("searchbox").fill("begun")
        expect(lines).to_have_text(["begun by None", "rank 1 | begun by 1"])
        with closing(LogPump()) as pump, pump.redirected(TrialLog(path=log, limit_bytes=10**6, rank=largest)):
            print(f"begun by {largest}")
        expect(lines.last).to_have_text(f"rank {largest} | begun by {largest}")
        expect(choice.locator("option").last).to_have_text(f"rank {largest}")  # the gang has grown since
        page = visit.open("/experiments/grown")
        choice.select_option("rank 1")
        expect(page.locator("#log-note")).to_have_text("The last line of rank 1.")
        page.get_by_role("radio", name="process").check(force=True)
        expect(choice).to_be_disabled()
        expect(page.locator("#log-note")).to_have_text("Nothing was printed.")
