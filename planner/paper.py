"""Algorithm 2 of the paper, literally: the greedy search for an allocation (RubberBand §4.3).

An allocation is a number of GPUs for each stage, divided fairly among its trials. What a plan takes and costs is for
the caller to say; with Algorithm 1 (`rubberband.planner.paper_dag`) the whole is the paper's planner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from rubberband.offer import Offer, slots
from rubberband.plan import Constraints, Plan, Stage, StagePlan
from rubberband.planner.labels import COST_TOLERANCE_USD, TIME_TOLERANCE_S
from rubberband.planner.paper_dag import NUM_SAMPLES, Sampled, build_dag, simulate
from rubberband.planner.table import gangs_of
from rubberband.profile import Profile

__all__ = ["Evaluate", "Sampled", "build_dag", "greedy", "literal_plan", "simulate"]

Evaluate = Callable[[Plan], tuple[float, float]]
"""(jct_s, cost_usd) of a plan."""


@dataclass(frozen=True, slots=True)
class _Allocation:
    """What a stage gets: GPUs in all, and what they make of its plan."""

    gpus: int
    choice: StagePlan
    key: tuple[int, int]
    """Of the choice: cheaper to look up than the choice itself."""


_Allocations = tuple[_Allocation, ...]
_Key = tuple[tuple[int, int], ...]
_Figures = tuple[float, float]
"""What allocations are predicted to cost (USD) and take (s)."""


def literal_plan(
    stages: Sequence[Stage],
    profile: Profile,
    offer: Offer,
    constraints: Constraints,
    *,
    num_samples: int = NUM_SAMPLES,
    seed: int = 0,
) -> Plan | None:
    """The paper's planner: Algorithm 2 on the means of Algorithm 1's samples, every plan with the same seed.

    None and errors as for `greedy`.
    """

    def evaluate(plan: Plan) -> tuple[float, float]:
        sampled = simulate(stages, plan, profile, offer, num_samples=num_samples, seed=seed)
        return float(sampled.jct_s.mean()), float(sampled.cost_usd.mean())

    return greedy(stages, profile, offer, constraints, evaluate=evaluate)


def greedy(
    stages: Sequence[Stage],
    profile: Profile,
    offer: Offer,
    constraints: Constraints,
    *,
    evaluate: Evaluate,
    warm_starts: Sequence[int] = (1, 2, 3),
    known: dict[_Key, _Figures] | None = None,
) -> Plan | None:
    """Algorithm 2 from multiples of the best static allocation; the cheapest of the plans that it ends at.

    None if no static allocation is in time (the paper's greedy needs a feasible start, though an elastic plan may
    be), or the plan found is beyond `max_cost_usd`. With 1 among the `warm_starts` the plan is never dearer than the
    best static allocation.
    Equal plans are evaluated once; `known` has the figures of earlier searches with the same `evaluate`. Raises
    InputError if no GPUs per trial fit the offer, and what `evaluate` raises.
    """
    search = _Search.of(stages, _Fair(offer, gangs_of(profile, offer, constraints)), constraints, evaluate, known)
    statics = [search.static(count) for count in range(1, offer.max_instances + 1)]
    feasible = [allocations for allocations in statics if search.in_time(allocations)]
    if not feasible:
        return None
    instances = min(feasible, key=search.cost_and_time)[0].choice.instances
    multiples = [statics[min(factor * instances, offer.max_instances) - 1] for factor in warm_starts]
    ends = [search.descend(warm_start) for warm_start in multiples if search.in_time(warm_start)]
    found = min(ends, key=search.cost_and_time, default=None)
    return _plan(found) if found and search.affordable(found) else None


@dataclass(frozen=True, slots=True)
class _Fair:
    """Dividing GPUs fairly among trials."""

    offer: Offer
    sizes: Sequence[int]
    """GPUs per trial that are allowed and pack, increasing; at least one, and none without use."""

    def allocation(self, gpus: int, trials: int) -> _Allocation:
        """What `gpus` GPUs make of a stage, on as many whole instances as that takes."""
        instances = -(-gpus // self.offer.gpus)
        share = self._share(gpus, instances, trials)
        return _Allocation(gpus, StagePlan(instances=instances, gpus_per_trial=share), (instances, share))

    def allocations(self, trials: int) -> list[_Allocation]:
        """Those of a factor or a multiple of the number of trials, in units of the smallest gang, fewest GPUs first.

        Only where the instances can hold every share at once, since nothing else is divided fairly.
        """
        factors = [(count, self.sizes[0]) for count in range(1, trials) if trials % count == 0]
        multiples = [(trials, size) for size in self.sizes]
        fair = (
            self.allocation(count * size, trials)
            for count, size in factors + multiples
            if count * size <= self.offer.gpus * self.offer.max_instances
            and slots(-(-count * size // self.offer.gpus), self.offer.gpus, size) >= count
        )
        return sorted(fair, key=lambda allocation: allocation.gpus)

    def _share(self, gpus: int, instances: int, trials: int) -> int:
        """A trial's share, max(1, floor(gpus / trials)), rounded down to what packs with all trials at once."""
        most = gpus // trials
        for size in reversed(self.sizes):
            if size <= most and slots(instances, self.offer.gpus, size) >= trials:
                return size
        return self.sizes[0]


@dataclass(frozen=True, slots=True)
class _Search:
    """Allocations of a job, and what each is predicted to take and cost."""

    stages: Sequence[Stage]
    constraints: Constraints
    evaluate: Evaluate
    fair: _Fair
    ladders: Sequence[Sequence[_Allocation]]
    """Of each stage: its fair allocations, fewest GPUs first."""
    known: dict[_Key, _Figures]

    @classmethod
    def of(
        cls,
        stages: Sequence[Stage],
        fair: _Fair,
        constraints: Constraints,
        evaluate: Evaluate,
        known: dict[_Key, _Figures] | None,
    ) -> _Search:
        ladders = [fair.allocations(stage.trials) for stage in stages]
        return cls(stages, constraints, evaluate, fair, ladders, {} if known is None else known)

    def static(self, instances: int) -> _Allocations:
        """The same `instances` for every stage; empty if no trial fits on them."""
        gpus_per_instance, least = self.fair.offer.gpus, self.fair.sizes[0]
        if slots(instances, gpus_per_instance, least) == 0:
            return ()
        return tuple(self.fair.allocation(instances * gpus_per_instance, stage.trials) for stage in self.stages)

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
        """Whether these are allocations, and predicted to keep the deadline."""
        deadline_s = math.inf if self.constraints.deadline_s is None else self.constraints.deadline_s
        return bool(allocations) and self.cost_and_time(allocations)[1] <= deadline_s + TIME_TOLERANCE_S

    def affordable(self, allocations: _Allocations) -> bool:
        """Whether these are predicted to keep the budget."""
        limit_usd = math.inf if self.constraints.max_cost_usd is None else self.constraints.max_cost_usd
        return self.cost_and_time(allocations)[0] <= limit_usd + COST_TOLERANCE_USD

    def cost_and_time(self, allocations: _Allocations) -> _Figures:
        """What the allocations are predicted to cost and take: ties on cost go to the shorter time."""
        key = tuple([allocation.key for allocation in allocations])
        known = self.known.get(key)
        if known is None:
            jct_s, cost_usd = self.evaluate(_plan(allocations))
            known = self.known[key] = (cost_usd, jct_s)
        return known

    def _candidates(self, allocations: _Allocations) -> list[_Allocations]:
        """The allocations with one stage's lowered by the smallest step to a fair one."""
        candidates = []
        for index, (ladder, allocation) in enumerate(zip(self.ladders, allocations, strict=True)):
            lower = [fair for fair in ladder if fair.gpus < allocation.gpus]
            if lower:
                candidates.append((*allocations[:index], lower[-1], *allocations[index + 1 :]))
        return candidates


def _marginal_benefit(before: _Figures, after: _Figures) -> tuple[float, float]:
    """Equation 1, m = (C(a*) - C(a)) / (T(a) - T(a*)), and the saving for ties.

    Where the paper leaves it undefined or it would reward a dearer plan: no saving is the least, one for no time
    the most.
    """
    (cost_before_usd, before_s), (cost_after_usd, after_s) = before, after
    saved_usd, longer_s = cost_before_usd - cost_after_usd, after_s - before_s
    if saved_usd <= COST_TOLERANCE_USD:
        return -math.inf, saved_usd
    return (saved_usd / longer_s if longer_s > TIME_TOLERANCE_S else math.inf), saved_usd


def _plan(allocations: _Allocations) -> Plan:
    return Plan(stages=tuple(allocation.choice for allocation in allocations))
