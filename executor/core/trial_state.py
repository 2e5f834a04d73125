"""State of a trial: its status, reports, checkpoints and artifacts. Plain data; the controller writes it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rubberband.executor.core.events import CheckpointRef, FailureKind, Gang
from rubberband.values.adaptive import BatchUse
from rubberband.values.asynchronous import AsyncUse
from rubberband.values.balance import BalanceUse
from rubberband.values.machine_use import MachineUse


class TrialStatus(StrEnum):
    """Status of a trial."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    """Its iterations of the stage are done, and it waits for SYNC."""
    STOPPED = "stopped"
    """Not promoted, or stopped by the user (`TrialState.stopped_at`)."""
    COMPLETED = "completed"
    FAILED = "failed"


UNDER_WAY = (TrialStatus.QUEUED, TrialStatus.RUNNING, TrialStatus.PAUSED)
"""Statuses of trials that are not over."""


@dataclass(slots=True, kw_only=True)
class TrialReport:
    """One point of a trial's learning curve."""

    reported_at: float
    iterations: int
    metrics: Mapping[str, float]
    stage: int
    batches: tuple[BatchUse, ...] = ()
    updates: AsyncUse | None = None
    """Updates of asynchronous training; None where it is synchronous."""
    saved_iterations: int | None = None
    """That the latest checkpoint then really held; None: all of them."""
    balance: BalanceUse | None = None
    use: tuple[MachineUse, ...] = ()

    @property
    def unsaved_iterations(self) -> int:
        """Iterations that a trial which goes on from here trains again."""
        return 0 if self.saved_iterations is None else self.iterations - self.saved_iterations


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSpan:
    """The configuration that trains a trial from some iteration on, until its next one."""

    after: int
    """Iterations done before."""
    trial: int
    """The trial that trained them, or is to: the trial itself, or one whose checkpoint it has taken over."""
    configuration: Mapping[str, Any] | None
    """None: the one with which that trial began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A file that a trial gave to be kept with it."""

    name: str
    file: CheckpointRef
    iterations: int
    """Iterations after which it was saved."""
    saved_at: float


@dataclass(slots=True, kw_only=True)
class TrialState:
    """One trial: a configuration's training, over all stages; the configuration changes if the trial is forked."""

    trial: int
    status: TrialStatus = TrialStatus.QUEUED
    iterations: int = 0
    """Acknowledged: journalled, and held by a durable checkpoint or repeated from it."""
    checkpoint: CheckpointRef | None = None
    checkpoint_iterations: int = 0
    """Iterations after which it was written."""
    before: CheckpointRef | None = None
    """The checkpoint before it, to go back to; None: there is none."""
    before_iterations: int = 0
    best: CheckpointRef | None = None
    """The checkpoint of its best evaluated iteration, if that is kept (`Job.keep_best`); it may be one of both."""
    best_iterations: int = 0
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    """Name -> a file that it gave to be kept."""
    reports: list[TrialReport] = field(default_factory=list)
    """One for each iteration."""
    inherited: int = 0
    """The first reports that are another trial's, whose checkpoint it has taken over."""
    left: list[TrialReport] = field(default_factory=list)
    """Reports that it made before it took over another trial's checkpoint."""
    configured: tuple[ConfigSpan, ...] = ()
    """The configurations that have trained it, in order; empty: only the one with which it began."""
    attempt: int = 0
    failures: int = 0
    gpu_failures: int = 0
    """Failures of machines, which are not among its own."""
    failure: tuple[FailureKind, str] | None = None
    """The latest failure, also of a trial that was tried again."""
    gang: Gang = ()
    """Slots of its present attempt, or of its latest."""
    allocation: int = -1
    """Index of its latest stretch on a gang in `State.allocations`."""
    progress_at: float = 0.0
    """Instant of its start or its latest report."""
    due_at: float = math.inf
    """Instant at which it is taken to hang, unless it makes progress before."""
    width: int = 0
    """GPUs of its next attempt, where it waits for another gang within a stage; 0: as planned."""
    last_stage: int = 0
    joined_stage: int | None = None
    """The stage that it was added to, if that was not the first one of its bracket: it trains there from zero."""
    clone_of: int | None = None
    """The trial that it is a change of."""
    rung: int = 0
    """How often it was promoted within its stage."""
    ended: bool = False
    """Whether it has ended by itself: it trains no more, and its latest report counts at every SYNC or rung."""
    stopped_at: float | None = None
    """Instant at which the user stopped it: it ranks at no SYNC, and may still be the best. None: not by the user."""

    @property
    def unsaved_iterations(self) -> int:
        """Iterations that its next attempt trains again."""
        return self.reports[-1].unsaved_iterations if self.reports else 0

    @property
    def has_reported(self) -> bool:
        """Whether its present configuration has a result."""
        return len(self.reports) > self.inherited

    @property
    def made(self) -> list[TrialReport]:
        """The reports that it made itself, in order."""
        return [*self.left, *self.reports[self.inherited :]] if self.left or self.inherited else self.reports

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of its latest report; empty before the first one with its present configuration."""
        return self.reports[-1].metrics if self.has_reported else {}

    def metric(self, name: str) -> float | None:
        """The latest value of a metric; None before the first report with its present configuration."""
        return self.metrics.get(name)

    def files(self) -> Iterator[CheckpointRef]:
        """Yield all that it has in the checkpoint store: checkpoints and artifacts."""
        yield from (file for checkpoint, _ in self.kept() for file in checkpoint.files())
        yield from (artifact.file for artifact in self.artifacts.values())

    def kept(self) -> Iterator[tuple[CheckpointRef, int]]:
        """Yield the checkpoints that it refers to, the latest first, each with the iterations that it holds."""
        if self.checkpoint is not None:
            yield self.checkpoint, self.checkpoint_iterations
        if self.before is not None:
            yield self.before, self.before_iterations
        if self.best is not None and self.best not in (self.checkpoint, self.before):
            yield self.best, self.best_iterations
