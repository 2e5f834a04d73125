"""What trials tell of their batches while a profile is measured, and the model of goodput that it amounts to.

It times nothing itself: the trials do. The model is that of `rubberband.planner.goodput`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean, median

from rubberband.adaptive import BatchLimits, BatchPoint, BatchUse, GoodputProfile
from rubberband.executor.events import TrialReported
from rubberband.planner.goodput.fit import fit as fit_throughput
from rubberband.planner.goodput.fit import relative_errors

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
