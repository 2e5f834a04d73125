"""On terminals of 72 to 160 columns no word, number or path is broken, and lists fit."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from rich.console import Console

from rubberband.commands import report as commands
from rubberband.commands.common import say
from rubberband.commands.report import Listed, ps
from rubberband.running.starting import plan_line
from rubberband.views.document import print_document
from rubberband.views.formatting import TextTable
from rubberband.views.live.progress import stage_table
from rubberband.views.live.view import TerminalView
from rubberband.views.report.headlines import headlines
from rubberband.views.report.text import MOST_TRIALS, tables
from tests.builders.results import EVERY_RESULT, a_job
from tests.builders.special_results import SPECIAL_RESULTS
from tests.builders.watching import pictures, watch

PATH = f"/home/a-person/{'experiments/' * 7}checkpoints/trial-12"
"""Wider than a narrow terminal."""
ADDRESS = "https://storage.example.org/results/of/march/digits.html"
RESULTS = EVERY_RESULT | SPECIAL_RESULTS


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.getvalue()).splitlines()

    @property
    def words(self) -> set[str]:
        return {word for line in self.lines for word in line.split()}


@pytest.fixture(params=[72, 100, 160])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("COLUMNS", str(request.param))
    return int(request.param)


@contextmanager
def on_screen() -> Iterator[Screen]:
    with redirect_stdout(Screen()) as found, redirect_stderr(found):
        yield found


def words_of(lines: list[str], found: list[TextTable]) -> set[str]:
    cells = [cell for table in found for row in (table.header, *table.rows, table.total or ()) for cell in row]
    notes = [note for table in found for note in table.notes]
    return {word for text in (*lines, *cells, *notes) for word in text.split()}


@pytest.mark.by_default(6)
@pytest.mark.parametrize("kind", RESULTS)
def test_a_report_breaks_no_word(kind: str, width: int) -> None:
    result = RESULTS[kind]()
    lines, found = headlines(result.shown), tables(result, MOST_TRIALS)
    with on_screen() as screen:
        print_document(lines, found, ())
    whole = {word for word in words_of(lines, found) if len(word) <= width - 20}
    assert whole - screen.words == set()
    assert all(len(line.rstrip()) <= width or len(line.split()) == 1 for line in screen.lines)


def test_a_path_and_an_address_stay_whole_in_lines_and_tables(width: int) -> None:
    lines = [f"checkpoint: {PATH} (23.3 KB)", f"the page is at {ADDRESS} and nowhere else, as far as is known today"]
    rows = tuple((str(at), "12", f"cannot read {ADDRESS}/{at}: no such file") for at in range(3))
    table = TextTable(title="Failures", header=("trial", "iterations", "why"), rows=rows, words=frozenset({2}))
    with on_screen() as screen:
        print_document(lines, [table], ())
    assert words_of(lines, []) <= screen.words
    assert {f"{ADDRESS}/{at}:" for at in range(3)} <= screen.words


def test_remarks_are_folded_between_words_with_a_hanging_indent(width: int) -> None:
    remarks = [plan_line(a_job()), f"checked {PATH}:train in 3.1s: iterations take 12.4 ms, and it can be resumed"]
    with on_screen() as screen:
        for remark in remarks:
            say(remark)
    assert words_of(remarks, []) <= screen.words
    assert [line.split()[0] for line in screen.lines if not line.startswith("  ")] == ["plan:", "checked"]
    assert all(len(line) <= width or len(line.split()) == 1 for line in screen.lines)


def test_a_remark_is_one_line_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    say(plan_line(a_job()))
    assert capsys.readouterr().err == f"{plan_line(a_job())}\n"


def test_a_run_breaks_no_number_and_no_word_of_its_story(width: int) -> None:
    job, stream = a_job(), Screen()
    console = Console(file=stream, width=width, force_terminal=True, color_system=None)
    with TerminalView(job, lambda: 117.0, stream, console) as view:
        watch(job, [view])
    now, progress = pictures(job)[-1]
    shown = stream.words
    assert {cell for row in stage_table(progress.stages(now)).rows for cell in row if cell} <= shown
    assert "promoted" in shown
    assert all(len(line.rstrip()) <= width for line in stream.lines)


LISTED = [
    Listed(name="digits", state="done", trials=64, iterations=388, jct_s=53.0, best="accuracy=0.991667 (trial 0)"),
    Listed(
        name="a-rather-long-name-of-an-experiment",
        state="failed",
        trials=12,
        iterations=4012,
        jct_s=4000.0,
        cost_usd=1234.5,
        reason=f"trial 3 failed 4 times: {PATH} has no file of that name; look into it, and resume it",
        tags=("vision", "march"),
    ),
]


@pytest.mark.usefixtures("listed")
def test_a_list_is_no_wider_than_the_terminal_and_whole_with_wide(width: int) -> None:
    with on_screen() as screen:
        ps()
    assert max(len(line.rstrip()) for line in screen.lines) <= width
    assert {"digits", "1,234.50", "1h6m40s", "4012", "march"} <= screen.words
    assert "…" in screen.getvalue()
    with on_screen() as screen:
        ps(wide=True)
    assert LISTED[1].reason in screen.getvalue()


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(commands, "_all_listed", lambda *_, **__: LISTED)
