"""What was measured while profiling, and the profile that it amounts to: means, and what they vary by. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from rubberband.chance import FIXED, measured
from rubberband.executor.batch_reports import BatchTime
from rubberband.executor.noise_fit import Component, cell_of, fit
from rubberband.profile import Profile

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
