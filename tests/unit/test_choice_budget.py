"""What choosing the batch may cost, and the time that is the trial's own."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.executor import own_time
from rubberband.executor.training import own_time as own_times
from rubberband.executor.training.goodput.agent import CHOICE_SHARE, ChoiceBudget


@given(
    step_s=st.floats(1e-4, 10.0),
    look_s=st.floats(1e-4, 0.1),
    extra_s=st.floats(1e-5, 1.0),
    steps=st.integers(1, 50_000),
    least=st.integers(1, 50),
)
def test_looks_take_two_shares_of_the_time_at_most_beside_the_first(step_s, look_s, extra_s, steps, least):
    budget, done = ChoiceBudget(), 0
    while done < steps:
        remaining_s = (steps - done) * step_s
        interval = least if not done else budget.interval(least, step_s, remaining_s)
        extra = budget.affordable(extra_s, interval, step_s, remaining_s) if done else 0.0
        budget.trained_s += interval * step_s
        budget.spent_s += int(extra) * extra_s
        budget.spend(look_s)
        done += interval
    assert budget.spent_s <= 2.0 * CHOICE_SHARE * max(done, steps) * step_s + 2.0 * look_s


def test_looks_come_as_often_as_asked_where_they_are_cheap():
    budget = ChoiceBudget(trained_s=100.0)
    budget.spend(0.001)
    assert budget.interval(20, 0.1, 1000.0) == 20


def test_the_time_in_the_queue_of_a_cpu_is_not_the_thread_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued = tmp_path / "schedstat"
    monkeypatch.setattr(own_times, "_QUEUED", str(queued))
    monkeypatch.setattr(time, "perf_counter", lambda: 10.0)
    assert own_time() == 10.0, "a system that does not count it"
    queued.write_text("5000000000 2500000000 7\n")
    assert own_time() == 7.5


def test_a_thread_that_loses_its_cpu_while_it_reads_its_own_time_reads_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued, instants = tmp_path / "schedstat", iter([10.0, 13.0, 13.0, 13.0])
    queued.write_text("5000000000 2500000000 7\n")

    def now() -> float:
        instant = next(instants)
        if instant == 13.0:
            queued.write_text("5000000000 5500000000 8\n")
        return instant

    monkeypatch.setattr(own_times, "_QUEUED", str(queued))
    monkeypatch.setattr(time, "perf_counter", now)
    assert own_time() == 7.5
