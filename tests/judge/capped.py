"""Jobs with a budget, run with replanning: virtual runs are the judge there."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tests.judge.jobs import PlannedJob
from tests.judge.verdict import within
from tests.judge.virtual import VirtualRuns, virtual_runs

_SUSPICIOUS, _BROKEN = 0.1, 1e-3
"""Chance of no more kept runs than there are: below the first, four times as many more are made; below the second, the
promise is broken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capped:
    """Runs of a job, with replanning and as planned."""

    seed: int
    runs: int
    confidence: float
    """Promised."""
    predicted: float
    """P that both limits are kept, as predicted."""
    kept: int
    """Runs that came to their end within both limits, with replanning."""
    kept_fixed: int
    """The same as planned, in the same weather."""
    above_cap: int
    """Runs that cost more than the cap."""
    stopped: int
    """Runs that did not come to their end."""

    @property
    def is_broken(self) -> bool:
        """Whether fewer are kept than chance allows."""
        return _chance(self.kept, self.runs, self.confidence) < _BROKEN


def capped_of(planned: PlannedJob, runs: int) -> Capped:
    """Run a job with replanning and without; more often where the promise seems to be broken."""
    found = _capped(planned, runs, "first")
    if _chance(found.kept, found.runs, found.confidence) >= _SUSPICIOUS:
        return found
    return _capped(planned, 5 * runs, "second")


def _capped(planned: PlannedJob, runs: int, seed: str) -> Capped:
    limits, odds = planned.constraints, planned.estimate.odds
    job = replace(
        planned.job,
        max_cost_usd=limits.max_cost_usd,
        min_gpus_per_trial=limits.min_gpus_per_trial,
        max_gpus_per_trial=limits.max_gpus_per_trial,
    )
    weather = f"capped {planned.question.seed} {seed}"
    replanned = virtual_runs(replace(job, replan=True), runs, weather)
    fixed = virtual_runs(job, runs, weather)
    assert limits.max_cost_usd is not None, "it is capped"
    return Capped(
        seed=planned.question.seed,
        runs=runs,
        confidence=1.0 if odds is None else limits.confidence,
        predicted=1.0 if odds is None else odds.p_both,
        kept=_kept(planned, replanned),
        kept_fixed=_kept(planned, fixed),
        above_cap=int((replanned.cost_usd > limits.max_cost_usd + 1e-6).sum()),
        stopped=int((~replanned.is_done).sum()),
    )


def _kept(planned: PlannedJob, runs: VirtualRuns) -> int:
    return int((within(planned.constraints, runs.time_s, runs.cost_usd) & runs.is_done).sum())


def _chance(kept: int, runs: int, share: float) -> float:
    """Return the probability of at most `kept` of `runs`, if each is kept with probability `share`."""
    return sum(math.comb(runs, count) * share**count * (1.0 - share) ** (runs - count) for count in range(kept + 1))
