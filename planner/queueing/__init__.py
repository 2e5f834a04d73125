"""Planning of asynchronous training: its throughput with any number of workers, from the times of one (Lin et al., §3).

`Network` gives X(K), the updates per second of K equal workers and their parameter server; `mixed` has unequal ones.

With m servers (§7), a server's links carry the share f of the model that the busiest server holds: f S^U and f S^D. The
rest of a transfer passes on the worker's own link, which it shares with no other, so that it is a delay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rubberband.values.asynchronous import AsyncProfile, AsyncTimes
from rubberband.values.profile import Profile

Floats = npt.NDArray[np.float64]
Numbers = float | Floats
"""A number of one network, or an array with one for each of many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Mean seconds of an update at every station; numbers, or arrays of one shape. Some time is positive.

    The closed network: every worker is a task that computes (a delay), crosses the uplink, is served, and crosses the
    downlink. K classes of one equal task each are one class of K tasks, so that the recursion over n = 1, …, K is exact
    and takes O(K). All functions take one network, or many at once: its times may be arrays, and results have K first.
    """

    delay_s: Numbers
    """Without waiting: S^W, and the part of the transfers that only the worker's own link limits."""
    up_s: Numbers
    """S^U, on the server's incoming link."""
    server_s: Numbers
    """S^S."""
    down_s: Numbers
    """S^D, on the server's outgoing link."""

    @property
    def update_s(self) -> Numbers:
        """Seconds of an update that waits for no other: 1 / X(1)."""
        return self.delay_s + self.up_s + self.server_s + self.down_s

    @property
    def ceiling(self) -> Numbers:
        """1 / max S, the updates per second of the busiest station; infinite if no station takes time."""
        with np.errstate(divide="ignore"):
            found = np.divide(1.0, np.maximum(np.maximum(self.up_s, self.server_s), self.down_s))
        return found if np.ndim(found) else float(found)


def exact(network: Network, workers: int) -> Floats:
    """X(1), …, X(workers) where stations are shared (processor sharing), by exact mean value analysis (eq. 1)."""
    return np.asarray(list(_recursion(network, workers, 0.0)))


def highest(network: Network, workers: int) -> Floats:
    """min(K / sum S, 1 / max S): no update waits for another until a station is always busy."""
    counts = np.arange(1.0, workers + 1.0).reshape(-1, *(1,) * np.ndim(network.update_s))
    return np.minimum(counts / network.update_s, network.ceiling)


def blended(network: Network, workers: int, blend: Numbers) -> Floats:
    """X(1), …, X(workers) between `exact` (`blend` 0) and `highest` (1).

    An arriving update waits for those before it, of which the one under way has passed the share `blend` already: eq. 2
    with `blend` in place of 1/2, at every station, and at most 1 / max S. Regular times and transfers that take turns
    bring a real server near 1; irregular times and transfers that share a link, near 0.
    """
    return np.asarray(list(_recursion(network, workers, blend)))


def _recursion(network: Network, workers: int, blend: Numbers) -> Iterator[Numbers]:
    """X(n) for n = 1, …: `blend` is the share of the update under way that has passed at every station."""
    up_s, server_s, down_s, ceiling = network.up_s, network.server_s, network.down_s, network.ceiling
    least = min if np.ndim(ceiling) == 0 and np.ndim(blend) == 0 else np.minimum
    up: Numbers = 0.0  # mean tasks at the stations, and X, with one worker less
    server, down, throughput = up, up, up
    for n in range(1, workers + 1):
        up_wait_s = up_s * (1.0 + up) - blend * (throughput * up_s**2)
        server_wait_s = server_s * (1.0 + server) - blend * (throughput * server_s**2)
        down_wait_s = down_s * (1.0 + down) - blend * (throughput * down_s**2)
        throughput = least(n / (network.delay_s + up_wait_s + server_wait_s + down_wait_s), ceiling)
        up, server, down = throughput * up_wait_s, throughput * server_wait_s, throughput * down_wait_s
        yield throughput


ASSUMED_BLEND = 0.5
"""Place of X(K) in its band before it is measured: an update in service is half done on average, as in eq. 2."""
KNEE_GAIN = 0.05
"""A worker that shortens an update by a smaller share is beyond the knee (alpha of KNEE, §4)."""
MOST_WORKERS = 1024
"""Most workers among which a knee is looked for."""
_BLENDS = np.linspace(0.0, 1.0, 1001)
_HIDDEN = 1.05
"""An iteration that takes at most this multiple of its overhead may wait for the overhead alone."""
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


def least_telling(profile: AsyncProfile, most: int) -> int | None:
    """Return the smallest number of workers, at most `most`, whose throughput shows how they wait; None without any.

    With fewer, the band is narrow, and a measurement does not calibrate the model.
    """
    found = curve(profile, most)
    wide = np.flatnonzero(_shows(found.low, found.high))
    return int(wide[0]) + 1 if len(wide) else None


def _shows(low: Floats, high: Floats) -> npt.NDArray[np.bool_]:
    """Return where a band is wide enough to show the blend."""
    return high > (1.0 + _NARROW) * low


def calibrated(profile: AsyncProfile, throughputs: Mapping[int, float]) -> AsyncProfile:
    """Return the profile with the blend that fits observations best: workers -> updates per second of all together.

    Those of one worker do not show it, nor do those where the band is narrow; without any other the blend stays. Fits
    relative errors; outside the band the nearer end is taken.
    """
    network = network_of(profile)
    workers = max(throughputs, default=1)
    shows = _shows(exact(network, workers), highest(network, workers))
    telling = {n: seen for n, seen in throughputs.items() if shows[n - 1]}
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
    return {g: iteration_s(profile, g, float(point[g - 1])) for g in gang_sizes}


def iteration_s(profile: AsyncProfile, workers: int, throughput: float) -> float:
    """Return the seconds of an iteration of workers that make `throughput` updates/s together."""
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
    modelled_s = {g: iteration_s(model, g, off[nearest[g]] * float(point[g - 1])) for g in gang_sizes}
    table = {g: measured_s.get(g, modelled_s[g]) for g in gang_sizes}
    return replace(profile, seconds_per_iteration=table, asynchronous=model)


def recalibrated(profile: Profile, seen_s: Mapping[int, float], times: AsyncTimes | None = None) -> Profile:
    """Return a profile made by `scaled` after gangs of these sizes took these seconds per iteration.

    `times`: those of a worker alone, where the gangs show that they are not the profile's. Otherwise these stay, and
    so does the time of an iteration of a worker alone where none was seen.
    """
    assert profile.asynchronous is not None, "only a profile with a model is calibrated"
    table, model = profile.seconds_per_iteration, profile.asynchronous
    alone = {1: table[1]} if 1 in table and times is None else {}
    profile = replace(
        profile, seconds_per_iteration={**alone, **seen_s}, asynchronous=replace(model, times=times or model.times)
    )
    return scaled(profile, sorted({*table, *seen_s}))


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
