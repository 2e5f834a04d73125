"""A segment: part of a trial's training, from a checkpoint to an iteration count, for one worker of its gang.

This is the interface between a backend, which starts processes, and training, which does not know Ray: a backend calls
`run_segment` in every worker of the gang and passes on the items of rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rubberband.executor.core.events import CheckpointRef, FailureKind
from rubberband.executor.training.trial import Device
from rubberband.values.adaptive import AdaptiveBatch, BatchLimits, BatchMode, BatchPoint, BatchUse
from rubberband.values.asynchronous import AsyncTraining, AsyncUse
from rubberband.values.balance import Balance, BalanceUse
from rubberband.values.machine_use import MachineUse


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Order to one worker."""

    trial: int
    attempt: int
    config: Mapping[str, Any]
    seed: int
    """Seed of the trial, for initial weights, data order, and the random state of every iteration."""
    data_seed: int
    """Seed of the experiment, for what makes data, the same in all trials."""
    metric: str
    """The metric that every report must carry, finite."""
    rank: int
    num_workers: int
    rendezvous: str | None
    """`tcp://host:port` of rank 0's store; None for a gang of one."""
    device: Device
    from_iterations: int
    until_iterations: int
    checkpoint: CheckpointRef | None
    num_instances: int = 1
    slots_on_machine: int = 1
    """Slots of the worker's machine, which share its CPUs."""
    trials_per_gpu: int = 1
    """Trials that share the worker's GPU, and its memory in equal parts."""
    batch: AdaptiveBatch | None = None
    """Settings of adaptive batches; None: the batch size is fixed."""
    balance: Balance = field(default_factory=Balance)
    """How the samples of a batch are divided among the workers."""
    verify: bool = True
    """Whether the weights of all workers are compared at the end."""
    known_points: tuple[BatchPoint, ...] = ()
    """Steps that profiling timed; the agent starts with them."""
    batch_mode: BatchMode = "adapt"
    """Whether to adapt the batch, or, for profiling, hold or sweep it."""
    max_iterations: int | None = None
    """Iterations of a trial that trains to the end, for LR schedules; None: `until_iterations`."""
    training: AsyncTraining | None = None
    """Settings of asynchronous training; None: it is synchronous."""
    servers: tuple[str, ...] = ()
    """`host:port` of each parameter server."""
    secret: str = ""
    """Lets a worker in at the servers; hexadecimal digits."""
    instance: str = ""
    """Name of the worker's instance, if that is another machine than the driver's."""
    most_per_gpu: int | None = None
    """The most samples that go through the model at once, after its gang ran out of memory; None: as the trial says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentStarted:
    """Start-up is over; the first step begins, or has ended if it compiled the model (rank 0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRepeated:
    """A reported iteration was repeated, since the checkpoint does not hold it (rank 0)."""

    iterations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """The batches of an iteration, and how they were divided; no batches if they are fixed."""

    batches: tuple[BatchUse, ...] = ()
    """Sizes that were used, in order."""
    limits: BatchLimits | None = None
    samples_per_iteration: int | None = None
    """Samples of an iteration at the initial batch size."""
    updates: AsyncUse | None = None
    """Updates of asynchronous training; None for synchronous."""
    balance: BalanceUse | None = None
    """Shares of the workers and their times; None if they are equal by the settings, or were not exchanged since the
    last report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentReport:
    """An iteration is done and its checkpoint, if it has one, is durable (rank 0)."""

    iterations: int
    metrics: Mapping[str, float]
    checkpoint: CheckpointRef | None
    """None between checkpoints."""
    batch: BatchReport = BatchReport()
    saved_iterations: int | None = None
    """Iterations in the latest checkpoint, if they are fewer."""
    ended: bool = False
    """Whether the trial has ended by itself: this is its last report."""
    use: tuple[MachineUse, ...] = ()
    """The use of rank 0's machine since the report before, in rows of a minute at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentUse:
    """The use of its machine by a worker that reports nothing (other ranks than 0), since the one before."""

    rank: int
    use: tuple[MachineUse, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentArtifact:
    """A file that the trial gave to be kept is durable (rank 0)."""

    name: str
    iterations: int
    """Iterations after which it was saved."""
    file: CheckpointRef


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentEnded:
    """The function returned after its latest report: the trial has ended by itself (rank 0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentFailure:
    """The attempt failed on this worker (any rank); the worker process is healthy unless `context_lost`."""

    kind: FailureKind
    message: str
    details: str
    secondary: bool
    """Whether it only follows from another worker's failure (a broken collective)."""
    lost: bool = False
    """Whether its checkpoint is missing or has changed."""
    context_lost: bool = False
    """Whether the process can use its GPU no more: another one must take its place."""
    most_per_gpu: int | None = None
    """Samples at once with which the gang is to begin again, as this worker ran out of memory; None: it has failed."""
