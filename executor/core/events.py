"""Events and commands: the whole language between the controller and a backend.

Events are facts, appended to the journal before their commands run; commands are orders, derived from events and
never stored. All instants (`occurred_at`, `running_at`, …) are seconds on the backend's clock (Unix time on real ones).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rubberband.executor.core.own_speeds import OwnSpeed
from rubberband.values.adaptive import BatchLimits, BatchMode, BatchUse
from rubberband.values.asynchronous import AsyncUse
from rubberband.values.balance import BalanceUse
from rubberband.values.machine_use import MachineUse
from rubberband.values.plan import Market, Plan, Stage, StagePrediction
from rubberband.values.profile import Profile
from rubberband.values.worth import RestWorth

FailureKind = Literal["raised", "not_a_number", "no_metric", "hung", "died", "checkpoint", "gpu", "memory"]
"""Why an attempt failed: the trial's code raised; its metric is NaN or infinite, or missing; no report in time; its
process ended; its checkpoint could not be written or read back; its GPU or the driver is at fault; the fewest samples
at once do not fit into memory."""

WITHOUT_CHECKPOINT = (
    "reported without a checkpoint. Pass checkpoint= to rubberband.report, or let a program save below ${checkpoint}: "
    "without it trials are trained from zero after every stage"
)
"""Remark on a function or a program; the subject of the sentence is the trial."""

Outcome = Literal["done", "cancelled", "budget", "failed"]
"""How an experiment ended."""

Recall = Literal["at_checkpoint", "at_once"]
"""Time at which trials stop on instances that are to be given back: at their next checkpoints, or now, where another
experiment was promised the instances. They go on from their latest checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Slot:
    """One GPU (real or logical) of one instance, or a trial's share of one; it holds one warm worker."""

    instance: str
    gpu: int
    """Number of the GPU. Where trials share GPUs, that of the slot (`placement.gpu_of`)."""


Gang = tuple[Slot, ...]
"""The slots of one trial's workers; rank i trains on the i-th."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRef:
    """Location of a checkpoint, and its hash."""

    url: str
    digest: str
    """SHA-256 of the file, in hexadecimal."""
    size_bytes: int
    parts: tuple[CheckpointRef, ...] = ()
    """Files that other workers of the gang saved of the same state; it is whole with all of them."""

    def files(self) -> tuple[CheckpointRef, ...]:
        """Return it and its parts: all that it has in the checkpoint store."""
        return self, *self.parts

    @property
    def total_bytes(self) -> int:
        """The bytes of all its files."""
        return sum(file.size_bytes for file in self.files())


# Events


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened at `occurred_at`."""

    occurred_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Event):
    """The experiment begins: its first launch may be ordered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceRunning(Event):
    """SCALE is over: the provider runs (and bills) the instance since `running_at`."""

    instance: str
    running_at: float
    price_usd_per_hour: float | None = None
    """At purchase; None: that of the offer."""
    instance_type: str = ""
    """Purchased type; empty: the offer's."""
    zone: str = ""
    hour_prices_usd: tuple[float, ...] | None = None
    """USD per hour of each hour since it began to run, as far as is known; None: its price stays."""
    ended_at: float | None = None
    """Instant of its end, if it had ended when it was first seen: InstanceLost follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstancePriced(Event):
    """Prices of the begun hours of an instance (spot), also of one that is gone.

    They replace earlier prices: hours that the provider waives cost nothing.
    """

    instance: str
    hour_prices_usd: tuple[float, ...]
    """USD per hour of each hour since it began to run, as far as is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceReady(Event):
    """INIT_INSTANCE is over: the instance's workers are warm."""

    instance: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceRefused(Event):
    """The provider did not start the instance; nothing is billed for it."""

    instance: str
    reason: str
    failed_start: bool = False
    """Whether its start was begun and failed, rather than refused for want of capacity, quota or rights."""
    sold_out: bool = False
    """Whether its market has none for this account now, in no zone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceLost(Event):
    """The instance is gone without having been released, at `ended_at`; its trials go on elsewhere."""

    instance: str
    ended_at: float
    reason: str
    preempted: bool = False
    """Whether the provider took it away (spot)."""
    overslept: bool = False
    """Whether its lease expired long before this was seen: the driver's machine slept, and renewed no lease."""
    same_fault: bool = False
    """Whether it was given up after another part of its machine (a pool's), which it was held beside: one fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceInterrupted(Event):
    """The provider gave notice: it takes the instance away soon (spot). It runs, and is billed, until then."""

    instance: str
    free_if_taken: bool = False
    """Whether the provider charges nothing for a spot instance that it takes away in the first hour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceReleased(Event):
    """The provider took the instance back: it is billed until `ended_at`."""

    instance: str
    ended_at: float
    running_at: float | None = None
    """Since when it was billed, if it ran; it may have begun to after it was given up."""
    price_usd_per_hour: float | None = None
    """At purchase; None: that of the offer, or of the event that it ran."""
    instance_type: str = ""
    """Purchased type and its zone; empty: as in the event that it ran."""
    zone: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStarted(Event):
    """The gang is up and its first step begins: startup is over."""

    trial: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialReported(Event):
    """The trial has done `iterations` iterations in all, and a checkpoint holds them durably.

    Between checkpoints (a trial's `checkpoint_every`) they can be repeated from the one before, or from the beginning.
    """

    trial: int
    attempt: int
    iterations: int
    metrics: Mapping[str, float]
    checkpoint: CheckpointRef | None
    """The one written after this iteration; None between checkpoints."""
    batches: tuple[BatchUse, ...] = ()
    """The batch sizes of the iteration, in order; empty where the batch is fixed."""
    limits: BatchLimits | None = None
    """Which batches there are to choose among; None where the batch is fixed."""
    samples_per_iteration: int | None = None
    """Samples of an iteration at the initial batch size; None if the batch is fixed."""
    updates: AsyncUse | None = None
    """The updates of the iteration; None where training is synchronous."""
    saved_iterations: int | None = None
    """Iterations that the latest checkpoint really holds, if fewer: none was written after this one, or a function
    passed none of late. Later ones are trained again whenever the trial goes on. None: all of them."""
    balance: BalanceUse | None = None
    """The shares of the gang's workers and their times; None where the workers divide the batch equally."""
    ended: bool = False
    """Whether the trial has ended by itself, and trains no more; its gang is free."""
    late: bool = False
    """Whether it was under way as the experiment's end stopped its attempt. Earlier versions dropped such reports."""
    use: tuple[MachineUse, ...] = ()
    """The mean use by its workers since the report before, a minute at most each; empty where it is not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialArtifact(Event):
    """A file that the trial gave to be kept with it is durable; it replaces an earlier one of its name."""

    trial: int
    attempt: int
    name: str
    iterations: int
    """Iterations after which it was saved."""
    file: CheckpointRef


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEnded(Event):
    """A function returned after its latest report: the trial has ended by itself. Its gang is free."""

    trial: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRepeated(Event):
    """The trial has done an iteration again that it had reported before, since its checkpoint does not hold it."""

    trial: int
    attempt: int
    iterations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFailed(Event):
    """The attempt ended in a failure of the trial's own; its gang is free."""

    trial: int
    attempt: int
    kind: FailureKind
    message: str
    """One line for the report."""
    details: str = ""
    """The trace-back, for the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLost(Event):
    """The attempt could not start: its checkpoint is gone, or not what was written. Its gang is free.

    The trial has not failed. It goes back to the checkpoint before, or to its beginning.
    """

    trial: int
    attempt: int
    message: str
    """One line for the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverStopped(Event):
    """The driver gave up: the checkpoint store went away. Everything is given back, and a resume goes on."""

    reason: str
    """One line for the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveInstance:
    """An instance that the provider shows when a driver resumes."""

    instance: str
    running_at: float | None
    """None while it is still being provisioned."""
    price_usd_per_hour: float | None = None
    """At purchase; None: that of the offer."""
    hour_prices_usd: tuple[float, ...] | None = None
    """USD per hour of each hour since it began to run, as far as is known; None: its price stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedInstance:
    """An instance that ran and ended while no driver was running."""

    instance: str
    running_at: float
    ended_at: float
    price_usd_per_hour: float | None = None
    """At purchase; None: that of the offer."""
    preempted: bool = False
    hour_prices_usd: tuple[float, ...] | None = None
    """USD per hour of each hour since it began to run, as far as is known; None: its price stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverResumed(Event):
    """A new driver took over; no worker of the old one is left. Instances in neither tuple are not known to exist."""

    live: tuple[LiveInstance, ...]
    ended: tuple[EndedInstance, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestPlanned(Event):
    """After a SYNC, or within a stage, the rest was planned again. A resume adopts it and does not plan it anew."""

    stage: int
    """The first stage that it is about: the next one, or the current one where the instance cap changed within it."""
    plan: Plan
    """The whole plan; the stages before `stage` are as they were."""
    predicted: tuple[StagePrediction, ...]
    """Prediction of the stages from `stage` to the last one of its lane; costs are added to the bill."""
    profile: Profile
    """Profile that the rest was planned with: the job's, corrected by measurements."""
    changed: bool
    reason: str
    """One line for the user."""
    present_jct_s: float
    """End of the run by the plan that was in force, in seconds from the start."""
    present_cost_usd: float
    """Cost of the whole experiment by it."""
    jct_s: float
    """End of the run by the plan that is in force now, in seconds from the start."""
    cost_usd: float
    """Cost of the whole experiment by it."""
    own: Mapping[int, OwnSpeed] = field(default_factory=dict)
    """How fast each trial that goes on is, beside the profile; empty in older journals, and where all are alike."""
    worth: RestWorth | None = None
    """The chance that the rest improves the best, beside its cost; None: too little is known, or an older journal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestValued(Event):
    """More results are known, and nothing is planned again: what the rest may bring for its money was looked at."""

    worth: RestWorth | None
    """None: too little is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialsDrawn(Event):
    """A sampler drew configurations after the start. A fact like any other: a resume adopts them, and draws none."""

    first_trial: int
    configurations: tuple[Mapping[str, Any], ...]
    """One for each trial from `first_trial` on."""
    reason: str
    """How they were drawn, and from which results; for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialForked(Event):
    """A trial goes on from another trial's checkpoint, with a configuration of its own.

    It takes over that trial's reports up to there, and its own earlier ones do not count any more. It does not train
    when this is journalled. A fact like any other: a resume adopts it, and draws none.
    """

    trial: int
    parent: int
    """The trial whose checkpoint it takes."""
    iterations: int
    """Iterations that the checkpoint holds: the parent's latest, or the one before."""
    configuration: Mapping[str, Any]
    """Its own from then on."""
    changes: Mapping[str, tuple[Any, Any]]
    """Parameter -> (the parent's value, its own); None where one of them has no such parameter."""
    reason: str
    """Why, for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested(Event):
    """The user wants the experiment to end now."""

    request: str = ""
    """Its id; what was asked twice by the same one was asked once. Empty: a signal."""
    reason: str = ""
    """Why a service ends it; empty: the user does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStopRequested(Event):
    """The user wants a trial to train no more; its latest report still counts for the best one."""

    request: str
    """Its id; what was asked twice by the same one was asked once."""
    trial: int
    """Its number; one that is over, or that the job does not have, is left alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsChanged(Event):
    """The user grants more time or money: the limits in force from then on, as in `Job`; None is no limit.

    A limit is only ever raised: one that would be lower stays as it is. Or the user sets another target.
    """

    request: str
    """Its id; what was asked twice by the same one was asked once."""
    deadline_s: float | None
    """From Started."""
    max_cost_usd: float | None
    target: float | None = None
    """The new value of the metric that ends the search; None: as it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialsAdded(Event):
    """Trials join the search, numbered behind those that it has; after its end they are what a resume trains.

    The driver makes it of a request: a resume adopts the configurations, and neither checks nor draws them again.
    """

    request: str
    """Its id; what was asked twice by the same one was asked once."""
    configurations: tuple[Mapping[str, Any] | None, ...]
    """One for each trial; None: the sampler draws it when the trial starts, as where each is drawn then."""
    stages: tuple[Stage, ...] = ()
    """A bracket of that number of trials, as the scheduler makes one, where they are one; empty without SYNC."""
    reduction_factor: int | None = None
    """By which the later stages of a bracket that they join have more trials; None: in proportion."""
    sampled: int = 0
    """How many of them the sampler has drawn, or draws: the next one that is asked for follows those."""
    clone_of: int | None = None
    """The trial that they are a change of; None: of none."""
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Parameter -> (that trial's value, its own); None where one of them has no such parameter."""
    from_iterations: int = 0
    """The iterations of that trial after whose checkpoint it goes on; 0: it trains from the beginning."""
    reason: str = ""
    """How they were drawn, for the user; empty: they were given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllotmentChanged(Event):
    """From now on the experiment may hold at most `max_instances` instances, and is replanned at once.

    Where it holds more, trials stop and instances are given back.
    """

    request: str
    """Its id; what was asked twice by the same one was asked once."""
    max_instances: int | None
    """0: none, until another cap. None: as many as the offer allows."""
    promised_instances: int | None = None
    """The most that a pool promises it at any time: a plan within these stays, and each stage waits for its own. None:
    no promise."""
    recall: Recall = "at_checkpoint"
    """Time at which trials stop on the instances that are to be given back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick(Event):
    """Time passed: the controller's `wake_at` is reached, or the driver wakes that stood still."""

    paused_s: float = 0.0
    """Seconds up to now for which the driver stood still, paused or with its machine asleep; 0: it did not."""


# Commands


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """An order to the backend; carrying it out twice is harmless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchInstance(Command):
    """Rent an instance under this name, which is also the client token."""

    instance: str
    market: Market = "on_demand"
    first_lease_s: float | None = None
    """Seconds after which it ends itself, once it runs, without a longer lease; None: when the latest lease ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseInstance(Command):
    """Give the instance back; answered by InstanceReleased."""

    instance: str
    fault: str = ""
    """Why the instance is of no use, if it is to blame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTrial(Command):
    """Train `trial` on `gang` from `checkpoint` (None: from the beginning) until it has done `until_iterations` in all.

    The backend answers with TrialStarted, then TrialReported after each iteration; after the last one the gang is free.
    Iterations that the checkpoint does not hold come before that, as TrialRepeated. A trial may end by itself before:
    its last report says so, or TrialEnded follows.
    """

    trial: int
    attempt: int
    gang: Gang
    from_iterations: int
    until_iterations: int
    checkpoint: CheckpointRef | None
    batch_mode: BatchMode = "adapt"
    """Use of an adaptive batch: adapt it or, for profiling, hold or sweep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopTrial(Command):
    """End this attempt at once, whatever it does; nothing is answered, and later events of it do not count."""

    trial: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscardCheckpoint(Command):
    """Delete a checkpoint that is not gone back to any more: two newer ones are journalled, or its trial is over.

    No other trial refers to it either.
    """

    checkpoint: CheckpointRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish(Command):
    """Nothing is left to do: every instance is back."""

    outcome: Outcome
    reason: str
