"""Limits of further metrics: feasible trials rank before infeasible ones, everywhere."""

from __future__ import annotations

import dataclasses
import math
from contextlib import closing
from pathlib import Path
from statistics import median

import pytest

from rubberband.errors import InputError
from rubberband.executor import best_trial, open_folder, rank
from rubberband.executor.core.state import State
from rubberband.executor.core.trial_state import TrialReport, TrialState
from rubberband.executor.result.result import Objective, Result
from rubberband.executor.result.rows import trial_rows
from rubberband.executor.result.summary import summarise
from rubberband.executor.run.follower import JournalFollower
from rubberband.executor.sampling import known_results, propose
from rubberband.running.run import load_result, run_experiment
from rubberband.spec.experiment import Experiment
from rubberband.spec.search import Search
from rubberband.values.plan import Plan
from rubberband.values.ranking import Limit, Ranking
from rubberband.values.stopping import StopRules
from rubberband.views.formatting import best_card, ranked
from rubberband.views.report.headlines import best_lines, headlines
from rubberband.views.report.text import tables
from rubberband.views.trial import lead
from tests.builders.experiment_words import words
from tests.builders.jobs import JOB
from tests.builders.stories import begun

LIMITED = (Limit(metric="latency", at_most=20.0),)
RANKING = Ranking(metric="score", mode="max", limits=LIMITED)


def trial(number: int, **metrics: float) -> TrialState:
    report = TrialReport(reported_at=0.0, iterations=1, metrics=metrics, stage=0)
    return TrialState(trial=number, reports=[report] if metrics else [])


def test_feasible_trials_come_first_then_those_that_break_the_limits_least() -> None:
    trials = [
        trial(0, score=0.9, latency=30.0),
        trial(1, score=0.1, latency=20.0),
        trial(2, score=0.2, latency=1.0),
        trial(3, score=0.8, latency=22.0),
        trial(4, score=0.99),
        trial(5, score=0.95, latency=22.0),
        trial(6, latency=1.0),
        trial(7),
        trial(8, score=0.5, latency=math.nan),
    ]
    assert rank(trials, RANKING) == (2, 1, 5, 3, 0, 4, 8, 6, 7)


def test_limits_of_several_metrics_are_shares_that_add_up() -> None:
    limits = (Limit(metric="ms", at_most=20.0), Limit(metric="recall", at_least=0.5), Limit(metric="zero", at_most=0.0))
    ranking = Ranking(metric="score", mode="max", limits=limits)
    assert ranking.violations({"ms": 25.0, "recall": 0.4, "zero": 2.0}) == (0.25, pytest.approx(0.2), 2.0)
    assert (
        ranking.standing({"ms": 25.0, "recall": 0.5, "zero": 0.0}, [{"ms": 25.0, "recall": 0.5, "zero": 0.0}]).feasible
        is False
    )
    assert (
        ranking.standing(
            {"ms": 20.0, "recall": 0.5, "zero": -1.0}, [{"ms": 20.0, "recall": 0.5, "zero": -1.0}]
        ).feasible
        is True
    )
    assert ranking.standing({}, [{}]).feasible is None


@pytest.mark.parametrize(
    ("also", "mode"),
    [({"at_most": 20}, "min"), ({"at_least": 0.5}, "max"), ({"at_least": 1, "at_most": 2, "mode": "min"}, "min")],
)
def test_the_mode_follows_from_one_limit(also: dict[str, float], mode: str) -> None:
    experiment = Experiment(**words(search__also=[{"metric": "latency", **also}]))
    assert experiment.search.also[0].mode == mode
    assert len(experiment.search.limits) == 1
    assert Experiment(**experiment.to_words()) == experiment


@pytest.mark.parametrize(
    ("also", "why"),
    [
        ({"at_most": "20ms"}, "search.also.0.at_most"),
        ({"at_most": math.inf}, "search.also.0.at_most"),
        ({"at_most": 1, "at_least": 2, "mode": "min"}, "search.also.0.at_least: is more than at_most=1"),
        ({"at_most": 1, "at_least": 0}, "search.also.0.mode: is required"),
    ],
)
def test_wrong_limits_are_refused_in_a_line(also: dict[str, object], why: str) -> None:
    with pytest.raises(InputError, match=why) as refused:
        Experiment(**words(search__also=[{"metric": "latency", **also}]))
    assert "\n" not in str(refused.value)


def test_results_known_beforehand_do_not_go_with_limits() -> None:
    with pytest.raises(InputError, match=r"evaluated_rewards say nothing of latency, which has a limit"):
        Experiment(
            **words(
                search__also=[{"metric": "latency", "at_most": 20}],
                search__sampler={"type": "optuna"},
                search__points_to_evaluate=[{"lr": 0.01}],
                search__evaluated_rewards=[0.5],
                search__space={"lr": {"type": "uniform", "lower": 0.001, "upper": 0.1}},
            )
        )


def test_sync_promotes_the_feasible_and_the_winner_is_one() -> None:
    story = begun(dataclasses.replace(JOB, limits=LIMITED))
    names = [one.trial for one in story.state.trials]
    for number in names:
        story.report(number, 0.1 * number, latency=10.0 if number == 1 else 30.0)
    stage = story.state.stages[0]
    assert stage.ranking[0] == 1
    best = best_trial(story.state)
    assert best is not None
    assert best.trial == 1


@pytest.mark.usefixtures("trained_runs")
def test_a_search_on_the_virtual_clock_keeps_its_limit(tmp_path: Path) -> None:
    resources = {"provider": "virtual", "instance_type": "p3.2xlarge", "max_instances": 2}
    also = [{"metric": "latency", "at_most": 20}]
    experiment = Experiment(**words(entrypoint=None, search__also=also, resources=resources))
    run_experiment(experiment, open_folder(experiment.name, tmp_path))
    result = load_result(experiment.name, home=tmp_path)
    assert result.also == (Objective(metric="latency", mode="min", at_most=20.0),)
    broken = {one.trial for one in result.trials if one.feasible is False}
    assert broken == {one.trial for one in result.trials if one.trial % 4 == 3}
    assert result.best is not None
    assert result.best.feasible is True
    assert result.infeasible == ""
    assert not {one.trial for one in result.pareto} & broken
    order = [one.trial in broken for one in ranked(result)]
    assert order == sorted(order)
    assert any("latency (min, at most 20)" in table.title for table in tables(result) if table.rows)
    rows = trial_rows(result)
    assert [row["feasible"] for row in rows] == [one.feasible for one in result.trials]
    assert Result.from_json(result.to_json()) == result
    assert lead(result, result.best).split(" than ")[1] != "trial 3"
    folder = open_folder(experiment.name, tmp_path)
    with closing(JournalFollower(folder)) as follower:
        list(follower.each())
        assert follower.summary().best_note == ""


def test_a_run_without_a_feasible_trial_says_so() -> None:
    job = dataclasses.replace(JOB, limits=LIMITED, stages=JOB.stages[:1], plan=Plan(stages=JOB.plan.stages[:1]))
    story = begun(job)
    for one in list(story.state.trials):
        story.report(one.trial, 0.1 * one.trial, latency=30.0)
    setup = {
        "configurations": (),
        "experiment": {"search": {"also": [{"metric": "latency", "mode": "min", "at_most": 20.0}]}},
    }
    result = summarise(story.state, setup, story.at)
    assert result.best is not None
    assert result.best.feasible is False
    line = "the best trial is not feasible (latency=30; limits: latency at most 20); no trial is"
    assert result.infeasible == line
    assert line in headlines(result)
    assert line in best_lines(result)
    assert "not feasible" in best_lines(result)[0]
    assert line in str(result)
    assert result.pareto == ()
    assert "not feasible" in best_card(result).notes[0]


@pytest.mark.parametrize("algorithm", ["tpe", "nsgaii", "cmaes"])
def test_samplers_learn_which_results_are_feasible(algorithm: str) -> None:
    search = Search.model_validate(
        {
            "space": {"x": {"type": "uniform", "lower": 0, "upper": 1}},
            "scheduler": {"type": "asha", "num_samples": 64, "max_t": 4},
            "sampler": {"type": "optuna", "sampler": algorithm, "seed": 3},
            "metric": "score",
            "mode": "max",
            "also": [{"metric": "latency", "at_most": 20}],
        }
    )
    drawn = {number: {"x": (number + 0.5) / 30} for number in range(30)}
    state = State.of(dataclasses.replace(JOB, stages=(dataclasses.replace(JOB.stages[0], trials=30), *JOB.stages[1:])))
    for number, configuration in drawn.items():  # the higher x, the better, and feasible up to a half
        x = configuration["x"]
        metrics = {"score": x, "latency": 10.0 if x < 0.5 else 40.0 * x}
        state.trials[number].reports.append(TrialReport(reported_at=0.0, iterations=1, metrics=metrics, stage=0))
    _, known = known_results(search, state, drawn, enough=10)
    assert [any(entry.violations) for entry in known] == [row["x"] >= 0.5 for row in drawn.values()]
    proposed = [one["x"] for one in propose(search, known, 30, 12)]
    assert len(proposed) == 12
    if algorithm != "nsgaii":  # whose children are not near the best
        assert median(proposed) < 0.6


def test_an_infeasible_result_does_not_reach_the_target() -> None:
    job = dataclasses.replace(JOB, limits=LIMITED, stop=StopRules(target=0.8))
    story = begun(job)
    story.report(0, 0.9, latency=30.0)
    assert story.state.outcome is None
    story.report(1, 0.85, latency=10.0)
    assert story.state.ended_by is not None
    assert story.state.ended_by.trial == 1
