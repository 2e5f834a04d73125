"""What a person sees on a real terminal: the story of a run, how it goes on after Ctrl-C, and the question of init."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from rubberband.states import REHEARSAL
from tests.builders.command_line import CommandLine
from tests.builders.journalled_runs import recorded, words
from tests.builders.terminal import CTRL_C, on_terminal

VIRTUAL = ("-s", "resources.provider=virtual", "-s", "resources.instance_type=c7i.2xlarge")
BEST = r"best +(?:score|accuracy)=[\d.]+ \(trial \d+\) *\n"
TIME = r"time +\S+, deadline \S+; ends \d\d:\d\d \(in \S+\), \S+ to spare; planned \S+ *\n"
REHEARSED = TIME.replace(r"\d\d:\d\d \(in \S+\)", r"in \S+")
"""A virtual clock has no time of day."""
COST = r"cost +[\d.]+ (?:of [\d.]+ )?USD[^;\n]*; forecast [\d.]+; planned [\d.]+"


def test_a_status_that_is_watched_shows_the_story_below_the_best_the_end_and_the_cost(tmp_path: Path) -> None:
    run = recorded(words(name="found"))
    half = len(run.events) // 2
    folder = run.put(tmp_path, half)
    environment = {**os.environ, "RUBBERBAND_HOME": str(tmp_path)}
    with (
        folder.driving(),
        on_terminal("status", "found", "--watch", folder=tmp_path, environment=environment) as terminal,
    ):
        terminal.until(rf"found: runs, stage 1 \(2 of 4\)\n{BEST}{REHEARSED}{COST}[^\n]*\nprogress ")
        terminal.until(r"Decisions\n[^\n]*\n +2m37s  SYNC of stage 0 +9 of 27 trials promoted: ")
        run.grow(folder, half, len(run.events))
        terminal.until(rf"found: done\n{BEST}time +19m43s, deadline 25m, 5m17s to spare")
        assert terminal.end() == 0
    assert re.search(r" 19m43s +SYNC of stage 3 ", terminal.shown[-600:]), terminal.shown[-600:]


def test_a_run_shows_the_same_story_as_it_goes(tmp_path: Path) -> None:
    command_line = CommandLine(tmp_path)
    with on_terminal("run", "sleepy.yaml", *VIRTUAL, folder=tmp_path, environment=command_line.environment) as terminal:
        assert terminal.end() == 0, terminal.shown
    assert not re.search(r"ends \d\d:\d\d", terminal.shown), "a virtual clock has no time of day"
    terminal.until(r"SYNC 0: promoted 2 of 4 .*; spent 0\.0440 USD *\n")
    terminal.until(r"plan unchanged: 9m50s to spare; forecast 10s, 0\.0850 USD")
    terminal.until(r"time +10s, deadline 10m; planned 10s *\ncost +0\.0850 USD; planned 0\.0850")
    assert "best" not in terminal.shown
    assert REHEARSAL in terminal.shown


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(420)
def test_ctrl_c_on_a_run_that_another_terminal_watches_names_how_it_goes_on(tmp_path: Path) -> None:
    command_line = CommandLine(tmp_path)
    command_line.hold(after=4)
    environment = command_line.environment
    with on_terminal("run", "sleepy.yaml", "--no-check", folder=tmp_path, environment=environment) as run:
        run.until(rf"{BEST}{TIME}{COST}")
        with on_terminal("status", "sleepy", "--watch", folder=tmp_path, environment=environment) as watch:
            watch.until(rf"sleepy: runs, stage \d \(\d of 2\)\n{BEST}{TIME}{COST}")
            run.type(CTRL_C)
            assert run.end() == 130, run.shown
            assert watch.end() == 130, watch.shown
    assert "`rubberband resume sleepy` continues it" in run.shown
    assert "sleepy: cancelled" in watch.shown
    assert command_line.nothing_left()


PRINTS = """
import argparse, time
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()
for epoch in range(1, 100):
    time.sleep(0.05)
    print(f"epoch {epoch} val_loss={1 / epoch} val_acc={1 - args.lr / epoch}", flush=True)
"""


def test_init_asks_once_which_metric_ranks_and_folds_the_lines_of_the_program(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PRINTS)
    binaries = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "RUBBERBAND_HOME": str(tmp_path / "home"), "PATH": binaries}
    words = ("init", "train.py", "--no-check")
    with on_terminal(*words, folder=tmp_path, environment=environment) as terminal:
        terminal.until(r"looking at python train.py\n  epoch \d")
        terminal.until(
            r"1  val_acc \(more is better\).*\n  2  val_loss \(less is better\)  epoch \d+ .*\nmetric \[1\]: "
        )
        assert terminal.interrupt() == 130, terminal.shown
    assert not (tmp_path / "train.yaml").exists()
    with on_terminal(*words, folder=tmp_path, environment=environment) as terminal:
        terminal.until(r"metric \[1\]: ")
        terminal.type(b"7\n2\n")
        assert terminal.end() == 0, terminal.shown
    assert "7 is not among the choices; give a number from 1 to 2" in terminal.shown
    assert "  metric: val_loss\n  mode: min\n" in (tmp_path / "train.yaml").read_text()
    assert len(re.split(r"wrote train.yaml\n", terminal.shown)[1].splitlines()) == 7, "a note and six lines"
