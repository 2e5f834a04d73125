"""What a trial prints: the beginning and the end of it are kept, whoever prints, and whatever ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rubberband
from rubberband.executor import Entrypoint, LogPump, SlotWorker, TrialLog, open_store
from rubberband.executor.logs.pages import page
from rubberband.executor.logs.trial_log import Appender, left_out_line, printed_bytes, read
from rubberband.values.environment import Environment
from tests.builders.segments import SEGMENT

LIMIT_BYTES = 800


def add(path: Path, *contents: bytes, limit_bytes: int = LIMIT_BYTES) -> None:
    """Write to a log as a worker does that then ends."""
    with closing(Appender(TrialLog(path=path, limit_bytes=limit_bytes))) as log:
        for content in contents:
            log.write(content)


def on_disk(path: Path) -> int:
    """Bytes that all files of a log hold."""
    return sum(file.stat().st_size for file in path.parent.rglob("*") if file.is_file())


def numbered(count: int, first: int = 0) -> bytes:
    """Lines of ten bytes."""
    return b"".join(b"line %04d\n" % number for number in range(first, first + count))


def follow(path: Path, cursor: str | None, *, is_whole: bool = False) -> tuple[list[str], str]:
    """The next lines, as readers get them."""
    lines, cursor = page({0: path}, (), cursor=cursor, limit=1000, is_whole=is_whole)
    return [line.text for line in lines], cursor


@given(st.lists(st.binary(max_size=700), max_size=20), st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_never_more_than_the_limit_lies_on_disk_and_both_ends_are_kept(
    tmp_path_factory: pytest.TempPathFactory, contents: list[bytes], num_writers: int
) -> None:
    path = tmp_path_factory.mktemp("logs") / "trial-000.log"
    writers = [Appender(TrialLog(path=path, limit_bytes=LIMIT_BYTES)) for _ in range(num_writers)]
    printed = b""
    for turn, content in enumerate(contents):
        writers[turn % num_writers].write(content)
        printed += content
        assert on_disk(path) <= LIMIT_BYTES
    for writer in writers:
        writer.close()
    assert printed_bytes(path) == len(printed)
    begin = read(path, 0, LIMIT_BYTES)
    assert begin.content == printed[: len(begin.content)]
    assert begin.is_cut is (len(begin.content) < len(printed))
    end = read(path, len(begin.content), LIMIT_BYTES)
    assert end.content == printed[end.begin :]
    assert len(begin.content) + len(end.content) >= min(len(printed), LIMIT_BYTES - LIMIT_BYTES // 8)


def test_one_line_between_the_beginning_and_the_end_says_how_much_was_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trial-000.log"
    add(path, numbered(500))
    lines, _ = follow(path, None, is_whole=True)
    (gap,) = [index for index, line in enumerate(lines) if "left out" in line]
    kept = numbered(500).decode().splitlines()
    assert lines[:gap] == kept[:gap]
    assert lines[gap + 1 :] == kept[-len(lines) + gap + 1 :]
    assert lines[gap] == left_out_line((500 - (len(lines) - 1)) * 10)


def test_a_follower_sees_every_line_once_even_of_a_cut_log(tmp_path: Path) -> None:
    path, cursor, seen = tmp_path / "trial-000.log", None, list[str]()
    for turn in range(100):
        add(path, numbered(5, 5 * turn))  # each time a trial that is tried again
        lines, cursor = follow(path, cursor)
        seen += lines
    assert seen == numbered(500).decode().splitlines()


def test_a_slow_follower_gets_a_note_on_the_lines_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trial-000.log"
    add(path, numbered(60))
    _, cursor = follow(path, None)
    add(path, numbered(440, 60))
    lines, cursor = follow(path, cursor)
    assert lines[0] == left_out_line((440 - (len(lines) - 1)) * 10)
    assert lines[-1] == "line 0499"
    assert follow(path, cursor)[0] == []


def test_a_log_that_was_written_without_a_limit_gets_one(tmp_path: Path) -> None:
    path = tmp_path / "trial-000.log"
    path.write_bytes(numbered(500))
    add(path, b"more\n")
    assert on_disk(path) <= LIMIT_BYTES
    assert follow(path, None)[0][-2:] == [left_out_line(5000 - 400), "more"]
    add(path, numbered(500), limit_bytes=16_000)
    assert follow(path, None)[0][-1] == "line 0499"


CHATTER = """
import os, signal, subprocess, sys
from pathlib import Path
from rubberband.executor.ray.slot_worker import LogPump
from rubberband.executor.logs.trial_log import TrialLog

with LogPump().redirected(TrialLog(path=Path(sys.argv[1]), limit_bytes=800_000)):
    print("first")
    for _ in range(3):
        subprocess.run([sys.executable, "-c", "print('child ' * 500_000)"])
    os.write(1, b"from C\\n" * 100_000)
    print("last words", end="")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_last_words_of_a_process_that_is_killed_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "trial-000.log"
    killed = subprocess.run([sys.executable, "-c", CHATTER, str(path)], env={"PYTHONPATH": str(Path.cwd())})
    assert killed.returncode == -signal.SIGKILL
    # Its own pipe is read to the end by a process that outlives it.
    total = len("first\n") + 3 * (6 * 500_000 + 1) + 7 * 100_000 + len("last words")
    while printed_bytes(path) < total:
        os.sched_yield()
    assert read(path, 0, 6).content == b"first\n"
    assert read(path, total - 10, 100).content == b"last words"
    assert on_disk(path) <= 800_000


def test_output_is_in_the_log_of_its_trial_at_once(tmp_path: Path) -> None:
    with closing(LogPump()) as pump:
        for trial in range(3):
            path = tmp_path / f"trial-{trial:03d}.log"
            with pump.redirected(TrialLog(path=path, limit_bytes=800_000)) as drain:
                print(f"hello from {trial}")
                drain()
                assert path.read_text() == f"hello from {trial}\n"
                subprocess.run(["echo", "and its child"], check=True)
            assert path.read_text() == f"hello from {trial}\nand its child\n"


def refused(config: dict[str, Any]) -> None:
    rubberband.report({f"refused for {os.environ['HF_TOKEN']}": 1.0})


def test_the_failure_that_a_worker_sends_has_no_secret(tmp_path: Path) -> None:
    environment = Environment(secrets={"HF_TOKEN": "hf_aVery$ecret/token"})
    entrypoint = replace(Entrypoint.from_object(refused), environment=environment)
    with environment.within():
        worker = SlotWorker(entrypoint, open_store(str(tmp_path)))
        *_, failure = worker.run(SEGMENT, None)
    assert "the trial reported 'refused for ***'" in failure.message
    assert "hf_aVery" not in failure.details


def test_a_log_that_cannot_be_written_blocks_nothing(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("no folder")
    with closing(LogPump()) as pump:
        with pump.redirected(TrialLog(path=tmp_path / "logs" / "trial-000.log", limit_bytes=800_000)):
            print("x" * 3_000_000)
        with pump.redirected(TrialLog(path=tmp_path / "trial-001.log", limit_bytes=800_000)):
            print("well")
    assert (tmp_path / "trial-001.log").read_text() == "well\n"
