"""Gangs whose GPUs are of different types: how fast they are, from the speed of each type. Pure.

A balanced gang divides its batch by speed, so that the speeds of its GPUs add up (LB-BSP, SoCC '20, eq. 3 with
t_i = x_i / v_i). With equal shares a step is as slow as the slowest GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import geometric_mean

from rubberband.values.profile import Profile


def mixed_factor(speeds: Sequence[float], *, balanced: bool) -> float:
    """Return how many times longer a step takes on GPUs of these speeds than on as many of speed 1."""
    return len(speeds) / math.fsum(speeds) if balanced else 1.0 / min(speeds)


def relative_speed(profile: Profile, planned: Profile) -> float:
    """Return the speed of a GPU with this profile over one with the planned profile, at the GPU counts of both.

    The mean of several counts is the geometric one. Without a common count, the smallest of each are compared, by GPU.
    """
    times, planned_times = profile.seconds_per_iteration, planned.seconds_per_iteration
    common = sorted(times.keys() & planned_times.keys())
    if common:
        return geometric_mean([planned_times[gpus] / times[gpus] for gpus in common])
    least, planned_least = profile.smallest_gpus, planned.smallest_gpus
    return (planned_times[planned_least] * planned_least) / (times[least] * least)


def mixture_words(counts: Mapping[str, int], speeds: Mapping[str, float], planned: str) -> str:
    """Return what is assumed of instances of other types: `1 of 4 is g5.xlarge, 0.5x as fast`; empty without one."""
    total = sum(counts.values())
    others = [name for name in counts if name != planned and speeds.get(name, 1.0) != 1.0]
    told = [f"{counts[name]} of {total} instances {'is' if counts[name] == 1 else 'are'} {name}" for name in others]
    paces = [f"{speeds[name]:.2g}x as fast by the profile" for name in others]
    return "; ".join(f"{what}, {pace}" for what, pace in zip(told, paces, strict=True))
