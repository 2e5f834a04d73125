"""What a line of the list of experiments says."""

from __future__ import annotations

from typing import Any

import pytest

from rubberband.api.dashboard import CHOICES, Row, ago, counted_choices, instant, row
from rubberband.api.dashboard.sentences import sentence
from rubberband.states import ExperimentState
from rubberband.values.submission import Submission, Summary
from rubberband.views.experiment import experiment_view
from rubberband.views.live.status import headline

NOW = 10_000.0
BEGUN: dict[str, Any] = {
    "trials": 16,
    "stages": 4,
    "stage": 1,
    "iterations": 30,
    "target_iterations": 120,
    "started_at": NOW - 100.0,
    "planned_jct_s": 300.0,
    "forecast_jct_s": 320.0,
    "deadline_s": 400.0,
    "cost_usd": 0.25,
    "max_cost_usd": 1.0,
    "metric": "accuracy",
    "best_value": 0.912345678,
}


def line(state: str = "running", *, words: dict[str, Any] | None = None, reason: str = "", **changes: Any) -> Row:
    summary = Summary(**(BEGUN | changes)) if state not in ("queued", "starting") else Summary()
    submission = Submission(
        name="digits",
        state=ExperimentState(state),
        created_at=NOW - 130.0,
        changed_at=NOW,
        words=words or {},
        reason=reason,
        summary=summary,
    )
    return row(submission, NOW)


def test_a_running_experiment_shows_where_it_is_and_what_it_spent() -> None:
    told = line()
    assert (told.share, told.progress) == (0.25, "stage 1 (2 of 4), 30 of 120 iterations")
    assert (told.cost, told.cap, told.spent) == ("0.2500", "1.00", 0.25)
    assert line(planned_cost_usd=1.2).cost == "0.25", "as the page and the terminal tell it"
    assert told.best == "accuracy 0.912346"
    assert (told.slack, told.mood) == ("1m20s to spare", "good")
    assert (told.at, told.began) == (NOW - 100.0, True)


@pytest.mark.parametrize(
    ("forecast_s", "slack", "mood"),
    [(390.0, "10s to spare", "warn"), (400.0, "on time", "warn"), (460.0, "1m late", "bad")],
)
def test_the_slack_is_between_the_expected_end_and_the_deadline(forecast_s: float, slack: str, mood: str) -> None:
    told = line(forecast_jct_s=forecast_s)
    assert (told.slack, told.mood) == (slack, mood)


def test_a_run_past_its_deadline_is_late_despite_its_forecast() -> None:
    assert line(started_at=NOW - 500.0).slack == "1m40s late"


def test_an_ended_run_is_measured_by_its_own_end() -> None:
    told = line("done", jct_s=390.0, forecast_jct_s=None, started_at=NOW - 5000.0)
    assert (told.slack, told.mood, told.share) == ("10s to spare", "good", 1.0)
    assert told.progress == "4 stages, 16 trials"


def test_a_run_that_ended_otherwise_says_why_and_shows_no_slack() -> None:
    told = line("budget", reason="max_cost 1.00 USD is spent;\nextend it")
    assert (told.slack, told.reason) == ("", "max_cost 1.00 USD is spent; extend it")


def test_a_run_before_its_start_has_its_cap_from_the_file() -> None:
    told = line("queued", words={"constraints": {"max_cost": 4}})
    assert (told.progress, told.cap, told.spent, told.share) == ("waits for a free slot", "4.00", 0.0, 0.0)
    assert (told.at, told.began) == (NOW - 130.0, False)


def test_a_queued_run_that_waits_for_money_says_so_in_every_view() -> None:
    why = "it waits for money: budget of ann: 0.35 USD of 0.30 USD are spent or planned this month"
    told = line("queued", reason=why)
    assert (told.progress, told.reason) == ("waits", why)
    waiting = Submission(name="one", state=ExperimentState.QUEUED, created_at=0.0, changed_at=0.0, reason=why)
    assert sentence(waiting, None) == f"I{why[1:]}."
    assert headline(experiment_view(waiting)) == f"one: queued: {why}"


def test_without_a_deadline_or_a_cap_there_is_none() -> None:
    told = line(deadline_s=None, max_cost_usd=None)
    assert (told.slack, told.cap, told.spent) == ("no deadline", "", None)


def test_every_state_is_in_one_list_besides_all() -> None:
    found = [state for _, states in CHOICES.values() if states for state in states]
    assert sorted(found) == sorted(ExperimentState)


@pytest.mark.parametrize(
    ("passed_s", "words"),
    [(-5, "just now"), (9, "just now"), (59, "59s ago"), (61, "1m ago"), (7300, "2h ago"), (200_000, "2d ago")],
)
def test_how_long_ago(passed_s: float, words: str) -> None:
    assert ago(NOW - passed_s, NOW) == words


def test_an_instant_is_in_utc() -> None:
    assert instant(0.9) == "1970-01-01T00:00:00Z"


def test_a_late_action_is_not_reported_as_done() -> None:
    assert line("done", jct_s=390.0).badge == ("done", "done")
    assert line("done", jct_s=410.0).badge == ("late", "done, late")


def test_every_choice_is_counted() -> None:
    counts = counted_choices({"running": 2, "queued": 1, "failed": 3, "done": 4})
    assert counts == {"all": 10, "active": 3, "done": 4, "stopped": 0, "attention": 3}
