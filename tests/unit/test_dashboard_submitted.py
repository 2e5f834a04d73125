"""What the page says of an experiment that has not begun: what was submitted, and until when."""

from __future__ import annotations

from typing import Any

import pytest

from rubberband.api.body import read_experiment
from rubberband.api.dashboard import file_of
from rubberband.api.dashboard.experiment import facts
from rubberband.spec.experiment import Experiment
from rubberband.states import ExperimentState
from rubberband.values.submission import Submission
from tests.builders.journalled_runs import words

AT = 1_800_000_000.0
"""2027-01-15T08:00:00Z"""


def told(said: dict[str, Any]) -> dict[str, str]:
    row = Submission(name="one", state=ExperimentState.QUEUED, created_at=AT, changed_at=AT, words=said)
    return dict(facts(row, AT))


def test_code_place_search_and_limits_are_reported() -> None:
    assert told(words(entrypoint="examples.digits:DigitsTrial")) == {
        "runs": "examples.digits:DigitsTrial",
        "on": "up to 8 x p3.8xlarge (virtual)",
        "searches": "27 configurations (sha), for the highest accuracy",
        "deadline": "25m from the start",
        "max_cost": "4.00 USD",
    }


@pytest.mark.parametrize(
    ("deadline", "words_of_it"),
    [
        ("2027-01-15T08:20:00Z", "in 20m, at 08:20 UTC"),
        ("2027-01-15T07:59:00Z", "passed 1m ago, at 07:59 UTC"),
        ("2027-01-17T08:00:00Z", "in 2d, at 2027-01-17 08:00 UTC"),
        (None, "none"),
        ("whenever", "whenever"),
    ],
)
def test_a_deadline_is_shown_by_the_time_that_is_left(deadline: str | None, words_of_it: str) -> None:
    assert told({"constraints": {"deadline": deadline}})["deadline"] == words_of_it


@pytest.mark.parametrize("said", [{}, {"search": None, "resources": 3, "constraints": "x"}])
def test_unknown_values_are_left_out(said: dict[str, Any]) -> None:
    assert set(told(said)) <= {"deadline", "max_cost", "profile"}


def test_a_file_that_is_planned_again_has_its_deadline_from_the_start() -> None:
    said = words(constraints={"deadline": "2027-01-15T08:25:00.4Z", "max_cost": 4.0, "confidence": None})
    again = file_of(Submission(name="one", state=ExperimentState.DONE, created_at=AT, changed_at=AT, words=said))
    experiment = read_experiment(again.encode(), "application/yaml", [])
    assert experiment.constraints.deadline == 1500.0
    assert experiment.to_words() == Experiment(**words()).to_words()
    assert file_of(Submission(name="one", state=ExperimentState.DONE, created_at=AT, changed_at=AT)) == ""
