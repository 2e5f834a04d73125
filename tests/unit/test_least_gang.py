"""The fewest GPUs of a trial: those of the file, or where the profile starts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rubberband.errors import InputError
from rubberband.planning.candidates import candidates
from rubberband.running.check import widest_gang
from rubberband.spec.experiment import Experiment
from tests.builders.experiment_words import words
from tests.builders.tables import cases

NOW = 0.0


def experiment(profile: dict[int, float], **changes: Any) -> Experiment:
    plain = {"resources": {"provider": "virtual", "instance_type": "p3.16xlarge", "max_instances": 4}}
    return Experiment(**words(**plain, profile={"seconds_per_iteration": profile}, **changes))


def limits(found: Experiment) -> tuple[int, int]:
    profile = found.loaded_profile()
    assert profile is not None
    constraints = candidates(found, profile, NOW)[0].constraints
    return constraints.min_gpus_per_trial, constraints.max_gpus_per_trial


@cases("starts", "asked", "least", "most")
def test_a_profile_that_starts_at_several_gpus_sets_the_least_gang(
    starts: int, asked: dict[str, Any], least: int, most: int
) -> None:
    found = experiment({starts: 10.0, 2 * starts: 6.0}, resources__gpus_per_trial=asked)
    assert limits(found) == (least, most)
    assert widest_gang(found, None, found.loaded_profile()) == most


@cases("changes", "reason")
def test_a_gang_below_the_profiles_first_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(reason)}$"):
        limits(experiment({16: 5.0}, **changes))


def test_a_function_has_no_gang_that_a_profile_could_start_at() -> None:
    with pytest.raises(InputError, match=r"starts at 16 GPUs, and a function has 1; write @rubberband.distributed"):
        limits(experiment({16: 5.0}).of_function())
