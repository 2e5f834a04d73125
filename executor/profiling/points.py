"""Measurements of profiling, and the profile made of them: means, and components of noise. Pure.

The noise model is a random-effects one of logarithms: log(seconds per iteration) = number of GPUs + trial + residual.
Effects of trials and residuals are normal, so that times are lognormal; the number of GPUs is a fixed effect. A trial
need not be measured with every number of GPUs: its speed elsewhere predicts its time. `fit` makes a measured profile. A
run estimates the speeds of its trials with `executor.core.own_speeds`, which is cheaper and starts from the profile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean, median, variance

import numpy as np
import numpy.typing as npt

from rubberband.executor.core.events import TrialReported
from rubberband.features import part
from rubberband.values.adaptive import BatchLimits, BatchPoint, BatchUse, GoodputProfile
from rubberband.values.asynchronous import AsyncProfile, AsyncTimes, AsyncUse
from rubberband.values.profile import FIXED, Profile, measured

Floats = npt.NDArray[np.float64]

PRIOR_SCALE = 0.1
"""Scale of the prior of both deviations."""
PRIOR_FREEDOM = 2.0
"""Degrees of freedom of the prior: its tail gives way to data that says more."""
_GRID = 128
_LEAST_S = 1e-6
"""A shorter iteration counts as one of this time, which has a logarithm."""
_LEAST_SD, _MOST_SD = 1e-6, 2.0
_ZOOMS = 3
_NEGLIGIBLE = 1e-7
"""Share of the peak's density; the next grid covers the points above it."""
_INTERVAL = (0.05, 0.95)
_LEAST_FREEDOM = 3.0
"""Degrees of freedom of the mean's error for one or two trials, whose deviation is mostly the prior's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The iterations of one trial with one number of GPUs."""

    trial: int
    gpus: int
    mean_s: float
    """Seconds per iteration."""
    log_s: float
    """Mean of the logarithms of the iterations' seconds."""
    iterations: int
    scatter: float
    """Sum of the squared deviations from `log_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseComponent:
    """A coefficient of variation, and its 90 % interval."""

    cv: float
    low_cv: float
    high_cv: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Components of training times."""

    trial: NoiseComponent
    """Between trials: a trial keeps its speed."""
    iteration: NoiseComponent
    """Between the iterations of a trial."""
    log_seconds: Mapping[int, float]
    """GPUs -> logarithm of the seconds per iteration of the average trial."""
    mean_error: float
    """Standard error of `log_seconds`, mostly due to few trials.

    Few trials leave the deviation unsure too, so it is widened to the 95th percentile of Student's t.
    """
    log_speeds: Mapping[int, float]
    """Trial -> logarithm of how much slower than the average it is, shrunk by its uncertainty."""

    def seconds_per_iteration(self, cells: Sequence[Cell]) -> dict[int, float]:
        """Return GPUs -> mean seconds per iteration, over the same trials at every number of GPUs.

        Times that were not measured come from the trial's own speed, so that a mean does not depend on which few trials
        were measured with that number of GPUs.
        """
        seen = {(cell.trial, cell.gpus): cell.mean_s for cell in cells}
        above_log = math.log1p(self.iteration.cv**2) / 2.0

        def mean_s(trial: int, gpus: int) -> float:
            known_s = seen.get((trial, gpus))
            return math.exp(self.log_seconds[gpus] + self.log_speeds[trial] + above_log) if known_s is None else known_s

        trials = self.log_speeds
        return {gpus: math.fsum(mean_s(trial, gpus) for trial in trials) / len(trials) for gpus in self.log_seconds}


def cell_of(trial: int, gpus: int, seconds: Sequence[float]) -> Cell:
    """Return the cell of a trial's iterations (one at least) with one number of GPUs."""
    logs = [math.log(max(second, _LEAST_S)) for second in seconds]
    log_s, mean_s = (math.fsum(values) / len(values) for values in (logs, seconds))
    scatter = math.fsum((log - log_s) ** 2 for log in logs)
    return Cell(trial=trial, gpus=gpus, mean_s=mean_s, log_s=log_s, iterations=len(logs), scatter=scatter)


def fit(cells: Sequence[Cell]) -> Fit:
    """Fit the components to cells, at least one, and at most one for each trial and number of GPUs.

    The estimates are posterior means under the restricted likelihood (that of REML) and a weak prior for either
    deviation: half-t of scale 0.1 with 2 degrees of freedom. REML itself and the ANOVA estimator are often 0 if few
    trials differ by a few percent, and a plan that believes them is late more often than it says. The posterior mean is
    never 0. For one trial alone, the estimate of how trials differ is the prior's mean, 15 %.
    """
    table = _Table(cells)
    trial_sd = residual_sd = np.geomspace(_LEAST_SD, _MOST_SD, _GRID)
    for _ in range(_ZOOMS):
        weights = table.posterior(trial_sd, residual_sd)
        trial_sd, residual_sd = _zoom(trial_sd, residual_sd, weights)
    weights = table.posterior(trial_sd, residual_sd)
    trial, residual = _component(trial_sd, weights.sum(axis=1)), _component(residual_sd, weights.sum(axis=0))
    log_seconds, mean_error, log_speeds = table.effects(_sd(trial.cv), _sd(residual.cv))
    mean_error *= _student(len(table.trials) - 1.0)
    return Fit(trial=trial, iteration=residual, log_seconds=log_seconds, mean_error=mean_error, log_speeds=log_speeds)


class _Table:
    """Sufficient statistics of cells: numbers of iterations, and sums of logarithms, by trial and number of GPUs."""

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
            place, centred = (rows[cell.trial], columns[cell.gpus]), cell.log_s - self._middle
            self._counts[place] = cell.iterations
            self._sums[place] = cell.iterations * centred
            self._square += cell.scatter + cell.iterations * centred**2
        self._per_trial: Floats = self._counts.sum(axis=1)
        share = self._counts / self._per_trial[:, None]
        self._within = np.diag(self._counts.sum(axis=0)) - self._counts.T @ share
        self._within_sums = self._sums.sum(axis=0) - share.T @ self._sums.sum(axis=1)

    def _normal(self, ratio: Floats) -> tuple[Floats, Floats]:
        """Return the normal equations of the fixed effects for ratios of trials' variance to the residual's.

        Both sides are multiplied by the residual's variance. The comparison within trials comes first, and that of
        their means is added, so that nothing cancels if trials differ by far more than iterations.
        """
        means = self._shared(ratio)
        matrix = self._within + np.einsum("rt,tp,tq->rpq", means, self._counts, self._counts, optimize=True)
        return matrix, self._within_sums + (means * self._sums.sum(axis=1)) @ self._counts

    def _shared(self, ratio: Floats) -> Floats:
        """Return the weight of the square of a trial's sum: 1 / (n * (1 + ratio * n))."""
        return 1.0 / (self._per_trial * (1.0 + ratio[:, None] * self._per_trial))

    def posterior(self, trial_sd: Floats, residual_sd: Floats) -> Floats:
        """Return the probabilities of a grid of deviations; their logarithms are evenly spaced, with equal steps."""
        last = len(residual_sd) - 1
        ratio = np.concatenate([trial_sd[0] / residual_sd[:0:-1], trial_sd / residual_sd[0]]) ** 2
        matrix, right = self._normal(ratio)
        effects = np.linalg.solve(matrix, right[..., None])[..., 0]
        sums = self._sums.sum(axis=1)
        square = self._square - (sums**2 / self._per_trial).sum() + self._shared(ratio) @ sums**2
        square = np.maximum(square - (right * effects).sum(axis=1), 0.0)
        log_det = np.log1p(ratio[:, None] * self._per_trial).sum(axis=1) + np.linalg.slogdet(matrix)[1]
        index = last + np.arange(len(trial_sd))[:, None] - np.arange(len(residual_sd))
        freedom = self._counts.sum() - len(self.gpus)
        log_likelihood = -freedom * np.log(residual_sd) - 0.5 * (log_det[index] + square[index] / residual_sd**2)
        density = log_likelihood + _log_prior(trial_sd)[:, None] + _log_prior(residual_sd)
        weights = np.exp(density - density.max())
        return np.asarray(weights / weights.sum())

    def effects(self, trial_sd: float, residual_sd: float) -> tuple[dict[int, float], float, dict[int, float]]:
        """Return the best linear unbiased predictions of both effects, and the error of the fixed one."""
        residual_sd = max(residual_sd, _LEAST_SD)
        ratio = np.array([(trial_sd / residual_sd) ** 2])
        matrix, right = self._normal(ratio)
        fixed = np.linalg.solve(matrix[0], right[0])
        weights = ratio / (1.0 + ratio * self._per_trial)
        speeds = weights * (self._sums.sum(axis=1) - self._counts @ fixed)
        log_seconds = {gpus: float(value) + self._middle for gpus, value in zip(self.gpus, fixed, strict=True)}
        mean_error = residual_sd * math.sqrt(float(np.diag(np.linalg.inv(matrix[0])).mean()))
        return log_seconds, mean_error, {trial: float(value) for trial, value in zip(self.trials, speeds, strict=True)}


def _log_prior(deviations: Floats) -> Floats:
    """Return the half-t density of a deviation's logarithm, up to a constant."""
    scaled = (deviations / PRIOR_SCALE) ** 2 / PRIOR_FREEDOM
    return np.asarray(np.log(deviations) - 0.5 * (PRIOR_FREEDOM + 1.0) * np.log1p(scaled))


def _zoom(trial_sd: Floats, residual_sd: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Return grids of as many points around the probable deviations, with equal steps."""
    ends = [_likely(trial_sd, weights.sum(axis=1)), _likely(residual_sd, weights.sum(axis=0))]
    span = max(last / first for first, last in ends)
    firsts = [min(max(math.sqrt(first * last / span), _LEAST_SD), _MOST_SD / span) for first, last in ends]
    trials, residuals = (np.geomspace(first, first * span, _GRID) for first in firsts)
    return trials, residuals


def _likely(grid: Floats, weights: Floats) -> tuple[float, float]:
    likely = np.flatnonzero(weights > _NEGLIGIBLE * weights.max())
    return float(grid[max(likely[0] - 1, 0)]), float(grid[min(likely[-1] + 1, len(grid) - 1)])


def _component(grid: Floats, weights: Floats) -> NoiseComponent:
    cvs, below = np.sqrt(np.expm1(grid**2)), np.cumsum(weights) - 0.5 * weights
    low, high = np.interp(_INTERVAL, below, cvs).tolist()
    return NoiseComponent(cv=float(weights @ cvs), low_cv=low, high_cv=high)


def _student(freedom: float) -> float:
    """Return Student's t over the normal law at the 95th percentile (Cornish-Fisher expansion)."""
    freedom, square = max(freedom, _LEAST_FREEDOM), NormalDist().inv_cdf(_INTERVAL[1]) ** 2
    return 1.0 + (square + 1.0) / (4.0 * freedom) + (5.0 * square**2 + 16.0 * square + 3.0) / (96.0 * freedom**2)


def _sd(cv: float) -> float:
    """Return the deviation of the logarithm of a lognormal quantity."""
    return math.sqrt(math.log1p(cv**2))


_FEWEST_STEPS = 2
"""A single step may be the first of its size, which sets up memory and kernels."""
_LEAST_NOISE_SCALE = 1.0
"""With less than one sample, no larger batch is of any use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTime:
    """Time of a step with one batch size, on one number of GPUs."""

    batch_size: int
    step_s: float
    """Mean over the trials that tried it."""


class BatchReports:
    """The trials' reports of their batches, and the model of goodput made of them; fixed batches are ignored."""

    def __init__(self) -> None:
        self._uses: list[BatchUse] = []
        self._overheads_s: list[float] = []
        self.noise_scales: dict[int, float] = {}
        """Trial -> the latest that it has reported."""
        self._limits: dict[int, BatchLimits] = {}
        self._samples: dict[int, int] = {}

    def add(self, report: TrialReported, *, is_timed: bool = True, iteration_s: float | None = None) -> None:
        """Add a report; its times only if they count (`is_timed`).

        `iteration_s` is the time of the whole iteration, if it shows the overhead beside its steps.
        """
        if report.limits is None or report.samples_per_iteration is None:
            return
        self._limits[report.trial], self._samples[report.trial] = report.limits, report.samples_per_iteration
        for use in report.batches:
            if use.noise_scale is not None:
                self.noise_scales[report.trial] = max(use.noise_scale, _LEAST_NOISE_SCALE)
        if is_timed:
            self._uses += report.batches
        if iteration_s is not None and report.batches:
            steps_s = sum(use.steps * use.step_s for use in report.batches)
            self._overheads_s.append(max(0.0, iteration_s - steps_s))

    def times(self, gpus: int) -> tuple[BatchTime, ...]:
        """Return the times on this number of GPUs, smallest batch first."""
        sizes: dict[int, list[BatchUse]] = {}
        for use in self._timed():
            if use.gpus == gpus:
                sizes.setdefault(use.batch_size, []).append(use)
        return tuple(BatchTime(batch_size=size, step_s=_mean_step_s(uses)) for size, uses in sorted(sizes.items()))

    def points(self) -> tuple[BatchPoint, ...]:
        """Return every configuration that was timed, once."""
        uses_of: dict[BatchPoint, list[BatchUse]] = {}
        for use in self._timed():
            uses_of.setdefault(replace(use.point(), step_s=0.0), []).append(use)
        return tuple(replace(point, step_s=_mean_step_s(uses)) for point, uses in uses_of.items())

    def _timed(self) -> list[BatchUse]:
        return [use for use in self._uses if use.steps >= _FEWEST_STEPS] or self._uses

    def model(self) -> GoodputProfile | None:
        """Return the model of the median trial; None if no trial adapts its batch.

        The noise scale is the median as well. If no trial reports one it is M0, which is cautious: twice the batch then
        makes 4/3 of the progress.
        """
        points = self.points()
        if not points:
            return None
        limits, (throughput, error) = self._middle_limits(), part("fit")(points)
        return GoodputProfile(
            throughput=throughput,
            noise_scale=median(self.noise_scales.values()) if self.noise_scales else float(limits.initial),
            samples_per_iteration=float(median(self._samples.values())),
            limits=limits,
            overhead_s=fmean(self._overheads_s) if self._overheads_s else 0.0,
            points=points,
            fit_error=error,
        )

    def _middle_limits(self) -> BatchLimits:
        """Return the limits of the trial with the median M0, and the smallest m of all trials."""
        limits_by_size = sorted(self._limits.values(), key=lambda limits: (limits.initial, limits.max))
        per_gpu = [limits.max_per_gpu for limits in limits_by_size if limits.max_per_gpu is not None]
        return replace(limits_by_size[(len(limits_by_size) - 1) // 2], max_per_gpu=min(per_gpu, default=None))


class UpdateReports:
    """The trials' reports of their updates, and the queueing model made of them; synchronous ones are ignored."""

    def __init__(self) -> None:
        self._alone: list[AsyncUse] = []
        self._overheads_s: list[float] = []

    def add(self, report: TrialReported, iteration_s: float | None) -> None:
        """Add a report of an iteration that took `iteration_s`, if that was timed; a lone worker's counts."""
        use = report.updates
        if use is None or use.workers > 1 or use.updates < 1 or iteration_s is None:
            return
        self._alone.append(use)
        update_s = use.compute_s + use.up_s + use.wait_s + use.server_s + use.down_s
        self._overheads_s.append(max(0.0, iteration_s - use.updates * update_s))

    def model(self) -> AsyncProfile | None:
        """Return the model with the mean times of workers that trained alone; None if there were none."""
        if not self._alone:
            return None
        updates = sum(use.updates for use in self._alone)

        def mean_s(time_of: Callable[[AsyncUse], float]) -> float:
            return sum(use.updates * time_of(use) for use in self._alone) / updates

        return AsyncProfile(
            times=AsyncTimes(
                compute_s=mean_s(lambda use: use.compute_s),
                up_s=mean_s(lambda use: use.up_s),
                server_s=mean_s(lambda use: use.server_s + use.wait_s),
                down_s=mean_s(lambda use: use.down_s),
            ),
            updates_per_iteration=updates / len(self._alone),
            overhead_s=fmean(self._overheads_s),
            servers=self._alone[0].servers,
            largest_shard=self._alone[0].largest_shard,
        )


def _mean_step_s(uses: list[BatchUse]) -> float:
    return sum(use.steps * use.step_s for use in uses) / sum(use.steps for use in uses)


_LEAST_START_S = 0.01
"""The variation of shorter starts is not reported: it is the clock's noise."""
_LEAST_CV = 1e-4
"""Less counts as 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One trial, trained with one number of GPUs."""

    trial: int
    instances: tuple[str, ...]
    """Instances of its gang."""
    startup_s: float
    """From the order to start on warm workers, from a checkpoint, until the first step."""
    iterations_s: tuple[float, ...]
    """Iterations after the first of a start, or also that one if it took no longer."""
    firsts_s: tuple[float, ...] = ()
    """The first iterations of its starts, where others followed."""
    is_cold: bool = False
    """Whether it ended by itself on fresh workers, so that its iteration has what is done once in a process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Measurements with one number of GPUs per trial."""

    gpus: int
    copies: int
    """The most trials that trained side by side."""
    timed: tuple[Timed, ...]
    first_extra_s: float = 0.0
    """How much longer the first iteration of a start takes than the others."""
    batches: tuple[BatchTime, ...] = ()
    """Times of steps with the batch sizes that trials tried, if they may adapt them."""

    @property
    def iteration_s(self) -> float:
        return fmean(second for trial in self.timed for second in trial.iterations_s)

    @property
    def iteration_cv(self) -> float:
        """Coefficient of variation of a single iteration within one trial."""
        within = fmean(variance(trial.iterations_s) if len(trial.iterations_s) > 1 else 0.0 for trial in self.timed)
        return math.sqrt(within) / self.iteration_s

    @property
    def startup_s(self) -> float:
        """Mean time from the order to start until training is as fast as later on."""
        return fmean(trial.startup_s for trial in self.timed) + self.first_extra_s


def point_of(gpus: int, copies: int, timed: Sequence[Timed]) -> Point:
    """Return the point of some trials (one at least), with what first iterations take beyond others as start-up.

    Trials that were timed in a fresh process alone count only where there are no others.
    """
    kept = [trial for trial in timed if not trial.is_cold] or list(timed)
    extra_s = first_extra_s([(first_s, trial.iterations_s) for trial in kept for first_s in trial.firsts_s])
    if not extra_s:
        kept = [replace(trial, iterations_s=trial.firsts_s + trial.iterations_s, firsts_s=()) for trial in kept]
    return Point(gpus=gpus, copies=min(copies, len(timed)), timed=tuple(kept), first_extra_s=extra_s)


_LEAST_EXTRA = 0.03
"""A first iteration that takes less than this share longer is one like the others."""


def first_extra_s(firsts: Sequence[tuple[float, Sequence[float]]]) -> float:
    """Return how much longer first iterations take than those that followed each; 0 if that may be chance."""
    if not firsts:
        return 0.0
    usual_s = fmean(second for _, others in firsts for second in others)
    extras_s = [first_s - fmean(others) for first_s, others in firsts]
    scatter_s = [second - fmean(others) for _, others in firsts for second in others]
    deviation_s = math.sqrt(math.fsum(second**2 for second in scatter_s) / max(1, len(scatter_s) - len(firsts)))
    error_s = deviation_s * math.sqrt((1.0 + len(firsts) / len(scatter_s)) / len(firsts))
    extra_s = fmean(extras_s)
    return extra_s if extra_s > max(_LEAST_EXTRA * usual_s, 2.0 * error_s) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceStart:
    """Start of one instance."""

    provision_s: float
    """From the order until it ran."""
    init_s: float
    """From then until it was ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredNoise:
    """Components of the noise of training times, and their uncertainty."""

    num_trials: int
    """Different trials that were timed."""
    trial: NoiseComponent
    """Between trials: a trial keeps its speed."""
    iteration: NoiseComponent
    """Between the iterations of a trial."""
    startup: NoiseComponent | None
    """Between the starts of trials; None if they take no time."""
    mean_cv: float
    """Error that the seconds per iteration share, due to few trials."""
    seconds_per_iteration: Mapping[int, float]
    """GPUs -> mean over all trials that were timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceStarts:
    """Times of instances until trials could train on them."""

    instances: tuple[InstanceStart, ...]
    cold_s: tuple[float, ...]
    """Start-up times of trials that were the first on one of their workers."""
    cold_iteration_s: float = 0.0
    """How much longer their first iterations took than others."""
    one_machine: bool
    """Whether all instances share a machine, and slow each other's start."""

    def surplus_s(self, warm_s: float) -> float:
        """Return how much longer a first start takes than one on warm workers (of `warm_s`)."""
        return max(0.0, fmean(self.cold_s) - warm_s) if self.cold_s else 0.0


def noise_of(points: Sequence[Point]) -> MeasuredNoise:
    """Separate the lasting differences between trials from the noise of single iterations and starts."""
    cells = [cell_of(timed.trial, point.gpus, timed.iterations_s) for point in points for timed in point.timed]
    fitted = fit(cells)
    starts = [
        cell_of(0, point.gpus, [timed.startup_s + point.first_extra_s for timed in point.timed]) for point in points
    ]
    vary = fmean(cell.mean_s for cell in starts) >= _LEAST_START_S
    return MeasuredNoise(
        num_trials=len({cell.trial for cell in cells}),
        trial=fitted.trial,
        iteration=fitted.iteration,
        startup=fit(starts).iteration if vary else None,
        mean_cv=fitted.mean_error if fitted.mean_error >= _LEAST_CV else 0.0,
        seconds_per_iteration=fitted.seconds_per_iteration(cells),
    )


_LEAST_LOAD_S, _LEAST_LOAD = 1.0, 0.2
"""Starts that are shorter on more machines by less, or by a smaller share, show no loading."""


def startup_of(points: Sequence[Point], gpus_per_machine: int) -> tuple[float, float]:
    """Return the seconds of a start, and those beyond it that the machines of a gang share: a + b / machines.

    They are fitted by least squares to gangs of at least two numbers of machines; else, and where starts on more
    machines are hardly shorter, b is 0 and a the mean.
    """
    starts_s = [point.startup_s for point in points]
    shares = [1.0 / max(1, point.gpus // gpus_per_machine) for point in points]
    mean_s, mean_share = fmean(starts_s), fmean(shares)
    spread = sum((share - mean_share) ** 2 for share in shares)
    if not spread:
        return mean_s, 0.0
    pairs = zip(shares, starts_s, strict=True)
    load_s = sum((share - mean_share) * (start_s - mean_s) for share, start_s in pairs) / spread
    load_s = min(load_s, mean_s / mean_share)
    return (
        (mean_s, 0.0) if load_s < max(_LEAST_LOAD_S, _LEAST_LOAD * mean_s) else (mean_s - load_s * mean_share, load_s)
    )


def profile_of(
    points: Sequence[Point], starts: InstanceStarts, noise: MeasuredNoise, *, gpus_per_machine: int
) -> Profile:
    """Return the profile that planning needs.

    The surplus of the first starts belongs to the instances' init: a trial's start-up is one on warm workers.
    """
    startup_s, load_s = startup_of(points, gpus_per_machine)
    surplus_s = starts.surplus_s(fmean(point.startup_s for point in points))
    provisions_s = [round(instance.provision_s, 3) for instance in starts.instances]
    inits_s = [round(instance.init_s + surplus_s, 3) for instance in starts.instances]
    (provision_s, provision_spread), (init_s, init_spread) = measured(provisions_s), measured(inits_s)
    if starts.one_machine:
        # They start at once and slow each other: they are no independent samples. Training begins when the last one is
        # ready, and the others are paid for meanwhile.
        last_s = max(provision + init for provision, init in zip(provisions_s, inits_s, strict=True))
        init_s, provision_spread, init_spread = last_s - provision_s, FIXED, FIXED
    return Profile(
        seconds_per_iteration=noise.seconds_per_iteration,
        trial_startup_s=startup_s,
        checkpoint_load_s=load_s,
        first_iteration_extra_s=fmean(point.first_extra_s for point in points),
        trial_cv=_cv(noise.trial),
        iteration_cv=_cv(noise.iteration),
        startup_cv=_cv(noise.startup),
        mean_cv=noise.mean_cv,
        provision_delay_s=provision_s,
        provision_spread=provision_spread,
        init_delay_s=init_s,
        init_spread=init_spread,
        cold_start_extra_s=surplus_s,
        cold_iteration_extra_s=starts.cold_iteration_s,
        source="file",
    )


def _cv(component: NoiseComponent | None) -> float:
    return component.cv if component is not None and component.cv >= _LEAST_CV else 0.0
