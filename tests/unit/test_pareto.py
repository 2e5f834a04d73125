"""Metrics reported beside the one that ranks: the words, the trials that no other beats, and the views."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.api.dashboard.trials_table import Asked, table_page
from rubberband.errors import InputError
from rubberband.executor import Result, TrialReport, TrialStatus, best_trial, open_folder
from rubberband.executor.core.ranking import rank
from rubberband.executor.core.trial_state import TrialState
from rubberband.executor.result.result import Objective, front
from rubberband.running.run import load_result, run_experiment
from rubberband.spec.experiment import Experiment
from rubberband.values.ranking import Ranking
from rubberband.views.charts.learning import trade_off
from rubberband.views.report.headlines import headlines
from rubberband.views.report.page import render_html
from rubberband.views.report.tables import pareto
from rubberband.views.report.text import tables
from tests.builders.experiment_words import words
from tests.builders.jobs import JOB
from tests.builders.results import ATTACK, a_result
from tests.builders.stories import begun

LATENCY = Objective(metric="latency", mode="min")
SCORE = Objective(metric="score", mode="max")
VIRTUAL = {"provider": "virtual", "instance_type": "p3.2xlarge", "max_instances": 2}
VALUES = st.floats(-5, 5) | st.sampled_from([0.0, 1.0, math.nan, math.inf])


def with_latency(metric: str = "latency") -> Result:
    """Trials whose latency is worse the better they are, but for the last one, which is bad in both."""
    result = a_result()
    last = len(result.trials) - 1
    trials = tuple(
        dataclasses.replace(one, metrics={**one.metrics, metric: 100.0 if one.trial == last else one.metrics["score"]})
        for one in result.trials
    )
    best = None if result.best is None else trials[result.best.trial]
    return dataclasses.replace(result, trials=trials, best=best, also=(Objective(metric=metric, mode="min"),))


@given(st.lists(st.fixed_dictionaries({}, optional={"score": VALUES, "latency": VALUES, "size": VALUES}), max_size=12))
def test_the_front_holds_those_that_no_other_beats(every: list[dict[str, float]]) -> None:
    objectives = (SCORE, LATENCY, Objective(metric="size", mode="max"))
    found = front(list(enumerate(every)), objectives)
    whole = [at for at, one in enumerate(every) if all(math.isfinite(one.get(o.metric, math.nan)) for o in objectives)]

    def beats(one: int, other: int) -> bool:
        gains = [(every[one][o.metric] - every[other][o.metric]) * (1 if o.mode == "max" else -1) for o in objectives]
        return min(gains) >= 0 < max(gains)

    assert set(found) == {at for at in whole if not any(beats(other, at) for other in whole)}
    scores = [every[at]["score"] for at in found]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(
    ("also", "why"),
    [
        ([{"metric": "latency"}], "search.also.0.mode: is required; add it"),
        ([{"metric": "latency", "mode": "less"}], "'less' is not one of min, max"),
        ([{"metric": "", "mode": "min"}], "search.also.0.metric"),
        ([{"metric": "loss", "mode": "min"}], "search.also.0.metric: 'loss' is named twice; leave one out"),
        ([{"metric": "a", "mode": "min"}, {"metric": "a", "mode": "max"}], "search.also.1.metric: 'a' is named twice"),
        ("latency", "search.also"),
    ],
)
def test_wrong_words_are_refused_in_a_line(also: object, why: str) -> None:
    with pytest.raises(InputError, match=why) as refused:
        Experiment(**words(search__also=also))
    assert "\n" not in str(refused.value)


def test_the_words_come_back_and_are_left_out_without_any() -> None:
    experiment = Experiment(**words(search__also=[{"metric": "latency", "mode": "min"}]))
    assert experiment.to_words()["search"]["also"] == [{"metric": "latency", "mode": "min"}]
    assert Experiment(**experiment.to_words()) == experiment
    assert "also" not in Experiment(**words()).to_words()["search"]


def test_a_result_keeps_them_and_ranks_by_one() -> None:
    result = with_latency()
    assert [trial.trial for trial in result.pareto] == [
        trial.trial
        for trial in sorted(result.trials[:-1], key=lambda one: (-one.metrics["score"], one.metrics["latency"]))
    ]
    assert result.best is not None
    assert result.pareto[0].metrics["score"] == result.best.metrics["score"]
    plain = json.loads(json.dumps(result.to_json()))
    assert plain["pareto"] == [trial.trial for trial in result.pareto]
    assert Result.from_json(plain) == result
    assert a_result().pareto == ()


def test_the_views_have_a_table_and_a_chart() -> None:
    result = with_latency()
    table = pareto(result, 3)
    assert table.title == f"Best in score (max) and latency (min): {len(result.pareto)} of 12 trials"
    assert table.header == ("trial", "score", "latency", "iterations", "status", "configuration")
    assert len(table.rows) == 3
    assert "8 more trials not shown." in table.notes
    assert table.title in [one.title for one in tables(result, 3)]
    figure = trade_off(result)
    assert figure is not None
    assert [trace["name"] for trace in figure["data"]] == ["other trials", "beaten by none", "best"]
    page = render_html(result)
    assert "Trade-off between metrics" in page
    assert "best in score (max) and latency (min): trials 0, 1" in result._repr_html_()
    shown = table_page(result, Asked(sort="also:latency", down=True))
    assert [column.title for column in shown.columns][:3] == ["trial", "score", "latency"]
    assert shown.rows[0].trial == 11
    assert pareto(a_result(), None).rows == ()
    assert trade_off(a_result()) is None
    assert ATTACK not in render_html(with_latency(ATTACK))


@pytest.mark.usefixtures("trained_runs")
def test_a_metric_that_no_trial_reports_is_named(tmp_path: Path) -> None:
    experiment = Experiment(**words(search__also=[{"metric": "latency", "mode": "min"}], resources=VIRTUAL))
    run_experiment(experiment, open_folder(experiment.name, tmp_path))
    result = load_result(experiment.name, home=tmp_path)
    assert result.also == (LATENCY,)
    assert result.pareto == ()
    assert headlines(result)[-1] == "search.also: no trial has reported latency"


def reported(trial: int, value: float | None) -> TrialState:
    metrics = {} if value is None else {"score": value}
    return TrialState(trial=trial, reports=[TrialReport(reported_at=0.0, iterations=1, metrics=metrics, stage=0)])


@pytest.mark.parametrize(("mode", "order"), [("max", (5, 1, 0, 2, 3, 4)), ("min", (0, 1, 5, 2, 3, 4))])
def test_infinite_nan_and_missing_metrics_come_last_in_both_modes(mode: str, order: tuple[int, ...]) -> None:
    values = [-1.0, 0.5, math.inf, -math.inf, math.nan, 2.0]
    trials = [reported(trial, value) for trial, value in enumerate(values)]
    assert rank(trials, Ranking(metric="score", mode=mode)) == order
    assert rank([*trials, reported(6, None), TrialState(trial=7)], Ranking(metric="score", mode=mode)) == (*order, 6, 7)


def test_equal_metrics_go_by_number() -> None:
    assert rank([reported(trial, 0.5) for trial in (2, 0, 1)], Ranking(metric="score", mode="max")) == (0, 1, 2)


def test_a_failed_trial_is_not_the_best_of_what_was_cut_short() -> None:
    story = begun(dataclasses.replace(JOB, stages=(dataclasses.replace(JOB.stages[0], iterations=2), JOB.stages[1])))
    story.report(0, 0.9)
    story.report(1, 0.5)
    story.fail(0, "not_a_number")
    assert story.state.trials[0].status is TrialStatus.FAILED
    best = best_trial(story.state)
    assert best is not None
    assert best.trial == 1
