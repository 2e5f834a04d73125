"""Planning with goodput: the time of an iteration on a gang that adapts its batch size, and on one that does not.

An iteration is a number of samples at the initial batch size, where each counts in full. Divided by the goodput of a
gang (useful samples per second), it gives the time that the gang needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from rubberband.planner.goodput import GoodputChoice, choose_many
from rubberband.planner.goodput.fit import extrapolates
from rubberband.values.adaptive import AdaptiveBatch, BatchLimits, GoodputProfile, Throughput
from rubberband.values.profile import Profile


def seconds_per_iteration(
    profile: GoodputProfile, gpus_per_instance: int, gang_sizes: Sequence[int]
) -> dict[int, float]:
    """e(g) = work / max over (m, s) of GOODPUT(g, m, s), plus the iteration's overhead; in seconds.

    A gang takes as few instances as hold it. A gang larger than the largest batch leaves GPUs idle.
    """
    goodput_of = goodputs(profile, gpus_per_instance, gang_sizes)
    return {gpus: profile.samples_per_iteration / goodput + profile.overhead_s for gpus, goodput in goodput_of.items()}


def goodputs(profile: GoodputProfile, gpus_per_instance: int, gang_sizes: Sequence[int]) -> dict[int, float]:
    """max over (m, s) of GOODPUT(g, m, s) of every gang size: useful samples per second."""
    return {gpus: choice.goodput for gpus, choice in _choices(profile, gpus_per_instance, gang_sizes).items()}


def fixed_seconds_per_iteration(
    profile: GoodputProfile, gpus_per_instance: int, gang_sizes: Sequence[int]
) -> dict[int, float]:
    """`seconds_per_iteration` where the batch stays the initial one."""
    limits = profile.limits
    fixed = replace(profile, limits=replace(limits, max=limits.initial))
    return seconds_per_iteration(fixed, gpus_per_instance, gang_sizes)


def extrapolated(profile: GoodputProfile, gpus_per_instance: int, gang_sizes: Sequence[int]) -> list[int]:
    """Return the gang sizes whose time the model extrapolates beyond its points; none if it was written by hand."""
    if not profile.points:
        return []
    return [
        gpus
        for gpus, choice in _choices(profile, gpus_per_instance, gang_sizes).items()
        if extrapolates(profile.points, -(-gpus // gpus_per_instance), gpus, choice.per_gpu)
    ]


def cautious(profile: GoodputProfile) -> Throughput:
    """Return the parameters to plan with: if unmeasured, synchronising across instances costs as much as within one.

    §4.1's prior takes it to be free, so that a scheduler explores it. A plan that costs money must not rest on that.
    """
    parameters = profile.throughput
    if not profile.points or any(point.instances > 1 for point in profile.points):
        return parameters
    return replace(
        parameters,
        alpha_node_s=max(parameters.alpha_node_s, parameters.alpha_local_s),
        beta_node_s=max(parameters.beta_node_s, parameters.beta_local_s),
    )


def _choices(profile: GoodputProfile, gpus_per_instance: int, gang_sizes: Sequence[int]) -> dict[int, GoodputChoice]:
    gpus = np.asarray(gang_sizes, dtype=np.int64)
    instances = -(-gpus // gpus_per_instance)
    choices = choose_many(cautious(profile), profile.noise_scale, profile.limits, instances, gpus, least_per_gpu=0)
    return dict(zip(gang_sizes, choices, strict=True))


# When more GPUs are worth it, and how many (Pollux §5.4.1, cloud auto-scaling).
#
# The measure is GOODPUT(a) / K over GOODPUT(1 GPU), each at its best (m, s): 1 if a gang scales perfectly. It grows
# with phi in the course of training. Prices play no part.


UPPER = 2.0 / 3.0
"""U: a gang above it is scaled up."""
LOWER = 1.0 / 2.0
"""L: to the size where about this much is left."""


def scaling_efficiencies(
    profile: GoodputProfile, gpus_per_instance: int, gang_sizes: Sequence[int]
) -> dict[int, float]:
    """Return the goodput per GPU of every gang size, relative to a single GPU."""
    goodput_of = goodputs(profile, gpus_per_instance, [1, *gang_sizes])
    single = goodput_of[1]
    return {gpus: goodput_of[gpus] / gpus / single for gpus in gang_sizes}


def should_scale(profile: GoodputProfile, gpus_per_instance: int, gpus: int) -> bool:
    """Return whether a gang of `gpus` scales so well that it should grow: goodput per GPU above U of the ideal."""
    return scaling_efficiencies(profile, gpus_per_instance, [gpus])[gpus] > UPPER


def scaled_size(profile: GoodputProfile, gpus_per_instance: int, gang_sizes: Sequence[int], gpus: int) -> int:
    """Return the size that a gang of `gpus` should have: if it should grow, the largest with at least L of the ideal.

    Never smaller than `gpus`: only the planner shrinks gangs.
    """
    if not should_scale(profile, gpus_per_instance, gpus):
        return gpus
    share = scaling_efficiencies(profile, gpus_per_instance, gang_sizes)
    return max([gpus, *(size for size in gang_sizes if share[size] >= LOWER)])


# Profiles of trials that adapt their batch size: for the planner a table like any other, computed by the model.


def limits_within(model: GoodputProfile, asked: AdaptiveBatch) -> BatchLimits:
    """Return the limits of the model's trials if they run as `asked`.

    A measured model knows the largest batch that the training set and the user allow; plans use no larger one.
    """
    known = model.limits
    initial = asked.initial or known.initial
    largest = asked.max or known.max
    if model.points:
        largest = min(largest, known.max)
    return BatchLimits(
        initial=initial,
        max=max(largest, initial),
        max_per_gpu=asked.max_per_gpu or known.max_per_gpu,
        accumulation=asked.accumulation,
    )


def adapted(profile: Profile, gpus_per_instance: int, gang_sizes: Sequence[int]) -> Profile:
    """Return the profile with the times of trials that adapt their batch, for these gang sizes. It must have a model.

    Only the model's ratio of adaptive to fixed batch is used; the time of the fixed batch is the measured one. So a
    model that is too fast throughout promises nothing. Beyond the measured sizes its usual error is assumed.
    """
    assert profile.goodput is not None, "only a profile with a model can plan for adaptive trials"
    sizes = sorted({*gang_sizes, *profile.seconds_per_iteration})
    by_model_s = seconds_per_iteration(profile.goodput, gpus_per_instance, sizes)
    fixed_s = fixed_seconds_per_iteration(profile.goodput, gpus_per_instance, sizes)
    off = {gpus: profile.iteration_s(gpus) / fixed_s[gpus] for gpus in sizes if profile.covers(gpus)}
    usual = median(off.values())
    table = {gpus: by_model_s[gpus] * off.get(gpus, usual) for gpus in gang_sizes}
    return replace(profile, seconds_per_iteration=table)


def at_noise_scale(profile: Profile, gpus_per_instance: int, noise_scale: float) -> Profile:
    """Return a profile made by `adapted` at another phi: every time changes by the ratio of the model's times."""
    assert profile.goodput is not None, "adapted profiles have one"
    now, then = profile.goodput, replace(profile.goodput, noise_scale=noise_scale)
    sizes = sorted(profile.seconds_per_iteration)
    before_s, after_s = (seconds_per_iteration(model, gpus_per_instance, sizes) for model in (now, then))
    table = {gpus: profile.seconds_per_iteration[gpus] * after_s[gpus] / before_s[gpus] for gpus in sizes}
    return replace(profile, seconds_per_iteration=table, goodput=then)
