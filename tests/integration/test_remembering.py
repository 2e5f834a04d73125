"""The check names plain attributes that training changes and no checkpoint holds."""

from __future__ import annotations

import os
from typing import Any

import pytest

from rubberband.running.check import CheckReport, check_experiment
from rubberband.spec.experiment import Experiment
from tests.builders import trials


def checked(name: str, gpus: int = 1) -> CheckReport:
    search: dict[str, Any] = {
        "space": {"x": {"type": "uniform", "lower": 1, "upper": 2}},
        "scheduler": {"type": "sha", "num_samples": 4, "grace_period": 1, "max_t": 4, "reduction_factor": 2},
        "metric": "loss",
        "mode": "min",
    }
    resources = {"gpus_per_instance": gpus, "price_per_hour": 1, "gpus_per_trial": {"max": gpus}}
    experiment = Experiment(name="test", entrypoint=f"remembering_trials:{name}", search=search, resources=resources)
    with open(os.devnull, "wb") as nothing:
        return check_experiment(experiment, search_path=(trials.FOLDER,), limit_s=120.0, output=nothing)


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "Annealed",
            "Counting.beta, Counting.passes: training changes these attributes, and no checkpoint",
        ),
        (
            "Best",
            "Best.best: training changes this attribute, and no checkpoint has the value, so it begins anew",
        ),
    ],
)
def test_an_attribute_that_begins_anew_after_a_restore_is_named(name: str, words: str) -> None:
    report = checked(name)
    assert report.ok, report.problems
    (remark,) = report.remarks
    assert words in remark
    assert ("register_buffer" if name == "Annealed" else "load_state_dict()") in remark


@pytest.mark.by_default(2)
@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("Schedule", "Schedule.kept"),
        ("Augmented", "Noise.generator"),
        ("Averaged", "Averaged.kept"),
        ("Shadow", "Shadow.kept"),
        ("Scaler", "Scaler.kept"),
        ("Generating", "Generating.kept"),
        ("Forgotten", "Forgotten.kept"),
    ],
)
def test_an_object_whose_state_begins_anew_after_a_restore_is_named(name: str, place: str) -> None:
    report = checked(name)
    assert report.ok, report.problems
    (remark,) = report.remarks
    assert remark.startswith(f"{place}: training changes this attribute, and no checkpoint has the value")
    assert ("without a generator" if name == "Augmented" else "load_state_dict()") in remark


@pytest.mark.by_default(1)
@pytest.mark.parametrize("name", ["KeptSchedule", "Reseeded", "InAttribute", "Buffered", "Kept", "Derived"])
def test_attributes_that_are_restored_or_set_anew_get_no_remark(name: str) -> None:
    report = checked(name)
    assert report.ok, report.problems
    assert not report.remarks


@pytest.mark.long
def test_a_difference_of_a_gang_names_the_attribute_that_counts() -> None:
    (problem,) = checked("Annealed", gpus=2).problems
    assert "Counting.passes" in problem.line
    assert "register_buffer" in problem.line
    assert "return means" not in problem.line
