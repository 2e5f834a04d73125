"""A search that begins with the results of earlier experiments, fixed as it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rubberband import estimate as rubberband_estimate
from rubberband.errors import InputError
from rubberband.executor.run.allowance import require_runnable
from rubberband.spec.loading import load_experiment
from tests.builders.cli_runs import CommandLine, rubberband

__all__ = ["rubberband"]

SPACE = {
    "lr": {"type": "loguniform", "lower": 1e-4, "upper": 1e-1},
    "width": {"type": "choice", "values": [64, 128]},
    "epochs": 3,
}
TPE = {"type": "optuna", "seed": 7}


@pytest.fixture
def run(rubberband: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path / "home"))

    def write(name: str, **search: Any) -> str:
        words = {
            "name": name,
            "search": {
                "space": SPACE,
                "scheduler": {"type": "sha", "num_samples": 16, "max_t": 4},
                "metric": "loss",
                "mode": "min",
                **search,
            },
            "resources": {
                "provider": "virtual",
                "instance_type": "p3.8xlarge",
                "max_instances": 2,
                "gpus_per_trial": {"min": 1, "max": 4},
                "price_per_hour": 12.0,
            },
            "profile": {"seconds_per_iteration": {1: 60, 2: 32, 4: 18}},
        }
        path = tmp_path / f"{name}.yaml"
        path.write_text(json.dumps(words))
        return str(path)

    def started(name: str, **search: Any) -> dict[str, Any]:
        rubberband("run", write(name, **search))
        return rubberband.json("report", name)

    started.refused = lambda name, **search: rubberband.refused("run", write(name, **search))
    started.write, started.home, started.line = write, tmp_path / "home", rubberband
    started("monday")
    return started


def header(run: Any, name: str) -> Any:
    from rubberband.executor.journal.folder import open_folder
    from rubberband.executor.run.follower import read_at_once

    return read_at_once(open_folder(name, run.home)).header.setup


def test_a_sampler_that_learns_begins_with_the_results_after_as_many_iterations(run: Any) -> None:
    found = run("tuesday", sampler=TPE, warm_start=["monday"], scheduler={"type": "none", "num_samples": 3, "max_t": 4})
    search = header(run, "tuesday")["experiment"]["search"]
    assert len(search["points_to_evaluate"]) == len(search["evaluated_rewards"]) == 16
    monday = run.line.json("report", "monday")["trials"]
    assert search["evaluated_rewards"] == [trial["curve"][0][2]["loss"] for trial in monday]
    assert len(found["trials"]) == 3
    assert search["warm_start"] == ["monday"]


@pytest.mark.usefixtures("trained_runs")
def test_other_samplers_train_the_best_configuration_first(run: Any) -> None:
    best = run.line.json("report", "monday")["best"]["configuration"]
    found = run("tuesday", sampler={"type": "random", "seed": 9}, warm_start=["monday"])
    assert found["trials"][0]["configuration"] == best
    assert len(found["trials"]) == 16


def test_a_configuration_of_two_earlier_experiments_counts_once(run: Any) -> None:
    run("again")
    run("tuesday", sampler=TPE, warm_start=["monday", "again"])
    points = header(run, "tuesday")["experiment"]["search"]["points_to_evaluate"]
    assert len(points) == len({json.dumps(point, sort_keys=True) for point in points}) == 16


def test_configurations_outside_the_space_are_named_and_left_out(run: Any) -> None:
    narrow = {**SPACE, "width": {"type": "choice", "values": [64, 256]}}
    run.line("run", run.write("tuesday", space=narrow, sampler=TPE, warm_start=["monday"]))
    assert "warm start: monday: outside the space and left out: trial " in run.line.err
    assert " more\n" in run.line.err
    points = header(run, "tuesday")["experiment"]["search"]["points_to_evaluate"]
    assert 0 < len(points) < 16
    assert {point["width"] for point in points} == {64}


@pytest.mark.parametrize(
    ("search", "why"),
    [
        ({"warm_start": ["nosuch"]}, "'nosuch'"),
        ({"warm_start": ["monday"], "metric": "error"}, "monday ranks by loss (min), and this search by error (min)"),
        ({"warm_start": ["monday"], "mode": "max"}, "monday ranks by loss (min), and this search by loss (max)"),
        (
            {"warm_start": ["monday"], "space": {"lr": SPACE["lr"]}},
            "has another space: width is in one of the two only",
        ),
        (
            {"warm_start": ["monday"], "space": {**SPACE, "lr": {"type": "uniform", "lower": 5.0, "upper": 6.0}}},
            "monday gives nothing, as its 16 results are outside the space (trial 0: ",
        ),
        ({"warm_start": ["monday", "monday"]}, "warm_start names an experiment twice; leave one out"),
        (
            {"warm_start": ["monday"], "sampler": TPE, "also": [{"metric": "latency", "at_most": 3}]},
            "warm_start gives the tpe sampler results of loss alone, and latency has a limit",
        ),
        (
            {"warm_start": ["monday"], "sampler": TPE, "points_to_evaluate": [{"lr": 0.01}]},
            "give evaluated_rewards too, or leave one of them out",
        ),
    ],
)
def test_another_search_is_refused_in_one_line(run: Any, search: dict[str, Any], why: str) -> None:
    assert why in run.refused("tuesday", **search)


def test_estimate_and_check_refuse_what_a_run_refuses(run: Any) -> None:
    unknown, other = run.write("a", warm_start=["mondy"]), run.write("b", warm_start=["monday"], mode="max")
    for command in ("estimate", "run"):
        refused = run.line.refused(command, unknown)
        assert "experiment 'mondy' not found" in refused
        assert "did you mean 'monday'?" in refused
        assert "monday ranks by loss (min), and this search by loss (max)" in run.line.refused(command, other)
    for file, why in ((unknown, "'mondy' not found"), (other, "monday ranks by loss (min)")):
        run.line("check", file, code=1)
        assert why in run.line.err
    with pytest.raises(InputError, match="experiment 'mondy' not found"):
        rubberband_estimate(experiment=load_experiment(Path(unknown)), home=run.home)
    with pytest.raises(InputError, match="experiment 'mondy' not found; did you mean 'monday'"):
        require_runnable(load_experiment(Path(unknown)), run.home)  # by which a service accepts submissions


@pytest.mark.parametrize("sampler", [{"type": "random", "seed": 9}, TPE])
def test_the_repeats_of_an_earlier_configuration_are_one_result_their_mean(run: Any, sampler: Any) -> None:
    lucky = run("lucky", repeats=2, scheduler={"type": "none", "num_samples": 3, "max_t": 2})
    pairs = [lucky["trials"][number : number + 2] for number in (0, 2, 4)]
    none = {"type": "none", "num_samples": 3, "max_t": 2}
    found = run("tuesday", sampler=sampler, warm_start=["lucky"], scheduler=none)
    means = [(one["metrics"]["loss"] + other["metrics"]["loss"]) / 2 for one, other in pairs]
    search = header(run, "tuesday")["experiment"]["search"]
    if sampler == TPE:
        assert search["evaluated_rewards"] == pytest.approx(means)
    else:
        best = pairs[means.index(min(means))][0]["configuration"]
        assert found["trials"][0]["configuration"] == best


def test_the_best_of_an_earlier_search_keeps_the_limits_of_this_one() -> None:
    from types import SimpleNamespace

    from rubberband.running.warm_start import _seen
    from rubberband.values.ranking import Limit, Ranking

    def trial(number: int, loss: float, **more: float) -> Any:
        curve = ((1.0, 1, {"loss": loss, **more}),)
        return SimpleNamespace(trial=number, configuration={"x": number}, present_curve=curve)

    trials = [trial(0, 0.1, latency=30.0), trial(1, 0.2, latency=10.0), trial(2, 0.05)]
    ranking = Ranking(metric="loss", mode="min", limits=(Limit(metric="latency", at_most=20.0),))
    seen = _seen(SimpleNamespace(metric="loss", repeats=1, trials=trials), 1)  # type: ignore[arg-type]
    assert sorted(seen, key=lambda one: ranking.merit(one[2]))[0][0] == 1
