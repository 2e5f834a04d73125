"""What commands show of pools, running experiments and asynchronous trials."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from rubberband.cloud.pool import Pool, PoolLimits
from rubberband.cloud.pool.server import snapshot
from rubberband.cloud.virtual import VirtualClock, VirtualProvider
from rubberband.executor import TrialReported
from rubberband.executor.profiling.points import UpdateReports
from rubberband.planner.sharing import Calendar, Span
from rubberband.pools.report import (
    autoscaled_words,
    colours_of,
    experiments_table,
    money_table,
    promises_chart,
    render_pool,
)
from rubberband.values.asynchronous import AsyncUse
from rubberband.views.live.status import headline, lines, story_table
from rubberband.views.report.tables import update_line
from tests.builders.memory import MemoryPoolJournal
from tests.builders.pools import OFFER, lending_pool
from tests.builders.results import UPDATES
from tests.builders.tables import cases


def view(state: str) -> dict[str, Any]:
    summary = {
        "started_at": 1000.0,
        "ended_at": None,
        "stage": 1,
        "stages": 3,
        "jct_s": 20.0,
        "deadline_s": 60.0,
        "deadline": "1m",
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


@cases("name")
def test_a_figure_that_is_0_is_a_known_one(name: str) -> None:
    def shown_with(value: float | None) -> list[str]:
        shown = view("running")
        shown["summary"] |= {"metric": "score", "best_trial": 3, name: value}
        return lines(shown)

    assert shown_with(0) != shown_with(None)


def test_the_stage_is_the_one_that_the_table_has() -> None:
    assert headline(view("running")) == "digits: runs, stage 1 (2 of 3)"


@pytest.mark.parametrize(
    ("state", "spare"), [("running", True), ("done", True), ("cancelled", False), ("failed", False)]
)
def test_time_is_left_only_to_what_comes_to_its_end(state: str, spare: bool) -> None:
    assert ("20s to spare" in lines(view(state))[1]) == spare


def test_a_running_one_says_when_it_ends_and_its_best_first() -> None:
    known = view("running")
    known["summary"] |= {"best_value": 0.9, "best_trial": 3, "metric": "accuracy"}
    found = lines(known)
    assert found[1] == "best      accuracy=0.9 (trial 3)"
    assert f"; ends {datetime.fromtimestamp(1020):%H:%M} (in 20s), 20s to spare; planned 50s" in found[2]


def test_a_long_story_is_shown_from_its_end() -> None:
    story = [{"at_s": 60.0 * at, "what": f"SYNC of stage {at}", "text": "ok", "kind": "sync"} for at in range(10)]
    table = story_table(story)
    assert table.rows[0] == ("2m", "SYNC of stage 2", "ok")
    assert table.notes == ("2 before are in the report and on the page.",)


def test_money_is_reported_with_its_limit() -> None:
    assert lines(view("running"))[2] == "cost      0.50 of 2.00 USD (max_cost); forecast 0.90; planned 1.00"


def test_why_it_was_interrupted_is_reported_once() -> None:
    found = headline(view("interrupted") | {"reason": "its process has ended; resume it to continue"})
    assert found == "digits: interrupted: its process has ended; resume it to continue"


def _snapshot() -> dict[str, Any]:
    return json.loads(json.dumps(snapshot(lending_pool(), "team")))  # type: ignore[no-any-return]


def test_the_tables_say_what_each_held_and_paid() -> None:
    found = _snapshot()
    rows = {row[0]: row for row in experiments_table(found).rows}
    assert rows["a"] == ("a", "0", "-", "0.06", "0 of 1", "10s", "0.10 USD")
    assert rows["c"] == ("c", "1", "-", "0.01", "1 of 1", "0s", "0.0250 USD")
    table = money_table(found)
    assert table.rows == (("experiments", "0.15 USD"), ("idle", "0.0100 USD"))
    assert table.total == ("provider's bill", "0.16 USD")


def test_the_page_draws_the_loans_on_the_gpus_that_were_free() -> None:
    text = render_pool(_snapshot())
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', text)[1])  # type: ignore[index]
    bars = {trace["name"]: trace["y"] for trace in figures["loans"]["data"]}
    assert bars["a"] == ["m1 GPU 0", "m1 GPU 1"]
    assert sorted([*bars["b<script>"], *bars["c"]]) == ["m1 GPU 0", "m1 GPU 1"]
    assert "b<script>" not in text, "names never become markup"


@pytest.mark.parametrize("cap_usd", [None, 0.0, 1.0])
def test_a_pool_that_lent_nothing_has_a_page(cap_usd: float | None) -> None:
    clock = VirtualClock(1_700_000_000.0)
    limits = PoolLimits(instances=1, gpus=1, max_usd_per_hour=cap_usd, max_usd_per_month=cap_usd)
    pool = Pool(VirtualProvider("pool", clock, offer=OFFER), MemoryPoolJournal(), limits, clock.now)
    assert "<h1>team" in render_pool(snapshot(pool, "team"))


def test_the_promises_are_drawn_from_now_on_until_the_last_one_ends() -> None:
    calendar = Calendar(gpus=4)
    calendar = calendar.promise("a", [Span(gpus=2, duration_s=100.0), Span(gpus=1, duration_s=50.0)], 0.0)
    calendar = calendar.promise("b", [Span(gpus=3, duration_s=60.0)], 150.0)
    calendar = calendar.promise("over", [Span(gpus=4, duration_s=20.0)], -20.0)
    chart = promises_chart(calendar, 30.0, colours_of("ab"))
    assert chart is not None
    a, b = chart["data"]
    assert (a["name"], a["x"], a["y"]) == ("a", [0.0, 70.0, 120.0, 180.0], [2, 1, 0, 0])
    assert (b["name"], b["y"]) == ("b", [0, 0, 3, 0])
    assert "until 3m from now" in b["hovertext"][0]
    assert promises_chart(calendar, 500.0, {}) is None


def test_a_pool_that_scales_shows_its_size_over_time() -> None:
    found = _snapshot()
    assert autoscaled_words(found) == ""
    scales = [{"at": found["now"] - 60.0, "instances": 2, "efficiency": 0.8}]
    scales.append({"at": found["now"] - 30.0, "instances": 1, "efficiency": 0.615})
    found = {**found, "autoscaled": 1, "efficiency": 0.615, "scales": scales}
    assert autoscaled_words({**found, "efficiency": None}) == "autoscaled to 1", "no service says more"
    assert autoscaled_words(found) == "autoscaled to 1 (62 % efficiency)"
    text = render_pool(found)
    drawn = json.loads(re.search(r'id="figures">(.*?)</script>', text)[1])["sizes"]["data"]  # type: ignore[index]
    assert [(trace["name"], trace["y"]) for trace in drawn] == [("running", [1, 1]), ("autoscaling", [2, 1, 1])]
    assert "autoscaled to 1" in text


def reported(use: AsyncUse) -> TrialReported:
    return TrialReported(
        occurred_at=1.0, trial=0, attempt=1, iterations=1, metrics={"loss": 1.0}, checkpoint=None, updates=use
    )


def test_an_iteration_says_its_speed_its_staleness_and_where_the_time_goes() -> None:
    assert update_line(UPDATES) == (
        "100 updates/s of 2 workers and 1 server; staleness 1.0 (at most 4); 1 gradient lost; compute 50 %, up 10 %, "
        "waiting 5 %, server 20 %, down 15 %"
    )


def test_the_times_of_workers_that_train_alone_make_the_model() -> None:
    reports = UpdateReports()
    reports.add(reported(UPDATES), 0.5)
    assert reports.model() is None
    alone = replace(UPDATES, workers=1, lost=0)
    reports.add(reported(alone), None)  # it was not timed
    assert reports.model() is None
    reports.add(reported(alone), 1.25)
    model = reports.model()
    assert model is not None
    assert model.times.update_s == pytest.approx(0.020)
    assert model.times.server_s == pytest.approx(0.005)
    assert (model.updates_per_iteration, model.servers, model.largest_shard) == (50.0, 1, 0.7)
    assert model.overhead_s == pytest.approx(0.25)
