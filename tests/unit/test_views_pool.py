"""The page of a pool, from the JSON of its status."""

from __future__ import annotations

import json
import re
from typing import Any

from rubberband.cloud.pool import MemoryJournal, Pool, PoolLimits
from rubberband.cloud.pool.server import standing
from rubberband.cloud.virtual import VirtualClock, VirtualProvider
from rubberband.planner.sharing import Calendar, Span
from rubberband.views.report.pool import (
    autoscaled_words,
    colours_of,
    experiments_table,
    money_table,
    promises_chart,
    render_pool,
)
from tests.builders.pools import OFFER, lending_pool


def _standing() -> dict[str, Any]:
    return json.loads(json.dumps(standing(lending_pool(), "team")))  # type: ignore[no-any-return]


def test_the_tables_say_what_each_held_and_paid() -> None:
    found = _standing()
    rows = {row[0]: row for row in experiments_table(found).rows}
    assert rows["a"] == ("a", "0", "-", "0.06", "0 of 1", "10s", "0.10 USD")
    assert rows["c"] == ("c", "1", "-", "0.01", "1 of 1", "0s", "0.0250 USD")
    table = money_table(found)
    assert table.rows == (("experiments", "0.15 USD"), ("idle", "0.0100 USD"))
    assert table.total == ("provider's bill", "0.16 USD")


def test_the_page_draws_the_loans_on_the_gpus_that_were_free() -> None:
    text = render_pool(_standing())
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', text)[1])  # type: ignore[index]
    bars = {trace["name"]: trace["y"] for trace in figures["loans"]["data"]}
    assert bars["a"] == ["m1 GPU 0", "m1 GPU 1"]
    assert sorted([*bars["b<script>"], *bars["c"]]) == ["m1 GPU 0", "m1 GPU 1"]
    assert "b<script>" not in text, "names never become markup"


def test_a_pool_that_lent_nothing_has_a_page() -> None:
    clock = VirtualClock(1_700_000_000.0)
    pool = Pool(
        VirtualProvider("pool", clock, offer=OFFER), MemoryJournal(), PoolLimits(instances=1, gpus=1), clock.now
    )
    assert "<h1>team" in render_pool(standing(pool, "team"))


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
    found = _standing()
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
