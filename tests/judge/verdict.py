"""Predictions of a job beside the simulation, and the simulation beside virtual runs of the executor."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from rubberband.executor import Job
from rubberband.values.plan import PlanningConstraints
from tests.judge.cluster import Bools, Floats
from tests.judge.jobs import PlannedJob
from tests.judge.simulation import Outcome, simulate
from tests.judge.virtual import VirtualRuns, plain, virtual_runs

FIRST_DRAWS, DRAWS = 4_000, 24_000
"""Draws of the first look, and of a second one."""
ODDS, SHARE = 0.01, 0.01
"""Predictions may be off by a point of odds, and by 1 % of the mean time and cost, beyond what sampling allows."""
_SURE = 3.0
"""Standard errors of the simulation that count as sampling error."""
_NEAR = 0.7
"""A figure that is off by less than this share of what is allowed has no second look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A predicted figure beside the judged one."""

    predicted: float
    judged: float
    error: float
    """Standard error of the judged one."""

    def off(self, *, relative: bool) -> float:
        """Return predicted less judged, as a share of the judged one where `relative`."""
        difference = self.predicted - self.judged
        return difference / max(self.judged, 1e-9) if relative else difference

    def is_beyond(self, allowed: float, *, relative: bool) -> bool:
        """Whether it is off by more than is allowed and sampling explains."""
        error = self.error / max(self.judged, 1e-9) if relative else self.error
        return abs(self.off(relative=relative)) > allowed + _SURE * error + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Prediction of a job, and the truth."""

    kind: str
    seed: int
    odds: Figure
    time_s: Figure
    cost_usd: Figure

    @property
    def is_unclear(self) -> bool:
        """Whether a figure that is off may be off by more than is allowed, or not."""
        figures = (("odds", self.odds, ODDS), ("time", self.time_s, SHARE), ("cost", self.cost_usd, SHARE))
        return any(
            abs(figure.off(relative=name != "odds")) > _NEAR * allowed and name not in self.beyond
            for name, figure, allowed in figures
        )

    @property
    def beyond(self) -> tuple[str, ...]:
        """Which figures are off by more than is allowed."""
        return (
            *(["odds"] if self.odds.is_beyond(ODDS, relative=False) else []),
            *(["time"] if self.time_s.is_beyond(SHARE, relative=True) else []),
            *(["cost"] if self.cost_usd.is_beyond(SHARE, relative=True) else []),
        )


def verdict_of(planned: PlannedJob, draws: int | None = None) -> Verdict:
    """Judge what is predicted of a job: by few draws first, and by many new ones where these leave it unclear."""
    first = _judged(planned, FIRST_DRAWS if draws is None else draws, 1)
    if draws is not None or not first.is_unclear:
        return first
    return _judged(planned, DRAWS, 2)


def _judged(planned: PlannedJob, draws: int, seed: int) -> Verdict:
    assert planned.estimate.job is not None, "a plan was found"
    prediction, odds = planned.estimate.job.prediction, planned.estimate.job.odds
    work, terms, noise = plain(planned.job)
    is_capped = planned.constraints.max_cost_usd is not None
    found = simulate(work, terms, noise, draws=draws, seed=seed, money=is_capped)
    kept = within(planned.constraints, found.time_s, found.needed_usd)
    return Verdict(
        kind=planned.question.kind,
        seed=planned.question.seed,
        odds=Figure(predicted=1.0 if odds is None else odds.p_both, judged=float(kept.mean()), error=_error(kept)),
        time_s=Figure(predicted=prediction.jct_s, judged=float(found.time_s.mean()), error=_error(found.time_s)),
        cost_usd=Figure(
            predicted=prediction.cost_usd, judged=float(found.cost_usd.mean()), error=_error(found.cost_usd)
        ),
    )


def within(limits: PlanningConstraints, time_s: Floats, cost_usd: Floats) -> Bools:
    """Return which runs keep their limits; sums that reach one exactly do."""
    deadline_s = math.inf if limits.deadline_s is None else limits.deadline_s
    cap_usd = math.inf if limits.max_cost_usd is None else limits.max_cost_usd
    kept: Bools = (time_s <= deadline_s * (1.0 + 1e-9) + 1e-3) & (cost_usd <= cap_usd * (1.0 + 1e-9) + 1e-6)
    return kept


def _error(values: Floats | Bools) -> float:
    """Return the standard error of a mean; shares near 0 and 1 are taken to be a little less extreme."""
    if values.dtype == bool:
        share = (float(values.sum()) + 1.0) / (len(values) + 2.0)
        return math.sqrt(share * (1.0 - share) / len(values))
    return float(values.std()) / math.sqrt(len(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The simulation beside virtual runs: differences in standard errors."""

    kind: str
    seed: int
    time_z: float
    cost_z: float
    odds_z: float
    left_spot: float
    """Share of the runs that bought on demand in place of spot, which the simulation does not."""

    @property
    def worst(self) -> float:
        """The largest."""
        return max(abs(self.time_z), abs(self.cost_z), abs(self.odds_z))


def agreement_of(planned: PlannedJob, runs: int, draws: int = 20_000) -> Agreement:
    """Compare the simulation with virtual runs of the executor, without a cap and as planned."""
    kind, seed = planned.question.kind, planned.question.seed
    job = replace(planned.job, max_cost_usd=None)
    found, seen = both(job, runs, draws, f"{kind} {seed}")
    limits = replace(planned.constraints, max_cost_usd=None)
    kept = [within(limits, each.time_s, each.cost_usd) for each in (found, seen)]
    return Agreement(
        kind=kind,
        seed=seed,
        time_z=_z(found.time_s, seen.time_s),
        cost_z=_z(found.cost_usd, seen.cost_usd),
        odds_z=_z(*kept),
        left_spot=float(seen.left_spot.mean()),
    )


def both(job: Job, runs: int, draws: int, seed: object) -> tuple[Outcome, VirtualRuns]:
    """Return the runs that are simulated, and those that the executor makes."""
    work, terms, noise = plain(job)
    return simulate(work, terms, noise, draws=draws, seed=3), virtual_runs(job, runs, seed)


def _z(found: Floats | Bools, seen: Floats | Bools) -> float:
    difference = float(found.mean() - seen.mean())
    if abs(difference) <= 1e-9 * max(1.0, abs(float(seen.mean()))):
        return 0.0
    # The spread is the simulation's: that of few runs is too small now and then, and with it the error.
    error = _error(found) * math.sqrt(1.0 + len(found) / len(seen))
    return difference / max(error, np.finfo(float).tiny)
