"""Lines of a gang of several workers: each has the rank of the worker that printed it, however it prints."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from rubberband.executor import LogPump, TrialLog, read_new
from rubberband.executor.logs import pages
from rubberband.executor.logs.pages import Wanted, page, write_cursor
from rubberband.executor.logs.trial_log import LINE_BYTES, left_out_line
from rubberband.executor.ray import connection
from rubberband.executor.ray.connection import append
from tests.builders.cli_runs import CommandLine
from tests.builders.cli_runs import rubberband as rubberband
from tests.builders.journalled_runs import recorded, words

LIMIT_BYTES = 1_000_000
_PRINTER = """
import sys, time
from pathlib import Path
from rubberband.executor import LogPump, TrialLog
rank = int(sys.argv[2])
with LogPump().redirected(TrialLog(path=Path(sys.argv[1]), limit_bytes=1_000_000, rank=rank)):
    for step in range(60):
        sys.stdout.write(f"by {rank}, ")
        sys.stdout.flush()
        time.sleep(0.01)
        print(f"step {step}", flush=True)
"""


def lines_of(path: Path, wanted: Wanted = pages.ALL_LINES) -> list[tuple[int | None, str]]:
    """The wanted lines of an ended trial, as (rank, text)."""
    lines, _ = page({0: path}, (), cursor=None, limit=100_000, is_whole=True, wanted=wanted)
    return [(line.rank, line.text) for line in lines]


def printed(path: Path, *workers: tuple[int | None, Callable[[], object]], limit_bytes: int = LIMIT_BYTES) -> None:
    """Let workers print to a log one after another; None is one that is alone."""
    for rank, work in workers:
        with closing(LogPump()) as pump, pump.redirected(TrialLog(path=path, limit_bytes=limit_bytes, rank=rank)):
            work()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "trial-000.log"


def test_lines_that_two_workers_print_in_parts_at_once_stay_whole(log: Path) -> None:
    commands = [[sys.executable, "-c", _PRINTER, str(log), str(rank)] for rank in (0, 1)]
    with ExitStack() as stack:
        for worker in [stack.enter_context(subprocess.Popen(command)) for command in commands]:
            assert worker.wait(60) == 0
    for rank in (0, 1):
        expected = [(rank, f"by {rank}, step {step}") for step in range(60)]
        assert lines_of(log, Wanted(rank=rank)) == expected
    assert len(lines_of(log)) == 120


def test_a_worker_that_is_alone_has_no_rank(log: Path) -> None:
    printed(log, (None, lambda: print("rank 1 | of the user")))
    assert log.read_text() == "rank 1 | of the user\n"
    assert lines_of(log) == [(None, "rank 1 | of the user")]


def test_a_child_process_has_the_rank_of_its_worker(log: Path) -> None:
    printed(log, (1, lambda: subprocess.run("echo out; echo err >&2", shell=True, check=True)))
    assert lines_of(log) == [(1, "out"), (1, "err")]


def test_a_line_without_an_end_and_a_progress_bar_are_of_their_worker(log: Path) -> None:
    bar = "".join(f"\r{percent} %" for percent in (10, 50, 90))
    printed(
        log,
        (None, lambda: print("alone", end="")),
        (0, lambda: print(bar, end="", flush=True)),
        (1, lambda: print("\nof one")),
        (None, lambda: print("alone again")),
    )
    assert lines_of(log) == [(None, "alone"), (0, bar), (1, ""), (1, "of one"), (None, "alone again")]


def test_all_pieces_of_a_very_long_line_have_its_rank(log: Path) -> None:
    text = "0123456789" * (LINE_BYTES // 4)
    printed(log, (1, lambda: print(text, end="", flush=True)), (0, lambda: print(text)))
    found = lines_of(log)
    for rank in (1, 0):
        assert "".join(line for its_rank, line in found if its_rank == rank) == text
    assert max(len(line) for _, line in found) < LINE_BYTES


def test_output_that_looks_like_a_rank_is_of_the_worker_that_prints_it(log: Path) -> None:
    printed(log, (1, lambda: print("\x1erank 0 | not really")))
    assert lines_of(log) == [(1, "\x1erank 0 | not really")]


def test_a_line_that_was_cut_has_no_rank_and_the_note_stays_in_every_choice(log: Path) -> None:
    printed(log, (0, lambda: print("x" * 5000 + "\nthe end")), limit_bytes=800)
    begin, note, rest, end = lines_of(log)
    assert (begin[0], rest[0], end) == (0, None, (0, "the end"))
    assert note[1].startswith(left_out_line(1)[:1])
    assert lines_of(log, Wanted(rank=0)) == [begin, note, end]


def test_pages_of_one_rank_go_on_where_lines_of_others_fill_a_page(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PAGE_BYTES", 200)
    printed(log, (0, lambda: print("much\n" * 100)), (1, lambda: print("one")))
    found, cursor, following = list[str](), None, write_cursor(pages.LogPlace())
    while cursor != following:
        cursor = following
        lines, following = page({0: log}, (), cursor=cursor, limit=10, is_whole=True, wanted=Wanted(rank=1))
        found += [line.text for line in lines]
    assert found == ["one"]


def _moved(there: Sequence[Path], here: Path, taken: Mapping[Path, dict[str, int]]) -> None:
    for folder in there:
        for part in read_new(folder, taken[folder]):
            append(here, part, LIMIT_BYTES)
            taken[folder][part.name] = part.end


def test_lines_of_two_machines_do_not_come_into_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_PART_BYTES", 37)
    machines = [tmp_path / name for name in ("a", "b")]
    for rank, machine in enumerate(machines):
        printed(machine / "trial-000.log", (rank, lambda: print(*(f"step {step}" for step in range(9)), sep="\n")))
    taken = {machine: dict[str, int]() for machine in machines}
    for _ in range(20):
        _moved(machines, tmp_path / "here", taken)
    found = lines_of(tmp_path / "here" / "trial-000.log")
    for rank in (0, 1):
        assert [text for its_rank, text in found if its_rank == rank] == [f"step {step}" for step in range(9)]


def test_an_unfinished_line_of_one_machine_takes_no_line_of_another(tmp_path: Path) -> None:
    log = tmp_path / "here" / "trial-000.log"
    for name, content in (("a", b"\x1erank 0 | cut"), ("b", b"\x1erank 1 | whole\n")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / log.name).write_bytes(content)
        for part in read_new(folder, {}, is_last=True):
            append(log.parent, part, LIMIT_BYTES)
    assert lines_of(log) == [(0, "cut"), (1, "whole")]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path))
    folder = recorded(words(name="ranked")).put(tmp_path)
    printed(folder.logs / "trial-003.log", (None, lambda: print("alone")))
    for rank in (0, 1):
        printed(folder.logs / "trial-003.log", (rank, lambda: print("together")))
    return tmp_path


@pytest.mark.usefixtures("home")
def test_the_terminal_shows_ranks_and_one_of_them(rubberband: CommandLine) -> None:
    assert rubberband("logs", "ranked", "3").splitlines() == ["alone", "rank 0 | together", "rank 1 | together"]
    assert rubberband("logs", "ranked").splitlines()[-1] == "[trial 3] rank 1 | together"
    assert rubberband("logs", "ranked", "3", "--rank", "1") == "together\n"
    assert rubberband("logs", "ranked", "--rank=1") == "[trial 3] together\n"
    assert rubberband("logs", "ranked", "--rank=7") == ""


def test_the_terminal_reads_on_past_a_page_without_a_line_of_the_rank(
    home: Path, rubberband: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "PAGE_BYTES", 200)
    printed(home / "experiments" / "ranked" / "logs" / "trial-004.log", (0, lambda: print("much\n" * 100)))
    printed(home / "experiments" / "ranked" / "logs" / "trial-004.log", (1, lambda: print("one")))
    assert rubberband("logs", "ranked", "4", "--rank", "1") == "one\n"


@pytest.mark.usefixtures("home")
def test_a_rank_of_the_process_is_refused(rubberband: CommandLine) -> None:
    refusal = "rank 1: the experiment's process has no ranks"
    assert refusal in rubberband.refused("logs", "ranked", "--process", "--rank=1")
