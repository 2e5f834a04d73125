"""Who goes on and who wins: only what was measured, is finite and did not fail."""

from __future__ import annotations

import dataclasses
import math

import pytest

from rubberband.executor.core.state import TrialReport, TrialState, TrialStatus
from rubberband.executor.core.trials import best_trial, rank
from tests.builders.jobs import JOB
from tests.builders.stories import begun


def reported(trial: int, value: float | None) -> TrialState:
    metrics = {} if value is None else {"score": value}
    return TrialState(trial=trial, reports=[TrialReport(reported_at=0.0, iterations=1, metrics=metrics, stage=0)])


@pytest.mark.parametrize(("mode", "order"), [("max", (5, 1, 0, 2, 3, 4)), ("min", (0, 1, 5, 2, 3, 4))])
def test_infinite_nan_and_missing_metrics_come_last_in_both_modes(mode: str, order: tuple[int, ...]) -> None:
    values = [-1.0, 0.5, math.inf, -math.inf, math.nan, 2.0]
    trials = [reported(trial, value) for trial, value in enumerate(values)]
    assert rank(trials, "score", mode) == order
    assert rank([*trials, reported(6, None), TrialState(trial=7)], "score", mode) == (*order, 6, 7)


def test_equal_metrics_go_by_number() -> None:
    assert rank([reported(trial, 0.5) for trial in (2, 0, 1)], "score", "max") == (0, 1, 2)


def test_a_failed_trial_is_not_the_best_of_what_was_cut_short() -> None:
    story = begun(dataclasses.replace(JOB, stages=(dataclasses.replace(JOB.stages[0], iterations=2), JOB.stages[1])))
    story.report(0, 0.9)
    story.report(1, 0.5)
    story.fail(0, "not_a_number")
    assert story.state.trials[0].status is TrialStatus.FAILED
    best = best_trial(story.state, "score", "max")
    assert best is not None
    assert best.trial == 1
