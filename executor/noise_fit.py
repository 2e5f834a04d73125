"""Components of the noise of training times: what trials differ by, and what the iterations of one trial differ by.

The model is a random-effects one of logarithms: log(seconds per iteration) = number of GPUs + trial + residual. Effects
of trials and residuals are normal, so that times are lognormal; the number of GPUs is a fixed effect. A trial need not
be measured with every number of GPUs: its speed elsewhere tells what it would take. Pure: it only computes.

`fit` makes a measured profile. A run estimates the speeds of its trials with `executor.core.own_speeds`, which
costs less and starts from the profile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

PRIOR_SCALE = 0.1
"""Scale of the prior of both deviations."""
PRIOR_FREEDOM = 2.0
"""Degrees of freedom of the prior: its tail gives way to data that says more."""
_GRID = 128
_LEAST, _MOST = 1e-6, 2.0
_ZOOMS = 3
_NEGLIGIBLE = 1e-7
"""Of the peak's density; the grid is laid again where there is more."""
_INTERVAL = (0.05, 0.95)
_LEAST_FREEDOM = 3.0
"""Of the error of the mean of one trial or two, whose deviation is mostly the prior's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The iterations of one trial with one number of GPUs: how many, their mean, and that of their logarithms."""

    trial: int
    gpus: int
    mean_s: float
    """Seconds per iteration."""
    log_s: float
    """The mean of the logarithms of the iterations' seconds."""
    iterations: int
    scatter: float
    """Sum of the squared deviations from `log_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A coefficient of variation, and the interval that holds it with a probability of 90 %."""

    cv: float
    low_cv: float
    high_cv: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What training times are made of."""

    trial: Component
    """Between trials: a trial keeps its speed."""
    iteration: Component
    """Between the iterations of a trial."""
    log_seconds: Mapping[int, float]
    """GPUs -> logarithm of the seconds per iteration of the average trial."""
    mean_error: float
    """Standard error of `log_seconds`, which comes from that there are few trials more than from anything else.

    Few trials leave the deviation unsure too, so it is widened: its normal law has the 95th percentile of Student's t.
    """
    log_speeds: Mapping[int, float]
    """Trial -> how much slower than the average it is: the logarithm of a factor, shrunk by what is unsure of it."""

    def seconds_per_iteration(self, cells: Sequence[Cell]) -> dict[int, float]:
        """Return GPUs -> mean seconds per iteration, over the same trials at every number of GPUs.

        What a trial was not measured with comes from its own speed, so that the means of numbers of GPUs with which
        few trials were measured do not depend on which ones these were.
        """
        seen = {(cell.trial, cell.gpus): cell.mean_s for cell in cells}
        above_log = math.log1p(self.iteration.cv**2) / 2.0

        def mean_s(trial: int, gpus: int) -> float:
            known_s = seen.get((trial, gpus))
            return math.exp(self.log_seconds[gpus] + self.log_speeds[trial] + above_log) if known_s is None else known_s

        trials = self.log_speeds
        return {gpus: math.fsum(mean_s(trial, gpus) for trial in trials) / len(trials) for gpus in self.log_seconds}


def cell_of(trial: int, gpus: int, seconds: Sequence[float]) -> Cell:
    """Return what a trial's iterations took with one number of GPUs; each took some time, and there is one at least."""
    logs = [math.log(max(second, _LEAST)) for second in seconds]
    log_s, mean_s = (math.fsum(values) / len(values) for values in (logs, seconds))
    scatter = math.fsum((log - log_s) ** 2 for log in logs)
    return Cell(trial=trial, gpus=gpus, mean_s=mean_s, log_s=log_s, iterations=len(logs), scatter=scatter)


def fit(cells: Sequence[Cell]) -> Fit:
    """Fit the components to cells, of which there is one at least and one at most for each trial and number of GPUs.

    The estimates are posterior means under the restricted likelihood (that of REML) and a weak prior for either
    deviation: half-t of scale 0.1 with 2 degrees of freedom. REML itself and the ANOVA estimator are often 0 where few
    trials differ by a few percent, and a plan that believes them is late more often than it says. The posterior mean is
    not 0 as long as trials may differ. One trial alone says nothing of how trials differ: the estimate is then the
    prior's mean, 15 %.
    """
    table = _Table(cells)
    trial_sd = residual_sd = np.geomspace(_LEAST, _MOST, _GRID)
    for _ in range(_ZOOMS):
        weights = table.posterior(trial_sd, residual_sd)
        trial_sd, residual_sd = _zoom(trial_sd, residual_sd, weights)
    weights = table.posterior(trial_sd, residual_sd)
    trial, residual = _component(trial_sd, weights.sum(axis=1)), _component(residual_sd, weights.sum(axis=0))
    log_seconds, mean_error, log_speeds = table.effects(_sd(trial.cv), _sd(residual.cv))
    mean_error *= _student(len(table.trials) - 1.0)
    return Fit(trial=trial, iteration=residual, log_seconds=log_seconds, mean_error=mean_error, log_speeds=log_speeds)


class _Table:
    """Sufficient statistics of cells: how many iterations, and sums of logarithms, by trial and number of GPUs."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self.trials = sorted({cell.trial for cell in cells})
        self.gpus = sorted({cell.gpus for cell in cells})
        rows = {trial: row for row, trial in enumerate(self.trials)}
        columns = {gpus: column for column, gpus in enumerate(self.gpus)}
        self._middle = math.fsum(cell.log_s for cell in cells) / len(cells)
        self._counts: Floats = np.zeros((len(rows), len(columns)))
        self._sums: Floats = np.zeros_like(self._counts)
        self._square = 0.0
        for cell in cells:
            at, centred = (rows[cell.trial], columns[cell.gpus]), cell.log_s - self._middle
            self._counts[at] = cell.iterations
            self._sums[at] = cell.iterations * centred
            self._square += cell.scatter + cell.iterations * centred**2
        self._per_trial: Floats = self._counts.sum(axis=1)
        share = self._counts / self._per_trial[:, None]
        self._within = np.diag(self._counts.sum(axis=0)) - self._counts.T @ share
        self._within_sums = self._sums.sum(axis=0) - share.T @ self._sums.sum(axis=1)

    def _normal(self, ratio: Floats) -> tuple[Floats, Floats]:
        """The normal equations of the fixed effects for ratios of trials' variance to the residual's.

        Both sides are multiplied by the residual's variance. What trials are compared with themselves for comes first,
        and what their means tell is added, so that nothing cancels where trials differ by far more than iterations.
        """
        means = self._shared(ratio)
        matrix = self._within + np.einsum("rt,tp,tq->rpq", means, self._counts, self._counts, optimize=True)
        return matrix, self._within_sums + (means * self._sums.sum(axis=1)) @ self._counts

    def _shared(self, ratio: Floats) -> Floats:
        """What the square of a trial's sum counts for: 1 / (n * (1 + ratio * n))."""
        return 1.0 / (self._per_trial * (1.0 + ratio[:, None] * self._per_trial))

    def posterior(self, trial_sd: Floats, residual_sd: Floats) -> Floats:
        """Probabilities of a grid of deviations: both are evenly spaced by their logarithms, with the same step."""
        last = len(residual_sd) - 1
        ratio = np.concatenate([trial_sd[0] / residual_sd[:0:-1], trial_sd / residual_sd[0]]) ** 2
        matrix, right = self._normal(ratio)
        effects = np.linalg.solve(matrix, right[..., None])[..., 0]
        sums = self._sums.sum(axis=1)
        square = self._square - (sums**2 / self._per_trial).sum() + self._shared(ratio) @ sums**2
        square = np.maximum(square - (right * effects).sum(axis=1), 0.0)
        log_det = np.log1p(ratio[:, None] * self._per_trial).sum(axis=1) + np.linalg.slogdet(matrix)[1]
        at = last + np.arange(len(trial_sd))[:, None] - np.arange(len(residual_sd))
        freedom = self._counts.sum() - len(self.gpus)
        log_likelihood = -freedom * np.log(residual_sd) - 0.5 * (log_det[at] + square[at] / residual_sd**2)
        density = log_likelihood + _log_prior(trial_sd)[:, None] + _log_prior(residual_sd)
        found = np.exp(density - density.max())
        return np.asarray(found / found.sum())

    def effects(self, trial_sd: float, residual_sd: float) -> tuple[dict[int, float], float, dict[int, float]]:
        """The best linear unbiased prediction of either effect, of known deviations, and the fixed one's error."""
        residual_sd = max(residual_sd, _LEAST)
        ratio = np.array([(trial_sd / residual_sd) ** 2])
        matrix, right = self._normal(ratio)
        fixed = np.linalg.solve(matrix[0], right[0])
        weights = ratio / (1.0 + ratio * self._per_trial)
        speeds = weights * (self._sums.sum(axis=1) - self._counts @ fixed)
        log_seconds = {gpus: float(value) + self._middle for gpus, value in zip(self.gpus, fixed, strict=True)}
        mean_error = residual_sd * math.sqrt(float(np.diag(np.linalg.inv(matrix[0])).mean()))
        return log_seconds, mean_error, {trial: float(value) for trial, value in zip(self.trials, speeds, strict=True)}


def _log_prior(deviations: Floats) -> Floats:
    """The half-t density of a deviation's logarithm, but for a constant."""
    scaled = (deviations / PRIOR_SCALE) ** 2 / PRIOR_FREEDOM
    return np.asarray(np.log(deviations) - 0.5 * (PRIOR_FREEDOM + 1.0) * np.log1p(scaled))


def _zoom(trial_sd: Floats, residual_sd: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Grids of as many points, where the probability is; they have the same step."""
    ends = [_likely(trial_sd, weights.sum(axis=1)), _likely(residual_sd, weights.sum(axis=0))]
    span = max(last / first for first, last in ends)
    firsts = [min(max(math.sqrt(first * last / span), _LEAST), _MOST / span) for first, last in ends]
    trials, residuals = (np.geomspace(first, first * span, _GRID) for first in firsts)
    return trials, residuals


def _likely(grid: Floats, weights: Floats) -> tuple[float, float]:
    likely = np.flatnonzero(weights > _NEGLIGIBLE * weights.max())
    return float(grid[max(likely[0] - 1, 0)]), float(grid[min(likely[-1] + 1, len(grid) - 1)])


def _component(grid: Floats, weights: Floats) -> Component:
    cvs, below = np.sqrt(np.expm1(grid**2)), np.cumsum(weights) - 0.5 * weights
    low, high = np.interp(_INTERVAL, below, cvs).tolist()
    return Component(cv=float(weights @ cvs), low_cv=low, high_cv=high)


def _student(freedom: float) -> float:
    """Student's t over the normal law at the 95th percentile (Cornish-Fisher expansion)."""
    freedom, square = max(freedom, _LEAST_FREEDOM), NormalDist().inv_cdf(_INTERVAL[1]) ** 2
    return 1.0 + (square + 1.0) / (4.0 * freedom) + (5.0 * square**2 + 16.0 * square + 3.0) / (96.0 * freedom**2)


def _sd(cv: float) -> float:
    """Deviation of the logarithm of a lognormal quantity."""
    return math.sqrt(math.log1p(cv**2))
