"""A trial's batches over time and progress: they follow each other up to the report that tells of them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.executor import TrialReport
from rubberband.executor.result.batch_history import batch_history
from rubberband.values.adaptive import BatchUse


def a_use(
    batch_size: int = 64,
    duration_s: float = 4.0,
    steps: int = 10,
    step_s: float = 0.4,
    noise_scale: float | None = 100.0,
    efficiency: float = 1.0,
) -> BatchUse:
    return BatchUse(
        instances=1,
        gpus=2,
        batch_size=batch_size,
        per_gpu=batch_size // 2,
        accumulation=0,
        steps=steps,
        duration_s=duration_s,
        step_s=step_s,
        noise_scale=noise_scale,
        efficiency=efficiency,
    )


def a_report(reported_at: float, iterations: int, *batches: BatchUse) -> TrialReport:
    return TrialReport(reported_at=reported_at, iterations=iterations, metrics={}, stage=0, batches=batches)


def test_stretches_follow_each_other_up_to_the_report() -> None:
    history = batch_history([a_report(120.0, 1, a_use(duration_s=6.0), a_use(128, duration_s=4.0))], 100.0)
    assert [(s.start_s, s.end_s) for s in history] == [(10.0, 16.0), (16.0, 20.0)]
    assert [s.batch_size for s in history] == [64, 128]


def test_progress_counts_samples_by_their_efficiency() -> None:
    stretches = (a_use(64, steps=10), a_use(256, steps=10, efficiency=0.75))
    history = batch_history([a_report(10.0, 1, a_use()), a_report(20.0, 2, *stretches)], 0.0)
    assert [s.progress for s in history] == [1.0, pytest.approx(1.25), 2.0]


def test_goodput_is_throughput_times_efficiency() -> None:
    (stretch,) = batch_history([a_report(10.0, 1, a_use(128, step_s=0.5, efficiency=0.5))], 0.0)
    assert (stretch.throughput, stretch.goodput) == (256.0, 128.0)


def test_steps_too_quick_to_be_timed_have_no_throughput() -> None:
    (stretch,) = batch_history([a_report(10.0, 1, a_use(step_s=0.0, duration_s=0.0))], 0.0)
    assert (stretch.throughput, stretch.goodput) == (None, None)


def test_a_stretch_does_not_begin_before_the_report_that_went_before() -> None:
    reports = [a_report(10.0, 1, a_use(duration_s=30.0)), a_report(12.0, 2, a_use(duration_s=3.0))]
    assert [(s.start_s, s.end_s) for s in batch_history(reports, 0.0)] == [(0.0, 10.0), (10.0, 12.0)]


def test_a_fixed_batch_has_no_history() -> None:
    assert batch_history([a_report(10.0, 1), a_report(20.0, 2)], 0.0) == ()


USES = st.builds(
    a_use,
    batch_size=st.integers(2, 4096),
    duration_s=st.floats(0.0, 50.0),
    steps=st.integers(0, 100),
    efficiency=st.floats(0.01, 1.0),
)


@given(st.lists(st.tuples(st.floats(0.1, 60.0), st.lists(USES, max_size=4)), max_size=5))
def test_history_never_goes_backwards(lines: list[tuple[float, list[BatchUse]]]) -> None:
    reports, at = [], 5.0
    for iterations, (took_s, uses) in enumerate(lines, start=1):
        at += took_s
        reports.append(a_report(at, iterations, *uses))
    history = batch_history(reports, 5.0)
    assert len(history) == sum(len(uses) for _, uses in lines)
    assert all(0.0 <= s.start_s <= s.end_s <= at - 5.0 + 1e-6 for s in history)
    assert all(a.end_s <= b.start_s + 1e-6 and a.progress <= b.progress for a, b in pairwise(history))
