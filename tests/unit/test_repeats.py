"""Configurations that are trained several times: ranked by their mean, promoted and stopped together."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from statistics import fmean

import pytest

from rubberband.errors import InputError
from rubberband.executor import (
    Controller,
    Event,
    TrialStatus,
    TrialStopRequested,
    VirtualBackend,
    best_trial,
    open_folder,
    rank,
    sampling,
)
from rubberband.executor.core.history import TrialCut
from rubberband.executor.core.ranking import repeats_of, standing
from rubberband.executor.core.state import State
from rubberband.executor.core.trial_state import TrialReport, TrialState
from rubberband.executor.result.result import Objective
from rubberband.executor.result.rows import trial_rows
from rubberband.running.run import load_result, run_experiment
from rubberband.spec.experiment import Experiment
from rubberband.spec.schedulers import asha, sha
from rubberband.spec.search import Search
from rubberband.values.plan import Plan, Stage
from rubberband.values.ranking import Limit, Ranking, Standing
from rubberband.views.charts.learning import trade_off
from rubberband.views.formatting import ranked
from rubberband.views.report.headlines import headlines
from rubberband.views.report.tables import pareto, trials
from tests.builders.experiment_words import words
from tests.builders.jobs import JOB
from tests.builders.plans import plan_job
from tests.builders.results import a_result
from tests.builders.stories import Story, begun
from tests.builders.virtual_runs import run_virtual
from tests.harness.chaos_stops import uneven

VIRTUAL = {"provider": "virtual", "instance_type": "p3.2xlarge", "max_instances": 2}
TWICE = dataclasses.replace(
    JOB,
    repeats=2,
    stages=(Stage(trials=4, iterations=1), Stage(trials=2, iterations=1)),
    plan=Plan(stages=JOB.plan.stages[:2]),
)


def trial(number: int, **metrics: float) -> TrialState:
    report = TrialReport(reported_at=0.0, iterations=1, metrics=metrics, stage=0)
    return TrialState(trial=number, reports=[report] if metrics else [])


def test_configurations_rank_by_the_mean_of_their_repeats() -> None:
    ranking = Ranking(metric="score", mode="max", repeats=3)
    scores = [0.9, 0.1, 0.2, 0.5, 0.6, 0.4, 0.45, 0.7, 0.2]
    every = [trial(at, score=score) for at, score in enumerate(scores)]
    assert rank(every, ranking) == (4, 3, 5, 7, 6, 8, 0, 2, 1)
    assert rank(every[1:], ranking) == (4, 3, 5, 7, 6, 8, 2, 1)  # by those that are left
    assert rank([*every[:2], trial(2), *every[3:]], ranking) == (0, 1, 2, 4, 3, 5, 7, 6, 8)


def test_a_limit_holds_for_the_mean_and_every_repeat_has_to_report_the_metric() -> None:
    ranking = Ranking(metric="score", mode="max", repeats=2, limits=(Limit(metric="ms", at_most=20.0),))
    every = [trial(0, score=0.9, ms=30.0), trial(1, score=0.9, ms=12.0), trial(2, score=0.1, ms=25.0)]
    every += [trial(3, score=0.1, ms=5.0), trial(4, score=0.99, ms=1.0), trial(5, score=0.99)]
    assert rank(every, ranking) == (3, 2, 1, 0, 4, 5)


def spread_over(story: Story, scores: list[float]) -> None:
    for number, score in enumerate(scores):
        story.report(number, score)


def test_repeats_are_promoted_together_and_the_best_of_the_best_configuration_wins() -> None:
    story = begun(TWICE)
    spread_over(story, [0.9, 0.1, 0.6, 0.7])  # trial 0 is the best alone
    assert story.state.stages[0].ranking == (3, 2, 0, 1)
    assert [one.status for one in story.state.trials[:2]] == [TrialStatus.STOPPED] * 2
    for number in (2, 3):
        story.report(number, 0.5 + 0.1 * number)
    best = best_trial(story.state)
    assert best is not None
    assert best.trial == 3
    found = standing(story.state, best)
    assert (found.repeats, found.mean, found.spread) == (2, pytest.approx(0.75), pytest.approx(0.0707, abs=1e-4))
    assert found.note == ", mean 0.75 ± 0.071 of 2 repeats"


def test_a_configuration_with_a_failed_repeat_ranks_by_the_rest() -> None:
    story = begun(dataclasses.replace(TWICE, max_failures=0))
    story.fail(0)
    for number, score in ((1, 0.9), (2, 0.5), (3, 0.6)):
        story.report(number, score)
    assert story.state.stages[0].ranking == (1, 3, 2)
    assert story.state.stages[-1].trials == (1,)
    story.report(1, 0.95)
    best = best_trial(story.state)
    assert best is not None
    assert best.trial == 1
    assert standing(story.state, best).note == ", mean 0.95 of 1 repeat"


def test_a_repeat_that_the_user_stopped_does_not_win_beside_one_that_was_trained_to_the_end() -> None:
    story = begun(TWICE)
    spread_over(story, [0.9, 0.1, 0.6, 0.7])
    story.tell(TrialStopRequested, request="s", trial=3)
    story.report(2, 0.5)
    assert story.state.outcome == "done"
    best = best_trial(story.state)
    assert best is not None
    assert best.trial == 2
    assert standing(story.state, best).note == ", mean 0.5 of 1 repeat"


def climbing(repeats: int = 2) -> Story:
    stage = asha(sha(2, 1, 2, 2), 2)
    assert stage.ladder is not None
    stage = dataclasses.replace(
        stage, trials=repeats * stage.trials, ladder=dataclasses.replace(stage.ladder, repeats=repeats)
    )
    plan = Plan(stages=(dataclasses.replace(JOB.plan.stages[0], instances=2, gpus_per_trial=1),))
    return begun(dataclasses.replace(JOB, stages=(stage,), plan=plan, replan=False, repeats=repeats))


def test_a_configuration_climbs_once_all_of_its_repeats_have_ended_the_rung() -> None:
    story = climbing()
    story.report(0, 0.9)
    assert list(story.state.lanes[0].rungs.counts()) == [0]
    story.report(2, 0.3)
    story.report(3, 0.4)
    assert list(story.state.lanes[0].rungs.counts()) == [1]
    assert [one.rung for one in story.state.trials] == [0, 0, 0, 0]
    story.report(1, 0.1)
    assert list(story.state.lanes[0].rungs.counts()) == [2]
    assert [one.rung for one in story.state.trials] == [1, 1, 0, 0]
    assert {one.trial for one in story.state.trials if one.status is TrialStatus.RUNNING} == {0, 1}


def test_a_repeat_that_fails_or_is_stopped_lets_the_others_climb() -> None:
    story = climbing()
    for number, score in ((0, 0.9), (2, 0.3), (3, 0.4)):
        story.report(number, score)
    story.fail(1)
    story.fail(1)
    assert story.state.trials[1].status is TrialStatus.FAILED
    assert [one.rung for one in story.state.trials] == [1, 0, 0, 0]


def test_the_pareto_front_and_the_line_of_limits_are_those_of_the_means() -> None:
    """Configuration 0 is the best by its first repeat alone, and beaten in both metrics by the mean."""
    found = a_result()
    also = (Objective(metric="ms", mode="min", at_most=20.0), Objective(metric="size", mode="min"))
    reports = [
        {"score": 0.9, "ms": 1.0, "size": 1.0},
        {"score": 0.1, "ms": 99.0, "size": 3.0},
        {"score": 0.6, "ms": 40.0, "size": 1.0},
        {"score": 0.8, "ms": 10.0, "size": 2.0},
    ]
    standings = [Standing(value=0.5, feasible=False), Standing(value=0.7, feasible=False)]
    trials = tuple(
        dataclasses.replace(
            found.trials[at], trial=at, status="completed", metrics=one, standing=standings[at // 2], failure=None
        )
        for at, one in enumerate(reports)
    )
    result = dataclasses.replace(found, metric="score", mode="max", repeats=2, trials=trials, best=trials[3], also=also)
    assert result.infeasible == "the best trial is not feasible (mean ms=25; limits: ms at most 20); no trial is"
    free = dataclasses.replace(
        result,
        also=(Objective(metric="ms", mode="min"), Objective(metric="size", mode="min")),
        trials=tuple(dataclasses.replace(one, standing=Standing(value=0.0)) for one in trials),
    )
    assert free.means(free.trials[0]) == {"score": 0.5, "ms": 50.0, "size": 2.0}
    assert [one.trial for one in free.pareto] == [3]
    table = pareto(free, None)
    assert table.title == "Best in score (max) and ms (min) and size (min): 1 of 2 configurations"
    assert table.rows[0][:4] == ("3", "0.7", "25", "1.5")
    assert "the means of a configuration" in table.notes[0]
    chart = trade_off(free)
    assert chart is not None
    points = sorted((x, y) for trace in chart["data"] for x, y in zip(trace["x"], trace["y"], strict=True))
    assert points == [(25.0, 0.7), (25.0, 0.7), (50.0, 0.5)]  # one is the star
    once = dataclasses.replace(result, repeats=1)
    assert once.infeasible.startswith("the best trial is not feasible (ms=10;")
    failed = dataclasses.replace(trials[2], status="failed")
    assert dataclasses.replace(free, trials=(*trials[:2], failed, trials[3])).means(failed)["ms"] == 10.0


def test_the_plan_counts_every_repeat_and_seeds_differ() -> None:
    once, thrice = (Experiment(**words(search__repeats=repeats)) for repeats in (1, 3))
    assert [3 * stage.trials for stage in once.brackets()[0]] == [stage.trials for stage in thrice.brackets()[0]]
    assert thrice.configurations()[::3] == once.configurations()
    assert thrice.configurations()[0] == thrice.configurations()[2]
    assert len({*thrice.trial_seeds()}) == 3 * len(once.trial_seeds())
    assert "repeats" not in once.to_words()["search"]
    assert Experiment(**thrice.to_words()) == thrice
    (stage,) = Experiment(**words(search__repeats=3, search__scheduler=_asha())).brackets()[0]
    assert (stage.trials, stage.rungs.repeats, stage.rungs.fewest(stage.trials)) == (27, 3, (27, 9, 3))


def _asha() -> dict[str, object]:
    return {"type": "asha", "num_samples": 9, "max_t": 9, "reduction_factor": 3}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"search__repeats": 0}, "search.repeats"),
        ({"search__repeats": 1.5}, "search.repeats"),
        (
            {"search__repeats": 100, "search__scheduler": {"type": "none", "num_samples": 101, "max_t": 1}},
            "search.repeats: 101 configurations, each trained 100 times, are 10,100 trials, more than 10,000; lower it",
        ),
    ],
)
def test_wrong_repeats_are_refused_in_a_line(changes: dict[str, object], why: str) -> None:
    with pytest.raises(InputError, match=why) as refused:
        Experiment(**words(**changes))
    assert "\n" not in str(refused.value)


@pytest.mark.usefixtures("trained_runs")
@pytest.mark.parametrize(
    "scheduler",
    [
        {"type": "sha", "num_samples": 4, "max_t": 4, "reduction_factor": 2},
        {"type": "asha", "num_samples": 4, "max_t": 4, "reduction_factor": 2},
        {"type": "none", "num_samples": 3, "max_t": 2},
        {"type": "hyperband", "max_t": 4, "reduction_factor": 2},
    ],
)
@pytest.mark.parametrize("sampler", ["random", "optuna"])
def test_every_scheduler_repeats_on_the_virtual_clock(
    tmp_path: Path, scheduler: dict[str, object], sampler: str
) -> None:
    changes = {"search__repeats": 2, "search__scheduler": scheduler, "search__sampler": {"type": sampler}}
    space = {"x": {"type": "uniform", "lower": 0, "upper": 1}}
    experiment = Experiment(**words(entrypoint=None, resources=VIRTUAL, search__space=space, **changes))
    run_experiment(experiment, open_folder(experiment.name, tmp_path))
    result = load_result(experiment.name, home=tmp_path)
    assert result.outcome == "done"
    assert len(result.trials) == 2 * experiment.search.num_configurations
    pairs = list(zip(result.trials[::2], result.trials[1::2], strict=True))
    assert all(one.configuration == other.configuration and one.seed != other.seed for one, other in pairs)
    assert all(one.iterations == other.iterations and one.status == other.status for one, other in pairs)
    assert len({str(one.configuration) for one, _ in pairs}) == len(pairs)
    best = result.best
    assert best is not None
    assert best.standing is not None
    assert best.standing.repeats == 2
    order = [one.trial // 2 for one in ranked(result)]
    assert order[::2] == order[1::2]
    assert any(f"mean {best.standing.mean_text}" in line for line in headlines(result))
    assert best.standing.mean_text in trials(result, None).rows[0]
    assert trial_rows(result)[best.trial]["spread"] == best.standing.spread


@pytest.mark.parametrize(
    "scheduler",
    [
        {"type": "sha", "num_samples": 8, "max_t": 8, "reduction_factor": 2},
        {"type": "asha", "num_samples": 8, "max_t": 8, "reduction_factor": 2},
        {"type": "none", "num_samples": 6, "max_t": 8},
        {"type": "hyperband", "max_t": 8, "reduction_factor": 2},
    ],
)
@pytest.mark.parametrize("rule", [{"patience": {"iterations": 2}}, {"median": {"after": 1, "trials": 2}}])
@pytest.mark.parametrize("seed", range(3))
def test_a_repeat_that_a_rule_ends_counts_in_the_mean_with_its_latest_report(
    scheduler: dict[str, object], rule: dict[str, object], seed: int
) -> None:
    search = {"search__repeats": 3, "search__scheduler": scheduler, "search__stop": rule, "constraints__deadline": "5h"}
    space = {"x": {"type": "uniform", "lower": 0, "upper": 1}}
    experiment = Experiment(**words(entrypoint=None, resources=VIRTUAL, search__space=space, **search))
    profile = experiment.loaded_profile()
    assert profile is not None
    job = plan_job(experiment, profile)
    backend = VirtualBackend(job.name, job.offer, job.profile, metric=job.metric, metric_of=uneven(seed))

    def is_shown_by_what_it_ranks_by(_: Event, controller: Controller) -> None:
        best = best_trial(controller.state)
        if best is not None and controller.state.outcome is None:
            reported = [one for one in repeats_of(controller.state, best) if one.has_reported]
            mean = fmean(one.metric(job.metric) for one in reported)
            assert standing(controller.state, best).mean == pytest.approx(mean)

    state = run_virtual(job, backend=backend, observers=[is_shown_by_what_it_ranks_by])[0].state
    assert state.history.of(TrialCut)
    for stage in state.stages:
        assert set(Counter(trial // 3 for trial in stage.ranking).values()) == {3}, "none is left out"
    done = [trial for trial in state.trials if trial.status is TrialStatus.COMPLETED]
    means = {
        trial.trial // 3: fmean(one.metric(job.metric) for one in done if one.trial // 3 == trial.trial // 3)
        for trial in done
    }
    best = best_trial(state)
    assert best is not None
    assert best.trial // 3 == (max if job.mode == "max" else min)(means, key=lambda unit: means[unit])
    found = standing(state, best)
    assert (found.repeats, found.mean) == (3, pytest.approx(means[best.trial // 3]))


def test_samplers_learn_the_mean() -> None:
    search = Search.model_validate(
        {
            "space": {"x": {"type": "uniform", "lower": 0, "upper": 1}},
            "scheduler": _asha(),
            "sampler": {"type": "optuna"},
            "repeats": 2,
            "metric": "score",
            "mode": "max",
        }
    )
    state = State.of(dataclasses.replace(TWICE, stages=(Stage(trials=24, iterations=1),)))
    drawn = {number: {"x": number // 2 / 12} for number in range(24)}
    for number in range(22):
        report = TrialReport(reported_at=0.0, iterations=1, metrics={"score": float(number)}, stage=0)
        state.trials[number].reports.append(report)
    state.trials[21].reports.clear()  # one of the last two trains
    iterations, known = sampling.known_results(search, state, drawn, enough=10)
    assert iterations == 1
    assert [entry.values for entry in known] == [(2 * at + 0.5,) for at in range(10)] + [None, None]
    event = sampling.draw(search, state, drawn, (24, 25, 26, 27), lambda: 0.0)
    assert event.first_trial == 24
    assert event.configurations[0] == event.configurations[1] != event.configurations[2] == event.configurations[3]
    assert event.reason.startswith("by tpe from 10 results")
