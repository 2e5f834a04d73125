"""Algorithm 2 of the paper, literally: the greedy search for an allocation (RubberBand §4.3).

An allocation is a number of GPUs for each stage, divided fairly among its trials. The caller supplies the prediction;
with the paper's Algorithm 1 (`examples/paper/dag.py`) this is the paper's planner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from rubberband.planner.labels import COST_TOLERANCE_USD, TIME_TOLERANCE_S
from rubberband.planner.table import gangs_of
from rubberband.values.offer import Offer, slots
from rubberband.values.plan import Plan, PlanningConstraints, Stage, StagePlan
from rubberband.values.profile import Profile

Evaluate = Callable[[Plan], tuple[float, float]]
"""(jct_s, cost_usd) of a plan."""


@dataclass(frozen=True, slots=True)
class _Allocation:
    """GPUs of one stage, and the choice that they make."""

    gpus: int
    choice: StagePlan
    key: tuple[int, int]
    """Instances and GPUs per trial of the choice, which are cheaper to look up."""


_Allocations = tuple[_Allocation, ...]
Key = tuple[tuple[int, int], ...]
"""Instances and GPUs per trial of each stage."""
Figures = tuple[float, float]
"""Predicted cost (USD) and time (s)."""


def greedy(
    stages: Sequence[Stage],
    profile: Profile,
    offer: Offer,
    constraints: PlanningConstraints,
    *,
    evaluate: Evaluate,
    warm_starts: Sequence[int] = (1, 2, 3),
    known: dict[Key, Figures] | None = None,
) -> Plan | None:
    """Return the cheapest plan that Algorithm 2 ends at from multiples of the best static allocation.

    None if no static allocation is in time (the paper's greedy needs a feasible start, though an elastic plan may
    exist), or if the plan found exceeds `max_cost_usd`. With 1 among the `warm_starts` the plan never costs more than
    the best static allocation. Equal plans are evaluated once; `known` has the figures of earlier searches with the
    same `evaluate`, and gets those of this one.

    Raises InputError if no GPUs per trial fit the offer, and any error of `evaluate`.
    """
    search = _Search(
        stages, offer, constraints, evaluate, gangs_of(profile, offer, constraints), {} if known is None else known
    )
    statics = [search.static(count) for count in range(1, offer.max_instances + 1)]
    feasible = [allocations for allocations in statics if search.in_time(allocations)]
    if not feasible:
        return None
    instances = min(feasible, key=search.cost_and_time)[0].choice.instances
    multiples = [statics[min(factor * instances, offer.max_instances) - 1] for factor in warm_starts]
    ends = [search.descend(warm_start) for warm_start in multiples if search.in_time(warm_start)]
    found = min(ends, key=search.cost_and_time, default=None)
    return _plan(found) if found and search.affordable(found) else None


@dataclass(slots=True)
class _Search:
    """Allocations of a job, each with its prediction."""

    stages: Sequence[Stage]
    offer: Offer
    constraints: PlanningConstraints
    evaluate: Evaluate
    sizes: Sequence[int]
    """Allowed GPUs per trial that pack, increasing; at least one."""
    _known: dict[Key, Figures]
    _ladders: list[list[_Allocation]] = field(default_factory=list)
    """Fair allocations of each stage, fewest GPUs first."""

    def __post_init__(self) -> None:
        self._ladders = [self._ladder(stage.trials) for stage in self.stages]

    def _ladder(self, trials: int) -> list[_Allocation]:
        """Factors and multiples of the number of trials, in units of the smallest gang.

        Only where the instances can hold every share at once, since nothing else is divided fairly.
        """
        factors = [(count, self.sizes[0]) for count in range(1, trials) if trials % count == 0]
        multiples = [(trials, size) for size in self.sizes]
        fair = (
            self._allocation(count * size, trials)
            for count, size in factors + multiples
            if count * size <= self.offer.gpus * self.offer.max_instances
            and slots(-(-count * size // self.offer.gpus), self.offer.gpus, size) >= count
        )
        return sorted(fair, key=lambda allocation: allocation.gpus)

    def _allocation(self, gpus: int, trials: int) -> _Allocation:
        """Divide `gpus` GPUs among `trials` trials, on as many whole instances as that takes.

        A trial's share is max(1, floor(gpus / trials)), rounded down to a size that packs with all trials at once.
        """
        instances, share = -(-gpus // self.offer.gpus), self.sizes[0]
        for size in reversed(self.sizes):
            if size <= gpus // trials and slots(instances, self.offer.gpus, size) >= trials:
                share = size
                break
        return _Allocation(gpus, StagePlan(instances=instances, gpus_per_trial=share), (instances, share))

    def static(self, instances: int) -> _Allocations:
        """Return the same `instances` for every stage; empty if no trial fits on them."""
        if slots(instances, self.offer.gpus, self.sizes[0]) == 0:
            return ()
        return tuple(self._allocation(instances * self.offer.gpus, stage.trials) for stage in self.stages)

    def descend(self, allocations: _Allocations) -> _Allocations:
        """Algorithm 2: take the best candidate until it saves nothing or is late."""
        figures = self.cost_and_time(allocations)
        while candidates := self._candidates(allocations):
            found = [(_marginal_benefit(figures, after := self.cost_and_time(one)), one, after) for one in candidates]
            (_, saved_usd), best, after = max(found, key=itemgetter(0))
            if saved_usd <= COST_TOLERANCE_USD or not self.in_time(best):
                break
            allocations, figures = best, after
        return allocations

    def in_time(self, allocations: _Allocations) -> bool:
        """Return whether there are allocations and they are predicted to keep the deadline."""
        deadline_s = math.inf if self.constraints.deadline_s is None else self.constraints.deadline_s
        return bool(allocations) and self.cost_and_time(allocations)[1] <= deadline_s + TIME_TOLERANCE_S

    def affordable(self, allocations: _Allocations) -> bool:
        """Return whether the allocations are predicted to keep the budget."""
        limit_usd = math.inf if self.constraints.max_cost_usd is None else self.constraints.max_cost_usd
        return self.cost_and_time(allocations)[0] <= limit_usd + COST_TOLERANCE_USD

    def cost_and_time(self, allocations: _Allocations) -> Figures:
        """Return predicted cost and time, in this order: ties on cost go to the shorter time."""
        key = tuple([allocation.key for allocation in allocations])
        known = self._known.get(key)
        if known is None:
            jct_s, cost_usd = self.evaluate(_plan(allocations))
            known = self._known[key] = (cost_usd, jct_s)
        return known

    def _candidates(self, allocations: _Allocations) -> list[_Allocations]:
        """Lower one stage by the smallest step to a fair allocation: one candidate for each stage."""
        candidates = []
        for index, (ladder, allocation) in enumerate(zip(self._ladders, allocations, strict=True)):
            lower = [fair for fair in ladder if fair.gpus < allocation.gpus]
            if lower:
                candidates.append((*allocations[:index], lower[-1], *allocations[index + 1 :]))
        return candidates


def _marginal_benefit(before: Figures, after: Figures) -> tuple[float, float]:
    """Equation 1, m = (C(a*) - C(a)) / (T(a) - T(a*)), and the saving for ties.

    Two cases the paper leaves undefined, or would reward a dearer plan in: no saving ranks last, a saving that takes
    no time ranks first.
    """
    (cost_before_usd, before_s), (cost_after_usd, after_s) = before, after
    saved_usd, longer_s = cost_before_usd - cost_after_usd, after_s - before_s
    if saved_usd <= COST_TOLERANCE_USD:
        return -math.inf, saved_usd
    return (saved_usd / longer_s if longer_s > TIME_TOLERANCE_S else math.inf), saved_usd


def _plan(allocations: _Allocations) -> Plan:
    return Plan(stages=tuple(allocation.choice for allocation in allocations))
