"""Planning where times vary: the best plan that keeps its constraints with the confidence asked for.

The exact search runs on mean times with an allowance for lateness and proposes plans. Samples, the same for all of
them, decide. The allowance is tuned until the plans lie on both sides of the confidence; then the best are improved.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from rubberband.errors import InfeasibleError
from rubberband.planner.exact.model import check_plan, interruptions, least_instances, mean_cost_of, predict
from rubberband.planner.exact.solver import (
    OBJECTIVES,
    Box,
    Objective,
    by_objective,
    lower_bound,
    pareto,
    several,
    unbeaten,
)
from rubberband.planner.exact.table import Floats, Ints, StageTable, build_table, distinct, mean_runs_s, mean_terms
from rubberband.planner.noise.makespan import makespan
from rubberband.planner.noise.sampling import Draws
from rubberband.planner.problem import Infeasible, Problem, surely_unreachable
from rubberband.values.offer import slots
from rubberband.values.plan import Market, Plan, Planned, PlanningConstraints, Prediction, Stage, StagePlan

_ROWS = 200  # samples of the makespan for each number of slots
_FEW_TRIALS = 64  # up to this number, every number of slots is sampled
_WAVES = 8


@dataclass(slots=True)
class NoisyMoments:
    """The `Moments` of a job: late is z * variance / (2 tau), so that late seconds add up over the stages.

    Stages with mean m and variance v in sum keep a deadline D with z standard deviations to spare if m + z*sqrt(v) <=
    D. That holds exactly if m + (z/2)*(v/tau + tau) <= D for some tau (the best is sqrt(v)), which the search can add.

    The makespan of n noisy trials on s slots is a little above n/s times the mean. The excess is sampled for a few s
    and interpolated between them.
    """

    draws: Draws
    z: float = 0.0
    tau_s: float = 1.0
    _grids: dict[int, tuple[Floats, Floats, Floats]] = field(default_factory=dict)
    _known: dict[tuple[Market, tuple[int, ...], tuple[int, ...]], tuple[Floats, Floats]] = field(default_factory=dict)

    def stages_s(self, market: Market, gangs: Ints, num_slots: Ints) -> tuple[Floats, Floats]:
        """Mean and late seconds, each (stages, counts, gangs)."""
        key = (market, num_slots.shape, tuple(gangs.tolist()))
        if key not in self._known:
            self._known[key] = self._moments(market, gangs, num_slots)
        mean_s, variance = self._known[key]
        return mean_s, self.z / (2.0 * self.tau_s) * variance

    def _moments(self, market: Market, gangs: Ints, num_slots: Ints) -> tuple[Floats, Floats]:
        stages = self.draws.stages
        mean_s, variance = np.empty((len(stages), *num_slots.shape)), np.empty((len(stages), *num_slots.shape))
        runs_s = mean_runs_s(stages, self.draws.profile, self.draws.offer, market, gangs)
        for index, stage in enumerate(stages):
            mean_s[index], variance[index] = self._stage(index, stage, market, gangs, num_slots, runs_s[index])
        return mean_s, variance

    def _stage(
        self, index: int, stage: Stage, market: Market, gangs: Ints, num_slots: Ints, runs_s: Floats
    ) -> tuple[Floats, Floats]:
        used = np.minimum(num_slots, stage.trials)
        sampled, excess, spread = self._grid(index, stage)
        with np.errstate(divide="ignore", invalid="ignore"):
            waves = np.ceil(stage.trials / used)
            load = stage.trials / used + np.interp(used, sampled, excess)
            startup_s = np.array([self.draws.profile.startup_s(gpus) for gpus in gangs.tolist()])
            mean_s = startup_s * waves + (runs_s - startup_s) * load
            variance = ((runs_s - startup_s) * np.interp(used, sampled, spread)) ** 2
            variance = variance + waves * (startup_s * self.draws.profile.startup_cv) ** 2
            if market == "spot":
                variance = variance + load * self._spot_variance(stage, gangs)
        never = num_slots == 0
        return np.where(never, np.inf, mean_s), np.where(never, 0.0, variance)

    def _grid(self, index: int, stage: Stage) -> tuple[Floats, Floats, Floats]:
        """Numbers of slots; the makespan beyond n/s there, and its standard deviation, in mean training times."""
        if index not in self._grids:
            profile, trials = self.draws.profile, stage.trials
            factor = self.draws.chunk(0).factor(index)[:, :_ROWS]
            sampled = _slots_to_sample(trials)
            spans = [makespan(factor, int(count)) for count in sampled]
            excess = np.array([span.mean() for span in spans]) - trials / sampled
            if profile.stage_cv(stage.work) == 0.0 and self.draws.speeds is None:
                sampled = np.arange(1.0, trials + 1.0)
                excess = np.ceil(trials / sampled) - trials / sampled
                spans = [np.zeros(1)] * trials
            self._grids[index] = (sampled, excess, np.array([span.std() for span in spans]))
        return self._grids[index]

    def _spot_variance(self, stage: Stage, gangs: Ints) -> Floats:
        """(gangs,) Variance that interruptions add to a stage: a Poisson number of losses."""
        variances = []
        for gpus in gangs.tolist():
            rate, lost_s = interruptions(stage, gpus, self.draws.profile, self.draws.offer)
            steady_s = self.draws.profile.startup_s(gpus) + stage.work * self.draws.profile.iteration_s(gpus)
            variances.append(rate * steady_s * lost_s**2)
        return np.array(variances)


def _slots_to_sample(trials: int) -> Floats:
    """Return all numbers of slots; for many trials those where a small number of waves changes, and a few more."""
    if trials <= _FEW_TRIALS:
        return np.arange(1.0, trials + 1.0)
    edges = np.ceil(trials / np.arange(1.0, _WAVES + 1.0))
    return distinct(np.concatenate([edges, edges - 1.0, np.round(np.geomspace(1.0, edges[-1], _WAVES))]))


ROUGH_CHUNKS = 2
"""Chunks of samples that every candidate has."""
_CLEAR = 2.5
"""Standard errors below the confidence at which a probability is clearly too small."""
_SURE = 5.0
"""Standard errors above it at which it is clearly enough: one of many candidates, often tested, may be lucky."""
_WORTH_IT = 0.005
"""Share by which a candidate that few samples speak against must be better to get more of them."""
_HOPEFUL = 8
_TIE = 0.001
"""A share of the time so small that saving it is worth no money, where time is the objective."""
_NEARLY = 0.003
"""Most by which the luck of one candidate differs from another's."""
_PROPOSALS = 24
_ROUNDS = 6
_HALVINGS = 2
_NEARLY_KEPT = 0.02
"""A candidate that misses the confidence by so much may have neighbours that keep it."""
_FAMILIES = 4  # those searched, of families of gang sizes with the best lower bounds
_NEARLY_AS_GOOD = 1.002  # few samples, or a bound, may be off by this factor
_MOST_STARTED = 256
"""The slowest of more instances is taken to be as slow."""


@dataclass(slots=True)
class SampledPlan:
    """The samples of a candidate so far."""

    jct_s: Floats
    cost_usd: Floats
    roughly: float = 0.0
    """Share within the limits of the samples that every candidate has."""
    value: tuple[float, float] = (0.0, 0.0)
    """The objective and the tie-breaker, by these samples."""

    def kept(self, box: Box) -> float:
        """Return the share of samples within the limits."""
        return float(box.holds(self.jct_s, self.cost_usd).mean())


@dataclass(slots=True)
class Judge:
    """Judges candidates by the same samples, as many as it takes to decide."""

    draws: Draws
    problem: Problem
    box: Box
    looks: dict[Plan, SampledPlan] = field(default_factory=dict)
    _boxes: dict[Plan, Box] = field(default_factory=dict)
    luck: float | None = None
    """How much more often plans keep the limits in the samples that every candidate has than in all. Measured on one
    plan it nearly holds for similar ones, as the samples are the same for all."""
    refused: set[Plan] = field(default_factory=set)
    """Candidates that do not surely keep the limits."""

    @property
    def confidence(self) -> float:
        """Probability that a plan must keep the limits with."""
        return self.problem.constraints.confidence

    def box_of(self, candidate: Plan) -> Box:
        """Return the limits of a candidate, less its reserve."""
        if not math.isfinite(self.box.cost_usd):
            return self.box
        if candidate not in self._boxes:
            self._boxes[candidate] = self.box.less(self.problem.reserve_usd(candidate))
        return self._boxes[candidate]

    def look(self, candidate: Plan, num_chunks: int = ROUGH_CHUNKS) -> SampledPlan:
        """Return the samples of a candidate, at least `num_chunks` chunks of them."""
        known = self.looks.get(candidate)
        have = 0 if known is None else len(known.jct_s) // self.draws.rows
        if have < num_chunks:
            jct_s, cost_usd = self.draws.totals(candidate, range(have, num_chunks), self.problem.held)
            if known is not None:
                jct_s, cost_usd = np.concatenate([known.jct_s, jct_s]), np.concatenate([known.cost_usd, cost_usd])
                known = self.looks[candidate] = replace(known, jct_s=jct_s, cost_usd=cost_usd)
            else:
                known = self.looks[candidate] = SampledPlan(jct_s, cost_usd)
                known.roughly = known.kept(self.box_of(candidate))
                means = float(jct_s.mean()), float(cost_usd.mean())
                known.value = by_objective(self.problem.objective, *means)
        assert known is not None
        return known

    def value(self, candidate: Plan) -> tuple[float, float]:
        """Return the objective and the tie-breaker, by the samples that every candidate has."""
        return self.looks[candidate].value

    def likely(self, candidate: Plan) -> bool:
        """Return whether a candidate seems to keep the limits with the confidence, and was not refused."""
        enough = min(1.0, self.confidence + (self.luck or 0.0))
        return candidate not in self.refused and self.look(candidate).roughly >= enough

    def sure(self, candidate: Plan) -> bool:
        """Return whether it surely does: draws samples until that is clear; without a clear margin, it does not."""
        num_chunks = ROUGH_CHUNKS
        while True:
            look = self.look(candidate, num_chunks)
            kept, error = look.kept(self.box_of(candidate)), self._error(len(look.jct_s))
            if kept > self.confidence + _SURE * error:
                return True
            if kept < self.confidence - _CLEAR * error or num_chunks == self.draws.most_chunks:
                break
            num_chunks = min(num_chunks * 3 // 2, self.draws.most_chunks)
        if num_chunks > ROUGH_CHUNKS:
            self.luck = look.roughly - kept
        if num_chunks == self.draws.most_chunks and kept >= min(1.0, self.confidence + error):
            return True
        self.refused.add(candidate)
        return False

    def _error(self, num_samples: int) -> float:
        return math.sqrt(self.confidence * (1.0 - self.confidence) / num_samples)

    def ranked(self) -> list[Plan]:
        """Return the candidates that likely keep the limits, best first; times that hardly differ tie."""
        plans = sorted(filter(self.likely, self.looks), key=self.value)
        if self.problem.objective == "min_cost" or not plans:
            return plans
        reach_s = self.value(plans[0])[0] * (1.0 + _TIE)
        ties = sum(self.value(plan)[0] <= reach_s for plan in plans)
        return sorted(plans[:ties], key=lambda plan: self.value(plan)[::-1]) + plans[ties:]

    def nearly(self, best: Plan) -> list[Plan]:
        """Return the candidate better than `best` that nearly keeps the limits: a neighbour of it may keep them."""
        bound = self.value(best)[0] * (1.0 - _WORTH_IT)
        near = [
            plan
            for plan, look in self.looks.items()
            if look.value[0] < bound and look.roughly >= self.confidence - _NEARLY_KEPT and not self.likely(plan)
        ]
        return sorted(near, key=lambda plan: -self.looks[plan].roughly)[:1]

    def closest(self, most: int) -> list[Plan]:
        """Return the candidates that keep the limits most often."""
        return sorted(self.looks, key=lambda candidate: -self.looks[candidate].kept(self.box_of(candidate)))[:most]

    def best(self) -> Plan | None:
        """Return the best candidate that surely keeps the limits; the luck measured on one rules others out."""
        best = None
        while best is None and (ranked := self.ranked()):
            best = ranked[0] if self.sure(ranked[0]) else None
        bound = math.inf if best is None else self.value(best)[0] * (1.0 - _WORTH_IT)
        off = _CLEAR * self._error(ROUGH_CHUNKS * self.draws.rows) if self.luck is None else _NEARLY - self.luck
        hopeful = [
            plan
            for plan, look in self.looks.items()
            if plan not in self.refused and look.value[0] < bound and look.roughly >= self.confidence - off
        ]
        return next(filter(self.sure, sorted(hopeful, key=self.value)[:_HOPEFUL]), best)


def planned(problem: Problem, chosen: Plan, draws: Draws | None = None) -> Planned:
    """Return a plan with its prediction, and its odds where times vary. Raises InputError as `predict` does."""
    stages, profile, offer = problem.stages, problem.profile, problem.offer
    check_plan(stages, chosen, offer)
    if not problem.varies:
        return certainly(problem, chosen, predict(stages, chosen, profile, offer, problem.held))
    drawn = draws or problem.draws()
    samples = drawn.evaluate(chosen, drawn.most_chunks, problem.held)
    reserve_usd = problem.reserve_usd(chosen)
    return Planned(
        plan=chosen,
        prediction=samples.prediction(chosen, profile, offer),
        odds=problem.box.less(reserve_usd).odds(samples.jct_s, samples.cost_usd),
        reserve_usd=reserve_usd,
    )


def certainly(problem: Problem, chosen: Plan, prediction: Prediction) -> Planned:
    """Return a plan whose times do not vary, with its reserve."""
    reserve_usd = problem.reserve_usd(chosen, [stage.cost_usd for stage in prediction.stages])
    return Planned(plan=chosen, prediction=prediction, reserve_usd=reserve_usd)


def evaluator(problem: Problem) -> Callable[[Plan], tuple[float, float]]:
    """Return a function from a plan to (the JCT that it keeps with the confidence, its mean cost)."""
    if not problem.varies:
        return mean_cost_of(problem.stages, problem.profile, problem.offer)
    draws = problem.draws()

    def sampled(candidate: Plan) -> tuple[float, float]:
        jct_s, cost_usd = draws.totals(candidate, range(1))
        return float(np.quantile(jct_s, problem.constraints.confidence)), float(cost_usd.mean())

    return sampled


def solve(problem: Problem, draws: Draws | None = None) -> Planned | Infeasible:
    """Return the plan of least mean cost (or mean JCT) with P(JCT <= deadline and cost <= max_cost) >= confidence.

    `draws` are the samples of the same job that another search has drawn, if there are any.
    """
    drawn = draws or problem.draws()
    if problem.prefers_spot and (chosen := _SampledCandidates(problem, drawn, ("spot",)).best()) is not None:
        return planned(problem, chosen, drawn)
    search = _SampledCandidates(problem, drawn)
    chosen = search.best()
    return Infeasible(search.infeasible) if chosen is None else planned(problem, chosen, drawn)


def frontier(problem: Problem) -> list[tuple[float, float]]:
    """Return (the JCT kept with the confidence, mean cost) of plans near the frontier, fastest first."""
    search, points = _SampledCandidates(problem, problem.draws()), list[tuple[float, float]]()
    for table in search.tables(search.z, search.tau_s()):
        for corner in pareto(table, Box(), constant=problem.constant):
            times_s, costs_usd = search.draws.totals(table.plan(corner.path), range(1))
            points.append((float(np.quantile(times_s, problem.constraints.confidence)), float(costs_usd.mean())))
    return unbeaten(points, problem.box)


class _SampledCandidates:
    """The candidates of one planning call."""

    def __init__(self, problem: Problem, draws: Draws, markets: tuple[Market, ...] | None = None) -> None:
        self.problem, self.draws, self.offer = problem, draws, problem.offer
        self.allowed = self.markets = markets
        """The markets of all candidates, and of the proposals; None: those of the offer."""
        self.judge = Judge(draws, problem, problem.box)
        self.moments = NoisyMoments(draws)
        self.z = NormalDist().inv_cdf(max(0.5, problem.constraints.confidence))
        self.slower_s = self._slower_s()
        self.families = problem.families()
        if len(self.families) > _FAMILIES:
            self.families = self._promising()

    def best(self) -> Plan | None:
        """Return the best plan that surely keeps the limits; None if none is found."""
        for markets in self._market_sets():
            self.markets = markets
            if self.markets is None or not self.proposes_only(self.markets):
                self.look_at(self.propose())
        self.propose_sooner()
        chosen = self.improved()
        if chosen is None:
            held = {cohort.market for cohort in self.problem.held}
            if self.offer.spot is not None and self.allowed is None and held <= {"on_demand"}:
                self.markets = ("on_demand",)  # its times vary less
                self.look_at(self.propose())
            self.propose_safest()
            chosen = self.improved()
        return chosen

    def _market_sets(self) -> list[tuple[Market, ...] | None]:
        """Return the markets that proposals use: all; and spot alone, whose lateness is unlike that of a mixture."""
        held = self.problem.held
        if self.allowed is None and self.offer.spot is not None and all(cohort.market == "spot" for cohort in held):
            return [None, ("spot",)]
        return [self.allowed]

    def _promising(self) -> list[PlanningConstraints]:
        """Return the families with the best plans on mean times, where there are too many to search them all."""
        problem = self.problem
        mean = [
            build_table(problem.stages, problem.profile, self.offer, limits, problem.held) for limits in self.families
        ]
        values = [lower_bound(table, self.judge.box, problem.objective) for table in mean]
        return [self.families[index] for index in np.argsort(values, kind="stable")[:_FAMILIES].tolist()]

    def tables(self, z: float, tau_s: float) -> list[StageTable]:
        """Return the tables of the search with an allowance of z standard deviations."""
        problem, self.moments.z, self.moments.tau_s = self.problem, z, tau_s
        most = max(1, min(self.offer.max_instances, max(stage.trials for stage in problem.stages)))
        chunk = self.draws.chunk(0)
        provision_s, init_s = np.asarray(chunk.provision_s(0)), np.asarray(chunk.init_s(0, max(1, most // 2)))
        terms = replace(
            mean_terms(self.offer),
            provision_s=float(provision_s.mean()),
            init_s=float(np.mean(chunk.init_s(0, 1))),
            slower_s=self.slower_s,
            late_growth_s=z / (2.0 * tau_s) * float(provision_s.var() + init_s.var()),
        )
        job = (problem.stages, problem.profile, self.offer)
        return [
            build_table(*job, limits, problem.held, self.moments.stages_s, terms, self.markets)
            for limits in self.families
        ]

    def _slower_s(self) -> Floats | None:
        """Return by how much the slowest of 0, 1, 2, … instances starts later than one, on average."""
        if self.offer.init_spread.certain:
            return None
        counts, chunk = np.arange(1, min(self.offer.max_instances, _MOST_STARTED) + 1), self.draws.chunk(0)
        means_s = [float(np.mean(chunk.init_s(0, count))) for count in counts.tolist()]
        return np.interp(np.arange(self.offer.max_instances + 1), counts, means_s) - means_s[0]

    def tau_s(self) -> float:
        """Return the standard deviation of the JCT of a good plan."""
        box = self.judge.box
        plans = self.solved(0.0, 1.0, box) or self.solved(0.0, 1.0, Box(cost_usd=box.cost_usd))
        spread = [float(self.judge.look(candidate).jct_s.std()) for candidate in plans[:1]]
        return max([1e-3, *spread])

    def solved(self, z: float, tau_s: float, box: Box, objective: Objective | None = None) -> list[Plan]:
        """Return the best few plans that keep the limits with an allowance of z standard deviations."""
        narrowed = Box(time_s=box.time_s - z * tau_s / 2.0, cost_usd=box.cost_usd)
        goal = objective or self.problem.objective
        ranked: list[tuple[float, Plan]] = []
        for table in self.tables(z, tau_s):
            for plan in several(table, narrowed, goal, constant=self.problem.constant, most=_PROPOSALS):
                ranked.append((by_objective(goal, plan.time_s, plan.cost_usd)[0], table.plan(plan.path)))
        return [plan for _, plan in sorted(ranked, key=lambda pair: pair[0])]

    def proposes_only(self, markets: tuple[Market, ...]) -> bool:
        """Return whether all of the candidates so far use no other markets, so that they are proposed already."""
        used = {choice.market for candidate in self.judge.looks for choice in candidate.stages}
        return bool(used) and used.issubset(markets)

    def propose(self) -> Iterable[Plan]:
        """Propose plans about the confidence.

        The deadline given to the search moves by how late the best proposal is.
        """
        tau_s, deadline_s, margin_usd = self.tau_s(), self.judge.box.time_s, 0.0
        z, moved_s, leaders = (self.z if math.isfinite(deadline_s) else 0.0), 0.0, set[Plan]()
        for _ in range(_ROUNDS):
            box = Box(time_s=deadline_s - moved_s, cost_usd=self.judge.box.cost_usd - margin_usd)
            proposals = self.solved(z, tau_s, box)
            yield from proposals
            if not proposals and moved_s > 1e-3:
                moved_s /= 2.0
                continue
            if not proposals or proposals[0] in leaders:
                return
            leaders.add(proposals[0])
            look = self.judge.look(proposals[0])
            margin_usd = 0.0 if any(map(self.judge.likely, proposals)) else self._margin_usd(proposals[0], look)
            if math.isfinite(deadline_s):
                moved_s += float(np.quantile(look.jct_s, self.judge.confidence)) - deadline_s
                tau_s = max(1e-3, float(look.jct_s.std()))

    def look_at(self, proposals: Iterable[Plan]) -> None:
        """Draw the first samples of all of these."""
        for proposed in proposals:
            self.judge.look(proposed)

    def propose_sooner(self) -> None:
        """Look at plans that are faster, and cost more, than the best so far: halve the budget between the two."""
        self.markets, most_usd = self.allowed, self.judge.box.cost_usd
        ranked = self.judge.ranked()
        if self.problem.objective != "min_time" or not ranked or not math.isfinite(most_usd):
            return
        least_usd, tau_s = self.judge.value(ranked[0])[1], self.tau_s()
        for _ in range(_HALVINGS):
            middle_usd = (least_usd + most_usd) / 2.0
            proposals = self.solved(0.0, tau_s, Box(time_s=self.judge.box.time_s, cost_usd=middle_usd))
            self.look_at(proposals)
            likely = any(map(self.judge.likely, proposals))
            least_usd, most_usd = (middle_usd, most_usd) if likely else (least_usd, middle_usd)

    def _margin_usd(self, candidate: Plan, look: SampledPlan) -> float:
        """Return how much less a plan would have to cost to keep the budget with the confidence."""
        if not math.isfinite(self.judge.box.cost_usd):
            return 0.0
        unsure_usd = float(np.quantile(look.cost_usd, self.judge.confidence) - look.cost_usd.mean())
        return max(0.0, unsure_usd + self.problem.reserve_usd(candidate))

    def propose_safest(self) -> None:
        """Look at the plans that are most likely to be in time, and at the cheapest ones."""
        self.markets = self.allowed
        tau_s, box = self.tau_s(), self.judge.box
        limits = dict.fromkeys((Box(), Box(time_s=box.time_s), Box(cost_usd=box.cost_usd)))
        for z in (0.0, self.z, 2.0 * self.z):
            for limit, goal in itertools.product(limits, OBJECTIVES):
                self.look_at(self.solved(z, tau_s, limit, goal))

    def improved(self) -> Plan | None:
        """Return the best candidate after steps to better ones; judging reveals how lucky the samples are.

        A refused candidate has kept more expensive ones from being looked at: the steps are taken again without it.
        """
        self.improve()
        before = self.judge.best()
        for _ in range(_ROUNDS):
            self.improve()
            chosen = self.judge.best()
            if chosen == before:
                break
            before = chosen
        return chosen

    def improve(self) -> None:
        """Step from the best candidates to better neighbours until there are none."""
        tried: set[Plan] = set()
        for _ in range(_ROUNDS):
            ranked = self.judge.ranked()
            leaders = [*ranked[:2], *self.judge.nearly(ranked[0])] if ranked else self.judge.closest(2)
            fresh = [candidate for candidate in leaders if candidate not in tried]
            if not fresh:
                return
            for candidate in fresh:
                tried.add(candidate)
                bound = self.judge.value(ranked[0])[0] if ranked else math.inf
                for neighbour in self._neighbours(candidate):
                    if self._may_be_better(neighbour, bound):
                        self.judge.look(neighbour)

    def _may_be_better(self, candidate: Plan, bound: float) -> bool:
        if candidate in self.judge.looks:
            return False
        held, objective = self.problem.held, self.problem.objective
        if math.isfinite(bound):
            least, _ = by_objective(objective, *self.draws.least(candidate, held))
            if least >= bound * _NEARLY_AS_GOOD:
                return False
        few, box = SampledPlan(*self.draws.totals(candidate, range(1), held)), self.judge.box_of(candidate)
        if bound == math.inf:
            return few.kept(box) > 0.0
        value = float(by_objective(objective, few.jct_s, few.cost_usd)[0].mean())
        return value < bound * _NEARLY_AS_GOOD and few.kept(box) >= self.judge.confidence - _NEARLY_KEPT

    def _neighbours(self, candidate: Plan) -> Iterable[Plan]:
        """Yield the plans that differ in one run of stages of equal width, in one stage, or in the market."""
        choices, num_stages = candidate.stages, len(candidate.stages)
        for first, last in [(0, num_stages)] if self.problem.constant else _runs(choices):
            held = choices[first].instances
            steps = {held - 1, held + 1, held - 2, held + 2, held * 3 // 4, held * 5 // 4} - {held}
            for count in sorted(step for step in steps if 1 <= step <= self.offer.max_instances):
                yield from self._changed(choices, first, last, instances=count)
        if self.offer.spot is not None and self.allowed is None:
            markets: tuple[Market, Market] = ("on_demand", "spot")
            for market in markets:
                yield from self._changed(choices, 0, num_stages, market=market)
                for index in range(num_stages):
                    yield from self._changed(choices, index, index + 1, market=market)
        for index, choice in enumerate(choices):
            for gpus in self._gangs(choice):
                yield from self._changed(choices, index, index + 1, gpus_per_trial=gpus)
                for count in self._waved(index, choice, gpus):
                    if self.problem.policy == "optimal" and 1 <= count <= self.offer.max_instances:
                        yield from self._changed(choices, index, index + 1, instances=count, gpus_per_trial=gpus)

    def _changed(self, choices: tuple[StagePlan, ...], first: int, last: int, **changes: Any) -> Iterable[Plan]:
        """Yield the plan with other choices for the stages [first, last), if every stage can run a trial."""
        changed = (replace(choice, **changes) for choice in choices[first:last])
        plan = Plan(stages=(*choices[:first], *changed, *choices[last:]))
        if all(slots(choice.instances, self.offer.slots, choice.gpus_per_trial) for choice in plan.stages):
            yield plan

    def _waved(self, index: int, choice: StagePlan, gpus: int) -> list[int]:
        """Return counts of one instance or one wave more or less, or with as many waves, in gangs of `gpus`."""
        trials, per = self.problem.stages[index].trials, self.offer.slots
        waves = -(-trials // slots(choice.instances, per, choice.gpus_per_trial))
        needed = (least_instances(-(-trials // some), per, gpus) for some in (waves - 1, waves, waves + 1) if some)
        return sorted({choice.instances - 1, choice.instances + 1, *needed})

    def _gangs(self, choice: StagePlan) -> list[int]:
        if self.problem.policy == "naive_elastic":
            return []
        sizes = self.problem.constraints.gang_sizes(self.offer.slots)
        index = sizes.index(choice.gpus_per_trial)
        return sizes[max(0, index - 1) : index] + sizes[index + 1 : index + 2]

    def infeasible(self) -> InfeasibleError:
        """Return the error that names the limit out of reach with the confidence, and the nearest value within."""
        points = []
        for candidate, look in self.judge.looks.items():
            jct_s, cost_usd = (np.quantile(values, self.judge.confidence) for values in (look.jct_s, look.cost_usd))
            points.append((float(jct_s), float(cost_usd) + self.problem.reserve_usd(candidate)))
        return surely_unreachable(self.problem, points)


def _runs(choices: Sequence[StagePlan]) -> list[tuple[int, int]]:
    """Return the maximal runs of stages with equally many instances, and every stage by itself: [first, last)."""
    counts = [choice.instances for choice in choices]
    edges = [0, *(index for index in range(1, len(counts)) if counts[index] != counts[index - 1])]
    whole = list(itertools.pairwise([*edges, len(choices)]))
    return whole + [(index, index + 1) for index in range(len(choices)) if (index, index + 1) not in whole]
