"""What an experiment's page says: it fits the result and the state, and nobody who sorts or filters loses a trial."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rubberband.api.dashboard import trials_table
from rubberband.api.dashboard.experiment_texts import cards, sentence, stage_rows, troubles
from rubberband.api.dashboard.listing import badge
from rubberband.api.dashboard.trials_table import PAGE_SIZE, Asked, TrialTable, table_page
from rubberband.executor import Result
from rubberband.states import ExperimentState
from rubberband.values.submission import Submission, Summary
from rubberband.views.story import story
from tests.builders.adaptive_runs import adaptive_result
from tests.builders.results import EVERY_RESULT, a_job, a_result, cut_short

RUNNING, DONE = ExperimentState.RUNNING, ExperimentState.DONE


def submission(state: ExperimentState = RUNNING, reason: str = "", **summary: Any) -> Submission:
    found = Summary(**{"started_at": 1000.0, "stages": 3} | summary)
    return Submission(name="digits", state=state, created_at=1000.0, changed_at=1000.0, reason=reason, summary=found)


@pytest.mark.parametrize("state", [ExperimentState.QUEUED, ExperimentState.STARTING])
def test_a_run_about_to_restart_says_so_and_shows_no_old_forecast(state: ExperimentState) -> None:
    result = cut_short(30, job=a_job(deadline_s=300.0), cancel=True)
    known = submission(state, reason="it was killed", forecast_jct_s=result.actual_jct_s)
    text = sentence(known, result)
    assert "resumes from its checkpoints" in text
    assert text.endswith("It was killed.")
    assert not [note for card in cards(known, result) for note in card.notes if "forecast" in note]


def test_a_reason_is_reported_once() -> None:
    result = dataclasses.replace(a_result(), outcome="failed", reason="the disk is full")
    found = sentence(submission(ExperimentState.FAILED, reason="the disk is full"), result)
    assert found.lower().count("the disk is full") == 1


def test_a_run_that_ended_after_its_deadline_is_late() -> None:
    assert badge(submission(DONE, deadline_s=1.0, jct_s=2.0)) == ("late", "done, late")
    assert badge(submission(DONE, deadline_s=2.0, jct_s=1.0)) == ("done", "done")


@pytest.mark.parametrize("which", list(EVERY_RESULT))
@pytest.mark.parametrize("state", [RUNNING, DONE])
def test_any_result_has_cards_stages_history_and_trials(which: str, state: ExperimentState) -> None:
    result = EVERY_RESULT[which]()
    gauges = [card.gauge for card in cards(submission(state), result) if card.gauge]
    assert all(0 <= gauge.done <= 1 for gauge in gauges)
    assert all(0 <= row.share <= 1 for row in stage_rows(result))
    assert len(stage_rows(result)) == len(result.stages)
    happened = [entry.at_s for entry in story(result)]
    assert happened == sorted(happened)
    assert len(table_page(result, Asked()).rows) == len(result.trials)


def test_a_cap_that_is_passed_is_shown_by_its_gauge() -> None:
    cost = cards(submission(DONE), dataclasses.replace(a_result(), max_cost_usd=0.001))[1]
    assert cost.gauge is not None
    assert cost.gauge.over
    assert cost.gauge.done == 1.0


def test_after_a_gap_everything_is_reported_when_it_was() -> None:
    result = a_result(a_job(replan=True))
    first, second, *rest = result.stages
    gone_s = 60.0
    moved = [dataclasses.replace(stage, start_s=(stage.start_s or 0.0) + gone_s) for stage in (second, *rest)]
    resumed_s = ((first.actual_s or 0.0) + gone_s,)
    late = dataclasses.replace(result, stages=(first, *moved), resumed_s=resumed_s)
    before = [entry.at_s for entry in story(result) if entry.kind == "sync"]
    after = [entry.at_s for entry in story(late) if entry.kind == "sync"]
    assert after == pytest.approx([before[0], before[1] + gone_s, before[2] + gone_s])
    assert [entry.at_s for entry in story(late) if entry.kind == "resumed"] == list(resumed_s)


def numbers(page: TrialTable) -> list[int]:
    return [row.trial for row in page.rows]


def many(count: int) -> Result:
    result = a_result()
    made = tuple(
        dataclasses.replace(result.trials[0], trial=n, configuration={"lr": (n * 7919) % count, "same": "x"})
        for n in range(count)
    )
    return dataclasses.replace(result, trials=made, busy=())


@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize("key", ["trial", "metric", "iterations", "status", "cost", ".lr", ".n"])
def test_every_column_sorts_both_ways(key: str, down: bool) -> None:
    result = a_result()
    page = table_page(result, Asked(sort=key, down=down))
    assert sorted(numbers(page)) == list(range(12))
    chosen = next(column for column in page.columns if column.sorted)
    assert chosen.sorted == ("descending" if down else "ascending")
    assert f"down={int(not down)}" in chosen.address or down
    if key == ".lr":
        assert numbers(page) == (list(range(12)) if down else list(range(11, -1, -1)))


def test_every_other_view_of_the_trials_begins_on_its_first_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials_table, "PAGE_SIZE", 2)
    page = table_page(a_result(), Asked(page=4, brush=(("lr", 0.0, 1.0),)))
    assert "page=3" in page.before
    assert "page=5" in page.after
    others = [page.clear, *(each.address for each in (*page.columns, *page.choices))]
    assert not [address for address in others if "page=" in address]


def test_values_of_mixed_kinds_sort_numbers_first_and_missing_last() -> None:
    result = a_result()
    values: list[Any] = [3, None, "b", 1.5, float("nan"), "a", True, [1], 0, -2, "c", {}]
    trials = tuple(
        dataclasses.replace(trial, configuration={"k": value})
        for trial, value in zip(result.trials, values, strict=True)
    )
    order = numbers(table_page(dataclasses.replace(result, trials=trials), Asked(sort=".k")))
    assert order[:4] == [9, 8, 3, 0]
    assert set(order[-2:]) == {1, 4}


def test_trials_are_shown_by_status_with_counts() -> None:
    result = a_result()
    page = table_page(result, Asked(status="stopped"))
    assert {row.status for row in page.rows} == {"stopped"}
    assert [(choice.title, choice.count) for choice in page.choices] == [("All", 12), ("winner", 1), ("stopped", 11)]
    assert [choice.title for choice in page.choices if choice.chosen] == ["stopped"]


def test_thousands_of_trials_come_in_pages() -> None:
    result = many(3000)
    first, last = table_page(result, Asked()), table_page(result, Asked(page=120))
    assert first.shown == f"1 to {PAGE_SIZE} of 3,000 trials"
    assert (first.before, last.after) == ("", "")
    assert "page=2" in first.after
    assert len({row.trial for row in [*first.rows, *last.rows]}) == 2 * PAGE_SIZE


@pytest.mark.parametrize("asked", [Asked(page=10**6), Asked(sort="no such"), Asked(status="no such"), Asked(page=0)])
def test_an_unreachable_source_is_ignored(asked: Asked) -> None:
    page = table_page(a_result(), asked)
    assert len(page.rows) == 12
    assert not [column for column in page.columns if column.sorted]


def test_parameters_that_differ_come_before_those_that_do_not() -> None:
    titles = [column.title for column in table_page(a_result(a_job(), None, fixed=1), Asked()).columns]
    assert titles == ["trial", "score", "iterations", "status", "lr", "n", "fixed", "share (USD)"]


def test_addresses_keep_what_else_was_asked() -> None:
    page = table_page(many(300), Asked(sort=".lr", down=True, status="stopped"))
    assert "sort=.lr" in page.after
    assert "down=1" in page.after
    assert "status=stopped" in page.after


def test_batches_that_adapt_are_columns() -> None:
    titles = [column.title for column in table_page(adaptive_result(), Asked()).columns]
    assert titles[4:6] == ["batch size", "efficiency"]
    by_batch = table_page(adaptive_result(), Asked(sort="batch", down=True))
    assert by_batch.rows[0].cells[3].startswith("64 -> ")
    assert "batch size" not in [column.title for column in table_page(a_result(), Asked()).columns]


def test_causes_that_differ_in_numbers_are_one() -> None:
    result = a_result()
    trials = tuple(
        dataclasses.replace(
            trial, status="failed", failure=f"raised: ValueError: size {trial.trial} at 0x{trial.trial:x}"
        )
        for trial in result.trials[:3]
    )
    found = troubles(dataclasses.replace(result, trials=(*trials, *result.trials[3:])))
    (one,) = found
    assert (one.what, one.why) == ("3 of 12 trials failed", "ValueError: size … at … (lr > 0.025)")
    assert one.trials == (0, 1, 2)


def test_many_causes_are_counted() -> None:
    result = a_result()
    trials = tuple(
        dataclasses.replace(trial, status="failed", failure=f"raised: {'abcdef'[min(trial.trial, 5)]}", failures=4)
        for trial in result.trials
    )
    found = troubles(dataclasses.replace(result, trials=trials))
    assert found[0].what == "7 of 12 trials failed"
    assert (found[0].why, found[0].trials) == ("f", (5, 6, 7, 8, 9, 10, 11))
    assert [found[-1].what, found[-1].why] == ["3 of 12 trials failed", "for 3 other causes"]


def test_ranges_of_an_axis_leave_the_trials_that_pass_through_them() -> None:
    result = a_result()
    every = table_page(result, Asked())
    half = table_page(result, Asked(brush=(("score", 0.5, 1.0),)))
    assert 0 < len(half.rows) < len(every.rows)
    assert {row.trial for row in half.rows} | {
        row.trial for row in table_page(result, Asked(brush=(("score", 0.0, 0.5),))).rows
    } == {row.trial for row in every.rows}
    assert "brush=score%3A50-100" in half.columns[0].address
    assert "brush" not in half.clear
    assert len(table_page(result, Asked(brush=(("nothing", 0.5, 1.0),))).rows) == len(every.rows), (
        "an unknown axis has no effect"
    )
