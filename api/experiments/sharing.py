"""The sharing of a pool: a policy says how many instances each running experiment may hold, and its driver obeys.

Every experiment has a demand, as far as it stands (`demand`). One with a promise gets what it is promised;
the promise follows its plan as far as the calendar has room. The policy divides the rest among the others. It decides
again when an experiment begins, ends or passes a SYNC, when a promise begins or ends, and every half minute. An
experiment that is to give back GPUs that another is promised stops trials at once, else at their next checkpoints. One
that waits for its checkpoint store holds nothing, and asks for nothing.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from rubberband.api.experiments.admission import calendar_of, summed
from rubberband.api.settings import SharedPool
from rubberband.api.store import Store
from rubberband.api.store.schema import Promise
from rubberband.cloud.offers import offers
from rubberband.cloud.pool import RemotePool
from rubberband.errors import InputError, ProviderError
from rubberband.executor.core.controller import Controller
from rubberband.executor.core.events import Recall
from rubberband.executor.core.forecast import expected_iterations, iterations_left, stage_left_s
from rubberband.executor.core.history import InstanceCapChanged
from rubberband.executor.core.instances import apportioned
from rubberband.executor.core.job import Job
from rubberband.executor.core.state import LaneState, State
from rubberband.executor.core.trial_state import TrialStatus
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.journal.inbox import DriverRequest, Inbox
from rubberband.executor.run.follower import JournalFollower
from rubberband.planner.sharing import Allocations, Calendar, Capacity, Demand, Scale, Span, make_policy, within
from rubberband.spec.experiment import Experiment
from rubberband.spec.pool import PoolFolder
from rubberband.values.kinds import KINDS
from rubberband.values.offer import slots
from rubberband.values.plan import Stage
from rubberband.values.submission import Submission

DECIDE_EVERY_S = 30.0
"""Time after which it decides again in any case."""
KEPT_S = 300.0
"""Time for which promised GPUs stay free for an experiment that is interrupted, or waits for its checkpoint store."""
LAPSED = f"; its promise of GPUs has ended after {KEPT_S / 60.0:.0f}m"
LEAST_RENTED_START_S = 120.0
"""A rented instance that takes no longer to start is not late."""


@dataclass(frozen=True, slots=True)
class Member:
    """A running experiment of the pool."""

    row: Submission
    follower: JournalFollower | None
    """None: it has no journal yet."""
    waits: bool = False
    """Whether its process waits for its checkpoint store, and holds nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningExperiment:
    """A running experiment as a decision sees it."""

    job: Job
    state: State
    now: float
    """On the clock of its events."""
    arrived_at: float
    weight: float = 1.0
    waits: Collection[str] | None = None
    """Its instances for which the pool has no machine yet; None: it is not known."""
    least_start_s: float = 0.0
    """Seconds that an instance may always take to start, where that is not known."""
    away_s: float | None = None
    """Seconds since its driver has stopped: it waits for its checkpoint store, and holds nothing. None: it has not."""

    @property
    def num_held(self) -> int:
        """Instances that it has, or has asked for."""
        return 0 if self.away_s is not None else len(self.state.fleet.live()) + len(self.state.fleet.leaving())

    @property
    def lends_promised(self) -> bool:
        """Whether its promised GPUs are lent to others, until it is back."""
        return self.away_s is not None and self.away_s > KEPT_S

    def pending(self) -> tuple[str, ...]:
        """Return the instances that would run by now if all of them started in the mean time."""
        return self._overdue(self.job.offer.provision_delay_s)

    def _overdue(self, start_s: float) -> tuple[str, ...]:
        return () if self.away_s is not None else overdue(self.state, self.now, start_s)

    def overdue(self) -> tuple[str, ...]:
        """Return the instances that do not come, as others hold parts of the machines.

        A machine that boots is no such case, however slow it is. Where no broker says so, it is an instance that takes
        longer than 95 % of the starts.
        """
        if self.waits is not None:
            return tuple(instance for instance in self.pending() if instance in self.waits)
        usual_s = self.job.offer.provision_delay_s * self.job.offer.provision_spread.p95
        return self._overdue(max(usual_s, self.least_start_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceCap:
    """Instances that an experiment may hold from now on, as its driver is asked."""

    max_instances: int
    promised_instances: int | None = None
    recall: Recall = "at_checkpoint"

    def is_news(self, before: InstanceCap | DriverRequest) -> bool:
        """Return whether to ask a driver that holds, or was asked for, `before`: not for a milder recall alone."""
        if (self.max_instances, self.promised_instances) != (before.max_instances, before.promised_instances):
            return True
        return self.recall == "at_once" and before.recall != "at_once"


def is_to_ask(
    grant: InstanceCap, asked: DriverRequest | None, waiting: Sequence[DriverRequest], controller: Controller
) -> bool:
    """Return whether to ask a driver for a grant: it does not hold it, and will not once it has read its inbox.

    `asked` is what it was asked last, `waiting` what its inbox has that the journal behind `controller` has not. Others
    may have asked it for another cap since, by hand.
    """
    limits = [request for request in waiting if request.kind == "limit"]
    job, state = controller.job, controller.state
    if limits:
        return grant.is_news(limits[-1])
    if asked is not None and asked.id not in state.requests:  # it was taken in, and the journal is not read so far yet
        return grant.is_news(asked)
    if asked is None and state.instance_cap is None:
        return True
    holds = InstanceCap(
        max_instances=state.most_instances, promised_instances=state.promised_instances, recall=state.fleet.recall
    )
    return replace(grant, max_instances=min(grant.max_instances, job.offer.max_instances)).is_news(holds)


class PoolDivision:
    """Divides a pool among experiments, decision by decision. It reads no clock."""

    def __init__(self, pool: SharedPool) -> None:
        self._policy = make_policy(pool.policy)
        self._largest = Capacity(instances=pool.instances, gpus_per_instance=pool.gpus_per_instance)
        self._autoscaling = pool.autoscaling
        self.scale: Scale | None = None
        """The size of the pool by its autoscaling; None before the first decision, and for one that does not scale."""
        self._current: Allocations = {}
        self._hurried: Collection[str] = ()
        """Experiments that were asked to give GPUs back at once, and still hold them."""
        self._cleared: set[tuple[str, str]] = set()
        """Experiments and their instances for which others were stopped."""

    def decide(
        self, calendar: Calendar, members: Mapping[str, RunningExperiment], now: float
    ) -> dict[str, InstanceCap]:
        """Return what each experiment that goes on may hold from `now` on, by the promises of `calendar`."""
        promised = {name: calendar.promised(name, now) for name in {*calendar.promises, *members}}
        demands = [found for name in members if (found := _demand(name, members[name], calendar, now)) is not None]
        asking = [found.name for found in demands]
        for name, one in members.items():
            if one.lends_promised:
                promised[name] = 0  # until it is back
        demands += reserved(promised, asking, now)
        held = {name: one.job.offer.gpus * one.num_held for name, one in members.items()}
        capacity = self._capacity(demands, sum(held.values()), now)
        current = within(self._current, capacity)
        self._current = self._policy.allocate(demands, capacity, current, now) if capacity.instances else {}
        lacks = any(gpus > held.get(name, 0) for name, gpus in promised.items())
        grants = {}
        for name in [*asking, *(name for name, one in members.items() if one.away_s is not None)]:
            gpus = sum(self._current.get(name, {}).values()) if name in asking else 0
            each, most = members[name].job.offer.gpus, calendar.most(name, now)
            hurries = held[name] > gpus and (lacks or name in self._hurried)
            grants[name] = InstanceCap(
                max_instances=gpus // each,
                promised_instances=most // each if most else None,
                recall="at_once" if hurries else "at_checkpoint",
            )
        self._clear(grants, members, promised)
        self._hurried = {name for name, grant in grants.items() if grant.recall == "at_once"}
        return grants

    def _capacity(self, demands: Sequence[Demand], held_gpus: int, now: float) -> Capacity:
        """Return the instances to divide. By autoscaling the first number is that of the instances in use."""
        if self._autoscaling is None:
            return self._largest
        gpus = self._largest.gpus_per_instance
        instances = -(-held_gpus // gpus) if self.scale is None else self.scale.instances
        self.scale = self._autoscaling.scale(instances, demands, self._largest, self._policy, self._current, now)
        return Capacity(instances=self.scale.instances, gpus_per_instance=gpus)

    def _clear(
        self, grants: dict[str, InstanceCap], members: Mapping[str, RunningExperiment], promised: Mapping[str, int]
    ) -> None:
        """Stop all that have no promise, once, where a promised instance does not come.

        Enough GPUs are free then, but on several instances: those that are stopped start anew, side by side.
        """
        late = {(name, one) for name in grants if promised[name] for one in members[name].overdue()} - self._cleared
        if late:
            self._cleared |= late
            stopped = InstanceCap(max_instances=0, recall="at_once")
            grants.update({name: stopped for name, grant in grants.items() if grant.promised_instances is None})


def _demand(name: str, one: RunningExperiment, calendar: Calendar, now: float) -> Demand | None:
    """Return the demand of an experiment; one with a promise takes what it is promised, and no more."""
    if one.away_s is not None:
        return None
    gpus = calendar.promised(name, now)
    found = demand(one.state, one.now, arrived_at=one.arrived_at, weight=one.weight, promised_gpus=gpus)
    return replace(found, max_gpus=gpus) if found is not None and calendar.most(name, now) else found


def followed(calendar: Calendar, members: Mapping[str, RunningExperiment], now: float) -> Calendar:
    """Return the calendar whose promises cover what is left of the plans, as far as they can."""
    for name, one in members.items():
        if name in calendar.promises:
            calendar = calendar.follow(name, plan_left(one.state, one.now), now)
    return calendar


class Lender(Protocol):
    """The broker of a pool."""

    def waiting(self) -> Collection[tuple[str, str]]:
        """Return the experiment and instance of each request that waits. Raises ProviderError."""

    def scale(self, machines: int, efficiency: float) -> None:
        """Take note that this many machines are in use. Raises ProviderError."""


class Sharing:
    """Divides a pool among the running experiments of a service. For the watcher's thread."""

    def __init__(
        self,
        pool: SharedPool,
        store: Store,
        folder: Callable[[str], ExperimentFolder],
        clock: Callable[[], float],
        lender: Lender | None = None,
    ) -> None:
        """`lender` is by default the broker of the pool's folder, if it has one."""
        self._pool, self._store, self._folder, self._clock = pool, store, folder, clock
        if lender is None and pool.folder is not None:
            lender = RemotePool(PoolFolder(path=Path(pool.folder)))
        self._lender = lender
        self._division = PoolDivision(pool)
        self.promising = threading.Lock()
        """Held while promises move: none is added meanwhile."""
        self._grants: dict[str, InstanceCap] = {}
        """By the latest decision."""
        self._asked: dict[tuple[str, int], DriverRequest] = {}
        """Experiment and attempt -> what it was asked last."""
        self._away_since: dict[tuple[str, int], float] = {}
        """Experiment and attempt -> when its driver was first seen to have stopped."""
        self._seen: object = None
        self._decided_at = math.inf

    def is_member(self, row: Submission) -> bool:
        """Whether an experiment runs on the pool. Simulated ones do not: their clocks do not wait for each other."""
        is_simulated = KINDS[self._pool.provider].is_simulated
        return not is_simulated and row.words.get("resources", {}).get("provider") == self._pool.provider

    def begin(self, row: Submission) -> None:
        """Make an experiment that is about to start wait, and send it the number of instances that it is promised."""
        most = calendar_of(self._pool, self._store.promises()).most(row.name, self._clock())
        each = max(offer.gpus for offer in offers(Experiment.kept(row.words).resources)) if most else 1
        self._put(row, InstanceCap(max_instances=0, promised_instances=most // each or None))

    def round(self, members: Iterable[Member]) -> None:
        """Decide, if anything happened since the latest decision, and ask the experiments that do not obey.

        Raises JournalError, and InputError where an inbox cannot be written: the next round asks again.
        """
        now, running = self._clock(), [member for member in members if self.is_member(member.row)]
        calendar = calendar_of(self._pool, self._store.promises())
        experiments = self._running_experiments(running, calendar, now)
        seen = (
            {name: calendar.promised(name, now) for name in calendar.promises},
            [_stage_of(member) for member in running],
            [(name, one.overdue(), one.away_s is None, one.lends_promised) for name, one in experiments.items()],
        )
        # The clock may step back.
        if seen != self._seen or not self._decided_at <= now < self._decided_at + DECIDE_EVERY_S:
            self._grants = self._division.decide(self._moved(experiments, now), experiments, now)
            self._seen, self._decided_at = seen, now
            if self._lender is not None and (scale := self._division.scale) is not None:
                with suppress(ProviderError):  # a broker that is away hears it at the next decision
                    self._lender.scale(scale.instances, scale.efficiency)
        failed: InputError | None = None
        for member in running:
            if member.row.name in self._grants and member.follower is not None:
                try:
                    self._ask(member.row, self._grants[member.row.name], member.follower)
                except InputError as error:  # the others do not wait for it
                    failed = error
        if failed is not None:
            raise failed

    def _moved(self, experiments: Mapping[str, RunningExperiment], now: float) -> Calendar:
        """Let the promises follow their plans; return the calendar with them."""
        with self.promising:
            self._store.lapse(before=now - KEPT_S, note=LAPSED)
            calendar = calendar_of(self._pool, self._store.promises())
            moved = followed(calendar, experiments, now)
            for name, (start_at, plan) in moved.promises.items():
                if calendar.promises[name] != (start_at, plan):
                    spans = tuple((span.gpus, span.duration_s) for span in plan)
                    self._store.move(Promise(experiment=name, start_at=start_at, spans=spans))
        return moved

    def _running_experiments(
        self, running: Iterable[Member], calendar: Calendar, now: float
    ) -> dict[str, RunningExperiment]:
        """Return where each experiment stands; the broker is asked only if a promised instance does not run in time."""
        found = {
            member.row.name: one for member in running if (one := self._running_experiment(member, now)) is not None
        }
        if self._lender is None:
            return found
        waiting: Collection[tuple[str, str]] = ()
        if any(calendar.promised(name, now) and one.pending() for name, one in found.items()):
            with suppress(ProviderError):  # a broker that is away says of no instance that it waits
                waiting = self._lender.waiting()
        waits = {name: {instance for of, instance in waiting if of == name} for name in found}
        return {name: replace(one, waits=waits[name]) for name, one in found.items()}

    def _running_experiment(self, member: Member, now: float) -> RunningExperiment | None:
        follower, row = member.follower, member.row
        if follower is None or follower.header.kind.is_simulated:
            return None
        job, state = follower.controller.job, follower.controller.state
        weight = self._pool.weights.get(row.owner, 1.0)
        least_s = LEAST_RENTED_START_S if KINDS[self._pool.provider].is_rented else 0.0
        return RunningExperiment(
            job=job,
            state=state,
            now=follower.now,
            arrived_at=row.created_at,
            weight=weight,
            least_start_s=least_s,
            away_s=self._away_s(member, state, now),
        )

    def _away_s(self, member: Member, state: State, now: float) -> float | None:
        """Return the time since its driver has stopped, or is known to wait for its checkpoint store."""
        key = member.row.name, member.row.attempt
        if not state.stopped and not member.waits:
            self._away_since.pop(key, None)
            return None
        return now - self._away_since.setdefault(key, now)

    def _ask(self, row: Submission, grant: InstanceCap, follower: JournalFollower) -> None:
        """Ask the driver to hold what it is granted, if it does not, and will not by itself."""
        controller, asked = follower.controller, self._asked.get((row.name, row.attempt))
        waiting = Inbox(self._folder(row.name).inbox).pending(controller.state.requests)
        if is_to_ask(grant, asked, waiting, controller):
            self._put(row, grant)

    def _put(self, row: Submission, grant: InstanceCap) -> None:
        asked = DriverRequest(
            id=f"pool-{secrets.token_hex(8)}",
            kind="limit",
            asked_at=self._clock(),
            max_instances=grant.max_instances,
            promised_instances=grant.promised_instances,
            recall=grant.recall,
        )
        Inbox(self._folder(row.name).inbox).put(asked)
        self._asked[row.name, row.attempt] = asked


def reserved(promised: Mapping[str, int], asking: Collection[str], now: float) -> list[Demand]:
    """Return demands for the promised GPUs of experiments that do not ask yet, as their processes start."""
    return [
        Demand(name=name, arrived_at=now, seconds_left=[1.0] * gpus, promised_gpus=gpus)
        for name, gpus in sorted(promised.items())
        if gpus > 0 and name not in asking
    ]


def _stage_of(member: Member) -> tuple[object, ...]:
    """Return the facts that make it decide again: another experiment, attempt, stage, or end."""
    row, follower = member.row, member.follower
    if follower is None:
        return row.name, row.attempt
    state = follower.controller.state
    return row.name, row.attempt, len(state.stages), state.course


# The demand of an experiment: its use for the GPUs of a pool that it shares, from where it stands. Pure.


def demand(
    state: State, now: float, *, arrived_at: float, weight: float = 1.0, promised_gpus: int = 0
) -> Demand | None:
    """Return the demand as of `now`; None if it ends, has ended, or its driver has stopped and holds nothing.

    `now` and `arrived_at`, the instant of the submission, are on the clock of the experiment's events. The time left
    with a number of instances is that of the widest gangs that pay off, wave after wave, in every stage that is left
    (planning-model: stage time); trials and instances are taken to be as fast as at the latest replan. It does not
    include the start of instances. Lanes share the instances by their quotas.
    """
    job = state.job
    if state.stopped or state.course in ("ending", "finished"):
        return None
    gpus, most = job.offer.gpus, job.offer.max_instances
    left_s = [_left_s(state, now, instances) for instances in range(most + 1)]
    done, total = sum(trial.iterations for trial in state.trials), expected_iterations(state)
    held = [use for use in state.allocations if use.training_at is not None]
    attained = sum(len(use.gang) * ((now if use.ended_at is None else use.ended_at) - use.started_at) for use in held)
    started_at = now if state.course == "new" else state.started_at
    return Demand(
        name=job.name,
        arrived_at=arrived_at,
        seconds_left=[left_s[count // gpus] for count in range(1, most * gpus + 1)],
        delta_s=state.profile.trial_startup_s,
        moves=len(state.history.of(InstanceCapChanged)),
        deadline_s=None if job.deadline_s is None else job.deadline_s + started_at - arrived_at,
        weight=weight,
        min_gpus=gpus * min(lane.least_instances for lane in state.active()),
        max_gpus=gpus * _most(state),
        promised_gpus=promised_gpus,
        attained_gpu_s=max(0.0, attained / job.offer.trials_per_gpu),
        progress=min(1.0, done / total) if total else 0.0,
    )


HANDOVER_S = 3.0
"""Time in which GPUs change hands before a stage: others stop their trials, and both look at the pool."""


def overdue(state: State, now: float, start_s: float) -> tuple[str, ...]:
    """Return the instances that were asked for over `start_s` seconds ago, and do not run."""
    since = now - start_s - HANDOVER_S
    return tuple(
        record.instance for record in state.fleet.live() if record.running_at is None and record.requested_at < since
    )


def plan_left(state: State, now: float) -> list[Span]:
    """Return what is left of the plan in force, as GPUs over time from `now` on; empty if it ends, or has ended.

    Times are as long as at the 95th percentile, and each stage has `HANDOVER_S` more.
    """
    job = state.job
    if state.course in ("ending", "finished"):
        return []
    jct = job.prediction.jct
    slack = 1.0 if jct is None or not job.prediction.jct_s else max(1.0, jct.p95 / job.prediction.jct_s)
    stages: list[tuple[float, float, int]] = []
    for lane in state.active():
        first, begin_s = lane.first_left, 0.0
        for stage in range(first, lane.end_stage):
            if lane.stages and stage == first:
                end_s = begin_s + slack * stage_left_s(lane, now)
                is_over = lane.stage.ended_at is not None
            else:
                predicted = state.predicted[stage]
                end_s = begin_s + slack * (predicted.provisioning_s + predicted.duration_s)
                is_over = False
            if not is_over:
                stages.append((begin_s, end_s + HANDOVER_S, job.offer.gpus * state.plan.stages[stage].instances))
                begin_s = end_s + HANDOVER_S
    return summed(stages)


def _most(state: State) -> int:
    """The most instances that it has a use for: one that is to be cheap, and need not hurry, uses those of its plan."""
    job = state.job
    if job.objective == "min_time" or job.deadline_s is not None:
        return job.offer.max_instances
    lanes = [slice(lane.first_left, lane.end_stage) for lane in state.active()]
    plans = (job.plan, state.plan)
    planned = sum(
        max((choice.instances for plan in plans for choice in plan.stages[left]), default=1) for left in lanes
    )
    return min(planned, job.offer.max_instances)


def _left_s(state: State, now: float, instances: int) -> float:
    """Seconds to the end with this many instances; infinite where no gang fits."""
    active = state.active()
    if instances < max(lane.least_instances for lane in active):
        return math.inf
    if instances < len(active):  # one lane after the other
        return sum(_lane_left_s(lane, now, instances) for lane in active)
    quotas = state.job.lane_instances or (state.job.offer.max_instances,)
    shares = apportioned(instances, [quotas[lane.lane] for lane in active])
    return max(_lane_left_s(lane, now, share) for lane, share in zip(active, shares, strict=True))


def _lane_left_s(lane: LaneState, now: float, instances: int) -> float:
    if not lane.job.has_sync and lane.stages:
        return stage_left_s(lane, now, instances)
    return sum(_stage_s(lane.state, stage, instances) for stage in _stages_left(lane))


def _stages_left(lane: LaneState) -> Iterable[Stage]:
    """The lane's stages that are left; the current one has the trials that lack iterations, and their mean."""
    first = lane.first_left
    if not lane.stages:
        return lane.job.stages[first : lane.end_stage]
    going = [lane.state.trials[trial] for trial in lane.stage.trials]
    going = [trial for trial in going if trial.status in (TrialStatus.RUNNING, TrialStatus.QUEUED)]
    later = lane.job.stages[first + 1 : lane.end_stage]
    if not going:
        return later
    lacking = sum(iterations_left(lane, trial) for trial in going)
    return (Stage(trials=len(going), iterations=max(1, math.ceil(lacking / len(going)))), *later)


def _stage_s(state: State, stage: Stage, instances: int) -> float:
    """Seconds of a stage with the gangs that end it soonest; infinite where none fits."""
    job = state.job
    profile, per_instance = state.profile, job.offer.slots
    best_s = math.inf
    for size in job.gang_sizes(job.largest_gang):
        if at_once := slots(instances, per_instance, size):
            waves = math.ceil(stage.trials / at_once)
            best_s = min(best_s, waves * (profile.trial_startup_s + stage.work * profile.iteration_s(size)))
    return best_s
