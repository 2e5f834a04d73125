"""Planning brackets that run at the same time under one `max_instances` (Hyperband, Li et al. 2018).

A lane is a chain of brackets that run one after another on instances of their own; lanes run side by side. A plan of a
job divides its brackets into lanes and `max_instances` among them; each lane is then a chain of stages, which the
search solves exactly. What is not searched: instances that one lane gives back are not lent to another. Costs add; the
JCT is the latest end.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rubberband.errors import InfeasibleError
from rubberband.planner import risk, search
from rubberband.planner.labels import TIME_TOLERANCE_S, fastest_s
from rubberband.planner.policies import box_of
from rubberband.planner.risk import odds
from rubberband.planner.sampling import Draws, Samples, distribution, varies
from rubberband.planner.search import meets
from rubberband.planner.solver import Objective, Price
from rubberband.planner.table import StageTable, build_table, holding_is_free
from rubberband.planner.wording import too_dear
from rubberband.values.chance import FIXED
from rubberband.values.offer import Offer
from rubberband.values.plan import Odds, Plan, Planned, PlanningConstraints, Policy, Prediction, Stage
from rubberband.values.profile import Profile

_EXACT_BRACKETS = 5
"""Up to so many brackets, every division into lanes is tried; beyond, lanes are merged while that helps."""

_BISECTION = 0.02
_NEXT_TO_NOTHING_USD = 1e-12
_NEARLY = 0.05
"""The same where times vary."""
_LATE = 1.2
"""How much longer than on fixed times a fast plan takes, where times vary."""
_SLOWED = (1.0, 1.15, 1.35, 1.6, 2.0)
"""How much slower than on average the times are taken to be that a division is chosen by, where times vary."""

Group = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Brackets that run one after another."""

    brackets: Group
    stages: tuple[Stage, ...]
    """Of all its brackets, in order."""
    max_instances: int
    """What it has of the job's."""
    planned: Planned


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """A plan of a whole job: one lane, unless it has several brackets."""

    lanes: tuple[Lane, ...]
    prediction: Prediction
    """Of the whole; its stages are those of the lanes, one lane after another."""
    odds: Odds | None
    head_usd: float = 0.0
    """What the head node costs where several lanes share it; else it is in the stages."""

    @property
    def plan(self) -> Plan:
        """The stages of all lanes, one lane after another."""
        return Plan(stages=tuple(choice for lane in self.lanes for choice in lane.planned.plan.stages))


def plan_job(
    brackets: Sequence[Sequence[Stage]],
    profile: Profile,
    offer: Offer,
    constraints: PlanningConstraints,
    policy: Policy = "optimal",
    objective: Objective = "min_cost",
    *,
    seed: int = 0,
) -> JobPlan:
    """The best plan of a job of one bracket or more; errors as for `search.plan`.

    One bracket is planned by `search.plan` as it is. Of several, the policy plans each lane; `objective` min_time is
    exact without a budget where nothing varies, and else approached to 2 % (5 %) by trying deadlines. Where times vary,
    the lanes are chosen on fixed times, slowed down as far as it takes for every lane to have a plan that keeps the
    deadline surely enough.
    """
    if len(brackets) == 1:
        return single(
            brackets[0], search.plan(brackets[0], profile, offer, constraints, policy, objective, seed=seed), offer
        )
    division = _Division(brackets, profile, offer, constraints, policy, seed)
    if objective == "min_time":
        return division.fastest()
    return division.cheapest(constraints.deadline_s)


def plan_job_or_none(
    brackets: Sequence[Sequence[Stage]],
    profile: Profile,
    offer: Offer,
    constraints: PlanningConstraints,
    policy: Policy = "optimal",
    objective: Objective = "min_cost",
    *,
    seed: int = 0,
) -> JobPlan | None:
    """What `plan_job` finds, without saying why there is nothing: for searches that try many."""
    if len(brackets) == 1:
        planned = search.plan_or_none(brackets[0], profile, offer, constraints, policy, objective, seed=seed)
        return None if planned is None else single(brackets[0], planned, offer)
    division = _Division(brackets, profile, offer, constraints, policy, seed)
    job = division.cheapest_or_none(constraints.deadline_s)
    return division.fastest() if job is not None and objective == "min_time" else job


def single(stages: Sequence[Stage], planned: Planned, offer: Offer) -> JobPlan:
    """The plan of a job of one bracket."""
    lane = Lane(brackets=(0,), stages=tuple(stages), max_instances=offer.max_instances, planned=planned)
    return JobPlan(lanes=(lane,), prediction=planned.prediction, odds=planned.odds)


@dataclass(frozen=True, slots=True)
class Reach:
    """What the plans of a lane take and cost at least, on fixed times."""

    fastest_s: list[float]
    """With 1, 2, ... instances at most; inf where none is enough for a trial."""
    price: Price

    @classmethod
    def of(cls, table: StageTable, *, constant: bool) -> Reach:
        """By the relaxations of its table."""
        return cls(fastest_s(table, constant=constant).tolist(), Price.of(table, constant=constant))

    def needed(self, deadline_s: float | None) -> float:
        """Instances that a plan in time needs at least; inf if none is in time."""
        late_s = math.inf if deadline_s is None else deadline_s + TIME_TOLERANCE_S
        if deadline_s is None:
            enough = (count for count, time_s in enumerate(self.fastest_s, 1) if time_s < math.inf)
        else:
            enough = (count for count, time_s in enumerate(self.fastest_s, 1) if time_s <= late_s)
        return next(enough, math.inf)

    def least_usd(self, deadline_s: float | None) -> float:
        """What a plan in time costs at least, up to rounding."""
        return self.price.least_usd(math.inf if deadline_s is None else deadline_s)


@dataclass(slots=True)
class _Division:
    """Divides brackets into lanes, and instances among them."""

    brackets: Sequence[Sequence[Stage]]
    profile: Profile
    offer: Offer
    constraints: PlanningConstraints
    policy: Policy
    seed: int
    slowed: float = 1.0
    """By how much the fixed times that lanes are chosen on are slower than the mean ones."""
    _solved: dict[tuple[Group, int, float | None, float], Planned | None] = field(default_factory=dict)
    _reaches: dict[tuple[Group, float], Reach] = field(default_factory=dict)
    _draws: dict[Group, Draws] = field(default_factory=dict)
    _quickest: tuple[float, list[Lane]] | None = None

    def cheapest(self, deadline_s: float | None) -> JobPlan:
        """The cheapest plan in time that the budget allows. Raises InfeasibleError."""
        job = self._in_time(deadline_s)
        if job is None:
            raise self._infeasible()
        if not self._kept(job):
            raise self._too_dear(job)
        return job

    def cheapest_or_none(self, deadline_s: float | None) -> JobPlan | None:
        """What `cheapest` finds, without saying why there is nothing."""
        job = self._in_time(deadline_s)
        return job if job is not None and self._kept(job) else None

    def _in_time(self, deadline_s: float | None) -> JobPlan | None:
        lanes = self._surely(deadline_s) if varies(self.profile, self.offer) else self._divide(deadline_s)
        return None if lanes is None else self._joined(lanes)

    def fastest(self) -> JobPlan:
        """The fastest plan within the budget (and the deadline), nearly."""
        cheapest = self.cheapest(self.constraints.deadline_s)
        if not varies(self.profile, self.offer):
            return self._soonest(self._shortest_certain_s(), cheapest)
        if self.constraints.max_cost_usd is None:
            quick_s, _ = self._quick()
            found = self._in_time(quick_s)
            return found if found is not None and self._kept(found) else cheapest
        return self._soonest(self._soonest_certain_s(cheapest), cheapest)

    def _soonest(self, low_s: float, cheapest: JobPlan) -> JobPlan:
        """The plan within the budget, nearly, that keeps the shortest deadline; none keeps less than `low_s`."""
        best, high_s, middle_s = cheapest, _late_s(cheapest), low_s
        near = _NEARLY if varies(self.profile, self.offer) else _BISECTION
        step = near
        while middle_s < high_s:
            job = None if self._too_dear_for(middle_s) else self._in_time(middle_s)
            if job is not None and self._kept(job):
                best, high_s = job, min(middle_s, _late_s(job))
            else:
                low_s = middle_s
            if high_s <= low_s * (1.0 + near):
                break
            step *= 2.0
            middle_s = min(low_s * (1.0 + step), math.sqrt(low_s * high_s))
        return best

    def _too_dear_for(self, deadline_s: float, dearer: float = 1.0) -> bool:
        """Whether no division can keep a deadline within the budget, as the bounds of its lanes show.

        They are taken to cost so many times more than on average.
        """
        if self.constraints.max_cost_usd is None:
            return False
        budget_usd = self.constraints.max_cost_usd / dearer
        divisions = [groups for groups in self._divisions() if self._fits(groups, deadline_s)]
        least_usd = min((self._least_usd(groups, deadline_s) for groups in divisions), default=math.inf)
        return len(self.brackets) <= _EXACT_BRACKETS and least_usd > budget_usd

    def _soonest_certain_s(self, cheapest: JobPlan) -> float:
        """About the shortest deadline that a division keeps within the budget, if plans vary as the cheapest one."""
        self.slowed, cost = 1.0, cheapest.prediction.cost
        dearer = 1.0 if cost is None else cost.p95 / cost.mean
        low_s, high_s = self._shortest_certain_s(), _late_s(cheapest)
        while high_s > low_s * (1.0 + _NEARLY) and self._too_dear_for(low_s, dearer):
            middle_s = math.sqrt(low_s * high_s)
            low_s, high_s = (middle_s, high_s) if self._too_dear_for(middle_s, dearer) else (low_s, middle_s)
        return low_s * _LATE

    def _shortest_s(self) -> float:
        """The shortest deadline that some division can keep (as surely as it takes, where times vary)."""
        return self._quick()[0] if varies(self.profile, self.offer) else self._shortest_certain_s()

    def _shortest_certain_s(self) -> float:
        """The same on fixed times: tried among all the times that lanes take at least."""
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
        """Whether there are instances enough for every lane to be in time."""
        needed = sum(self._reach(group).needed(deadline_s) for group in groups)
        return needed <= self.offer.max_instances

    def _divisions(self) -> list[list[Group]]:
        """All divisions into lanes; of many brackets those of equal lanes, as `_merge` may find them."""
        numbers = list(range(len(self.brackets)))
        if len(numbers) <= _EXACT_BRACKETS:
            return list(_partitions(numbers))
        return [[tuple(numbers[first::count]) for first in range(count)] for count in range(1, len(numbers) + 1)]

    def _reach(self, group: Group) -> Reach:
        """What a lane may reach by itself, on fixed times."""
        key = (group, self.slowed)
        if key not in self._reaches:
            stages = [stage for bracket in group for stage in self.brackets[bracket]]
            offer, profile = _certain(self.offer, self.profile, self.slowed)
            if holding_is_free(offer):  # its table would have the largest count alone
                offer = replace(offer, data_usd_per_instance=_NEXT_TO_NOTHING_USD)
            table = build_table(stages, profile, offer, self._limits(None, self.offer.max_instances))
            self._reaches[key] = Reach.of(table, constant=self.policy == "static")
        return self._reaches[key]

    def _kept(self, job: JobPlan) -> bool:
        if job.odds is not None:
            return job.odds.p_both >= self.constraints.confidence
        return all(meets(job.prediction, self.constraints))

    def _surely(self, deadline_s: float | None) -> list[Lane] | None:
        """Lanes that are each in time surely enough; None if no slowing down finds any."""
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
        """The lanes planned with all that varies; None as soon as one of them has no plan that is sure enough."""
        found: list[Lane] = []
        for lane in self._widened(lanes):
            planned = self._noisy(lane, deadline_s)
            if planned is None:
                return None
            found.append(replace(lane, planned=planned))
        return found

    def _widened(self, lanes: Sequence[Lane]) -> list[Lane]:
        """The lanes with the instances that none of them has."""
        spare = (self.offer.max_instances - sum(lane.max_instances for lane in lanes)) // len(lanes)
        return [replace(lane, max_instances=lane.max_instances + spare) for lane in lanes]

    def _noisy(self, lane: Lane, deadline_s: float | None, objective: Objective = "min_cost") -> Planned | None:
        offer = replace(self.offer, max_instances=lane.max_instances, head_price_usd_per_hour=0.0)
        limits, seed = self._limits(deadline_s, lane.max_instances), self.seed + lane.brackets[0]
        asked = (lane.stages, self.profile, offer, limits, self.policy, objective)
        try:
            if self.policy == "greedy":
                return search.plan(*asked, seed=seed)
            return risk.plan(*asked, draws=self._drawn(lane))
        except InfeasibleError:
            return None

    def _drawn(self, lane: Lane) -> Draws:
        """The samples of a lane, the same whatever instances it has."""
        if lane.brackets not in self._draws:
            widest = max(stage.trials for bracket in self.brackets for stage in bracket)
            self._draws[lane.brackets] = _draws(lane, widest, self.profile, self.offer, self.seed)
        return self._draws[lane.brackets]

    def _quick(self) -> tuple[float, list[Lane]]:
        """The division that is fastest on fixed times: the deadline that it surely keeps, with the fastest lanes."""
        if self._quickest is None:
            self.slowed = 1.0
            lanes = self._widened(self._divide(self._shortest_certain_s()) or [])
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
        for groups in sorted(divisions, key=lambda groups: self._least_usd(groups, deadline_s)):
            if best is not None and self._least_usd(groups, deadline_s) >= best[0] * (1.0 - 1e-7):
                break
            if best is None or self._bound_usd(groups, deadline_s) < best[0]:
                best = _cheaper(best, self._share(groups, deadline_s))
        return best[1] if best else None

    def _least_usd(self, groups: Sequence[Group], deadline_s: float | None) -> float:
        """What a division costs at least, by the bounds of each lane; rounded, as of equal ones the widest is first."""
        return float(f"{sum(self._reach(group).least_usd(deadline_s) for group in groups):.8g}")

    def _merge(self, groups: list[Group], deadline_s: float | None) -> list[Lane] | None:
        """Merge lanes two by two while that makes the job cheaper, or possible."""
        best = self._share(groups, deadline_s)
        while len(groups) > 1:
            merged = [
                sorted([*(group for group in groups if group not in pair), tuple(sorted(pair[0] + pair[1]))])
                for pair in itertools.combinations(groups, 2)
            ]
            groups = min(merged, key=lambda candidate: self._bound_usd(candidate, deadline_s))
            shared = self._share(groups, deadline_s)
            if best is not None and (shared is None or shared[0] >= best[0]):
                break
            best = shared
        return best[1] if best else None

    def _bound_usd(self, groups: Sequence[Group], deadline_s: float | None) -> float:
        """What a division costs at least: each lane with all instances for itself."""
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
        """The lane with as many instances as it would like, and with fewer and fewer while that is possible."""
        quota = self.offer.max_instances - reserve
        while quota >= 1 and (planned := self._lane(group, quota, deadline_s)) is not None:
            widest = max(choice.instances for choice in planned.plan.stages)
            stages = tuple(stage for bracket in group for stage in self.brackets[bracket])
            yield Lane(brackets=group, stages=stages, max_instances=widest, planned=planned)
            quota = widest - max(1, widest // 6)

    def _lane(self, group: Group, quota: int, deadline_s: float | None) -> Planned | None:
        """The plan of a lane by itself; None if it cannot be in time, or hold a trial. The head node is the job's."""
        if quota * self.offer.gpus < self.constraints.min_gpus_per_trial:
            return None
        key = (group, quota, deadline_s, self.slowed)
        if key not in self._solved:
            stages = [stage for bracket in group for stage in self.brackets[bracket]]
            offer, profile = _certain(replace(self.offer, max_instances=quota), self.profile, self.slowed)
            limits = self._limits(deadline_s, quota)
            self._solved[key] = search.plan_or_none(stages, profile, offer, limits, self.policy)
        return self._solved[key]

    def _limits(self, deadline_s: float | None, quota: int) -> PlanningConstraints:
        """All lanes must be in time: as many as there are brackets at most, each as surely as it takes."""
        least, most = self.constraints.min_gpus_per_trial, self.constraints.max_gpus_per_trial
        most = max(least, min(most, quota * self.offer.gpus))
        confidence = self.constraints.confidence ** (1.0 / len(self.brackets))
        return replace(
            self.constraints, deadline_s=deadline_s, max_cost_usd=None, max_gpus_per_trial=most, confidence=confidence
        )

    def _joined(self, lanes: Sequence[Lane]) -> JobPlan:
        """The lanes side by side."""
        predictions = [lane.planned.prediction for lane in lanes]
        jct_s = max(prediction.jct_s for prediction in predictions)
        head_usd = self.offer.head_cost_usd(jct_s)
        whole = Prediction(
            jct_s=jct_s,
            cost_usd=sum(prediction.cost_usd for prediction in predictions) + head_usd,
            stages=tuple(stage for prediction in predictions for stage in prediction.stages),
            extrapolated=tuple(sorted({gpus for prediction in predictions for gpus in prediction.extrapolated})),
        )
        if not varies(self.profile, self.offer):
            return JobPlan(lanes=tuple(lanes), prediction=whole, odds=None, head_usd=head_usd)
        samples = _sampled(lanes, [self._drawn(lane) for lane in lanes], self.offer)
        jct, cost = distribution(samples.jct_s), distribution(samples.cost_usd)
        head_usd = self.offer.head_cost_usd(jct.mean)
        whole = replace(whole, jct_s=jct.mean, cost_usd=cost.mean, jct=jct, cost=cost, num_samples=len(samples.jct_s))
        return JobPlan(
            lanes=tuple(lanes), prediction=whole, odds=odds(samples, box_of(self.constraints)), head_usd=head_usd
        )

    def _infeasible(self) -> InfeasibleError:
        """With the shortest time that a division can surely keep, by bisection, and the cheapest cost."""
        cheapest = self._divide(None)
        if cheapest is None:
            return InfeasibleError(
                f"max_instances={self.offer.max_instances} cannot hold the brackets; raise it",
                shortest_jct_s=math.inf,
                cheapest_usd=math.inf,
            )
        cheapest_usd = self._joined(cheapest).prediction.cost_usd
        return search.infeasible(self.constraints, self._shortest_s(), cheapest_usd)

    def _too_dear(self, job: JobPlan) -> InfeasibleError:
        prediction = job.prediction
        cost_usd = prediction.cost_usd if prediction.cost is None else prediction.cost.p95
        obstacle, advice = too_dear(box_of(self.constraints), cost_usd)
        return InfeasibleError(obstacle, advice=advice, shortest_jct_s=_late_s(job), cheapest_usd=cost_usd)


def sample_lanes(lanes: Sequence[Lane], profile: Profile, offer: Offer, *, seed: int = 0) -> Samples:
    """Samples of a whole job: the latest end of its lanes, and the sum of what they and the head node cost."""
    widest = max(stage.trials for lane in lanes for stage in lane.stages)
    return _sampled(lanes, [_draws(lane, widest, profile, offer, seed) for lane in lanes], offer)


def _draws(lane: Lane, widest: int, profile: Profile, offer: Offer, seed: int) -> Draws:
    """The samples of a lane of a job whose widest stage has so many trials, without the head node."""
    alone = replace(offer, head_price_usd_per_hour=0.0)
    return Draws(lane.stages, profile, alone, seed=seed, lane=lane.brackets[0], widest=widest)


def _sampled(lanes: Sequence[Lane], draws: Sequence[Draws], offer: Offer) -> Samples:
    """The same, of draws that leave out the head node."""
    drawn = [each.evaluate(lane.planned.plan, each.most_chunks) for lane, each in zip(lanes, draws, strict=True)]
    size = min(len(samples.jct_s) for samples in drawn)
    jct_s = np.max([samples.jct_s[:size] for samples in drawn], axis=0)
    return Samples(
        jct_s=jct_s,
        cost_usd=np.sum([samples.cost_usd[:size] for samples in drawn], axis=0) + offer.head_cost_usd(1.0) * jct_s,
        walked=[step for samples in drawn for step in samples.steps],
    )


def _certain(offer: Offer, profile: Profile, slowed: float = 1.0) -> tuple[Offer, Profile]:
    """A lane's terms with nothing that varies; the head node is the job's."""
    fixed = replace(offer, head_price_usd_per_hour=0.0, provision_spread=FIXED, init_spread=FIXED, spot=None)
    slower = {gpus: slowed * time_s for gpus, time_s in profile.seconds_per_iteration.items()}
    steady = replace(profile, trial_cv=0.0, iteration_cv=0.0, startup_cv=0.0, mean_cv=0.0)
    return fixed, replace(steady, seconds_per_iteration=slower)


def _late_s(job: JobPlan) -> float:
    return job.prediction.jct_s if job.prediction.jct is None else job.prediction.jct.p95


def _cheaper(
    first: tuple[float, list[Lane]] | None, second: tuple[float, list[Lane]] | None
) -> tuple[float, list[Lane]] | None:
    if first is None or second is None:
        return first or second
    return first if first[0] <= second[0] else second


def _partitions(numbers: list[int]) -> Iterator[list[Group]]:
    """Every division of `numbers` into groups."""
    if not numbers:
        yield []
        return
    first, rest = numbers[0], numbers[1:]
    for groups in _partitions(rest):
        yield [(first,), *groups]
        for at, group in enumerate(groups):
            yield [*groups[:at], (first, *group), *groups[at + 1 :]]
