"""The parts of a result: its trials, its stages, its instances, and their use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rubberband.executor.core.events import CheckpointRef
from rubberband.executor.result.batch_history import BalanceStretch, BatchStretch, UseStretch
from rubberband.units import counted
from rubberband.values.asynchronous import AsyncUse
from rubberband.values.offer import Place
from rubberband.values.plan import Market
from rubberband.values.ranking import Standing


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCheckpoint:
    """A checkpoint of a trial that its store still has."""

    checkpoint: CheckpointRef
    iterations: int
    """Iterations after which it was written."""
    saved_s: float
    """From the start of the run."""
    best: bool = False
    """Whether it is that of the trial's best evaluated iteration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleStep:
    """A configuration that trained a trial's weights for some iterations, before another one did."""

    after: int
    """Iterations before it."""
    trial: int
    """The trial that trained with it: the trial itself, or one whose checkpoint it has taken over."""
    configuration: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactResult:
    """A file that a trial gave to `rubberband.artifact`."""

    name: str
    file: CheckpointRef
    iterations: int
    """Iterations after which it was saved."""
    saved_s: float
    """From the start of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """One trial, with its learning curve."""

    trial: int
    status: str
    configuration: Mapping[str, Any]
    iterations: int
    metrics: Mapping[str, float]
    """Metrics of its latest report with its present configuration; empty before the first."""
    failures: int
    failure: str | None
    """Why it failed (or was retried), in one line."""
    checkpoint: CheckpointRef | None
    curve: tuple[tuple[float, int, Mapping[str, float]], ...]
    """(seconds from the start, iterations, metrics) of every report that it made itself, in order: a trial that takes
    over another's checkpoint goes on from the other's iterations."""
    bracket: int | None = None
    """None if there is only one."""
    batches: tuple[BatchStretch, ...] = ()
    """Its batch sizes, in order; empty if the batch is fixed."""
    balance: tuple[BalanceStretch, ...] = ()
    """Shares and times of its workers, in order; empty where they were equal."""
    updates: tuple[AsyncUse, ...] = ()
    """Its iterations of asynchronous training, in order; empty if it is synchronous."""
    use: tuple[UseStretch, ...] = ()
    """Its use of the machine while it trained, in order; empty where it was not measured."""
    seed: int = 0
    """The seed of its initial weights and the order of its data."""
    ended: bool = False
    """Whether it has ended by itself, after its `iterations`."""
    stopped_s: float | None = None
    """Time at which the user stopped it, from the start; None: not by the user."""
    artifacts: tuple[ArtifactResult, ...] = ()
    """Files that it gave to be kept, by name."""
    standing: Standing | None = None
    """Its value in the ranking, where that is more than its metric; None without limits of `also` and repeats."""
    checkpoints: tuple[KeptCheckpoint, ...] = ()
    """The checkpoints that are kept, the latest first: two at most while it trains, one once it is stopped."""
    schedule: tuple[ScheduleStep, ...] = ()
    """The configurations that led to its weights, in order; empty if there is only its own."""
    ended_by: str = ""
    """The rule of `search.stop` that ended it; empty: none did."""

    def __repr__(self) -> str:
        metrics = "".join(f" {name}={value:.3g}" for name, value in list(self.metrics.items())[:3])
        return f"<TrialResult {self.trial}: {self.status}, {counted(self.iterations, 'iteration')}{metrics}>"

    @property
    def present_curve(self) -> tuple[tuple[float, int, Mapping[str, float]], ...]:
        """Return the reports with its present configuration: all, unless it has taken over a checkpoint."""
        after = self.schedule[-1].after if self.schedule else 0
        return tuple(report for report in self.curve if report[1] > after) if after else self.curve

    @property
    def status_text(self) -> str:
        """Return its status, with its end by itself or by the user: `completed (ended at 5)`."""
        return self.with_end(self.status)

    def with_end(self, status: str) -> str:
        """Return a status with the trial's end, by itself, by a rule or by the user, and whether it breaks a limit."""
        if self.stopped_s is not None:
            status = f"{status} (by the user at {self.iterations})" if status == "stopped" else f"{status} (stopped)"
        elif self.ended:
            by = f" by {self.ended_by}" if self.ended_by else ""
            status = f"{status} (ended at {self.iterations}{by})"
        return f"{status}, not feasible" if self.feasible is False else status

    @property
    def is_over(self) -> bool:
        """Whether it trains no more, whatever happens: then there is nothing to stop."""
        return self.ended or self.status in ("completed", "failed", "stopped")

    @property
    def feasible(self) -> bool | None:
        """Whether it keeps the limits of `also`; None without limits, and before its first report."""
        return None if self.standing is None else self.standing.feasible

    @property
    def config(self) -> Mapping[str, Any]:
        """Its configuration."""
        return self.configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """One stage, planned against actual. Actual values of a stage that is not over count up to now."""

    stage: int
    trials: int
    iterations: int
    gpus_per_trial: int
    """By the plan in force; 1 where trials share a GPU."""
    planned_instances: int
    """By the plan at the start of the run, like everything called planned."""
    instances: int
    """Most instances held at once."""
    planned_s: float
    """Provisioning included."""
    actual_s: float | None
    """None before it started."""
    planned_cost_usd: float
    actual_cost_usd: float | None
    promoted: tuple[int, ...]
    start_s: float | None = None
    """From the start of the run; None before it started."""
    bracket: int | None = None
    """Its bracket, as the scheduler numbers them; None if there is only one."""
    rung: int = 0
    """Its number within its bracket."""
    lane: int = 0
    """Brackets of one lane run one after another, and lanes side by side."""
    trials_per_gpu: int = 1
    """Trials that share each GPU."""
    place: Place = "GPU"
    """Word for a GPU; slots share the CPUs of an instance without GPUs."""
    added: bool = False
    """Whether its bracket was added to the search: what is planned is what was planned then."""
    running: int = 0
    """Its trials that train now; so `queued`, `done` and `failed`, all 0 before it has begun."""
    queued: int = 0
    done: int = 0
    failed: int = 0
    iterations_done: int = 0
    """Sum over its trials."""
    iterations_expected: int = 0
    """Likewise, at its end: without those of trials that ended by themselves or were stopped."""

    @property
    def name(self) -> str:
        """Its number; of several brackets, `bracket.stage`."""
        return str(self.stage) if self.bracket is None else f"{self.bracket}.{self.rung}"

    @property
    def title(self) -> str:
        """Its name in a sentence."""
        return f"stage {self.stage}" if self.bracket is None else f"bracket {self.bracket} stage {self.rung}"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceResult:
    """One instance: instants in seconds from the start, and its share of the bill."""

    instance: str
    requested_s: float
    running_s: float | None
    ready_s: float | None
    ended_s: float | None
    cost_usd: float
    reason: str
    market: Market
    instance_type: str
    """The type that was bought."""
    zone: str
    """Empty without zones."""
    price_usd_per_hour: float
    """The rent; its average over the hours if each has its own price (spot)."""
    interrupted_s: float | None
    """Time of the provider's notice that it reclaims it; None without a notice."""
    preempted: bool
    """Whether the provider reclaimed it."""
    failed_start: bool = False
    """Whether it never got ready, through its own fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """A GPU's stretch of time with one trial, in seconds from the start."""

    instance: str
    gpu: int
    trial: int
    stage: int
    start_s: float
    training_s: float | None
    end_s: float
