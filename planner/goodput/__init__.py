"""The time of an optimizer step (Pollux §3.2, eqs. 8-11), and the worth of a sample in a larger batch (§3.1, eq. 6).

Every function broadcasts over its arguments.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rubberband.values.adaptive import Throughput

Floats = npt.NDArray[np.float64]
Reals = float | npt.NDArray[np.float64] | npt.NDArray[np.int64]
"""A number or an array of numbers."""


def grad_s(parameters: Throughput, per_gpu: Reals) -> Floats:
    """T_grad = alpha_grad + beta_grad m (eq. 8): seconds for one pass over m samples, forward and backward."""
    return np.asarray(parameters.alpha_grad_s + parameters.beta_grad_s * np.asarray(per_gpu), dtype=np.float64)


def sync_s(parameters: Throughput, instances: Reals, gpus: Reals) -> Floats:
    """T_sync (eq. 9): seconds to average gradients over K GPUs on N instances; 0 for a single GPU."""
    beyond = np.asarray(gpus) - 2.0
    local = parameters.alpha_local_s + parameters.beta_local_s * beyond
    node = parameters.alpha_node_s + parameters.beta_node_s * beyond
    return np.asarray(np.where(beyond < 0.0, 0.0, np.where(np.asarray(instances) > 1, node, local)))


def combined_s(compute_s: Reals, synchronise_s: Reals, gamma: float) -> Floats:
    """(T_grad^gamma + T_sync^gamma)^(1/gamma) (eq. 10), without powers of seconds, which could under- or overflow.

    Between the sum (gamma = 1) and the larger of the two (gamma -> infinity).
    """
    longer = np.maximum(compute_s, synchronise_s)
    shorter = np.minimum(compute_s, synchronise_s)
    ratio = shorter / np.where(longer > 0.0, longer, 1.0)
    return np.asarray(longer * np.exp(np.log1p(ratio**gamma) / gamma))


def step_s(parameters: Throughput, instances: Reals, gpus: Reals, per_gpu: Reals, accumulation: Reals) -> Floats:
    """T_iter (eq. 11): seconds per optimizer step of s passes without synchronisation and one with it."""
    compute_s = grad_s(parameters, per_gpu)
    last_s = combined_s(compute_s, sync_s(parameters, instances, gpus), parameters.gamma)
    return np.asarray(accumulation * compute_s + last_s)


def efficiency(noise_scale: Reals, initial: Reals, batch_size: Reals) -> Floats:
    """EFFICIENCY(M) = (phi + M0) / (phi + M) (eq. 6): progress per sample, relative to the initial batch size.

    1 at M0 and for an infinite phi; M0 / M for phi = 0. Arguments broadcast; phi >= 0, 0 < M0 <= M.
    """
    growth = np.asarray(batch_size, dtype=np.float64) - initial
    return np.asarray(1.0 - growth / (np.asarray(noise_scale) + np.asarray(batch_size)))


def gain(noise_scale: Reals, initial: Reals, batch_size: Reals) -> Floats:
    """M / M0 * EFFICIENCY(M): the number of steps at M0 that one step at M is worth, from 1 to M / M0.

    This is AdaScale's gain. With the variance sigma^2 = tr Sigma / M0 of a gradient at M0, mu^2 = |g|^2, and
    S = M / M0, it is r = (sigma^2 + mu^2) / (sigma^2 / S + mu^2) (Johnson et al. 2020, eq. 4). Divided by mu^2, with
    phi = tr Sigma / |g|^2 = M0 sigma^2 / mu^2, r = (phi / M0 + 1) / (phi / M + 1) = M / M0 * (phi + M0) / (phi + M).
    """
    return np.asarray(np.asarray(batch_size) / np.asarray(initial) * efficiency(noise_scale, initial, batch_size))
