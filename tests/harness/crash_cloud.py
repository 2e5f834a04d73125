"""A driver's cloud for the crash points: the real AwsProvider on the fake EC2, on a clock that jumps, without Ray.

It does what `rubberband.executor.ray.fleet` does with threads: what a thread would do while another waits is done
whenever the provider sleeps. Trials and their times are those of the virtual backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from rubberband.cloud.aws.provider import AwsProvider
from rubberband.cloud.catalogue import boot_timeouts
from rubberband.cloud.provider import InstanceDescription
from rubberband.errors import NoCapacityError, ProviderError
from rubberband.executor.core import backend
from rubberband.executor.core.backend import living, released, running
from rubberband.executor.core.events import (
    DriverResumed,
    Event,
    InstanceInterrupted,
    InstanceLost,
    InstancePriced,
    InstanceReady,
    InstanceRefused,
)
from rubberband.executor.ray.fleet import described
from rubberband.executor.virtual.backend import VirtualBackend
from rubberband.executor.virtual.fleet import Agenda, Faults
from rubberband.values.plan import Market
from tests.harness.crash_world import BOOT_LEASE_S, LEASE_S, STEP_S, TYPE, World

RETRY_S = 2.0
NODE_DEAD_S = 40.0
"""Ray takes a node for dead that has not answered for so long."""
READY_S = boot_timeouts([TYPE]).ready_s


@dataclass(slots=True)
class _Hold:
    """One instance as the driver sees it."""

    running: bool = False
    reached: bool = False
    """Its worker puts the lease off."""
    useless_at: float = math.inf
    """It is given up then, unless a worker lives on it."""
    interrupted: bool = False
    over: bool = False
    hour_prices_usd: tuple[float, ...] | None = None


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
        """Instances that no worker lives on."""
        return {name for name, hold in self._holds.items() if hold.over or not self._world.works(name)}

    def next_end_at(self) -> float:
        """Nothing is known beforehand."""
        return math.inf

    def renew(self, _at: float) -> None:
        """The driver lives: leases are put off, as far as the budget reaches."""
        if self._closing or self.hold_until == -math.inf:  # how far the budget reaches is not known yet
            return
        until = min(self._now() + LEASE_S, self.hold_until)
        self._provider.renew_lease(min(self._now() + BOOT_LEASE_S, self.hold_until))
        for name, hold in self._holds.items():
            if hold.reached and not hold.over:
                self._world.beat(name, until)
                self._reach(name, hold)
            if self._now() >= hold.useless_at and not hold.over:
                hold.over = True
                self._begin(partial(self._lose, name, hold, self._now() + LEASE_S, _NO_USE))

    def _reach(self, name: str, hold: _Hold) -> None:
        """The worker tells of an interruption; Ray tells of a node that does not answer."""
        if self._world.is_noticed(name) and not hold.interrupted:
            hold.interrupted = True
            self._tell(InstanceInterrupted(occurred_at=self._now(), instance=name, free_if_taken=True))
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
            self._holds[instance] = _Hold()
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
        names = [name for name in self._wanted.pop((market, first_lease_s), ()) if not self._holds[name].over]
        failed: Mapping[str, ProviderError] = {}
        try:
            self.renew(self._now())
            failed = self._provider.launch_all(names, market, first_lease_s=first_lease_s)
        except ProviderError as error:
            failed = dict.fromkeys(names, error)
        for name, error in failed.items():
            hold = self._holds[name]
            was_over, hold.over = hold.over, True
            if not was_over:  # a lost answer is no refusal: it is released
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
        if not hold.running and (status is None or status.running_at is None):
            sold_out = isinstance(why, NoCapacityError)
            return InstanceRefused(occurred_at=self._now(), instance=instance, reason=str(why), sold_out=sold_out)
        if status is not None and status.running_at is not None and not hold.running:
            hold.running, hold.hour_prices_usd = True, status.hour_prices_usd
            self._tell(running(status, status.running_at, self._now()))
        if status is not None:
            self._priced(hold, status)
        ended_at = (status and status.ended_at) or self._now()
        self._tell(InstanceLost(occurred_at=self._now(), instance=instance, ended_at=ended_at, reason=str(why)))
        return None

    def release(self, instance: str) -> None:
        """Give an instance back; InstanceReleased follows."""
        hold = self._holds.get(instance)
        if hold is None or not hold.over:
            if hold is not None:
                hold.over = True
            self._begin(lambda: self._release(instance))

    def _release(self, instance: str) -> Event | None:
        status: InstanceDescription | None = None
        try:
            status = self._provider.release(instance)
        except ProviderError:
            if not self._is_unknown(instance):
                self._agenda.add(self._now() + RETRY_S, lambda _: self._release(instance))
                return None
        if status is not None:
            self._priced(self._holds.get(instance), status)
        gone = released(instance, status, self._now())
        self._agenda.add(self._now(), lambda _: gone)
        return None

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
        if any(not hold.over for hold in self._holds.values()):
            self._look()
            self._watch()

    def _look(self) -> None:
        self._looked_at = self._now()
        with suppress(ProviderError):  # it is asked again at once
            for status in self._provider.describe():
                self._take_in(status)

    def _take_in(self, status: InstanceDescription) -> None:
        hold = self._holds.get(status.instance)
        if hold is None or hold.over:
            return
        if status.running_at is not None and not hold.running:
            hold.running, hold.hour_prices_usd = True, status.hour_prices_usd
            self._tell(running(status, status.running_at, self._now()))
            if status.ended_at is None:
                self._assemble(status.instance, hold)
        self._priced(hold, status)
        if status.ended_at is not None:
            hold.over = True
            self._tell(_ended(status, self._now(), self._began_at))

    def _priced(self, hold: _Hold | None, status: InstanceDescription) -> None:
        prices = status.hour_prices_usd
        if prices is not None and (hold is None or prices != hold.hour_prices_usd):
            if hold is not None:
                hold.hour_prices_usd = prices
            self._tell(InstancePriced(occurred_at=self._now(), instance=status.instance, hour_prices_usd=prices))

    def _tell(self, event: Event) -> None:
        self._agenda.add(self._now(), lambda _: event)

    def _assemble(self, instance: str, hold: _Hold) -> None:
        hold.useless_at = self._now() + READY_S

        def ready(now: float) -> Event | None:
            if hold.over:
                return None
            if not self._world.works(instance):
                self._agenda.add(now + STEP_S, ready)
                return None
            hold.reached, hold.useless_at = True, now + NODE_DEAD_S
            return InstanceReady(occurred_at=now, instance=instance)

        self._agenda.add(self._now() + self._world.job.offer.init_delay_s, ready)

    def reconcile(self, known: Collection[str]) -> DriverResumed:
        """Adopt the `known` that live, release the others, tell what has ended."""
        live, ended = [], []
        resumed_at = self._now()
        for status in described(self._provider, resumed_at + BOOT_LEASE_S, self._now, self._world.sleep):
            if status.ended_at is None and status.instance not in known:
                status = self._provider.release(status.instance)
            if status.ended_at is None:
                live.append(status)
            elif status.running_at is not None:
                ended.append(status)
        for status in live:
            self._adopt(status)
        return DriverResumed(
            occurred_at=resumed_at,
            live=tuple(map(living, live)),
            ended=tuple(map(backend.ended, ended)),
        )

    def _adopt(self, status: InstanceDescription) -> None:
        hold = self._holds[status.instance] = _Hold(
            running=status.running_at is not None, hour_prices_usd=status.hour_prices_usd
        )
        if hold.running:
            self._assemble(status.instance, hold)
        self._watch()

    def close(self) -> None:
        """Give everything back."""
        self._closing = True
        self._provider.close()


class CloudBackend(VirtualBackend):
    """Virtual trials on instances of the fake EC2."""

    def __init__(self, world: World, provider: AwsProvider) -> None:
        job = world.job
        super().__init__(
            job.name, job.offer, job.profile, metric=job.metric, clock=world.clock, faults=Faults(ends=world.ends)
        )
        self._world = world
        self._fleet = CloudFleet(world, provider, self._agenda)  # type: ignore[assignment]

    def _due_events(self) -> list[Event]:
        events: list[Event] = []
        now = self.now()
        while (action := self._agenda.pop_due(now)) is not None:
            event = action(self.now())  # those before may have taken a while
            if event is not None:
                events.append(event)
        return events

    def _advance(self, instant: float) -> None:
        while self.now() < instant:
            self._fleet.renew(self.now())
            self._world.advance_to(min(instant, self.now() + STEP_S))


_NO_USE = ProviderError("its Ray node stopped answering")


def _ended(status: InstanceDescription, at: float, began_at: float) -> Event:
    reason = status.reason or "ended by another user or process"
    if status.running_at is None:
        return InstanceRefused(
            occurred_at=at,
            instance=status.instance,
            reason=reason,
            failed_start=not (status.preempted or status.sold_out) and status.requested_at >= began_at,
            sold_out=status.sold_out,
        )
    assert status.ended_at is not None
    return InstanceLost(
        occurred_at=at,
        instance=status.instance,
        ended_at=status.ended_at,
        reason=reason,
        preempted=status.preempted,
        overslept=status.overslept(at),
    )
