"""Seeded virtual runs of experiments that share a pool, with faults: real controllers and the real broker on one clock.

Each experiment has the real driver loop in a thread of its own; only one thread runs at any moment, so that a seed is
one run. The calendar admits, and a policy divides the pool, as the service does. Drivers and brokers die and come back.
With sick machines, some never get a worker ready, or fall silent, and now and then the broker hears none of them.
With odd orders, answers to launches are lost too, checkpoint stores go away, limits are set by hand, the service is
restarted, and what has ended is resumed.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any, TypeVar

from rubberband.api.experiments.admission import START_S, calendar_of
from rubberband.api.experiments.sharing import (
    DECIDE_EVERY_S,
    HANDOVER_S,
    InstanceCap,
    PoolDivision,
    RunningExperiment,
    followed,
    is_to_ask,
)
from rubberband.api.settings import SharedPool
from rubberband.api.store.schema import Promise
from rubberband.cloud.pool import Pool, PoolLimits, PoolProvider
from rubberband.cloud.pool.broker import LOOK_S, SILENT_S
from rubberband.cloud.pool.pool import LentInstance
from rubberband.cloud.provider import InstanceDescription
from rubberband.cloud.virtual import InstanceFaults, VirtualClock, VirtualProvider
from rubberband.errors import ProviderError, StoreAwayError
from rubberband.executor import (
    Agenda,
    Command,
    Controller,
    DriverRequest,
    DriverResumed,
    Event,
    Finish,
    Job,
    VirtualBackend,
    bill_usd,
    drive,
)
from rubberband.executor.core.backend import Lifecycle, resumed
from rubberband.executor.core.limits import can_go_on
from rubberband.planner.exact.model import predict
from rubberband.planner.sharing import Autoscaling, Calendar, Span
from rubberband.units import month_begin
from rubberband.values.offer import Offer, slots
from rubberband.values.plan import Market, Plan, Stage, StagePlan, gang_sizes
from rubberband.values.profile import Profile
from tests.builders import memory
from tests.builders.invariants import validate, validate_pool
from tests.builders.jobs import JOB
from tests.builders.lost_answers import LOST
from tests.builders.memory import MemoryPoolJournal
from tests.harness.chaos import DriverDied
from tests.harness.chaos_plans import InstanceCapWatch
from tests.harness.pool_runs import BrokerKilled, FaultyCloud

_T = TypeVar("_T")

LEASE_S = 60.0
GPUS = 4
MARGIN_S = 5.0
CHECK_MONEY_EVERY = 3
"""Looks at the pool between two looks at its money."""
AWAY = 0.002
"""Share of the looks for events at which the checkpoint store goes away, with odd orders."""
ANSWER_S = 10.0
"""Time after which a driver gives up a launch that is not answered."""
START_ATTEMPTS = 3
MOST_EVENTS = 5_000
"""Events of one experiment; one with more does not end."""
READY_S, NODE_S = 90.0, 20.0
"""Drivers give up a machine that is not ready by then, and one whose Ray node has been silent for so long."""
LATEST_S = 6 * 3600.0
"""A run that lasts longer does not end."""
POLICIES = ("default", "fifo", "equal", "gain", "knee", "hell", "fitness")


class Line:
    """The pool as drivers see it: a call that finds no broker starts one, and asks again (as `RemotePool`)."""

    def __init__(self, run: SharedRun) -> None:
        self._run = run

    def _ask(self, call: Callable[[Pool], _T]) -> _T:
        while True:
            try:
                return call(self._run.broker())
            except BrokerKilled:
                self._run.broker_died()

    def launch(self, tenant: str, experiment: str, instance: str, gpus: int, lease_s: float, market: Market) -> None:
        draw = 1.0 if self._run.odd is None else self._run.odd.random()
        if draw >= LOST / 3.0:
            self._ask(lambda pool: pool.launch(tenant, experiment, instance, gpus, lease_s, market))
        if draw < LOST:
            self._run.seen["answer lost"] += 1
            raise ProviderError("the broker does not answer")

    def describe(self, tenant: str) -> list[LentInstance]:
        return self._ask(lambda pool: pool.describe(tenant))

    def release(self, tenant: str, instance: str, fault: str = "") -> LentInstance:
        return self._ask(lambda pool: pool.release(tenant, instance, fault))

    def renew(self, tenant: str, until: float) -> None:
        if self._run.pool is not None:  # asked once
            self._run.pool.renew(tenant, until)

    def leave(self, tenant: str) -> None:
        self._ask(lambda pool: pool.leave(tenant))


@dataclass(frozen=True, slots=True, kw_only=True)
class Illness:
    starts_workers: bool = True
    silent_after_s: float = math.inf
    """From running until it answers nobody any more; 0: it never joins."""


class HeardCloud(FaultyCloud):
    """A cloud whose machines answer the broker, or not."""

    run: SharedRun

    def describe(self) -> list[InstanceDescription]:
        return [self.run.as_heard(status) for status in self.inner.describe()]


class PooledFleet:
    """Instances of a driver on a pool: the events that `rubberband.executor.ray.fleet` makes, on a virtual clock."""

    def __init__(self, provider: PoolProvider, clock: VirtualClock, agenda: Agenda, init_s: float) -> None:
        self._provider, self._clock, self._agenda, self._init_s = provider, clock, agenda, init_s
        self.held: dict[str, Lifecycle] = {}
        self.gone: set[str] = set()
        self.hold_until = math.inf
        self._began_at = -math.inf
        self.reasons: Counter[str] = Counter()
        self.silent_at: Callable[[str], tuple[float, Illness]] = lambda machine: (math.inf, Illness())
        """Machine -> when it falls silent, and what ails it."""
        self.used: set[str] = set()
        """Machines on which it has held an instance."""

    def renew(self, at: float) -> None:
        self._provider.renew_lease(min(at + LEASE_S, self.hold_until))

    def launch(self, instance: str, market: Market, first_lease_s: float | None = None) -> None:
        if instance in self.held:
            return
        life = self.held[instance] = Lifecycle(instance=instance)
        self.renew(self._clock.now())
        try:
            self._provider.launch(instance, market, first_lease_s=first_lease_s)
        except ProviderError as error:
            reason = str(error)
            self._agenda.add(self._clock.now() + ANSWER_S, lambda at: self._unanswered(life, reason, at))

    def _unanswered(self, life: Lifecycle, reason: str, now: float) -> Event | None:
        if not life.end():
            return None
        self.gone.add(life.instance)
        status = None
        with suppress(ProviderError):  # it never heard of it
            status = self._provider.release(life.instance)
        return self._agenda.begin(now, life.lose(status, reason, now))

    def release(self, instance: str) -> None:
        life = self.held.setdefault(instance, Lifecycle(instance=instance))
        if not life.end():
            return
        self.gone.add(instance)
        status = None
        with suppress(ProviderError):
            status = self._provider.release(instance)
        now = self._clock.now()
        self._agenda.add_all(now, life.release(status, now))

    def look(self) -> None:
        """Compare with the pool's list."""
        if all(life.over for life in self.held.values()):
            return
        for status in self._provider.describe():
            life = self.held.get(status.instance)
            if life is not None and not life.over:
                self._take_in(status, life)

    def _take_in(self, status: InstanceDescription, life: Lifecycle) -> None:
        now, was_running = self._clock.now(), life.running_at is not None
        if status.ended_at is not None and life.end():
            self.gone.add(life.instance)
            self.reasons[status.reason] += 1
            self._agenda.add_all(now, life.lose_ended(status, now, began_at=self._began_at))
            return
        self._agenda.add_all(now, life.see(status, now, free_if_taken=False))
        if life.running_at is not None and not was_running:
            self._begin(life)

    def _begin(self, life: Lifecycle) -> None:
        """Get it ready, or give it up."""
        now, machine = self._clock.now(), self._provider.node(life.instance)
        silent_at, illness = self.silent_at(machine)
        self.used.add(machine)
        if illness.starts_workers and silent_at > now + self._init_s:
            self._agenda.add(now + self._init_s, lambda at: self._agenda.begin(at, life.ready(at)))
        else:
            self._agenda.add(now + READY_S, lambda at: self._give_up(life, "its workers did not start", at))
        if 0.0 < illness.silent_after_s < math.inf:
            dead_at = max(silent_at + NODE_S, now + 1.0)
            self._agenda.add(dead_at, lambda at: self._give_up(life, "its Ray node stopped answering", at))

    def _give_up(self, life: Lifecycle, reason: str, now: float) -> Event | None:
        if not life.end():
            return None
        self.gone.add(life.instance)
        self.reasons[reason] += 1
        machine = self._provider.node(life.instance)
        for name, other in self.held.items():
            other.same_fault |= not other.over and self._provider.node(name) == machine
        status = self._provider.release(life.instance, fault=reason)
        return self._agenda.begin(now, life.lose(status, reason, now, failed_start=True))

    def reconcile(self, known: Collection[str]) -> DriverResumed:
        self.held.clear()
        self.gone.clear()
        self.hold_until = math.inf
        self._began_at = now = self._clock.now()
        event = resumed(self._provider.describe(), known, self._provider.release, now)
        for found in event.live:
            life = self.held[found.instance] = Lifecycle(instance=found.instance, running_at=found.running_at)
            if found.running_at is not None:
                self._begin(life)
        return event

    def close(self) -> None:
        self.held.clear()
        self._provider.close()


class SharedBackend(VirtualBackend):
    """A virtual backend on a pool; it waits for events by handing over to the others."""

    def __init__(self, job: Job, provider: PoolProvider, clock: VirtualClock, wait: Callable[[float], None]) -> None:
        super().__init__(job.name, job.offer, job.profile, metric=job.metric, clock=clock)
        self.fleet = PooledFleet(provider, clock, self.agenda, job.offer.init_delay_s)  # type: ignore[assignment]
        self._wait = wait
        self.calls_left = math.inf
        self.store: Random | None = None
        """Says when the checkpoint store goes away; None: never."""

    def execute(self, command: Command) -> None:
        self.count()
        super().execute(command)
        self.count()

    def next_events(self, wake_at: float | None) -> Sequence[Event]:
        self.count()
        if self.store is not None and self.store.random() < AWAY:
            raise StoreAwayError("the checkpoint store is away")
        if not (events := self.due_events()) and (wake_at is None or wake_at > self.now()):
            self._wait(math.inf if wake_at is None else wake_at)
            events = self.due_events()
        return events

    def next_at(self) -> float:
        return self.agenda.next_at()

    def count(self) -> None:
        """One more call; the driver dies of its last one."""
        self.calls_left -= 1
        if self.calls_left < 0:
            raise DriverDied


class Member:
    """One experiment of the pool: its job, its promise, and its driver."""

    def __init__(self, run: SharedRun, job: Job, arrives_at: float, deadline_at: float | None) -> None:
        self.job, self.arrives_at, self.deadline_at = job, arrives_at, deadline_at
        self.begins_at = arrives_at + run.rng.uniform(1.0, START_S - HANDOVER_S * (1 + len(job.stages)))
        self.is_promised = self.is_begun = False
        self.calls_left = math.inf
        self.controller = Controller(job)
        self.journal, self.inbox = memory.MemoryJournal(), memory.MemoryInbox()
        self.provider = PoolProvider(job.name, Line(run), job.offer.gpus, run="r", clock=run.clock.now, lease_s=LEASE_S)
        self.backend = SharedBackend(job, self.provider, run.clock, self._hand_over)
        self.backend.store = run.odd
        self.backend.fleet.silent_at = run.silent_at
        self.watch = InstanceCapWatch(self.controller)
        self.away_since: float | None = None
        """When its driver stopped, as the checkpoint store was away."""
        self.resumes = 2
        """How often it is resumed after an end."""
        self.finish: Finish | None = None
        self.ended_at = math.inf
        self.deaths = 0
        self.is_gone = self.is_alive = False
        self.asked: DriverRequest | None = None
        self.num_events = 0
        self._run, self._wake_at, self._error = run, math.inf, None
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._is_killed = False

    @property
    def name(self) -> str:
        return self.job.name

    @property
    def is_over(self) -> bool:
        return self.is_gone or self.finish is not None

    def start(self) -> None:
        self.is_begun = self.is_alive = True
        self.controller = Controller(self.job)
        self.backend.calls_left = self.calls_left
        threading.Thread(target=self._drive, daemon=True).start()
        self.step()

    def step(self) -> None:
        """Let the driver go on until it waits, or is over."""
        self._go.release()
        self._back.acquire()
        if self._error is not None:
            raise self._error

    def kill(self) -> None:
        if self.is_alive:
            self._is_killed = True
            self.step()

    def next_at(self) -> float:
        return min(self._wake_at, self.backend.next_at()) if self.is_alive else math.inf

    def ask(self, grant: InstanceCap, at: float, *, begins: bool = False) -> None:
        """Ask the driver to hold what it is granted, as the service does."""
        waiting = self.inbox.pending(self.controller.state.requests)
        if begins or is_to_ask(grant, self.asked, waiting, self.controller):
            self.asked = self.limit(at, **asdict(grant))

    def limit(self, at: float, max_instances: int | None, **more: Any) -> DriverRequest:
        id = f"pool-{self._run.new_id()}"
        asked = DriverRequest(id=id, kind="limit", asked_at=at, max_instances=max_instances, **more)
        self.inbox.put(asked)
        self._wake_at = min(self._wake_at, at + 0.5)
        return asked

    def _drive(self) -> None:
        self._go.acquire()
        try:
            self.finish = drive(
                self.controller, self.backend, self.journal, observers=[self._observe], requests=self.inbox
            )
            self.ended_at = self._run.clock.now()
            self.backend.close()
        except DriverDied:
            self.deaths += 1
            self.backend.forget()
        except StoreAwayError:
            self.away_since = self._run.clock.now()
            self.backend.close()
        except BaseException as error:  # told in the thread of the run
            self._error = error
        self.is_alive = False
        self._back.release()

    def _hand_over(self, until: float) -> None:
        if self.inbox.pending():
            until = min(until, self._run.clock.now() + 0.5)
        self._wake_at = until
        self._back.release()
        self._go.acquire()
        if self._is_killed:
            raise DriverDied

    def _observe(self, event: Event, controller: Controller) -> None:
        self.num_events += 1
        assert self.num_events < MOST_EVENTS, f"{self.name} does not end"
        self._run.tell(f"{self.name} {event}")
        self.watch.saw(event, controller)
        assert not self.watch.wrong, f"{self.name}: {self.watch.wrong}"
        if isinstance(event, DriverResumed):
            self.away_since = None
        if self.num_events % 10 == 0:
            validate(controller, is_informed=False)


class SharedRun:
    def __init__(self, seed: int, *, keeps_story: bool = False, odd: bool = False, sick: bool = False) -> None:
        self.seed, self.rng = seed, Random(seed)
        self.sick = Random(f"sick machines {seed}") if sick else None
        """None: there are none."""
        self.ill_share = 0.0 if self.sick is None else self.sick.choice((0.1, 0.3))
        self.illnesses: dict[str, Illness] = {}
        self.cut_off = (-math.inf, -math.inf)
        """The latest time in which the broker heard no machine."""
        self.odd = Random(f"odd orders {seed}") if odd else None
        """None: there are none."""
        rng = self.rng
        self.story: list[str] | None = [] if keeps_story else None
        self.seen: Counter[str] = Counter()
        self.start_at = 1_700_000_000.0 + rng.uniform(0.0, 20 * 86_400.0)
        self.clock = VirtualClock(self.start_at)
        often = (0.0, 0.0, 0.3, 1.0)
        self.machine_faults, self.driver_faults, self.broker_faults = (rng.choice(often) for _ in range(3))
        """How much goes wrong with each; 0: nothing."""
        self.is_slow, self.starts = seed % 4 == 0, Random(f"starts {seed}")
        """Whether a start takes .5 to 3 times its mean."""
        price = rng.choice((3.06, 12.24))
        self.offer = Offer(
            instance_type="v",
            gpus=GPUS,
            price_usd_per_hour=price,
            max_instances=rng.randint(1, 6),
            provision_delay_s=rng.choice((3.0, 30.0)),
            init_delay_s=rng.choice((1.0, 15.0)),
            data_usd_per_instance=rng.choice((0.0, 0.02)),
        )
        most = self.offer.max_instances
        self.limits = PoolLimits(
            instances=most,
            gpus=GPUS,
            price_usd_per_hour=price,
            once_usd=self.offer.once_usd_per_instance,
            minimum_billed_s=self.offer.minimum_billed_s,
            idle_s=rng.choice((0.0, 60.0, 300.0)),
            release_margin_s=MARGIN_S,
            max_usd_per_hour=rng.choice((None, most * price)),
            max_usd_per_month=rng.choice((None, None, None, 0.3 * price, 2.0 * price)),
        )
        self.shared = SharedPool(
            name="pool",
            provider="virtual",
            instances=most,
            gpus_per_instance=GPUS,
            policy=rng.choice(("default", "default", *POLICIES)),
            autoscaling=Autoscaling(lower=0.55, upper=0.75) if seed % 8 in (0, 7) else None,
        )
        self.limits = replace(self.limits, autoscales=self.shared.autoscaling is not None)
        self.division = PoolDivision(self.shared)
        self.below = VirtualProvider("pool", self.clock, offer=self.offer, lease_s=60.0, faults_of=self._faults)
        self.cloud = (HeardCloud if sick else FaultyCloud)(self.below, rng, 0.1 * self.broker_faults)
        if isinstance(self.cloud, HeardCloud):
            self.cloud.run = self
        self.journal = MemoryPoolJournal()
        self.pool: Pool | None = None
        self.down_until = -math.inf
        self.promises: list[Promise] = []
        self._decide_at, self._seen, self._ids, self._checks = -math.inf, (), 0, 0
        self._grants: dict[str, InstanceCap] = {}
        sizes = rng.choice(((GPUS,), (GPUS,), (2,), (1,), (1, 2, GPUS)))
        self.members = [self._member(f"e{index}", rng.choice(sizes)) for index in range(rng.randint(2, 5))]

    # What is drawn.

    def _faults(self, machine: str, _market: Market) -> InstanceFaults:
        rng, kind = self.rng, self.rng.random()
        if self.sick is not None and self.sick.random() < self.ill_share:
            silent_after_s = self.sick.choice((0.0, self.sick.expovariate(1 / 300.0)))
            worker = Illness(starts_workers=False)
            self.illnesses[machine] = self.sick.choice((worker, Illness(silent_after_s=silent_after_s)))
        late_s = self.offer.provision_delay_s * self.starts.uniform(0.5, 3.0) if self.is_slow else None
        if not self.machine_faults:
            return InstanceFaults(provision_s=late_s)
        if kind < 0.05 * self.machine_faults:
            return InstanceFaults(refused="no capacity", sold_out=True)
        if kind < 0.1 * self.machine_faults:
            return InstanceFaults(stillborn_after_s=rng.uniform(1.0, 60.0), provision_s=math.inf)
        ends = rng.expovariate(self.machine_faults / 3600.0)
        notice_s = rng.choice((None, 20.0))
        return InstanceFaults(provision_s=late_s, ends_after_s=ends, preempted=rng.random() < 0.5, notice_s=notice_s)

    def _member(self, name: str, gpus: int) -> Member:
        rng = self.rng
        single_s = math.exp(rng.uniform(1.0, 4.0))
        profile = Profile(
            seconds_per_iteration={size: single_s / size**0.8 for size in (1, 2, 4, 8)}, trial_startup_s=2.0
        )
        most = self.offer.max_instances * (GPUS // gpus)
        offer = Offer(
            instance_type="v",
            gpus=gpus,
            price_usd_per_hour=self.offer.price_usd_per_hour * gpus / GPUS,
            max_instances=most,
            provision_delay_s=self.offer.provision_delay_s,
            init_delay_s=self.offer.init_delay_s,
            minimum_billed_s=0.0,
        )
        counts = sorted((rng.randint(1, 8) for _ in range(rng.randint(1, 3))), reverse=True)
        stages = tuple(Stage(trials=trials, iterations=rng.randint(1, 5)) for trials in counts)
        plan = Plan(stages=tuple(self._stage_plan(offer) for _ in stages))
        prediction = predict(stages, plan, profile, offer)
        arrives_at = self.start_at + rng.choice((0.0, rng.uniform(0.0, 600.0)))
        is_due, room = rng.random() < 0.6, rng.choice((1.0, 1.05, 1.5, 3.0))
        deadline_at = arrives_at + START_S + room * prediction.jct_s + 0.5 if is_due else None
        capped = rng.random() < 0.3
        job = replace(
            JOB,
            name=name,
            stages=stages,
            plan=plan,
            prediction=prediction,
            offer=offer,
            profile=profile,
            deadline_s=None,
            max_cost_usd=rng.uniform(0.5, 2.0) * prediction.cost_usd if capped else None,
            release_margin_s=MARGIN_S,
            replan=rng.random() < 0.3,
            lease_s=LEASE_S,
            start_attempts=START_ATTEMPTS,
        )
        member = Member(self, job, arrives_at, deadline_at)
        member.calls_left = self._life()
        return member

    def _stage_plan(self, offer: Offer) -> StagePlan:
        instances = self.rng.randint(1, offer.max_instances)
        sizes = [size for size in gang_sizes(offer.gpus, 1, 8) if slots(instances, offer.gpus, size) > 0]
        return StagePlan(instances=instances, gpus_per_trial=self.rng.choice(sizes), market="on_demand")

    def _life(self) -> float:
        return 1.0 + self.rng.expovariate(self.driver_faults / 200.0) if self.driver_faults else math.inf

    def new_id(self) -> int:
        self._ids += 1
        return self._ids

    # Who answers.

    def silent_at(self, machine: str) -> tuple[float, Illness]:
        """Return when a machine falls silent, and what ails it."""
        illness = self.illnesses.get(machine, Illness())
        if illness.silent_after_s == math.inf:
            return math.inf, illness
        return self.below.runs_at(machine) + illness.silent_after_s, illness

    def as_heard(self, status: InstanceDescription) -> InstanceDescription:
        """Return a machine as the broker hears it."""
        if status.running_at is None or status.ended_at is not None:
            return status
        now, (silent_at, illness), (begin, end) = self.clock.now(), self.silent_at(status.instance), self.cut_off
        if illness.silent_after_s == 0.0:
            return replace(status, silent_since=status.running_at + READY_S)
        answered_at = min(now, silent_at)
        late_s = Random(f"{self.seed} {status.instance} {begin}").uniform(0.0, 40.0)
        if begin <= answered_at < end + late_s:
            answered_at = begin if status.running_at < begin else status.running_at + READY_S  # it has never answered
        return replace(status, silent_since=answered_at)

    def _cut_off(self, now: float) -> None:
        """Let the broker hear no machine for a while, now and then."""
        if self.sick is not None and now > self.cut_off[1] and self.sick.random() < 0.005:
            self.seen["cut off"] += 1
            self.cut_off = now, now + self.sick.choice((20.0, 100.0, 900.0))

    # The broker.

    def broker(self) -> Pool:
        while self.pool is None:
            try:
                self.pool = Pool(self.cloud, self.journal, self.limits, self.clock.now, start=lambda work: work())
            except BrokerKilled:
                self.seen["broker dies"] += 1
        return self.pool

    def broker_died(self) -> None:
        """It is gone; the next call starts another one, or a look some time later."""
        self.seen["broker dies"] += 1
        self.tell("the broker dies")
        self.pool = None
        self.down_until = self.clock.now() + self.rng.choice((0.0, 5.0, 40.0, 200.0))

    def tell(self, what: str) -> None:
        if self.story is not None:
            self.story.append(f"{self.clock.now() - self.start_at:9.2f} {what}")

    # The run.

    def run(self) -> None:
        """Run it to its end, and check it all the way. Raises AssertionError."""
        try:
            self._go_on()
        finally:
            for member in self.members:
                member.kill()
        self._end()

    def _go_on(self) -> None:
        tick_at = self.clock.now()
        while not all(member.is_over for member in self.members):
            waits = [m.begins_at for m in self.members if not m.is_alive and not m.is_over]
            self.clock.advance_to(min([tick_at, *waits, *(m.next_at() for m in self.members)]))
            now = self.clock.now()
            assert now < self.start_at + LATEST_S, "it does not end"
            if now >= tick_at:
                tick_at = now + self.rng.uniform(0.5, LOOK_S)
                self._tick(now)
            for member in self.members:
                self._step(member, now)
            self._share(now)

    def _step(self, member: Member, now: float) -> None:
        if not member.is_begun and not member.is_promised and now >= member.arrives_at:
            self._admit(member, now)
        if not member.is_alive and not member.is_over and now >= member.begins_at:
            if not member.is_begun:
                self._begin(member, now)
            self.tell(f"a driver of {member.name} starts")
            member.start()
        elif member.next_at() <= now:
            member.step()
        else:
            return
        if not member.is_alive and member.away_since is not None:
            self._stopped(member, now)
        elif not member.is_alive and member.finish is None:
            self._died(member, now)
        if member.is_over:
            self.promises = [one for one in self.promises if one.experiment != member.name]
            self._resume(member, now)

    def _stopped(self, member: Member, now: float) -> None:
        """It waits for its checkpoint store, and goes on by itself."""
        assert self.odd is not None
        self.seen["checkpoint store away"] += 1
        self.tell(f"{member.name} waits for its checkpoint store")
        member.begins_at = now + self.odd.choice((1.0, 30.0, 400.0, 1000.0))

    def _resume(self, member: Member, now: float) -> None:
        """Resume what has ended, now and then: until the pool has decided it holds nothing."""
        finish, can = member.finish, can_go_on(member.controller.state)
        if self.odd is None or finish is None or not can or member.resumes == 0 or self.odd.random() < 0.3:
            return
        member.resumes -= 1
        self.seen[f"resumed after {finish.outcome}"] += 1
        self.tell(f"{member.name} is resumed")
        member.finish, member.deadline_at, member.ended_at = None, None, math.inf
        member.begins_at = now + self.odd.choice((0.0, 10.0, 400.0))
        member.ask(InstanceCap(max_instances=0), now, begins=True)

    def _died(self, member: Member, now: float) -> None:
        self.seen["driver dies"] += 1
        self.tell(f"the driver of {member.name} dies")
        member.is_gone = self.rng.random() < 0.1
        member.begins_at = now + self.rng.choice((0.0, 10.0, 100.0, 400.0))
        member.calls_left = self._life()

    def _admit(self, member: Member, now: float) -> None:
        """Promise its plan if that fits beside the others until its deadline; else it runs without one."""
        member.is_promised = True
        if member.deadline_at is None:
            return
        job, deadline_at = member.job, member.deadline_at
        gpus = [choice.instances * job.offer.gpus for choice in job.plan.stages]
        lengths = [one.provisioning_s + one.duration_s for one in job.prediction.stages]
        spans = [Span(gpus=gpus[0], duration_s=START_S)]
        spans += [Span(gpus=g, duration_s=s) for g, s in zip(gpus, lengths, strict=True)]
        slot = calendar_of(self.shared, self.promises).fits(spans, deadline_at, now)
        self.seen["refused" if slot is None else "promised"] += 1
        if slot is None:
            member.deadline_at = None
            return
        self.tell(f"{member.name} is promised {spans} from {slot.start_at - self.start_at:.2f}")
        held = tuple((span.gpus, span.duration_s) for span in spans)
        self.promises.append(Promise(experiment=member.name, start_at=slot.start_at, spans=held))

    def _begin(self, member: Member, now: float) -> None:
        if member.deadline_at is not None:
            member.job = replace(member.job, deadline_s=member.deadline_at - now)
        calendar = calendar_of(self.shared, self.promises)
        most = calendar.most(member.name, now) // member.job.offer.gpus
        member.ask(InstanceCap(max_instances=0, promised_instances=most or None), now, begins=True)

    def _disturb(self, now: float) -> None:
        """Set a limit by hand, or restart the service, now and then."""
        alive = [member for member in self.members if member.is_alive]
        if self.odd is None or not alive:
            return
        if self.odd.random() < 0.005:
            self.seen["limit by hand"] += 1
            member = self.odd.choice(alive)
            member.limit(now - 60.0, self.odd.choice((None, 0, 1, 2)))
        if self.odd.random() < 0.002:
            self.seen["service restarts"] += 1
            self.division, self._grants, self._seen = PoolDivision(self.shared), {}, ()
            for member in self.members:
                member.asked = None

    def _tick(self, now: float) -> None:
        self._disturb(now)
        self._cut_off(now)
        if self.pool is not None and self.rng.random() < 0.005 * self.broker_faults:
            self.broker_died()
        if self.pool is not None or now >= self.down_until:
            try:
                self.broker().look()
            except BrokerKilled:
                self.broker_died()
        for member in self.members:
            if member.is_alive:
                member.backend.fleet.renew(now)
                member.backend.fleet.look()
        self._check(now)

    def _share(self, now: float) -> None:
        """Divide the pool, as `rubberband.api.experiments.sharing` does."""
        going = [m for m in self.members if m.is_begun and not m.is_over]
        calendar = calendar_of(self.shared, self.promises)
        promised = {name: calendar.promised(name, now) for name in calendar.promises}
        waiting = () if self.pool is None else self.pool.waiting()
        running = {
            m.name: RunningExperiment(
                job=m.controller.job,
                state=m.controller.state,
                now=now,
                arrived_at=m.arrives_at,
                waits={instance for name, instance in waiting if name == m.name},
                away_s=None if m.away_since is None else now - m.away_since,
            )
            for m in going
        }
        stages = [
            (m.deaths, m.away_since, len(m.controller.state.stages), m.controller.state.course, m.is_alive)
            if self.odd is not None
            else (m.deaths, len(m.controller.state.stages), m.controller.state.course)
            for m in going
        ]
        seen = promised, stages, [(name, one.overdue()) for name, one in running.items()]
        if seen != self._seen or now >= self._decide_at:
            self._seen, self._decide_at = seen, now + DECIDE_EVERY_S
            self._decide(going, running, calendar, now)
        for member in going:
            if member.name in self._grants:
                member.ask(self._grants[member.name], now)

    def _decide(
        self, going: Sequence[Member], running: dict[str, RunningExperiment], calendar: Calendar, now: float
    ) -> None:
        calendar = followed(calendar, running, now)
        self.promises = [
            Promise(experiment=name, start_at=start_at, spans=tuple((span.gpus, span.duration_s) for span in plan))
            for name, (start_at, plan) in calendar.promises.items()
        ]
        self._grants, total = self.division.decide(calendar, running, now), 0
        for name, grant in self._grants.items():
            member, least = next(m for m in going if m.name == name), calendar.promised(name, now)
            gpus = grant.max_instances * member.job.offer.gpus
            assert gpus >= least or member.away_since is not None, f"{name}: {gpus} GPUs of {least} promised"
            total += gpus
            self.tell(f"{name} is promised {least} GPUs now, and granted {grant}")
        if (scale := self.division.scale) is not None:
            assert total <= scale.instances * GPUS, f"{total} GPUs granted on {scale.instances} instances"
            assert 0 <= scale.instances <= self.limits.instances
            self.seen["scaled"] += 1
            if self.pool is not None:
                self.pool.scale(scale.instances, scale.efficiency)

    # What must hold.

    def _check(self, now: float) -> None:
        machines = {status.instance for status in self.below.describe() if status.ended_at is None}
        assert len(machines) <= self.limits.instances, "more machines live than the pool may have"
        used: Counter[str] = Counter()
        for member in self.members:
            for instance, life in member.backend.fleet.held.items():
                if life.running_at is not None and not life.over:
                    used[member.provider.node(instance)] += member.job.offer.gpus
        twice = {name: gpus for name, gpus in used.items() if name in machines and gpus > GPUS}
        assert not twice, f"lent twice: {twice}"
        if self.sick is not None and self.pool is not None:
            self._check_sick(now)
        self._checks += 1
        if self._checks % CHECK_MONEY_EVERY == 0:  # bills only grow
            self._check_money(now)

    def _check_sick(self, now: float) -> None:
        """No machine is lent on after a tenant gave it up, and none is blamed that would have answered."""
        faults: dict[str, float] = {}
        for one in self.broker().state.slices.values():
            if one.machine is not None and one.fault and one.ended_at is not None:
                faults[one.machine.name] = min(faults.get(one.machine.name, math.inf), one.ended_at)
        for one in self.broker().state.slices.values():
            if one.machine is not None and one.running_at is not None:
                given_up_at = faults.get(one.machine.name, math.inf)
                assert one.running_at <= given_up_at, f"{one.machine.name} is lent after it was given up"
        for machine in self.broker().state.machines.values():
            if machine.retired.startswith("it has not answered"):
                self.seen["retired as silent"] += 1
                silent_s = now - self.silent_at(machine.name)[0]
                assert silent_s > SILENT_S, f"{machine.name} is blamed for the network: silent for {silent_s:.0f} s"

    def _check_money(self, now: float) -> None:
        cap = self.limits.max_usd_per_month
        billed_usd = self.below.bill_usd(now) - self.below.bill_usd(month_begin(now))
        assert cap is None or billed_usd <= cap + 1e-9, f"{billed_usd} USD billed of {cap} this month"
        if self.pool is None:
            return
        validate_pool(self.pool.state, self.pool.now())
        if not self.seen["broker dies"]:  # until a new broker knows which leases have ended, their bills go on
            self._check_bills(now)

    def _check_bills(self, now: float) -> None:
        bills_usd = self.broker().state.lent_usd(now)
        for member in self.members:
            usd, most = bills_usd.get(f"{member.name}.r", 0.0), member.job.max_cost_usd
            assert most is None or usd <= most + 1e-6, f"{member.name} is billed {usd:.6f} USD of max_cost={most:.6f}"

    def _end(self) -> None:
        """All drivers are gone: nothing may be left, the bills add up, and every promise was kept."""
        self.cloud.kill_share = 0.0
        until = self.clock.now() + LEASE_S + 200.0 + self.limits.idle_s + 3 * self.limits.minimum_billed_s
        while self.clock.now() < until:
            self.clock.advance_to(self.clock.now() + LOOK_S)
            self.broker().look()
            self._check(self.clock.now())
        left = [status.instance for status in self.below.describe() if status.ended_at is None]
        assert not left, f"machines {left} are left"
        self._check_money(self.clock.now())
        self._check_bills(self.clock.now())
        self._check_sums(self.clock.now())
        for member in self.members:
            self._check_end(member)

    def _check_sums(self, now: float) -> None:
        state, provider_usd = self.broker().state, self.below.bill_usd(now)
        lent = state.lent_usd(now)
        total_usd = math.fsum(lent.values()) + state.idle_usd(now)
        assert math.isclose(total_usd, provider_usd, abs_tol=1e-6), f"bills {total_usd} USD, provider {provider_usd}"
        for member in self.members:
            finish, usd = member.finish, lent.get(f"{member.name}.r", 0.0)
            if finish is not None:
                ledger_usd = bill_usd(member.controller.state, now)
                assert usd <= ledger_usd + 1e-6, f"{member.name} is billed {usd} USD, and its ledger says {ledger_usd}"

    def _check_end(self, member: Member) -> None:
        if member.finish is None:
            return
        self.seen[f"ended {member.finish.outcome}"] += 1
        limits, job = self.limits, member.job
        is_short = limits.max_usd_per_month is not None or job.max_cost_usd is not None
        is_lost = any(one.reason or one.warned_at is not None for one in self.broker().state.machines.values())
        for reason in member.backend.fleet.reasons:
            self.seen[reason] += 1
        # Machines that never began to run are failed starts as well, and are not ill.
        is_sick = len(member.backend.fleet.used & self.illnesses.keys()) >= START_ATTEMPTS
        is_sick = is_sick or "it did not start" in member.backend.fleet.reasons
        is_failed = member.finish.outcome == "failed" and "workers did not start" in member.finish.reason
        assert is_sick or not is_failed, f"{member.name} had too few sick machines to fail: {member.finish.reason}"
        is_lost = is_lost or is_sick
        if is_short or is_lost or self.seen["driver dies"] or self.odd is not None:
            return
        assert member.finish.outcome == "done", f"{member.name}: {member.finish.outcome} ({member.finish.reason})"
        if member.deadline_at is not None and not self.is_slow and self.sick is None:
            late_s = member.ended_at - member.deadline_at - LOOK_S * self.seen["broker dies"]
            assert late_s <= 0.0, f"{member.name} is {late_s:.1f} s late, and lost nothing"
            self.seen["promise kept"] += 1


def wrong_end(run: SharedRun) -> str:
    """Run it; return what must not be, empty if all is well."""
    try:
        run.run()
    except AssertionError as error:
        return str(error) or "an assertion failed"
    return ""


def tell(seed: int, **options: bool) -> None:
    """Tell the story of a seed; `odd`, `sick`: as `SharedRun` has them."""
    run = SharedRun(seed, keeps_story=True, **options)
    for member in run.members:
        print(member.job)
    wrong = wrong_end(run)
    print("\n".join(run.story or ()))
    print(run.shared, run.limits, dict(run.seen), sep="\n")
    print(f"WRONG: {wrong}" if wrong else "all is well")
