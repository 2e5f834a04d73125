"""Profiles of trials that adapt their batch size, as planning takes them: a table like any other, made of the model.

The model itself, and what it says of a gang, is in `rubberband.planner.goodput`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rubberband.adaptive import AdaptiveBatch, BatchLimits, GoodputProfile
from rubberband.planner.goodput.planning import adaptive, seconds_per_iteration, with_noise_scale
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

    None is longer than the time that is known of a fixed batch: a trial can always keep that.
    """
    found = adaptive(profile, gpus_per_instance, gang_sizes)
    table = {
        gpus: min(time_s, profile.iteration_s(gpus)) if profile.covers(gpus) else time_s
        for gpus, time_s in found.seconds_per_iteration.items()
    }
    return replace(found, seconds_per_iteration=table)


def at_noise_scale(profile: Profile, gpus_per_instance: int, noise_scale: float) -> Profile:
    """A profile that `adapted` made, at another phi: every time changes as that of the model does."""
    assert profile.goodput is not None, "adapted profiles have one"
    now, then = profile.goodput, with_noise_scale(profile.goodput, noise_scale)
    sizes = sorted(profile.seconds_per_iteration)
    before_s, after_s = (seconds_per_iteration(model, gpus_per_instance, sizes) for model in (now, then))
    table = {gpus: profile.seconds_per_iteration[gpus] * after_s[gpus] / before_s[gpus] for gpus in sizes}
    return replace(profile, seconds_per_iteration=table, goodput=then)
