"""Asynchronous training in plain values: what the user asks for, and what an iteration of it was like.

A gang has n workers and m parameter servers. A worker computes the gradient of a batch of its own and sends it to the
servers, which apply it at once and return the parameters; it waits for no other worker (Lin et al., §2).
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
