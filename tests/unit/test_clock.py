"""One clock for driver, instances and onlookers, whatever becomes of the machine's."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from rubberband.cloud import clock as clocks
from rubberband.cloud.clock import experiment_clock, time_of
from rubberband.cloud.ray_head import instance
from rubberband.cloud.ray_head.instance import STARTED, Record, load, release_marker, save
from rubberband.executor import JournalFollower
from rubberband.executor import read_journal as read
from rubberband.executor.run import follower as follower_module
from tests.builders.journalled_runs import recorded
from tests.builders.waiting import eventually

HALF_AN_HOUR_S = 1800.0


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="Linux has a clock that counts suspended time")
def test_the_clock_goes_on_while_the_machine_sleeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances that are rented are paid meanwhile."""
    slept_s, really = 0.0, time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda id: really(id) + (slept_s if id == time.CLOCK_BOOTTIME else 0.0))
    clock = experiment_clock(tmp_path)
    before = clock()
    slept_s = HALF_AN_HOUR_S
    assert clock() - before >= HALF_AN_HOUR_S


def step(monkeypatch: pytest.MonkeyPatch, by_s: float) -> None:
    """Set the machine's clock."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + by_s)


@pytest.mark.parametrize("by_s", [HALF_AN_HOUR_S, -HALF_AN_HOUR_S])
def test_a_step_of_the_clock_moves_neither_the_driver_s_nor_the_next_one_s_nor_an_onlooker_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_s: float
) -> None:
    clock = experiment_clock(tmp_path)
    before = clock()
    step(monkeypatch, by_s)
    seen = [before, clock(), experiment_clock(tmp_path)(), time_of(tmp_path), clock()]
    assert seen == sorted(seen)
    assert seen[-1] < before + HALF_AN_HOUR_S / 2


def test_a_driver_after_a_reboot_continues_after_the_last_that_was_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last_event_at = experiment_clock(tmp_path)()
    monkeypatch.setattr(clocks, "_boot", lambda: "another")
    step(monkeypatch, -HALF_AN_HOUR_S)
    assert time_of(tmp_path) < last_event_at, "a clock of another boot, or machine, tells nothing"
    assert experiment_clock(tmp_path, not_before=last_event_at)() >= last_event_at
    assert time_of(tmp_path) >= last_event_at


@pytest.mark.parametrize("by_s", [HALF_AN_HOUR_S, -HALF_AN_HOUR_S])
def test_an_instance_counts_its_lease_and_its_time_by_that_clock(tmp_path: Path, by_s: float) -> None:
    clock = experiment_clock(tmp_path)
    path, lease = tmp_path / "i-001.json", tmp_path / "lease"
    lease.touch()
    os.utime(lease, (clock() + 600.0, clock() + 600.0))
    record = Record(
        name="i-001",
        experiment="steps",
        directory=str(tmp_path),
        command=("sh", "-c", f"echo {STARTED}; exec sleep 1000"),
        temp_dir=str(tmp_path / "ray"),
        devices=(),
        address="",
        requested_at=clock(),
    )
    save(path, record, clock())
    facts = [str(path), str(lease), "600", repr(clock.booted_at), str(tmp_path)]
    with subprocess.Popen([sys.executable, "-c", _stepped(by_s), *facts]) as guard:
        eventually(lambda: load(path).running_at is not None or guard.poll() is not None, "a lease that runs")
        assert guard.poll() is None
        release_marker(path).write_text("")
    found = load(path)
    assert found.reason == ""
    assert found.ended_at is not None
    assert found.running_at is not None
    assert record.requested_at <= found.running_at <= found.ended_at <= clock()
    assert path.stat().st_mtime == pytest.approx(found.ended_at)


@pytest.mark.parametrize("by_s", [HALF_AN_HOUR_S, -HALF_AN_HOUR_S])
def test_a_reader_sees_no_progress_of_time_money_or_lateness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_s: float
) -> None:
    monkeypatch.setattr(follower_module, "FRESH_S", 0.0)  # no result is given twice
    run = recorded()
    offset = time.time() - run.events[-1].occurred_at
    events = [replace(event, occurred_at=event.occurred_at + offset) for event in run.events]
    run = replace(run, events=events[:1], setup={**run.setup, "provider": "local"})
    folder = run.put(tmp_path)
    folder.instances.mkdir()
    experiment_clock(folder.instances)
    with closing(JournalFollower(folder)) as follower:
        follower.refresh(live=True)
        before = follower.result().actual_jct_s, follower.present
        step(monkeypatch, by_s)
        follower.refresh(live=True)
        after = follower.result().actual_jct_s, follower.present
        with folder.driving():
            jct_s = read(folder).actual_jct_s
    assert all(0.0 <= late - early < HALF_AN_HOUR_S / 2 for early, late in zip(before, after, strict=True))
    assert before[0] <= jct_s < before[0] + HALF_AN_HOUR_S / 2


@pytest.mark.parametrize(("took_s", "made"), [(0.01, 2), (1.0, 1)])
def test_a_result_that_takes_long_is_not_made_anew_at_every_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, took_s: float, made: int
) -> None:
    run, seconds, count = recorded(), itertools.count(step=took_s), itertools.count()
    monkeypatch.setattr(follower_module.time, "perf_counter", lambda: next(seconds))
    monkeypatch.setattr(follower_module, "summarise", lambda *_: next(count))
    with closing(JournalFollower(run.put(tmp_path, len(run.events) // 2), clock=lambda: 0.0)) as follower:
        for _ in range(2):
            follower.seq += 1
            last = follower.result()
    assert last == made - 1


def _stepped(by_s: float) -> str:
    """A guard on a machine whose clock is off by so much."""
    return (
        f"import runpy, time; real = time.time; time.time = lambda: real() + {by_s}; "
        f"runpy.run_path({instance.__file__!r}, run_name='__main__')"
    )
