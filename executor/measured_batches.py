"""What the batches of a run tell of its noise scale, and how long iterations should take by that. Pure.

The noise scale grows as training goes on and differs between trials; how fast steps are is another matter. A run that
is planned again needs both apart: e(g) follows the noise scale of the trials that are left, and the speed that was
seen, once the noise scale is taken out of it, stays what it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median

from rubberband.executor import rules
from rubberband.executor.state import Job, Report, State, TrialState, TrialStatus
from rubberband.planner.adapting import at_noise_scale
from rubberband.profile import Profile

_STEP = 0.02
"""Noise scales that differ by less count as one, so that a run of a thousand trials is reckoned with quickly."""
_LEAST = 1e-6
SETTLED = 1.5
"""A batch that changes by more within an iteration is still being found."""
WITHIN_NOISE_SCALE = 0.2
"""A smaller deviation of the noise scale is left alone: it is not known any better."""


class Expected:
    """Seconds per iteration that a profile leads one to expect, at the noise scale that a trial had."""

    def __init__(self, profile: Profile, gpus_per_instance: int) -> None:
        self._profile = profile
        self._gpus_per_instance = gpus_per_instance
        self._known: dict[int, Profile] = {}

    def mean_s(self, gpus: int, noise_scales: Sequence[float | None]) -> float:
        """Of iterations of a gang of `gpus`, at these noise scales; where one is not known, as the profile has it."""
        if self._profile.goodput is None:
            return self._profile.iteration_s(gpus)
        return fmean(self.profile(noise_scale).iteration_s(gpus) for noise_scale in noise_scales)

    def profile(self, noise_scale: float | None) -> Profile:
        """The profile at a noise scale; as it is where the batch is fixed."""
        if noise_scale is None or self._profile.goodput is None:
            return self._profile
        step = round(math.log(max(noise_scale, _LEAST)) / _STEP)
        if step not in self._known:
            self._known[step] = at_noise_scale(self._profile, self._gpus_per_instance, math.exp(step * _STEP))
        return self._known[step]


def noise_scale_of(report: Report) -> float | None:
    """What a trial knew of its noise scale at the end of an iteration."""
    known = [use.noise_scale for use in report.batches if use.noise_scale is not None]
    return known[-1] if known else None


def is_settled(report: Report) -> bool:
    """Whether an iteration tells how fast adaptive steps are: not while the batch, or phi, is still being found."""
    sizes = [use.batch_size for use in report.batches]
    return not sizes or (noise_scale_of(report) is not None and max(sizes) <= SETTLED * min(sizes))


def present_noise_scale(job: Job, state: State) -> float | None:
    """The median of the trials that go on; None where the profile has no model, none is known, or it is as expected."""
    if job.profile.goodput is None:
        return None
    latest = [found for trial in _left(job, state) if (found := _latest(trial)) is not None]
    if not latest or abs(median(latest) / job.profile.goodput.noise_scale - 1.0) <= WITHIN_NOISE_SCALE:
        return None
    return median(latest)


def _left(job: Job, state: State) -> list[TrialState]:
    if state.stages and state.stages[-1].ranking:
        return [state.trials[trial] for trial in rules.promoted(job, state.stages[-1])]
    return [trial for trial in state.trials if trial.status is not TrialStatus.FAILED]


def _latest(trial: TrialState) -> float | None:
    known = (noise_scale_of(report) for report in reversed(trial.reports))
    return next((found for found in known if found is not None), None)


def noise_finding(profile: Profile, now: float | None) -> str:
    """That the noise scale is another one than the profile has, in words; empty if it is not."""
    if now is None or profile.goodput is None:
        return ""
    before = profile.goodput.noise_scale
    went, pays = ("rose", "more") if now > before else ("fell", "less")
    return f"the noise scale {went} from {before:,.0f} to {now:,.0f}: larger gangs pay off {pays}"
