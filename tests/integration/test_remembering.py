"""The check names attributes that training changes and no checkpoint holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.builders import segments, trials
from tests.builders.checks import checked_here

SEGMENT = replace(segments.SEGMENT, until_iterations=1, max_iterations=4)


@pytest.mark.parametrize(
    ("name", "words", "fix"),
    [
        (
            "Annealed",
            "Counting.beta, Counting.passes: training changes these attributes, and no checkpoint",
            "register_buffer",
        ),
        ("Best", "Best.best: ", "load_state_dict()"),
        ("Schedule", "Schedule.kept: ", "load_state_dict()"),
        ("Scaler", "Scaler.kept: ", "load_state_dict()"),
        ("Averaged", "Averaged.kept: ", "load_state_dict()"),
        ("Shadow", "Shadow.kept: ", "load_state_dict()"),
        ("Generating", "Generating.kept: ", "load_state_dict()"),
        ("Forgotten", "Forgotten.kept: ", "load_state_dict()"),
        ("Augmented", "Noise.generator: ", "without a generator"),
        *((name, "", "") for name in ("KeptSchedule", "Reseeded", "Buffered", "Kept", "Derived")),
    ],
)
def test_attributes_that_begin_anew_after_a_restore_are_named_and_others_are_not(
    name: str, words: str, fix: str
) -> None:
    problems, found = checked_here(trials.entrypoint(f"remembering_trials:{name}"), SEGMENT)
    assert not problems
    assert len(found["remarks"]) == (words != "")
    for remark in found["remarks"]:
        assert remark.startswith(words)
        assert fix in remark
        if name != "Annealed":
            assert "training changes this attribute, and no checkpoint has the value, so it begins anew" in remark


def test_a_difference_of_a_gang_names_the_attribute_that_counts() -> None:
    (problem,), _ = checked_here(trials.entrypoint("remembering_trials:Annealed"), SEGMENT, max_gpus=2)
    assert "Counting.passes" in problem.line
    assert "register_buffer" in problem.line
    assert "return means" not in problem.line
