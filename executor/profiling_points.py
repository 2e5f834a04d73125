"""What was measured while profiling, and the profile that it amounts to: means, and what they vary by. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, variance

from rubberband.executor.core.events import TrialReported
from rubberband.executor.noise_fit import Component, cell_of, fit
from rubberband.planner.goodput.fit import fit as fit_throughput
from rubberband.planner.goodput.fit import relative_errors
from rubberband.values.adaptive import BatchLimits, BatchPoint, BatchUse, GoodputProfile
from rubberband.values.chance import FIXED, measured
from rubberband.values.profile import Profile

# What trials tell of their batches while a profile is measured, and the model of goodput that it amounts to.
#
# It times nothing itself: the trials do. The model is that of `rubberband.planner.goodput`.


_FEWEST_STEPS = 2
"""A single step may be the first of its size, in which memory and kernels are set up."""
_LEAST_NOISE_SCALE = 1.0
"""Less than a sample is none: no larger batch is of any use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTime:
    """How long a step took with one batch size, on one number of GPUs."""

    batch_size: int
    step_s: float
    """Mean over the trials that tried it."""


class BatchReports:
    """The reports of trials of which some (or all) do not adapt their batch: those tell nothing."""

    def __init__(self) -> None:
        self._uses: list[BatchUse] = []
        self._overheads_s: list[float] = []
        self._noise_scales: dict[int, float] = {}
        self._limits: dict[int, BatchLimits] = {}
        self._samples: dict[int, int] = {}

    def add(self, report: TrialReported, *, is_timed: bool = True, iteration_s: float | None = None) -> None:
        """Take in a report; its times only if they count (`is_timed`).

        `iteration_s` is what the iteration took in all, if that tells what it takes beside its steps.
        """
        if report.limits is None or report.samples_per_iteration is None:
            return
        self._limits[report.trial], self._samples[report.trial] = report.limits, report.samples_per_iteration
        for use in report.batches:
            if use.noise_scale is not None:
                self._noise_scales[report.trial] = max(use.noise_scale, _LEAST_NOISE_SCALE)
        if is_timed:
            self._uses += report.batches
        if iteration_s is not None and report.batches:
            steps_s = sum(use.steps * use.step_s for use in report.batches)
            self._overheads_s.append(max(0.0, iteration_s - steps_s))

    @property
    def knows_noise_scale(self) -> bool:
        """Whether any trial told one."""
        return bool(self._noise_scales)

    def times(self, gpus: int) -> tuple[BatchTime, ...]:
        """What was timed on this number of GPUs, the smallest batch first."""
        sizes: dict[int, list[BatchUse]] = {}
        for use in self._timed():
            if use.gpus == gpus:
                sizes.setdefault(use.batch_size, []).append(use)
        return tuple(BatchTime(batch_size=size, step_s=_mean_step_s(uses)) for size, uses in sorted(sizes.items()))

    def points(self) -> tuple[BatchPoint, ...]:
        """Every configuration that was timed, once."""
        found: dict[BatchPoint, list[BatchUse]] = {}
        for use in self._timed():
            found.setdefault(replace(use.point(), step_s=0.0), []).append(use)
        return tuple(replace(point, step_s=_mean_step_s(uses)) for point, uses in found.items())

    def _timed(self) -> list[BatchUse]:
        return [use for use in self._uses if use.steps >= _FEWEST_STEPS] or self._uses

    def model(self) -> GoodputProfile | None:
        """The model of the trial in the middle; None where no trial adapts its batch.

        The noise scale is that of the middle trial as well; where none told one it is M0, which is cautious: twice the
        batch then makes 4/3 of the progress.
        """
        points = self.points()
        if not points:
            return None
        limits, fitted = self._middle_limits(), fit_throughput(points)
        return GoodputProfile(
            throughput=fitted,
            noise_scale=median(self._noise_scales.values()) if self._noise_scales else float(limits.initial),
            samples_per_iteration=float(median(self._samples.values())),
            limits=limits,
            overhead_s=fmean(self._overheads_s) if self._overheads_s else 0.0,
            points=points,
            fit_error=float(relative_errors(fitted, points).mean()),
        )

    def _middle_limits(self) -> BatchLimits:
        """Of the trial with the median M0; m as far as every trial has the memory for it."""
        every = sorted(self._limits.values(), key=lambda limits: (limits.initial, limits.max))
        per_gpu = [limits.max_per_gpu for limits in every if limits.max_per_gpu is not None]
        return replace(every[(len(every) - 1) // 2], max_per_gpu=min(per_gpu, default=None))


def _mean_step_s(uses: list[BatchUse]) -> float:
    return sum(use.steps * use.step_s for use in uses) / sum(use.steps for use in uses)


_LEAST_START_S = 0.01
"""What starts vary by is not told where they take less: it is the clock's noise."""
_LEAST_CV = 1e-4
"""Less is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One trial, trained with one number of GPUs."""

    trial: int
    instances: tuple[str, ...]
    """Where it trained."""
    startup_s: float
    """From the order to start on warm workers, from a checkpoint, until the first step."""
    iterations_s: tuple[float, ...]
    """Seconds of each iteration that counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What was measured with one number of GPUs per trial."""

    gpus: int
    copies: int
    """Trials that trained side by side, at most."""
    timed: tuple[Timed, ...]
    """Every trial that was timed."""
    batches: tuple[BatchTime, ...] = ()
    """Where trials may adapt their batch: how long steps take with the sizes that they tried."""

    @property
    def iteration_s(self) -> float:
        """Mean seconds per iteration."""
        return fmean(second for trial in self.timed for second in trial.iterations_s)

    @property
    def iteration_cv(self) -> float:
        """Coefficient of variation of a single iteration within one trial."""
        within = fmean(variance(t.iterations_s) if len(t.iterations_s) > 1 else 0.0 for t in self.timed)
        return math.sqrt(within) / self.iteration_s

    @property
    def startup_s(self) -> float:
        """Mean start-up."""
        return fmean(trial.startup_s for trial in self.timed)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceStart:
    """How long one instance took."""

    provision_s: float
    """From the order until it ran."""
    init_s: float
    """From then until it was ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """The components of what training times vary by, and how sure they are."""

    num_trials: int
    """So many different trials were timed."""
    trial: Component
    """Between trials: a trial keeps its speed."""
    iteration: Component
    """Between the iterations of a trial."""
    startup: Component | None
    """Between the starts of trials; None where they take no time."""
    mean_cv: float
    """How unsure the seconds per iteration are, with so few trials: an error that they share."""
    seconds_per_iteration: Mapping[int, float]
    """GPUs -> mean over all trials that were timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Starts:
    """How long instances took until trials could train on them."""

    instances: tuple[InstanceStart, ...]
    cold_s: tuple[float, ...]
    """Starts of trials that were the first on one of their workers."""
    one_machine: bool
    """Whether all instances share a machine: they then start at one another's cost."""

    def surplus_s(self, warm_s: float) -> float:
        """Return how much longer a first start takes than one on warm workers (of `warm_s`)."""
        return max(0.0, fmean(self.cold_s) - warm_s) if self.cold_s else 0.0


def noise_of(points: Sequence[Point]) -> Noise:
    """Tell apart what trials differ by, all along, from what is drawn anew."""
    cells = [cell_of(timed.trial, point.gpus, timed.iterations_s) for point in points for timed in point.timed]
    found = fit(cells)
    starts = [cell_of(0, point.gpus, [timed.startup_s for timed in point.timed]) for point in points]
    vary = fmean(cell.mean_s for cell in starts) >= _LEAST_START_S
    return Noise(
        num_trials=len({cell.trial for cell in cells}),
        trial=found.trial,
        iteration=found.iteration,
        startup=fit(starts).iteration if vary else None,
        mean_cv=found.mean_error if found.mean_error >= _LEAST_CV else 0.0,
        seconds_per_iteration=found.seconds_per_iteration(cells),
    )


def profile_of(points: Sequence[Point], starts: Starts, noise: Noise) -> Profile:
    """Return the profile that planning needs.

    The surplus of the first starts belongs to the instances' init: a trial's start-up is one on warm workers.
    """
    startup_s = fmean(point.startup_s for point in points)
    surplus_s = starts.surplus_s(startup_s)
    provisions_s = [round(instance.provision_s, 3) for instance in starts.instances]
    inits_s = [round(instance.init_s + surplus_s, 3) for instance in starts.instances]
    (provision_s, provision_spread), (init_s, init_spread) = measured(provisions_s), measured(inits_s)
    if starts.one_machine:
        # They are asked for at once and start at one another's cost: they are no independent samples. Training begins
        # when the last one is ready, and the others are paid for meanwhile.
        last_s = max(provision + init for provision, init in zip(provisions_s, inits_s, strict=True))
        init_s, provision_spread, init_spread = last_s - provision_s, FIXED, FIXED
    return Profile(
        seconds_per_iteration=noise.seconds_per_iteration,
        trial_startup_s=startup_s,
        trial_cv=_cv(noise.trial),
        iteration_cv=_cv(noise.iteration),
        startup_cv=_cv(noise.startup),
        mean_cv=noise.mean_cv,
        provision_delay_s=provision_s,
        provision_spread=provision_spread,
        init_delay_s=init_s,
        init_spread=init_spread,
        source="file",
    )


def _cv(component: Component | None) -> float:
    return component.cv if component is not None and component.cv >= _LEAST_CV else 0.0
