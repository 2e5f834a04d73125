"""Spaces: domains, conditional ones, the quasi sampler, the grid, points to evaluate, those of Ray Tune and Optuna."""

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
from rubberband.spec import samplers, space, space_notes
from rubberband.spec.experiment import Experiment
from rubberband.spec.space import DOMAINS
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


KINDS: dict[str, Any] = {
    "uniform": rubberband.uniform(0, 1),
    "quniform": rubberband.quniform(0, 1, 0.1),
    "loguniform": rubberband.loguniform(1e-4, 1e-1),
    "qloguniform": rubberband.qloguniform(1e-4, 1, 1e-4),
    "randn": rubberband.randn(),
    "qrandn": rubberband.qrandn(0, 1, 0.5),
    "randint": rubberband.randint(0, 5),
    "lograndint": rubberband.lograndint(1, 100),
    "qrandint": rubberband.qrandint(0, 64, 8),
    "qlograndint": rubberband.qlograndint(8, 512, 8),
    "choice": rubberband.choice(["x", 1, None]),
    "constant": 3,
}


FIRST: dict[str, Any] = {
    "uniform": 0.7637076394303487,
    "quniform": 0.1,
    "loguniform": 0.00013091211021995722,
    "qloguniform": 0.0002,
    "randn": 0.6080523034142681,
    "qrandn": 0.0,
    "randint": 3,
    "lograndint": 1,
    "qrandint": 56,
    "qlograndint": 192,
    "choice": "x",
    "constant": 3,
}


def test_the_same_seed_always_gives_the_same_configurations() -> None:
    """Literal values: a change of them would alter every experiment that is run again."""
    first = samplers.sample(KINDS, "random", 1, 7)[0]
    inexact = {name: pytest.approx(FIRST[name], rel=1e-12) for name in ("loguniform", "randn")}
    assert first == {**FIRST, **inexact}


def test_a_trial_depends_neither_on_the_order_nor_on_the_number_of_trials() -> None:
    few = samplers.sample(KINDS, "random", 3, 7)
    many = samplers.sample(dict(reversed(KINDS.items())), "random", 10, 7)
    assert many[:3] == few
    assert samplers.sample(KINDS, "random", 3, 8) != few


def test_draws_keep_their_bounds_and_reach_them() -> None:
    rows = samplers.sample(KINDS, "random", 2000, 0)
    assert {row["randint"] for row in rows} == set(range(5))
    assert {row["qrandint"] for row in rows} == set(range(0, 65, 8))
    assert {row["quniform"] for row in rows} == {count / 10 for count in range(11)}
    assert {row["choice"] for row in rows} == {"x", 1, None}
    assert all(1 <= row["lograndint"] < 100 for row in rows)
    assert all(8 <= row["qlograndint"] <= 512 and row["qlograndint"] % 8 == 0 for row in rows)
    assert all(1e-4 <= row["loguniform"] <= 1e-1 for row in rows)
    assert sum(row["loguniform"] for row in rows) / 2000 == pytest.approx((1e-1 - 1e-4) / math.log(1e3), rel=0.1)
    assert sum(row["uniform"] for row in rows) / 2000 == pytest.approx(0.5, abs=0.03)
    assert sum(row["randn"] for row in rows) / 2000 == pytest.approx(0, abs=0.1)


def test_the_grid_is_the_cross_product_last_fastest() -> None:
    grid = {"a": rubberband.choice([1, 2]), "b": rubberband.grid_search(["x", "y"]), "c": 0}
    rows = samplers.sample(grid, "grid", 4, 0)
    assert [(row["a"], row["b"], row["c"]) for row in rows] == [(1, "x", 0), (1, "y", 0), (2, "x", 0), (2, "y", 0)]


@cases("parameters", "sampler", "num_samples", "why")
def test_spaces_that_a_sampler_cannot_draw(
    parameters: dict[str, Any], sampler: Any, num_samples: int, why: str
) -> None:
    with pytest.raises(InputError, match=why):
        samplers.sample({name: space.parse(each) for name, each in parameters.items()}, sampler, num_samples, 0)


@pytest.mark.parametrize("text", ["adam", "uniform", "10-20", "v1.2", "relu()", "a, b", "2026-11-22", "x" * 1000])
def test_other_texts_are_constants(text: str) -> None:
    assert space.parse(text) == text


@cases("words", "why")
def test_invalid_parameters(words: Any, why: str) -> None:
    with pytest.raises(InputError, match=why):
        space.parse(words)


def test_an_object_is_no_parameter() -> None:
    with pytest.raises(InputError, match="is not a plain value"):
        space.parse(object())


@cases("value", "note")
def test_a_constant_that_looks_like_a_domain_or_a_number_is_named(value: Any, note: str) -> None:
    (found,) = space_notes.constant_notes({"x": space.parse(value)}, is_typed=True)
    assert note in found


@pytest.mark.parametrize("value", [3, "adam", "none", [64, 64], [[3, 3], [5, 5]], [], rubberband.choice([[1, 2], [3]])])
def test_other_constants_pass_without_a_word(value: Any) -> None:
    assert not list(space_notes.constant_notes({"x": space.parse(value)}, is_typed=True))


def test_words_of_a_command_are_texts_anyway() -> None:
    assert not list(space_notes.constant_notes({"x": "1e-3", "y": rubberband.choice(["1", "2"])}, is_typed=False))


@pytest.mark.parametrize("domain", [value for value in KINDS.values() if value != 3], ids=lambda domain: domain.kind)
def test_domains_read_back_what_they_write(domain: Any) -> None:
    assert space.parse(domain.to_words()) == domain


@cases("written")
def test_a_domain_is_shown_as_one_writes_it(written: str) -> None:
    assert repr(eval(f"rubberband.{written}")) == f"rubberband.{written}"


def test_every_kind_has_ray_tunes_constructor() -> None:
    for kind in DOMAINS:
        assert hasattr(rubberband, "grid_search" if kind == "grid" else kind)
