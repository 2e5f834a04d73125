"""The instances that the driver holds: launched, watched, made ready, and given back."""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from rubberband.cloud.provider import ClusterProvider, HeadError, InstanceDescription, Provider
from rubberband.errors import NoCapacityError, ProviderError
from rubberband.executor.backend import ended, living, released, running
from rubberband.executor.core.events import (
    DriverResumed,
    Event,
    InstanceInterrupted,
    InstanceLost,
    InstancePriced,
    InstanceReady,
    InstanceRefused,
    LiveInstance,
)
from rubberband.executor.ray import connection
from rubberband.executor.ray.connection import Connection
from rubberband.executor.ray.remote_agent import Warden
from rubberband.executor.ray.workers import Crew, CrewError
from rubberband.spec.resources import LOG_LIMIT_BYTES
from rubberband.values.plan import Market

# How long instances may live without another word from this driver: the lease, cut off where the budget ends.


class Leases:
    """Renews the lease of a provider's instances in a thread of its own, until it is closed."""

    def __init__(
        self,
        provider: Provider,
        *,
        lease_s: float,
        interval_s: float,
        first_lease_s: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Every `interval_s` the lease is put off to `lease_s` from now, but not beyond what `hold_until` was told.

        The first lease of an instance, until it is ready, may be `first_lease_s`, if that is longer.

        Not before `hold_until` is called, or the first instance is asked for: what an earlier driver left may have used
        up the budget.
        """
        self._provider = provider
        self._lease_s = lease_s
        self._first_lease_s = max(lease_s, first_lease_s or 0.0)
        self.interval_s = interval_s
        self.former_until = clock() + self._first_lease_s
        """No lease that an earlier driver put off reaches further."""
        self._clock = clock
        self._hold_until = math.inf
        self._begun = False
        self._mutex = threading.Lock()
        self._renewed = -math.inf
        """The latest instant that the provider was told."""
        self._wake = threading.Event()
        self._closed = False
        threading.Thread(target=self._run, daemon=True, name="leases").start()

    @property
    def until(self) -> float | None:
        """The instant at which instances are to end themselves if they hear no more; None: leave it as it is."""
        return min(self._clock() + self._lease_s, self._hold_until) if self._begun else None

    @property
    def held_until(self) -> float:
        """What `hold_until` was told last."""
        return self._hold_until

    def hold_until(self, instant: float) -> bool:
        """Hold nothing past `instant`; where leases reach further, they are cut at once, and that is told."""
        self._hold_until, self._begun = instant, True
        if instant < self._renewed:
            self._wake.set()
        return instant < min(self._renewed, self._clock() + self._lease_s)

    def renew(self) -> None:
        """Tell the provider. A failure is only noted: the lease is long enough for the next time."""
        with self._mutex:
            self._begun = True
            until = min(self._clock() + self._first_lease_s, self._hold_until)
            try:
                self._provider.renew_lease(until)
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


# Where the backend's threads leave events and the driver picks them up, in the order of their instants.


_LONGEST_WAIT_S = 0.5


class Mailbox:
    """Thread-safe; `occurred_at` never decreases from one event to the next."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._mutex = threading.Lock()
        self._latest = float("-inf")
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def stamp(self) -> float:
        """Now, but not before any earlier stamp."""
        with self._mutex:
            return self._stamp()

    def _stamp(self) -> float:
        self._latest = max(self._latest, self._clock())
        return self._latest

    def put(self, event: Callable[[float], Event]) -> None:
        """Add the event that `event` makes of the instant at which it occurred: now."""
        with self._mutex:
            self._events.put(event(self._stamp()))

    def take(self, wake_at: float | None) -> list[Event]:
        """All events there are; if none, wait for one, but not beyond `wake_at` and not for long."""
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
"""The longest wait for threads that may still call Ray, before the cluster is left."""

CrewMaker = Callable[[str, Callable[[str, str], None]], Crew]
"""(instance, what to call when it is sick) -> its crew."""


@dataclass(slots=True)
class _Hold:
    """One instance, from the order to launch it to its end."""

    crew: Crew
    warden: Warden | None
    """Of an instance that is another machine."""
    launched: threading.Event = field(default_factory=threading.Event)
    """Set when the provider has answered the launch, whatever it said."""
    running: bool = False
    hour_prices_usd: tuple[float, ...] | None = None
    """As they were told last."""
    interrupted: bool = False
    """The provider has given notice that it takes it away."""
    over: bool = False
    """Released (or about to be), refused or lost: its next event is its last, or was."""
    gone: bool = False
    """It costs nothing any more; until then its lease counts."""


class RayFleet:
    """Instances of one provider; their events go to the mailbox."""

    def __init__(
        self,
        provider: ClusterProvider,
        make_crew: CrewMaker,
        mailbox: Mailbox,
        *,
        leases: Leases,
        on_gone: Callable[[str], None],
        logs: Path | None = None,
        log_limit_bytes: int = LOG_LIMIT_BYTES,
    ) -> None:
        """Begin to watch what the provider shows. `leases` are closed with the fleet.

        `logs` is where what trials print on other machines is collected, `log_limit_bytes` of each.

        `on_gone(instance)` is called when an instance can no longer be used, before any event says so.
        """
        self._provider = provider
        self._make_crew = make_crew
        self._mailbox = mailbox
        self._leases = leases
        self._logs = logs
        self._log_limit_bytes = log_limit_bytes
        self._on_gone = on_gone
        self._connection = Connection()
        self._began_at = mailbox.stamp()
        self._mutex = threading.RLock()
        self._holds: dict[str, _Hold] = {}
        self._closing = threading.Event()
        for work in (self._watch, self._watch_nodes):
            connection.start(work, work.__name__)

    def crew(self, instance: str) -> Crew | None:
        """The crew of an instance that is held, or None."""
        with self._mutex:
            hold = self._holds.get(instance)
            return None if hold is None or hold.over else hold.crew

    def launch(self, instance: str, market: Market = "on_demand", first_lease_s: float | None = None) -> None:
        """Rent an instance; its events follow. Harmless when repeated."""
        with self._mutex:
            if instance not in self._holds:
                hold = self._holds[instance] = self._hold(instance)
                connection.start(lambda: self._launch(instance, market, first_lease_s, hold), f"launch-{instance}")

    def _hold(self, instance: str) -> _Hold:
        crew, warden = self._make_crew(instance, self._give_up), None
        if self._provider.remote:
            warden = Warden(
                instance,
                until=lambda: self._leases.until,
                interval_s=self._leases.interval_s,
                logs=self._logs,
                log_limit_bytes=self._log_limit_bytes,
                on_notice=lambda: self._interrupted(instance),
            )
        return _Hold(crew, warden)

    def _launch(self, instance: str, market: Market, first_lease_s: float | None, hold: _Hold) -> None:
        try:
            self._connection.check()
            if not hold.over:
                self._cut_leases()
                self._leases.renew()  # no first lease is longer than the latest one reaches ahead
                self._provider.launch(instance, market, first_lease_s=first_lease_s)
        except Exception as error:
            reason = str(error) if isinstance(error, ProviderError) else f"{type(error).__name__}: {error}"
            failed_start, sold_out = isinstance(error, HeadError), isinstance(error, NoCapacityError)
            if self._end(instance, hold):
                self._mailbox.put(
                    lambda at: InstanceRefused(
                        occurred_at=at,
                        instance=instance,
                        reason=reason,
                        failed_start=failed_start,
                        sold_out=sold_out,
                    )
                )
        finally:
            hold.launched.set()

    def hold_until(self, instant: float) -> None:
        """Let no lease reach beyond `instant`."""
        if self._leases.hold_until(instant):
            for warden in self._wardens():
                warden.hurry()

    def _wardens(self) -> list[Warden]:
        with self._mutex:
            holds = [hold for hold in self._holds.values() if not hold.gone]
        return [hold.warden for hold in holds if hold.warden is not None]

    def _cut_leases(self) -> None:
        """Wait until no lease of another machine reaches beyond what the budget leaves with one instance more.

        Raises ProviderError if one cannot be cut: were this driver to die, the bill could pass its cap.
        """
        deadline = time.monotonic() + _CUT_S
        while late := [warden for warden in self._wardens() if warden.reaches > self._leases.held_until]:
            if time.monotonic() >= deadline or self._closing.wait(_LOOK_S):
                names = ", ".join(sorted(warden.instance for warden in late))
                raise ProviderError(
                    f"it is not requested: max_cost covers it only with shorter leases of {names}, which "
                    f"did not answer within {_CUT_S:.0f} s"
                )
            for warden in late:
                warden.hurry()

    def release(self, instance: str) -> None:
        """Give an instance back; InstanceReleased follows. Harmless when repeated."""
        with self._mutex:
            hold = self._holds.get(instance)
        if hold is None or self._end(instance, hold):
            connection.start(lambda: self._release(instance, hold), f"release-{instance}")

    def _release(self, instance: str, hold: _Hold | None) -> None:
        if hold is not None:
            self._await_launch(instance, hold)
            if hold.warden is not None:
                hold.warden.collect()
        status = self._release_surely(instance)
        if hold is not None:
            self._priced(hold, status)
        self._mailbox.put(lambda at: released(instance, status, at))
        if hold is not None:
            hold.gone = True
            hold.crew.dismiss()

    def _await_launch(self, instance: str, hold: _Hold) -> None:
        """Wait for the answer to the launch, but let the provider know that it is not wanted any more."""
        while not hold.launched.wait(_RETRY_S):
            with contextlib.suppress(Exception):  # it may know nothing of the instance yet
                self._provider.release(instance)

    def _release_surely(self, instance: str) -> InstanceDescription | None:
        """Ask until the provider obeys: an instance that is not given back goes on costing money."""
        told = ""
        while True:
            try:
                return self._provider.release(instance)
            except Exception as error:
                if isinstance(error, ProviderError) and self._unknown(instance):
                    return None
                reason = f"{type(error).__name__}: {error}"
                if reason != told:
                    _log.warning("instance %s is not released yet; retrying: %s", instance, reason)
                told = reason
                if self._closing.wait(_RETRY_S):
                    return None

    def _unknown(self, instance: str) -> bool:
        """Whether the provider says that there never was such an instance."""
        try:
            return all(status.instance != instance for status in self._provider.describe())
        except Exception:
            return False

    def _end(self, instance: str, hold: _Hold) -> bool:
        """Mark the end of `hold`; False if that was done before."""
        with self._mutex:
            was_over, hold.over = hold.over, True
        if not was_over:
            if hold.warden is not None:
                hold.warden.dismiss()
            self._on_gone(instance)
        return not was_over

    def _give_up(self, instance: str, reason: str) -> None:
        """Give back an instance that is of no use, and call it lost."""
        hold = self._holds[instance]
        if self._end(instance, hold):
            status = self._release_surely(instance)
            ended_at = status.ended_at if status else None
            preempted = hold.interrupted or (status is not None and status.preempted)
            self._priced(hold, status)
            self._mailbox.put(
                lambda at: InstanceLost(
                    occurred_at=at, instance=instance, ended_at=ended_at or at, reason=reason, preempted=preempted
                )
            )
            hold.gone = True
            hold.crew.dismiss()

    def _assemble(self, instance: str, hold: _Hold) -> None:
        try:
            self._connection.open(self._provider.ensure_head())
            if hold.warden is not None:
                hold.warden.begin()
            hold.crew.assemble(self._provider.slowness(instance))
        except (CrewError, ProviderError) as error:
            self._give_up(instance, self._with_last_words(instance, str(error)))
        except Exception as error:
            self._give_up(instance, f"{type(error).__name__}: {error}")
        else:
            with self._mutex:
                if not hold.over:
                    self._mailbox.put(lambda at: InstanceReady(occurred_at=at, instance=instance))

    def _with_last_words(self, instance: str, reason: str) -> str:
        """Why an instance did not get ready, with what its log says of it first."""
        if self.crew(instance) is None:  # it was given back, or is gone
            return reason
        try:
            told = self._provider.last_words(instance)
        except Exception as error:  # a look, never a condition
            _log.debug("the boot status of instance %s is not available: %s", instance, error)
            return reason
        return f"{told} ({reason})" if told else reason

    def _watch(self) -> None:
        while not self._closing.wait(self._provider.look_s):
            self.look()

    def look(self) -> None:
        """Take in what the provider shows of what is held."""
        with self._mutex:
            held = any(not hold.over for hold in self._holds.values())
        if held:
            self._look()

    def _watch_nodes(self) -> None:
        """Give up instances that run, for all that the provider knows, but whose Ray node is frozen or cut off."""
        while not self._closing.wait(_WATCH_NODES_S):
            with contextlib.suppress(Exception):  # the head is gone: `_look` will see it
                for instance in self._connection.dead_instances():
                    if self.crew(instance) is not None:
                        self._give_up(instance, "its Ray node stopped answering")

    def _look(self) -> None:
        try:
            statuses = self._provider.describe()
            head = self._provider.head()
        except Exception as error:  # it is asked again at once
            _log.debug("the provider does not list its instances: %s", error)
            return
        for status in statuses:
            with self._mutex:
                self._take_in(status)
        if self._connection.address is not None and head is None:
            self._connection.leave()

    def _take_in(self, status: InstanceDescription) -> None:
        instance = status.instance
        hold = self._holds.get(instance)
        if hold is None or self._closing.is_set():
            return
        if hold.running or hold.over:
            self._priced(hold, status)
        if hold.over:
            return
        running_at, ended_at = status.running_at, status.ended_at
        if running_at is not None and not hold.running:
            hold.running, hold.hour_prices_usd = True, status.hour_prices_usd
            self._mailbox.put(lambda at: running(status, running_at, at))
            if ended_at is None:
                connection.start(lambda: self._assemble(instance, hold), f"assemble-{instance}")
        if status.interrupted_at is not None and ended_at is None:
            self._interrupted(instance)
        if ended_at is not None:
            self._end(instance, hold)
            hold.gone = True
            reason = status.reason or "ended by another user or process"
            failed_start = not status.preempted and status.requested_at >= self._began_at
            if running_at is None:
                self._mailbox.put(
                    lambda at: InstanceRefused(
                        occurred_at=at, instance=instance, reason=reason, failed_start=failed_start
                    )
                )
            else:
                self._mailbox.put(
                    lambda at: InstanceLost(
                        occurred_at=at,
                        instance=instance,
                        ended_at=ended_at,
                        reason=reason,
                        preempted=status.preempted,
                    )
                )
            connection.start(hold.crew.dismiss, f"dismiss-{instance}")

    def _priced(self, hold: _Hold, status: InstanceDescription | None) -> None:
        """Pass on what the hours of an instance cost, where that is news."""
        prices = None if status is None or status.running_at is None else status.hour_prices_usd
        if status is None or prices is None or prices == hold.hour_prices_usd:
            return
        hold.hour_prices_usd = prices
        self._mailbox.put(lambda at: InstancePriced(occurred_at=at, instance=status.instance, hour_prices_usd=prices))

    def _interrupted(self, instance: str) -> None:
        """Pass on, once, that the provider takes the instance away."""
        with self._mutex:
            hold = self._holds[instance]
            told = hold.interrupted or hold.over or not hold.running
            hold.interrupted = hold.interrupted or not told
        if not told:
            self._mailbox.put(lambda at: InstanceInterrupted(occurred_at=at, instance=instance))

    def reconcile(self, known: Collection[str]) -> DriverResumed:
        """Adopt the `known` instances that live, release the others, and tell what lives and what has ended."""
        head = self._provider.head()
        if head is not None:
            self._connection.open(head)
        live, gone = [], []
        resumed_at = self._mailbox.stamp()
        for status in self._provider.describe():
            if status.ended_at is None and status.instance not in known:
                status = self._provider.release(status.instance)
            if status.ended_at is None:
                live.append(living(status))
            elif status.running_at is not None:
                gone.append(ended(status))
        for instance in live:
            self._adopt(instance)
        return DriverResumed(occurred_at=resumed_at, live=tuple(live), ended=tuple(gone))

    def _adopt(self, found: LiveInstance) -> None:
        instance = found.instance
        hold = self._hold(instance)
        hold.running, hold.hour_prices_usd = found.running_at is not None, found.hour_prices_usd
        hold.launched.set()
        with self._mutex:
            self._holds[instance] = hold
        if hold.running:
            if hold.warden is not None:
                hold.warden.reaches = self._leases.former_until
            connection.start(lambda: self._assemble(instance, hold), f"assemble-{instance}")

    def close(self) -> None:
        """Leave the cluster and give everything back."""
        self._closing.set()
        self._leases.close()
        for hold in self._holds.values():
            if hold.warden is not None:
                hold.warden.dismiss()
        connection.settle(_SETTLED_S)
        try:
            self._connection.close()
        finally:
            self._provider.close()
