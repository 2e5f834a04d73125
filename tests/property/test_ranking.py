"""The order of trials: total, the same for any order in which they come, and as ever without limits."""

from __future__ import annotations

import math
from itertools import pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from rubberband.executor import rank
from rubberband.executor.core.trial_state import TrialReport, TrialState
from rubberband.values.ranking import Limit, Ranking

VALUES = st.floats(-5, 5) | st.sampled_from([0.0, 1.0, math.nan, math.inf])
METRICS = st.fixed_dictionaries({}, optional={"score": VALUES, "latency": VALUES, "size": VALUES})
LIMITS = st.lists(
    st.builds(Limit, metric=st.just("latency"), at_most=st.floats(-2, 2))
    | st.builds(Limit, metric=st.just("size"), at_least=st.floats(-2, 2)),
    max_size=2,
).map(tuple)


@st.composite
def rankings(draw: st.DrawFn) -> Ranking:
    return Ranking(metric="score", mode=draw(st.sampled_from(["min", "max"])), limits=draw(LIMITS))


def trials_of(reports: list[dict[str, float]]) -> list[TrialState]:
    return [
        TrialState(trial=at, reports=[TrialReport(reported_at=0.0, iterations=1, metrics=metrics, stage=0)])
        for at, metrics in enumerate(reports)
    ]


@given(rankings(), st.lists(METRICS, max_size=12), st.integers(0, 10**6))
def test_the_order_is_total_and_does_not_depend_on_the_order_before(
    ranking: Ranking, reports: list[dict[str, float]], seed: int
) -> None:
    trials = trials_of(reports)
    order = rank(trials, ranking)
    assert sorted(order) == list(range(len(trials)))
    Random(seed).shuffle(trials)
    assert rank(trials, ranking) == order
    for one, other in pairwise(order):
        assert ranking.merit(reports[one]) <= ranking.merit(reports[other])
        assert rank([trials_of(reports)[at] for at in (other, one)], ranking) == (one, other)


@given(rankings(), st.lists(METRICS, max_size=12))
def test_feasible_results_come_first(ranking: Ranking, reports: list[dict[str, float]]) -> None:
    order = rank(trials_of(reports), ranking)
    scored = [at for at in order if math.isfinite(reports[at].get("score", math.nan))]
    kept = [ranking.standing(reports[at], [reports[at]]).feasible is not False for at in scored]
    assert kept == sorted(kept, reverse=True)
    assert list(order[: len(scored)]) == scored


@given(st.sampled_from(["min", "max"]), st.lists(METRICS, max_size=12))
def test_without_limits_the_metric_alone_decides(mode: str, reports: list[dict[str, float]]) -> None:
    def before(at: int) -> tuple[bool, float, int]:
        value = reports[at].get("score")
        if value is None or not math.isfinite(value):
            return True, 0.0, at
        return False, -value if mode == "max" else value, at

    ranking = Ranking(metric="score", mode="max" if mode == "max" else "min")
    assert rank(trials_of(reports), ranking) == tuple(sorted(range(len(reports)), key=before))
