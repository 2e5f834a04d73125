"""Planning with goodput: how long an iteration takes on a gang that chooses its batch size, and on one that may not.

An iteration is a number of samples at the initial batch size, where each counts in full; divided by the goodput of a
gang (useful samples per second) it is the time that the gang needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from rubberband.planner.goodput.choice import GoodputChoices, choose_many
from rubberband.planner.goodput.fit import extrapolates
from rubberband.values.adaptive import AdaptiveBatch, BatchLimits, GoodputProfile, Throughput
from rubberband.values.profile import Profile


def seconds_per_iteration(
    profile: GoodputProfile, gpus_per_instance: int, gang_sizes: Sequence[int]
) -> dict[int, float]:
    """e(g) = work / max over (m, s) of GOODPUT(g, m, s), plus what an iteration needs beside its steps; in seconds.

    A gang takes as few instances as hold it. One that is larger than the largest batch leaves GPUs idle.
    """
    found = goodputs(profile, gpus_per_instance, gang_sizes)
    return {gpus: profile.samples_per_iteration / goodput + profile.overhead_s for gpus, goodput in found.items()}


def goodputs(profile: GoodputProfile, gpus_per_instance: int, gang_sizes: Sequence[int]) -> dict[int, float]:
    """max over (m, s) of GOODPUT(g, m, s) of every gang size: useful samples per second."""
    return dict(zip(gang_sizes, _choices(profile, gpus_per_instance, gang_sizes).goodput.tolist(), strict=True))


def fixed_seconds_per_iteration(
    profile: GoodputProfile, gpus_per_instance: int, gang_sizes: Sequence[int]
) -> dict[int, float]:
    """The same where the batch stays the initial one."""
    limits = profile.limits
    fixed = replace(profile, limits=replace(limits, max=limits.initial))
    return seconds_per_iteration(fixed, gpus_per_instance, gang_sizes)


def with_noise_scale(profile: GoodputProfile, noise_scale: float) -> GoodputProfile:
    """The same model at another phi, as it is later in training."""
    return replace(profile, noise_scale=noise_scale)


def extrapolated(profile: GoodputProfile, gpus_per_instance: int, gang_sizes: Sequence[int]) -> list[int]:
    """The gang sizes whose time the model predicts outside of what was measured; none of a model written by hand."""
    if not profile.points:
        return []
    choices = _choices(profile, gpus_per_instance, gang_sizes)
    return [
        gpus
        for gpus, per_gpu in zip(gang_sizes, choices.per_gpu.tolist(), strict=True)
        if extrapolates(profile.points, _instances(gpus, gpus_per_instance), gpus, per_gpu)
    ]


def chosen(profile: GoodputProfile, gpus_per_instance: int, gang_sizes: Sequence[int]) -> dict[int, int]:
    """M, the batch size of most goodput, of every gang size."""
    return dict(zip(gang_sizes, _choices(profile, gpus_per_instance, gang_sizes).batch_size.tolist(), strict=True))


def cautious(profile: GoodputProfile) -> Throughput:
    """The parameters to plan with: where nothing was measured across instances, that costs what it does within one.

    §4.1's prior takes it to be free, so that a scheduler explores it; a plan that is paid for must not rest on that.
    """
    parameters = profile.throughput
    if not profile.points or any(point.instances > 1 for point in profile.points):
        return parameters
    return replace(
        parameters,
        alpha_node_s=max(parameters.alpha_node_s, parameters.alpha_local_s),
        beta_node_s=max(parameters.beta_node_s, parameters.beta_local_s),
    )


def _choices(profile: GoodputProfile, gpus_per_instance: int, gang_sizes: Sequence[int]) -> GoodputChoices:
    gpus = np.asarray(gang_sizes, dtype=np.int64)
    instances = -(-gpus // gpus_per_instance)
    return choose_many(cautious(profile), profile.noise_scale, profile.limits, instances, gpus, least_per_gpu=0)


def _instances(gpus: int, gpus_per_instance: int) -> int:
    return -(-gpus // gpus_per_instance)


# When more GPUs are worth it, and how many (Pollux §5.4.1, cloud auto-scaling).
#
# The measure is GOODPUT(a) / K over GOODPUT(1 GPU), each at its best (m, s): 1 if a gang scales perfectly. It grows
# as phi does in the course of training. What GPUs cost is not looked at.


UPPER = 2.0 / 3.0
"""U: a gang above it is scaled up."""
LOWER = 1.0 / 2.0
"""L: to the size where about this much is left."""


def scaling_efficiencies(
    profile: GoodputProfile, gpus_per_instance: int, gang_sizes: Sequence[int]
) -> dict[int, float]:
    """Goodput per GPU of every gang size, relative to a single GPU."""
    found = goodputs(profile, gpus_per_instance, [1, *gang_sizes])
    single = found[1]
    return {gpus: found[gpus] / gpus / single for gpus in gang_sizes}


def should_scale(profile: GoodputProfile, gpus_per_instance: int, gpus: int, *, upper: float = UPPER) -> bool:
    """Whether a gang of `gpus` scales so well that it should grow: goodput per GPU more than U of the ideal."""
    return scaling_efficiencies(profile, gpus_per_instance, [gpus])[gpus] > upper


def scaled_size(
    profile: GoodputProfile,
    gpus_per_instance: int,
    gang_sizes: Sequence[int],
    gpus: int,
    *,
    upper: float = UPPER,
    lower: float = LOWER,
) -> int:
    """The size that a gang of `gpus` should have: if it should grow, the largest one with at least L of the ideal.

    Never smaller than `gpus`; that a plan may shrink a gang is the planner's business.
    """
    if not should_scale(profile, gpus_per_instance, gpus, upper=upper):
        return gpus
    share = scaling_efficiencies(profile, gpus_per_instance, gang_sizes)
    return max([gpus, *(size for size in gang_sizes if share[size] >= lower)])


# Profiles of trials that adapt their batch size, as planning takes them: a table like any other, made of the model.
#
# The model itself, and what it says of a gang, is in `rubberband.planner.goodput`.


def limits_within(model: GoodputProfile, asked: AdaptiveBatch) -> BatchLimits:
    """The limits of the model's trials if they run as `asked`.

    A measured model knows the largest batch that the training set and the user allowed: no larger one is planned with.
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
    """The profile with the times of trials that adapt their batch, for these gang sizes. It must have a model.

    The model says by what factor adapting is faster than a fixed batch; that the fixed batch takes as long as was
    measured, so that a model which is too fast throughout promises nothing. Beyond what was measured, it is taken to be
    off as much as it is within.
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
    """A profile that `adapted` made, at another phi: every time changes as that of the model does."""
    assert profile.goodput is not None, "adapted profiles have one"
    now, then = profile.goodput, with_noise_scale(profile.goodput, noise_scale)
    sizes = sorted(profile.seconds_per_iteration)
    before_s, after_s = (seconds_per_iteration(model, gpus_per_instance, sizes) for model in (now, then))
    table = {gpus: profile.seconds_per_iteration[gpus] * after_s[gpus] / before_s[gpus] for gpus in sizes}
    return replace(profile, seconds_per_iteration=table, goodput=then)
