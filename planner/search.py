"""Searching for a plan: the cheapest (or the fastest) within a deadline and a budget, or the reason why there is none.

It states the problem for the solver (`rubberband.planner.exact.solver`) and words the answer for the user.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import heapify, heappop, heappush
from operator import attrgetter

import numpy as np

from rubberband.errors import InfeasibleError, InputError
from rubberband.planner import risk
from rubberband.planner.exact.labels import COST_TOLERANCE_USD, TIME_TOLERANCE_S
from rubberband.planner.exact.model import MeanCost, least_instances, predict
from rubberband.planner.exact.solver import Box, FoundPlan, Objective, by_objective, lower_bound, pareto, solve
from rubberband.planner.exact.table import StageTable, build_table, gangs_of, holding_is_free, mean_runs_s
from rubberband.planner.noise.sampling import Draws
from rubberband.planner.problem import Infeasible, JobPlan, Problem, unreachable
from rubberband.values.offer import Offer, slots
from rubberband.values.plan import Plan, Planned, PlanningConstraints, Prediction, Stage, StagePlan
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
_gpus_of = attrgetter("gpus")
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
    least_usd: float = 0.0,
) -> Plan | None:
    """Return the cheapest plan that Algorithm 2 ends at from multiples of the best static allocation.

    None if no static allocation is in time (the paper's greedy needs a feasible start, though an elastic plan may
    exist), or if the plan found exceeds `max_cost_usd`. With 1 among the `warm_starts` the plan never costs more than
    the best static allocation. Equal plans are evaluated once; `known` has the figures of earlier searches with the
    same `evaluate`, and gets those of this one. An instance that is held throughout costs `least_usd` or more.

    Raises InputError if no GPUs per trial fit the offer, and any error of `evaluate`.

    An allocation is a number of GPUs for each stage, divided fairly among its trials. The caller supplies the
    prediction; with the paper's Algorithm 1 (`rubberband.planner.dag`) this is the paper's planner.
    """
    search = _AllocationSearch(
        stages, offer, constraints, evaluate, gangs_of(profile, offer, constraints), {} if known is None else known
    )
    most, best_static = offer.max_instances, None
    for count in range(1, most + 1):
        if best_static is not None and count * least_usd * (1.0 - 1e-9) > search.cost_and_time(best_static)[0]:
            break
        allocations = search.static(count)
        if search.in_time(allocations):
            best_static = min(best_static or allocations, allocations, key=search.cost_and_time)
    if best_static is None:
        return None
    instances = best_static[0].choice.instances
    multiples = [search.static(min(factor * instances, most)) for factor in warm_starts]
    ends = [search.descend(warm_start) for warm_start in multiples if search.in_time(warm_start)]
    best = min(ends, key=search.cost_and_time, default=None)
    return _plan(best) if best and search.in_budget(best) else None


@dataclass(slots=True)
class _AllocationSearch:
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
            if count * size <= self.offer.slots * self.offer.max_instances
            and slots(-(-count * size // self.offer.slots), self.offer.slots, size) >= count
        )
        return sorted(fair, key=lambda allocation: allocation.gpus)

    def _allocation(self, gpus: int, trials: int) -> _Allocation:
        """Divide `gpus` GPUs among `trials` trials, on as many whole instances as that takes.

        A trial's share is max(1, floor(gpus / trials)), rounded down to a size that packs with all trials at once.
        """
        instances, share = -(-gpus // self.offer.slots), self.sizes[0]
        for size in reversed(self.sizes):
            if size <= gpus // trials and slots(instances, self.offer.slots, size) >= trials:
                share = size
                break
        return _Allocation(gpus, StagePlan(instances=instances, gpus_per_trial=share), (instances, share))

    def static(self, instances: int) -> _Allocations:
        """Return the same `instances` for every stage; empty if no trial fits on them."""
        if slots(instances, self.offer.slots, self.sizes[0]) == 0:
            return ()
        return tuple(self._allocation(instances * self.offer.slots, stage.trials) for stage in self.stages)

    def descend(self, allocations: _Allocations) -> _Allocations:
        """Algorithm 2: take the best candidate until it saves nothing or is late."""
        figures = self.cost_and_time(allocations)
        while candidates := self._candidates(allocations):
            best = max(candidates, key=lambda lower: _marginal_benefit(figures, self.cost_and_time(lower)))
            after = self.cost_and_time(best)
            if figures[0] - after[0] <= COST_TOLERANCE_USD or not self.in_time(best):
                break
            allocations, figures = best, after
        return allocations

    def in_time(self, allocations: _Allocations) -> bool:
        """Return whether there are allocations and they are predicted to keep the deadline."""
        deadline_s = math.inf if self.constraints.deadline_s is None else self.constraints.deadline_s
        return bool(allocations) and self.cost_and_time(allocations)[1] <= deadline_s + TIME_TOLERANCE_S

    def in_budget(self, allocations: _Allocations) -> bool:
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
            below = bisect_left(ladder, allocation.gpus, key=_gpus_of)
            if below:
                candidates.append((*allocations[:index], ladder[below - 1], *allocations[index + 1 :]))
        return candidates


def _marginal_benefit(before: Figures, after: Figures) -> tuple[float, float]:
    """Equation 1, m = (C(a*) - C(a)) / (T(a) - T(a*)), and the saving for ties.

    Two cases the paper leaves undefined, or would reward at a higher cost: no saving ranks last, a saving that takes
    no time ranks first.
    """
    (cost_before_usd, before_s), (cost_after_usd, after_s) = before, after
    saved_usd, longer_s = cost_before_usd - cost_after_usd, after_s - before_s
    if saved_usd <= COST_TOLERANCE_USD:
        return -math.inf, saved_usd
    return (saved_usd / longer_s if longer_s > TIME_TOLERANCE_S else math.inf), saved_usd


def _plan(allocations: _Allocations) -> Plan:
    return Plan(stages=tuple([allocation.choice for allocation in allocations]))


KEPT_TABLES = 32


def solve_chain(problem: Problem, draws: Draws | None = None) -> Planned | Infeasible:
    """Return the best plan of one bracket; `draws` are its samples where times vary, if some are drawn already."""
    problem.check()
    if problem.policy == "greedy":
        return _greedy(problem)
    if problem.varies:
        return risk.solve(problem, draws)
    tables = _tables(problem)
    return _leaving(problem, tables) or Infeasible(lambda: _infeasible(problem, tables))


def _leaving(problem: Problem, tables: _Tables) -> Planned | None:
    """Return the best plan that leaves its reserve; None if none is found.

    A plan that leaves too little is followed by cheaper ones, then by those of narrower clusters, whose reserve is
    smaller; where time is the objective, at last by the cheapest one.
    """
    planned = _certain(problem, tables)
    if planned is None or keeps(planned, problem.constraints):
        return planned
    cap_usd, width = problem.constraints.max_cost_usd, problem.offer.max_instances
    assert cap_usd is not None, "without max_cost there is no reserve"
    while width > 0:
        left_usd, width, offer = cap_usd, 0, replace(problem.offer, max_instances=width)
        for _ in range(_MOST_TRIES):
            limits = replace(problem.constraints, max_cost_usd=left_usd)
            narrowed = replace(problem, offer=offer, constraints=limits)
            planned = _certain(narrowed, _tables(narrowed))
            if planned is None:
                break
            if keeps(planned, problem.constraints):
                return planned
            width, left_usd = width or narrower([planned.plan]), cap_usd - planned.reserve_usd
    return _leaving(replace(problem, objective="min_cost"), tables) if problem.objective == "min_time" else None


_MOST_TRIES = 4
"""Another plan may have another reserve: this many are looked at for each width of the cluster."""
_NARROWING = 6
"""A cluster is made narrower by this part of it at a time."""


def narrower(plans: Iterable[Plan]) -> int:
    """Return the instances of a narrower cluster than of plans side by side: its plans have a smaller reserve."""
    widest = sum(max(choice.instances for choice in plan.stages) for plan in plans)
    return widest - max(1, widest // _NARROWING)


@dataclass(slots=True)
class _Tables:
    """The tables of a policy's searches, each built when it is first used."""

    build: Callable[[int], StageTable]
    least: Sequence[tuple[float, float]]
    """For each table: seconds and US dollars that none of its plans goes below."""
    _built: dict[int, StageTable] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.least)

    def __getitem__(self, index: int) -> StageTable:
        if index not in self._built:
            self._built[index] = self.build(index)
        return self._built[index]

    def roughly(self, index: int, box: Box, objective: Objective) -> float:
        """Return a lower bound on the objective without building the table; inf if no plan can be in the box."""
        time_s, cost_usd = (value * (1.0 - 1e-9) for value in self.least[index])
        if not all(box.limits_kept(time_s, cost_usd)):
            return math.inf
        return float(by_objective(objective, time_s, cost_usd)[0])


def _tables(problem: Problem) -> _Tables:
    stages, profile, offer = tuple(problem.stages), problem.profile, problem.offer
    searches = problem.families()
    if problem.held:
        built = [build_table(stages, profile, offer, limits, problem.held) for limits in searches]
        return _Tables(built.__getitem__, [(-math.inf, -math.inf)] * len(built))
    unlimited = [replace(limits, deadline_s=None, max_cost_usd=None, confidence=0.95) for limits in searches]
    return _Tables(
        lambda index: _table(stages, profile, offer, unlimited[index]),
        least_of_gangs(stages, profile, offer, [limits.min_gpus_per_trial for limits in searches])
        if len(searches) > 1
        else [(0.0, 0.0)],
    )


# The table of a job does not depend on its deadline and budget, and these are what users ask about again.
_table = lru_cache(maxsize=KEPT_TABLES)(build_table)


def least_of_gangs(
    stages: Sequence[Stage], profile: Profile, offer: Offer, gangs: Sequence[int]
) -> list[tuple[float, float]]:
    """Return seconds and US dollars that no plan of each gang goes below: stages are one wave, or no instance is idle.

    Raises InputError as `build_table` does.
    """
    runs_s = mean_runs_s(stages, profile, offer, "on_demand", np.array(gangs))
    if offer.billing == "per_function":
        held, init_s = np.array([[stage.trials * gpus / offer.slots for gpus in gangs] for stage in stages]), 0.0
    else:  # more waves hold no fewer instances times as long
        held = np.array([[least_instances(stage.trials, offer.slots, gpus) for gpus in gangs] for stage in stages])
        init_s = offer.init_delay_s
    costs_usd = offer.least_price_usd_per_s * (init_s + (held * runs_s).sum(axis=0))
    return list(zip(runs_s.sum(axis=0).tolist(), costs_usd.tolist(), strict=True))


def _best_of(tables: _Tables, box: Box, objective: Objective, constant: bool) -> tuple[StageTable, FoundPlan] | None:
    """Return the best plan of several tables, with its table; None if no plan is in the box."""
    if len(tables) == 1:
        solution = solve(tables[0], box, objective, constant=constant)
        return None if solution is None else (tables[0], solution)
    waiting = [(tables.roughly(index, box, objective), index, False) for index in range(len(tables))]
    heapify(waiting)
    first, narrowed = None, box
    while waiting:
        bound, index, is_exact = heappop(waiting)
        if bound == math.inf or (first is not None and bound > first[1].rank(objective)[0]):
            break
        if not is_exact:
            heappush(waiting, (lower_bound(tables[index], box, objective), index, True))
            continue
        solution = solve(tables[index], narrowed, objective, constant=constant)
        if solution is not None and (first is None or solution.rank(objective) < first[1].rank(objective)):
            first = (tables[index], solution)
            narrowed = narrowed.within(objective, by_objective(objective, solution.time_s, solution.cost_usd)[0])
    return first


def _certain(problem: Problem, tables: _Tables) -> Planned | None:
    best = _best_of(tables, problem.box, problem.objective, problem.constant)
    if best is None:
        return None
    table, solution = best
    chosen = table.plan(solution.path)
    if holding_is_free(problem.offer):
        chosen = _fewest_instances(problem, chosen)
    prediction = predict(problem.stages, chosen, problem.profile, problem.offer, problem.held)
    return risk.certainly(problem, chosen, prediction)


def _greedy(problem: Problem) -> Planned | Infeasible:
    """Algorithm 2, with every candidate predicted by our model (or, where times vary, by few samples)."""
    if problem.held:
        raise InputError("policy greedy starts from nothing: it cannot plan the rest of a job; use optimal")
    evaluate = risk.evaluator(problem)
    known = evaluate.figures if isinstance(evaluate, MeanCost) else None
    job = (problem.stages, problem.profile, problem.offer, problem.constraints)
    chosen = greedy(*job, evaluate=evaluate, known=known, least_usd=_least_usd_throughout(problem))
    return Infeasible(lambda: _greedy_fails(problem)) if chosen is None else risk.planned(problem, chosen)


def _least_usd_throughout(problem: Problem) -> float:
    """Return what an instance that is held through all stages costs at least, each of them one wave; 0 if unknown."""
    profile, offer = problem.profile, problem.offer
    if problem.varies or offer.billing == "per_function":
        return 0.0
    gangs = np.array(gangs_of(profile, offer, problem.constraints))
    runs_s = mean_runs_s(problem.stages, profile, offer, "on_demand", gangs)
    return offer.price_usd_per_s * (offer.init_delay_s + float(runs_s.min(axis=1).sum()))


def _greedy_fails(problem: Problem) -> InfeasibleError:
    """Return the reason why greedy finds no plan: there is none, or it does not see it."""
    nearest = solve_chain(replace(problem, policy="static"))
    if isinstance(nearest, Infeasible):
        return nearest.error
    return InfeasibleError(
        "greedy finds no plan that meets the constraints, though there is one; use policy optimal",
        shortest_jct_s=nearest.prediction.jct_s,
        cheapest_usd=nearest.prediction.cost_usd,
    )


def frontier(problem: Problem) -> list[tuple[float, float]]:
    """Return (jct_s, cost_usd) of every plan within the limits that no other beats on both, fastest first.

    Exact where nothing varies. Else the JCT is the one kept with `constraints.confidence`, the cost is the mean, and
    the plans are near the frontier. For one bracket, and the policies optimal and static. Empty if no plan meets them.

    Raises InputError if no plan can exist.
    """
    problem.check()
    if problem.varies:
        return risk.frontier(problem)
    table = build_table(problem.stages, problem.profile, problem.offer, problem.constraints)
    return [(point.time_s, point.cost_usd) for point in pareto(table, problem.box, constant=problem.constant)]


def meets(prediction: Prediction, constraints: PlanningConstraints, *, reserve_usd: float = 0.0) -> tuple[bool, bool]:
    """Return whether a prediction keeps the deadline and the budget, each up to the rounding of floats."""
    return Box.of(constraints).limits_kept(prediction.jct_s, prediction.cost_usd + reserve_usd)


def keeps(planned: Planned | JobPlan, constraints: PlanningConstraints) -> bool:
    """Return whether a plan keeps the limits; where times vary, with the confidence (greedy decides on few samples)."""
    if planned.odds is not None:
        return planned.odds.p_both >= constraints.confidence
    return all(meets(planned.prediction, constraints, reserve_usd=planned.reserve_usd))


def _fewest_instances(problem: Problem, chosen: Plan) -> Plan:
    """Return `chosen` with as few instances as keep every stage's waves, growing only where it starts a market."""
    fewest: list[StagePlan] = []
    for stage, choice in zip(reversed(problem.stages), reversed(chosen.stages), strict=True):
        gpus = choice.gpus_per_trial
        num_waves = -(-stage.trials // slots(choice.instances, problem.offer.slots, gpus))
        needed = least_instances(-(-stage.trials // num_waves), problem.offer.slots, gpus)
        later = fewest[-1].instances if fewest and fewest[-1].market == choice.market else 0
        fewest.append(replace(choice, instances=max(needed, later)))
    if problem.constant:
        fewest = [replace(choice, instances=fewest[-1].instances) for choice in fewest]
    return Plan(stages=tuple(reversed(fewest)))


def _infeasible(problem: Problem, tables: _Tables) -> InfeasibleError:
    """Return the error that names the limit out of reach, and the nearest value within reach."""

    def unpriced(deadline_s: float | None, objective: Objective) -> Planned:
        limits = replace(problem.constraints, deadline_s=deadline_s, max_cost_usd=None)
        planned = _certain(replace(problem, constraints=limits, objective=objective), tables)
        assert planned is not None, "a deadline that can be kept, or none, leaves a plan"
        return planned

    def needs_usd(deadline_s: float | None) -> float:
        planned = unpriced(deadline_s, "min_cost")
        return planned.prediction.cost_usd + problem.reserve_usd(planned.plan)

    def in_budget_s() -> float:
        soonest = replace(problem, constraints=replace(problem.constraints, deadline_s=None), objective="min_time")
        planned = _leaving(soonest, tables)
        assert planned is not None, "the cheapest plan leaves its reserve"
        return planned.prediction.jct_s

    limits = problem.constraints
    return unreachable(
        problem,
        unpriced(None, "min_time").prediction.jct_s,
        needs_usd(None),
        lambda: (needs_usd(limits.deadline_s), in_budget_s()),
    )
