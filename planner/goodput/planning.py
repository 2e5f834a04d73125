"""Planning with goodput: how long an iteration takes on a gang that chooses its batch size, and on one that may not.

An iteration is a number of samples at the initial batch size, where each counts in full; divided by the goodput of a
gang (useful samples per second) it is the time that the gang needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rubberband.adaptive import GoodputProfile, Throughput
from rubberband.planner.goodput.choice import Choices, choose_many
from rubberband.planner.goodput.fit import extrapolates


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


def _choices(profile: GoodputProfile, gpus_per_instance: int, gang_sizes: Sequence[int]) -> Choices:
    gpus = np.asarray(gang_sizes, dtype=np.int64)
    instances = -(-gpus // gpus_per_instance)
    return choose_many(cautious(profile), profile.noise_scale, profile.limits, instances, gpus, least_per_gpu=0)


def _instances(gpus: int, gpus_per_instance: int) -> int:
    return -(-gpus // gpus_per_instance)
