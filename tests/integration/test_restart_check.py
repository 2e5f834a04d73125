"""The check trains an iteration again in a fresh process, from a checkpoint, and names what differs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.builders import segments, trials
from tests.builders.checks import checked_here, compared

SEGMENT = replace(segments.SEGMENT, until_iterations=1, max_iterations=4)
FORGOTTEN = " is another one after a restart, as at each SYNC; return what training changes in attributes"


@pytest.mark.by_default(4)
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("Schedule", FORGOTTEN),
        ("Augmented", FORGOTTEN),
        ("Ordered", " follows the order of a set, or hash(): another PYTHONHASHSEED gives another one"),
        ("Clocked", "not repeatable: two runs from one seed differ in model['layer.weight']"),
        ("Annealed", FORGOTTEN),
        ("Generating", FORGOTTEN),
        ("Forgotten", FORGOTTEN),
    ],
)
def test_a_trial_that_a_restart_changes_is_named_in_one_line(name: str, line: str) -> None:
    found, (remark,) = compared(f"restart_trials:{name}", is_gang=False)
    assert not found
    assert line in remark
    assert "model['layer." in remark
    assert "\n" not in remark


@pytest.mark.by_default(2)
@pytest.mark.parametrize("name", ["KeptSchedule", "Reseeded", "Buffered", "Derived"])
def test_a_trial_that_restarts_exactly_passes(name: str) -> None:
    problems, found = checked_here(trials.entrypoint(f"restart_trials:{name}"), SEGMENT)
    assert not problems
    assert not found["remarks"]
    assert found["seconds"]["restart"] > 0.0


def test_a_restart_that_changes_a_trial_is_a_problem_where_gangs_change() -> None:
    (problem,), found = checked_here(trials.entrypoint("restart_trials:Annealed"), SEGMENT, max_gpus=2)
    assert problem.line.startswith("gang: model['layer.weight']")
    assert FORGOTTEN in problem.line
    assert not found["remarks"]
