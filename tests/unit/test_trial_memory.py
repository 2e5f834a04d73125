"""The memory of a trial's parameters, counted without memory for them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from rubberband.executor.training.entrypoint import with_trial
from rubberband.executor.training.sharding import memory
from rubberband.executor.training.sharding.memory import counted
from rubberband.spec.experiment import Experiment
from rubberband.values.memory import TrialMemory
from tests.builders.experiment_words import words
from tests.builders.tables import cases
from tests.builders.trials import counted_trials

MODULE = counted_trials.__name__


def with_auto(entrypoint: Any, space: dict[str, Any], **changes: Any) -> Experiment:
    asked = {"search__space": space, "resources__gpus_per_trial": {"min": "auto"}, **changes}
    return with_trial(Experiment(**words(entrypoint=entrypoint, **asked)))


@cases("name", "parameters", "bytes_each", "in_words")
def test_the_bytes_of_a_parameter_are_those_of_its_optimizer(
    name: str, parameters: int, bytes_each: float, in_words: str
) -> None:
    found = counted(getattr(counted_trials, name), {"width": 2000})
    assert (found.parameters, found.total_bytes) == (parameters, bytes_each * parameters)
    assert found.in_words == in_words
    assert found.is_divided == (name == "Divided")


def test_the_largest_configuration_counts() -> None:
    space = {"width": {"type": "choice", "values": [8, 512, 32]}, "lr": {"type": "uniform", "lower": 0, "upper": 1}}
    found = with_auto(f"{MODULE}:Divided", space).memory
    assert isinstance(found, TrialMemory)
    assert (found.parameters, found.total_bytes, found.configurations) == (512**2, 16 * 512**2, 4)


@cases("entrypoint", "reason")
def test_parameters_that_cannot_be_counted_have_a_reason(entrypoint: Any, reason: str) -> None:
    assert with_auto(entrypoint, {"width": 8}).memory == reason


def test_a_secret_that_is_not_set_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_TOKEN", raising=False)
    found = with_auto(f"{MODULE}:Adam", {"width": 8}, resources__secrets=["NO_TOKEN"])
    assert "NO_TOKEN is not set" in str(found.memory)


def test_a_model_that_is_counted_does_not_see_the_password_of_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUBBERBAND_STORE", "postgresql://ann:s3cret@host/x")
    started = mock.Mock(return_value=mock.Mock(stdout=b'{"error": "none"}'))
    monkeypatch.setattr(memory.subprocess, "run", started)
    assert with_auto(f"{MODULE}:Momentum", {"width": 11}).memory == "none"
    assert "s3cret" not in str(started.call_args)


def test_a_model_that_takes_too_long_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LIMIT_S", 0.01)
    assert with_auto(f"{MODULE}:Momentum", {"width": 9}).memory == "building the model takes more than 0.01s"


def test_a_number_needs_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_of", None)
    asked = {"resources__gpus_per_trial": {"min": 2, "max": 2}}
    assert (
        with_trial(Experiment(**words(entrypoint=f"{MODULE}:Adam", **asked))).memory
        == "its parameters were not counted"
    )
