"""The checkpoint of a trial's best evaluated iteration, kept beside the latest two."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rubberband.errors import InputError
from rubberband.executor import DiscardCheckpoint, Result, StartTrial, TrialReported, TrialStopRequested, summarise
from rubberband.values.plan import Plan, Stage
from rubberband.views.report.page import render_html
from tests.builders.jobs import JOB
from tests.builders.stories import Story, begun, checkpoint
from tests.unit.test_controller_checkpoints import SETUP, lose

JOB_OF_ONE = replace(
    JOB, stages=(Stage(trials=4, iterations=9),), plan=Plan(stages=JOB.plan.stages[:1]), max_failures=1
)
LONG = replace(JOB_OF_ONE, keep_best=True)


def scored(story: Story, *scores: float) -> list[str]:
    """Report for trial 3; return what is deleted."""
    orders = [order for score in scores for order in story.report(3, score)]
    return [order.checkpoint.url for order in orders if isinstance(order, DiscardCheckpoint)]


def kept(story: Story) -> list[int]:
    return [iterations for _, iterations in story.state.trials[3].kept()]


def result_of(story: Story) -> Result:
    return summarise(story.state, SETUP, story.at)


def test_the_best_iteration_stays_beside_the_latest_two() -> None:
    story = begun(LONG)
    assert scored(story, 0.5, 0.9, 0.3, 0.4, 0.2) == ["3/1", "3/3"]
    assert kept(story) == [5, 4, 2]
    assert scored(story, 0.95) == ["3/4", "3/2"]
    assert kept(story) == [6, 5]
    assert scored(story, 0.1, 0.1) == ["3/5"]
    assert kept(story) == [8, 7, 6]


def test_without_the_word_only_two_are_kept() -> None:
    story = begun(JOB_OF_ONE)
    assert scored(story, 0.5, 0.9, 0.3, 0.4) == ["3/1", "3/2"]
    assert kept(story) == [4, 3]


def test_the_first_of_equal_results_is_the_best_and_an_iteration_without_one_never_is() -> None:
    story = begun(LONG)
    scored(story, 0.9, 0.9)
    attempt = story.state.trials[3].attempt
    story.tell(
        TrialReported, trial=3, attempt=attempt, iterations=3, metrics={"loss": 1.0}, checkpoint=checkpoint(3, 3)
    )
    scored(story, 0.9)
    assert kept(story) == [4, 3, 1]


def test_where_the_latest_two_are_lost_the_best_one_is_gone_back_to() -> None:
    story = begun(LONG)
    scored(story, 0.5, 0.9, 0.3, 0.4, 0.2)
    lose(story, 3)
    assert kept(story) == [4, 2]
    orders = lose(story, 3)
    trial = story.state.trials[3]
    assert (trial.iterations, kept(story), len(trial.reports)) == (2, [2], 2)
    (start,) = [order for order in orders if isinstance(order, StartTrial)]
    assert (start.checkpoint, start.from_iterations) == (checkpoint(3, 2), 2)
    lose(story, 3)
    assert (trial.iterations, kept(story), trial.best) == (0, [], None)


def test_a_lost_best_one_is_followed_by_the_best_that_is_left() -> None:
    story = begun(LONG)
    scored(story, 0.5, 0.9)
    lose(story, 3)
    trial = story.state.trials[3]
    assert (kept(story), trial.best_iterations) == ([1], 1)
    assert scored(story, 0.3, 0.2, 0.1) == ["3/2"]
    assert kept(story) == [4, 3, 1]


def test_a_trial_that_is_stopped_keeps_its_latest_and_its_best() -> None:
    story = begun(LONG)
    scored(story, 0.9, 0.3, 0.4, 0.2)
    assert kept(story) == [4, 3, 1]
    orders = story.tell(TrialStopRequested, request="r", trial=3)
    assert [order.checkpoint.url for order in orders if isinstance(order, DiscardCheckpoint)] == ["3/3"]
    assert kept(story) == [4, 1]


def test_the_result_hands_over_the_best_iteration_or_says_in_a_line_that_it_was_not_kept() -> None:
    story = begun(LONG)
    scored(story, 0.5, 0.9, 0.3, 0.4, 0.2)
    result = result_of(story)
    best = result.best_at("best")
    assert (best.trial, best.iterations, best.metrics["score"]) == (3, 2, 0.9)
    assert best.checkpoint == checkpoint(3, 2)
    assert [(saved.iterations, saved.best) for saved in result.trials[3].checkpoints] == [
        (5, False),
        (4, False),
        (2, True),
    ]
    assert result.best_at(4).iterations == 4
    assert result.best_at().iterations == 5
    with pytest.raises(InputError, match=r"^iteration 3: its checkpoint was not kept \(kept: 5 and 4 and 2\)$"):
        result.best_at(3)
    assert Result.from_json(result.to_json()) == result
    assert render_html(result)

    story = begun(JOB_OF_ONE)
    scored(story, 0.5, 0.9, 0.3, 0.4)
    why = (
        r"^trial 3 was best after 2 iterations: its checkpoint was not kept \(kept: 4 and 3\); set resources.keep: best"
    )
    with pytest.raises(InputError, match=why):
        result_of(story).best_at("best")
