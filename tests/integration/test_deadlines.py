"""The deadline of a submission that waited before its start: the one of its file wherever people read it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from typer.testing import CliRunner

from rubberband import cli
from tests.builders.browser import expect, visiting
from tests.builders.dashboard_site import journals
from tests.builders.journalled_runs import recorded, words

WAITED_S, DEADLINE_S = 100.0, 1500.0
ENDS_AT = "1970-01-01T00:23:20Z"
"""The deadline, where the clock of the run begins with Unix time, and the submission came before."""
MARKED = f'<time datetime="{ENDS_AT}" data-clock>00:23 UTC</time> (25m after its submission)'
LOCAL = "Jan 1 06:08 (25m after its submission)"
"""As a terminal of the tests shows it, at +05:45."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    home: Path
    address: str

    def page(self, path: str) -> str:
        with urlopen(Request(self.address + path, headers={"Accept": "text/html"})) as answer:
            return answer.read().decode()

    def prints(self, *arguments: str) -> str:
        done = CliRunner().invoke(cli.app, arguments, env={"RUBBERBAND_HOME": str(self.home), "COLUMNS": "160"})
        assert done.exit_code == 0, done.output
        return " ".join(done.output.split())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    run, home = recorded(words(name="whole")), tmp_path_factory.mktemp("home")
    left_s = DEADLINE_S - WAITED_S
    job = dataclasses.replace(run.job, submitted_at=-WAITED_S, deadline_at=left_s, deadline_s=left_s)
    run = dataclasses.replace(run, job=job)
    run.put(home)
    with run.named("half").put(home, len(run.events) // 2).driving(), journals(home, "whole", "half") as address:
        yield Place(home=home, address=address)


@pytest.mark.parametrize(
    "path", ["/", "/experiments/whole", "/experiments/whole/report", "/compare?name=whole&name=half"]
)
def test_a_page_has_the_deadline_of_the_file(place: Place, path: str) -> None:
    shown = place.page(path)
    assert MARKED in shown
    left = re.compile(r"(?<!submitted )\b23m20s\b")
    assert not left.search(unescape(re.sub(r"<script.*?</script>|<[^>]+>", " ", shown, flags=re.DOTALL)))


@pytest.mark.parametrize("command", ["status whole", "status half", "report whole", "report whole --verbose"])
def test_a_terminal_has_the_deadline_of_the_file(place: Place, command: str) -> None:
    assert f"deadline {LOCAL}" in place.prints(*command.split())


def test_an_extension_has_both_deadlines_as_they_are_written(place: Place) -> None:
    told = place.prints("extend", "half", "--deadline", "40m", "--dry-run")
    assert f"now: deadline {LOCAL}, " in told
    assert "then: deadline Jan 1 06:23 (40m after its submission), " in told


def test_a_browser_shows_it_in_the_time_zone_of_its_reader(place: Place, browser: Any) -> None:
    with visiting(browser, place.address, timezone_id="Asia/Kathmandu") as visit:  # +05:30 in 1970
        for path in ("/experiments/half", "/experiments/half/report"):
            card = visit.open(path).locator(".card", has_text="time")
            expect(card.first).to_contain_text("deadline 1 Jan, 05:53 (25m after its submission)")
        page = visit.open("/experiments/half")
        page.get_by_role("button", name="Extend").click()
        page.get_by_role("textbox", name="Deadline").fill("40m")
        page.keyboard.press("Enter")
        told = page.locator("#extend-told")
        expect(told).to_contain_text("deadline 1 Jan, 05:53 (25m after its submission)")
        expect(told).to_contain_text("deadline 1 Jan, 06:08 (40m after its submission)")
