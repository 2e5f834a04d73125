"""X(K), the updates per second of K equal workers and their parameter server (Lin et al., §3, eqs. 1-4).

The closed network: every worker is a task that computes (a delay), crosses the uplink, is served, and crosses the
downlink. K classes of one equal task each are one class of K tasks, so that the recursion over n = 1, …, K is exact and
takes O(K). All functions take one network, or many at once: its times may be arrays, and results have K first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Numbers = float | Floats
"""A number of one network, or an array with one for each of many."""

SHARING_BEGINS = 0.8
"""Utilisation of a link from which on its transfers overlap (eq. 4)."""
_MOST_STEPS = 20
_SETTLED = 1e-13


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Mean seconds of an update at every station; numbers, or arrays of one shape. Some time is positive."""

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
    return np.asarray(list(_recursion(network, workers, (0.0, 0.0, 0.0))))


def first_come(network: Network, workers: int) -> Floats:
    """The same where a link carries one transfer after another (eq. 2); at most 1 / max S.

    As printed, eq. 2 exceeds that bound by up to a third.
    """
    return np.asarray(list(_recursion(network, workers, (0.5, 0.0, 0.5))))


def hybrid(network: Network, workers: int) -> Floats:
    """The same where transfers overlap on busy links only (eqs. 3 and 4); at most 1 / max S.

    The overlap on a link follows from its total utilisation by all n workers. That depends on X(n) itself, which is a
    fixed point. The utilisation by single workers, as printed, never reaches 0.8; with that at n - 1, X falls for some
    n.
    """
    return np.asarray(list(_recursion(network, workers, None)))


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
    return np.asarray(list(_recursion(network, workers, (blend, blend, blend))))


def _recursion(network: Network, workers: int, passed: tuple[Numbers, Numbers, Numbers] | None) -> Iterator[Numbers]:
    """X(n) for n = 1, …: `passed` is the share of the update under way that has passed at uplink, server and downlink.

    None: that of the hybrid (eqs. 3 and 4).
    """
    up_s, server_s, down_s, ceiling = network.up_s, network.server_s, network.down_s, network.ceiling
    one = np.ndim(ceiling) == 0 and passed is not None and np.ndim(passed[0]) == 0
    least = min if one else np.minimum
    up: Numbers = 0.0  # mean tasks at the stations, and X, with one worker less
    server, down, throughput = up, up, up
    for n in range(1, workers + 1):
        up_wait_s, server_wait_s, down_wait_s = up_s * (1.0 + up), server_s * (1.0 + server), down_s * (1.0 + down)
        under_way_s = throughput * up_s**2, throughput * server_s**2, throughput * down_s**2
        waits_s = network.delay_s + up_wait_s + server_wait_s + down_wait_s
        shares = passed or _hybrid_shares((up_s, down_s), n, waits_s, under_way_s, ceiling)
        up_wait_s = up_wait_s - shares[0] * under_way_s[0]
        server_wait_s = server_wait_s - shares[1] * under_way_s[1]
        down_wait_s = down_wait_s - shares[2] * under_way_s[2]
        throughput = least(n / (network.delay_s + up_wait_s + server_wait_s + down_wait_s), ceiling)
        up, server, down = throughput * up_wait_s, throughput * server_wait_s, throughput * down_wait_s
        yield throughput


def _hybrid_shares(
    links_s: tuple[Numbers, Numbers], n: int, waits_s: Numbers, under_way_s: tuple[Numbers, ...], ceiling: Numbers
) -> tuple[Numbers, Numbers, Numbers]:
    """(1 - gamma) / 2 of the links at the fixed point X = n / T(gamma(X S^U), gamma(X S^D)), by Newton's method.

    X T(X) - n is convex and rises up to 1 / max S. The search begins where it is positive, or at 1 / max S.
    """
    most_s = 0.5 * under_way_s[0], 0.5 * under_way_s[2]
    throughput = np.minimum(n / (waits_s - most_s[0] - most_s[1]), ceiling)
    for _ in range(_MOST_STEPS):
        gamma = _gamma(throughput * links_s[0]), _gamma(throughput * links_s[1])
        takes_s = waits_s - (1.0 - gamma[0]) * most_s[0] - (1.0 - gamma[1]) * most_s[1]
        slope = (gamma[0] > 0.0) * most_s[0] * links_s[0] + (gamma[1] > 0.0) * most_s[1] * links_s[1]
        step = (throughput * takes_s - n) / (takes_s + throughput * slope / (1.0 - SHARING_BEGINS))
        found = np.minimum(throughput - step, ceiling)
        if (abs(found - throughput) <= _SETTLED * throughput).all():
            break
        throughput = found
    return 0.5 * (1.0 - gamma[0]), 0.0, 0.5 * (1.0 - gamma[1])


def _gamma(utilisation: Numbers) -> Numbers:
    """g (eq. 4): the share of overlapping transfers on a link."""
    return np.minimum(np.maximum((utilisation - SHARING_BEGINS) / (1.0 - SHARING_BEGINS), 0.0), 1.0)
