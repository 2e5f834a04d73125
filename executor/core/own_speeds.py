"""The speed of each trial by itself, as far as its iterations show it: a random-effects estimate. Pure.

The logarithm of a trial's seconds per iteration (over the expected ones of its gang) is that of all trials, plus its
own deviation, plus chance. Its own deviation is shrunk by what chance would explain (the best linear unbiased
prediction). How much trials differ, and iterations of one trial, is as profiled, or as the run shows.

Runs of 767 random jobs on the virtual clock, whose trials differ by 0 to 60 %, are late in 6 % with it, 17 % without.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

FEWEST_TRIALS = 4
"""Fewer do not show how much trials differ, nor whether the better ones are slower."""
LEAST_CV = 0.01
"""Trials that differ by less count as equally fast."""
_PRIOR_TRIALS = 10
"""Weight of the profile, in trials."""
_FAR = 3.0
"""Standard deviations at which deviations are cut off, so that a few broken iterations count little."""
_SHOWN = 2.0
"""Standard errors from which on a run shows that something is not as was thought."""
_LARGEST_CORRELATION = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSpeed:
    """How fast one trial is."""

    factor: float
    """Its seconds per iteration over the corrected profile's: the expected value."""
    error: float
    """Coefficient of variation of what is not known of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSpeeds:
    """How fast the trials of a run are, each for itself."""

    trial_cv: float
    """How much trials differ; 0 if they do not."""
    iteration_cv: float
    of: Mapping[int, OwnSpeed]
    """By trial; empty if all are equally fast."""


def own_speeds(ratios: Mapping[int, Sequence[float]], trial_cv: float, iteration_cv: float) -> OwnSpeeds:
    """Estimate each trial's speed from what its iterations took over what was expected of them, one ratio for each.

    `trial_cv` and `iteration_cv` are what was profiled.
    """
    means = {trial: fmean(taken) for trial, taken in ratios.items() if taken and fmean(taken) > 0.0}
    logs = {trial: math.log(mean) for trial, mean in means.items()}
    if not logs:
        return OwnSpeeds(trial_cv=trial_cv, iteration_cv=iteration_cv, of={})
    within = _iteration_variance(ratios, means, math.log1p(iteration_cv**2))
    between, within = _trial_variance(logs, ratios, math.log1p(trial_cv**2), within)
    found_cv, found_iteration_cv = _cv(between, trial_cv), _cv(within, iteration_cv)
    if found_cv < LEAST_CV:
        return OwnSpeeds(trial_cv=found_cv, iteration_cv=found_iteration_cv, of={})
    errors = {trial: within / len(ratios[trial]) for trial in logs}
    middle, middle_error = _middle(logs, errors, between)
    of = {trial: _shrunk(logs[trial], errors[trial], middle, between, middle_error) for trial in logs}
    return OwnSpeeds(trial_cv=found_cv, iteration_cv=found_iteration_cv, of=of)


def updated(known: OwnSpeed, ratio: float, iterations: int, iteration_cv: float) -> OwnSpeed:
    """Return what is known of a trial after some more iterations, which took `ratio` times what was expected."""
    between = math.log1p(known.error**2)
    if between == 0.0 or ratio <= 0.0:
        return known
    error = math.log1p(iteration_cv**2) / iterations
    return _shrunk(math.log(ratio), error, math.log(known.factor) - between / 2.0, between, 0.0)


def _shrunk(seen: float, error: float, middle: float, between: float, middle_error: float) -> OwnSpeed:
    weight = between / (between + error)
    variance = between * (1.0 - weight) + (1.0 - weight) ** 2 * middle_error
    mean = middle + weight * (seen - middle)
    return OwnSpeed(factor=math.exp(mean + variance / 2.0), error=math.sqrt(math.expm1(variance)))


def _cv(variance: float, profiled: float) -> float:
    """The coefficient of variation; the one that was profiled, where it is the same."""
    found = math.sqrt(math.expm1(variance))
    return profiled if math.isclose(found, profiled, rel_tol=1e-6, abs_tol=LEAST_CV) else found


def _middle(logs: Mapping[int, float], errors: Mapping[int, float], between: float) -> tuple[float, float]:
    """The logarithm about which trials lie, and its variance; as far as they show another one than is expected."""
    weights = {trial: 1.0 / (between + errors[trial]) for trial in logs}
    variance = 1.0 / sum(weights.values())
    expected = -between / 2.0
    deviation = variance * sum(weights[trial] * (logs[trial] - expected) for trial in logs)
    shrunk = deviation * max(0.0, 1.0 - variance / deviation**2) if deviation else 0.0
    return expected + shrunk, variance


def _iteration_variance(ratios: Mapping[int, Sequence[float]], means: Mapping[int, float], profiled: float) -> float:
    """Return the variance of the logarithm of one iteration's time, within trials."""
    deviations = [
        math.sqrt(len(taken) / (len(taken) - 1)) * (ratio / means[trial] - 1.0)
        for trial, taken in ratios.items()
        if trial in means and len(taken) > 1
        for ratio in taken
    ]
    freedom = sum(len(taken) - 1 for taken in ratios.values() if len(taken) > 1)
    return _settled(profiled, math.log1p(_mean_square(deviations)), freedom)


def _trial_variance(
    logs: Mapping[int, float], ratios: Mapping[int, Sequence[float]], profiled: float, within: float
) -> tuple[float, float]:
    """Between trials, and within them: where each had one iteration only and nothing is known, half of all is either's.

    That of the means of trials is both at once: that of trials, and what chance leaves of that of iterations.
    """
    if len(logs) < FEWEST_TRIALS:
        return profiled, within
    middle = median(logs.values())
    seen = _mean_square([log - middle for log in logs.values()]) * len(logs) / (len(logs) - 1)
    if profiled == within == 0.0 and all(len(ratios[trial]) == 1 for trial in logs):
        return seen / 2.0, seen / 2.0
    chance, freedom = fmean(within / len(ratios[trial]) for trial in logs), len(logs) - 1
    found = _settled(profiled + chance, seen, freedom)
    return max(profiled * _PRIOR_TRIALS / (_PRIOR_TRIALS + freedom), found - chance), within


def _settled(profiled: float, seen: float, freedom: int) -> float:
    """Return the variance to go on with: as profiled, unless `freedom` degrees of freedom show another one."""
    if freedom < FEWEST_TRIALS - 1 or profiled == seen:
        return profiled
    if profiled == 0.0:
        return seen
    if seen > 0.0 and abs(math.log(seen / profiled)) <= _SHOWN * math.sqrt(2.0 / freedom):
        return profiled
    return (_PRIOR_TRIALS * profiled + freedom * seen) / (_PRIOR_TRIALS + freedom)


def _mean_square(deviations: Sequence[float]) -> float:
    """Return the mean square of deviations; those that are far out are cut off."""
    if not deviations:
        return 0.0
    typical = 1.4826 * median(map(abs, deviations))
    return fmean(min(abs(deviation), _FAR * typical) ** 2 for deviation in deviations)


def with_metric(rankings: Iterable[Sequence[float]]) -> float:
    """Return the correlation of being slow with being good, from how slow the trials of each stage were, best first.

    It is that of two normal quantities with the rank correlation that was seen, shrunk by what chance would explain:
    to 0 where few trials do not show it.
    """
    freedom = weighed = 0.0
    for slowness in rankings:
        if len(slowness) > FEWEST_TRIALS and len(set(slowness)) > 1:
            correlation = max(-_LARGEST_CORRELATION, min(_LARGEST_CORRELATION, _rank_correlation(slowness)))
            freedom += len(slowness) - 3
            weighed += (len(slowness) - 3) * math.atanh(correlation)
    if freedom == 0.0:
        return 0.0
    seen, error = weighed / freedom, 1.0 / math.sqrt(freedom)
    if abs(seen) <= _SHOWN * error:
        return 0.0
    return 2.0 * math.sin(math.pi / 6.0 * math.tanh(seen * (1.0 - (error / seen) ** 2)))


def _rank_correlation(slowness: Sequence[float]) -> float:
    """Spearman's, of values with their places from last to first; equal values share their ranks."""
    ordered = sorted(slowness)
    first, count = dict[float, int](), dict[float, int]()
    for rank, value in enumerate(ordered):
        first.setdefault(value, rank)
        count[value] = count.get(value, 0) + 1
    middle = (len(ordered) - 1) / 2.0
    ranks = [first[value] + (count[value] - 1) / 2.0 - middle for value in slowness]
    goods = [middle - place for place in range(len(ordered))]
    size = math.sqrt(sum(rank * rank for rank in ranks) * sum(good * good for good in goods))
    return sum(rank * good for rank, good in zip(ranks, goods, strict=True)) / size
