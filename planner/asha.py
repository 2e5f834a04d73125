"""Plans of asynchronous successive halving (asha): a throughput problem, solved by simulation.

A plan is one number of instances and one gang for the whole run. Slots take trials as `rubberband.values.rungs` says;
at the end an instance without a trial is released, since no more slots are ever needed than trials run then. Which
configuration is better is not known, and decides how many are promoted: each sample ranks the trials at random, and
draws every time that varies. All plans are compared on the same samples.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rubberband.errors import InfeasibleError
from rubberband.planner.model import check_plan
from rubberband.planner.problem import Problem
from rubberband.planner.sampling import spread_factors
from rubberband.planner.solver import unbeaten
from rubberband.planner.table import Floats, distinct, gangs_of
from rubberband.planner.wording import unreachable
from rubberband.values.offer import SECONDS_PER_HOUR, Offer, slots
from rubberband.values.plan import (
    Distribution,
    Market,
    Odds,
    Plan,
    Planned,
    Prediction,
    Stage,
    StagePlan,
    StagePrediction,
)
from rubberband.values.profile import Law, Profile
from rubberband.values.rungs import Rungs


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How thoroughly plans are compared."""

    rough_samples: int = 4
    """Samples of every candidate."""
    most_samples: int = 200
    """Samples that a candidate is confirmed with; fewer of many trials."""
    steps: int = 16_000
    """Trials that are simulated for that."""
    counts: int = 12
    """Numbers of instances tried for each gang; those between the best ones are tried next."""
    confirmed: int = 8
    """Most candidates that are confirmed before the search gives up."""


THOROUGH = Effort()
QUICK = Effort(rough_samples=2, steps=4000, counts=6, confirmed=3)
"""For a row beside another plan."""
FEWEST_SAMPLES = 20
_UNLUCKY = 0.1
"""A candidate is dropped if so much less than the confidence holds in a fifth of the samples."""
_CLOSE = 1.03
"""A candidate that is worse by this factor in its rough samples is not confirmed once another was."""
_NEAR = 1.1
"""A plan that another one beats by this factor in time and in cost is not on the frontier."""
_SLACK = 0.35
"""A candidate is not confirmed if so much less than the confidence holds in its rough samples."""


class Trace(NamedTuple):
    """One simulated run."""

    jct_s: float
    cost_usd: float
    starts_s: float
    """Instant at which its instances were ready."""
    reached: tuple[int, ...]
    """Trials that ended each rung."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Times and results of one run."""

    provision_s: float
    init_s: float
    """INIT_INSTANCE of the slowest instance."""
    startup_s: Sequence[Sequence[float]]
    """[rung][trial] Seconds of the start-up."""
    train_s: Sequence[Sequence[float]]
    """[rung][trial] Seconds of the rung's iterations, with what interruptions cost."""
    merits: Sequence[Sequence[Any]]
    """[rung][trial] Rank of the result in its rung: the lowest is the best."""


def simulate(stage: Stage, choice: StagePlan, offer: Offer, draw: Draw) -> Trace:
    """Return what one run takes and costs.

    Results at the same instant count in the order of the trials' numbers.
    """
    assert stage.ladder is not None, "asha has rungs"
    run = _Run(_Slots(choice, offer), Rungs(stage.ladder), stage.trials, draw)
    return run.to_end(stage, choice, offer)


class _Slots:
    """The slots of a cluster, as `rubberband.executor.core.placement.FreeSlots` fills them."""

    def __init__(self, choice: StagePlan, offer: Offer) -> None:
        self.count = slots(choice.instances, offer.gpus, choice.gpus_per_trial)
        self._per = max(1, offer.gpus // choice.gpus_per_trial)
        """Slots of an instance."""
        self._wide = max(1, choice.gpus_per_trial // offer.gpus)
        """Instances of a slot."""
        self._idle = [self._per] * (self.count // self._per)
        """Free slots of each instance (or of each slot's instances)."""
        self.free = set(range(self.count))
        self.released_s: list[tuple[int, float]] = []
        """How many instances were released, and when."""
        self._useless = choice.instances - len(self._idle) * self._wide
        """Instances too few for another slot."""

    def take(self, before: int | None) -> int:
        """Return the slot that a trial gets: the one that it had before, or one of the fullest instance."""
        if len(self.free) == 1:
            slot = self.free.pop()
        else:
            fullest = min((self._idle[free // self._per], free) for free in self.free)[1]
            slot = before if before is not None and before in self.free else fullest
            self.free.remove(slot)
        self._idle[slot // self._per] -= 1
        return slot

    def give_back(self, slot: int) -> None:
        """Free a slot."""
        self.free.add(slot)
        self._idle[slot // self._per] += 1

    def release_idle(self, now_s: float) -> None:
        """Release the instances without a trial."""
        if self._useless:
            self.released_s.append((self._useless, now_s))
            self._useless = 0
        firsts = [slot for slot in self.free if slot % self._per == 0]
        for slot in [first for first in firsts if self._idle[first // self._per] == self._per]:
            self.free -= set(range(slot, slot + self._per))
            self.released_s.append((self._wide, now_s))


class _Run:
    def __init__(self, cluster: _Slots, rungs: Rungs, trials: int, draw: Draw) -> None:
        self._slots, self._rungs, self._trials, self._draw = cluster, rungs, trials, draw
        self._rung, self._slot_of = [0] * trials, [-1] * trials
        self._ends: list[tuple[float, int]] = []
        self.busy_s = 0.0

    def _start(self, trial: int, now_s: float) -> None:
        rung, draw, before = self._rung[trial], self._draw, self._slot_of[trial]
        self._slot_of[trial] = self._slots.take(before if before >= 0 else None)
        end_s = now_s + draw.startup_s[rung][trial] + draw.train_s[rung][trial]
        self.busy_s += end_s - now_s
        heapq.heappush(self._ends, (end_s, trial))

    def to_end(self, stage: Stage, choice: StagePlan, offer: Offer) -> Trace:
        draw, rungs, cluster = self._draw, self._rungs, self._slots
        now_s = starts_s = draw.provision_s + draw.init_s
        fresh = min(self._trials, cluster.count)
        for trial in range(fresh):
            self._start(trial, now_s)
        if fresh == self._trials:
            cluster.release_idle(now_s)
        while self._ends:
            now_s, trial = heapq.heappop(self._ends)
            rung = self._rung[trial]
            rungs.record(rung, draw.merits[rung][trial], trial)
            cluster.give_back(self._slot_of[trial])
            # Only this rung has a result more: every other one has promoted what it may.
            if rungs.may_promote(rung):
                promoted = rungs.promote(rung)
                self._rung[promoted] += 1
                self._start(promoted, now_s)
            elif fresh < self._trials:
                self._start(fresh, now_s)
                fresh += 1
            if fresh == self._trials:
                cluster.release_idle(now_s)
        assert stage.ladder is not None, "asha has rungs"
        reached = tuple(sum(at >= rung for at in self._rung) for rung in range(len(stage.ladder.totals)))
        cost_usd = _bill_usd(choice, offer, cluster.released_s, self.busy_s, draw.provision_s, now_s)
        return Trace(now_s, cost_usd, starts_s, reached)


def _bill_usd(
    choice: StagePlan,
    offer: Offer,
    released_s: Sequence[tuple[int, float]],
    busy_s: float,
    running_s: float,
    jct_s: float,
) -> float:
    price, once_usd = offer.market_price_usd_per_s(choice.market), offer.once_usd_per_instance
    cost_usd = offer.head_cost_usd(jct_s) + choice.instances * once_usd
    if choice.market == "spot" and offer.spot is not None:
        replaced = choice.instances * (jct_s - running_s) * offer.spot.interruptions_per_hour / SECONDS_PER_HOUR
        cost_usd += replaced * once_usd
    if offer.billing == "per_function":
        return cost_usd + price * choice.gpus_per_trial / offer.gpus * busy_s
    held = [(count, min(until_s, jct_s)) for count, until_s in released_s]
    held.append((choice.instances - sum(count for count, _ in held), jct_s))
    billed_s = sum(count * max(offer.minimum_billed_s, until_s - running_s) for count, until_s in held)
    return cost_usd + price * billed_s


@dataclass(slots=True)
class _Sample:
    """The random numbers of one run, the same for all plans."""

    merits: list[int]
    provision: float
    inits: Floats
    """Factors of the instances, largest so far."""
    startup: npt.NDArray[np.float64] | None
    """(rungs, trials) Factors of the start-ups."""
    train: npt.NDArray[np.float64] | None


@dataclass(slots=True)
class Simulations:
    """The samples of a job, drawn when they are first needed."""

    stage: Stage
    profile: Profile
    offer: Offer
    seed: int
    effort: Effort = THOROUGH
    _samples: list[_Sample] = field(default_factory=list)
    _traces: dict[StagePlan, list[Trace]] = field(default_factory=dict)
    _mean_s: dict[int, tuple[list[list[float]], list[list[float]]]] = field(default_factory=dict)

    @property
    def most(self) -> int:
        """Samples that a plan is predicted with."""
        return max(FEWEST_SAMPLES, min(self.effort.most_samples, self.effort.steps // self.stage.trials))

    def traces(self, choice: StagePlan, count: int) -> list[Trace]:
        """Return the first `count` runs of a plan."""
        found = self._traces.setdefault(choice, [])
        for number in range(len(found), count):
            draw = self._draw(self._sample(number), number, choice)
            found.append(simulate(self.stage, choice, self.offer, draw))
        return found[:count]

    def figures(self, choice: StagePlan, count: int) -> tuple[Floats, Floats]:
        """Return time and cost of the first `count` runs of a plan."""
        traces = self.traces(choice, count)
        return np.array([one.jct_s for one in traces]), np.array([one.cost_usd for one in traces])

    def _sample(self, number: int) -> _Sample:
        while len(self._samples) <= number:
            self._samples.append(self._drawn(np.random.default_rng((self.seed, len(self._samples)))))
        return self._samples[number]

    def _drawn(self, rng: np.random.Generator) -> _Sample:
        stage, profile, offer = self.stage, self.profile, self.offer
        assert stage.ladder is not None, "asha has rungs"
        shape = (len(stage.ladder.totals), stage.trials)
        merits: list[int] = rng.permutation(stage.trials).tolist()
        startup = _factors(profile.startup_cv, "lognormal", rng, shape) if profile.startup_varies else None
        train = None
        if profile.trial_cv or profile.iteration_cv or profile.mean_cv:
            own = _factors(profile.trial_cv, profile.law, rng, (stage.trials,))
            own = own * _factors(profile.mean_cv, "lognormal", rng, (1,))
            noise = [
                _factors(profile.iteration_cv / math.sqrt(gain), profile.law, rng, (stage.trials,))
                for gain in stage.ladder.gains
            ]
            train = own * np.array(noise)
        provision = float(spread_factors(offer.provision_spread, rng, 1)[0])
        return _Sample(merits, provision, spread_factors(offer.init_spread, rng, offer.max_instances), startup, train)

    def _draw(self, sample: _Sample, number: int, choice: StagePlan) -> Draw:
        assert self.stage.ladder is not None, "asha has rungs"
        startup_s, train_s = self._means(choice.gpus_per_trial)
        if sample.startup is not None:
            startup_s = (self.profile.trial_startup_s * sample.startup).tolist()
        if sample.train is not None:
            mean_s = np.array(self.stage.ladder.gains) * self.profile.iteration_s(choice.gpus_per_trial)
            train_s = (mean_s[:, None] * sample.train).tolist()
        if choice.market == "spot":
            train_s = self._interrupted(number, choice, np.array(startup_s), np.array(train_s))
        return Draw(
            provision_s=self.offer.provision_delay_s * sample.provision,
            init_s=self.offer.init_delay_s * float(sample.inits[: choice.instances].max()),
            startup_s=startup_s,
            train_s=train_s,
            merits=[sample.merits] * len(self.stage.ladder.totals),
        )

    def _means(self, gpus: int) -> tuple[list[list[float]], list[list[float]]]:
        """Return start-up and training times if nothing varies."""
        if gpus not in self._mean_s:
            self._mean_s[gpus] = mean_times(self.stage, self.profile, gpus)
        return self._mean_s[gpus]

    def _interrupted(self, number: int, choice: StagePlan, startup_s: Floats, train_s: Floats) -> list[list[float]]:
        """Add what a trial loses to interruptions: a Poisson number of restarts and of repeated iterations."""
        spot, ladder = self.offer.spot, self.stage.ladder
        assert spot is not None, "a plan uses the markets that its offer has"
        assert ladder is not None, "asha has rungs"
        rng = np.random.default_rng((self.seed, number, 3))
        rate = spot.interruptions_per_hour / SECONDS_PER_HOUR * max(1, choice.gpus_per_trial // self.offer.gpus)
        times = rng.poisson(rate * (startup_s + train_s))
        redone = np.minimum(spot.checkpoint_iterations, np.array(ladder.gains))[:, None]
        redone_s = redone * self.profile.iteration_s(choice.gpus_per_trial)
        lost_s: list[list[float]] = (train_s + times * (spot.restart_s + rng.random(train_s.shape) * redone_s)).tolist()
        return lost_s


def mean_times(stage: Stage, profile: Profile, gpus: int) -> tuple[list[list[float]], list[list[float]]]:
    """Return the start-up and training seconds of every trial in each rung ([rung][trial]) if nothing varies."""
    assert stage.ladder is not None, "asha has rungs"
    iteration_s = profile.iteration_s(gpus)
    startup_s = [[profile.trial_startup_s] * stage.trials] * len(stage.ladder.totals)
    return startup_s, [[gain * iteration_s] * stage.trials for gain in stage.ladder.gains]


def _factors(cv: float, law: Law, rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Return factors with mean 1."""
    if cv == 0.0:
        return np.ones(shape)
    if law == "normal":
        return np.maximum(0.0, rng.normal(1.0, cv, shape))
    variance = math.log1p(cv * cv)
    return rng.lognormal(-variance / 2.0, math.sqrt(variance), shape)


def _quantile(values: Floats, share: float) -> float:
    """Return a quantile; np.quantile imports masked arrays for it, a tenth of a start."""
    return float(np.interp(share * (len(values) - 1), np.arange(len(values)), np.sort(values)))


def _distribution(values: Floats) -> Distribution:
    p10, p50, p90, p95 = (_quantile(values, share) for share in (0.1, 0.5, 0.9, 0.95))
    return Distribution(mean=float(values.mean()), p10=p10, p50=p50, p90=p90, p95=p95)


# Searching


def planned(problem: Problem, chosen: Plan, simulations: Simulations | None = None) -> Planned:
    """Return a plan with its prediction and its odds. Raises InputError if it does not fit the job or the offer."""
    check_plan(problem.stages, chosen, problem.offer)
    runs = simulations or simulations_of(problem)
    traces = runs.traces(chosen.stages[0], runs.most)
    jct_s, cost_usd = runs.figures(chosen.stages[0], runs.most)
    starts_s = float(np.mean([one.starts_s for one in traces]))
    mean_s, mean_usd = float(jct_s.mean()), float(cost_usd.mean())
    choice = chosen.stages[0]
    stage = StagePrediction(
        start_s=0.0,
        provisioning_s=starts_s,
        duration_s=mean_s - starts_s,
        cost_usd=mean_usd,
        slots=slots(choice.instances, problem.offer.gpus, choice.gpus_per_trial),
    )
    beyond = choice.gpus_per_trial > problem.profile.largest_gpus
    prediction = Prediction(
        jct_s=mean_s,
        cost_usd=mean_usd,
        stages=(stage,),
        jct=_distribution(jct_s),
        cost=_distribution(cost_usd),
        num_samples=len(traces),
        extrapolated=(choice.gpus_per_trial,) if beyond else (),
    )
    reserve_usd = problem.reserve_usd(chosen, [mean_usd])
    in_time, in_budget = problem.box.less(reserve_usd).limits_kept(jct_s, cost_usd)
    odds = Odds(
        p_deadline=float(in_time.mean()),
        p_budget=float(in_budget.mean()),
        p_both=float((in_time & in_budget).mean()),
    )
    return Planned(plan=chosen, prediction=prediction, odds=odds, reserve_usd=reserve_usd)


def simulations_of(problem: Problem, effort: Effort = THOROUGH) -> Simulations:
    """Return the samples of a job, not yet drawn."""
    return Simulations(problem.stages[0], problem.profile, problem.offer, problem.seed, effort)


def plan(problem: Problem, effort: Effort = THOROUGH) -> Planned:
    """Return the plan of least mean cost (or mean JCT) that keeps the limits with the confidence.

    Raises InfeasibleError if none is found, and InputError if none can exist.
    """
    search = _Search(problem, effort)
    chosen = search.best()
    if chosen is None:
        raise search.infeasible()
    return planned(problem, Plan(stages=(chosen,)), search.runs)


def frontier(problem: Problem) -> list[tuple[float, float]]:
    """Return (the JCT kept with the confidence, mean cost) of plans that no other beats, fastest first."""
    search, box, confidence = _Search(problem, THOROUGH), problem.box, problem.constraints.confidence
    rough = {choice: search.mean(choice, search.effort.rough_samples) for choice in search.candidates}
    best = [choice for choice, (cost_usd, jct_s) in rough.items() if not _is_beaten(cost_usd, jct_s, rough.values())]
    points = []
    for choice in best:
        jct_s, cost_usd = search.runs.figures(choice, max(FEWEST_SAMPLES, search.runs.most // 2))
        points.append((_quantile(jct_s, confidence), float(cost_usd.mean())))
    return unbeaten([point for point in points if point[0] <= box.time_s and point[1] <= box.cost_usd])


def _is_beaten(cost_usd: float, jct_s: float, others: Iterable[tuple[float, float]]) -> bool:
    """Return whether another plan is clearly cheaper and faster."""
    return any(usd < cost_usd / _NEAR and other_s < jct_s / _NEAR for usd, other_s in others)


class _Search:
    """The candidates of one planning call."""

    def __init__(self, problem: Problem, effort: Effort) -> None:
        self.problem, self.effort, self.runs = problem, effort, simulations_of(problem, effort)
        self.candidates = list(self._coarse())

    def rough(self, choice: StagePlan) -> tuple[Floats, Floats]:
        """Return time and cost of a candidate in few samples."""
        return self.runs.figures(choice, self.effort.rough_samples)

    def _coarse(self) -> Iterable[StagePlan]:
        problem = self.problem
        markets: list[Market] = ["on_demand"] if problem.offer.spot is None else ["on_demand", "spot"]
        for gpus in gangs_of(problem.profile, problem.offer, problem.constraints):
            counts = self._counts(gpus)
            kept = distinct(np.round(np.geomspace(1, len(counts), min(len(counts), self.effort.counts)))).astype(int)
            for market in markets:
                yield from (
                    StagePlan(instances=counts[at - 1], gpus_per_trial=gpus, market=market) for at in kept.tolist()
                )

    def _counts(self, gpus: int) -> range:
        """Return the numbers of instances that trials of `gpus` GPUs fill: up to a slot for each trial."""
        offer, trials = self.problem.offer, self.problem.stages[0].trials
        wide = max(1, gpus // offer.gpus)
        most = -(-trials // max(1, offer.gpus // gpus)) * wide
        return range(wide, min(offer.max_instances, most) + 1, wide)

    def best(self) -> StagePlan | None:
        """Return the best candidate that keeps the limits, and then the best of those near it."""
        found = self._confirmed(self.candidates)
        if found is None:
            return None
        near = list(self._near(found))
        self.candidates += near
        return self._confirmed([found, *near])

    def _near(self, choice: StagePlan) -> Iterable[StagePlan]:
        """Return the candidates between a choice and the next ones that were tried."""
        tried = {one.instances for one in self.candidates if one.gpus_per_trial == choice.gpus_per_trial}
        below = max((count for count in tried if count < choice.instances), default=0)
        above = min((count for count in tried if count > choice.instances), default=choice.instances)
        counts = [count for count in self._counts(choice.gpus_per_trial) if below < count < above]
        step = max(1, len(counts) // self.effort.counts)
        for count in counts[::step]:
            if count not in tried:
                yield replace(choice, instances=count)

    def _confirmed(self, candidates: Sequence[StagePlan]) -> StagePlan | None:
        confidence = self.problem.constraints.confidence
        hopeful = [one for one in candidates if self._kept(one, self.effort.rough_samples) >= confidence - _SLACK]
        found: list[StagePlan] = []
        for choice in sorted(hopeful, key=self._rough_value):
            if found and self._rough_value(choice)[0] > _CLOSE * self._rough_value(found[0])[0]:
                break
            if len(found) == self.effort.confirmed:
                break
            if self._kept(choice, self.runs.most // 5) < confidence - _UNLUCKY:
                continue
            if self._kept(choice, self.runs.most) >= confidence:
                found.append(choice)
        return min(found, key=lambda choice: self._value(choice, self.runs.most), default=None)

    def _kept(self, choice: StagePlan, count: int) -> float:
        """Return the share of the first samples in which a candidate keeps the limits."""
        jct_s, cost_usd = self.runs.figures(choice, count)
        box = self.problem.box.less(self._reserve_usd(choice, cost_usd))
        return float(box.holds(jct_s, cost_usd).mean())

    def _reserve_usd(self, choice: StagePlan, cost_usd: Floats) -> float:
        return self.problem.reserve_usd(Plan(stages=(choice,)), [float(cost_usd.mean())])

    def mean(self, choice: StagePlan, count: int) -> tuple[float, float]:
        """Return mean cost and mean JCT of the first samples."""
        jct_s, cost_usd = self.runs.figures(choice, count)
        return float(cost_usd.mean()), float(jct_s.mean())

    def _value(self, choice: StagePlan, count: int) -> tuple[float, float]:
        both = self.mean(choice, count)
        return both if self.problem.objective == "min_cost" else both[::-1]

    def _rough_value(self, choice: StagePlan) -> tuple[float, float]:
        return self._value(choice, self.effort.rough_samples)

    def infeasible(self) -> InfeasibleError:
        """Return the error that names the limit out of reach, and the nearest value within."""
        box, confidence = self.problem.box, self.problem.constraints.confidence
        points = []
        for at in (0, 1):  # the fastest and the cheapest
            best = sorted(self.candidates, key=lambda choice: float(self.rough(choice)[at].mean()))
            for choice in best[: self.effort.confirmed]:
                jct_s, cost_usd = self.runs.figures(choice, self.runs.most)
                needed_usd = _quantile(cost_usd, confidence) + self._reserve_usd(choice, cost_usd)
                points.append((_quantile(jct_s, confidence), needed_usd))
        kept = [(box.limits_kept(jct_s, cost_usd), jct_s, cost_usd) for jct_s, cost_usd in points]
        return unreachable(
            box,
            min(jct_s for _, jct_s, _ in kept),
            min(cost_usd for _, _, cost_usd in kept),
            lambda: (
                min(cost_usd for (in_time, _), _, cost_usd in kept if in_time),
                min(jct_s for (_, in_budget), jct_s, _ in kept if in_budget),
            ),
            f" with confidence {confidence:g}",
            self.problem.beside,
        )
