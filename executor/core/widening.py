"""The search widened by what is left of the limits: the largest further bracket that time and money allow. Pure.

It is decided at a SYNC of the only lane that still goes on. The lane's rest and the bracket after it are planned as one
chain, with the instances that are held, by the limits less what is spent, and by the confidence of one more bracket.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace

from rubberband.errors import RubberbandError
from rubberband.executor.core import rules
from rubberband.executor.core.budget import bill_usd
from rubberband.executor.core.events import SearchWidened
from rubberband.executor.core.replanning import ADDED_MARGIN, Remainder, after_sync, limits
from rubberband.executor.core.state import Job, Phase, State
from rubberband.planner.problem import Problem
from rubberband.planner.reserve import Reserve
from rubberband.planner.sampling import steady
from rubberband.planner.search import best_or_none
from rubberband.planner.sizing import largest
from rubberband.planner.table import gangs_of
from rubberband.spec.search import MAX_TRIALS, Sha
from rubberband.units import format_duration, format_usd
from rubberband.values.offer import Offer
from rubberband.values.plan import Plan, Planned, PlanningConstraints, Stage

_STEP = 16
"""Sizes grow by this part of themselves: each one that is looked at is a plan to find, while instances are held."""
_MOST_TRIES = 4
"""For a plan that leaves its reserve: another plan may have another one."""
_TIE = 1e-4
"""This part of the money stays: a run that is done at the very instant at which it is spent may be stopped instead."""
_ROOM = 3.0
"""Factor below the mean that a plan which keeps the limits may reach, if times vary."""


def widen(job: Job, state: State, now: float) -> SearchWidened | None:
    """Return the bracket that is added after the SYNC that has just been, as of `now`.

    None: the lane goes on as it is. Without `stages`, none fits and the lane is over: then so is the search.
    """
    lane = next(lane for lane in state.lanes if lane.phase is Phase.PLANNING)
    if not rules.may_widen(job, state, lane):
        return None
    standing = after_sync(job, state, lane, now)
    choice = _Choice.of(job, state, standing, now)
    trials, planned = choice.widest()
    if planned is None:
        return _unwidened(choice, now) if standing.done == lane.end_stage else None
    return SearchWidened(
        occurred_at=now,
        stages=choice.added(trials),
        plan=Plan(stages=(*state.plan.stages[: len(job.stages) - len(choice.rest)], *planned.plan.stages)),
        predicted=tuple(
            replace(stage, start_s=standing.spent_s + stage.start_s)
            for stage in rules.without_head(job.offer, planned.prediction.stages)
        ),
        reason=f"{_configurations(trials)} fit{'s' * (trials == 1)} into the {choice.left_words} that are left",
        jct_s=standing.spent_s + planned.prediction.jct_s,
        cost_usd=choice.spent_usd + planned.prediction.cost_usd,
    )


def _unwidened(choice: _Choice, now: float) -> SearchWidened:
    """The end of the search: what is left is too little for another bracket, or the limits do not bind it."""
    state, job = choice.state, choice.job
    asked = choice.shape.num_samples
    assert isinstance(asked, int), "the smallest bracket has a number"
    unbound = "the limits allow any number of configurations, so that none is added"
    not_fit = "do not fit" if asked > 1 else "does not fit"
    too_little = f"{_configurations(asked)} {not_fit} into the {choice.left_words} that are left"
    return SearchWidened(
        occurred_at=now,
        stages=(),
        plan=state.plan,
        predicted=(),
        reason=unbound if choice.is_unbound else too_little,
        jct_s=now - state.started_at,
        cost_usd=bill_usd(job, state, now),
    )


def _words(left_s: float | None, left_usd: float | None) -> str:
    words = [] if left_s is None else [format_duration(round(left_s, 1))]
    return " and ".join([*words, *([] if left_usd is None else [format_usd(left_usd)])])


def _configurations(count: int) -> str:
    return f"{count} more configuration{'s' * (count != 1)}"


@dataclass(slots=True, kw_only=True)
class _Choice:
    """The search for the size of one bracket."""

    job: Job
    state: State
    standing: Remainder
    shape: Sha
    rest: tuple[Stage, ...]
    """The lane's stages that are left."""
    left: PlanningConstraints
    """The limits less what is spent, and a margin."""
    left_words: str
    """The time and money left, for the user."""
    spent_usd: float
    most_instances: int
    is_unbound: bool = False
    _known: dict[int, Planned | None] = field(default_factory=dict)

    @classmethod
    def of(cls, job: Job, state: State, standing: Remainder, now: float) -> _Choice:
        """Return the choice at a lane's standing; its rest comes first."""
        asked, spent_usd = limits(job), bill_usd(job, state, now)
        assert job.widening is not None, "the search may be widened"
        left_s = None if asked.deadline_s is None else max(0.0, asked.deadline_s - standing.spent_s)
        left_usd = None if asked.max_cost_usd is None else max(0.0, asked.max_cost_usd - spent_usd)
        left = replace(
            asked,
            deadline_s=None if left_s is None else left_s * (1.0 - ADDED_MARGIN),
            max_cost_usd=None if left_usd is None else left_usd * (1.0 - _TIE),
            confidence=asked.confidence ** (1.0 / (len(job.all_brackets()) + 1)),
        )
        return cls(
            job=job,
            state=state,
            standing=standing,
            shape=job.widening,
            rest=standing.stages[standing.done :],
            left=left,
            left_words=_words(left_s, left_usd),
            spent_usd=spent_usd,
            most_instances=max(rules.most_instances(job, state), rules.least_instances(job, state, standing.lane)),
        )

    def added(self, trials: int) -> tuple[Stage, ...]:
        """Return the stages of a bracket."""
        return self.shape.model_copy(update={"num_samples": trials}).brackets()[0]

    def widest(self) -> tuple[int, Planned | None]:
        """Return the trials of the largest bracket that fits, with the plan of all that is left; None if none does."""
        starts, sizes = self._sizes()
        if not sizes or self.is_unbound:
            return 0, None
        at = largest(
            [sizes.index(start) for start in starts],
            len(sizes) - 1,
            lambda at: self._planned(sizes[at]) is not None,
            lambda at: self._may_fit(sizes[at]),
            lambda start: self._on_average(sizes, start),
        )
        return (0, None) if at is None else (sizes[at], self._planned(sizes[at]))

    def _sizes(self) -> tuple[list[int], list[int]]:
        """Return the sizes from which on a larger bracket never needs less, and all that are looked at."""
        least, most = self.shape.num_samples, MAX_TRIALS - self.job.num_trials
        assert isinstance(least, int), "the smallest bracket has a number"
        starts = [least, *(start for start in self.shape.falls("num_samples") if least < start <= most)]
        self.is_unbound = self._may_fit(most)
        end = bisect_left(range(most + 1), True, key=lambda trials: trials >= least and not self._may_fit(trials))
        sizes = {start for start in starts if start < end}
        size = least
        while size < end:
            sizes.add(size)
            size += max(1, size // _STEP)
        return [start for start in starts if start in sizes], sorted(sizes)

    def _may_fit(self, trials: int) -> bool:
        """Return whether a bracket and the rest fit if no GPU that is paid for is ever idle."""
        profile, offer = self.standing.seen.profile, self.standing.seen.offer
        gangs = gangs_of(profile, offer, self.left)
        least_s = min((gpus * profile.iteration_s(gpus) for gpus in gangs), default=0.0)
        stages = (*self.rest, *self.added(trials))
        instances_s = least_s * sum(stage.trials * stage.iterations for stage in stages) / offer.gpus
        instances_s /= _ROOM if self._varies else 1.0 + 1e-9
        late = self.left.deadline_s is not None and instances_s > self.left.deadline_s * self.most_instances
        usd = instances_s * offer.least_price_usd_per_s
        return not late and (self.left.max_cost_usd is None or usd <= self.left.max_cost_usd)

    @property
    def _offer(self) -> Offer:
        return replace(self.standing.seen.offer, max_instances=self.most_instances)

    @property
    def _varies(self) -> bool:
        return self._problem(()).varies

    def _problem(self, stages: tuple[Stage, ...]) -> Problem:
        return Problem(
            stages=(*self.rest, *stages),
            profile=self.standing.seen.profile,
            offer=self._offer,
            constraints=self.left,
            held=self.standing.held,
        )

    def _on_average(self, sizes: list[int], start: int) -> int:
        """Return about the index of the largest bracket that fits on mean times; one of `start` does for sure."""
        profile, offer = steady(self.standing.seen.profile, self._offer)
        if (spot := self._offer.spot) is not None:
            offer = replace(offer, spot=replace(spot, interruptions_per_hour=0.0))

        def fits(at: int) -> bool:
            problem = replace(self._problem(self.added(sizes[at])), profile=profile, offer=offer)
            return self._kept(problem) is not None

        return start + bisect_left(range(start, len(sizes)), True, key=lambda at: not fits(at))

    def _planned(self, trials: int) -> Planned | None:
        if trials not in self._known:
            self._known[trials] = self._kept(self._problem(self.added(trials)))
        return self._known[trials]

    def _kept(self, problem: Problem) -> Planned | None:
        """Return the best plan that keeps the limits and leaves its reserve; None without any."""
        cap_usd = asked_usd = self.left.max_cost_usd
        reserve = Reserve(self.job.release_margin_s, self.job.dearest_usd_per_hour)
        for _ in range(_MOST_TRIES):
            try:
                planned = best_or_none(replace(problem, constraints=replace(self.left, max_cost_usd=asked_usd)))
            except RubberbandError:
                return None
            if planned is None or cap_usd is None or asked_usd is None:
                return planned
            reserve_usd = reserve.of_plan(problem.offer, planned.plan.stages, held=self.standing.ready)
            certain = planned.prediction.cost is None and planned.prediction.cost_usd <= cap_usd - reserve_usd
            if certain or reserve_usd <= cap_usd - asked_usd:
                return planned
            asked_usd = max(0.0, cap_usd - reserve_usd)
        return None
