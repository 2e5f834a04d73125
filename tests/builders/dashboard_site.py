"""Services for a browser, served from a thread: of experiments that no process runs, and of journals in a home."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rubberband.api.app import app_of, create_app
from rubberband.api.experiments import ExperimentRuns
from rubberband.api.experiments.admission import Admission
from rubberband.api.plans.previews import Plans
from rubberband.api.routes import Service
from rubberband.api.routes.events import EventFeed
from rubberband.api.security import Tokens
from rubberband.api.settings import Settings
from rubberband.api.store import Store, open_store
from rubberband.executor import ExperimentFolder
from rubberband.states import ExperimentState
from rubberband.values.submission import Submission, Summary
from tests.builders.browser import PATIENCE_S, served
from tests.builders.clocks import MID_MONTH
from tests.builders.fake_runs import FakeRuns
from tests.builders.waiting import eventually

BEGUN = Summary(
    trials=36,
    stages=3,
    stage=1,
    iterations=45,
    target_iterations=90,
    instances=3,
    started_at=MID_MONTH - 200.0,
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
    clock: Callable[[], float]

    def add(self, name: str, state: str = "running", **changes: Any) -> None:
        now = self.clock()
        begun: dict[str, Any] = {"summary": BEGUN} if state not in ("queued", "starting", "refused") else {}
        chosen = {"created_at": now, "changed_at": now, **begun, **changes}
        self.store.add(Submission(name=name, state=ExperimentState(state), **chosen))

    def change(self, name: str, **changes: Any) -> None:
        self.store.change(name, at=self.clock(), **changes)
        self.feed.wake()

    @property
    def tokens(self) -> Tokens:
        return Tokens(self.store)


class NoPlans(Plans):
    """Starts no process: nothing is planned here."""

    async def start(self) -> None:
        pass


@contextmanager
def service(home: Path, plans: type[Plans] = NoPlans, **settings_of: Any) -> Iterator[Site]:
    """A service of no process of experiments; `plans` says how it plans."""
    settings = Settings(home=home, **{"clock": lambda: MID_MONTH, **settings_of})
    store, feed = open_store(None, home), EventFeed()
    admission = None if settings.pool is None else Admission(settings.pool, store)
    runs = FakeRuns(store=store, clock=settings.clock, admission=admission)
    made, as_runs = plans(settings, store), cast("ExperimentRuns", runs)
    with served(app_of(Service(settings=settings, store=store, plans=made, runs=as_runs, feed=feed))) as address:
        yield Site(address=address, store=store, runs=runs, feed=feed, clock=settings.clock)


@contextmanager
def journals(home: Path, *names: str, within_s: float = PATIENCE_S) -> Iterator[str]:
    """The address of a whole service of the journals in a home, once it has seen them run, or done."""
    store = open_store(None, home)

    def state(name: str) -> ExperimentState | None:
        found = store.submission(name)
        return None if found is None else found.state

    with served(create_app(Settings(home=home), store=store)) as address:
        for name in names:
            driven = ExperimentFolder(home=home, name=name).driven
            wanted = ExperimentState.RUNNING if driven else ExperimentState.DONE
            eventually(lambda name=name, wanted=wanted: state(name) is wanted, name, within_s=within_s)  # type: ignore[misc]
        yield address
