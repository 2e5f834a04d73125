"""Asynchronous training in plain values: the four times of an update, and the model that it is planned with.

Symbols are those of Lin et al. (A Model-Based Approach to Streamlining Distributed Training for Asynchronous SGD, §3):
K workers, and S^W, S^U, S^S, S^D, the times of an update at the worker, on the uplink, at the server and on the
downlink. The functions over these values are in `rubberband.planner.queueing`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncTimes:
    """Mean seconds of one update of a worker that trains alone, by the place where they pass (§3.1); all at least 0.

    With several servers, the transfers are those of the worker's own link, and the server's time is the longest one.
    """

    compute_s: float
    """S^W: to compute a gradient."""
    up_s: float
    """S^U: to send the gradient."""
    server_s: float
    """S^S: to apply it."""
    down_s: float
    """S^D: to fetch the parameters."""

    @property
    def update_s(self) -> float:
        """Seconds of a whole update: 1 / X(1)."""
        return self.compute_s + self.up_s + self.server_s + self.down_s


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncProfile:
    """The model that asynchronous training is planned with."""

    times: AsyncTimes
    """Measured with the servers below."""
    updates_per_iteration: float
    """Updates of an iteration, by all workers together."""
    overhead_s: float = 0.0
    """Time that one worker spends on an iteration beside its updates: evaluation, checkpoint."""
    servers: int = 1
    """m, the parameter servers."""
    largest_shard: float | None = None
    """Share of the model's bytes on the server that holds most; None: 1 / m, an even split."""
    blend: float | None = None
    """Place of the throughput in its band, measured with two or more workers: 0 is the low end, 1 the high end. None:
    not measured."""

    @property
    def hottest_share(self) -> float:
        """Share of the bytes that the busiest server's links carry."""
        return 1.0 / self.servers if self.largest_shard is None else self.largest_shard
