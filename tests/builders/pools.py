"""Pools of simulated instances, and their brokers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rubberband.cloud.pool import Pool, PoolLimits, PoolServer, provider
from rubberband.cloud.virtual import VirtualClock, VirtualProvider
from rubberband.spec.pool import PoolFile, PoolFolder, pool_folder
from rubberband.values.offer import Offer
from tests.builders.memory import MemoryPoolJournal
from tests.builders.waiting import eventually

OFFER = Offer(instance_type="v", gpus=2, price_usd_per_hour=3.6, max_instances=2, provision_delay_s=10.0)


@pytest.fixture
def mid_month(monkeypatch: pytest.MonkeyPatch) -> None:
    """Move the clock to the middle of a month: at the real one's end, plans reach into the next."""
    real, by_s = time.time, datetime(2026, 11, 15, tzinfo=UTC).timestamp() - time.time()
    monkeypatch.setattr(time, "time", lambda: real() + by_s)


def lending_pool() -> Pool:
    """Return a pool on which a held one instance, b took half of it warm, and c half beside it."""
    clock = VirtualClock(1_700_000_000.0)
    limits = PoolLimits(instances=1, gpus=2, price_usd_per_hour=3.6, minimum_billed_s=60.0, max_usd_per_month=5.0)
    pool = Pool(
        VirtualProvider("pool", clock, offer=OFFER), MemoryPoolJournal(), limits, clock.now, start=lambda f: f()
    )

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
    return pool


@contextmanager
def broker(pool: Pool, file: PoolFile, home: Path) -> Iterator[PoolFolder]:
    """The folder of a pool whose broker answers from a thread, and is waited for on a busy machine."""
    folder = pool_folder(file.name, home)
    folder.write(file.model_dump(mode="json", by_alias=True, exclude_none=True))
    server = PoolServer(folder, pool, look_s=0.05)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        eventually(folder.address.exists)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(provider, "_GLANCE_S", 60.0)
            yield folder
    finally:
        server.stop()
        thread.join()
