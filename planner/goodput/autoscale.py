"""When more GPUs are worth it, and how many (Pollux §5.4.1, cloud auto-scaling).

The measure is GOODPUT(a) / K over GOODPUT(1 GPU), each at its best (m, s): 1 if a gang scales perfectly. It grows as
phi does in the course of training. What GPUs cost is not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

from rubberband.adaptive import GoodputProfile
from rubberband.planner.goodput.planning import goodputs

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
