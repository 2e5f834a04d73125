"""The page of a pool, from the JSON of its status."""

from __future__ import annotations

import json
import re
from typing import Any

from rubberband.cloud.pool import MemoryJournal, Pool, PoolLimits
from rubberband.cloud.pool.standing import standing
from rubberband.cloud.virtual import VirtualClock, VirtualProvider
from rubberband.values.offer import Offer
from rubberband.views.pool import experiments_table, money_table, render_pool

OFFER = Offer(instance_type="v", gpus=2, price_usd_per_hour=3.6, max_instances=2, provision_delay_s=10.0)


def _standing() -> dict[str, Any]:
    """Return a pool on which a held one instance, b took half of it warm, and c half beside it."""
    clock = VirtualClock(1_700_000_000.0)
    limits = PoolLimits(instances=1, gpus=2, price_usd_per_hour=3.6, minimum_billed_s=60.0)
    pool = Pool(VirtualProvider("pool", clock, offer=OFFER), MemoryJournal(), limits, clock.now, start=lambda f: f())

    def wait(seconds: int) -> None:
        for _ in range(seconds):
            clock.advance_to(clock.now() + 1.0)
            pool.look()

    pool.launch("a.1", "a", "i", 2, 600.0)
    wait(110)
    pool.release("a.1", "i")
    wait(10)
    pool.launch("b.1", "b<script>", "i", 1, 600.0)
    pool.launch("c.1", "c", "i", 1, 600.0)
    wait(50)
    return json.loads(json.dumps(standing(pool, "team")))  # type: ignore[no-any-return]


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
    pool = Pool(VirtualProvider("pool", clock), MemoryJournal(), PoolLimits(instances=1, gpus=1), clock.now)
    assert "<h1>team" in render_pool(standing(pool, "team"))
