"""X(K) by the other forms of Lin et al. (§3, eqs. 2-4): first come, first served, and the hybrid; at most 1 / max S.

The product plans with a band instead (`rubberband.planner.queueing`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rubberband.planner.queueing import Floats, Network, Numbers

SHARING_BEGINS = 0.8
"""Utilisation of a link from which on its transfers overlap (eq. 4)."""
_MOST_STEPS = 20
_SETTLED = 1e-13
Links = tuple[Numbers, Numbers]
"""Values at the uplink and at the downlink."""


def first_come(network: Network, workers: int) -> Floats:
    """X(1), …, X(workers) where a link carries one transfer after another (eq. 2).

    As printed, eq. 2 exceeds 1 / max S by up to a third.
    """
    return _recursion(network, workers, lambda n, waits_s, under_way_s: (0.5, 0.5))


def hybrid(network: Network, workers: int) -> Floats:
    """The same where transfers overlap on busy links only (eqs. 3 and 4).

    The overlap on a link follows from its total utilisation by all n workers. That depends on X(n) itself, which is a
    fixed point. The utilisation by single workers, as printed, never reaches 0.8; with that at n - 1, X falls for some
    n.
    """
    return _recursion(network, workers, lambda *waits: _hybrid_shares(network, *waits))


def _recursion(network: Network, workers: int, passed: Callable[[int, Numbers, Links], Links]) -> Floats:
    """X(n): `passed` gives the share of the transfer under way that has passed on each link."""
    up_s, server_s, down_s, found = network.up_s, network.server_s, network.down_s, []
    up: Numbers = 0.0  # mean tasks at the stations, and X, with one worker less
    server, down, throughput = up, up, up
    for n in range(1, workers + 1):
        up_wait_s, server_wait_s, down_wait_s = up_s * (1.0 + up), server_s * (1.0 + server), down_s * (1.0 + down)
        under_way_s = throughput * up_s**2, throughput * down_s**2
        shares = passed(n, network.delay_s + up_wait_s + server_wait_s + down_wait_s, under_way_s)
        up_wait_s, down_wait_s = up_wait_s - shares[0] * under_way_s[0], down_wait_s - shares[1] * under_way_s[1]
        throughput = np.minimum(n / (network.delay_s + up_wait_s + server_wait_s + down_wait_s), network.ceiling)
        up, server, down = throughput * up_wait_s, throughput * server_wait_s, throughput * down_wait_s
        found.append(throughput)
    return np.asarray(found)


def _hybrid_shares(network: Network, n: int, waits_s: Numbers, under_way_s: Links) -> Links:
    """(1 - gamma) / 2 of the links at the fixed point X = n / T(gamma(X S^U), gamma(X S^D)), by Newton's method.

    X T(X) - n is convex and rises up to 1 / max S. The search begins where it is positive, or at 1 / max S.
    """
    up_s, down_s, ceiling = network.up_s, network.down_s, network.ceiling
    most_s = 0.5 * under_way_s[0], 0.5 * under_way_s[1]
    throughput = np.minimum(n / (waits_s - most_s[0] - most_s[1]), ceiling)
    for _ in range(_MOST_STEPS):
        gamma = _gamma(throughput * up_s), _gamma(throughput * down_s)
        takes_s = waits_s - (1.0 - gamma[0]) * most_s[0] - (1.0 - gamma[1]) * most_s[1]
        slope = (gamma[0] > 0.0) * most_s[0] * up_s + (gamma[1] > 0.0) * most_s[1] * down_s
        step = (throughput * takes_s - n) / (takes_s + throughput * slope / (1.0 - SHARING_BEGINS))
        found = np.minimum(throughput - step, ceiling)
        if (abs(found - throughput) <= _SETTLED * throughput).all():
            break
        throughput = found
    return 0.5 * (1.0 - gamma[0]), 0.5 * (1.0 - gamma[1])


def _gamma(utilisation: Numbers) -> Numbers:
    """g (eq. 4): the share of overlapping transfers on a link."""
    return np.minimum(np.maximum((utilisation - SHARING_BEGINS) / (1.0 - SHARING_BEGINS), 0.0), 1.0)
