"""A driver's cloud for the crash points: the real AwsProvider on the fake EC2, on a clock that jumps, without Ray.

It does what `rubberband.executor.ray.fleet` does with threads: what a thread would do while another waits is done
whenever the provider sleeps. Trials and their times are those of the virtual backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from rubberband.cloud.aws.provider import AwsProvider
from rubberband.cloud.catalogue import boot_timeouts
from rubberband.cloud.provider import InstanceDescription
from rubberband.errors import NoCapacityError, ProviderError
from rubberband.executor import Agenda, DriverResumed, Event, Faults, InstanceRunning, LiveInstance, VirtualBackend
from rubberband.executor.core.backend import Lifecycle, resumed
from rubberband.executor.ray.fleet import described
from rubberband.values.plan import Market
from tests.harness.crash_world import BOOT_LEASE_S, LEASE_S, STEP_S, TYPE, World
from tests.harness.together import LaterInbox

RETRY_S = 2.0
NODE_DEAD_S = 40.0
"""Ray takes a node for dead that has not answered for so long."""
READY_S = boot_timeouts([TYPE]).ready_s


@dataclass(slots=True)
class _Hold:
    """One instance as the driver sees it."""

    life: Lifecycle
    reached: bool = False
    """Its worker puts the lease off."""
    useless_at: float = math.inf
    """It is given up then, unless a worker lives on it."""


class CloudFleet:
    """What the driver holds; stands in for the virtual backend's fleet."""

    def __init__(self, world: World, provider: AwsProvider, agenda: Agenda) -> None:
        self._world, self._provider, self._agenda = world, provider, agenda
        self._holds: dict[str, _Hold] = {}
        self._wanted: dict[tuple[Market, float | None], list[str]] = {}
        """Names that are launched at the same moment."""
        self._looked_at = -math.inf
        self._looks = self._closing = False
        self.hold_until = -math.inf
        self._began_at = world.clock.now()
        world.while_asleep = self._do_what_threads_do

    @property
    def gone(self) -> set[str]:
        return {name for name, hold in self._holds.items() if hold.life.over or not self._world.works(name)}

    def next_end_at(self) -> float:
        return math.inf

    def renew(self, _at: float) -> None:
        """The driver lives: leases are put off, as far as the budget reaches."""
        if self._closing or self.hold_until == -math.inf:  # how far the budget reaches is not known yet
            return
        until = min(self._now() + LEASE_S, self.hold_until)
        self._provider.renew_lease(min(self._now() + BOOT_LEASE_S, self.hold_until))
        for name, hold in self._holds.items():
            if hold.reached and not hold.life.over:
                self._world.beat(name, until)
                self._reach(name, hold)
            if self._now() >= hold.useless_at and hold.life.end():
                self._begin(partial(self._lose, name, hold, self._now() + LEASE_S, _NO_USE))

    def _reach(self, name: str, hold: _Hold) -> None:
        """The worker tells of an interruption; Ray tells of a node that does not answer."""
        if self._world.is_noticed(name):
            self._agenda.add_all(self._now(), hold.life.interrupt(self._now(), free_if_taken=True))
        if not self._world.is_hung(name):
            hold.useless_at = self._now() + NODE_DEAD_S

    def _now(self) -> float:
        return self._world.clock.now()

    def _do_what_threads_do(self) -> None:
        self.renew(self._now())
        if not self._closing and self._now() - self._looked_at >= self._provider.look_s:
            self._look()

    def launch(self, instance: str, market: Market, first_lease_s: float | None = None) -> None:
        """Rent an instance, with others that are rented at the same moment; its events follow."""
        if instance not in self._holds:
            self._holds[instance] = _Hold(Lifecycle(instance=instance))
            together = self._wanted.setdefault((market, first_lease_s), [])
            together.append(instance)
            if len(together) == 1:
                self._begin(lambda: self._launch(market, first_lease_s))
            self._watch()

    def _begin(self, work: Callable[[], Event | None]) -> None:
        """Do it as soon as nothing else is done."""
        threads = self._world.threads
        threads.append(work)

        def begun(_now: float) -> Event | None:
            threads.remove(work)
            return work()

        self._agenda.add(self._now(), begun)

    def _launch(self, market: Market, first_lease_s: float | None) -> None:
        names = [name for name in self._wanted.pop((market, first_lease_s), ()) if not self._holds[name].life.over]
        failed: Mapping[str, ProviderError] = {}
        try:
            self.renew(self._now())
            failed = self._provider.launch_all(names, market, first_lease_s=first_lease_s)
        except ProviderError as error:
            failed = dict.fromkeys(names, error)
        for name, error in failed.items():
            hold = self._holds[name]
            if hold.life.end():  # a lost answer is no refusal: it is released
                self._begin(partial(self._lose, name, hold, self._now() + LEASE_S, error))

    def _lose(self, instance: str, hold: _Hold, until: float, why: ProviderError) -> Event | None:
        """Give back what is of no use, or was not launched."""
        status: InstanceDescription | None = None
        try:
            status = self._provider.release(instance, fault=str(why))
        except ProviderError:
            if not self._is_unknown(instance) and self._now() < until:
                self._agenda.add(self._now() + RETRY_S, lambda _: self._lose(instance, hold, until, why))
                return None
        sold_out = isinstance(why, NoCapacityError)
        self._agenda.add_all(self._now(), hold.life.lose(status, str(why), self._now(), sold_out=sold_out))
        return None

    def release(self, instance: str) -> None:
        hold = self._holds.setdefault(instance, _Hold(Lifecycle(instance=instance)))
        if hold.life.end():
            self._begin(lambda: self._release(instance, hold))

    def _release(self, instance: str, hold: _Hold) -> None:
        status: InstanceDescription | None = None
        try:
            status = self._provider.release(instance)
        except ProviderError:
            if not self._is_unknown(instance):
                self._agenda.add(self._now() + RETRY_S, lambda _: self._release(instance, hold))
                return
        self._agenda.add_all(self._now(), hold.life.release(status, self._now()))

    def _is_unknown(self, instance: str) -> bool:
        with suppress(ProviderError):
            return all(status.instance != instance for status in self._provider.describe())
        return False

    def _watch(self) -> None:
        if not self._looks:
            self._looks = True
            self._agenda.add(self._now() + self._provider.look_s, self._watched)

    def _watched(self, _now: float) -> None:
        self._looks = False
        if any(not hold.life.over for hold in self._holds.values()):
            self._look()
            self._watch()

    def _look(self) -> None:
        self._looked_at = self._now()
        with suppress(ProviderError):  # it is asked again at once
            for status in self._provider.describe():
                self._take_in(status)

    def _take_in(self, status: InstanceDescription) -> None:
        hold = self._holds.get(status.instance)
        if hold is None or hold.life.over:
            return
        if status.ended_at is not None and hold.life.end():
            events = hold.life.lose_ended(status, self._now(), began_at=self._began_at)
        else:
            events = hold.life.see(status, self._now(), free_if_taken=True)
            if any(isinstance(event, InstanceRunning) for event in events):
                self._assemble(status.instance, hold)
        self._agenda.add_all(self._now(), events)

    def _assemble(self, instance: str, hold: _Hold) -> None:
        hold.useless_at = self._now() + READY_S

        def ready(now: float) -> Event | None:
            if hold.life.over:
                return None
            if not self._world.works(instance):
                self._agenda.add(now + STEP_S, ready)
                return None
            hold.reached, hold.useless_at = True, now + NODE_DEAD_S
            return self._agenda.begin(now, hold.life.ready(now))

        self._agenda.add(self._now() + self._world.job.offer.init_delay_s, ready)

    def reconcile(self, known: Collection[str]) -> DriverResumed:
        """Adopt the `known` that live, release the others, tell what has ended."""
        resumed_at = self._now()
        found = described(self._provider, resumed_at + BOOT_LEASE_S, self._now, self._world.sleep)
        event = resumed(found, known, self._provider.release, resumed_at)
        for instance in event.live:
            self._adopt(instance)
        return event

    def _adopt(self, found: LiveInstance) -> None:
        life = Lifecycle(instance=found.instance, running_at=found.running_at, hour_prices_usd=found.hour_prices_usd)
        hold = self._holds[found.instance] = _Hold(life)
        if found.running_at is not None:
            self._assemble(found.instance, hold)
        self._watch()

    def close(self) -> None:
        self._closing = True
        self._provider.close()


class CloudBackend(VirtualBackend):
    """Virtual trials on instances of the fake EC2."""

    def __init__(
        self, world: World, provider: AwsProvider, inbox: LaterInbox, metric_of: Callable[[int, int], float]
    ) -> None:
        """Its driver wakes up for what is in the inbox."""
        job = world.job
        super().__init__(
            job.name,
            job.offer,
            job.profile,
            metric=job.metric,
            metric_of=metric_of,
            limits=job.limits,
            clock=world.clock,
            faults=Faults(ends=world.ends),
        )
        self._inbox = inbox
        self._world = world
        self.fleet = CloudFleet(world, provider, self.agenda)  # type: ignore[assignment]

    def next_events(self, wake_at: float | None) -> Sequence[Event]:
        return super().next_events(self._inbox.wake_at(wake_at))

    def due_events(self) -> list[Event]:
        events: list[Event] = []
        now = self.now()
        while (action := self.agenda.pop_due(now)) is not None:
            event = action(self.now())  # those before may have taken a while
            if event is not None:
                events.append(event)
        return events

    def _advance(self, instant: float) -> None:
        while self.now() < instant:
            self.fleet.renew(self.now())
            self._world.advance_to(min(instant, self.now() + STEP_S))


_NO_USE = ProviderError("its Ray node stopped answering")
