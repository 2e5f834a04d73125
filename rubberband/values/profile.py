"""The profile: how fast one trial trains on a given number of GPUs, and how long things take to start.

Measured by `rubberband profile`, or written inline in the experiment file. It knows nothing of plans or prices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Literal

from rubberband.errors import InputError
from rubberband.units import counted
from rubberband.values.adaptive import GoodputProfile
from rubberband.values.asynchronous import AsyncProfile

Law = Literal["lognormal", "normal"]
"""Law of the time of an iteration: lognormal, or (for the paper's Figure 9) normal and cut off at zero."""

_NORMAL_P95 = 1.6448536269514722


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A factor with mean 1: fixed, lognormal with a coefficient of variation, or measured values."""

    cv: float = 0.0
    """Coefficient of variation of the lognormal law; 0 where there are `samples`."""
    samples: tuple[float, ...] = ()
    """Measured values over their mean, each as likely as the others."""

    @property
    def certain(self) -> bool:
        """Whether nothing varies."""
        return self.cv == 0.0 and len(set(self.samples)) <= 1

    @property
    def p95(self) -> float:
        """The 95th percentile; of measured values the least that covers 95 % of them."""
        if self.samples:
            return sorted(self.samples)[math.ceil(0.95 * len(self.samples)) - 1]
        sigma = math.sqrt(math.log1p(self.cv**2))
        return math.exp(_NORMAL_P95 * sigma - sigma**2 / 2.0)


FIXED = Spread()


def measured(values_s: Sequence[float]) -> tuple[float, Spread]:
    """Return the mean of measured values and their spread; there is at least one, and none is negative."""
    mean_s = math.fsum(values_s) / len(values_s)
    if mean_s == 0.0 or len(values_s) == 1:
        return mean_s, FIXED
    return mean_s, Spread(samples=tuple(value_s / mean_s for value_s in values_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Scaling function and start-up times of an experiment's trials (RubberBand §4.1, §5)."""

    seconds_per_iteration: Mapping[int, float]
    """GPUs -> mean seconds per iteration with that many GPUs; at least one entry, counts and times positive."""
    trial_startup_s: float = 0.0
    """Seconds to gang-start a trial in a stage on warm workers: process group, model, checkpoint."""
    checkpoint_load_s: float = 0.0
    """Seconds of a start beyond `trial_startup_s` for one machine to load the checkpoint; those of a gang share it."""
    gpus_per_machine: int = 0
    """Slots of the instances that it is planned for; 0: a gang is on one machine. Counts with `checkpoint_load_s`."""
    first_iteration_extra_s: float = 0.0
    """The part of `trial_startup_s` that passes within the first iteration, after the start is reported.

    A function loads its data and makes its model there.
    """
    cold_iteration_extra_s: float = 0.0
    """The same on a fresh worker, which also imports modules there; 0 where that is no more."""
    resumes: bool = True
    """Whether a trial goes on from its checkpoint; else each of its starts trains all iterations before it again."""
    trial_cv: float = 0.0
    """Coefficient of variation between trials: a trial's speed is its own, the same in every stage."""
    iteration_cv: float = 0.0
    """Coefficient of variation of a single iteration's time, drawn anew for each."""
    startup_cv: float = 0.0
    """Coefficient of variation of a trial's start-up (lognormal), drawn anew in every stage."""
    mean_cv: float = 0.0
    """Coefficient of variation of the table's own error (lognormal), which all trials of a run share.

    It is large if few trials were measured.
    """
    law: Law = "lognormal"
    """The law of the noise of trials and iterations."""
    end_chance: float = 0.0
    """Probability with which a trial ends by itself after an iteration, as far as it is known before the run."""
    provision_delay_s: float | None = None
    """Seconds from asking for an instance until it runs, where it is known; the mean."""
    provision_spread: Spread = FIXED
    init_delay_s: float | None = None
    """Seconds from a running instance until its workers are warm, where it is known; the mean.

    A measured one includes the time of a first start on a fresh worker beyond `trial_startup_s`.
    """
    init_spread: Spread = FIXED
    cold_start_extra_s: float = 0.0
    """The part of a measured `init_delay_s` that a first start on a fresh worker takes beyond `trial_startup_s`."""
    source: Literal["inline", "file"] = "inline"
    goodput: GoodputProfile | None = None
    """The model of adaptive batches, from which a plan's `seconds_per_iteration` is made; None for fixed ones."""
    asynchronous: AsyncProfile | None = None
    """The model of asynchronous training; None where workers train synchronously."""

    def __post_init__(self) -> None:
        assert self.seconds_per_iteration, "the edge refuses an empty profile"

    def __hash__(self) -> int:
        """Return the same number for equal profiles, so that caches find them."""
        return hash((frozenset(self.seconds_per_iteration.items()), self.trial_startup_s, self.trial_cv))

    @property
    def smallest_gpus(self) -> int:
        """The smallest measured number of GPUs."""
        return min(self.seconds_per_iteration)

    @property
    def largest_gpus(self) -> int:
        """The largest measured number of GPUs; beyond it the time is taken to be flat."""
        return max(self.seconds_per_iteration)

    @property
    def varies(self) -> bool:
        """Whether the times of trials are noisy."""
        return self.trial_cv > 0.0 or self.iteration_cv > 0.0 or self.mean_cv > 0.0 or self.startup_varies

    @property
    def startup_varies(self) -> bool:
        """Whether the start-ups of trials are noisy."""
        return self.startup_cv > 0.0 and self.startup_s(1) > 0.0

    def startup_s(self, gpus: int) -> float:
        """Return the mean seconds to start a trial on `gpus` GPUs of warm workers."""
        return self.trial_startup_s + self.load_s(gpus)

    def load_s(self, gpus: int) -> float:
        """Return the part of it in which the machines of the gang load the checkpoint, each its share."""
        machines = gpus // self.gpus_per_machine if self.gpus_per_machine else 1
        return self.checkpoint_load_s / max(1, machines)

    def stage_cv(self, iterations: int) -> float:
        """Return the coefficient of variation of a trial's training time in one stage, on its own.

        It is sqrt(mean_cv^2 + trial_cv^2 + iteration_cv^2 / w) for w iterations. Between stages only
        iteration_cv^2 / w is drawn anew.
        """
        return math.hypot(self.mean_cv, self.trial_cv, self.iteration_cv / math.sqrt(iterations))

    def covers(self, gpus: int) -> bool:
        """Return whether `gpus` lies within the measured range."""
        return self.smallest_gpus <= gpus <= self.largest_gpus

    def iteration_s(self, gpus: int) -> float:
        """Return e(g), the seconds per iteration with `gpus` GPUs.

        Linear in throughput (1/e) between measured counts, flat beyond the largest one.

        Raises InputError below the smallest measured count, where a trial may not even fit.
        """
        table = self.seconds_per_iteration
        if gpus in table:
            return table[gpus]
        if gpus > self.largest_gpus:
            return table[self.largest_gpus]
        if gpus < self.smallest_gpus:
            raise InputError(
                f"the profile starts at {self.smallest_gpus} GPUs and says nothing of {gpus}; measure it, or start "
                f"resources.gpus_per_trial at {self.smallest_gpus}"
            )
        below = max(count for count in table if count < gpus)
        above = min(count for count in table if count > gpus)
        share = (gpus - below) / (above - below)
        return 1.0 / ((1.0 - share) / table[below] + share / table[above])

    def notes(self) -> list[str]:
        """Return a remark on every gap in the table, and on every time that rises with more GPUs.

        A gap is a measured count of more than twice the one before.
        """
        remarks = []
        for (below, less_s), (above, more_s) in itertools.pairwise(sorted(self.seconds_per_iteration.items())):
            if above > 2 * below:
                remarks.append(
                    f"profile: nothing is measured between {below} and {above} GPUs; times there are interpolated "
                    "(linear in throughput), measure some of them to know"
                )
            if more_s > less_s:
                remarks.append(
                    f"profile: an iteration is slower with {counted(above, 'GPU')} ({more_s:g} s) than with {below} "
                    f"({less_s:g} s); planned as it is, measure again if that is a surprise"
                )
        return remarks


def until_end(iterations: int, end_chance: float) -> float:
    """Return the iterations of `iterations` that a trial trains on average, if it may end by itself after each."""
    return iterations if end_chance == 0.0 else -math.expm1(iterations * math.log1p(-end_chance)) / end_chance


WIDE_CV = 0.1
"""Iterations of a trial that vary by more make a profile unsure."""


def wide_spread(spreads: Mapping[int, float]) -> str:
    """Return the remark on iterations that vary widely (GPUs -> coefficient of variation); empty where none do."""
    gpus = max(spreads, key=lambda number: spreads[number], default=0)
    if not spreads or spreads[gpus] <= WIDE_CV:
        return ""
    return (
        f"the iterations of a trial on {counted(gpus, 'GPU')} varied by {spreads[gpus]:.0%} while they were "
        "measured, so times and costs are unsure; was the machine busy?"
    )


def mixed_factor(speeds: Sequence[float], *, balanced: bool) -> float:
    """Return how many times longer a step takes on GPUs of these speeds than on as many of speed 1.

    A balanced gang divides its batch by speed, so that the speeds of its GPUs add up (LB-BSP, SoCC '20, eq. 3 with t_i
    = x_i / v_i). With equal shares a step is as slow as the slowest GPU.
    """
    return len(speeds) / math.fsum(speeds) if balanced else 1.0 / min(speeds)


def relative_speed(profile: Profile, planned: Profile) -> float:
    """Return the speed of a GPU with this profile over one with the planned profile, at the GPU counts of both.

    The mean of several counts is the geometric one. Without a common count, the smallest of each are compared, by GPU.
    Workers that train asynchronously are compared by the updates that one of them makes alone.
    """
    if profile.asynchronous is not None and planned.asynchronous is not None:
        return planned.asynchronous.times.update_s / profile.asynchronous.times.update_s
    times, planned_times = profile.seconds_per_iteration, planned.seconds_per_iteration
    common = sorted(times.keys() & planned_times.keys())
    if common:
        return geometric_mean([planned_times[gpus] / times[gpus] for gpus in common])
    least, planned_least = profile.smallest_gpus, planned.smallest_gpus
    return (planned_times[planned_least] * planned_least) / (times[least] * least)


def adding_up_words(profile: Profile) -> str:
    """Return how fast a gang of unequal GPUs is that does not wait for its slowest, in words."""
    return "speeds add up" if profile.asynchronous is None else "each worker updates at its own speed"


def mixture_words(counts: Mapping[str, int], speeds: Mapping[str, float], planned: str) -> str:
    """Return what is assumed of instances of other types: `1 of 4 is g5.xlarge, 0.5x as fast`; empty without one."""
    total = sum(counts.values())
    others = [name for name in counts if name != planned and speeds.get(name, 1.0) != 1.0]
    shares = [
        f"{counts[name]} of {counted(total, 'instance')} {'is' if counts[name] == 1 else 'are'} {name}"
        for name in others
    ]
    paces = [f"{speeds[name]:.2g}x as fast by the profile" for name in others]
    return "; ".join(f"{what}, {pace}" for what, pace in zip(shares, paces, strict=True))
