"""Plans without a SYNC: asynchronous successive halving (asha), or no scheduler (none), solved by simulation.

A plan is one number of instances and one gang for the whole run. All plans are compared on the same samples
(`rubberband.planner.asha_samples`). Few of them choose candidates; a plan is feasible if it keeps the limits with the
confidence in all, from which its prediction is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from rubberband.errors import InfeasibleError
from rubberband.planner.asha_samples import QUICK, THOROUGH, Effort, Figures, Simulations, simulations_of
from rubberband.planner.exact.model import check_plan
from rubberband.planner.exact.solver import Box, by_objective, unbeaten
from rubberband.planner.exact.table import Floats, distinct, gangs_of
from rubberband.planner.noise.sampling import Samples
from rubberband.planner.problem import Infeasible, Lane, Problem, surely_unreachable
from rubberband.values.offer import Offer, slots
from rubberband.values.plan import Distribution, Market, Plan, Planned, Prediction, StagePlan, StagePrediction
from rubberband.values.profile import Profile

_UNLUCKY = 3.0
"""Standard errors below the confidence at which a candidate is dropped."""
_NEAR = 1.1
"""A plan that another one beats by this factor in time and in cost is not on the frontier."""
_EXTREMES = 8
"""Fastest candidates, and cheapest ones, that show what is within reach."""
_TOGETHER = 10
"""Candidates that are looked at side by side."""
_EASY = 2.0
"""A candidate that takes and costs this factor less than the limits in a few samples keeps them in most."""
_SIEVED, _SURE = 5, 3
"""Candidates whose first samples show at once which are surely late, and those of the others that are simulated to the
end side by side."""


def planned(problem: Problem, chosen: Plan, simulations: Simulations | None = None) -> Planned:
    """Return a plan with its prediction and its odds. Raises InputError if it does not fit the job or the offer."""
    check_plan(problem.stages, chosen, problem.offer)
    runs, choice = simulations or simulations_of(problem), chosen.stages[0]
    (found,) = runs.figures([choice], runs.most)
    starts_s, (mean_s, mean_usd) = float(found.starts_s.mean()), found.mean
    stage = StagePrediction(
        start_s=0.0,
        provisioning_s=starts_s,
        duration_s=mean_s - starts_s,
        cost_usd=mean_usd,
        slots=slots(choice.instances, problem.offer.slots, choice.gpus_per_trial),
    )
    beyond = choice.gpus_per_trial > problem.profile.largest_gpus
    prediction = Prediction(
        jct_s=mean_s,
        cost_usd=mean_usd,
        stages=(stage,),
        jct=None if runs.is_certain else _distribution(found.jct_s),
        cost=None if runs.is_certain else _distribution(found.cost_usd),
        num_samples=len(found.jct_s),
        extrapolated=(choice.gpus_per_trial,) if beyond else (),
    )
    reserve_usd = problem.reserve_usd(chosen, [mean_usd])
    odds = None if runs.is_certain else problem.box.less(reserve_usd).odds(found.jct_s, found.cost_usd)
    return Planned(plan=chosen, prediction=prediction, odds=odds, reserve_usd=reserve_usd)


def solve(problem: Problem) -> Planned | Infeasible:
    """Return the plan of least mean cost (or mean JCT) that keeps the limits with the confidence."""
    problem.check()
    search = _AshaCandidates(problem, QUICK if problem.quick else THOROUGH)
    chosen = search.best()
    return Infeasible(search.infeasible) if chosen is None else planned(problem, Plan(stages=(chosen,)), search.runs)


def frontier(problem: Problem) -> list[tuple[float, float]]:
    """Return (the JCT kept with the confidence, mean cost) of plans that no other beats, fastest first."""
    problem.check()
    search, confidence = _AshaCandidates(problem, THOROUGH), problem.constraints.confidence
    rough = [found.mean for found in search.runs.figures(search.candidates, search.runs.rough)]
    best = [
        one
        for one, (jct_s, cost_usd) in zip(search.candidates, rough, strict=True)
        if not any(other_s < jct_s / _NEAR and usd < cost_usd / _NEAR for other_s, usd in rough)
    ]
    few = search.runs.figures(best, search.runs.few)
    return unbeaten([(_quantile(found.jct_s, confidence), found.mean[1]) for found in few], problem.box)


def sample_lanes(lanes: Sequence[Lane], profile: Profile, offer: Offer, *, seed: int = 0) -> Samples:
    """Return samples of the plan of a job, whose only lane is the whole run."""
    runs = Simulations(lanes[0].stages[0], profile, offer, seed)
    (found,) = runs.figures(lanes[0].planned.plan.stages, runs.most)
    return Samples(jct_s=found.jct_s, cost_usd=found.cost_usd, walked=())


class _AshaCandidates:
    """The candidates of one planning call."""

    def __init__(self, problem: Problem, effort: Effort) -> None:
        self.problem, self.effort, self.runs = problem, effort, simulations_of(problem, effort)
        self.candidates = list(self._coarse())
        self._confidence = problem.constraints.confidence
        is_simple = not problem.profile.varies and problem.offer.spot is None and problem.stages[0].rungs.repeats == 1
        self._looks_ahead = is_simple and effort is QUICK and len(self.runs.ends) == 2
        """Whether candidates are simulated before it is known that they are needed: a step takes longer than a row."""

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
        wide = max(1, gpus // offer.slots)
        most = -(-trials // max(1, offer.slots // gpus)) * wide
        return range(wide, min(offer.max_instances, most) + 1, wide)

    def best(self) -> StagePlan | None:
        """Return the best candidate that keeps the limits, on spot alone first where that is preferred."""
        on_spot = [one for one in self.candidates if one.market == "spot"] if self.problem.prefers_spot else []
        return self._best(on_spot) or self._best(list(self.candidates))

    def _least_s(self, choice: StagePlan) -> float:
        """Return seconds below which no run stays: no slot is ever idle, and no more trials climb than must."""
        profile, stage, gpus = self.problem.profile, self.problem.stages[0], choice.gpus_per_trial
        if profile.varies:
            return 0.0
        at_once = slots(choice.instances, self.problem.offer.slots, gpus)
        rungs_s = [profile.startup_s(gpus) + work * profile.iteration_s(gpus) for work in stage.rung_work]
        climbs = zip(stage.rungs.fewest(stage.trials), rungs_s, strict=True)
        return max(sum(trials * rung_s for trials, rung_s in climbs) / at_once, sum(rungs_s))

    def _best(self, candidates: Sequence[StagePlan]) -> StagePlan | None:
        """Return the best of some candidates that keeps the limits, or one near it."""
        candidates = [one for one in candidates if self._least_s(one) * (1.0 - 1e-9) <= self.problem.box.time_s]
        hopeful = self._hopeful(candidates, self.runs.rough)
        first = hopeful[:1]
        near = [one for choice in first for one in self._near(choice)]
        self.candidates += near
        if self._looks_ahead and len(block := self._likely(hopeful[:_SIEVED])) > 1:  # what is looked at next
            self.runs.several(dict.fromkeys([*block, *near], self.runs.sieve))
        found = self._confirmed([*candidates, *near], looks_near=True)
        if found is None or found in [*first, *near]:
            return found
        near = list(self._near(found))
        self.candidates += near
        choices = [choice for choice in (self._confirmed(near), found) if choice is not None]
        figures = self.runs.figures(choices, self.runs.most)
        return min(zip(choices, figures, strict=True), key=lambda pair: self._value(pair[1]))[0]

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

    def _confirmed(self, candidates: Sequence[StagePlan], *, looks_near: bool = False) -> StagePlan | None:
        """Return a candidate that keeps the limits by all samples: the best by few, or the next one that does."""
        hopeful = self._hopeful(candidates, self.runs.rough)
        if self._looks_ahead:
            return self._first_that_keeps(hopeful, looks_near=looks_near)
        together = 1 if len(self.runs.ends) == 2 else _TOGETHER
        for first in range(0, len(hopeful), together):
            block = hopeful[first : first + together]
            if self.problem.box == Box():  # the first of them is mostly the best
                self.runs.several(dict.fromkeys(block, self.runs.ends[1]) | {block[0]: self.runs.most})
            for choice in self._hopeful(block, self.runs.ends[1]):
                if self._keeps_all(choice):
                    return choice
        return None

    def _keeps_all(self, choice: StagePlan) -> bool:
        """Return whether a candidate keeps the limits by few samples and by all."""
        few, most = self.runs.ends[1], self.runs.most
        (found,) = self.runs.figures([choice], few)
        ends = [few, most] if self._kept(choice, found) == 1.0 else self.runs.ends
        return all(self._hopeful([choice], count) for count in ends)

    def _first_that_keeps(self, hopeful: Sequence[StagePlan], *, looks_near: bool) -> StagePlan | None:
        """Return the first that keeps the limits by all samples: some show which surely do not.

        Those near it, which come next, are simulated beside it.
        """
        most, sieve = self.runs.most, self.runs.sieve
        for number, choice in enumerate(hopeful):
            left = [one for one in hopeful[number:] if not self._is_surely_late(one)]
            if choice not in left:
                continue
            if not self.runs.knows(choice, sieve):
                block = self._likely(left[:_SIEVED])
                self.runs.several(dict.fromkeys(block, sieve if len(block) > 1 else most))
                left = [one for one in left if not self._is_surely_late(one)]
            if choice not in left:
                continue
            if not self.runs.knows(choice, most):
                block = self._likely(left[:_SURE])
                near = [other for one in block[:2] if looks_near for other in self._near(one)]
                self.runs.several(dict.fromkeys(near, sieve) | dict.fromkeys(block, most))
            if self._keeps_all(choice):
                return choice
        return None

    def _likely(self, hopeful: Sequence[StagePlan]) -> list[StagePlan]:
        """Return some candidates up to the first that keeps the limits easily by the samples that are known."""
        for number, choice in enumerate(hopeful, 1):
            known = self.runs.sieve if self.runs.knows(choice, self.runs.sieve) else self.runs.rough
            (found,) = self.runs.figures([choice], known)
            # Few samples miss the runs in which a late result is promoted.
            room = 1.0 if known > self.runs.rough else _EASY
            kept = self.problem.box.holds(room * found.jct_s, room * found.cost_usd)
            if kept.mean() >= self._confidence:
                return list(hopeful[:number])
        return list(hopeful)

    def _is_surely_late(self, choice: StagePlan) -> bool:
        """Whether a candidate is known to be late in samples enough that it misses the confidence by all."""
        if not self.runs.knows(choice, self.runs.sieve):
            return False
        (found,) = self.runs.figures([choice], self.runs.sieve)
        late = np.count_nonzero(~Box(time_s=self.problem.box.time_s).holds(found.jct_s, found.cost_usd))
        return bool(self.runs.most - late < self._confidence * self.runs.most - 1e-6)

    def _hopeful(self, candidates: Sequence[StagePlan], count: int) -> list[StagePlan]:
        """Return the candidates that may keep the limits by the first samples (by all of them: that do), best first."""
        unlucky = 0.0 if count == self.runs.most else _UNLUCKY / math.sqrt(count)
        enough = self._confidence - unlucky * math.sqrt(self._confidence * (1.0 - self._confidence) + 1.0 / count)
        found = list(zip(candidates, self.runs.figures(candidates, count), strict=True))
        kept = [(self._value(each), at) for at, (one, each) in enumerate(found) if self._kept(one, each) >= enough]
        return [found[at][0] for _, at in sorted(kept)]

    def _kept(self, choice: StagePlan, found: Figures) -> float:
        """Return the share of samples in which a candidate keeps the limits."""
        box = self.problem.box.less(self._reserve_usd(choice, found))
        return float(box.holds(found.jct_s, found.cost_usd).mean())

    def _reserve_usd(self, choice: StagePlan, found: Figures) -> float:
        return self.problem.reserve_usd(Plan(stages=(choice,)), [found.mean[1]])

    def _value(self, found: Figures) -> tuple[float, float]:
        return by_objective(self.problem.objective, *found.mean)

    def infeasible(self) -> InfeasibleError:
        """Return the error that names the limit out of reach, and the nearest value within."""
        return surely_unreachable(self.problem, list(self._points(self._extremes(), self.runs.most).values()))

    def _extremes(self) -> list[StagePlan]:
        """Return the fastest and the cheapest candidates, of all and of those that keep the other limit."""
        points, box = self._points(self.candidates, self.runs.rough), self.problem.box
        some = [one for at in (0, 1) for one in sorted(points, key=lambda one: points[one][at])[:_EXTREMES]]
        points = self._points(list(dict.fromkeys(some)), self.runs.few)
        found = []
        for at, most in ((0, box.cost_usd), (1, box.time_s)):
            best = sorted(points, key=lambda one: points[one][at])
            found += best[:2] + [one for one in best if points[one][1 - at] <= most][:1]
        return list(dict.fromkeys(found))

    def _points(self, choices: Sequence[StagePlan], count: int) -> dict[StagePlan, tuple[float, float]]:
        """Return the JCT and the cost that plans keep with the confidence."""
        points = {}
        for choice, found in zip(choices, self.runs.figures(choices, count), strict=True):
            least = math.ceil(self._confidence * count - 1e-9) - 1
            jct_s, cost_usd = (float(np.sort(values)[least]) for values in (found.jct_s, found.cost_usd))
            points[choice] = jct_s, cost_usd + self._reserve_usd(choice, found)
        return points


def _quantile(values: Floats, share: float) -> float:
    """Return a quantile; np.quantile imports masked arrays for it, a tenth of a start."""
    return float(np.interp(share * (len(values) - 1), np.arange(len(values)), np.sort(values)))


def _distribution(values: Floats) -> Distribution:
    p10, p50, p90, p95 = (_quantile(values, share) for share in (0.1, 0.5, 0.9, 0.95))
    return Distribution(mean=float(values.mean()), p10=p10, p50=p50, p90=p90, p95=p95)
