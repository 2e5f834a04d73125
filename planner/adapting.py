"""Profiles of trials that adapt their batch size, as planning takes them: a table like any other, made of the model.

The model itself, and what it says of a gang, is in `rubberband.planner.goodput`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from rubberband.adaptive import AdaptiveBatch, BatchLimits, GoodputProfile
from rubberband.planner.goodput.planning import fixed_seconds_per_iteration, seconds_per_iteration, with_noise_scale
from rubberband.profile import Profile


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
