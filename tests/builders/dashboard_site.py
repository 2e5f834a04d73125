"""A service of experiments that no process runs, served from a thread for a browser."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rubberband.api.app import app_of
from rubberband.api.experiments import ExperimentRuns
from rubberband.api.plans.previews import Plans
from rubberband.api.routes import Service
from rubberband.api.routes.events import EventFeed
from rubberband.api.settings import Settings
from rubberband.api.store import Store, open_store
from rubberband.states import ExperimentState
from rubberband.values.submission import Submission, Summary
from tests.builders.browser import served
from tests.builders.fake_runs import FakeRuns

BEGUN = Summary(
    trials=36,
    stages=3,
    stage=1,
    iterations=45,
    target_iterations=90,
    instances=3,
    started_at=time.time() - 200,
    planned_jct_s=300.0,
    forecast_jct_s=310.0,
    deadline_s=360.0,
    cost_usd=0.41,
    max_cost_usd=1.0,
    metric="accuracy",
    best_value=0.947,
)


@dataclass(frozen=True, kw_only=True)
class Site:
    """A service whose experiments are what a test says."""

    address: str
    store: Store
    runs: FakeRuns
    feed: EventFeed

    def add(self, name: str, state: str = "running", **changes: Any) -> None:
        now = time.time()
        begun: dict[str, Any] = {"summary": BEGUN} if state not in ("queued", "starting", "refused") else {}
        chosen = {"created_at": now, "changed_at": now, **begun, **changes}
        self.store.add(Submission(name=name, state=ExperimentState(state), **chosen))

    def change(self, name: str, **changes: Any) -> None:
        self.store.change(name, at=time.time(), **changes)
        self.feed.wake()


class NoPlans(Plans):
    """Starts no process: nothing is planned here."""

    async def start(self) -> None:
        pass


@contextmanager
def service(home: Path, **settings_of: Any) -> Iterator[Site]:
    settings = Settings(home=home, **settings_of)
    store, feed = open_store(None, home), EventFeed()
    runs, plans = FakeRuns(store=store, clock=settings.clock), NoPlans(settings, store)
    parts = Service(settings=settings, store=store, plans=plans, runs=cast("ExperimentRuns", runs), feed=feed)
    with served(app_of(parts)) as address:
        yield Site(address=address, store=store, runs=runs, feed=feed)
