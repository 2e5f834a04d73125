"""One stretch of a trial's training, from a checkpoint to an iteration count, as one worker of its gang sees it.

This is the seam between a backend (which starts processes) and training (which knows nothing of Ray): a backend calls
`run_segment` in every worker of the gang and passes on what rank 0 yields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rubberband.executor.core.events import CheckpointRef, FailureKind
from rubberband.values.adaptive import AdaptiveBatch, BatchLimits, BatchMode, BatchPoint, BatchUse


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """What one worker is told to do."""

    trial: int
    attempt: int
    config: Mapping[str, Any]
    seed: int
    """Seed of the trial: initial weights, data order, and the random state of every iteration follow from it."""
    metric: str
    """The metric that every report must carry, finite."""
    rank: int
    num_workers: int
    rendezvous: str | None
    """`tcp://host:port` of rank 0's store; None for a gang of one."""
    device: Literal["cpu", "cuda"]
    from_iterations: int
    until_iterations: int
    checkpoint: CheckpointRef | None
    num_instances: int = 1
    """That the gang spans."""
    batch: AdaptiveBatch | None = None
    """How the batch size may be adapted; None: it is fixed."""
    known_points: tuple[BatchPoint, ...] = ()
    """Steps that were timed before, by profiling; the agent starts with them."""
    batch_mode: BatchMode = "adapt"
    """Where the batch may be adapted: adapt it, or, for profiling, hold or sweep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentStarted:
    """Startup is over; the first step begins (rank 0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRepeated:
    """An iteration is done again that had been reported, since the checkpoint does not hold it (rank 0)."""

    iterations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """What is told of the batches of an iteration; empty where they are fixed."""

    batches: tuple[BatchUse, ...] = ()
    """The sizes that were used, in order."""
    limits: BatchLimits | None = None
    """Which sizes there are to choose among."""
    samples_per_iteration: int | None = None
    """Of an iteration at the initial batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentReport:
    """An iteration is done and its checkpoint is durable (rank 0)."""

    iterations: int
    metrics: Mapping[str, float]
    checkpoint: CheckpointRef
    told: BatchReport = BatchReport()
    saved_iterations: int | None = None
    """Iterations that the checkpoint really holds, where those are fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentFailure:
    """The attempt failed on this worker (any rank). The worker process itself is well."""

    kind: FailureKind
    message: str
    details: str
    secondary: bool
    """Whether this is only the echo of another worker's failure (a broken collective)."""
    lost: bool = False
    """Whether it could not go on from its checkpoint, which is gone or not what was written."""
