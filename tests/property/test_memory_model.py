"""The model of memory by a few measured configurations: exact where memory is bilinear, and never far too low."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.planning.memory_model import Exploring, MemoryModel, MemoryPoint, OutOfTime
from rubberband.spec.space import choice, loguniform, uniform

SPACE = {
    "lr": loguniform(1e-5, 1e-2),
    "dropout": uniform(0, 0.5),
    "warmup_ratio": uniform(0, 0.1),
    "r": choice([8, 16, 64, 256]),
    "batch": choice([2, 4, 8, 16]),
    "length": choice([128, 256, 1024]),
    "attention": choice(["eager", "flash"]),
}
CONFIGS = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-5, 1e-2),
        "dropout": st.floats(0, 0.5),
        "warmup_ratio": st.floats(0, 0.1),
        "r": st.sampled_from([8, 16, 64, 256]),
        "batch": st.sampled_from([2, 4, 8, 16]),
        "length": st.sampled_from([128, 256, 1024]),
        "attention": st.sampled_from(["eager", "flash"]),
    }
)
BYTES = st.floats(0.0, 1e6)
Memory = Callable[[Mapping[str, Any]], float]


def fitted(memory: Memory, first: Mapping[str, Any], **words: Any) -> tuple[MemoryModel, list[MemoryPoint]]:
    exploring = Exploring(MemoryPoint(first, memory(first)), SPACE, memory, **words)
    exploring.largest()
    return exploring.model(), exploring.points


@given(st.floats(1e8, 1e10), BYTES, BYTES, st.floats(0.0, 1e4), CONFIGS, CONFIGS)
def test_memory_with_a_product_of_two_parameters_is_found_from_few_measurements(
    fixed: float, per_rank: float, per_sample: float, product: float, first: dict[str, Any], other: dict[str, Any]
) -> None:
    def memory(config: Mapping[str, Any]) -> float:
        return fixed + per_rank * config["r"] + (per_sample + product * config["r"]) * config["batch"]

    model, points = fitted(memory, first)
    assert len(points) <= 9, "the first, the largest, the least, the unlikely ones, each of three, two, an option"
    assert model.predict(other) == pytest.approx(memory(other), rel=0.1)
    assert {"lr", "dropout", "warmup_ratio", "length"}.isdisjoint(model.slopes)


@given(st.floats(1e8, 1e9), BYTES, st.floats(1e3, 1e5), st.floats(1.0, 1e3), CONFIGS, CONFIGS)
def test_memory_with_products_of_three_parameters_is_found_exactly_where_all_count(
    fixed: float, per_rank: float, per_token: float, product: float, first: dict[str, Any], other: dict[str, Any]
) -> None:
    def memory(config: Mapping[str, Any]) -> float:
        tokens = config["batch"] * config["length"]
        return fixed + per_rank * config["r"] + (per_token + product * config["r"]) * tokens

    model, points = fitted(memory, first)
    assert len(points) <= 13
    if len(model.slopes) == 3 and model.factor == 1.0:
        assert model.predict(other) == pytest.approx(memory(other), rel=1e-6)


@given(st.lists(st.floats(0.2, 2.5), min_size=4, max_size=4), CONFIGS, st.sampled_from([0.0, 3e8]))
def test_no_measured_configuration_takes_a_tenth_more_than_the_model_says(
    powers: list[float], first: dict[str, Any], fixed: float
) -> None:
    """Whatever the shape is: with powers, as of attention over a length, and an unlikely name that counts."""

    def memory(config: Mapping[str, Any]) -> float:
        names = ("r", "batch", "length")
        grown = sum((config[name] / 2.0) ** power for name, power in zip(names, powers, strict=False))
        return fixed + 1e7 * (1.0 + grown * (1.0 + config["dropout"]) ** powers[3])

    model, points = fitted(memory, first)
    for point in points:
        assert point.peak_bytes <= model.predict(point.config) * 1.1 + 1.0


@given(BYTES, BYTES, st.floats(0.0, 1e4), CONFIGS)
def test_more_of_what_takes_memory_is_predicted_to_take_more(
    per_rank: float, per_sample: float, product: float, first: dict[str, Any]
) -> None:
    def memory(config: Mapping[str, Any]) -> float:
        return 1e8 + per_rank * config["r"] + (per_sample + product * config["r"]) * config["batch"]

    model, _ = fitted(memory, first)
    for name, values in (("r", [8, 16, 64, 256]), ("batch", [2, 4, 8, 16])):
        found = [model.predict({**first, name: value}) for value in values]
        assert all(one <= other * (1 + 1e-9) for one, other in pairwise(found))


def test_options_and_the_least_memory_are_kept() -> None:
    def memory(config: Mapping[str, Any]) -> float:
        return 1e9 + 5e8 * (config["attention"] == "eager")

    first = {"lr": 1e-3, "dropout": 0.1, "warmup_ratio": 0.0, "r": 8, "batch": 2, "length": 128, "attention": "flash"}
    model, _ = fitted(memory, first, floor_bytes=1.2e9)
    assert model.predict(first) == 1.2e9
    assert model.predict({**first, "attention": "eager"}) == 1.5e9


def test_an_option_that_multiplies_the_batch_is_predicted_where_it_takes_most() -> None:
    def memory(config: Mapping[str, Any]) -> float:
        return 1e9 + 1e8 * config["batch"] * (3.0 if config["attention"] == "eager" else 1.0)

    first = {"lr": 1e-3, "dropout": 0.1, "warmup_ratio": 0.0, "r": 8, "batch": 2, "length": 128, "attention": "flash"}
    model, _ = fitted(memory, first)
    worst = {**first, "batch": 16, "attention": "eager"}
    assert model.predict(worst) == pytest.approx(memory(worst), rel=1e-6)
    assert model.predict({**first, "batch": 16}) == pytest.approx(memory({**first, "batch": 16}), rel=1e-6)


def test_the_configuration_that_was_trained_is_not_predicted_far_too_low() -> None:
    def memory(config: Mapping[str, Any]) -> float:
        return 1e9 * (1 + (config["batch"] > 2))

    first = {"lr": 1e-3, "dropout": 0.1, "warmup_ratio": 0.0, "r": 8, "batch": 4, "length": 128, "attention": "flash"}
    model, _ = fitted(memory, first)
    assert memory(first) <= model.predict(first) * 1.1 + 1.0


def test_measuring_ends_with_the_time() -> None:
    def memory(config: Mapping[str, Any]) -> float:
        raise OutOfTime

    first = {name: 8 if name != "attention" else "flash" for name in SPACE}
    exploring = Exploring(MemoryPoint(first, 1e9), SPACE, memory)
    with pytest.raises(OutOfTime):
        exploring.largest()
    assert exploring.points == [MemoryPoint(first, 1e9)]
    assert not math.isnan(exploring.points[0].peak_bytes)
