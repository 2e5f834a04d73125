"""Conditional spaces, the quasi sampler, the grid, points to evaluate, and domains of Ray Tune and Optuna."""

from __future__ import annotations

import math
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray import tune

import rubberband
from rubberband.errors import InputError
from rubberband.spec import samplers, space
from rubberband.spec.experiment import Experiment
from tests.builders.tables import cases

OPTIMIZER = {
    "type": "choice",
    "values": [
        "adam",
        {"name": "sgd", "space": {"momentum": {"type": "uniform", "lower": 0.0, "upper": 0.99}, "nesterov": True}},
    ],
}
SPACE: dict[str, Any] = {"lr": rubberband.loguniform(1e-4, 1e-1), "optimizer": space.parse(OPTIMIZER)}


def searched(**words: Any) -> Experiment:
    search = {"space": SPACE, "scheduler": {"type": "sha", "num_samples": 8, "max_t": 9}, "metric": "loss"}
    return Experiment(name="samples", search={**search, "mode": "min", **words})


@pytest.mark.parametrize("sampler", ["random", "quasi"])
def test_a_trial_has_the_parameters_of_its_option_and_no_others(sampler: Any) -> None:
    rows = samplers.sample(SPACE, sampler, 64, 3)
    assert {row["optimizer"] for row in rows} == {"adam", "sgd"}
    for row in rows:
        assert set(row) == {"lr", "optimizer"} | ({"momentum", "nesterov"} if row["optimizer"] == "sgd" else set())
    assert samplers.sample(SPACE, sampler, 64, 3) == rows
    assert samplers.sample(SPACE, sampler, 10, 3) == rows[:10]
    assert samplers.sample(SPACE, sampler, 64, 4) != rows


def test_a_space_is_written_in_python_as_in_a_file_and_reads_back() -> None:
    sgd = {"name": "sgd", "space": {"momentum": rubberband.uniform(0.0, 0.99), "nesterov": True}}
    assert rubberband.choice(["adam", sgd]) == SPACE["optimizer"]
    assert space.to_words(SPACE["optimizer"]) == OPTIMIZER
    experiment = searched()
    assert Experiment(**experiment.to_words()) == experiment


def test_the_grid_of_a_conditional_space_has_every_configuration_once() -> None:
    grid = rubberband.grid_search
    nested = {"a": grid([1, 2]), "b": grid(["x", {"name": "y", "space": {"c": grid([1, 2, 3])}}])}
    rows = samplers.sample(nested, "grid", 8, 0)
    assert samplers.grid_size(nested) == 8 == len({tuple(row.items()) for row in rows})
    assert rows[:3] == [{"a": 1, "b": "x"}, {"a": 1, "b": "y", "c": 1}, {"a": 1, "b": "y", "c": 2}]
    first = samplers.sample(nested, "grid", 8, 0, [{"b": "y", "c": 3, "a": 2}, {"b": "x"}])
    assert first[:3] == [{"a": 2, "b": "y", "c": 3}, {"a": 1, "b": "x"}, {"a": 2, "b": "x"}]
    assert sorted(map(str, first)) == sorted(map(str, rows))
    experiment = searched(space=nested, scheduler={"type": "sha", "max_t": 9})
    assert (experiment.search.sampler.type, experiment.search.num_trials) == ("grid", 8)


@given(st.integers(0, 2**63 - 1), st.integers(1, 6))
def test_quasi_points_are_evenly_spread_for_every_seed(seed: int, log_samples: int) -> None:
    """Of 2^k points, each of 2^k equal parts of every axis holds one."""
    count = 2**log_samples
    rows = samplers.sample({"x": rubberband.uniform(0, 1), "y": rubberband.uniform(0, 1)}, "quasi", count, seed)
    for name in ("x", "y"):
        assert sorted(math.floor(row[name] * count) for row in rows) == list(range(count))


def test_the_first_trials_have_the_points_and_the_others_stay_as_they_were() -> None:
    points = [{"lr": 0.01, "optimizer": "sgd", "momentum": 0.5}, {"optimizer": "adam"}]
    without, with_points = searched().configurations(), searched(points_to_evaluate=points).configurations()
    assert with_points[0] == {"lr": 0.01, "optimizer": "sgd", "momentum": 0.5, "nesterov": True}
    assert with_points[1] == {"lr": without[1]["lr"], "optimizer": "adam"}
    assert with_points[2:] == without[2:]
    assert searched().to_words()["search"].keys().isdisjoint({"points_to_evaluate"})


@cases("words", "why")
def test_points_and_spaces_that_do_not_fit_are_refused_in_one_line(words: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why) as caught:
        searched(**words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("foreign", "ours"),
    [
        (tune.uniform(0, 1), rubberband.uniform(0, 1)),
        (tune.quniform(0, 1, 0.1), rubberband.quniform(0, 1, 0.1)),
        (tune.loguniform(1e-4, 1e-1), rubberband.loguniform(1e-4, 1e-1)),
        (tune.qloguniform(1e-4, 1e-1, 1e-4), rubberband.qloguniform(1e-4, 1e-1, 1e-4)),
        (tune.randn(1, 2), rubberband.randn(1, 2)),
        (tune.qrandn(1, 2, 0.5), rubberband.qrandn(1, 2, 0.5)),
        (tune.randint(0, 5), rubberband.randint(0, 5)),
        (tune.lograndint(1, 100), rubberband.lograndint(1, 100)),
        (tune.qrandint(0, 64, 8), rubberband.qrandint(0, 64, 8)),
        (tune.qlograndint(8, 512, 8), rubberband.qlograndint(8, 512, 8)),
        (tune.choice(["a", 1]), rubberband.choice(["a", 1])),
        (tune.grid_search([1, 2]), rubberband.grid_search([1, 2])),
        (optuna.distributions.FloatDistribution(0.0, 1.0), rubberband.uniform(0.0, 1.0)),
        (optuna.distributions.FloatDistribution(1e-4, 1e-1, log=True), rubberband.loguniform(1e-4, 1e-1)),
        (optuna.distributions.FloatDistribution(0.0, 1.0, step=0.25), rubberband.quniform(0.0, 1.0, 0.25)),
        (optuna.distributions.IntDistribution(1, 8), rubberband.randint(1, 9)),
        (optuna.distributions.IntDistribution(1, 64, log=True), rubberband.lograndint(1, 65)),
        (optuna.distributions.IntDistribution(8, 64, step=8), rubberband.qrandint(8, 64, 8)),
        (optuna.distributions.CategoricalDistribution(["a", "b"]), rubberband.choice(["a", "b"])),
    ],
)
def test_domains_of_ray_tune_and_optuna_are_taken_as_they_are(foreign: Any, ours: Any) -> None:
    assert space.parse(foreign) == ours
    search = searched(space={"x": foreign}, scheduler={"type": "sha", "num_samples": 2, "max_t": 2}).search
    assert search.space["x"] == ours


@pytest.mark.parametrize(
    ("foreign", "why"),
    [
        (tune.sample_from(lambda spec: 1), "tune.sample_from has no counterpart; compute the value in the trial"),
        (optuna.distributions.IntDistribution(1, 9, step=2), r"low=1 is no multiple of step=2; write choice"),
    ],
)
def test_those_without_a_counterpart_are_refused(foreign: Any, why: str) -> None:
    with pytest.raises(InputError, match=why):
        searched(space={"x": foreign})
