"""The controller's state: what is known of every trial, stage and lane. Plain data; the controller writes it.

A job is one fleet and one or more brackets (chains of stages that halve trials of their own). Brackets of one lane run
one after another, lanes side by side; the fleet says which lane may use which instances.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

from rubberband.executor.core.events import Gang, Outcome, RestPlanned
from rubberband.executor.core.fleet import Fleet, Held, InstanceRecord
from rubberband.executor.core.history import History, SearchEnd
from rubberband.executor.core.job import Bracket, Job
from rubberband.executor.core.own_speeds import OwnSpeed
from rubberband.executor.core.placement import FreeSlots
from rubberband.executor.core.progress import BestSoFar, Curves
from rubberband.executor.core.trial_index import RunningTrials, WaitingTrials
from rubberband.executor.core.trial_state import TrialState, TrialStatus
from rubberband.planner.exact.model import least_instances as instances_for
from rubberband.values.offer import slots
from rubberband.values.plan import Plan, StagePlan, StagePrediction
from rubberband.values.profile import Profile
from rubberband.values.schedulers import Rungs


@dataclass(slots=True, kw_only=True)
class GangRun:
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
    """End of the repeated iterations that its checkpoint did not hold; None if it held all."""
    repeated: int = 0
    """The number of those."""
    ended_at: float | None = None
    preempted: bool = False
    """Whether it ended because the provider took an instance of the gang away, or was about to."""


@dataclass(slots=True, kw_only=True)
class StageRecord:
    """Actual course of a stage."""

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
    forked: tuple[int, ...] = ()
    """Trials that have taken over another's checkpoint since its SYNC."""
    widest: int = 0
    """Most instances held at once."""


class Phase(StrEnum):
    """Phase of a lane, or of the whole experiment."""

    NEW = "new"
    SCALING = "scaling"
    TRAINING = "training"
    PLANNING = "planning"
    """SYNC is over; the driver plans the rest and answers with RestPlanned, which the journal keeps."""
    ENDING = "ending"
    FINISHED = "finished"


Course = Literal["new", "running", "ending", "finished"]
"""Course of the whole experiment; while it runs, each lane has its own phase."""
_PHASES: Mapping[Course, Phase] = {"new": Phase.NEW, "ending": Phase.ENDING, "finished": Phase.FINISHED}


@dataclass(slots=True, kw_only=True)
class LaneState:
    """Brackets that run one after another on the instances that are assigned to them."""

    lane: int
    brackets: tuple[Bracket, ...]
    state: State = field(init=False, repr=False, compare=False)
    """The state that it is part of, which sets this."""
    max_instances: int
    """The most that it may have; more once a replan gives it what other lanes do not need."""
    promised_instances: int = 0
    """Its share of those that a pool promises."""
    phase: Phase = Phase.NEW
    stages: list[StageRecord] = field(default_factory=list)
    """Begun stages, in order."""
    planned_trials: float = math.inf
    """The most trials that its latest replan planned later stages of its bracket for; inf before the first one."""
    own: Mapping[int, OwnSpeed] = field(default_factory=dict)
    """How fast its trials are beside the profile, by its latest replan."""
    launches_left: int = 0
    round_until: float = -math.inf
    """Launches before this instant belong to the attempt before."""
    relaunch_at: float = 0.0
    """Not before this instant is a refused launch, or one that came to nothing, tried again."""
    replans_at_once: bool = False
    """Whether its current stage is to be planned again within it, as its share of the instance cap changed."""
    resized: int | None = None
    """The stage that was planned again within it: its trials take gangs of another width from checkpoint to
    checkpoint."""
    needs: int | None = None
    """Most instances that the trials under way may use, if trials climb rungs, ended by themselves or were stopped by
    the user. None: as many as are planned."""
    has_ended: bool = False
    """Whether any of its trials has ended by itself, or was stopped by the user."""
    rungs: Rungs = field(init=False, repr=False, compare=False)
    """Results in every rung but the last: none where the stage is one rung, up to its SYNC."""
    ends: tuple[int, tuple[int, ...]] | None = field(default=None, init=False, repr=False, compare=False)
    """A stage, and how many iterations a trial has done in all at the end of each of its rungs."""
    runners: RunningTrials = field(default_factory=lambda: RunningTrials(()), init=False, repr=False, compare=False)
    """Its trials that train now."""
    waiters: WaitingTrials = field(default_factory=lambda: WaitingTrials(()), init=False, repr=False, compare=False)
    """The trials of its current stage that wait for a slot."""
    free: tuple[list[InstanceRecord], FreeSlots] | None = field(default=None, init=False, repr=False, compare=False)
    """Free GPUs of those instances."""

    @property
    def job(self) -> Job:
        """The job, with the limits in force."""
        return self.state.job

    @property
    def chosen(self) -> StagePlan:
        """The plan in force for its current stage."""
        return self.state.plan.stages[self.stages[-1].stage]

    @property
    def most(self) -> int:
        """How many instances its current stage may hold: as planned, as far as its share of the cap goes.

        None where no gang fits on that share: they would be idle.
        """
        return 0 if self.waits_for_instances else min(self.chosen.instances, self.max_instances)

    @property
    def wanted(self) -> int:
        """How many instances its current stage is to have."""
        return self.most if self.needs is None else min(self.most, self.needs)

    @property
    def held(self) -> Held:
        """The instances that are assigned to it."""
        fleet = self.state.fleet
        return fleet.held_by_lane.get(self.lane) or fleet.of_lane(self.lane)

    @property
    def free_slots(self) -> FreeSlots:
        """The free GPUs of its ready instances."""
        ready = self.held.ready
        if self.free is None or self.free[0] is not ready:
            gangs = (trial.gang for trial in self.running())
            offer, names = self.job.offer, (one.instance for one in ready)
            self.free = ready, FreeSlots(names, offer.slots, gangs, gpus=offer.gpus)
        return self.free[1]

    @property
    def stage(self) -> StageRecord:
        """The current stage, or the last one; it has begun."""
        return self.stages[-1]

    @property
    def bracket(self) -> Bracket:
        """The bracket of the current stage."""
        return next(bracket for bracket in self.brackets if self.stages[-1].stage < bracket.end_stage)

    @property
    def end_stage(self) -> int:
        """The stage after its last one."""
        return self.brackets[-1].end_stage

    @property
    def first_left(self) -> int:
        """Its current stage, or its first one if none has begun."""
        return self.stages[-1].stage if self.stages else self.brackets[0].first_stage

    @property
    def next_stage(self) -> int:
        """The stage that follows its current one; past its bracket, if no trial of that is left."""
        failed = self.stage.ended_at is not None and not self.stage.ranking
        return self.bracket.end_stage if failed else self.stage.stage + 1

    @property
    def missing(self) -> int:
        """Instances that its stage still lacks, and may ask for beside those that are taken away soon."""
        return max(0, min(self.wanted - len(self.held.live), self._room))

    @property
    def _room(self) -> int:
        """Instances that it may ask for; those that leave still count."""
        state, held = self.state, self.held
        room = self.max_instances - len(held.live) - len(held.leaving)
        if state.instance_cap is not None:  # another self may still hold what it gives back
            room = min(room, state.instance_cap - len(state.fleet.live()) - len(state.fleet.leaving()))
        return room

    @property
    def waits_for_room(self) -> bool:
        """Whether it may ask for an instance once one that leaves is gone."""
        return self._room <= 0 < self.wanted - len(self.held.live) and bool(self.state.fleet.leaving())

    @property
    def least_instances(self) -> int:
        """The fewest instances that one of its gangs fits on."""
        left = self.state.plan.stages[self.first_left : self.end_stage]
        planned = min([choice.gpus_per_trial for choice in left], default=self.job.largest_gang)
        return -(-min(self.job.gang_sizes(planned), default=planned) // self.job.offer.slots)

    @property
    def needed_instances(self) -> int:
        """The fewest instances on which the trials under way train at once, as wide as planned."""
        return instances_for(len(self.runners) + len(self.waiters), self.job.offer.slots, self.chosen.gpus_per_trial)

    @property
    def trials_left(self) -> int:
        """The trials of its current stage that have not failed, been stopped, or ended by themselves."""
        over = (TrialStatus.FAILED, TrialStatus.STOPPED)
        trials = (self.state.trials[trial] for trial in self.stage.trials)
        return sum(trial.status not in over and not trial.ended for trial in trials)

    @property
    def waits_for_instances(self) -> bool:
        """Whether no gang fits on its share of the cap: it waits for more."""
        return self.state.instance_cap is not None and self.max_instances < self.least_instances

    @property
    def is_promised(self) -> bool:
        """Whether a pool promises it all that the job's plan has left for it."""
        left = self.job.plan.stages[self.first_left : self.end_stage]
        return self.promised_instances >= max((choice.instances for choice in left), default=1)

    @property
    def gang_size(self) -> int:
        """GPUs per trial: as planned, or the widest gang that fits what is ready; 0 if trials wait, or none fits.

        While an instance starts, trials wait for it: a gang keeps its width until the stage ends, so that a narrower
        one would be late by far more than the start takes.
        """
        job = self.job
        planned, held = self.chosen.gpus_per_trial, self.held
        ready = len(held.ready)
        if slots(ready, job.offer.slots, planned) > 0:
            return planned
        if ready < len(held.live) and not self.state.buys_none:
            return 0
        return max((size for size in job.gang_sizes(planned) if slots(ready, job.offer.slots, size) > 0), default=0)

    @property
    def room(self) -> int:
        """How many more trials can start on what it holds."""
        if not self.held.ready or (size := self.gang_size) == 0:
            return 0
        return self.free_slots.room(size)

    def target_iterations(self, trial: TrialState) -> int:
        """Iterations in all that a trial has done at the end of its rung of the current stage."""
        return self._rung_ends()[trial.rung]

    def ends_last_rung(self, trial: TrialState) -> bool:
        """Whether a trial of the current stage is on its last rung, from which none is promoted before its end."""
        return trial.rung + 1 == len(self._rung_ends())

    def _rung_ends(self) -> tuple[int, ...]:
        stage = self.stages[-1].stage
        if self.ends is None or self.ends[0] != stage:
            self.ends = stage, self.job.rung_ends(stage)
        return self.ends[1]

    def begins_with(self, stage: int) -> tuple[int, ...]:
        """The trials that train in its next stage, by number: the promoted ones, or those of another bracket.

        Without those that the user has stopped.
        """
        job = self.job
        bracket = job.bracket_of(stage)
        trials = job.trials_of(bracket) if stage == bracket.first_stage else sorted(job.promoted(self.stage))
        return tuple(trial for trial in trials if self.state.trials[trial].stopped_at is None)

    @property
    def is_idle(self) -> bool:
        """Whether the user's stops have left no trial of its current stage to train."""
        if self.runners or self.waiters or self.rungs.highest() is not None:
            return False
        return any(self.state.trials[trial].stopped_at is not None for trial in self.stage.trials)

    def begin(self, record: StageRecord, trials: Iterable[TrialState]) -> None:
        """Another stage begins; its `trials` wait."""
        self.stages.append(record)
        self.waiters = WaitingTrials(trials)

    def running(self) -> Sequence[TrialState]:
        """Its trials that train now, by number."""
        return self.runners.sorted()

    def queued(self) -> Sequence[TrialState]:
        """Trials of the current stage that wait for a slot, in the order in which they get one."""
        return self.waiters.sorted()


@dataclass(slots=True, kw_only=True)
class State:
    """Everything; `fold(events)` gives it again."""

    job: Job
    """With the limits in force, which may be raised while it runs."""
    trials: list[TrialState]
    lanes: list[LaneState]
    lane_of: Sequence[int]
    """Trial -> its lane."""
    plan: Plan
    """In force: the job's, until a replan changes it."""
    predicted: tuple[StagePrediction, ...]
    """By the plan in force; a stage that is over stays as it was predicted when it began."""
    profile: Profile
    """Corrected by what was measured, at the latest replan."""
    fleet: Fleet = field(default_factory=Fleet)
    decisions: list[RestPlanned] = field(default_factory=list)
    sampled_configs: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """Trial -> its configuration, where a sampler that learns draws them, or the trial was added."""
    forked_configs: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """Trial -> its present configuration, where it has taken over another trial's checkpoint."""
    sampled_trials: int = 0
    """Trials that the sampler has drawn, or draws as they start: not those whose configuration a user added."""
    pending_configs: tuple[int, ...] = ()
    """Trials that have a slot now and wait for their configurations, where each is drawn when it starts."""
    failed: list[int] = field(default_factory=list)
    """The trial of each failed attempt, in order."""
    instance_cap: int | None = None
    """The most instances that it may hold now; None: as many as the offer allows."""
    promised_instances: int | None = None
    """The most that a pool promises it at any time; None: no promise."""
    history: History = field(default_factory=History)
    requests: set[str] = field(default_factory=set)
    """Ids of what was asked of the driver and taken in."""
    allocations: list[GangRun] = field(default_factory=list)
    stages: list[StageRecord] = field(default_factory=list)
    """Begun stages of all lanes, in order."""
    course: Course = "new"
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
    ended_by: SearchEnd | None = None
    """The rule that ended it; where that was a target, a resume goes on with a harder one."""
    valued_results: int = 0
    """The results that were known when the worth of the rest was looked at last, where nothing is planned again."""
    best_so_far: BestSoFar = field(default_factory=BestSoFar)
    """For a rule about a search without an improvement."""
    stopped: str = ""
    """Why the latest driver gave up, until another one goes on; empty if it did not."""
    resumed_at: list[float] = field(default_factory=list)
    """Instants at which drivers resumed it."""
    woke_at: list[float] = field(default_factory=list)
    """Instants at which the machine woke up: times that span one do not show how fast trials are."""
    just_woke: bool = False
    """Whether the driver stood still until just now: ends of its instances may be reported next."""
    paused_s: float = 0.0
    """Between having ended and being resumed; nothing was held."""
    changes: int = field(default=0, init=False, repr=False, compare=False)
    """How often a trial was given another status."""
    completed: int = field(default=0, init=False, repr=False, compare=False)
    """Trials that have been trained to the end."""
    curves: Curves | None = field(default=None, init=False, repr=False, compare=False)
    """Results of the trials for the rules that end them; they follow from the reports."""
    _used_gpu_s: dict[str, float] | None = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, job: Job) -> State:
        """The state of a job before its first event."""
        lanes = lanes_of(job)
        lane_of = [0] * job.num_trials
        for bracket in job.all_brackets():
            for trial in job.trials_of(bracket):
                lane_of[trial] = bracket.lane
        return cls(
            job=job,
            trials=[TrialState(trial=trial) for trial in range(job.num_trials)],
            lanes=lanes,
            lane_of=lane_of,
            plan=job.plan,
            predicted=job.prediction.stages,
            profile=job.profile,
            sampled_trials=job.num_trials,
        )

    def __post_init__(self) -> None:
        for lane in self.lanes:
            lane.state = self

    def supposed(self, **changes: Any) -> State:
        """Return the state as it would be with other values, such as another plan or job: not to go on with."""
        return replace(self, lanes=[copy.copy(lane) for lane in self.lanes], **changes)

    @property
    def instances(self) -> dict[str, InstanceRecord]:
        """Every instance that was asked for, by name."""
        return self.fleet.instances

    @property
    def phase(self) -> Phase:
        """Phase of the run; of several lanes, that of the one farthest on in its stage."""
        if self.course != "running":
            return _PHASES[self.course]
        phases = {lane.phase for lane in self.lanes}
        return next((phase for phase in (Phase.PLANNING, Phase.TRAINING) if phase in phases), Phase.SCALING)

    def repeats(self, trial: TrialState) -> int:
        """Iterations that the trial's next attempt trains again, as far as is known."""
        return trial.unsaved_iterations if self.profile.resumes else trial.iterations

    def elapsed_s(self, at: float) -> float:
        """Return the seconds from the start of the run to `at`; 0 before the start."""
        return 0.0 if self.course == "new" else max(0.0, at - self.started_at)

    def lane_of_trial(self, trial: TrialState) -> LaneState:
        """The lane that trains a trial."""
        return self.lanes[self.lane_of[trial.trial]]

    def active(self) -> list[LaneState]:
        """The lanes that are not over."""
        return [lane for lane in self.lanes if lane.phase is not Phase.FINISHED]

    @property
    def most_instances(self) -> int:
        """The most instances that the whole experiment may hold now."""
        return self.job.offer.max_instances if self.instance_cap is None else self.instance_cap

    @property
    def spare_instances(self) -> int:
        """The instances that it may hold beside those that its lanes may."""
        return max(0, self.most_instances - sum(lane.max_instances for lane in self.active()))

    @property
    def buys_none(self) -> bool:
        """Whether buying has stopped for now, since too many instances in a row never got ready."""
        return self.job.start_attempts is not None and self.fleet.failed_starts >= self.job.start_attempts

    def has_config(self, trial: TrialState) -> bool:
        """Whether a trial has its configuration: without a SYNC a sampler that learns draws it only when it starts."""
        return not self.job.draws or self.job.has_sync or trial.trial in self.sampled_configs

    def configs_due_before(self, stage: int) -> tuple[int, ...]:
        """The trials that a sampler has to draw before a stage begins: those of a new bracket, or none."""
        job = self.job
        bracket = job.bracket_of(stage)
        if not job.draws or not job.has_sync or stage != bracket.first_stage:
            return ()
        return tuple(trial for trial in job.trials_of(bracket) if trial not in self.sampled_configs)

    def configs_due(self) -> tuple[int, ...]:
        """The trials that start as soon as a sampler has drawn them, where each is drawn then."""
        return self.pending_configs if self.course == "running" else ()

    def planning(self) -> LaneState | None:
        """The first lane whose rest is to be planned now."""
        if self.course != "running":
            return None
        return next((lane for lane in self.lanes if lane.phase is Phase.PLANNING), None)

    def resizing(self) -> LaneState | None:
        """The first lane whose current stage is to be planned again now, within it."""
        if self.course != "running":
            return None
        flagged = [lane for lane in self.lanes if lane.replans_at_once and (lane.runners or lane.waiters)]
        return next((lane for lane in flagged if lane.phase in (Phase.SCALING, Phase.TRAINING)), None)

    def record_of(self, stage: int) -> StageRecord | None:
        """Return the record of a stage of the job; None if it has not begun."""
        return next((record for record in self.stages if record.stage == stage), None)

    def put(self, trial: TrialState, status: TrialStatus) -> None:
        """Give a trial its status, always by this method, as indexes follow it; one that runs has its gang."""
        before, trial.status = trial.status, status
        if before is status:
            return
        self.changes += 1
        self.completed += (status is TrialStatus.COMPLETED) - (before is TrialStatus.COMPLETED)
        lane = self.lanes[self.lane_of[trial.trial]]
        if before is TrialStatus.QUEUED:
            lane.waiters.remove(trial)
        elif status is TrialStatus.QUEUED:
            lane.waiters.add(trial)
        if before is TrialStatus.RUNNING:
            lane.runners.remove(trial)
            if lane.free is not None:
                lane.free[1].give_back(trial.gang)
        elif status is TrialStatus.RUNNING:
            lane.runners.add(trial)
            if lane.free is not None:
                lane.free[1].take(trial.gang)

    def running(self) -> list[TrialState]:
        """Trials that train now, by number in each lane."""
        return [trial for lane in self.lanes for trial in lane.running()]

    def end(self, use: GangRun, at: float) -> None:
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

    def allocation(self, trial: TrialState) -> GangRun:
        """The trial's latest stretch on a gang; it has had one."""
        return self.allocations[trial.allocation]


def stage_iterations(job: Job, stage: int, trial: TrialState) -> int:
    """Return the iterations that a stage has for a trial: all up to its end for one that was added to it."""
    return job.iterations_by(stage) if trial.joined_stage == stage else job.stages[stage].iterations


def lanes_of(job: Job) -> list[LaneState]:
    """The lanes of a job, before its first event."""
    brackets, most = job.all_brackets(), job.lane_instances or (job.offer.max_instances,)
    of = {number: tuple(bracket for bracket in brackets if bracket.lane == number) for number in range(len(most))}
    lanes = [LaneState(lane=number, brackets=of[number], max_instances=most[number]) for number in of]
    for lane in lanes:
        lane.rungs = Rungs(job.stages[lane.first_left].rungs)
    return lanes


def _add_gpu_s(used: dict[str, float], use: GangRun, ended_at: float) -> None:
    instance = use.gang[0].instance
    used[instance] = used.get(instance, 0.0) + len(use.gang) * max(0.0, ended_at - use.started_at)
