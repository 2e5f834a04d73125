"""The space of a define-by-run function of Optuna."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rubberband.errors import InputError
from rubberband.integrations.ray_tune_options import space_of_function
from rubberband.spec.samplers import sample
from rubberband.spec.space import choice, loguniform, quniform, randint, uniform


def nested(trial: Any) -> dict[str, Any]:
    """Parameters that depend on a choice, which may depend on another."""
    trial.suggest_float("width", 0, 20)
    if trial.suggest_categorical("kind", ["linear", "deep"]) == "deep":
        trial.suggest_int("depth", 1, 4)
        if trial.suggest_categorical("norm", ["batch", "none"]) == "batch":
            trial.suggest_float("momentum", 0.1, 0.9, step=0.1)
    trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    return {"epochs": 9}


def test_parameters_that_follow_a_choice_belong_to_its_options():
    deep = {"depth": randint(1, 5), "norm": choice([{"name": "batch", "space": {"momentum": MOMENTUM}}, "none"])}
    assert space_of_function(nested) == {
        "kind": choice(["linear", {"name": "deep", "space": deep}]),
        "width": uniform(0, 20),
        "lr": loguniform(1e-4, 1e-1),
        "epochs": 9,
    }
    drawn = sample(space_of_function(nested), "random", 50, 0)
    assert all(("momentum" in each) == (each.get("norm") == "batch") for each in drawn)


MOMENTUM = quniform(0.1, 0.9, 0.1)


def plain(trial: Any) -> None:
    """A space without conditions."""
    trial.suggest_categorical("batch", [16, 32])
    trial.suggest_categorical("flag", [True, None])


def test_a_function_without_conditions_is_a_flat_space():
    assert space_of_function(plain) == {"batch": choice([16, 32]), "flag": choice([True, None])}


def by_number(trial: Any) -> None:
    """As many parameters as a number says."""
    for layer in range(trial.suggest_int("layers", 1, 3)):
        trial.suggest_int(f"units_{layer}", 8, 64)


def by_two(trial: Any) -> None:
    """A parameter that follows from two choices together."""
    one, other = trial.suggest_categorical("one", ["a", "b"]), trial.suggest_categorical("other", ["a", "b"])
    if one == other == "b":
        trial.suggest_float("both", 0, 1)


def by_flag(trial: Any) -> None:
    """A choice whose option with parameters is no text."""
    if trial.suggest_categorical("flag", [False, True]):
        trial.suggest_float("rate", 0, 1)


def by_range(trial: Any) -> None:
    """A range that follows from a choice."""
    trial.suggest_float("rate", 0, 10 if trial.suggest_categorical("kind", ["low", "high"]) == "high" else 1)


def unequal(trial: Any) -> dict[str, Any]:
    """Other constants for other trials."""
    return {"epochs": 9 if trial.suggest_categorical("kind", ["short", "long"]) == "short" else 90}


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (by_number, "by_number: which parameters a trial has depends on more than a choice"),
        (by_two, "by_two: which parameters a trial has depends on more than a choice"),
        (by_flag, "by_flag: the option True of flag has parameters of its own; name it by a text"),
        (by_range, "by_range: rate has other bounds for other trials; give it another name in each case"),
        (unequal, "unequal returns other constants for other trials; suggest them instead"),
    ],
)
def test_a_space_that_cannot_be_written_is_refused(function, line):
    with pytest.raises(InputError, match=re.escape(line)):
        space_of_function(function)
