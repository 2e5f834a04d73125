"""Promises of a pool: whether a submission's plan fits beside what is promised to others, and when.

The calendar counts GPUs. A promise is kept in the store with its experiment, and ends when that does. The pool's cap of
the month must cover its plan, too (`rubberband.api.experiments.budgets`).
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from rubberband.api.experiments.budgets import PLAN, UNPLANNED, Budgets
from rubberband.api.experiments.starting import raised_as_problems
from rubberband.api.plans.previews import PlanAnswer
from rubberband.api.plans.process import instant_of
from rubberband.api.problems import INFEASIBLE, REFUSED, UNAVAILABLE, HttpProblem
from rubberband.api.settings import SharedPool
from rubberband.api.store import Store
from rubberband.api.store.schema import Promise
from rubberband.cloud.offers import offers
from rubberband.planner.sharing import Calendar, CalendarSlot, Span
from rubberband.planning.month_cap import Expense, Shortage
from rubberband.spec.experiment import Experiment
from rubberband.spec.pool import lowered, on_pool, size_words
from rubberband.units import format_duration, format_usd, instant_text
from rubberband.values.submission import Submission, Summary

START_S = 30.0
"""Time that a promise has beside its plan: its process starts, its code is checked, and GPUs change hands
(`rubberband.api.experiments.sharing.HANDOVER_S`) before each stage."""
_MOST_QUICKER = 4
"""Quicker plans that are tried for one submission."""
PlanOf = Callable[[Experiment], Awaitable[PlanAnswer]]
"""Plans an experiment that would start now. Raises Problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _CalendarPlan:
    """A plan as the calendar has it."""

    spans: tuple[Span, ...]
    cost_usd: float

    def expense(self, start_at: float) -> Expense:
        """Return what it costs if it starts at an instant."""
        return Expense(cost_usd=self.cost_usd, start_at=start_at, duration_s=_length_s(self))


class OvertakenError(HttpProblem):
    """The pool's promises have changed since a plan was made: it has to be made anew."""

    def __init__(self) -> None:
        detail = "the pool's promises have changed meanwhile; submit again"
        super().__init__(UNAVAILABLE, detail, headers={"Retry-After": "1"})


class Admission:
    """Admits experiments to a pool."""

    def __init__(self, pool: SharedPool, store: Store) -> None:
        self._pool, self._store = pool, store
        self.budgets = Budgets(pool, store)

    def calendar(self) -> Calendar:
        """Return what is promised to the experiments that are not over."""
        return calendar_of(self._pool, self._store.promises())

    def lends(self, experiment: Experiment) -> bool:
        """Whether an experiment would have instances of the pool."""
        return experiment.resources.provider == self._pool.provider

    def within(self, experiment: Experiment) -> Experiment:
        """Return an experiment with the pool's instances, and no more of them; its `notes` say where it asked for more.

        Raises Problem for one that needs larger ones, or others.
        """
        if experiment.resources.provider != self._pool.provider:
            return experiment
        if self._pool.folder is not None:
            experiment = _on_pool(experiment, self._pool.folder)
        resources = experiment.resources
        gpus = max(offer.gpus for offer in offers(resources))
        most, each = self._pool.gpus // gpus, self._pool.gpus_per_instance
        has = size_words(self._pool.instances, each, min(gpus, each))
        if gpus > each:
            raise HttpProblem(REFUSED, f"resources.gpus_per_instance: {gpus} is too many; the pool has {has}")
        least = resources.gpus_per_trial.least
        if least > self._pool.gpus:
            asked = f"resources.gpus_per_trial.{resources.gpus_per_trial.written()[0][0]}: {least} is too many"
            raise HttpProblem(REFUSED, f"{asked}; the pool has {has}, so give {self._pool.gpus} or fewer")
        if resources.max_instances <= most:
            return experiment
        fitted = experiment.model_copy(update={"resources": resources.model_copy(update={"max_instances": most})})
        if "max_instances" not in resources.model_fields_set:
            return fitted
        return fitted.with_notes(lowered(f"{self._pool.name} has {has}", resources.max_instances, most))

    def require_room(self, experiment: Experiment) -> None:
        """Raise Problem for an experiment that the pool never accepts: too large, or a deadline without a profile."""
        fitted = self.within(experiment)
        if fitted.profile is None:
            self.require_plan(fitted)

    def require_plan(self, experiment: Experiment) -> None:
        """Raise Problem REFUSED for an experiment with a deadline and no profile: its plan cannot be promised."""
        if experiment.resources.provider == self._pool.provider and experiment.constraints.deadline is not None:
            why = "a pool promises a plan, and that needs a profile"
            raise HttpProblem(REFUSED, f"profile: {why}; run `rubberband profile`, or leave constraints.deadline out")

    async def admit(
        self, experiment: Experiment, answer: PlanAnswer, now: float, plan: PlanOf, *, owner: str
    ) -> Promise | None:
        """Return what an experiment with a feasible plan would be promised; None for one without a deadline.

        Where its plan does not fit in time, one with fewer instances and quicker ones are tried, by `plan`. Raises
        Problem INFEASIBLE with the start, the deadline and the cost that would do, or the cost that the pool's cap of
        the month leaves; REFUSED where the budget of `owner` does not cover it.
        """
        estimate, deadline = json.loads(answer.body), experiment.constraints.deadline
        if experiment.resources.provider != self._pool.provider:
            jct_s = estimate["prediction"]["jct_s"]["mean"]
            expense = Expense(cost_usd=_cost_usd(estimate), start_at=now, duration_s=jct_s)
            await asyncio.to_thread(self.budgets.require_budget, owner, expense, now)
            return None
        found = _read(estimate, max(offer.gpus for offer in offers(experiment.resources)))
        slot, in_time = CalendarSlot(start_at=now, end_at=now), True
        if deadline is not None:
            calendar, deadline_at = await asyncio.to_thread(self.calendar), instant_of(deadline, now).timestamp()
            found, slot = await self._placed(experiment, found, calendar, now, deadline_at, plan)
            in_time = slot.end_at <= deadline_at
        await asyncio.to_thread(self.budgets.require_budget, owner, found.expense(slot.start_at), now)
        shortage = await asyncio.to_thread(self._shortage, found.expense(slot.start_at), now)
        if shortage is not None:
            raise await self._too_dear(experiment, found, slot, shortage, now, estimate, plan)
        if deadline is None:
            return None
        if not in_time:
            raise _too_late(found, slot, deadline_at, now, estimate)
        spans = tuple((span.gpus, span.duration_s) for span in found.spans)
        return Promise(experiment=experiment.name, start_at=slot.start_at, spans=spans, cost_usd=found.cost_usd)

    def _shortage(self, expense: Expense, now: float) -> Shortage | None:
        return self.budgets.shortage(expense, now, bill_usd=self.budgets.bill_usd())

    async def _placed(
        self,
        experiment: Experiment,
        found: _CalendarPlan,
        calendar: Calendar,
        now: float,
        deadline_at: float,
        plan: PlanOf,
    ) -> tuple[_CalendarPlan, CalendarSlot]:
        """Return a plan and its earliest slot: one that ends by the deadline, where any does.

        The first choice is the plan that leaves time to start, then one with fewer instances, then quicker ones.
        """
        sooner = _sooner(experiment)
        found = await _planned(sooner, plan) or found
        slot = calendar.fits(found.spans, deadline_at, now)
        if slot is None:
            narrower = await self._narrower(sooner, calendar, now, deadline_at, plan)
            if narrower is not None and (slot := calendar.fits(narrower.spans, deadline_at, now)) is not None:
                found = narrower
        if slot is None:
            found, slot = await self._quicker(sooner, calendar, found, now, deadline_at, plan)
        slot = slot or calendar.earliest(found.spans, now)
        assert slot is not None, "the plan is not larger than the pool"
        return found, slot

    def require(self, row: Submission, promise: Promise | None, now: float, *, bill_usd: float | None) -> None:
        """Raise Problem where a submission does not fit, by time or money, beside what was accepted meanwhile.

        The caller holds the lock of the promises until it is added.
        """
        if promise is not None:
            self.require_fit(promise)
        ask = UNPLANNED if row.words.get("profile") is None else PLAN
        jct_s = row.summary.planned_jct_s or 0.0
        self.budgets.require(row, row.admitted_usd, now, ask, bill_usd=bill_usd, jct_s=jct_s, promise=promise)

    def require_fit(self, promise: Promise) -> None:
        """Raise OvertakenError where another promise was made or moved, so that this one fits no more."""
        spans = [Span(gpus=gpus, duration_s=duration_s) for gpus, duration_s in promise.spans]
        slot = self.calendar().earliest(spans, promise.start_at)
        if slot is None or slot.start_at > promise.start_at:
            raise OvertakenError

    async def _narrower(
        self, experiment: Experiment, calendar: Calendar, now: float, deadline_at: float, plan: PlanOf
    ) -> _CalendarPlan | None:
        """Return the plan with as many instances as are free all the time until the deadline; None without any."""
        gpus = max(offer.gpus for offer in offers(experiment.resources))
        instances = _always_free(calendar, now, deadline_at) // gpus
        if not 1 <= instances < experiment.resources.max_instances:
            return None
        resources = experiment.resources.model_copy(update={"max_instances": instances})
        return await _planned(experiment.model_copy(update={"resources": resources}), plan)

    async def _quicker(
        self,
        experiment: Experiment,
        calendar: Calendar,
        found: _CalendarPlan,
        now: float,
        deadline_at: float,
        plan: PlanOf,
    ) -> tuple[_CalendarPlan, CalendarSlot | None]:
        """Return a plan for the time that is left once `found` can begin, and its slot.

        A cheaper plan takes longer: it may not fit where a quicker one does. Returns `found` and None where none fits.
        """
        late, waited_s = found, 0.0
        for _ in range(_MOST_QUICKER):
            earliest = calendar.earliest(late.spans, now)
            if earliest is None or not waited_s < earliest.start_at - now < deadline_at - now - START_S:
                break
            waited_s = earliest.start_at - now
            quicker = await _planned(_within(experiment, deadline_at - earliest.start_at - START_S), plan)
            if quicker is None:
                break
            if (slot := calendar.fits(quicker.spans, deadline_at, now)) is not None:
                return quicker, slot
            late = quicker
        return found, None

    async def _too_dear(
        self,
        experiment: Experiment,
        found: _CalendarPlan,
        slot: CalendarSlot,
        shortage: Shortage,
        now: float,
        estimate: Mapping[str, Any],
        plan: PlanOf,
    ) -> HttpProblem:
        """Return the problem of a plan that the cap of a month does not cover, with a cheaper plan if there is one."""
        most_usd = math.floor(shortage.left_usd * 100.0) / 100.0
        cheaper = await self._cheaper(experiment, most_usd, now, plan) if most_usd > 0.0 else None
        extensions: dict[str, Any] = {"left_usd": shortage.left_usd, "estimate": estimate, "remedies": []}
        extensions["nearest"] = {"jct_s": _length_s(cheaper or found), "cost_usd": (cheaper or found).cost_usd}
        ways = []
        if cheaper is not None:
            jct_s, was_usd = _length_s(cheaper), experiment.constraints.max_cost_usd
            extensions["nearest_words"] = {"max_cost": most_usd}
            later_s = max(0.0, jct_s - _length_s(found))
            extensions["remedies"] = [
                _remedy("constraints.max_cost", most_usd, was_usd, cheaper.cost_usd, jct_s, later_s)
            ]
            does = f"that plan takes {format_duration(math.ceil(jct_s))}, and costs {format_usd(cheaper.cost_usd)}"
            ways.append(f"set constraints.max_cost={most_usd:.2f} ({does})")
        if shortage.next_at is not None:
            extensions["start_at"] = instant_text(shortage.next_at)
            ways.append(f"submit it from {extensions['start_at']} on")
        if cheaper is None:
            ways.append("make the search smaller" if ways else "make the search smaller, or raise the cap")
        return HttpProblem(INFEASIBLE, f"{shortage.words()}; {', or '.join(ways)}", **extensions)

    async def _cheaper(self, experiment: Experiment, most_usd: float, now: float, plan: PlanOf) -> _CalendarPlan | None:
        """Return the plan with a budget of `most_usd`, if the pool has time and money for it."""
        constraints = experiment.constraints.model_copy(update={"max_cost_usd": most_usd})
        limited = experiment.model_copy(update={"constraints": constraints})
        deadline = experiment.constraints.deadline
        found = await _planned(limited if deadline is None else _sooner(limited), plan)
        if found is None:
            return None
        slot: CalendarSlot | None = CalendarSlot(start_at=now, end_at=now)
        if deadline is not None:
            calendar = await asyncio.to_thread(self.calendar)
            slot = calendar.fits(found.spans, instant_of(deadline, now).timestamp(), now)
        if slot is None:
            return None
        shortage = await asyncio.to_thread(self._shortage, found.expense(slot.start_at), now)
        return found if shortage is None else None


def _too_late(
    found: _CalendarPlan, slot: CalendarSlot, deadline_at: float, now: float, estimate: Mapping[str, Any]
) -> HttpProblem:
    """Return the problem of a plan whose earliest slot ends after the deadline."""
    words = format_duration(math.floor(slot.end_at - now) + 1.0)  # an exact fit is one of rounding
    cost = format_usd(found.cost_usd)
    why = f"the plan ends in {words}, for {cost}: a promise counts {format_duration(START_S)} beside it"
    starts: dict[str, Any] = {}
    if slot.start_at > now:
        starts_in = format_duration(math.ceil(slot.start_at - now))
        why = f"the pool is promised to others: the plan can start in {starts_in} and ends in {words}, for {cost}"
        starts["start_at"] = instant_text(math.ceil(slot.start_at))
    detail = f"{why}; set constraints.deadline={words}, or leave the deadline out"
    jct_s, was = slot.end_at - now, format_duration(max(0.0, deadline_at - now))
    return HttpProblem(
        INFEASIBLE,
        detail,
        nearest={"jct_s": jct_s, "cost_usd": found.cost_usd},
        nearest_words={"deadline": words, "max_cost": math.ceil(found.cost_usd * 100.0) / 100.0},
        **starts,
        remedies=[_remedy("constraints.deadline", words, was, found.cost_usd, jct_s, slot.end_at - deadline_at)],
        estimate=estimate,
    )


def _remedy(
    key: str, value: str | float, was: str | float | None, cost_usd: float, jct_s: float, later_s: float
) -> dict[str, Any]:
    """Return a change of one limit, with the time and cost of its plan."""
    return {
        "changes": [{"key": key, "value": value, "was": was}],
        "set": [f"{key}={value}"],
        "jct_s": jct_s,
        "cost_usd": cost_usd,
        "later_s": later_s,
        "extra_usd": 0.0,
    }


def _on_pool(experiment: Experiment, folder: str) -> Experiment:
    """Return an experiment with the prices and instances of the pool in `folder`. Raises Problem INVALID."""
    words = experiment.given_words()
    with raised_as_problems():
        asked, notes = {**words, "resources": {**words.get("resources", {}), "pool": folder}}, list[str]()
        lent = on_pool(asked, Path(folder).parent.parent, notes.append)
        del lent["resources"]["pool"]  # its process gets it; a plan needs none
        return Experiment.model_validate(lent).with_notes(*notes)


def calendar_of(pool: SharedPool, promises: Sequence[Promise]) -> Calendar:
    """Return the calendar of a pool with these promises.

    One that does not fit any more, since the pool has become smaller, is left out: it gets what others leave.
    """
    calendar = Calendar(gpus=pool.gpus)
    for promise in sorted(promises, key=lambda one: (one.start_at, one.experiment)):
        spans = [Span(gpus=gpus, duration_s=duration_s) for gpus, duration_s in promise.spans]
        slot: CalendarSlot | None = calendar.earliest(spans, promise.start_at)
        if slot is not None and slot.start_at == promise.start_at:
            calendar = calendar.promise(promise.experiment, spans, promise.start_at)
    return calendar


def planned_of(estimate: Mapping[str, Any]) -> Summary:
    """Return the time and cost (means) of an estimate's plan."""
    prediction = estimate["prediction"]
    return Summary(planned_jct_s=prediction["jct_s"]["mean"], planned_cost_usd=prediction["cost_usd"]["mean"])


def _cost_usd(estimate: Mapping[str, Any]) -> float:
    return float(estimate["prediction"]["cost_usd"]["mean"])


def _length_s(plan: _CalendarPlan) -> float:
    return sum(span.duration_s for span in plan.spans)


def _read(estimate: Mapping[str, Any], gpus: int) -> _CalendarPlan:
    """Read the plan of an estimate: GPUs over time, from the start of its process, as long as its 95th percentile."""
    jct_s = estimate["prediction"]["jct_s"]
    slack = max(1.0, jct_s["p95"] / jct_s["mean"]) if jct_s["mean"] else 1.0
    stages = [
        (stage["start_s"], stage["start_s"] + stage["provisioning_s"] + stage["duration_s"], gpus * stage["instances"])
        for stage in estimate["plan"]["stages"]
    ]
    spans = [Span(gpus=span.gpus, duration_s=span.duration_s * slack) for span in summed(stages)]
    starts = Span(gpus=spans[0].gpus, duration_s=START_S)
    return _CalendarPlan(spans=(starts, *spans), cost_usd=_cost_usd(estimate))


async def _planned(experiment: Experiment, plan: PlanOf) -> _CalendarPlan | None:
    """Return the plan of an experiment; None without a feasible one."""
    try:
        answer = await plan(experiment)
    except HttpProblem:
        return None
    if answer.status != 200:
        return None
    return _read(json.loads(answer.body), max(offer.gpus for offer in offers(experiment.resources)))


def _sooner(experiment: Experiment) -> Experiment:
    """Return an experiment whose plan leaves the time that its process takes to start."""
    deadline = experiment.constraints.deadline
    assert deadline is not None, "what is promised has a deadline"
    sooner = deadline - timedelta(seconds=START_S) if isinstance(deadline, datetime) else max(1.0, deadline - START_S)
    return _within(experiment, sooner)


def _within(experiment: Experiment, deadline: float | datetime) -> Experiment:
    """Return an experiment with another deadline."""
    constraints = experiment.constraints.model_copy(update={"deadline": deadline})
    return experiment.model_copy(update={"constraints": constraints})


def _always_free(calendar: Calendar, from_at: float, to_at: float) -> int:
    """Return the GPUs that no promise covers at any time between two instants."""
    instants = [from_at]
    for start_at, plan in calendar.promises.values():
        at = start_at
        for span in plan:
            instants.append(at)
            at += span.duration_s
    return calendar.gpus - max(calendar.taken(at) for at in instants if from_at <= at < to_at)


def summed(parts: Sequence[tuple[float, float, int]]) -> list[Span]:
    """Return parts of plans (begin and end in seconds, GPUs) as spans, with the sum of their GPUs at each time."""
    edges = sorted({edge for begin_s, end_s, _ in parts for edge in (begin_s, end_s)})
    return [
        Span(gpus=sum(gpus for begin_s, end_s, gpus in parts if begin_s <= at < end_s), duration_s=to - at)
        for at, to in pairwise(edges)
    ]
