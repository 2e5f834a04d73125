"""Promises of a pool: whether a submission's plan fits beside what is promised to others, and when.

The calendar counts GPUs. A promise is kept in the store with its experiment, and ends when that does.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rubberband.api.experiments.gate import told_as_problems
from rubberband.api.experiments.limit_preview import instant_of
from rubberband.api.plans.previews import PlanAnswer
from rubberband.api.problems import INFEASIBLE, REFUSED, UNAVAILABLE, Problem
from rubberband.api.settings import SharedPool
from rubberband.api.store.schema import Promise
from rubberband.api.store.sql import Store
from rubberband.cloud.catalogue import offers
from rubberband.executor.core.demand import summed
from rubberband.executor.core.purse import MONEY_SLACK_USD
from rubberband.planner.sharing import Calendar, Slot, Span
from rubberband.spec.experiment import Experiment
from rubberband.spec.pool import on_pool
from rubberband.states import ACTIVE
from rubberband.units import format_duration, format_instant, format_usd
from rubberband.values.submission import Submission

START_S = 30.0
"""Time that a promise has beside its plan: its process starts, its code is checked, and GPUs change hands
(`rubberband.executor.core.demand.HANDOVER_S`) before each stage."""
_MOST_QUICKER = 4
"""Quicker plans that are tried for one submission."""
PlanOf = Callable[[Experiment], Awaitable[PlanAnswer]]
"""Plans an experiment that would start now. Raises Problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """A plan as the calendar has it."""

    spans: tuple[Span, ...]
    cost_usd: float


class Admission:
    """Admits experiments to a pool."""

    def __init__(self, pool: SharedPool, store: Store) -> None:
        self._pool, self._store = pool, store
        self.lock = asyncio.Lock()
        """Held from a promise's check until it is kept."""

    def calendar(self) -> Calendar:
        """Return what is promised to the experiments that are not over."""
        return calendar_of(self._pool, self._store.promises())

    def within(self, experiment: Experiment) -> Experiment:
        """Return an experiment with the pool's instances: it asks for no more of them, where it says nothing else.

        Raises Problem for one that asks for more, or for other ones.
        """
        if experiment.resources.provider != self._pool.provider:
            return experiment
        if self._pool.folder is not None:
            experiment = _on_pool(experiment, self._pool.folder)
        resources = experiment.resources
        gpus = max(offer.gpus for offer in offers(resources))
        most, each = self._pool.gpus // gpus, self._pool.gpus_per_instance
        has = f"{self._pool.instances} instances of {each} GPU{'s' * (each > 1)}"
        if gpus > each:
            raise Problem(REFUSED, f"resources.gpus_per_instance: {gpus} is too many; the pool has {has}")
        if resources.gpus_per_trial.min > self._pool.gpus:
            asked = f"resources.gpus_per_trial.min: {resources.gpus_per_trial.min} is too many"
            raise Problem(REFUSED, f"{asked}; the pool has {has}, so give {self._pool.gpus} or fewer")
        if resources.max_instances <= most:
            return experiment
        if "max_instances" in resources.model_fields_set:
            asked = f"resources.max_instances: {resources.max_instances} is too many"
            raise Problem(REFUSED, f"{asked}; the pool has {has}, so give {most} or fewer")
        return experiment.model_copy(update={"resources": resources.model_copy(update={"max_instances": most})})

    def require_room(self, experiment: Experiment) -> None:
        """Raise Problem for an experiment that the pool never accepts: too large, or a deadline without a profile."""
        fitted = self.within(experiment)
        if fitted.profile is None:
            self.require_plan(fitted)

    def used_usd(self, owner: str, now: float) -> float:
        """Return what a token's experiments of this month (UTC) cost.

        Experiments that run count with their forecasts, and those that wait with their plans.
        """
        return sum(self._cost_usd(row) for row in self._store.submitted_by(owner, since=month_begin(now)))

    def require_budget(self, owner: str, answer: PlanAnswer, now: float) -> None:
        """Raise Problem REFUSED where a plan costs more than is left of its owner's budget of this month (UTC)."""
        budget_usd = self._pool.budgets_usd.get(owner)
        if budget_usd is None:
            return
        used_usd = self.used_usd(owner, now)
        cost_usd: float = json.loads(answer.body)["prediction"]["cost_usd"]["mean"]
        if used_usd + cost_usd > budget_usd + MONEY_SLACK_USD:
            used = f"{format_usd(used_usd)} of {format_usd(budget_usd)} are spent or planned this month"
            cost = f"this plan costs {format_usd(cost_usd)}; submit a cheaper one, or next month"
            raise Problem(REFUSED, f"budget of {owner}: {used}, and {cost}")

    def _cost_usd(self, row: Submission) -> float:
        summary = row.summary
        if row.state not in ACTIVE or summary.forecast_cost_usd is not None:
            return max(summary.cost_usd, (summary.forecast_cost_usd or 0.0) if row.state in ACTIVE else 0.0)
        plan = None if row.plan is None else self._store.plan(row.plan)
        if plan is None or plan.status != 200:
            return summary.cost_usd
        planned_usd: float = json.loads(plan.body)["prediction"]["cost_usd"]["mean"]
        return planned_usd

    def require_plan(self, experiment: Experiment) -> None:
        """Raise Problem REFUSED for an experiment with a deadline and no profile: its plan cannot be promised."""
        if experiment.resources.provider == self._pool.provider and experiment.constraints.deadline is not None:
            why = "a pool promises a plan, and that needs a profile"
            raise Problem(REFUSED, f"profile: {why}; run `rubberband profile`, or leave constraints.deadline out")

    async def promise(self, experiment: Experiment, answer: PlanAnswer, now: float, plan: PlanOf) -> Promise | None:
        """Return what an experiment with a feasible plan would be promised; None for one without a deadline.

        Where its plan does not fit in time, one with fewer instances and quicker ones are tried, by `plan`. Raises
        Problem INFEASIBLE with the start, the deadline and the cost that would do.
        """
        resources, deadline = experiment.resources, experiment.constraints.deadline
        if resources.provider != self._pool.provider or deadline is None:
            return None
        gpus, sooner = max(offer.gpus for offer in offers(resources)), _sooner(experiment)
        in_time = await plan(sooner)
        found = _read(in_time if in_time.status == 200 else answer, gpus)
        calendar, deadline_at = await asyncio.to_thread(self.calendar), instant_of(deadline, now).timestamp()
        slot = calendar.fits(found.spans, deadline_at, now)
        if slot is None:
            narrower = await self._narrower(sooner, calendar, now, deadline_at, plan)
            if narrower is not None and (slot := calendar.fits(narrower.spans, deadline_at, now)) is not None:
                found = narrower
        if slot is None:
            found, slot = await self._quicker(sooner, calendar, found, now, deadline_at, plan)
        if slot is None:
            raise self._too_late(calendar, found, deadline_at, now, json.loads(answer.body))
        spans = tuple((span.gpus, span.duration_s) for span in found.spans)
        return Promise(experiment=experiment.name, start_at=slot.start_at, spans=spans)

    def require_fit(self, promise: Promise) -> None:
        """Raise Problem UNAVAILABLE where another promise has moved, so that this one fits no more."""
        spans = [Span(gpus=gpus, duration_s=duration_s) for gpus, duration_s in promise.spans]
        slot = self.calendar().earliest(spans, promise.start_at)
        if slot is None or slot.start_at > promise.start_at:
            raise Problem(UNAVAILABLE, "the pool's promises have changed meanwhile; submit again")

    async def _narrower(
        self, experiment: Experiment, calendar: Calendar, now: float, deadline_at: float, plan: PlanOf
    ) -> _Plan | None:
        """Return the plan with as many instances as are free all the time until the deadline; None without any."""
        gpus = max(offer.gpus for offer in offers(experiment.resources))
        instances = _always_free(calendar, now, deadline_at) // gpus
        if not 1 <= instances < experiment.resources.max_instances:
            return None
        resources = experiment.resources.model_copy(update={"max_instances": instances})
        return await _planned(experiment.model_copy(update={"resources": resources}), plan)

    async def _quicker(
        self, experiment: Experiment, calendar: Calendar, found: _Plan, now: float, deadline_at: float, plan: PlanOf
    ) -> tuple[_Plan, Slot | None]:
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

    def _too_late(
        self, calendar: Calendar, found: _Plan, deadline_at: float, now: float, estimate: Mapping[str, Any]
    ) -> Problem:
        slot = calendar.earliest(found.spans, now)
        assert slot is not None, "the plan is not larger than the pool"
        words = format_duration(math.floor(slot.end_at - now) + 1.0)  # an exact fit is one of rounding
        cost = format_usd(found.cost_usd)
        why = f"the plan ends in {words}, for {cost}: a promise counts {format_duration(START_S)} beside it"
        starts: dict[str, Any] = {}
        if slot.start_at > now:
            starts_in = format_duration(math.ceil(slot.start_at - now))
            why = f"the pool is promised to others: the plan can start in {starts_in} and ends in {words}, for {cost}"
            starts["start_at"] = format_instant(datetime.fromtimestamp(math.ceil(slot.start_at), UTC))
        detail = f"{why}; set constraints.deadline={words}, or leave the deadline out"
        nearest = {"jct_s": slot.end_at - now, "cost_usd": found.cost_usd}
        nearest_words = {"deadline": words, "max_cost": math.ceil(found.cost_usd * 100.0) / 100.0}
        changed = {"key": "constraints.deadline", "value": words, "was": format_duration(max(0.0, deadline_at - now))}
        remedy = {
            "changes": [changed],
            "set": [f"constraints.deadline={words}"],
            **nearest,
            "later_s": slot.end_at - deadline_at,
            "dearer_usd": 0.0,
        }
        return Problem(
            INFEASIBLE,
            detail,
            nearest=nearest,
            nearest_words=nearest_words,
            **starts,
            remedies=[remedy],
            estimate=estimate,
        )


def _on_pool(experiment: Experiment, folder: str) -> Experiment:
    """Return an experiment with the prices and instances of the pool in `folder`. Raises Problem INVALID."""
    words = experiment.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)
    with told_as_problems():
        lent = on_pool(
            {**words, "resources": {**words.get("resources", {}), "pool": folder}}, Path(folder).parent.parent
        )
        del lent["resources"]["pool"]  # its process gets it; a plan needs none
        return Experiment.model_validate(lent)


def month_begin(now: float) -> float:
    """Return the begin of the calendar month (UTC) of an instant, both in Unix time."""
    first_day = datetime.fromtimestamp(now, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return first_day.timestamp()


def calendar_of(pool: SharedPool, promises: Sequence[Promise]) -> Calendar:
    """Return the calendar of a pool with these promises.

    One that does not fit any more, since the pool has become smaller, is left out: it gets what others leave.
    """
    calendar = Calendar(gpus=pool.gpus)
    for promise in sorted(promises, key=lambda one: (one.start_at, one.experiment)):
        spans = [Span(gpus=gpus, duration_s=duration_s) for gpus, duration_s in promise.spans]
        slot: Slot | None = calendar.earliest(spans, promise.start_at)
        if slot is not None and slot.start_at == promise.start_at:
            calendar = calendar.promise(promise.experiment, spans, promise.start_at)
    return calendar


def _read(answer: PlanAnswer, gpus: int) -> _Plan:
    """Read the plan of an estimate: GPUs over time, from the start of its process, as long as its 95th percentile."""
    estimate = json.loads(answer.body)
    jct_s = estimate["prediction"]["jct_s"]
    slack = max(1.0, jct_s["p95"] / jct_s["mean"]) if jct_s["mean"] else 1.0
    stages = [
        (stage["start_s"], stage["start_s"] + stage["provisioning_s"] + stage["duration_s"], gpus * stage["instances"])
        for stage in estimate["plan"]["stages"]
    ]
    spans = [Span(gpus=span.gpus, duration_s=span.duration_s * slack) for span in summed(stages)]
    starts = Span(gpus=spans[0].gpus, duration_s=START_S)
    return _Plan(spans=(starts, *spans), cost_usd=estimate["prediction"]["cost_usd"]["mean"])


async def _planned(experiment: Experiment, plan: PlanOf) -> _Plan | None:
    """Return the plan of an experiment; None without a feasible one."""
    try:
        answer = await plan(experiment)
    except Problem:
        return None
    return _read(answer, max(offer.gpus for offer in offers(experiment.resources))) if answer.status == 200 else None


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
