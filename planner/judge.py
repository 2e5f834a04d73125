"""Deciding between candidate plans where times vary: the same samples for all, as many as it takes to be clear."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class Look:
    """What is known of a candidate."""

    jct_s: Floats
    cost_usd: Floats

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

    def look(self, candidate: Plan, num_chunks: int = ROUGH_CHUNKS) -> Look:
        """The samples of a candidate, at least `num_chunks` chunks of them."""
        known = self.looks.get(candidate)
        have = 0 if known is None else len(known.jct_s) // self.draws.rows
        if have < num_chunks:
            more = self.draws.evaluate(candidate, num_chunks - have, self.held, first=have)
            jct_s, cost_usd = more.jct_s, more.cost_usd
            if known is not None:
                jct_s, cost_usd = np.concatenate([known.jct_s, jct_s]), np.concatenate([known.cost_usd, cost_usd])
            known = self.looks[candidate] = Look(jct_s, cost_usd)
        assert known is not None
        return known

    def value(self, candidate: Plan) -> tuple[float, float]:
        """What is minimised, and what breaks ties, by the samples that every candidate has."""
        look, rows = self.looks[candidate], ROUGH_CHUNKS * self.draws.rows
        cost_usd, jct_s = float(look.cost_usd[:rows].mean()), float(look.jct_s[:rows].mean())
        return (cost_usd, jct_s) if self.objective == "min_cost" else (jct_s, cost_usd)

    def likely(self, candidate: Plan) -> bool:
        """Whether it seems to keep the limits with the confidence."""
        return self.look(candidate).kept(self.box) >= self.confidence

    def sure(self, candidate: Plan) -> bool:
        """Whether it does: with more samples until that is clear, and none that are left without a margin."""
        for num_chunks in range(ROUGH_CHUNKS, self.draws.most_chunks + 1):
            look = self.look(candidate, num_chunks)
            kept, error = look.kept(self.box), self._error(len(look.jct_s))
            if kept < self.confidence - _CLEAR * error:
                return False
            if kept > self.confidence + _SURE * error:
                return True
        return kept >= min(1.0, self.confidence + error)

    def _error(self, num_samples: int) -> float:
        return math.sqrt(self.confidence * (1.0 - self.confidence) / num_samples)

    def ranked(self) -> list[Plan]:
        """The candidates that likely keep the limits, best first."""
        return sorted(filter(self.likely, self.looks), key=self.value)

    def closest(self, most: int) -> list[Plan]:
        """The candidates that keep the limits most often."""
        return sorted(self.looks, key=lambda candidate: -self.looks[candidate].kept(self.box))[:most]

    def best(self) -> Plan | None:
        """The best candidate that surely keeps the limits."""
        best = next(filter(self.sure, self.ranked()), None)
        bound = math.inf if best is None else self.value(best)[0] * (1.0 - _WORTH_IT)
        least = self.confidence - _CLEAR * self._error(ROUGH_CHUNKS * self.draws.rows)
        missed = [plan for plan, look in self.looks.items() if least <= look.kept(self.box) < self.confidence]
        hopeful = sorted((plan for plan in missed if self.value(plan)[0] < bound), key=self.value)
        return next(filter(self.sure, hopeful[:_HOPEFUL]), best)
