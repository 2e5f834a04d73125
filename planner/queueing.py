"""Planning of asynchronous training: its throughput with any number of workers, from the times of one (Lin et al., §3).

`Network` gives X(K), the updates per second of K equal workers and their parameter server; `mixed` those of unequal
ones.

With m servers (§7), a server's links carry the share f of the model that the busiest server holds: f S^U and f S^D. The
rest of a transfer passes on the worker's own link, which it shares with no other, so that it is a delay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

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
            limit = np.divide(1.0, np.maximum(np.maximum(self.up_s, self.server_s), self.down_s))
        return limit if np.ndim(limit) else float(limit)


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
    band = curve(profile, most)
    wide = np.flatnonzero(_shows(band.low, band.high))
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


_PROPORTIONAL = 1e-12
_ROUNDS = 3
"""Estimates of what a missing worker changes; more gain nothing."""
_MOST_STEPS = 500
_SETTLED = 1e-10
_REMEMBERED = 3
"""Steps that accelerate the next one: as many as there are stations."""
_RIDGE, _TINY = 1e-10, 1e-300


@lru_cache(maxsize=1024)
def mixed_factor(profile: AsyncProfile, speeds: tuple[float, ...]) -> float:
    """Return how many times longer an iteration takes with workers of these speeds than with as many of speed 1.

    The speed of a worker is the updates per second that it makes alone, over those of the profile's worker. Links and
    servers are the same for all, so that what a worker takes longer is its own time. Each end of the band of throughput
    changes by a factor of its own; the blend mixes them.
    """
    network, alike = network_of(profile), curve(profile, len(speeds))
    stations_s = np.array([network.up_s, network.server_s, network.down_s])
    delays_s = np.maximum(network.update_s / np.array(speeds) - stations_s.sum(), 0.0)
    low = mixed(delays_s, np.tile(stations_s, (len(speeds), 1))).sum() / alike.low[-1]
    high = min((1.0 / (delays_s + stations_s.sum())).sum(), network.ceiling) / alike.high[-1]
    blend = ASSUMED_BLEND if profile.blend is None else profile.blend
    point = float(alike.point[-1])
    mixture = point * low ** (1.0 - blend) * high**blend
    return iteration_s(profile, len(speeds), mixture) / iteration_s(profile, len(speeds), point)


def mixed(delays_s: Floats, stations_s: Floats) -> Floats:
    """Return (K,) updates per second of each of K workers that share stations (processor sharing; eq. 1).

    Every worker is a class of its own, with one task.

    `delays_s` is (K,), the seconds of an update without waiting; `stations_s` is (K, stations). Exact where the rows of
    `stations_s` are multiples of each other. Else by the Linearizer: within 0.5 % in all and about 1 % for a worker.
    Some time of every worker is positive.
    """
    scale = stations_s.sum(axis=1)
    if not scale.any():
        return 1.0 / delays_s
    common_s = stations_s[scale.argmax()]
    multiples = scale / scale.max()
    if np.allclose(stations_s, multiples[:, None] * common_s, rtol=_PROPORTIONAL, atol=0.0):
        return proportional(delays_s, multiples, common_s)
    return linearizer(delays_s, stations_s)


def proportional(delays_s: Floats, multiples: Floats, common_s: Floats) -> Floats:
    """Return (K,) X_k, exactly: worker k takes `multiples`[k] times `common_s` (stations,) at the stations.

    The recursion over all subsets of K workers takes 2^K steps. Where the workers' times at the stations are multiples
    of each other (the same model, other links), the normalising constant is a sum over the number m of tasks there,

        G = sum over m of [t^m] prod over k (S_k^W + c_k t)  *  m! h_m(D),

    with worker k's multiple c_k, the common times D, and the complete homogeneous symmetric polynomial h_m. Then
    X_k = G(all but k) / G(all), exactly, in O(K^2). All terms are positive and kept as logarithms.
    """
    workers = len(delays_s)
    with np.errstate(divide="ignore"):
        log_delay, log_multiple = np.log(delays_s), np.log(multiples)
    # before[k][i] = log [t^i] of the product over the workers before k; after[k][i] = log of the sum over j of
    # [t^j] of the product over those after k, times (i + j)! h_(i+j). Their products sum to G(all but k).
    before = np.full((workers + 1, workers + 1), -np.inf)
    before[0, 0] = 0.0
    for k in range(workers):
        before[k + 1] = log_delay[k] + before[k]
        before[k + 1, 1:] = np.logaddexp(before[k + 1, 1:], log_multiple[k] + before[k, :-1])
    after = np.empty((workers, workers + 1))
    last = _log_weights(common_s, workers)
    whole = np.logaddexp.reduce(before[workers] + last)
    for k in reversed(range(workers)):
        after[k] = last
        beyond = np.append(last[1:], -np.inf)
        last = np.logaddexp(log_delay[k] + last, log_multiple[k] + beyond)
    return np.asarray(np.exp(np.logaddexp.reduce(before[:workers] + after, axis=1) - whole))


def _log_weights(common_s: Floats, most: int) -> Floats:
    """(most + 1,) log of m! h_m(D): all ways of m tasks at the stations, in any order at each."""
    counts = np.arange(most + 1.0)
    log_weights = np.where(counts == 0.0, 0.0, -np.inf)
    for time_s in common_s[common_s > 0.0]:
        powers = counts * np.log(time_s)
        log_weights = powers + np.logaddexp.accumulate(log_weights - powers)
    return np.asarray(log_weights + np.append(0.0, np.log(counts[1:]).cumsum()))


def linearizer(delays_s: Floats, stations_s: Floats) -> Floats:
    """Return (K,) X_k for any times, approximately (Chandy and Neuse 1982, with one task in every class).

    An update finds at a station the mean queue of the others. How a missing worker changes their queues is estimated by
    taking each out in turn; it is assumed to change them as much where another one is missing too.
    """
    others = 1.0 - np.eye(len(delays_s))[:, :, None]  # [missing, worker, station]
    changes = np.zeros((*others.shape[:2], stations_s.shape[1]))
    whole = stations_s / (delays_s[:, None] + stations_s).sum(axis=1, keepdims=True)
    without = whole * others
    for _ in range(_ROUNDS):
        whole = _settled(delays_s, stations_s, whole, changes, np.ones_like(whole))
        without = _settled(delays_s, stations_s, without, changes, others)
        changes = (without - whole) * others
    return np.asarray(1.0 / (delays_s + _waits_s(stations_s, whole, changes).sum(axis=-1)))


def _settled(delays_s: Floats, stations_s: Floats, queues: Floats, changes: Floats, present: Floats) -> Floats:
    """Queues (…, worker, station) at the fixed point of Little's law; those of workers that are not `present` are 0.

    Workers only meet in the total queue of a station. So the steps are accelerated (Anderson) by the latest few totals.
    """
    steps, excess = list[Floats](), list[Floats]()
    for _ in range(_MOST_STEPS):
        waits_s = _waits_s(stations_s, queues, changes)
        steps.append(np.asarray(waits_s / (delays_s[:, None] + waits_s.sum(axis=-1, keepdims=True)) * present))
        if np.abs(steps[-1] - queues).max() <= _SETTLED:
            break
        excess.append((steps[-1] - queues).sum(axis=-2))
        del steps[: -_REMEMBERED - 1], excess[: -_REMEMBERED - 1]
        queues = np.maximum(_accelerated(steps, excess), 0.0)
    return steps[-1]


def _accelerated(steps: Sequence[Floats], excess: Sequence[Floats]) -> Floats:
    """The mixture of the `steps` (…, worker, station) whose `excess` (…, station) would be smallest."""
    if len(steps) == 1:
        return steps[0]
    slopes = np.stack([excess[-1] - earlier for earlier in excess[:-1]], axis=-1)
    squares = slopes.swapaxes(-1, -2) @ slopes
    ridge = _RIDGE * squares.trace(axis1=-2, axis2=-1)[..., None, None] + _TINY
    shares = np.linalg.solve(squares + ridge * np.eye(len(steps) - 1), slopes.swapaxes(-1, -2) @ excess[-1][..., None])
    moves = np.stack([steps[-1] - earlier for earlier in steps[:-1]], axis=-1)
    return np.asarray(steps[-1] - (moves @ shares[..., None, :, :])[..., 0])


def _waits_s(stations_s: Floats, queues: Floats, changes: Floats) -> Floats:
    """Response times (…, worker, station): an update finds those of the others that are there without its own worker.

    `changes` are [missing, worker, station]. For `queues` without a worker, its own changes do not count.
    """
    seen = queues.sum(axis=-2, keepdims=True) - queues + changes.sum(axis=1)
    if queues.ndim == 3:
        seen = seen - changes.swapaxes(0, 1)
    return np.asarray(stations_s * (1.0 + np.maximum(seen, 0.0)))
