"""Choices that `==` takes for one, as 0, false and 0.0: each is its own to samplers, points, studies and charts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import optuna
import pytest

import rubberband
from rubberband.errors import InputError
from rubberband.executor import sampling
from rubberband.integrations.ray_tune_options import space_of_function
from rubberband.spec.experiment import Experiment
from rubberband.spec.loading import dump_experiment, parse_experiment
from rubberband.spec.samplers import sample
from rubberband.spec.space import canonical
from rubberband.views.charts.parallel_coordinates import axis_of, parameters
from tests.builders.results import EVERY_RESULT
from tests.builders.sampled_runs import an_experiment

ALIKE = [0, False, 0.0, 1, True, 1.0, "0", [0], [False]]
SPACE = {"flag": rubberband.choice(ALIKE), "lr": rubberband.choice([0.1, 0.2])}


def kinds(values: Any) -> list[str]:
    return [canonical(value) for value in values]


@pytest.mark.parametrize("index", range(len(ALIKE)))
def test_a_point_is_trained_with_the_very_value(index: int) -> None:
    point = {"flag": ALIKE[index]}
    assert kinds(row["flag"] for row in sample(SPACE, "random", 1, 0, [point])) == kinds([ALIKE[index]])
    rows = sample(SPACE, "grid", 18, 0, [point])
    assert kinds(row["flag"] for row in rows[:2]) == kinds([ALIKE[index]] * 2)


def test_a_whole_number_is_a_point_for_the_same_float_and_true_is_not() -> None:
    space = {"flag": rubberband.choice([1.0, 2.5])}
    assert kinds([sample(space, "random", 1, 0, [{"flag": 1}])[0]["flag"]]) == ["1.0"]
    assert kinds([sample(space, "grid", 2, 0, [{"flag": 1}])[0]["flag"]]) == ["1.0"]
    with pytest.raises(InputError, match="True is not one of the values"):
        sample(space, "random", 1, 0, [{"flag": True}])


@pytest.mark.parametrize("best", [0, 1, 2])
def test_a_sampler_credits_the_very_value(best: int) -> None:
    space = {"flag": rubberband.choice([0, False, 0.0])}
    search = an_experiment(0, space=space, scheduler={"type": "hyperband", "max_t": 9, "reduction_factor": 3}).search
    known = [
        sampling.Known(configuration={"flag": value}, values=(float(index != best) + number / 100,))
        for number in range(10)
        for index, value in enumerate([0, False, 0.0])
    ]
    proposed = kinds(each["flag"] for each in sampling.propose(search, known, 30, 20))
    assert proposed.count(kinds([0, False, 0.0])[best]) > 14


def test_a_file_keeps_them() -> None:
    experiment = Experiment(
        name="alike",
        search={
            "space": SPACE,
            "scheduler": {"type": "sha", "max_t": 4, "num_samples": 8},
            "metric": "m",
            "mode": "max",
        },
    )
    again = parse_experiment(dump_experiment(experiment))
    assert kinds(again.search.space["flag"].options) == kinds(ALIKE)


def test_a_function_of_optuna_keeps_them() -> None:
    def asks(trial: optuna.Trial) -> None:
        trial.suggest_categorical("flag", [0, False, 0.0])
        if trial.suggest_categorical("norm", ["batch", "none"]) == "batch":
            trial.suggest_float("momentum", 0.1, 0.9)

    assert kinds(space_of_function(asks)["flag"].options) == kinds([0, False, 0.0])


def test_a_study_and_the_axes_of_charts_keep_them(tmp_path: Path) -> None:
    result = next(iter(EVERY_RESULT.values()))()
    flags = [ALIKE[index % len(ALIKE)] for index in range(len(result.trials))]
    trials = [
        dataclasses.replace(trial, configuration={"flag": flag})
        for trial, flag in zip(result.trials, flags, strict=True)
    ]
    result = dataclasses.replace(result, trials=tuple(trials))
    url = f"sqlite:///{tmp_path}/study.db"
    result.to_study(url)
    found = optuna.load_study(study_name=result.name, storage=url).trials
    assert [trial.params["flag"] for trial in found] == kinds(flags)
    axis = axis_of("flag", flags, None)
    assert len({axis.place(flag) for flag in flags}) == len({text for _, text in axis.ticks}) == len(set(kinds(flags)))
    assert parameters([dataclasses.replace(trials[0], configuration={"a": value}) for value in (0, 0.0)])["a"]
