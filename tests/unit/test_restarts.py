"""The verdict on a second start, by the metrics of an unbroken run."""

from __future__ import annotations

from typing import Any

import pytest

from rubberband.executor.training.restarts import AGAIN, EVALUATES, EXACTLY, Restart, later_numbers, of_restart

CURVE = (0.9, 0.5, 0.4, 0.41)


def judged(found: float | None, saved: int = 2, curve: tuple[float, ...] = CURVE, **words: Any) -> Restart:
    metrics = None if found is None else {"loss": found}
    words = {name: {"loss": each} if isinstance(each, float) else each for name, each in words.items()}
    return of_restart("loss", "program", [{"loss": each} for each in curve], saved, metrics, **words)


@pytest.mark.parametrize(
    ("found", "words", "line", "resumes"),
    [
        (0.4, {}, EXACTLY, True),
        (0.41, {}, "resumes; other random numbers (loss 0.41 for 0.4)", True),
        (0.4000001, {}, "resumes; other random numbers (loss 0.4000001 for 0.4)", True),
        (0.4, {"how": "again"}, AGAIN, False),
        (None, {"how": "again"}, AGAIN, False),
        (0.9, {"is_sure": False}, AGAIN, False),
        (0.4, {"how": "evaluates", "at_start": 0.5}, EVALUATES, True),
        (0.4, {"how": "numbers"}, EXACTLY, True),
        (0.5, {}, "evaluates again after a restart: counted twice (loss 0.5)", True),
        (0.42, {"is_sure": False}, "resumes, as far as is known (loss 0.42 for 0.4)", True),
        (0.7, {"is_sure": False}, "not known whether it resumes (loss 0.7 for 0.4): print the epoch beside the", None),
    ],
)
def test_a_restart_has_one_line(found: float | None, words: dict[str, Any], line: str, resumes: bool | None) -> None:
    restart = judged(found, **words)
    assert (restart.line[: len(line)], restart.resumes, restart.problem) == (line, resumes, "")


@pytest.mark.parametrize(
    ("found", "words", "problem"),
    [
        (None, {}, "ends without a report, and an unbroken run goes on"),
        (
            0.4,
            {"how": "evaluates", "at_start": 5.0},
            "evaluates what it has loaded as loss 5 for 0.5: the restart changes it",
        ),
        (0.88, {"fresh": 0.9}, "reports loss 0.88 for 0.4 of an unbroken run: the restart changes it"),
        (90.0, {"fresh": 0.9}, "reports loss 90 for 0.4 of an unbroken run"),
        (0.0, {"fresh": 1.0, "curve": (1.0, 1.0, 1.0)}, "reports loss 0 for 1 of an unbroken run"),
    ],
)
def test_a_metric_that_a_restart_changes_is_a_problem(found: float | None, words: Any, problem: str) -> None:
    assert judged(found, **words).problem.startswith(
        f"started again from the checkpoint of 2 iterations, the program {problem}"
    )


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (9.0, {"curve": (20.0, 25.0, 25.0), "fresh": 22.0}),  # rewards are noisy
        (0.4, {"how": "evaluates", "at_start": 0.2, "curve": (2.3, 2.3, 0.5)}),  # the mean of an epoch, and its end
        (None, {"saved": 4}),
        (None, {"how": "again"}),
    ],
)
def test_a_difference_that_may_be_chance_is_no_problem(found: float | None, words: dict[str, Any]) -> None:
    assert judged(found, **words).problem == ""


def test_a_start_begins_behind_another_one() -> None:
    assert later_numbers({"epoch": 4, "step": 90}, {"epoch": 1, "step": 30}, 3) == {"epoch": 4}
    assert later_numbers({"epoch": 9}, {"epoch": 1}, 3) == {}
    assert later_numbers({"epoch": 1}, {"epoch": 1}, 3) == {}
