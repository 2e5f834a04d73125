"""Asynchronous training in plain values: its settings, the times of its updates, and the model that plans it.

Symbols are those of Lin et al. (A Model-Based Approach to Streamlining Distributed Training for Asynchronous SGD, §3):
K workers, and S^W, S^U, S^S, S^D, the times of an update at the worker, on the uplink, at the server and on the
downlink. The functions over these values are in `rubberband.planner.queueing`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncTraining:
    """Settings of `training: {mode: async, …}`."""

    servers: int = 1
    """m, the parameter servers of each trial."""
    max_staleness: int | None = None
    """Most updates by which a worker may be ahead of the slowest one when it begins another; 0: all workers share the
    batch of each update, as in synchronous training. None: no bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncUse:
    """An iteration of asynchronous training, over all its updates. Times are means of an update, seconds."""

    workers: int
    """Workers that were there at its end."""
    servers: int
    updates: int
    """Updates that were applied."""
    duration_s: float
    """From the end of the iteration before to its own, on the servers' clock."""
    compute_s: float
    """Time to compute a gradient."""
    up_s: float
    """Time to send it."""
    wait_s: float
    """Time for which the update waited for others at a server, or its worker for the bound of staleness."""
    server_s: float
    """Time to apply it."""
    down_s: float
    """Time to fetch the parameters."""
    staleness: float
    """Mean number of updates between the parameters of a gradient and its own update."""
    max_staleness: int
    lost: int = 0
    """Gradients that were lost with their workers."""
    largest_shard: float = 1.0
    """Share of the parameters' bytes on the server that has most."""

    @property
    def updates_per_s(self) -> float:
        """X(n), updates per second; 0 if the iteration took no measurable time."""
        return self.updates / self.duration_s if self.duration_s > 0.0 else 0.0


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
