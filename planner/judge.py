"""Deciding between candidate plans where times vary: the same samples for all, as many as it takes to be clear."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rubberband.plan import Cohort, Plan
from rubberband.planner.sampling import Draws
from rubberband.planner.solver import Box, Objective
from rubberband.planner.table import Floats

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
