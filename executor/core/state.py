"""The controller's state: what is known of every trial, instance and stage. Plain data; the controller writes it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from rubberband.executor.core.events import CheckpointRef, FailureKind, Gang, Outcome, RestPlanned
from rubberband.executor.core.placement import FreeSlots
from rubberband.executor.core.purse import Purse
from rubberband.executor.core.trial_index import RunningTrials, WaitingTrials
from rubberband.values.adaptive import BatchUse
from rubberband.values.offer import Offer
from rubberband.values.plan import Market, Plan, Prediction, Stage, StagePlan, StagePrediction
from rubberband.values.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything the controller is told before its first event; the journal's header holds it."""

    name: str
    stages: tuple[Stage, ...]
    plan: Plan
    prediction: Prediction
    offer: Offer
    profile: Profile
    metric: str
    mode: Literal["max", "min"]
    deadline_s: float | None = None
    """From Started."""
    deadline_at: float | None = None
    """Where the deadline is an instant: that, on the backend's clock. It is known at Started how far off it is."""
    max_cost_usd: float | None = None
    max_failures: int = 1
    """How often a trial is tried again after a failure."""
    iteration_timeout_s: float | None = None
    """A trial that trains and reports nothing for so long hangs. None: a minute, or ten times what is expected."""
    release_margin_s: float = 0.0
    """How long a release may take; the cap on the cost keeps clear of it."""
    launch_attempts: int = 3
    """How often a stage's missing instances are asked for again before the stage runs with what there is."""
    replan: bool = True
    """Whether the rest is planned again at every SYNC; False where the plan was given, or is held fixed."""
    objective: Literal["min_cost", "min_time"] = "min_cost"
    """What a replan minimises."""
    min_gpus_per_trial: int | None = None
    """Of a replan. None: the fewest that were profiled."""
    max_gpus_per_trial: int | None = None
    """Of a replan. None: the most that the plan gives."""
    confidence: float = 0.95
    """With which a replan keeps the limits, where times vary."""
    dearest_usd_per_hour: float | None = None
    """The most that an instance may turn out to cost, where dearer types may stand in. None: the offer's price."""
    lease_s: float | None = None
    """How long an instance may outlive the driver at most. None: not at all, as far as the budget is concerned."""
    boot_lease_s: float | None = None
    """The same of an instance that is not ready yet, if that is longer: it renews its lease itself then."""
    start_attempts: int | None = None
    """After so many instances in a row that never got ready, buying stops. None: no limit, as in older journals."""

    @property
    def longest_lease_s(self) -> float:
        """Of an instance that is not ready yet."""
        return max(self.lease_s or 0.0, self.boot_lease_s or 0.0)

    @property
    def largest_gang(self) -> int:
        """The most GPUs that a trial may have: by the plan, or by what a replan can know to be faster."""
        replanned = min(self.max_gpus_per_trial or 0, self.profile.largest_gpus) if self.replan else 0
        return max(replanned, *(choice.gpus_per_trial for choice in self.plan.stages))

    @property
    def reserved_usd_per_hour(self) -> float:
        """What an instance is reserved at until its price is known, and on the spot market also after that.

        With its side costs, as every price that the bill grows by."""
        rent = max(self.offer.price_usd_per_hour, self.dearest_usd_per_hour or 0.0)
        return rent + self.offer.side_usd_per_hour


class TrialStatus(StrEnum):
    """Where a trial stands."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    """It has done its stage's iterations and waits for SYNC."""
    STOPPED = "stopped"
    """It was not promoted."""
    COMPLETED = "completed"
    FAILED = "failed"


@dataclass(slots=True, kw_only=True)
class TrialReport:
    """One point of a trial's learning curve."""

    reported_at: float
    iterations: int
    metrics: Mapping[str, float]
    stage: int
    batches: tuple[BatchUse, ...] = ()
    saved_iterations: int | None = None
    """That its checkpoint really holds; None: all of them."""

    @property
    def unsaved_iterations(self) -> int:
        """Iterations that a trial which goes on from here trains again."""
        return 0 if self.saved_iterations is None else self.iterations - self.saved_iterations


@dataclass(slots=True, kw_only=True)
class TrialState:
    """One trial: a configuration's training, over all stages."""

    trial: int
    status: TrialStatus = TrialStatus.QUEUED
    iterations: int = 0
    """Acknowledged: journalled, with a durable checkpoint."""
    checkpoint: CheckpointRef | None = None
    before: CheckpointRef | None = None
    """The checkpoint of one iteration less, to go back to; None: there is none."""
    reports: list[TrialReport] = field(default_factory=list)
    attempt: int = 0
    failures: int = 0
    failure: tuple[FailureKind, str] | None = None
    """The latest failure, also of a trial that was tried again."""
    gang: Gang = ()
    """Where it trains now, or trained last."""
    allocation: int = -1
    """Index of its latest stretch on a gang in `State.allocations`."""
    progress_at: float = 0.0
    """When it was started, or last reported."""
    due_at: float = math.inf
    """When it is taken to hang, unless it tells of progress before."""
    last_stage: int = 0

    def metric(self, name: str) -> float | None:
        """The latest value of a metric; None before the first report."""
        return self.reports[-1].metrics.get(name) if self.reports else None


class InstanceStatus(StrEnum):
    """Where an instance stands."""

    REQUESTED = "requested"
    RUNNING = "running"
    """Billed, its workers not yet warm."""
    READY = "ready"
    LEAVING = "leaving"
    """It was interrupted, and is taken away soon: trials on it go on until their next report, and no other starts."""
    RELEASING = "releasing"
    ENDED = "ended"
    REFUSED = "refused"


LIVE = frozenset({InstanceStatus.REQUESTED, InstanceStatus.RUNNING, InstanceStatus.READY})
"""An instance that is held, or on its way."""
GONE = frozenset({InstanceStatus.ENDED, InstanceStatus.REFUSED})
"""An instance that costs nothing any more."""


@dataclass(slots=True, kw_only=True)
class InstanceRecord:
    """One rented instance and its instants, which the bill is reckoned from."""

    instance: str
    requested_at: float
    status: InstanceStatus = InstanceStatus.REQUESTED
    running_at: float | None = None
    ready_at: float | None = None
    ended_at: float | None = None
    reason: str = ""
    market: Market = "on_demand"
    instance_type: str = ""
    """What was bought; empty: the offer's."""
    zone: str = ""
    price_usd_per_hour: float | None = None
    """At purchase; None: the offer's, for the market."""
    hour_prices_usd: tuple[float, ...] | None = None
    """USD per hour of each hour since it began to run, as far as is known; None: its price stays."""
    first_lease_s: float | None = None
    """How long it may live, once it runs, before the driver can shorten its lease; None: as long as any lease."""
    leased_until: float | None = None
    """How long it may live that is released, or that another driver held: it is told no shorter lease any more."""
    interrupted_at: float | None = None
    """When the provider gave notice that it takes the instance away."""
    preempted: bool = False
    """Whether it ended because the provider took it away."""
    instead_of_spot: bool = False
    """Whether it was bought on demand in a stage that is planned on spot, since there was no spot capacity."""
    failed_start: bool = False
    """Whether it was started and never got ready, by a fault of its own: neither released nor taken away."""


@dataclass(slots=True, kw_only=True)
class Allocation:
    """A gang's stretch of time: one attempt of one trial."""

    trial: int
    attempt: int
    stage: int
    gang: Gang
    started_at: float
    """The order to start; startup begins."""
    training_at: float | None = None
    """The first step."""
    repeated_until: float | None = None
    """When it had done again what its checkpoint did not hold; None where that held all."""
    ended_at: float | None = None
    preempted: bool = False
    """Whether it ended because the provider took an instance of the gang away, or was about to."""


@dataclass(slots=True, kw_only=True)
class StageRecord:
    """What a stage really took."""

    stage: int
    trials: tuple[int, ...]
    started_at: float
    """Its first command: the launch of its instances, if the cluster grows."""
    training_at: float | None = None
    """Its instances are there; its trials start."""
    ended_at: float | None = None
    """SYNC."""
    ranking: tuple[int, ...] = ()
    """Best first, at SYNC; failed ones are not in it."""
    widest: int = 0
    """Most instances held at once."""


class Phase(StrEnum):
    """What the controller waits for."""

    NEW = "new"
    SCALING = "scaling"
    TRAINING = "training"
    PLANNING = "planning"
    """SYNC is over; the driver plans the rest and answers with RestPlanned, which the journal keeps."""
    ENDING = "ending"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setback:
    """A trial went back, since its checkpoint was lost."""

    at: float
    trial: int
    from_iterations: int
    to_iterations: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """The driver stood still, paused or with its machine asleep."""

    at: float
    """Its end."""
    paused_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """More time or money than an experiment had, from `at` on; None is no limit."""

    at: float
    deadline_before_s: float | None
    deadline_s: float | None
    max_cost_before_usd: float | None
    max_cost_usd: float | None


@dataclass(slots=True, kw_only=True)
class State:
    """Everything; `fold(events)` gives it again."""

    trials: list[TrialState]
    plan: Plan
    """In force: the job's, until a replan changes it."""
    predicted: tuple[StagePrediction, ...]
    """By the plan in force; a stage that is over stays as it was predicted when it began."""
    profile: Profile
    """Corrected by what was measured, at the latest replan."""
    decisions: list[RestPlanned] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    """The trial of each failed attempt, in order."""
    granted: list[Granted] = field(default_factory=list)
    setbacks: list[Setback] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)
    requests: set[str] = field(default_factory=set)
    """Ids of what was asked of the driver and taken in."""
    instances: dict[str, InstanceRecord] = field(default_factory=dict)
    allocations: list[Allocation] = field(default_factory=list)
    stages: list[StageRecord] = field(default_factory=list)
    phase: Phase = Phase.NEW
    started_at: float = 0.0
    ended_at: float | None = None
    now: float = 0.0
    """The latest event's instant."""
    outcome: Outcome | None = None
    reason: str = ""
    stranded: bool = False
    """Whether it ended for want of instances alone: a resume may find some."""
    exhausted_usd: float | None = None
    """The cap that it ended by: with a larger one a resume goes on."""
    stopped: str = ""
    """Why the latest driver gave up, until another one goes on; empty if it did not."""
    resumed_at: list[float] = field(default_factory=list)
    """When drivers went on with it."""
    woke_at: list[float] = field(default_factory=list)
    """When the machine had slept: what took until then tells nothing of how fast trials are."""
    just_woke: bool = False
    """Whether the driver stood still until just now: what it holds may have ended, and be told next."""
    paused_s: float = 0.0
    """Between having ended and being resumed; nothing was held."""
    launches_left: int = 0
    round_until: float = -math.inf
    """Launches before this instant belong to the attempt before."""
    relaunch_at: float = 0.0
    """Not before this instant is a refused launch, or one that came to nothing, tried again."""
    failed_starts: int = 0
    """Instances in a row that never got ready, since the last one that did."""
    spot_dry_until: float = -math.inf
    """Until then spot counts as not to be had: it was refused, or taken away too often."""
    spot_dry_reason: str = ""
    purse: Purse | None = field(default=None, init=False, repr=False, compare=False)
    """What is known of the bill since it last took another course; None: to be reckoned again."""
    settled_usd: float = field(default=0.0, init=False, repr=False, compare=False)
    """What instances have cost that are gone, as far as the purse has been told of them."""
    target: tuple[int, int] | None = field(default=None, init=False, repr=False, compare=False)
    """A stage, and how many iterations a trial has done in all at its end."""
    changes: int = field(default=0, init=False, repr=False, compare=False)
    """How often a trial was given another status."""
    _current: list[InstanceRecord] | None = field(default=None, init=False, repr=False, compare=False)
    _is_current: bool = field(default=False, init=False, repr=False, compare=False)
    _gone: list[InstanceRecord] = field(default_factory=list, init=False, repr=False, compare=False)
    _live: list[InstanceRecord] | None = field(default=None, init=False, repr=False, compare=False)
    _ready: list[InstanceRecord] = field(default_factory=list, init=False, repr=False, compare=False)
    _is_ready: bool = field(default=False, init=False, repr=False, compare=False)
    _leaving: list[InstanceRecord] | None = field(default=None, init=False, repr=False, compare=False)
    _used_gpu_s: dict[str, float] | None = field(default=None, init=False, repr=False, compare=False)
    _free: tuple[list[InstanceRecord], FreeSlots] | None = field(default=None, init=False, repr=False, compare=False)
    """For those instances."""
    _runners: RunningTrials | None = field(default=None, init=False, repr=False, compare=False)
    _waiters: WaitingTrials | None = field(default=None, init=False, repr=False, compare=False)

    # Whoever changes a trial's status or an instance's record says so, since views of them are kept.

    def put(self, trial: TrialState, status: TrialStatus) -> None:
        """Give a trial its status; one that runs has its gang."""
        before, trial.status = trial.status, status
        if before is status:
            return
        self.changes += 1
        for kept, of in ((self._runners, TrialStatus.RUNNING), (self._waiters, TrialStatus.QUEUED)):
            if kept is not None and before is of:
                kept.remove(trial)
            elif kept is not None and status is of:
                kept.add(trial)
        if self._free is not None and before is TrialStatus.RUNNING:
            self._free[1].give_back(trial.gang)
        elif self._free is not None and status is TrialStatus.RUNNING:
            self._free[1].take(trial.gang)

    def rent_changed(self) -> None:
        """Something about an instance, or about what is paid for, is not as it was."""
        self.purse = self._live = self._leaving = None
        self._is_current = self._is_ready = False

    def add(self, record: InstanceRecord) -> None:
        """Keep the record of an instance that is asked for."""
        self.instances[record.instance] = record
        if self._current is not None:
            self._current.append(record)
        self.rent_changed()

    def current(self) -> list[InstanceRecord]:
        """Instances that are not gone, in the order in which they were asked for."""
        if self._current is None or not self._is_current:
            known = list(self.instances.values()) if self._current is None else self._current
            self._gone += [record for record in known if record.status in GONE]
            self._current = [record for record in known if record.status not in GONE]
            self._is_current = True
        return self._current

    def just_gone(self) -> list[InstanceRecord]:
        """Instances that are gone since this was asked for the last time."""
        gone, self._gone = self._gone, []
        return gone

    def reckon_gone_again(self) -> None:
        """What an instance that is gone has cost is not what the purse has been told."""
        self._gone, self.settled_usd = [r for r in self.instances.values() if r.status in GONE], 0.0
        self.rent_changed()

    def live(self) -> list[InstanceRecord]:
        """Instances that are held or on their way, longest billed first; not those that are taken away soon."""
        if self._live is None:
            found = [record for record in self.current() if record.status in LIVE]
            found.sort(key=lambda record: (_or_never(record.running_at), record.instance))
            self._live = found
        return self._live

    def leaving(self) -> list[InstanceRecord]:
        """Instances that are taken away soon."""
        if self._leaving is None:
            self._leaving = [r for r in self.current() if r.status is InstanceStatus.LEAVING]
        return self._leaving

    def chosen(self) -> StagePlan:
        """What the plan in force gives the current stage."""
        return self.plan.stages[self.stages[-1].stage]

    def ready(self) -> list[InstanceRecord]:
        """Instances that trials can start on: the same list, as long as they are the same."""
        if not self._is_ready:
            found = [record for record in self.live() if record.status is InstanceStatus.READY]
            self._ready, self._is_ready = self._ready if found == self._ready else found, True
        return self._ready

    def free_slots(self, width: int) -> FreeSlots:
        """What is free of the instances that trials can start on; each has `width` GPUs."""
        ready = self.ready()
        if self._free is None or self._free[0] is not ready:
            slots = FreeSlots((r.instance for r in ready), width, (t.gang for t in self.running()))
            self._free = ready, slots
        return self._free[1]

    @property
    def runners(self) -> RunningTrials:
        """The trials that train now."""
        if self._runners is None:
            self._runners = RunningTrials(t for t in self.trials if t.status is TrialStatus.RUNNING)
        return self._runners

    @property
    def waiters(self) -> WaitingTrials:
        """The trials of the current stage that wait for a slot."""
        if self._waiters is None:
            self._waiters = WaitingTrials(t for t in self.trials if t.status is TrialStatus.QUEUED)
        return self._waiters

    def running(self) -> Sequence[TrialState]:
        """Trials that train now, by number."""
        return self.runners.sorted()

    def queued(self) -> Sequence[TrialState]:
        """Trials of the current stage that wait for a slot, in the order in which they get one."""
        return self.waiters.sorted()

    def end(self, use: Allocation, at: float) -> None:
        """A gang's stretch is over."""
        use.ended_at = at
        if self._used_gpu_s is not None:
            _add_gpu_s(self._used_gpu_s, use, at)

    def used_gpu_s(self) -> Mapping[str, float]:
        """Instance -> GPU-seconds of the stretches that are over; of those on several instances, the first's."""
        if self._used_gpu_s is None:
            self._used_gpu_s = {}
            for use in self.allocations:
                if use.ended_at is not None:
                    _add_gpu_s(self._used_gpu_s, use, use.ended_at)
        return self._used_gpu_s

    def allocation(self, trial: TrialState) -> Allocation:
        """The trial's latest stretch on a gang; it has had one."""
        return self.allocations[trial.allocation]


def _add_gpu_s(used: dict[str, float], use: Allocation, ended_at: float) -> None:
    instance = use.gang[0].instance
    used[instance] = used.get(instance, 0.0) + len(use.gang) * max(0.0, ended_at - use.started_at)


def _or_never(instant: float | None) -> float:
    return math.inf if instant is None else instant
