"""Updates per second of unequal workers: every one is a class of its own, with one task (Lin et al., §3, eq. 1).

The recursion over all subsets of K workers takes 2^K steps. Where the workers' times at the stations are multiples of
each other (the same model, other links), the normalising constant is a sum over the number m of tasks at the stations,

    G = sum over m of [t^m] prod over k (S_k^W + c_k t)  *  m! h_m(D),

with worker k's multiple c_k, the common times D, and the complete homogeneous symmetric polynomial h_m. Then
X_k = G(all but k) / G(all), exactly, in O(K^2). All terms are positive and kept as logarithms. For other times there is
an approximation, the Linearizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from rubberband.planner.queueing import ASSUMED_BLEND, Floats, curve, iteration_s, network_of
from rubberband.values.asynchronous import AsyncProfile

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
    network, found = network_of(profile), curve(profile, len(speeds))
    stations_s = np.array([network.up_s, network.server_s, network.down_s])
    delays_s = np.maximum(network.update_s / np.array(speeds) - stations_s.sum(), 0.0)
    low = mixed(delays_s, np.tile(stations_s, (len(speeds), 1))).sum() / found.low[-1]
    high = min((1.0 / (delays_s + stations_s.sum())).sum(), network.ceiling) / found.high[-1]
    blend = ASSUMED_BLEND if profile.blend is None else profile.blend
    point = float(found.point[-1])
    mixture = point * low ** (1.0 - blend) * high**blend
    return iteration_s(profile, len(speeds), mixture) / iteration_s(profile, len(speeds), point)


def mixed(delays_s: Floats, stations_s: Floats) -> Floats:
    """Return (K,) updates per second of each of K workers that share stations (processor sharing).

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
    """Return (K,) X_k, exactly: worker k takes `multiples`[k] times `common_s` (stations,) at the stations."""
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
    found = np.where(counts == 0.0, 0.0, -np.inf)
    for time_s in common_s[common_s > 0.0]:
        powers = counts * np.log(time_s)
        found = powers + np.logaddexp.accumulate(found - powers)
    return np.asarray(found + np.append(0.0, np.log(counts[1:]).cumsum()))


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
    found, excess = list[Floats](), list[Floats]()
    for _ in range(_MOST_STEPS):
        waits_s = _waits_s(stations_s, queues, changes)
        found.append(np.asarray(waits_s / (delays_s[:, None] + waits_s.sum(axis=-1, keepdims=True)) * present))
        if np.abs(found[-1] - queues).max() <= _SETTLED:
            break
        excess.append((found[-1] - queues).sum(axis=-2))
        del found[: -_REMEMBERED - 1], excess[: -_REMEMBERED - 1]
        queues = np.maximum(_accelerated(found, excess), 0.0)
    return found[-1]


def _accelerated(found: Sequence[Floats], excess: Sequence[Floats]) -> Floats:
    """The mixture of the steps `found` (…, worker, station) whose `excess` (…, station) would be smallest."""
    if len(found) == 1:
        return found[0]
    slopes = np.stack([excess[-1] - earlier for earlier in excess[:-1]], axis=-1)
    squares = slopes.swapaxes(-1, -2) @ slopes
    ridge = _RIDGE * squares.trace(axis1=-2, axis2=-1)[..., None, None] + _TINY
    shares = np.linalg.solve(squares + ridge * np.eye(len(found) - 1), slopes.swapaxes(-1, -2) @ excess[-1][..., None])
    moves = np.stack([found[-1] - earlier for earlier in found[:-1]], axis=-1)
    return np.asarray(found[-1] - (moves @ shares[..., None, :, :])[..., 0])


def _waits_s(stations_s: Floats, queues: Floats, changes: Floats) -> Floats:
    """Response times (…, worker, station): an update finds those of the others that are there without its own worker.

    `changes` are [missing, worker, station]. For `queues` without a worker, its own changes do not count.
    """
    seen = queues.sum(axis=-2, keepdims=True) - queues + changes.sum(axis=1)
    if queues.ndim == 3:
        seen = seen - changes.swapaxes(0, 1)
    return np.asarray(stations_s * (1.0 + np.maximum(seen, 0.0)))
