from __future__ import annotations

import math
from typing import Any

import pytest

import rubberband
from rubberband.errors import InputError
from rubberband.spec import samplers, space
from rubberband.spec.space import DOMAINS
from tests.builders.tables import cases

SPACE: dict[str, Any] = {
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
    first = samplers.sample(SPACE, "random", 1, 7)[0]
    inexact = {name: pytest.approx(FIRST[name], rel=1e-12) for name in ("loguniform", "randn")}
    assert first == {**FIRST, **inexact}


def test_a_trial_depends_neither_on_the_order_nor_on_the_number_of_trials() -> None:
    few = samplers.sample(SPACE, "random", 3, 7)
    many = samplers.sample(dict(reversed(SPACE.items())), "random", 10, 7)
    assert many[:3] == few
    assert samplers.sample(SPACE, "random", 3, 8) != few


def test_draws_keep_their_bounds_and_reach_them() -> None:
    rows = samplers.sample(SPACE, "random", 2000, 0)
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
    (found,) = space.constant_notes({"x": space.parse(value)}, is_typed=True)
    assert note in found


@pytest.mark.parametrize("value", [3, "adam", "none", [64, 64], [[3, 3], [5, 5]], [], rubberband.choice([[1, 2], [3]])])
def test_other_constants_pass_without_a_word(value: Any) -> None:
    assert not list(space.constant_notes({"x": space.parse(value)}, is_typed=True))


def test_words_of_a_command_are_texts_anyway() -> None:
    assert not list(space.constant_notes({"x": "1e-3", "y": rubberband.choice(["1", "2"])}, is_typed=False))


@pytest.mark.parametrize("domain", [value for value in SPACE.values() if value != 3], ids=lambda domain: domain.kind)
def test_domains_read_back_what_they_write(domain: Any) -> None:
    assert space.parse(domain.to_words()) == domain


@cases("written")
def test_a_domain_is_shown_as_one_writes_it(written: str) -> None:
    assert repr(eval(f"rubberband.{written}")) == f"rubberband.{written}"


def test_every_kind_has_ray_tunes_constructor() -> None:
    for kind in DOMAINS:
        assert hasattr(rubberband, "grid_search" if kind == "grid" else kind)
