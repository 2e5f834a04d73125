"""Planning of asynchronous training: its throughput with any number of workers, from the times of one (Lin et al., §3).

With m servers (§7), a server's links carry the share f of the model that the busiest server holds: f S^U and f S^D. The
rest of a transfer passes on the worker's own link, which it shares with no other, so that it is a delay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rubberband.planner.queueing.homogeneous import Floats, Network, blended, exact, highest
from rubberband.values.asynchronous import AsyncProfile
from rubberband.values.profile import Profile

ASSUMED_BLEND = 0.5
"""Place of X(K) in its band before it is measured: an update in service is half done on average, as in eq. 2."""
KNEE_GAIN = 0.05
"""A worker that shortens an update by a smaller share is beyond the knee (alpha of KNEE, §4)."""
MOST_WORKERS = 1024
"""Most workers among which a knee is looked for."""
_BLENDS = np.linspace(0.0, 1.0, 1001)
_HIDDEN = 1.05
"""An iteration of at most so many times its overhead may be one that waits for the overhead alone."""
_NARROW = 0.01
"""A band that is relatively narrower than this does not show the blend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Updates per second of 1, 2, …, K workers together: (K,) each."""

    low: Floats
    """The low end of the band: exact mean value analysis."""
    point: Floats
    """The throughput to plan with."""
    high: Floats
    """The high end: min(K / sum S, 1 / max S)."""


def network_of(profile: AsyncProfile) -> Network:
    """Return the closed network of the profile's worker and servers."""
    times, share = profile.times, profile.hottest_share
    own_link_s = (1.0 - share) * (times.up_s + times.down_s)
    return Network(
        delay_s=times.compute_s + own_link_s,
        up_s=share * times.up_s,
        server_s=times.server_s,
        down_s=share * times.down_s,
    )


def curve(profile: AsyncProfile, workers: int) -> Curve:
    """Return X(1), …, X(workers) with its band."""
    network = network_of(profile)
    blend = ASSUMED_BLEND if profile.blend is None else profile.blend
    return Curve(low=exact(network, workers), point=blended(network, workers, blend), high=highest(network, workers))


def with_servers(profile: AsyncProfile, servers: int) -> AsyncProfile:
    """Return the model for another number of servers, which divide the parameters evenly."""
    if servers == profile.servers:
        return profile
    server_s = profile.times.server_s / servers / profile.hottest_share
    return replace(
        profile, times=replace(profile.times, server_s=server_s), servers=servers, largest_shard=None, blend=None
    )


def knee(profile: AsyncProfile, most: int = MOST_WORKERS) -> int:
    """Return the smallest number of workers beyond which one more shortens an update by less than `KNEE_GAIN`.

    At most `most`.
    """
    point = curve(profile, most).point
    gains = 1.0 - point[:-1] / point[1:]
    below = np.flatnonzero(gains < KNEE_GAIN)
    return int(below[0]) + 1 if len(below) else most


def calibrated(profile: AsyncProfile, throughputs: Mapping[int, float]) -> AsyncProfile:
    """Return the profile with the blend that fits observations best: workers -> updates per second of all together.

    Those of one worker do not show it, nor do those where the band is narrow; without any other the blend stays. Fits
    relative errors; outside the band the nearer end is taken.
    """
    network = network_of(profile)
    workers = max(throughputs, default=1)
    low, high = exact(network, workers), highest(network, workers)
    telling = {n: seen for n, seen in throughputs.items() if high[n - 1] > (1.0 + _NARROW) * low[n - 1]}
    if not telling:
        return profile
    expected = blended(network, workers, _BLENDS)
    errors = sum(np.log(expected[n - 1] / seen) ** 2 for n, seen in telling.items())
    return replace(profile, blend=float(_BLENDS[int(np.argmin(errors))]))


def seconds_per_iteration(profile: AsyncProfile, gang_sizes: Sequence[int]) -> dict[int, float]:
    """e(g) = updates of an iteration / X(g), plus its overhead, in seconds; a gang of g GPUs has g workers.

    During the overhead one worker is missing, and the others begin the next iteration: it counts as 1/g of it, as long
    as the iteration takes longer than the overhead.
    """
    point = curve(profile, max(gang_sizes)).point
    return {g: _iteration_s(profile, g, float(point[g - 1])) for g in gang_sizes}


def _iteration_s(profile: AsyncProfile, workers: int, throughput: float) -> float:
    return max(profile.updates_per_iteration / throughput + profile.overhead_s / workers, profile.overhead_s)


def scaled(profile: Profile, gang_sizes: Sequence[int]) -> Profile:
    """Return the profile with the times of gangs of these sizes. It must have a model.

    Its own times stay, and those with two or more workers calibrate the blend. Others follow from the model, whose
    throughput is off by the same ratio as at the nearest measured size.
    """
    assert profile.asynchronous is not None, "only a profile with a model can plan asynchronous training"
    measured_s = profile.seconds_per_iteration
    seen = _throughputs(profile.asynchronous, measured_s)
    alone = profile.asynchronous.times.update_s * seen.get(1, 1.0 / profile.asynchronous.times.update_s)
    model = calibrated(profile.asynchronous, {g: throughput / alone for g, throughput in seen.items()})
    point = curve(model, max(*gang_sizes, *measured_s)).point
    off = {g: throughput / float(point[g - 1]) for g, throughput in seen.items()} or {1: 1.0}
    nearest = {g: min(off, key=lambda known: abs(math.log(known / g))) for g in gang_sizes}
    modelled_s = {g: _iteration_s(model, g, off[nearest[g]] * float(point[g - 1])) for g in gang_sizes}
    table = {g: measured_s.get(g, modelled_s[g]) for g in gang_sizes}
    return replace(profile, seconds_per_iteration=table, asynchronous=model)


def recalibrated(profile: Profile, seen_s: Mapping[int, float]) -> Profile:
    """Return a profile made by `scaled` after gangs of these sizes took these seconds per iteration.

    The time of a worker alone stays where none was seen.
    """
    table = profile.seconds_per_iteration
    alone = {1: table[1]} if 1 in table else {}
    return scaled(replace(profile, seconds_per_iteration={**alone, **seen_s}), sorted({*table, *seen_s}))


def updates_per_s(profile: Profile, workers: int) -> float:
    """Return the throughput of a gang by its time of an iteration. The profile must have a model."""
    assert profile.asynchronous is not None, "only asynchronous training has updates"
    model = profile.asynchronous
    return model.updates_per_iteration / (profile.iteration_s(workers) - model.overhead_s / workers)


def planned_updates_per_s(profile: Profile, workers: int) -> Floats:
    """Return (workers,) the throughputs of 1, 2, … workers that plans count with. The profile must have a model.

    Outside its table they follow the model.
    """
    assert profile.asynchronous is not None, "only asynchronous training has updates"
    ends = profile.smallest_gpus, profile.largest_gpus
    modelled = curve(profile.asynchronous, max(workers, ends[1])).point
    off = [updates_per_s(profile, end) / modelled[end - 1] for end in ends]
    return np.asarray(
        [
            updates_per_s(profile, n) if profile.covers(n) else off[n > ends[1]] * modelled[n - 1]
            for n in range(1, workers + 1)
        ]
    )


def _throughputs(model: AsyncProfile, measured_s: Mapping[int, float]) -> dict[int, float]:
    """Workers -> updates per second by measured times of iterations, where these show them.

    An iteration that hardly takes longer than its overhead does not show how fast the other workers are.
    """
    return {
        g: model.updates_per_iteration / (time_s - model.overhead_s / g)
        for g, time_s in measured_s.items()
        if time_s > (_HIDDEN if g > 1 else 1.0) * model.overhead_s
    }
