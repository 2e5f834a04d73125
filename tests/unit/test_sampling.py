"""Optuna's samplers by ask and tell: conditional spaces, results, seeds, runs that are resumed, and what is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

import rubberband
from rubberband.errors import InputError
from rubberband.executor import (
    ExperimentFolder,
    RestPlanned,
    RunSpec,
    Started,
    TrialsDrawn,
    decode_event,
    decode_job,
    encode_event,
    encode_job,
    sampling,
    session,
    summarise,
)
from rubberband.executor import read_journal as read
from rubberband.executor.core.state import lanes_of
from rubberband.planning.candidates import repeat_notes, sampler_notes
from rubberband.planning.feasible import PlanningOptions, PricesAndQuotas
from rubberband.planning.prices_and_quotas import answer
from rubberband.spec import samplers, space
from rubberband.values.plan import Spent
from rubberband.views.estimate.tables import screen_tables
from rubberband.views.live.narration import Narrator
from tests.builders.plans import plan_job
from tests.builders.sampled_runs import SampledRun, an_experiment
from tests.builders.sessions import Killed, dying_after
from tests.builders.tables import cases

SGD = {
    "name": "sgd",
    "space": {
        "momentum": {"type": "uniform", "lower": 0.0, "upper": 0.99},
        "nesterov": {"type": "choice", "values": [True, False]},
    },
}
MIXED: dict[str, Any] = {
    "lr": rubberband.loguniform(1e-4, 1e-1),
    "q": rubberband.quniform(0, 1, 0.1),
    "ql": rubberband.qloguniform(1e-3, 1, 1e-3),
    "n": rubberband.randn(1, 2),
    "qn": rubberband.qrandn(0, 1, 0.5),
    "i": rubberband.randint(0, 5),
    "il": rubberband.lograndint(1, 100),
    "iq": rubberband.qrandint(0, 64, 8),
    "ilq": rubberband.qlograndint(8, 512, 8),
    "optimizer": space.parse({"type": "choice", "values": ["adam", SGD]}),
    "fixed": [1, 2],
}


def drawn(run: SampledRun) -> list[TrialsDrawn]:
    return [event for _, event in run.journal.events() if isinstance(event, TrialsDrawn)]


def mixed_objective(configuration: Any, iterations: int) -> float:
    off = abs(math.log10(configuration["lr"]) + 2.0) + 0.1 * configuration["i"] + configuration.get("momentum", 0.5)
    return off + 1.0 / iterations


SMALL = {"type": "hyperband", "max_t": 9, "reduction_factor": 3}


@pytest.mark.parametrize("algorithm", ["tpe", "cmaes", "nsgaii", pytest.param("gp", marks=pytest.mark.long)])
def test_every_sampler_draws_whole_configurations_within_any_space(algorithm: str) -> None:
    rewards = [mixed_objective(row, 9) for row in samplers.sample(MIXED, "random", 20, 1)]
    points = samplers.sample(MIXED, "random", 20, 1)
    experiment = an_experiment(
        3, space=MIXED, scheduler={"type": "sha", "num_samples": 2, "max_t": 3}, sampler={"sampler": algorithm},
        points_to_evaluate=points, evaluated_rewards=rewards,
    )  # fmt: skip
    run = SampledRun(experiment, mixed_objective).drive()
    (event,) = drawn(run)
    assert event.reason == f"by {algorithm} from 20 results after 1 iteration"
    assert len({str(row) for row in event.configurations}) == 2
    assert list(event.configurations) != experiment.configurations()
    for row in event.configurations:
        samplers.check_point(MIXED, row, complete=True)
        assert set(row) == set(MIXED) | ({"momentum", "nesterov"} if row["optimizer"] == "sgd" else set())
    assert drawn(SampledRun(experiment, mixed_objective).drive()) == [event]
    other = an_experiment(4, **experiment.to_words()["search"] | {"sampler": {"sampler": algorithm, "seed": 4}})
    assert drawn(SampledRun(other, mixed_objective).drive())[0].configurations != event.configurations


def test_brackets_after_the_first_learn_and_the_first_equals_random() -> None:
    run = SampledRun(an_experiment(0, scheduler=SMALL)).drive()
    first, *later = drawn(run)
    random = an_experiment(0, scheduler=SMALL, sampler={"type": "random"}).configurations()
    assert list(first.configurations) == random[: len(first.configurations)]
    assert first.reason == "at random: tpe needs 10 results and there are 0"
    assert any(event.reason.startswith("by tpe from ") for event in later)
    result = summarise(run.controller.state, {"configurations": []}, run.backend.now())
    assert [dict(trial.configuration) for trial in result.trials] == [
        run.controller.state.sampled_configs[trial] for trial in range(len(result.trials))
    ]


@pytest.mark.by_default(1)
@pytest.mark.parametrize("replan", [True, False])
def test_a_run_that_is_killed_after_any_event_ends_as_an_undisturbed_one(replan: bool) -> None:
    """All on one lane: with several, another lane's results may be known at another instant."""

    def fresh() -> SampledRun:
        run = SampledRun(an_experiment(1, scheduler=SMALL, resources={"max_instances": 1}))
        run.job = dataclasses.replace(run.job, replan=replan)
        return run

    whole = fresh().drive()
    assert len(lanes_of(whole.job)) == 1
    events = [event for _, event in whole.journal.events()]
    assert isinstance(events[0], TrialsDrawn)
    assert isinstance(events[1], Started)
    assert replan == any(isinstance(event, RestPlanned) for event in events)
    at = [number for number, event in enumerate(events, start=1) if isinstance(event, TrialsDrawn)]
    for kill_after in sorted({1, 2, *at, *(number - 1 for number in at[1:]), len(events) // 2}):
        run = fresh().drive(kill_after)
        run.drive()
        assert [e.configurations for e in drawn(run)] == [e.configurations for e in drawn(whole)], kill_after
        assert run.best(9) == whole.best(9)


def test_points_are_trained_in_every_bracket() -> None:
    points = samplers.sample(MIXED, "random", 45, 8)
    points[44] = {"optimizer": "sgd", "momentum": 0.5}
    run = SampledRun(an_experiment(0, space=MIXED, points_to_evaluate=points), mixed_objective).drive()
    assert any(event.reason.startswith("by tpe") for event in drawn(run))
    configurations = run.controller.state.sampled_configs
    for trial, point in enumerate(points):
        assert {name: configurations[trial][name] for name in point} == point, trial


def test_an_experiment_on_disk_is_resumed_with_the_same_configurations(tmp_path: Path) -> None:
    experiment = an_experiment(5, scheduler=SMALL, resources={"max_instances": 1})
    results = []
    for home, dies in ((tmp_path / "whole", ()), (tmp_path / "cut", (3, 60, 110))):
        folder = ExperimentFolder(home=home, name=experiment.name)
        profile = experiment.loaded_profile()
        assert profile is not None, "the words have a profile"
        session.create(folder, plan_job(experiment, profile), RunSpec.of(experiment, None, folder, Spent()))
        for events in dies:
            with contextlib.suppress(Killed):
                session.run(folder, view=dying_after(events))
        results.append(session.run(folder))
        assert read(folder) == results[-1]
    whole, cut = results
    assert cut.resumes >= 1
    assert [trial.configuration for trial in cut.trials] == [trial.configuration for trial in whole.trials]
    assert all(trial.configuration for trial in whole.trials)


def test_without_a_sync_every_trial_learns_from_those_before_and_a_resume_keeps_what_was_drawn() -> None:
    asha = {"type": "asha", "num_samples": 24, "grace_period": 1, "max_t": 9, "reduction_factor": 3}
    whole = SampledRun(an_experiment(0, scheduler=asha)).drive()
    reasons = [event.reason for event in drawn(whole)]
    assert sorted(whole.controller.state.sampled_configs) == list(range(24))
    assert reasons[0].startswith("at random: ")
    assert reasons[-1].startswith("by tpe from ")
    run = SampledRun(an_experiment(0, scheduler=asha)).drive(kill_after=120)
    before = dict(run.controller.state.sampled_configs)
    assert 0 < len(before) < 24
    run.drive()
    assert {trial: run.controller.state.sampled_configs[trial] for trial in before} == before
    assert {trial: whole.controller.state.sampled_configs[trial] for trial in before} == before


def test_a_virtual_run_that_draws_takes_and_costs_as_planned() -> None:
    run = SampledRun(an_experiment(2, scheduler=SMALL, sampler={"sampler": "nsgaii"})).drive()
    result = summarise(run.controller.state, {"configurations": []}, run.backend.now())
    assert result.actual_jct_s == pytest.approx(result.planned_jct_s, abs=0.001)
    assert result.actual_cost_usd <= result.planned_cost_usd + 0.005


def test_draws_and_jobs_keep_their_place_in_the_journal() -> None:
    run = SampledRun(an_experiment(0, space=MIXED, scheduler=SMALL), mixed_objective).drive()
    for event in drawn(run):
        assert decode_event(*encode_event(event)) == event
    assert decode_job(encode_job(run.job)) == run.job


def test_a_draw_is_one_line_of_the_narration() -> None:
    run, said = SampledRun(an_experiment(0, scheduler=SMALL)), list[str]()
    narrator = Narrator(run.job)
    run.drive(observers=[lambda event, controller: said.extend(narrator.lines(event, controller))])
    found = [line for line in said if " drawn " in line]
    assert found
    assert all(line.split(" drawn ")[1].startswith(("by tpe from ", "at random: ")) for line in found)


def test_a_failed_trial_counts_as_the_worst_and_one_that_trains_as_unknown() -> None:
    run = SampledRun(an_experiment(0, scheduler=SMALL)).drive()
    state, seen = run.controller.state, dict(run.controller.state.sampled_configs)
    state.trials[0].reports[0] = dataclasses.replace(state.trials[0].reports[0], metrics={"loss": math.nan})
    iterations, known = sampling.known_results(run.experiment.search, state, {0: seen[0], 1: seen[1]}, 1)
    assert iterations >= 1
    values = [value for each in known if each.values is not None for value in each.values]
    assert all(map(math.isfinite, values))
    assert len(known) == 2


LATENCY = [{"metric": "latency", "mode": "min"}]


@pytest.mark.parametrize("algorithm", ["tpe", pytest.param("gp", marks=pytest.mark.long), "nsgaii"])
def test_a_sampler_of_several_objectives_learns_from_all(algorithm: str) -> None:
    """Where x is small, the second metric is low and the first the same everywhere."""
    sampler = {"type": "optuna", "sampler": algorithm}
    run = SampledRun(an_experiment(0, scheduler={**SMALL, "max_t": 27}, also=LATENCY)).drive()
    state, seen = run.controller.state, dict(run.controller.state.sampled_configs)
    for trial, configuration in seen.items():
        reports = state.trials[trial].reports
        metrics = {"loss": 1.0, "latency": configuration["x"] + configuration["y"]}
        reports[:] = [dataclasses.replace(each, metrics=metrics) for each in reports]

    def proposed(several: bool) -> float:
        search = an_experiment(0, sampler={**sampler, "multi_objective": several}, also=LATENCY).search
        _, known = sampling.known_results(search, state, seen, 10)
        found = sampling.propose(search, known, 100, 40 if algorithm == "nsgaii" else 8)
        return sum(each["x"] + each["y"] for each in found) / len(found)

    assert proposed(True) < proposed(False)


def near(x: float, loss: float | None, y: float = 5.0) -> sampling.Known:
    return sampling.Known(configuration={"x": x, "y": y}, values=None if loss is None else (loss,))


ALONG_X = [near(x / 2.0, abs(x / 2.0 - 3.0), y=float(x % 7)) for x in range(-8, 20)]
"""Results that are best at x = 3."""


def test_four_trials_at_once_are_unlike_and_keep_away_from_those_that_train() -> None:
    search = an_experiment(0, scheduler=SMALL).search
    at_once = [sampling.propose(search, ALONG_X, first, 1)[0] for first in range(40, 44)]
    assert len({configuration["x"] for configuration in at_once}) == 4, "each of the same results"
    training = [near(3.0 + offset / 20.0, None) for offset in range(-10, 11)]

    def off_s(known: list[sampling.Known]) -> float:
        return sum(
            abs(each["x"] - 3.0) for first in range(40, 56) for each in sampling.propose(search, known, first, 1)
        )

    assert off_s(ALONG_X) < off_s([*ALONG_X, *training])


def test_children_of_nsgaii_have_parents_among_the_better_half() -> None:
    search = an_experiment(0, scheduler=SMALL, sampler={"sampler": "nsgaii"}).search
    known = [near(x / 4.0, float(x), y=x / 8.0) for x in range(20)]
    children = sampling.propose(search, known, 40, 60)
    assert any(child["x"] < 2.5 and 4.0 * child["x"] % 1.0 == 0.0 for child in children)
    assert not any(child["x"] == each.configuration["x"] for child in children for each in known[10:])


@pytest.mark.parametrize(("given", "iterations"), [(0, 1), (8, 3), (9, 9), (10, 9), (12, 9)])
def test_given_results_stand_for_trials_so_that_results_of_more_iterations_count(given: int, iterations: int) -> None:
    points = {"points_to_evaluate": [{"x": 1.0, "y": 2.0}] * given, "evaluated_rewards": [1.0] * given}
    run = SampledRun(an_experiment(0, scheduler=SMALL)).drive()
    state, seen = run.controller.state, dict(run.controller.state.sampled_configs)
    lengths = sorted(range(len(state.trials)), key=lambda trial: -len(state.trials[trial].reports))
    drawn = {trial: seen[trial] for trial in lengths if trial in seen}
    for trial, most in zip(drawn, [9, 3, *[1] * len(drawn)], strict=False):
        del state.trials[trial].reports[most:]
    assert sampling.known_results(an_experiment(0, scheduler=SMALL, **points).search, state, drawn, 10)[0] == iterations


def test_a_trial_that_ended_by_itself_teaches_the_sampler_with_its_latest_report() -> None:
    run = SampledRun(an_experiment(0, scheduler=SMALL)).drive()
    state, seen = run.controller.state, dict(run.controller.state.sampled_configs)
    state.trials[0].ended = True
    del state.trials[0].reports[1:]
    _, (first, *_) = sampling.known_results(run.experiment.search, state, seen, 1)
    assert first.values == (state.trials[0].reports[0].metrics["loss"],)


@cases("words", "why")
def test_invalid_words_are_refused(words: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        an_experiment(0, **words)


@pytest.mark.parametrize(
    ("algorithm", "absent", "why"),
    [
        ("tpe", {"optuna"}, r"search.sampler: tpe needs optuna; run pip install 'rubberband-tune\[optuna\]'"),
        ("cmaes", {"cmaes"}, r"search.sampler: cmaes needs cmaes; run pip install 'rubberband-tune\[optuna\]'"),
        ("gp", {"torch"}, r"search.sampler: gp needs torch; run pip install 'rubberband-tune\[ray\]'"),
    ],
)
def test_a_sampler_that_is_not_installed_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, absent: set[str], why: str
) -> None:
    experiment = an_experiment(0, sampler={"sampler": algorithm})
    experiment.require_runnable()
    monkeypatch.setattr("rubberband.installation.find_spec", lambda name: None if name in absent else object())
    with pytest.raises(InputError, match=why):
        experiment.require_runnable()
    an_experiment(0, sampler={"type": "random"}).require_runnable()


def test_an_estimate_says_how_many_trials_a_sampler_draws() -> None:
    def note(at_once: int, **changes: Any) -> str:
        found = sampler_notes(an_experiment(0, **changes), at_once)
        assert len(found) <= 1
        return "".join(found)

    sha = {"type": "sha", "num_samples": 9, "max_t": 9}
    one = note(1, scheduler=sha)
    assert "tpe draws none of the 9 trials, as all start before the first result, and all are drawn at random" in one
    assert "use scheduler: {type: none}, {type: asha} or {type: hyperband}, or give 10 evaluated_rewards" in one
    assert "at most 3 of the 17 trials. The others are drawn at random" in note(1, scheduler=hyperband(9))
    assert "none of the 17 trials, as all 3 brackets start before the first result" in note(3, scheduler=hyperband(9))
    assert "none of the 5 trials, as it learns from 10 results on" in note(1, scheduler=hyperband(3))
    assert "at most 8 of the 18 trials" in note(1, scheduler={**sha, "type": "asha", "num_samples": 18})
    assert note(1, scheduler=sha, sampler={"type": "random"}) == ""
    points = samplers.sample(an_experiment(0).search.space, "random", 10, 0)
    assert note(1, scheduler=sha, points_to_evaluate=points, evaluated_rewards=[1.0] * 10) == ""


def hyperband(max_t: int) -> dict[str, Any]:
    return {"type": "hyperband", "max_t": max_t, "reduction_factor": 3}


@cases("space", "trials", "line")
def test_configurations_that_are_trained_again_are_counted(space: dict[str, Any], trials: int, line: str) -> None:
    scheduler = {"type": "sha", "num_samples": trials, "max_t": 9}
    sampler = {"type": "random" if trials == 9 else "grid"}
    found = repeat_notes(an_experiment(0, space=space, scheduler=scheduler, sampler=sampler))
    assert len(found) <= 1
    assert line in "".join(found)
    assert bool(found) == bool(line)


def test_points_that_occur_twice_are_counted() -> None:
    space = {"a": {"type": "uniform", "lower": 0, "upper": 1}}
    asked = an_experiment(0, space=space, points_to_evaluate=[{"a": 0.5}] * 3, sampler={"type": "random"},
        scheduler={"type": "sha", "num_samples": 9, "max_t": 9})  # fmt: skip
    assert "9 trials have 7 configurations, and train 2 again" in repeat_notes(asked)[0]


def test_the_answer_that_previews_and_the_screen_share_names_trials_that_are_trained_again() -> None:
    space = {"a": {"type": "choice", "values": [0.1, 0.2]}, "lr": [1e-3, 1]}
    asked = an_experiment(0, space=space, scheduler={"type": "sha", "num_samples": 9, "max_t": 9})
    profile = asked.loaded_profiles()
    assert profile is not None
    found = answer(asked, profile, PricesAndQuotas(), PlanningOptions(now=0.0, clock=lambda: 0.0))
    said = [note for note in found.to_json()["notes"] if note.startswith(("space", "sampler:"))]
    assert [note.partition(",")[0] for note in said] == [
        "space.lr: [0.001",
        "space: it has 2 configurations",
        "sampler: tpe draws none of the 9 trials",
    ]
    assert set(said) <= set(screen_tables(found.estimate, found.notes)[0].notes)
