"""What a driver knows of an instance whose answers may be late or lost: its lease, and the last lines of its logs."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rubberband.executor import Beat, LogPart, RemoteAgent, TrialLog, connection, read_new
from rubberband.executor.logs.trial_log import Appender, left_out_line
from rubberband.executor.ray.connection import append
from tests.builders.waiting import eventually


def agent_that_asks(
    monkeypatch: pytest.MonkeyPatch, get: Callable[[bool, float], Beat], logs: Path | None
) -> RemoteAgent:
    """An agent of an instance that has joined; `get` answers its beats, given whether one is the last."""
    actor: Any = SimpleNamespace(beat=SimpleNamespace(remote=lambda _until, _taken, is_last: is_last))
    posted = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda _instance: actor))
    monkeypatch.setattr(
        connection, "ray", SimpleNamespace(remote=lambda _: posted, get=get, kill=lambda _: None), raising=True
    )
    monkeypatch.setattr(connection, "ray_nodes", lambda _label: {"a": True})
    return RemoteAgent(
        "a", until=lambda: 40.0, interval_s=0.05, logs=logs, log_limit_bytes=1000, on_notice=lambda: None
    )


@pytest.mark.parametrize("answers", [True, False])
def test_a_lease_that_may_have_been_put_off_counts_as_put_off(monkeypatch: pytest.MonkeyPatch, answers: bool) -> None:
    first = iter([True])

    def get(_is_last: bool, timeout: float) -> Beat:
        if not (answers or next(first, False)):
            raise TimeoutError("the answer was lost")
        return Beat(interruption=None, logs=())

    agent = agent_that_asks(monkeypatch, get, logs=None)
    assert agent.reaches == -math.inf
    agent.begin()
    try:
        eventually(lambda: agent.reaches == 40.0)
    finally:
        agent.dismiss()


def test_a_machine_keeps_its_first_lease_until_the_agent_has_started_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """An instant that was given before would have passed by then, and end the machine."""
    given, is_started = list[float | None](), threading.Event()

    def get(_is_last: bool, timeout: float) -> Beat:
        if not is_started.is_set():
            raise TimeoutError("it starts")
        return Beat(interruption=None, logs=())

    agent = agent_that_asks(monkeypatch, get, logs=None)
    posted = connection.ray.remote(None).options()
    beat = SimpleNamespace(remote=lambda until, _taken, _is_last: given.append(until))
    monkeypatch.setattr(posted, "remote", lambda _instance: SimpleNamespace(beat=beat))
    monkeypatch.setattr(connection.ray.remote(None), "options", lambda **_: posted)
    agent.begin()
    try:
        eventually(lambda: len(given) >= 2)
        assert set(given) == {None}
        is_started.set()
        eventually(lambda: given[-1] == 40.0)
    finally:
        agent.dismiss()


def test_a_release_takes_the_last_lines_also_after_a_beat_that_is_answered_late(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    late, asked = threading.Event(), threading.Event()

    def get(is_last: bool, timeout: float) -> Beat:
        asked.set()
        if not is_last:
            late.wait(timeout)
            return Beat(interruption=None, logs=[LogPart(name="trial-000.log", offset=0, content=b"one\n")])
        return Beat(interruption=None, logs=[LogPart(name="trial-000.log", offset=4, content=b"two\n")])

    agent = agent_that_asks(monkeypatch, get, logs=tmp_path)
    agent.begin()
    assert asked.wait(60.0)
    agent.dismiss()
    threading.Timer(0.2, late.set).start()
    agent.collect()
    assert (tmp_path / "trial-000.log").read_text() == "one\ntwo\n"


def test_every_line_is_asked_for_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The instance answers with the rest of its log, beyond what it is said that the driver has."""
    log = b"one\ntwo\n"
    agent = agent_that_asks(monkeypatch, lambda _is_last, _timeout: Beat(interruption=None, logs=()), logs=tmp_path)

    def beat(_until: float | None, taken: dict[str, int], _is_last: bool) -> Beat:
        offset = taken.get("trial-000.log", 0)
        rest = LogPart(name="trial-000.log", offset=offset, content=log[offset : offset + 4])
        return Beat(interruption=None, logs=[rest] if rest.content else [])

    actor = SimpleNamespace(beat=SimpleNamespace(remote=beat))
    monkeypatch.setattr(agent, "_actor", actor)
    monkeypatch.setattr(connection.ray, "get", lambda answer, timeout: answer)
    for _ in range(4):
        agent.collect()
    assert (tmp_path / "trial-000.log").read_bytes() == log


def test_an_agent_needs_a_resource_so_that_ray_does_not_order_it_from_a_node_that_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []
    agent = agent_that_asks(monkeypatch, lambda _is_last, _timeout: Beat(interruption=None, logs=()), logs=None)
    posted = connection.ray.remote(None)
    monkeypatch.setattr(
        connection.ray, "remote", lambda _: SimpleNamespace(options=lambda **o: asked.append(o) or posted)
    )
    monkeypatch.setattr(posted, "remote", posted.options().remote, raising=False)
    agent.collect()
    (options,) = asked
    assert any(options.get(need) for need in ("num_cpus", "num_gpus", "memory", "resources"))


def test_a_release_takes_the_lines_of_an_instance_that_no_agent_was_on_yet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def get(is_last: bool, timeout: float) -> Beat:
        return Beat(interruption=None, logs=[LogPart(name="trial-000.log", offset=0, content=b"one\n")])

    agent_that_asks(monkeypatch, get, logs=tmp_path).collect()
    assert (tmp_path / "trial-000.log").read_text() == "one\n"


def _take(there: Path, here: Path, taken: dict[str, int]) -> None:
    for part in read_new(there, taken):
        append(here, part, 1_000_000)
        taken[part.name] = part.end


@pytest.fixture
def there(tmp_path: Path) -> Path:
    folder = tmp_path / "there"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("is_another", [False, True], ids=["this driver", "the next one"])
def test_only_what_is_new_is_taken(there: Path, tmp_path: Path, is_another: bool) -> None:
    log, here, taken = there / "trial-007.log", tmp_path / "here", dict[str, int]()
    log.write_text("one\n")
    for _ in range(2):
        _take(there, here, taken)
    log.write_text("one\ntwo\n")
    _take(there, here, {} if is_another else taken)
    assert (here / "trial-007.log").read_text() == "one\ntwo\n"


def test_long_answers_come_in_parts(there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_PART_BYTES", 4)
    monkeypatch.setattr(connection, "_PARTS_BYTES", 6)
    for name in ("a.log", "b.log"):
        (there / name).write_text("0123456789")
    assert [part.content for part in read_new(there, {})] == [b"0123", b"01"]
    taken: dict[str, int] = {}
    for _ in range(6):
        _take(there, tmp_path / "here", taken)
    assert [(tmp_path / "here" / name).read_text() for name in ("a.log", "b.log")] == ["0123456789"] * 2


def test_a_log_that_was_cut_is_taken_with_a_line_that_says_so(there: Path, tmp_path: Path) -> None:
    log, here = TrialLog(path=there / "trial-000.log", limit_bytes=800), tmp_path / "here"
    with closing(Appender(log)) as appender:
        appender.write(b"x" * 2000 + b"the end")
    taken: dict[str, int] = {}
    for _ in range(3):
        _take(there, here, taken)
    assert (here / "trial-000.log").read_text() == (
        f"{'x' * 400}\n{left_out_line(2007 - 400 - 307)}\n{'x' * 300}the end"
    )


def test_the_last_that_is_taken_is_the_end(there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_PART_BYTES", 10)
    monkeypatch.setattr(connection, "_PARTS_BYTES", 14)
    for name in ("a.log", "b.log"):
        (there / name).write_text("first, and much more: the end")
    taken: dict[str, int] = {}
    _take(there, tmp_path / "here", taken)
    for part in read_new(there, taken, is_last=True):
        append(tmp_path / "here", part, 1_000_000)
    assert (tmp_path / "here" / "a.log").read_text() == f"first, and\n{left_out_line(12)}\nthe end"
    assert (tmp_path / "here" / "b.log").read_text() == f"firs\n{left_out_line(18)}\nthe end"


def test_accepted_bodies_are_capped_as_well(there: Path, tmp_path: Path) -> None:
    taken: dict[str, int] = {}
    for turn in range(30):
        (there / "trial-000.log").write_text("x" * 200 * turn)
        for part in read_new(there, taken):
            append(tmp_path / "here", part, 800)
            taken[part.name] = part.end
    assert sum(file.stat().st_size for file in (tmp_path / "here").rglob("*.log")) <= 800


def test_no_name_leads_out_of_the_folder(tmp_path: Path) -> None:
    append(tmp_path / "here", LogPart(name="../trial.log", offset=0, content=b"x"), 1_000_000)
    assert list(tmp_path.rglob("*.log")) == []
