"""How an experiment stands, in lines."""

from __future__ import annotations

from typing import Any

import pytest

from rubberband.views.live.status import headline, lines


def view(state: str) -> dict[str, Any]:
    summary = {
        "started_at": 1000.0,
        "ended_at": None,
        "stage": 1,
        "stages": 3,
        "jct_s": 20.0,
        "deadline_s": 60.0,
        "planned_jct_s": 50.0,
        "forecast_jct_s": 40.0,
        "cost_usd": 0.5,
        "max_cost_usd": 2.0,
        "planned_cost_usd": 1.0,
        "forecast_cost_usd": 0.9,
        "iterations": 4,
        "target_iterations": 88,
        "trials": 36,
        "instances": 2,
        "best_value": None,
    }
    return {"name": "digits", "state": state, "reason": "", "slack_s": 20.0, "summary": summary}


def test_the_stage_is_the_one_that_the_table_has() -> None:
    assert headline(view("running")) == "digits: runs, stage 1 (2 of 3)"


@pytest.mark.parametrize(
    ("state", "spare"), [("running", True), ("done", True), ("cancelled", False), ("failed", False)]
)
def test_time_is_left_only_to_what_comes_to_its_end(state: str, spare: bool) -> None:
    assert ("20s to spare" in lines(view(state))[1]) == spare


def test_money_is_reported_with_its_limit() -> None:
    assert lines(view("running"))[2] == "cost      0.50 of 2.00 USD (max_cost); forecast 0.90; planned 1.00"


def test_why_it_was_interrupted_is_reported_once() -> None:
    told = headline(view("interrupted") | {"reason": "its process has ended; resume it to continue"})
    assert told == "digits: interrupted: its process has ended; resume it to continue"
