"""Instances that the driver holds: launched, watched, made ready, and released."""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rubberband.cloud.provider import ClusterProvider, HeadError, InstanceDescription, NoRecordError, Provider
from rubberband.errors import NoCapacityError, ProviderError
from rubberband.executor.core.backend import LAST_EVENTS, Lifecycle, resumed
from rubberband.executor.core.events import DriverResumed, Event, InstanceRunning, LiveInstance
from rubberband.executor.ray import connection
from rubberband.executor.ray.connection import Connection, RemoteAgent
from rubberband.executor.ray.workers import Workers, WorkersError, last_line
from rubberband.spec.resources import LOG_LIMIT_BYTES
from rubberband.values.plan import Market


@dataclass(eq=False)
class Leases:
    """Renews the lease of a provider's instances in its own thread, until it is closed: never beyond the budget.

    Every `interval_s` the lease is extended to `lease_s` from now, but not beyond `hold_until`. Nothing is renewed
    before `hold_until` is called, or the first instance is requested: instances of an earlier driver may have used up
    the budget.
    """

    provider: Provider
    lease_s: float = field(kw_only=True)
    interval_s: float = field(kw_only=True)
    first_lease_s: float | None = field(default=None, kw_only=True)
    """Lease of an instance until it is ready, if that is longer."""
    clock: Callable[[], float] = field(default=time.time, kw_only=True)

    def __post_init__(self) -> None:
        self._first_lease_s = max(self.lease_s, self.first_lease_s or 0.0)
        self.former_until = self.clock() + self._first_lease_s
        """No lease that an earlier driver renewed reaches further."""
        self.held_until = math.inf
        """The latest argument of `hold_until`."""
        self._begun = False
        self._mutex = threading.Lock()
        self._renewed = -math.inf
        """The latest instant that the provider was given, as far as is known."""
        self._wake = threading.Event()
        self._closed = False
        threading.Thread(target=self._run, daemon=True, name="leases").start()

    @property
    def until(self) -> float | None:
        """The instant at which instances end themselves without another word; None: leave it as it is."""
        return min(self.clock() + self.lease_s, self.held_until) if self._begun else None

    def hold_until(self, instant: float) -> bool:
        """Hold nothing past `instant`; return whether leases reach further, which are cut at once."""
        self.held_until, self._begun = instant, True
        if instant < self._renewed:
            self._wake.set()
        return instant < min(self._renewed, self.clock() + self.lease_s)

    def renew(self) -> None:
        """Renew the leases. A failure is only logged: the lease is long enough for the next try."""
        with self._mutex:
            self._begun = True
            until = min(self.clock() + self._first_lease_s, self.held_until)
            self._renewed = max(self._renewed, until)  # also if its answer is lost
            try:
                self.provider.renew_lease(until)
            except Exception as error:
                _log.debug("the lease was not renewed: %s", error)
            else:
                self._renewed = until

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(self.interval_s)
            self._wake.clear()
            if self._begun and not self._closed:
                self.renew()

    def close(self) -> None:
        """Renew no more."""
        self._closed = True
        self._wake.set()


_LONGEST_WAIT_S = 0.5


class Mailbox:
    """Events on their way from the backend's threads to the driver. `occurred_at` never decreases."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._mutex = threading.RLock()
        self._latest = float("-inf")
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def stamp(self) -> float:
        """Return the instant, never before an earlier stamp."""
        with self._mutex:
            self._latest = max(self._latest, self._clock())
            return self._latest

    def put(self, event: Callable[[float], Event]) -> None:
        """Add the event that `event` makes of the present instant."""
        self.put_all(lambda now: [event(now)])

    def put_all(self, happen: Callable[[float], Sequence[Event]]) -> Sequence[Event]:
        """Add and return the events that `happen` makes of the present instant."""
        with self._mutex:
            events = happen(self.stamp())
            for event in events:
                self._events.put(event)
        return events

    def take(self, wake_at: float | None) -> list[Event]:
        """Return all events; if there are none, wait briefly for one, but not beyond `wake_at`."""
        wait_s = _LONGEST_WAIT_S if wake_at is None else min(_LONGEST_WAIT_S, wake_at - self._clock())
        events = []
        try:
            events.append(self._events.get(timeout=max(0.0, wait_s)))
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            return events


_log = logging.getLogger(__name__)

_WATCH_NODES_S = 1.0
_RETRY_S = 2.0
_CUT_S = 60.0
_LOOK_S = 0.1
_SETTLED_S = 10.0
"""The longest wait for threads that may still call Ray, before disconnecting."""


def cut_leases(
    agents: Callable[[], Sequence[RemoteAgent]], held_until: Callable[[], float], closing: threading.Event
) -> None:
    """Wait until no lease of another machine exceeds what the budget allows with one more instance.

    Raises ProviderError if one cannot be cut: if this process died, the bill could exceed its cap.
    """
    deadline = time.monotonic() + _CUT_S
    while late := [agent for agent in agents() if agent.reaches > held_until()]:
        if time.monotonic() >= deadline or closing.wait(_LOOK_S):
            names = ", ".join(sorted(agent.instance for agent in late))
            raise ProviderError(
                f"it is not requested: the budget covers it only with shorter leases of {names}, which "
                f"did not answer within {_CUT_S:.0f} s"
            )
        for agent in late:
            agent.hurry()


@dataclass(slots=True)
class _Hold:
    """One instance, from the order to launch it to its end."""

    workers: Workers
    agent: RemoteAgent | None
    """None for an instance that is this machine."""
    life: Lifecycle
    launched: threading.Event = field(default_factory=threading.Event)
    """Set when the provider has answered the launch, with success or not."""


def described(
    provider: ClusterProvider, until: float, clock: Callable[[], float], wait: Callable[[float], object]
) -> Sequence[InstanceDescription]:
    """Return what the provider describes, which is asked again until the instant `until` while it does not answer.

    A driver that gives up ends its instances. Those of a former one may live until their leases end.
    """
    while True:
        try:
            return provider.describe()
        except ProviderError:
            if clock() >= until:
                raise
        wait(provider.look_s)


@dataclass(eq=False)
class RayFleet:
    """Instances of one provider; their events go to the mailbox."""

    provider: ClusterProvider
    make_workers: Callable[[str, Callable[[str, str], None]], Workers]
    """(instance, callback for when it is sick) -> its workers."""
    mailbox: Mailbox
    leases: Leases = field(kw_only=True)
    """Closed with the fleet."""
    on_gone: Callable[[str], None] = field(kw_only=True)
    """Called with an instance that can no longer be used, before any event says so."""
    logs: Path | None = field(default=None, kw_only=True)
    """Folder in which the output of trials on other machines is collected."""
    log_limit_bytes: int = field(default=LOG_LIMIT_BYTES, kw_only=True)
    """Bytes of each log that are kept."""

    def __post_init__(self) -> None:
        self._connection = Connection()
        self._began_at = self.mailbox.stamp()
        self._mutex = threading.RLock()
        self._holds: dict[str, _Hold] = {}
        self._closing = threading.Event()
        for work in (self._watch, self._watch_nodes):
            connection.start(work, work.__name__)

    def workers(self, instance: str) -> Workers | None:
        """Return the workers of an instance that is held, or None."""
        with self._mutex:
            hold = self._holds.get(instance)
            return None if hold is None or hold.life.over else hold.workers

    def launch(self, instance: str, market: Market = "on_demand", first_lease_s: float | None = None) -> None:
        """Rent an instance; its events follow. Harmless when repeated."""
        with self._mutex:
            if instance not in self._holds:
                hold = self._holds[instance] = self._hold(instance)
                connection.start(lambda: self._launch(instance, market, first_lease_s, hold), f"launch-{instance}")

    def _hold(self, instance: str) -> _Hold:
        workers, agent = self.make_workers(instance, self._give_up), None
        if self.provider.remote:
            agent = RemoteAgent(
                instance,
                until=lambda: self.leases.until if self._renews else None,
                interval_s=self.leases.interval_s,
                logs=self.logs,
                log_limit_bytes=self.log_limit_bytes,
                on_notice=lambda: self._interrupted(instance),
                node=self.provider.node,
                node_label=self.provider.node_label,
                options=lambda: workers.options(),
            )
        return _Hold(workers, agent, Lifecycle(instance=instance))

    def _launch(self, instance: str, market: Market, first_lease_s: float | None, hold: _Hold) -> None:
        asked = False
        try:
            if self.provider.is_borrowed:
                self._connection.open(self.provider.ensure_head())
            else:
                self._connection.check()
            if not hold.life.over:
                cut_leases(self._agents, lambda: self.leases.held_until, self._closing)
                self.leases.renew()  # no first lease is longer than the latest one reaches ahead
                asked = True
                self.provider.launch(instance, market, first_lease_s=first_lease_s)
        except Exception as error:
            reason = str(error) if isinstance(error, ProviderError) else f"{type(error).__name__}: {last_line(error)}"
            failed_start, sold_out = isinstance(error, HeadError), isinstance(error, NoCapacityError)
            if self._end(instance, hold):
                # A lost answer is no refusal: the provider may have rented the instance.
                status = self._release_surely(instance, self.leases.clock() + self.leases.lease_s) if asked else None
                lose = partial(hold.life.lose, status, reason, failed_start=failed_start, sold_out=sold_out)
                self._report(instance, hold, lose)
        finally:
            hold.launched.set()

    def _report(self, instance: str, hold: _Hold, happen: Callable[[float], Sequence[Event]]) -> None:
        """Report what happens to an instance now; get it ready once it runs, and free its workers once it is gone."""
        with self._mutex:
            events = self.mailbox.put_all(happen)
        for event in events:
            if isinstance(event, LAST_EVENTS):
                connection.start(hold.workers.dismiss, f"dismiss-{instance}")
                if hold.agent is not None and self.provider.is_borrowed:
                    connection.start(hold.agent.end, f"end-{instance}")
            elif isinstance(event, InstanceRunning) and not hold.life.over:
                connection.start(lambda: self._assemble(instance, hold), f"assemble-{instance}")

    def hold_until(self, instant: float) -> None:
        """Let no lease reach beyond `instant`."""
        if self.leases.hold_until(instant):
            for agent in self._agents():
                agent.hurry()

    def _agents(self) -> list[RemoteAgent]:
        with self._mutex:
            holds = [hold for hold in self._holds.values() if hold.life.ended_at is None]
        return [hold.agent for hold in holds if hold.agent is not None]

    def release(self, instance: str, fault: str = "") -> None:
        """Release an instance; InstanceReleased follows. Harmless when repeated. `fault`: why it is of no use."""
        with self._mutex:
            if instance not in self._holds:  # only the provider may know it
                self._holds[instance] = self._hold(instance)
                self._holds[instance].launched.set()
            hold = self._holds[instance]
        if self._end(instance, hold):
            connection.start(lambda: self._release(instance, hold, fault), f"release-{instance}")

    def _release(self, instance: str, hold: _Hold, fault: str = "") -> None:
        while not hold.launched.wait(_RETRY_S):  # until the provider has answered the launch
            with contextlib.suppress(Exception):  # it may not know the instance yet
                self.provider.release(instance)
        if hold.agent is not None:
            hold.agent.collect()
        status = self._release_surely(instance, fault=fault)
        self._report(instance, hold, partial(hold.life.release, status))

    def _release_surely(self, instance: str, until: float = math.inf, *, fault: str = "") -> InstanceDescription | None:
        """Retry until the provider releases it: an instance that is held costs money.

        None: it has no record of it, or did not answer `until` then.
        """
        last = ""
        while True:
            try:
                return self.provider.release(instance, fault=fault)
            except NoRecordError as error:
                _log.warning("instance %s cannot be given back, and ends with its lease: %s", instance, error)
                return None
            except Exception as error:
                if isinstance(error, ProviderError) and self._unknown(instance):
                    return None
                reason = f"{type(error).__name__}: {error}"
                if reason != last:
                    _log.warning("instance %s is not released yet; retrying: %s", instance, reason)
                last = reason
                if self._closing.wait(_RETRY_S) or self.leases.clock() >= until:
                    return None

    def _unknown(self, instance: str) -> bool:
        """Whether the provider does not know the instance."""
        try:
            return all(status.instance != instance for status in self.provider.describe())
        except Exception:
            return False

    def _end(self, instance: str, hold: _Hold, *, at_fault: bool = False) -> bool:
        """Mark the end of `hold`; return False if it was marked before. `at_fault`: its machine is to blame."""
        with self._mutex:
            ends = hold.life.end()
            if ends and at_fault:
                for other in self._held():
                    self._holds[other].life.same_fault |= self.provider.node(other) == self.provider.node(instance)
        if ends:
            if hold.agent is not None:
                hold.agent.dismiss()
            self.on_gone(instance)
        return ends

    def _give_up(self, instance: str, reason: str) -> None:
        """Release an instance that cannot be used, and report it as lost."""
        hold = self._holds[instance]
        if self._end(instance, hold, at_fault=True):
            status = self._release_surely(instance, fault=reason)
            self._report(instance, hold, partial(hold.life.lose, status, reason, failed_start=True))

    def _assemble(self, instance: str, hold: _Hold) -> None:
        try:
            self._connection.open(self.provider.ensure_head())
            if hold.agent is not None:
                hold.agent.begin()
            hold.workers.device = self.provider.device  # that of nodes that join is known once one runs
            hold.workers.assemble(self.provider.slowness(instance))
        except (WorkersError, ProviderError) as error:
            self._give_up(instance, self._with_last_words(instance, str(error)))
        except Exception as error:
            self._give_up(instance, f"{type(error).__name__}: {last_line(error)}")
        else:
            self._report(instance, hold, hold.life.ready)

    def _with_last_words(self, instance: str, reason: str) -> str:
        """Return why an instance did not get ready, preceded by the cause in its log."""
        if self.workers(instance) is None:  # it was released, or is gone
            return reason
        try:
            cause = self.provider.last_words(instance)
        except Exception as error:  # the log only adds detail
            _log.debug("the boot status of instance %s is not available: %s", instance, error)
            return reason
        return f"{cause} ({reason})" if cause else reason

    def _watch(self) -> None:
        while not self._closing.wait(self.provider.look_s):
            self.look()

    def look(self) -> None:
        """Compare the held instances with the provider's list."""
        if not self._held():
            return
        try:
            statuses = self.provider.describe()
            head = self.provider.head()
        except Exception as error:  # the next look retries
            _log.debug("the provider does not list its instances: %s", error)
            return
        for status in statuses:
            with self._mutex:
                self._take_in(status)
        if self._connection.address is not None and head is None:
            self._connection.leave()

    def _watch_nodes(self) -> None:
        """Give up instances that run according to the provider, but whose Ray node is frozen or cut off."""
        while not self._closing.wait(_WATCH_NODES_S):
            with contextlib.suppress(Exception):  # the head is gone: `look` will see it
                if dead := self._connection.dead_nodes(self.provider.node_label):
                    for instance in self._held():
                        if self.provider.node(instance) in dead:
                            self._give_up(instance, "its Ray node stopped answering")

    def _held(self) -> list[str]:
        with self._mutex:
            return [instance for instance, hold in self._holds.items() if not hold.life.over]

    def _take_in(self, status: InstanceDescription) -> None:
        instance = status.instance
        hold = self._holds.get(instance)
        if hold is None or self._closing.is_set():
            return
        if hold.life.came_late(status):
            connection.start(lambda: self._release(instance, hold), f"release-{instance}")
        if status.ended_at is not None and self._end(instance, hold):
            self._report(instance, hold, partial(hold.life.lose_ended, status, began_at=self._began_at))
        else:
            self._report(instance, hold, partial(hold.life.see, status, free_if_taken=self._free_if_taken))

    @property
    def _free_if_taken(self) -> bool:
        return not self.provider.is_lent  # the broker has the machine

    @property
    def _renews(self) -> bool:
        """Whether the driver renews the leases of machines."""
        return not self.provider.is_lent and not self.provider.is_borrowed

    def _interrupted(self, instance: str) -> None:
        """Report, once, that the provider reclaims the instance."""
        hold = self._holds[instance]
        self._report(instance, hold, partial(hold.life.interrupt, free_if_taken=self._free_if_taken))

    def reconcile(self, known: Collection[str]) -> DriverResumed:
        """Adopt the `known` instances that live, release the others, and return what lives and what has ended."""
        if (head := self.provider.head()) is not None:
            self._connection.open(head)
        resumed_at = self.mailbox.stamp()
        descriptions = described(self.provider, self.leases.former_until, self.leases.clock, self._closing.wait)
        event = resumed(descriptions, known, self.provider.release, resumed_at)
        for instance in event.live:
            self._adopt(instance)
        return event

    def _adopt(self, live: LiveInstance) -> None:
        instance = live.instance
        hold = self._hold(instance)
        hold.life.running_at, hold.life.hour_prices_usd = live.running_at, live.hour_prices_usd
        hold.launched.set()
        with self._mutex:
            self._holds[instance] = hold
        if live.running_at is not None:
            if hold.agent is not None and self._renews:
                hold.agent.reaches = self.leases.former_until
            connection.start(lambda: self._assemble(instance, hold), f"assemble-{instance}")

    def close(self) -> None:
        """Disconnect from the cluster and release everything."""
        self._closing.set()
        self.leases.close()
        for hold in self._holds.values():
            if hold.agent is not None:
                hold.agent.dismiss()
        connection.settle(_SETTLED_S)
        ends = [self._connection.close, self.provider.close]
        if self.provider.is_borrowed:  # it gives back through the connection
            ends.reverse()
        try:
            ends[0]()
        finally:
            ends[1]()
