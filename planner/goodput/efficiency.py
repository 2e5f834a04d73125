"""What a sample is worth in a larger batch (Pollux §3.1, eq. 6). How phi is measured is not its business."""

from __future__ import annotations

import numpy as np

from rubberband.planner.goodput.throughput import Floats, Reals


def efficiency(noise_scale: Reals, initial: Reals, batch_size: Reals) -> Floats:
    """EFFICIENCY(M) = (phi + M0) / (phi + M) (eq. 6): progress per sample, relative to the initial batch size.

    1 at M0 and for an infinite phi; M0 / M for phi = 0. Arguments broadcast; phi >= 0, 0 < M0 <= M.
    """
    growth = np.asarray(batch_size, dtype=np.float64) - initial
    return np.asarray(1.0 - growth / (np.asarray(noise_scale) + np.asarray(batch_size)))


def gain(noise_scale: Reals, initial: Reals, batch_size: Reals) -> Floats:
    """M / M0 * EFFICIENCY(M): how many steps at M0 one step at M is worth, from 1 to M / M0.

    It is AdaScale's gain. With the variance sigma^2 = tr Sigma / M0 of a gradient at M0, mu^2 = |g|^2, and
    S = M / M0, that is r = (sigma^2 + mu^2) / (sigma^2 / S + mu^2) (Johnson et al. 2020, eq. 4). Divided by mu^2, with
    phi = tr Sigma / |g|^2 = M0 sigma^2 / mu^2, r = (phi / M0 + 1) / (phi / M + 1) = M / M0 * (phi + M0) / (phi + M).
    """
    return np.asarray(np.asarray(batch_size) / np.asarray(initial) * efficiency(noise_scale, initial, batch_size))
