"""Random stories of owners who submit, cancel, resume and extend, with an oracle of what each has spent in each month.

The service's own `ExperimentRuns`, watcher and store decide; no process runs. An experiment costs money at a constant
rate while it runs, and its whole cost differs from its plan's. A run that is asked to end does so after `RELEASE_S`.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from rubberband.api.experiments import ExperimentRuns, budgets
from rubberband.api.plans.process import RestAnswer, RestQuestion
from rubberband.api.problems import HttpProblem
from rubberband.api.settings import ServiceLimits, Settings, SharedPool
from rubberband.api.store import Store, open_store
from rubberband.executor import Extension, Forecast, Limits
from rubberband.spec.experiment import Experiment
from rubberband.states import AT_WORK, ExperimentState
from rubberband.units import month_begin, month_end
from rubberband.values.submission import Submission, Summary
from tests.builders.fake_runs import outlook, words

START = datetime(2026, 11, 30, 12, tzinfo=UTC).timestamp()
NOTICE_S, RELEASE_S = 20.0, 20.0
"""From the moment at which a budget is spent until the watcher sees it, and from then until the instances are gone."""
MINUTE_S = 60.0
HOUR_S = 3600.0
QUEUED, RUNNING, STARTING = ExperimentState.QUEUED, ExperimentState.RUNNING, ExperimentState.STARTING
CANCELLED, INTERRUPTED, DONE = ExperimentState.CANCELLED, ExperimentState.INTERRUPTED, ExperimentState.DONE
BUDGETS_USD = {"ann": 2.0, "ben": 1.0, "cho": 0.5}


@dataclass(slots=True, kw_only=True)
class Truth:
    """What an experiment costs in fact."""

    owner: str
    planned_usd: float
    whole_usd: float
    usd_per_s: float
    spent_usd: float = 0.0
    months: Counter[float] = field(default_factory=Counter)
    ends_at: float | None = None
    """When it stops, as it was asked to end."""

    @property
    def forecast_usd(self) -> float:
        """What its forecast says: its plan at first, and the truth in the end."""
        done = self.spent_usd / self.whole_usd
        return max(self.spent_usd, self.planned_usd * (1.0 - done) + self.whole_usd * done)

    def summary(self, at: float) -> Summary:
        month = month_begin(at)
        return Summary(
            started_at=START,
            cost_usd=self.spent_usd,
            month_at=month,
            month_cost_usd=self.months[month],
            forecast_cost_usd=self.forecast_usd,
            forecast_jct_s=self.forecast_usd / self.usd_per_s,
            jct_s=self.spent_usd / self.usd_per_s,
        )


class World:
    """A service and its owners' money. `passed_usd` is by how much an owner passed his budget beyond what may run."""

    def __init__(self, home: Path) -> None:
        self.now = START
        pool = SharedPool(name="p", provider="virtual", instances=8, gpus_per_instance=1, budgets_usd=BUDGETS_USD)
        limits = ServiceLimits(max_running=3)
        settings = Settings(home=home, pool=pool, limits=limits, auto_resume=True, clock=lambda: self.now)
        self.store: Store = open_store(None, home)
        self.truths: dict[str, Truth] = {}
        self.runs = ExperimentRuns(settings, self.store, lambda: None)
        self.watcher = self.runs.watcher
        watcher: Any = self.watcher
        watcher._processes = SimpleNamespace(start=lambda *_: True, reap=lambda: None)
        watcher._follow = watcher._prune = watcher._look_around = lambda *_: None
        watcher._end = self._is_asked_to_end
        journals = self.runs.journals
        journals.exists = lambda name: self.truths[name].spent_usd > 0.0  # type: ignore[method-assign]
        journals.require = lambda row, action: None  # type: ignore[method-assign]
        journals.opened = self._opened  # type: ignore[method-assign,assignment]
        self.runs._require_allowed = lambda *_: None  # type: ignore[method-assign]
        self.asked = self.refused = 0
        self.passed_usd = 0.0
        self._rates = Counter[tuple[str, float]]()

    @contextmanager
    def _opened(self, name: str) -> Iterator[Any]:
        limits = Limits()
        yield SimpleNamespace(
            resumed=lambda: self._expected(name),
            limits_in_force=limits,
            num_trials=0,
            has_taken=lambda _: False,
            summary=Summary,
        )

    def _expected(self, name: str) -> Forecast:
        truth = self.truths[name]
        return Forecast(jct_s=truth.forecast_usd / truth.usd_per_s, cost_usd=truth.forecast_usd)

    # What owners do

    def act(self, ask: Any, *arguments: Any, **named: Any) -> bool:
        """Ask for something; return whether it was granted."""
        self.asked += 1
        try:
            ask(*arguments, **named)
        except HttpProblem:
            self.refused += 1
            return False
        finally:
            self.look()
        return True

    def submit(self, owner: str, planned_usd: float, factor: float, usd_per_hour: float, *, has_profile: bool) -> None:
        name = f"e{len(self.truths)}"
        asked = words(name=name, constraints={"max_cost": planned_usd}, **({} if has_profile else {"profile": None}))
        truth = Truth(
            owner=owner,
            planned_usd=planned_usd,
            whole_usd=planned_usd * (factor if has_profile else min(1.0, factor)),
            usd_per_s=usd_per_hour / HOUR_S,
        )
        self.truths[name] = truth
        planned = Summary(planned_cost_usd=planned_usd, planned_jct_s=planned_usd / truth.usd_per_s)
        submit = self.runs.submit
        if not self.act(submit, Experiment(**asked), owner=owner, admitted_usd=planned_usd, summary=planned):
            del self.truths[name]

    def cancel(self, name: str) -> None:
        """Its instances are gone some time later; one that waits ends at once."""
        row = self.row(name)
        if row.state is QUEUED:
            state = CANCELLED if not row.attempt else INTERRUPTED
            self._set(name, state)
        elif row.state in AT_WORK and self.truths[name].ends_at is None:
            self.truths[name].ends_at = self.now + RELEASE_S

    def resume(self, name: str) -> None:
        if self.row(name).state in (CANCELLED, INTERRUPTED) and self.truths[name].spent_usd:
            self.act(self.runs.resume, name)

    def extend(self, name: str, factor: float) -> None:
        """Larger limits: a wider search, which costs more."""
        row, truth = self.row(name), self.truths[name]
        if row.state is DONE or truth.ends_at is not None:
            return
        before, after = (outlook(deadline_s=1.0, max_cost_usd=1.0) for _ in range(2))
        object.__setattr__(before, "cost_usd", truth.forecast_usd)
        object.__setattr__(after, "cost_usd", truth.forecast_usd * factor)
        object.__setattr__(after, "jct_s", after.cost_usd / truth.usd_per_s)
        began = truth.spent_usd > 0.0 or row.state is not QUEUED
        question = (
            RestQuestion(name=name, now=self.now)
            if began
            else RestQuestion(name=name, now=self.now, words=dict(row.words), other=dict(row.words))
        )
        answer = RestAnswer(extension=Extension(before=before, after=after, stage=0), had=Limits())
        if self.act(self.runs.extensions.grant, question, answer, f"x{self.asked}"):
            truth.planned_usd, truth.whole_usd = truth.planned_usd * factor, truth.whole_usd * factor

    def kill(self, name: str) -> None:
        """Its process dies, and the service restarts it once there is money."""
        if self.row(name).state is RUNNING and self.truths[name].ends_at is None:
            self.watcher.restart(self.row(name), f"act{self.asked}", self._expected(name).cost_usd)
            self.look()

    # Time

    def pass_time(self, seconds: float) -> None:
        """Let what runs cost money; the watcher looks whenever one ends or an owner has spent his budget."""
        until, noticed_at = self.now + seconds, dict[str, float]()
        while self.now < until:
            running = {name: self.truths[name] for name in self.names(RUNNING)}
            ends = [self._ends_at(one) for one in running.values()]
            for owner, budget_usd in BUDGETS_USD.items():
                rate = sum(one.usd_per_s for one in running.values() if one.owner == owner)
                if rate and owner not in noticed_at:
                    left_usd = max(0.0, budget_usd - self.spent_usd(owner))
                    noticed_at[owner] = self.now + left_usd / rate + NOTICE_S
            at = min([until, month_end(self.now), *ends, *noticed_at.values()])
            self._run(running, at)
            noticed_at = {}  # rates have changed
            self.look()

    def _ends_at(self, one: Truth) -> float:
        done_at = self.now + (one.whole_usd - one.spent_usd) / one.usd_per_s
        return done_at if one.ends_at is None else max(self.now, min(done_at, one.ends_at))

    def _run(self, running: dict[str, Truth], at: float) -> None:
        month, seconds = month_begin(self.now), at - self.now
        for one in running.values():
            cost_usd = min(seconds * one.usd_per_s, one.whole_usd - one.spent_usd)
            one.spent_usd += cost_usd
            one.months[month] += cost_usd
        for owner, budget_usd in BUDGETS_USD.items():
            rate = sum(one.usd_per_s for one in running.values() if one.owner == owner)
            over_usd = self.spent_usd(owner, month) - budget_usd
            if over_usd > 0.0:  # what ran when it was passed counts, also if some of it ends first
                rate = self._rates[owner, month] = max(rate, self._rates[owner, month])
            self.passed_usd = max(self.passed_usd, over_usd - rate * MINUTE_S)
        self.now = at
        for name, one in running.items():
            if one.whole_usd - one.spent_usd <= 1e-9:
                self._set(name, DONE)
            elif one.ends_at is not None and one.ends_at <= at:
                self._set(name, CANCELLED)
            else:
                self.store.change(name, at=at, summary=one.summary(at))

    def look(self) -> None:
        """One round of the watcher, without the reading of journals."""
        self.watcher.round()
        for name in self.names(STARTING):
            self._set(name, RUNNING)

    def _is_asked_to_end(self, name: str, why: str) -> None:
        self.truths[name].ends_at = self.now + RELEASE_S

    def _set(self, name: str, state: ExperimentState) -> None:
        truth = self.truths[name]
        truth.ends_at = None
        self.store.change(name, at=self.now, state=state, reason="", summary=truth.summary(self.now))
        self.watcher.kick(name)
        self.watcher.round()

    # What is seen

    def row(self, name: str) -> Submission:
        found = self.store.submission(name)
        assert found is not None
        return found

    def names(self, *states: ExperimentState) -> list[str]:
        rows = self.store.submissions(states=states or None, limit=500).items
        return sorted(row.name for row in rows)

    def spent_usd(self, owner: str, month: float | None = None) -> float:
        """What an owner has spent in a month, by the oracle."""
        month = month_begin(self.now) if month is None else month
        return math.fsum(one.months[month] for one in self.truths.values() if one.owner == owner)


@contextmanager
def world(home: Path) -> Iterator[World]:
    """A world, whose clock is that of its service."""
    with (
        patch.object(budgets, "ASK_EVERY_S", 0.0),
        patch.object(budgets, "COUNT_EVERY_S", 0.0),
        patch.object(budgets, "COUNTING_SHARE", math.inf),
    ):
        made = World(home)
        try:
            yield made
        finally:
            made.store.close()


_MAY: dict[str, tuple[ExperimentState, ...]] = {
    "submit": (DONE,),
    "cancel": (QUEUED, RUNNING),
    "resume": (CANCELLED, INTERRUPTED),
    "extend": (QUEUED, RUNNING, CANCELLED),
    "kill": (RUNNING,),
}
"""Act -> the states of the experiments that it is for."""


def tell(made: World, source: random.Random, acts: int) -> None:
    """Let owners do random things, and then wait for the end of all that runs."""
    for _ in range(acts):
        owner, kind = source.choice(list(BUDGETS_USD)), source.choice(list(_MAY))
        names = made.names(*_MAY[kind])
        if kind == "submit" or not names:
            cost_usd = BUDGETS_USD[owner] * source.uniform(0.1, 0.9)
            has_profile, factor = source.random() < 0.8, source.uniform(0.8, 1.3)
            made.submit(owner, cost_usd, factor, source.uniform(0.3, 2.0), has_profile=has_profile)
        elif kind == "extend":
            made.extend(source.choice(names), source.uniform(1.05, 2.0))
        else:
            getattr(made, kind)(source.choice(names))
        made.pass_time(source.uniform(0.0, HOUR_S))
    made.pass_time(20.0 * HOUR_S)
