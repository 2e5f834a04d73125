"""Planning where times vary: the best plan that keeps its constraints with the confidence that is asked for.

The exact search runs on mean times with an allowance for lateness (`rubberband.planner.risk`) and proposes plans;
samples, the same for all of them, decide (design/planning-model.md, Searching). The allowance is tuned until the plans
lie on both sides of the confidence, then the best are improved step by step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist

import numpy as np

from rubberband.errors import InfeasibleError
from rubberband.planner.labels import COST_TOLERANCE_USD, TIME_TOLERANCE_S
from rubberband.planner.makespan import makespan
from rubberband.planner.model import check_plan, interruptions, mean_cost_of, predict
from rubberband.planner.policies import box_of, family
from rubberband.planner.sampling import Draws, Samples, varies
from rubberband.planner.solver import OBJECTIVES, Box, Objective, lower_bound, pareto, several
from rubberband.planner.table import Floats, Ints, StageTable, build_table, distinct, mean_runs_s, mean_terms
from rubberband.planner.wording import too_dear, too_late, too_much_at_once
from rubberband.values.offer import Offer, gang_sizes, slots
from rubberband.values.plan import (
    Cohort,
    Market,
    Odds,
    Plan,
    Planned,
    PlanningConstraints,
    Policy,
    Speeds,
    Stage,
    StagePlan,
)
from rubberband.values.profile import Profile

# Deciding between candidate plans where times vary: the same samples for all, as many as it takes to be clear.


ROUGH_CHUNKS = 2
_CLEAR = 2.5
"""Standard errors below the confidence at which a probability is clearly too small."""
_SURE = 5.0
"""Standard errors above it at which it is clearly enough: of many candidates, often looked at, one may be lucky."""
_WORTH_IT = 0.005
"""How much better a candidate must be that few samples spoke against, to be given more of them."""
_HOPEFUL = 8
_TIE = 0.001
"""Where time is what counts, so small a share of it is not worth any money."""
_NEARLY = 0.003
"""By so much the luck of one candidate may not be that of another."""


@dataclass(slots=True)
class Look:
    """What is known of a candidate."""

    jct_s: Floats
    cost_usd: Floats
    roughly: float = 0.0
    """The share within the limits of the samples that every candidate has."""
    value: tuple[float, float] = (0.0, 0.0)
    """What is minimised, and what breaks ties, by these samples."""

    def kept(self, box: Box) -> float:
        """The share of samples within the limits."""
        return float(box.holds(self.jct_s, self.cost_usd).mean())


@dataclass(slots=True)
class Judge:
    """Looks at candidates with the same samples, as many as it takes to decide."""

    draws: Draws
    box: Box
    confidence: float
    objective: Objective
    held: Sequence[Cohort]
    looks: dict[Plan, Look] = field(default_factory=dict)
    luck: float | None = None
    """How much more often plans keep the limits in the samples that every candidate has than in all: where it is known
    of one, it holds nearly for those like it, as the samples are the same for all."""

    def look(self, candidate: Plan, num_chunks: int = ROUGH_CHUNKS) -> Look:
        """The samples of a candidate, at least `num_chunks` chunks of them."""
        known = self.looks.get(candidate)
        have = 0 if known is None else len(known.jct_s) // self.draws.rows
        if have < num_chunks:
            jct_s, cost_usd = self.draws.totals(candidate, range(have, num_chunks), self.held)
            if known is not None:
                jct_s, cost_usd = np.concatenate([known.jct_s, jct_s]), np.concatenate([known.cost_usd, cost_usd])
                known = self.looks[candidate] = replace(known, jct_s=jct_s, cost_usd=cost_usd)
            else:
                known = self.looks[candidate] = Look(jct_s, cost_usd)
                known.roughly, known.value = known.kept(self.box), self._value(jct_s, cost_usd)
        assert known is not None
        return known

    def _value(self, jct_s: Floats, cost_usd: Floats) -> tuple[float, float]:
        mean_usd, mean_s = float(cost_usd.mean()), float(jct_s.mean())
        return (mean_usd, mean_s) if self.objective == "min_cost" else (mean_s, mean_usd)

    def value(self, candidate: Plan) -> tuple[float, float]:
        """What is minimised, and what breaks ties, by the samples that every candidate has."""
        return self.looks[candidate].value

    def likely(self, candidate: Plan) -> bool:
        """Whether it seems to keep the limits with the confidence."""
        return self.look(candidate).roughly >= min(1.0, self.confidence + (self.luck or 0.0))

    def sure(self, candidate: Plan) -> bool:
        """Whether it does: with more samples until that is clear, and none that are left without a margin."""
        num_chunks = ROUGH_CHUNKS
        while True:
            look = self.look(candidate, num_chunks)
            kept, error = look.kept(self.box), self._error(len(look.jct_s))
            if kept > self.confidence + _SURE * error:
                return True
            if kept < self.confidence - _CLEAR * error or num_chunks == self.draws.most_chunks:
                break
            num_chunks = min(num_chunks * 3 // 2, self.draws.most_chunks)
        if num_chunks > ROUGH_CHUNKS:
            self.luck = look.roughly - kept
        return num_chunks == self.draws.most_chunks and kept >= min(1.0, self.confidence + error)

    def _error(self, num_samples: int) -> float:
        return math.sqrt(self.confidence * (1.0 - self.confidence) / num_samples)

    def ranked(self) -> list[Plan]:
        """The candidates that likely keep the limits, best first; times that are hardly unlike are a tie."""
        plans = sorted(filter(self.likely, self.looks), key=self.value)
        if self.objective == "min_cost" or not plans:
            return plans
        reach_s = self.value(plans[0])[0] * (1.0 + _TIE)
        ties = sum(self.value(plan)[0] <= reach_s for plan in plans)
        return sorted(plans[:ties], key=lambda plan: self.value(plan)[::-1]) + plans[ties:]

    def closest(self, most: int) -> list[Plan]:
        """The candidates that keep the limits most often."""
        return sorted(self.looks, key=lambda candidate: -self.looks[candidate].kept(self.box))[:most]

    def best(self) -> Plan | None:
        """The best candidate that surely keeps the limits; what is learned of one makes others unlikely."""
        best, seen = None, set[Plan]()
        while best is None and (left := next((plan for plan in self.ranked() if plan not in seen), None)):
            seen.add(left)
            best = left if self.sure(left) else None
        bound = math.inf if best is None else self.value(best)[0] * (1.0 - _WORTH_IT)
        off = _CLEAR * self._error(ROUGH_CHUNKS * self.draws.rows) if self.luck is None else _NEARLY - self.luck
        hopeful = [
            plan
            for plan, look in self.looks.items()
            if plan not in seen and look.value[0] < bound and look.roughly >= self.confidence - off
        ]
        return next(filter(self.sure, sorted(hopeful, key=self.value)[:_HOPEFUL]), best)


# Mean and variance of every stage's time where times vary: what steers the search, before samples decide.
#
# The makespan of n noisy trials on s slots lies a little above n/s times the mean; how much is sampled for a few s
# and interpolated between them.


_ROWS = 200
_FEW_TRIALS = 64
_WAVES = 8


@dataclass(slots=True)
class NoisyMoments:
    """The `Moments` of a job: late is z * variance / (2 tau), so that late seconds add up over the stages.

    A sum of stages with mean m and variance v keeps a deadline D with z standard deviations to spare, m + z*sqrt(v) <=
    D, exactly if m + (z/2)*(v/tau + tau) <= D for some tau (the best one is sqrt(v)): what the search can add up.
    """

    draws: Draws
    z: float = 0.0
    tau_s: float = 1.0
    _grids: dict[int, tuple[Floats, Floats, Floats]] = field(default_factory=dict)
    _known: dict[tuple[Market, tuple[int, ...], tuple[int, ...]], tuple[Floats, Floats]] = field(default_factory=dict)

    def stages_s(self, market: Market, gangs: Ints, slots: Ints) -> tuple[Floats, Floats]:
        """Mean and late seconds, each (stages, counts, gangs)."""
        key = (market, slots.shape, tuple(gangs.tolist()))
        if key not in self._known:
            self._known[key] = self._moments(market, gangs, slots)
        mean_s, variance = self._known[key]
        return mean_s, self.z / (2.0 * self.tau_s) * variance

    def _moments(self, market: Market, gangs: Ints, slots: Ints) -> tuple[Floats, Floats]:
        stages = self.draws.stages
        mean_s, variance = np.empty((len(stages), *slots.shape)), np.empty((len(stages), *slots.shape))
        runs_s = mean_runs_s(stages, self.draws.profile, self.draws.offer, market, gangs)
        for index, stage in enumerate(stages):
            mean_s[index], variance[index] = self._stage(index, stage, market, gangs, slots, runs_s[index])
        return mean_s, variance

    def _stage(
        self, index: int, stage: Stage, market: Market, gangs: Ints, slots: Ints, runs_s: Floats
    ) -> tuple[Floats, Floats]:
        used = np.minimum(slots, stage.trials)
        at, excess, spread = self._grid(index, stage)
        with np.errstate(divide="ignore", invalid="ignore"):
            waves = np.ceil(stage.trials / used)
            load = stage.trials / used + np.interp(used, at, excess)
            startup_s = self.draws.profile.trial_startup_s
            mean_s = startup_s * waves + (runs_s - startup_s) * load
            variance = ((runs_s - startup_s) * np.interp(used, at, spread)) ** 2
            variance = variance + waves * (startup_s * self.draws.profile.startup_cv) ** 2
            if market == "spot":
                variance = variance + load * self._spot_variance(stage, gangs)
        never = slots == 0
        return np.where(never, np.inf, mean_s), np.where(never, 0.0, variance)

    def _grid(self, index: int, stage: Stage) -> tuple[Floats, Floats, Floats]:
        """Numbers of slots; the makespan there beyond n/s, and its standard deviation, in mean training times."""
        if index not in self._grids:
            profile, trials = self.draws.profile, stage.trials
            factor = self.draws.chunk(0).factor(index)[:, :_ROWS]
            at = _slots_to_sample(trials)
            spans = [makespan(factor, int(slots)) for slots in at]
            excess = np.array([span.mean() for span in spans]) - trials / at
            if profile.stage_cv(stage.iterations) == 0.0 and self.draws.speeds is None:
                at = np.arange(1.0, trials + 1.0)
                excess = np.ceil(trials / at) - trials / at
                spans = [np.zeros(1)] * trials
            self._grids[index] = (at, excess, np.array([span.std() for span in spans]))
        return self._grids[index]

    def _spot_variance(self, stage: Stage, gangs: Ints) -> Floats:
        """(gangs,) Variance that interruptions add to a stage: Poisson numbers of losses."""
        found = []
        for gpus in gangs.tolist():
            rate, lost_s = interruptions(stage, gpus, self.draws.profile, self.draws.offer)
            steady_s = self.draws.profile.trial_startup_s + stage.iterations * self.draws.profile.iteration_s(gpus)
            found.append(rate * steady_s * lost_s**2)
        return np.array(found)


def _slots_to_sample(trials: int) -> Floats:
    """All, or where the number of waves changes while it is small, and a few more."""
    if trials <= _FEW_TRIALS:
        return np.arange(1.0, trials + 1.0)
    edges = np.ceil(trials / np.arange(1.0, _WAVES + 1.0))
    return distinct(np.concatenate([edges, edges - 1.0, np.round(np.geomspace(1.0, edges[-1], _WAVES))]))


def late_growth(draws: Draws, started: int) -> tuple[float, float, float]:
    """Mean SCALE, mean INIT_INSTANCE of `started` instances at once, and the variance of their sum."""
    chunk = draws.chunk(0)
    provision_s, init_s = np.asarray(chunk.provision_s(0)), np.asarray(chunk.init_s(0, started))
    return float(provision_s.mean()), float(init_s.mean()), float(provision_s.var() + init_s.var())


_PROPOSALS = 24
_ROUNDS = 6
_FAMILIES = 4
_NEARLY_AS_GOOD = 1.002
_MARKETS: tuple[Market, Market] = ("on_demand", "spot")


def planned(
    stages: Sequence[Stage],
    chosen: Plan,
    profile: Profile,
    offer: Offer,
    constraints: PlanningConstraints,
    *,
    held: Sequence[Cohort] = (),
    seed: int = 0,
    speeds: Speeds | None = None,
    draws: Draws | None = None,
) -> Planned:
    """A plan with its prediction, and its odds where times vary. Raises InputError as `predict` does."""
    check_plan(stages, chosen, offer)
    if not varies(profile, offer, speeds):
        return Planned(plan=chosen, prediction=predict(stages, chosen, profile, offer, held))
    drawn = draws or Draws(stages, profile, offer, seed=seed, speeds=speeds)
    samples = drawn.evaluate(chosen, drawn.most_chunks, held)
    return Planned(
        plan=chosen, prediction=samples.prediction(chosen, profile, offer), odds=odds(samples, box_of(constraints))
    )


def odds(samples: Samples, box: Box) -> Odds:
    """The share of samples that keep each limit."""
    in_time = samples.jct_s <= box.time_s + TIME_TOLERANCE_S
    in_budget = samples.cost_usd <= box.cost_usd + COST_TOLERANCE_USD
    return Odds(
        p_deadline=float(in_time.mean()),
        p_budget=float(in_budget.mean()),
        p_both=float((in_time & in_budget).mean()),
    )


def evaluator(
    stages: Sequence[Stage], profile: Profile, offer: Offer, constraints: PlanningConstraints, *, seed: int = 0
) -> Callable[[Plan], tuple[float, float]]:
    """A function from a plan to (the JCT that it keeps with the confidence, its mean cost)."""
    if not varies(profile, offer):
        return mean_cost_of(stages, profile, offer)
    draws = Draws(stages, profile, offer, seed=seed)

    def sampled(candidate: Plan) -> tuple[float, float]:
        jct_s, cost_usd = draws.totals(candidate, range(1))
        return float(np.quantile(jct_s, constraints.confidence)), float(cost_usd.mean())

    return sampled


def plan(
    stages: Sequence[Stage],
    profile: Profile,
    offer: Offer,
    constraints: PlanningConstraints,
    policy: Policy = "optimal",
    objective: Objective = "min_cost",
    *,
    held: Sequence[Cohort] = (),
    seed: int = 0,
    speeds: Speeds | None = None,
    draws: Draws | None = None,
) -> Planned:
    """The plan of least mean cost (or mean JCT) with P(JCT <= deadline and cost <= max_cost) >= confidence.

    `draws` are the samples of the same job that another search has drawn, if there are any.

    Raises InfeasibleError if none is found, and InputError if none can exist.
    """
    drawn = draws or Draws(stages, profile, offer, seed=seed, speeds=speeds)
    search = _Search(drawn, offer, constraints, policy, objective, held)
    for search.markets in _market_sets(offer, held):
        for proposed in search.propose():
            search.judge.look(proposed)
    chosen = search.improved()
    if chosen is None:
        search.propose_safest()
        chosen = search.improved()
    if chosen is None:
        raise search.infeasible()
    return planned(stages, chosen, profile, offer, constraints, held=held, draws=search.judge.draws)


def frontier(
    stages: Sequence[Stage],
    profile: Profile,
    offer: Offer,
    constraints: PlanningConstraints,
    *,
    constant: bool = False,
    seed: int = 0,
) -> list[tuple[float, float]]:
    """(the JCT that is kept with the confidence, mean cost) of plans near the frontier, fastest first."""
    policy: Policy = "static" if constant else "optimal"
    search = _Search(Draws(stages, profile, offer, seed=seed), offer, constraints, policy, "min_cost", ())
    draws, points = search.judge.draws, list[tuple[float, float]]()
    for table in search.tables(search.z, search.tau_s()):
        for found in pareto(table, Box(), constant=constant):
            times_s, costs_usd = draws.totals(table.plan(found.path), range(1))
            points.append((float(np.quantile(times_s, constraints.confidence)), float(costs_usd.mean())))
    box, steps = search.judge.box, list[tuple[float, float]]()
    for jct_s, cost_usd in sorted(points):
        inside = jct_s <= box.time_s and cost_usd <= box.cost_usd
        if inside and (not steps or cost_usd < steps[-1][1]):
            steps.append((jct_s, cost_usd))
    return steps


class _Search:
    """The candidates of one planning call."""

    def __init__(
        self,
        draws: Draws,
        offer: Offer,
        constraints: PlanningConstraints,
        policy: Policy,
        objective: Objective,
        held: Sequence[Cohort],
    ) -> None:
        stages, profile = draws.stages, draws.profile
        self.stages, self.profile, self.offer, self.constraints = stages, profile, offer, constraints
        self.policy, self.objective, self.held = policy, objective, held
        self.constant = policy == "static"
        self.markets: tuple[Market, ...] | None = None
        self.judge = Judge(draws, box_of(constraints), constraints.confidence, objective, held)
        self.moments = NoisyMoments(draws)
        self.z = NormalDist().inv_cdf(max(0.5, constraints.confidence))
        self.families = family(policy, profile, offer, constraints)
        if len(self.families) > _FAMILIES:
            self.families = self._promising()

    def _promising(self) -> list[PlanningConstraints]:
        """The families with the best plans on mean times, where there are too many to search them all."""
        mean = [build_table(self.stages, self.profile, self.offer, limits, self.held) for limits in self.families]
        values = [lower_bound(table, self.judge.box, self.objective) for table in mean]
        return [self.families[at] for at in np.argsort(values, kind="stable")[:_FAMILIES].tolist()]

    def tables(self, z: float, tau_s: float) -> list[StageTable]:
        """The tables of the search with an allowance of z standard deviations."""
        self.moments.z, self.moments.tau_s = z, tau_s
        typical = max(1, min(self.offer.max_instances, max(stage.trials for stage in self.stages)) // 2)
        provision_s, init_s, variance = late_growth(self.moments.draws, typical)
        terms = replace(
            mean_terms(self.offer),
            provision_s=provision_s,
            init_s=init_s,
            late_growth_s=z / (2.0 * tau_s) * variance,
        )
        return [
            build_table(self.stages, self.profile, self.offer, limits, self.held, self.moments, terms, self.markets)
            for limits in self.families
        ]

    def tau_s(self) -> float:
        """The standard deviation of the JCT of a good plan."""
        box = self.judge.box
        found = self.solved(0.0, 1.0, box) or self.solved(0.0, 1.0, Box(cost_usd=box.cost_usd))
        spread = [float(self.judge.look(candidate).jct_s.std()) for candidate in found[:1]]
        return max([1e-3, *spread])

    def solved(self, z: float, tau_s: float, box: Box, objective: Objective | None = None) -> list[Plan]:
        """The best few plans that keep the limits with an allowance of z standard deviations."""
        narrowed = Box(time_s=box.time_s - z * tau_s / 2.0, cost_usd=box.cost_usd)
        goal = objective or self.objective
        found: list[tuple[float, Plan]] = []
        for table in self.tables(z, tau_s):
            for each in several(table, narrowed, goal, constant=self.constant, most=_PROPOSALS):
                found.append((each.cost_usd if goal == "min_cost" else each.time_s, table.plan(each.path)))
        return [plan for _, plan in sorted(found, key=lambda pair: pair[0])]

    def propose(self) -> Iterable[Plan]:
        """Plans about the confidence: the deadline that the search is given moves by how late the best of them is."""
        tau_s, deadline_s, margin_usd = self.tau_s(), self.judge.box.time_s, 0.0
        z, moved_s, found = (self.z if math.isfinite(deadline_s) else 0.0), 0.0, set[Plan]()
        for _ in range(_ROUNDS):
            box = Box(time_s=deadline_s - moved_s, cost_usd=self.judge.box.cost_usd - margin_usd)
            proposals = self.solved(z, tau_s, box)
            yield from proposals
            if not proposals and moved_s > 1e-3:
                moved_s /= 2.0
                continue
            if not proposals or proposals[0] in found:
                return
            found.add(proposals[0])
            look = self.judge.look(proposals[0])
            margin_usd = 0.0 if any(map(self.judge.likely, proposals)) else self._margin_usd(proposals)
            if math.isfinite(deadline_s):
                moved_s += float(np.quantile(look.jct_s, self.judge.confidence)) - deadline_s
                tau_s = max(1e-3, float(look.jct_s.std()))

    def _margin_usd(self, proposals: Sequence[Plan]) -> float:
        """What the cheapest proposal would have to cost less to keep the budget with the confidence."""
        if not math.isfinite(self.judge.box.cost_usd) or not proposals:
            return 0.0
        cost_usd = self.judge.looks[proposals[0]].cost_usd
        return max(0.0, float(np.quantile(cost_usd, self.judge.confidence) - cost_usd.mean()))

    def propose_safest(self) -> None:
        """Look at the plans that are most likely to be in time, and at the cheapest ones."""
        self.markets = None
        tau_s, box = self.tau_s(), self.judge.box
        limits = dict.fromkeys((Box(), Box(time_s=box.time_s), Box(cost_usd=box.cost_usd)))
        for z in (0.0, self.z, 2.0 * self.z):
            for limit, goal in itertools.product(limits, OBJECTIVES):
                for candidate in self.solved(z, tau_s, limit, goal):
                    self.judge.look(candidate)

    def improved(self) -> Plan | None:
        """The best candidate, after steps to better ones: once more where it is learned how lucky the samples are."""
        self.improve()
        self.judge.best()
        self.improve()
        return self.judge.best()

    def improve(self) -> None:
        """Step from the best candidates to better neighbours until there are none."""
        tried: set[Plan] = set()
        for _ in range(_ROUNDS):
            ranked = self.judge.ranked()
            leaders = ranked[:2] or self.judge.closest(2)
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
        if math.isfinite(bound):
            mean_s, least_usd = self.judge.draws.least(candidate, self.held)
            if (least_usd if self.objective == "min_cost" else mean_s) >= bound * _NEARLY_AS_GOOD:
                return False
        few = Look(*self.judge.draws.totals(candidate, range(1), self.held))
        value = few.cost_usd.mean() if self.objective == "min_cost" else few.jct_s.mean()
        if bound == math.inf:
            return few.kept(self.judge.box) > 0.0
        return float(value) < bound * _NEARLY_AS_GOOD and few.kept(self.judge.box) >= self.judge.confidence - 0.02

    def _neighbours(self, candidate: Plan) -> Iterable[Plan]:
        """Plans that differ in one run of stages of equal width, or in one stage."""
        choices, num_stages = candidate.stages, len(candidate.stages)
        runs = [(0, num_stages)] if self.constant else _runs(choices)
        for first, last in runs:
            for count in self._counts(choices[first].instances):
                changed = [self._with(choice, instances=count) for choice in choices[first:last]]
                yield from self._valid((*choices[:first], *changed, *choices[last:]))
        yield from self._other_markets(choices)
        for index, choice in enumerate(choices):
            for gpus in self._gangs(choice):
                changed = [self._with(choice, gpus=gpus)]
                yield from self._valid((*choices[:index], *changed, *choices[index + 1 :]))
                if self.policy == "optimal":
                    for count in self._next_counts(choice.instances):
                        wider = replace(choice, instances=count, gpus_per_trial=gpus)
                        yield from self._valid((*choices[:index], wider, *choices[index + 1 :]))

    def _other_markets(self, choices: tuple[StagePlan, ...]) -> Iterable[Plan]:
        """The same plan on one market throughout, and with one stage on the other."""
        if self.offer.spot is None:
            return
        for market in _MARKETS:
            yield Plan(stages=tuple(replace(choice, market=market) for choice in choices))
            for index, choice in enumerate(choices):
                yield Plan(stages=(*choices[:index], replace(choice, market=market), *choices[index + 1 :]))

    def _counts(self, count: int) -> list[int]:
        steps = {count - 1, count + 1, count - 2, count + 2, count * 3 // 4, count * 5 // 4}
        return sorted(step for step in steps if 1 <= step <= self.offer.max_instances and step != count)

    def _next_counts(self, count: int) -> list[int]:
        return [step for step in (count - 1, count + 1) if 1 <= step <= self.offer.max_instances]

    def _gangs(self, choice: StagePlan) -> list[int]:
        if self.policy == "naive_elastic":
            return []
        limits = self.constraints
        sizes = gang_sizes(self.offer.gpus, limits.min_gpus_per_trial, limits.max_gpus_per_trial)
        at = sizes.index(choice.gpus_per_trial)
        return sizes[max(0, at - 1) : at] + sizes[at + 1 : at + 2]

    def _with(self, choice: StagePlan, *, instances: int | None = None, gpus: int | None = None) -> StagePlan:
        return replace(choice, instances=instances or choice.instances, gpus_per_trial=gpus or choice.gpus_per_trial)

    def _valid(self, choices: tuple[StagePlan, ...]) -> Iterable[Plan]:
        if all(slots(choice.instances, self.offer.gpus, choice.gpus_per_trial) for choice in choices):
            yield Plan(stages=choices)

    def infeasible(self) -> InfeasibleError:
        """The error that names what is out of reach with the confidence, and the nearest value that is not."""
        box, confidence = self.judge.box, self.judge.confidence
        surely = f" with confidence {confidence:g}"
        looks = list(self.judge.looks.values())
        times_s = [float(np.quantile(look.jct_s, confidence)) for look in looks]
        costs_usd = [float(np.quantile(look.cost_usd, confidence)) for look in looks]
        shortest_s, cheapest_usd = min(times_s), min(costs_usd)
        if shortest_s > box.time_s:
            words = too_late(box, shortest_s, surely)
        elif cheapest_usd > box.cost_usd:
            words = too_dear(box, cheapest_usd, surely)
        else:
            pairs = list(zip(times_s, costs_usd, strict=True))
            in_time_usd = min(cost_usd for time_s, cost_usd in pairs if time_s <= box.time_s)
            in_budget_s = min(time_s for time_s, cost_usd in pairs if cost_usd <= box.cost_usd)
            words = too_much_at_once(box, in_time_usd, in_budget_s, surely)
        return InfeasibleError(words[0], advice=words[1], shortest_jct_s=shortest_s, cheapest_usd=cheapest_usd)


def _market_sets(offer: Offer, held: Sequence[Cohort]) -> list[tuple[Market, ...] | None]:
    """What proposals may use: every market; and spot alone, whose lateness is unlike that of a mixture."""
    spot_alone = offer.spot is not None and all(cohort.market == "spot" for cohort in held)
    return [None, ("spot",)] if spot_alone else [None]


def _runs(choices: Sequence[StagePlan]) -> list[tuple[int, int]]:
    """The maximal runs of stages with equally many instances, and every stage by itself: [first, last)."""
    edges = [0, *(at for at in range(1, len(choices)) if choices[at].instances != choices[at - 1].instances)]
    whole = list(itertools.pairwise([*edges, len(choices)]))
    return whole + [(at, at + 1) for at in range(len(choices)) if (at, at + 1) not in whole]
