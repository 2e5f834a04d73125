"""Experiments that no process runs: what the service keeps of them is what a test says."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from rubberband.api.app import app_of
from rubberband.api.experiments import ExperimentRuns
from rubberband.api.experiments.admission import Admission
from rubberband.api.experiments.extending import Wanted
from rubberband.api.experiments.queueing import Line, Queue, holder_of, waiting_of
from rubberband.api.experiments.starting import conflict, raised_as_problems
from rubberband.api.plans.previews import PlanAnswer, Plans, Preview
from rubberband.api.plans.process import option_id, planned, question_of
from rubberband.api.problems import CONFLICT, NAME_TAKEN, NOT_FOUND, HttpProblem
from rubberband.api.routes import Service
from rubberband.api.routes.events import EventFeed
from rubberband.api.settings import Settings
from rubberband.api.store import Store, open_store
from rubberband.api.store.schema import Promise, StoredPlan
from rubberband.executor import TAIL, Extension, Outlook, PrintedLine, Result, summarise
from rubberband.executor.run.removing import Removal
from rubberband.spec.experiment import Experiment
from rubberband.states import ACTIVE, AT_WORK, OVER, Action, ExperimentState, obstacle, possible
from rubberband.units import month_begin
from rubberband.values.plan import Plan, StagePlan
from rubberband.values.submission import LabelChange, Submission, Summary
from rubberband.views.trial import why_not_stopped
from tests.builders import experiment_words
from tests.builders.clocks import Clock
from tests.builders.jobs import JOB
from tests.builders.service_client import Client, served
from tests.builders.virtual_runs import run_virtual


@dataclass(kw_only=True)
class FakeRuns:
    """In the place of Runs."""

    store: Store
    clock: Callable[[], float]
    results: dict[str, Result] = field(default_factory=dict)
    printed: list[PrintedLine] = field(default_factory=list)
    extended: list[str] = field(default_factory=list)
    """The ids of requests that changed limits."""
    limited: list[int | None] = field(default_factory=list)
    """The instances that experiments were limited to."""
    stopped: list[int] = field(default_factory=list)
    """The trials that were to stop."""
    alive: bool = True
    slots: int = 4
    admission: Admission | None = None
    failure: Exception | None = None
    """Raised by whatever is asked next."""
    promising: threading.Lock = field(default_factory=threading.Lock)

    @property
    def line(self) -> Line:
        """The queue of what the store has."""
        rows = sorted(self.store.going_on(), key=lambda row: row.created_at)
        queue, queued = Queue({}), [row for row in rows if row.state is ExperimentState.QUEUED and not row.reason]
        for row in queued:
            queue.put(row.name, row.owner)
        running = [holder_of(row) for row in rows if row.state in AT_WORK]
        return Line(
            queue=queue, running=running, waiting={row.name: waiting_of(row) for row in queued}, slots=self.slots
        )

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass

    def submit(self, experiment: Experiment, *, promise: Promise | None = None, **options: Any) -> Submission:
        self._fail()
        now = self.clock()
        words, queued = experiment.to_words(), ExperimentState.QUEUED
        made = Submission(name=experiment.name, state=queued, created_at=now, changed_at=now, words=words, **options)
        with self.promising:
            if promise is not None and self.admission is not None:
                self.admission.require_fit(promise)
            is_new = self.store.add(made, promise)
        if is_new:
            return made
        there = self._known(experiment.name)
        if there.request and there.request == made.request:
            return there
        raise HttpProblem(NAME_TAKEN, f"the name {experiment.name!r} is taken")

    def submitted(self, name: str, request: str) -> Submission | None:
        known = self.store.submission(name) if request else None
        return known if known is not None and known.request == request else None

    def cancel(self, name: str, *, request: str = "") -> Submission:
        self._fail()
        self.store.change(name, at=self.clock(), state=ExperimentState.CANCELLED, reason="cancelled")
        return self._known(name)

    def resume(self, name: str, *, request: str = "") -> Submission:
        if self._known(name).state in ACTIVE:
            raise HttpProblem(CONFLICT, f"experiment {name!r} is at work; there is nothing to resume")
        self.store.change(name, at=self.clock(), state=ExperimentState.QUEUED)
        return self._known(name)

    def limit(self, name: str, *, max_instances: int | None, request: str = "") -> Submission:
        self._fail()
        self.limited.append(max_instances)
        return self._known(name)

    def stop(self, name: str, *, trial: int, request: str = "") -> Submission:
        self._fail()
        row, why = self._known(name), why_not_stopped(self.results.get(name), trial)
        if why := obstacle(row.state, "stop", lambda fact: True) or why:
            raise conflict(row, why)
        self.stopped.append(trial)
        return row

    @property
    def care(self) -> FakeRuns:
        return self

    def label(self, name: str, change: LabelChange) -> Submission:
        with raised_as_problems():
            self.store.upkeep.label(name, change)
        return self._known(name)

    def removal(self, name: str) -> Removal:
        row = self.store.submission(name)
        if row is None:
            raise HttpProblem(NOT_FOUND, f"experiment {name!r} not found")
        if row.state in ACTIVE:
            raise HttpProblem(CONFLICT, f"experiment {name!r} is {row.state}: cancel it first")
        return Removal(name=name, checkpoints=2, size_bytes=5000, elsewhere="", created_at=0.0, spent_usd=0.0)

    def delete(self, name: str) -> Removal:
        going = self.removal(name)
        assert self.store.upkeep.delete(self._known(name), expected=OVER)
        return going

    def possible(self, row: Submission) -> frozenset[Action]:
        return possible(row.state, lambda fact: True)

    @property
    def extensions(self) -> FakeRuns:
        return self

    async def outlook(self, _plans: object, _name: str, wanted: Wanted, _caller: str) -> Extension:
        before = outlook(deadline_s=100.0, max_cost_usd=1.0)
        after = outlook(deadline_s=200.0, max_cost_usd=wanted.max_cost_usd or 1.0)
        trials = () if wanted.trials is None else (wanted.trials.configuration,)
        return Extension(before=before, after=after, stage=1, trials=trials)

    async def planned_and_granted(self, *asked: Any, request: str) -> Extension:
        """Apply the limits; a request that was applied before changes nothing."""
        if request not in self.extended:
            self.extended.append(request)
        return replace(await self.outlook(*asked), applied=True)

    def result(self, name: str) -> Result | None:
        self._fail()
        return self.results.get(name)

    def lines(self, name: str, **options: Any) -> tuple[Sequence[PrintedLine], str]:
        cursor, limit = options.get("cursor") or 0, options["limit"]
        begin = max(0, len(self.printed) - limit) if cursor == TAIL else int(cursor)
        found = self.printed[begin : begin + limit]
        return list(filter(options["wanted"].shows, found)), str(begin + len(found))

    def _known(self, name: str) -> Submission:
        found = self.store.submission(name)
        assert found is not None
        return found

    def _fail(self) -> None:
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure


def outlook(*, deadline_s: float, max_cost_usd: float) -> Outlook:
    plan = Plan(stages=(StagePlan(instances=1, gpus_per_trial=1),))
    return Outlook(
        jct_s=90.0, cost_usd=0.5, deadline_s=deadline_s, max_cost_usd=max_cost_usd, plan=plan, feasible=True, reason=""
    )


class NearPlans(Plans):
    """Plans in this process: nothing is to be started first."""

    def __init__(self, settings: Settings, store: Store) -> None:
        super().__init__(settings, store)
        self.settings, self.store = settings, store

    async def answer(self, preview: Preview, fingerprint: bytes, caller: str = "") -> PlanAnswer:
        return await asyncio.to_thread(self._near, self._question(preview, float(int(self.settings.clock()))))

    def _near(self, asked: dict[str, Any]) -> PlanAnswer:
        question = question_of(asked, self.settings.home, live=False)
        status, body = planned(question)
        if question.option:
            return PlanAnswer(id=option_id(question.id, question.option), status=status, body=body)
        answer, now = {"id": question.id, "status": status, "body": body}, self.settings.clock()
        self.store.keep_plans([StoredPlan(**answer, created_at=now, words=question.words, options={})])
        return PlanAnswer(**answer, words=question.words)


@dataclass(frozen=True, kw_only=True)
class FakeService:
    """The service over a real store, without processes of experiments."""

    client: Client
    store: Store
    runs: FakeRuns
    feed: EventFeed
    clock: Clock

    def add(self, name: str, **changes: Any) -> Submission:
        """An experiment that the store knows."""
        made = Submission(
            **{"name": name, "state": ExperimentState.RUNNING, "created_at": 1000.0, "changed_at": 1000.0} | changes
        )
        assert self.store.add(made)
        return made


@contextmanager
def fake_service(home: Path, **settings: Any) -> Iterator[FakeService]:
    """A service in this process, whatever host is asked for, without tokens unless `auth` is set."""
    clock = Clock()
    given: dict[str, Any] = {"home": home, "hosts": ("*",), "entrypoints": ("examples.digits:*",), "clock": clock}
    chosen = Settings(**given | settings)
    store, feed = open_store(chosen.store, home), EventFeed()
    admission = None if chosen.pool is None else Admission(chosen.pool, store)
    runs = FakeRuns(store=store, clock=clock, admission=admission)
    plans = NearPlans(chosen, store)
    app = app_of(Service(settings=chosen, store=store, plans=plans, runs=cast("ExperimentRuns", runs), feed=feed))
    with served(app) as client:
        yield FakeService(client=client, store=store, runs=runs, feed=feed, clock=clock)


def spent(usd: float, at: float, **others: Any) -> Summary:
    """The summary of an experiment that has cost this in the month of an instant."""
    return Summary(cost_usd=usd, month_at=month_begin(at), month_cost_usd=usd, **others)


def words(**changes: Any) -> dict[str, Any]:
    """The minimal experiment on the virtual provider, as JSON, with changes; None takes a key away."""
    virtual = {"provider": "virtual", "instance_type": "p3.2xlarge", "price_per_hour": 3.6}
    document = json.loads(json.dumps(experiment_words.words(**{"resources": virtual, **changes})))
    for path in (path for path, value in changes.items() if value is None):
        *above, last = path.split("__")
        del functools.reduce(dict.__getitem__, above, document)[last]
    return document


def virtual_result() -> Result:
    controller, backend, _ = run_virtual(JOB)
    setup = {"configurations": [{"x": trial} for trial in range(len(controller.state.trials))]}
    return summarise(controller.state, setup, backend.now())
