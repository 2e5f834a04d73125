"""Planning brackets that run at the same time under one `max_instances` (Hyperband, Li et al. 2018).

A lane is a chain of brackets that run one after another on instances of their own; lanes run side by side. A plan of a
job divides its brackets into lanes, and `max_instances` among the lanes. Each lane is then a chain of stages, which the
search solves exactly. Instances that one lane releases are not lent to another. Costs add; the JCT is the latest end.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from rubberband.errors import InfeasibleError
from rubberband.planner import search
from rubberband.planner.exact.labels import TIME_TOLERANCE_S
from rubberband.planner.exact.solver import Objective, Reach
from rubberband.planner.exact.table import build_table, gangs_of, holding_is_free
from rubberband.planner.noise.sampling import Draws, Samples, distribution, without_noise
from rubberband.planner.problem import Infeasible, JobPlan, Lane, Problem, too_expensive, too_late
from rubberband.planner.search import keeps
from rubberband.values.offer import Offer
from rubberband.values.plan import Planned, PlanningConstraints, Prediction, Stage
from rubberband.values.profile import Profile

Group = tuple[int, ...]
"""Numbers of the brackets of a lane."""


class Solved(NamedTuple):
    """The cheapest plan of a lane with at most `quota` instances by `limit_s`; None if there is none."""

    quota: int
    limit_s: float
    planned: Planned | None

    def answers(self, quota: int, limit_s: float) -> bool:
        """Return whether this answers other limits too: they are narrower, and the plan is within them."""
        if quota > self.quota or limit_s > self.limit_s:
            return False
        return self.planned is None or (
            self.planned.prediction.jct_s <= limit_s + TIME_TOLERANCE_S and widest(self.planned) <= quota
        )


def widest(planned: Planned) -> int:
    """Return the most instances that a plan holds."""
    return max(choice.instances for choice in planned.plan.stages)


def partitions(numbers: list[int]) -> Iterator[list[Group]]:
    """Yield every division of `numbers` into groups."""
    if not numbers:
        yield []
        return
    first, rest = numbers[0], numbers[1:]
    for groups in partitions(rest):
        yield [(first,), *groups]
        for at, group in enumerate(groups):
            yield [*groups[:at], (first, *group), *groups[at + 1 :]]


_EXACT_BRACKETS = 5
"""Up to this number of brackets, every division into lanes is tried; beyond, lanes are merged while that helps."""

_NEXT_TO_NOTHING_USD = 1e-12
_ROUNDED = 1e-7
"""Share by which a bound on a division's cost may be too high, as it is rounded."""
_BISECTION = 0.02
"""Relative precision of a shortest deadline."""
_WORTH_IT = 1e-6
"""Share of the cost that ending sooner must save at the head node."""
_NEARLY = 0.05
"""Its precision where times vary."""
_LATE = 1.2
"""Factor by which varying times make a fast plan longer than fixed times."""
_SLOWED = (1.0, 1.15, 1.35, 1.6, 2.0)
"""Factors on the mean times; with varying times, a division is chosen on fixed times that are slower by one of them."""


def divided(problem: Problem) -> JobPlan | Infeasible:
    """Return the best plan of a job of several brackets, each lane of which the policy plans.

    `objective` min_time is approached to 2 % (5 % where times vary) by trying deadlines. Where times vary, the lanes
    are chosen on fixed times. These are slowed down until every lane has a plan that keeps the deadline with its
    confidence.
    """
    division = _Division(problem)
    return division.best() or Infeasible(division.infeasible)


class _Division:
    """Divides brackets into lanes, and instances among them."""

    def __init__(self, problem: Problem) -> None:
        self.brackets, self.problem = problem.brackets, problem
        self.profile, self.offer, self.constraints = problem.profile, problem.offer, problem.constraints
        self.head_usd_per_s = self.offer.head_cost_usd(1.0)
        self.slowed = 1.0
        """Factor by which the fixed times that lanes are chosen on are slower than the mean."""
        self._solved: dict[tuple[Group, float], list[Solved]] = {}
        self._reaches: dict[tuple[Group, float], Reach] = {}
        self._leasts_usd: dict[tuple[Group, float, float | None], float] = {}
        self._beyond_usd: dict[int, float] = {}
        """Least share of a bracket in the cost of a lane beyond its lower bound."""
        self._draws: dict[Group, Draws] = {}
        self._quickest: tuple[float, list[Lane]] | None = None
        self.first: JobPlan | None = None
        """The cheapest plan in time, at any cost."""

    def best(self) -> JobPlan | None:
        """Return the best plan in time within the budget; None if there is none."""
        deadline_s, is_enough = self.constraints.deadline_s, self.problem.objective == "min_time"
        job = self.first = self.in_time(deadline_s, self.problem.box.cost_usd if is_enough else 0.0)
        if job is not None and job.reserve_usd and is_enough and not self._kept(job):
            job = self.first = self.in_time(deadline_s)
        while job is not None and job.reserve_usd and not self._kept(job):
            width = search.narrower(lane.planned.plan for lane in job.lanes)  # its plans have a smaller reserve
            offer = replace(self.offer, max_instances=width)
            job = _Division(replace(self.problem, offer=offer)).in_time(deadline_s) if width else None
        if job is None or not self._kept(job):
            return None
        return self.fastest(job) if is_enough else job

    def in_time(self, deadline_s: float | None, enough_usd: float = 0.0) -> JobPlan | None:
        """Return the cheapest plan in time, or one that costs no more than `enough_usd`."""
        if self.problem.varies:
            return self._likely(deadline_s, enough_usd)
        lanes = self._with_head(deadline_s, enough_usd)
        return None if lanes is None else self._joined(lanes)

    def _likely(self, deadline_s: float | None, enough_usd: float) -> JobPlan | None:
        """Return a cheap plan in time with the confidence: as much sooner for the head node as on fixed times."""
        lanes = self._surely(deadline_s)
        job = None if lanes is None else self._joined(lanes)
        if job is None or self.head_usd_per_s == 0.0 or (enough_usd > 0.0 and self._kept(job)):
            return job
        self.slowed = 1.0
        ends_s = [_figures(found)[1] for found in (self._with_head(deadline_s), self._divide(deadline_s)) if found]
        share = ends_s[0] / ends_s[-1] if ends_s else 1.0
        sooner = self._surely(share * _late_s(job)) if share < 1.0 - _NEARLY else None
        return job if sooner is None else min(job, self._joined(sooner), key=lambda each: each.prediction.cost_usd)

    def _with_head(self, deadline_s: float | None, enough_usd: float = 0.0) -> list[Lane] | None:
        """Return the lanes that are the cheapest together with the head node, which is paid until the last one ends.

        Lanes that end sooner cost no less, so what they save is at the head node alone: that says how soon they must
        end to be worth it.
        """
        lanes = self._divide(deadline_s)
        if lanes is None or self.head_usd_per_s == 0.0:
            return lanes
        best = lanes
        if self._whole_usd(lanes) > enough_usd:
            ends_s = [_figures(lanes)[1] * 0.75**step for step in range(1, 12)]
            hopeful_s = min(ends_s, key=lambda end_s: self._bound(end_s) + self.head_usd_per_s * end_s)
            best = self._divide(hopeful_s) or lanes
        while lanes is not None:
            best = min(best, lanes, key=self._whole_usd)
            best_usd, (lanes_usd, jct_s) = self._whole_usd(best), _figures(lanes)
            sooner_s = jct_s * (1.0 - 1e-9) - 4.0 * TIME_TOLERANCE_S
            latest_s = self._worth_s(min(sooner_s, self._even_s(best_usd, lanes_usd)), best_usd)
            lanes = self._divide(latest_s) if best_usd > enough_usd and latest_s > 0.0 else None
        return best

    def _whole_usd(self, lanes: Sequence[Lane]) -> float:
        lanes_usd, jct_s = _figures(lanes)
        return lanes_usd + self.head_usd_per_s * jct_s

    def _even_s(self, best_usd: float, lanes_usd: float) -> float:
        """Return how soon lanes of this cost must end to be cheaper than the best so far, by more than rounding."""
        return (best_usd * (1.0 - _WORTH_IT) - lanes_usd) / self.head_usd_per_s

    def _worth_s(self, latest_s: float, best_usd: float) -> float:
        """Return the latest end up to `latest_s` at which lanes may be cheaper than the best, by their bounds."""
        while latest_s > 0.0:
            sooner_s = self._even_s(best_usd, self._bound(latest_s))
            if sooner_s >= latest_s * (1.0 - 1e-4):
                return latest_s
            latest_s = sooner_s
        return latest_s

    def fastest(self, cheapest: JobPlan) -> JobPlan:
        """Return nearly the fastest plan within the budget (and the deadline), at least as fast as one within both."""
        if not self.problem.varies:
            return self._soonest(self._shortest_certain_s(), cheapest)
        if self.constraints.max_cost_usd is None:
            quick_s, _ = self._quick()
            found = self.in_time(quick_s)
            return found if found is not None and self._kept(found) else cheapest
        return self._soonest(self._soonest_certain_s(cheapest), cheapest)

    def _soonest(self, low_s: float, cheapest: JobPlan) -> JobPlan:
        """Return a plan within the budget that keeps nearly the shortest deadline; none keeps less than `low_s`."""
        best, high_s, middle_s = cheapest, _late_s(cheapest), low_s
        near = _NEARLY if self.problem.varies else _BISECTION
        step = near
        while middle_s < high_s:
            job = None if self._over_budget(middle_s) else self.in_time(middle_s, self.problem.box.cost_usd)
            if job is not None and self._kept(job):
                best, high_s = job, min(middle_s, _late_s(job))
            else:
                low_s = middle_s
            if high_s <= low_s * (1.0 + near):
                break
            step *= 2.0
            middle_s = min(low_s * (1.0 + step), math.sqrt(low_s * high_s))
        return best

    def _over_budget(self, deadline_s: float, cost_ratio: float = 1.0) -> bool:
        """Return whether the bounds show that no division keeps a deadline within the budget.

        Plans are assumed to cost `cost_ratio` times the mean.
        """
        if self.constraints.max_cost_usd is None:
            return False
        budget_usd = self.constraints.max_cost_usd / cost_ratio
        return self._bound(deadline_s) * (1.0 - _ROUNDED) > budget_usd

    def _bound(self, deadline_s: float) -> float:
        """Return a lower bound on the cost of lanes in time, without the head node; inf if none is in time."""
        if len(self.brackets) > _EXACT_BRACKETS:
            return -math.inf
        divisions = [groups for groups in self._divisions() if self._fits(groups, deadline_s)]
        return min((self._least_usd(groups, deadline_s) for groups in divisions), default=math.inf)

    def _soonest_certain_s(self, cheapest: JobPlan) -> float:
        """Return about the shortest deadline kept by a division in budget, if plans vary as the cheapest one does."""
        self.slowed, cost = 1.0, cheapest.prediction.cost
        cost_ratio = 1.0 if cost is None else cost.p95 / cost.mean
        low_s, high_s = self._shortest_certain_s(), _late_s(cheapest)
        while high_s > low_s * (1.0 + _NEARLY) and self._over_budget(low_s, cost_ratio):
            middle_s = math.sqrt(low_s * high_s)
            low_s, high_s = (middle_s, high_s) if self._over_budget(middle_s, cost_ratio) else (low_s, middle_s)
        return low_s * _LATE

    def _shortest_certain_s(self) -> float:
        """Return the shortest deadline kept on fixed times: bisect first among lower bounds, then by dividing."""
        divisions = self._divisions()
        groups = {group for division in divisions for group in division}
        times_s = sorted({time_s for group in groups for time_s in self._reach(group).fastest_s if time_s < math.inf})
        low, high = 0, len(times_s) - 1
        while low < high:
            middle = (low + high) // 2
            if any(self._fits(division, times_s[middle]) for division in divisions):
                high = middle
            else:
                low = middle + 1
        low_s, high_s = times_s[high], times_s[high]
        while self._divide(high_s) is None:
            low_s, high_s = high_s, high_s * 1.5
        while high_s > low_s * (1.0 + _BISECTION):
            middle_s = (low_s + high_s) / 2.0
            low_s, high_s = (middle_s, high_s) if self._divide(middle_s) is None else (low_s, middle_s)
        return high_s

    def _fits(self, groups: Sequence[Group], deadline_s: float | None) -> bool:
        """Return whether there are enough instances for every lane to be in time."""
        needed = sum(self._reach(group).needed(deadline_s) for group in groups)
        return needed <= self.offer.max_instances

    def _divisions(self) -> list[list[Group]]:
        """Return all divisions into lanes; for many brackets those of equal lanes, as `_merge` may find them."""
        numbers = list(range(len(self.brackets)))
        if len(numbers) <= _EXACT_BRACKETS:
            return list(partitions(numbers))
        return [[tuple(numbers[first::count]) for first in range(count)] for count in range(1, len(numbers) + 1)]

    def _reach(self, group: Group) -> Reach:
        """Return the bounds of a lane by itself, on fixed times."""
        key = (group, self.slowed)
        if key not in self._reaches:
            offer, profile = _certain(self.offer, self.profile, self.slowed)
            if holding_is_free(offer):  # its table would have the largest count alone
                offer = replace(offer, data_usd_per_instance=_NEXT_TO_NOTHING_USD)
            limits = self._limits(None, self.offer.max_instances)
            self._reaches[key] = _reach_of(
                tuple(self._stages(group)), profile, offer, limits, constant=self.problem.constant
            )
        return self._reaches[key]

    def _stages(self, group: Group) -> list[Stage]:
        return [stage for bracket in group for stage in self.brackets[bracket]]

    def _kept(self, job: JobPlan) -> bool:
        return keeps(job, self.constraints)

    def _surely(self, deadline_s: float | None) -> list[Lane] | None:
        """Return lanes that are each in time with their confidence; None if no slowing down finds any."""
        for self.slowed in _SLOWED:
            lanes = self._divide(deadline_s)
            if lanes is None:
                break
            noisy = self._each_noisy(lanes, deadline_s)
            if noisy is not None:
                return noisy
        self.slowed = 1.0
        if deadline_s is None or self._divide(deadline_s) is None:
            return None
        shortest_s, quick = self._quick()
        return self._each_noisy(quick, deadline_s) or quick if shortest_s <= deadline_s else None

    def _each_noisy(self, lanes: Sequence[Lane], deadline_s: float | None) -> list[Lane] | None:
        """Return the lanes planned with times that vary; None if one of them has no plan with its confidence."""
        found: list[Lane] = []
        for lane in self._with_spare(lanes):
            planned = self._noisy(lane, deadline_s)
            if planned is None:
                return None
            found.append(replace(lane, planned=planned))
        return found

    def _with_spare(self, lanes: Sequence[Lane]) -> list[Lane]:
        """Share out the spare instances among the lanes."""
        spare = (self.offer.max_instances - sum(lane.max_instances for lane in lanes)) // len(lanes)
        return [replace(lane, max_instances=lane.max_instances + spare) for lane in lanes]

    def _noisy(self, lane: Lane, deadline_s: float | None, objective: Objective = "min_cost") -> Planned | None:
        offer = replace(self.offer, max_instances=lane.max_instances, head_price_usd_per_hour=0.0)
        limits, seed = self._limits(deadline_s, lane.max_instances), self.problem.seed + lane.brackets[0]
        chain = replace(
            self.problem, brackets=(lane.stages,), offer=offer, constraints=limits, objective=objective, seed=seed
        )
        found = search.solve_chain(chain, self._drawn(lane))
        return None if isinstance(found, Infeasible) else found

    def _drawn(self, lane: Lane) -> Draws:
        """Return the samples of a lane, the same for any number of instances."""
        if lane.brackets not in self._draws:
            widest = max(stage.trials for bracket in self.brackets for stage in bracket)
            self._draws[lane.brackets] = _draws(lane, widest, self.profile, self.offer, self.problem.seed)
        return self._draws[lane.brackets]

    def _quick(self) -> tuple[float, list[Lane]]:
        """Return the fastest division on fixed times: the deadline that it surely keeps, and its lanes."""
        if self._quickest is None:
            self.slowed = 1.0
            lanes = self._with_spare(self._divide(self._shortest_certain_s()) or [])
            ends_s, fast = [0.0], list[Lane]()
            for lane in lanes:
                planned = self._noisy(lane, None, "min_time")
                assert planned is not None, "without limits there is a plan"
                draws = self._drawn(lane)
                jct_s, _ = draws.totals(planned.plan, range(draws.most_chunks))
                confidence = self._limits(None, lane.max_instances).confidence
                ends_s.append(float(np.quantile(jct_s, min(1.0, confidence + (1.0 - confidence) / 10.0))))
                fast.append(replace(lane, planned=planned))
            self._quickest = max(ends_s), fast
        return self._quickest

    def _divide(self, deadline_s: float | None) -> list[Lane] | None:
        if len(self.brackets) > _EXACT_BRACKETS:
            return self._merge([(number,) for number in range(len(self.brackets))], deadline_s)
        best: tuple[float, list[Lane]] | None = None
        divisions = [groups for groups in self._divisions() if self._fits(groups, deadline_s)]
        ranked = sorted(((self._least_usd(groups, deadline_s), groups) for groups in divisions), key=itemgetter(0))
        for least_usd, groups in ranked:
            if best is not None and least_usd >= best[0] * (1.0 - _ROUNDED):
                break
            if best is None or self._may_cost_less(groups, deadline_s, best[0]):
                shared = self._share(groups, deadline_s)
                best = shared if best is None or (shared is not None and shared[0] < best[0]) else best
        return best[1] if best else None

    def _may_cost_less(self, groups: Sequence[Group], deadline_s: float | None, most_usd: float) -> bool:
        """Return whether a division may be cheaper: lanes are planned, each with all instances, until it is not.

        Lanes whose brackets cost most beyond their lower bounds so far come first.
        """
        bound_usd = sum(self._least_of(group, deadline_s) for group in groups)
        for group in sorted(groups, key=lambda group: -sum(self._beyond_usd.get(bracket, 0.0) for bracket in group)):
            beyond_usd = self._bound_usd([group], deadline_s) - self._least_of(group, deadline_s)
            bound_usd += beyond_usd
            for bracket in group:
                self._beyond_usd[bracket] = min(self._beyond_usd.get(bracket, math.inf), beyond_usd / len(group))
            if bound_usd * (1.0 - _ROUNDED) >= most_usd:
                return False
        return self._bound_usd(groups, deadline_s) < most_usd

    def _least_usd(self, groups: Sequence[Group], deadline_s: float | None) -> float:
        """Return a lower bound on a division's cost, up to rounding: of equal ones the first (widest) comes first."""
        return float(f"{sum(self._least_of(group, deadline_s) for group in groups):.8g}")

    def _least_of(self, group: Group, deadline_s: float | None) -> float:
        """Return a lower bound on a lane's cost."""
        key = (group, self.slowed, deadline_s)
        if key not in self._leasts_usd:
            self._leasts_usd[key] = max(
                self._reach(group).least_usd(deadline_s), self._least_of_gangs(group, deadline_s)
            )
        return self._leasts_usd[key]

    def _least_of_gangs(self, group: Group, deadline_s: float | None) -> float:
        if self.problem.policy != "naive_elastic":
            return 0.0
        offer, profile = _certain(self.offer, self.profile, self.slowed)
        gangs = gangs_of(profile, offer, self._limits(None, self.offer.max_instances))
        of_gangs = search.least_of_gangs(self._stages(group), profile, offer, gangs)
        late_s = math.inf if deadline_s is None else deadline_s + TIME_TOLERANCE_S
        return min((usd for time_s, usd in of_gangs if time_s <= late_s), default=math.inf)

    def _merge(self, groups: list[Group], deadline_s: float | None) -> list[Lane] | None:
        """Merge lanes two by two while that makes the job cheaper, or possible."""
        best = self._share(groups, deadline_s)
        while len(groups) > 1:
            merged = [
                sorted([*(group for group in groups if group not in pair), tuple(sorted(pair[0] + pair[1]))])
                for pair in itertools.combinations(groups, 2)
            ]
            groups = self._least_bound(merged, deadline_s)
            shared = self._share(groups, deadline_s)
            if best is not None and (shared is None or shared[0] >= best[0]):
                break
            best = shared
        return best[1] if best else None

    def _least_bound(self, divisions: Sequence[list[Group]], deadline_s: float | None) -> list[Group]:
        """Return the division with the least `_bound_usd`; lanes are planned only where it may be the least."""
        ranked = sorted((self._least_usd(groups, deadline_s), at) for at, groups in enumerate(divisions))
        best_usd, best = math.inf, ranked[0][1]
        for least_usd, at in ranked:
            if least_usd >= best_usd * (1.0 - _ROUNDED):
                break
            if (bound_usd := self._bound_usd(divisions[at], deadline_s)) < best_usd:
                best_usd, best = bound_usd, at
        return divisions[best]

    def _bound_usd(self, groups: Sequence[Group], deadline_s: float | None) -> float:
        """Return a lower bound on a division's cost: each lane with all instances for itself."""
        lanes = [self._lane(group, self.offer.max_instances, deadline_s) for group in groups]
        return sum(math.inf if lane is None else lane.prediction.cost_usd for lane in lanes)

    def _share(self, groups: Sequence[Group], deadline_s: float | None) -> tuple[float, list[Lane]] | None:
        """Divide the instances among the lanes of a division: dynamic programming over what is left."""
        if self._bound_usd(groups, deadline_s) == math.inf or len(groups) > self.offer.max_instances:
            return None
        widest = [next(self._quotas(group, deadline_s, len(groups) - 1), None) for group in groups]
        lanes = [lane for lane in widest if lane is not None]
        if len(lanes) == len(groups) and sum(lane.max_instances for lane in lanes) <= self.offer.max_instances:
            return sum(lane.planned.prediction.cost_usd for lane in lanes), lanes
        best: dict[int, tuple[float, list[Lane]]] = {0: (0.0, [])}
        for at, group in enumerate(groups):
            reserve = len(groups) - at - 1
            grown: dict[int, tuple[float, list[Lane]]] = {}
            for lane in self._quotas(group, deadline_s, reserve):
                for used, (cost_usd, lanes) in best.items():
                    total = used + lane.max_instances
                    if total > self.offer.max_instances - reserve:
                        continue
                    candidate = (cost_usd + lane.planned.prediction.cost_usd, [*lanes, lane])
                    if total not in grown or candidate[0] < grown[total][0]:
                        grown[total] = candidate
            best = grown
        return min(best.values(), key=lambda pair: pair[0], default=None)

    def _quotas(self, group: Group, deadline_s: float | None, reserve: int) -> Iterator[Lane]:
        """Yield the lane with as many instances as it can use, then with fewer and fewer."""
        quota = self.offer.max_instances - reserve
        while quota >= 1 and (planned := self._lane(group, quota, deadline_s)) is not None:
            most = widest(planned)
            yield Lane(brackets=group, stages=tuple(self._stages(group)), max_instances=most, planned=planned)
            quota = most - max(1, most // 6)

    def _lane(self, group: Group, quota: int, deadline_s: float | None) -> Planned | None:
        """Return the plan of a lane by itself, without the head node; None if it is late, or cannot hold a trial."""
        if quota * self.offer.slots < self.constraints.min_gpus_per_trial:
            return None
        limit_s = math.inf if deadline_s is None else deadline_s
        known = self._solved.setdefault((group, self.slowed), [])
        for each in known:
            if each.answers(quota, limit_s):
                return each.planned
        offer, profile = _certain(replace(self.offer, max_instances=quota), self.profile, self.slowed)
        terms = replace(self.problem, profile=profile, offer=offer, objective="min_cost", seed=0)
        limits = self._limits(deadline_s, quota)
        found = search.solve_chain(replace(terms, brackets=(self._stages(group),), constraints=limits))
        known.append(Solved(quota, limit_s, None if isinstance(found, Infeasible) else found))
        return known[-1].planned

    def _limits(self, deadline_s: float | None, quota: int) -> PlanningConstraints:
        """Return the limits of one lane: all lanes together keep the deadline with the confidence of the job."""
        least, most = self.constraints.min_gpus_per_trial, self.constraints.max_gpus_per_trial
        most = max(least, min(most, quota * self.offer.slots))
        confidence = self.constraints.confidence ** (1.0 / len(self.brackets))
        return replace(
            self.constraints, deadline_s=deadline_s, max_cost_usd=None, max_gpus_per_trial=most, confidence=confidence
        )

    def _joined(self, lanes: Sequence[Lane]) -> JobPlan:
        """Return the plan of the lanes side by side."""
        predictions = [lane.planned.prediction for lane in lanes]
        jct_s = max(prediction.jct_s for prediction in predictions)
        head_usd = self.offer.head_cost_usd(jct_s)
        whole = Prediction(
            jct_s=jct_s,
            cost_usd=sum(prediction.cost_usd for prediction in predictions) + head_usd,
            stages=tuple(stage for prediction in predictions for stage in prediction.stages),
            extrapolated=tuple(sorted({gpus for prediction in predictions for gpus in prediction.extrapolated})),
        )
        # All lanes may be at their end at once.
        reserve_usd = sum(
            self.problem.reserve_usd(lane.planned.plan, [stage.cost_usd for stage in prediction.stages])
            for lane, prediction in zip(lanes, predictions, strict=True)
        )
        if not self.problem.varies:
            return JobPlan(lanes=tuple(lanes), prediction=whole, odds=None, head_usd=head_usd, reserve_usd=reserve_usd)
        samples = _sampled(lanes, [self._drawn(lane) for lane in lanes], self.offer)
        jct, cost = distribution(samples.jct_s), distribution(samples.cost_usd)
        head_usd = self.offer.head_cost_usd(jct.mean)
        whole = replace(whole, jct_s=jct.mean, cost_usd=cost.mean, jct=jct, cost=cost, num_samples=len(samples.jct_s))
        return JobPlan(
            lanes=tuple(lanes),
            prediction=whole,
            odds=self.problem.box.less(reserve_usd).odds(samples.jct_s, samples.cost_usd),
            head_usd=head_usd,
            reserve_usd=reserve_usd,
        )

    def infeasible(self) -> InfeasibleError:
        """Return the error of `best`, with the shortest time that a division surely keeps, or the lowest cost."""
        if (job := self.first) is not None:
            cost_usd = job.prediction.cost_usd if job.prediction.cost is None else job.prediction.cost.p95
            needed_usd = cost_usd + job.reserve_usd
            return too_expensive(self.problem, _late_s(job), needed_usd)
        cheapest = self._with_head(None)
        if cheapest is None:
            return InfeasibleError(
                f"max_instances={self.offer.max_instances} cannot hold the brackets; raise it",
                shortest_jct_s=math.inf,
                cheapest_usd=math.inf,
            )
        cheapest_usd = self._joined(cheapest).prediction.cost_usd
        shortest_s = self._quick()[0] if self.problem.varies else self._shortest_certain_s()
        return too_late(self.problem, shortest_s, cheapest_usd)


@lru_cache(maxsize=64)
def _reach_of(
    stages: tuple[Stage, ...], profile: Profile, offer: Offer, limits: PlanningConstraints, *, constant: bool
) -> Reach:
    """Return the bounds of a lane, which most policies share, and all deadlines."""
    return Reach(build_table(stages, profile, offer, limits), constant=constant)


def sample_lanes(lanes: Sequence[Lane], profile: Profile, offer: Offer, *, seed: int = 0) -> Samples:
    """Return samples of a whole job: the latest end of its lanes, and the cost of all lanes and the head node."""
    widest = max(stage.trials for lane in lanes for stage in lane.stages)
    return _sampled(lanes, [_draws(lane, widest, profile, offer, seed) for lane in lanes], offer)


def _draws(lane: Lane, widest: int, profile: Profile, offer: Offer, seed: int) -> Draws:
    """Return the samples of a lane without the head node; the job's widest stage has `widest` trials."""
    alone = replace(offer, head_price_usd_per_hour=0.0)
    return Draws(lane.stages, profile, alone, seed=seed, lane=lane.brackets[0], widest=widest)


def _sampled(lanes: Sequence[Lane], draws: Sequence[Draws], offer: Offer) -> Samples:
    """`sample_lanes` of draws that leave out the head node."""
    drawn = [each.evaluate(lane.planned.plan, each.most_chunks) for lane, each in zip(lanes, draws, strict=True)]
    size = min(len(samples.jct_s) for samples in drawn)
    jct_s = np.max([samples.jct_s[:size] for samples in drawn], axis=0)
    return Samples(
        jct_s=jct_s,
        cost_usd=np.sum([samples.cost_usd[:size] for samples in drawn], axis=0) + offer.head_cost_usd(1.0) * jct_s,
        walked=[step for samples in drawn for step in samples.steps],
    )


def _certain(offer: Offer, profile: Profile, slowed: float = 1.0) -> tuple[Offer, Profile]:
    """Return a lane's terms without variation and without the head node, slowed down."""
    profile, offer = without_noise(profile, offer)
    slower = {gpus: slowed * time_s for gpus, time_s in profile.seconds_per_iteration.items()}
    return replace(offer, head_price_usd_per_hour=0.0), replace(profile, seconds_per_iteration=slower)


def _figures(lanes: Sequence[Lane]) -> tuple[float, float]:
    """Return the cost of lanes without the head node, and the latest end."""
    predictions = [lane.planned.prediction for lane in lanes]
    return sum(each.cost_usd for each in predictions), max(each.jct_s for each in predictions)


def _late_s(job: JobPlan) -> float:
    return job.prediction.jct_s if job.prediction.jct is None else job.prediction.jct.p95
