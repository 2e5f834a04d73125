"""A pool at work: the broker with its journal, above a real provider. Thread-safe; it has no process of its own.

Every event is journalled before its commands run. A new broker replays the journal, repeats what may have been cut off
(both commands are idempotent), and releases machines that the journal does not know.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from rubberband.cloud.pool.broker import Broker
from rubberband.cloud.pool.journal import (
    Compacted,
    FileJournal,
    LeaseExpired,
    MachineEnded,
    MachinePriced,
    MachineRetired,
    MachineRuns,
    MachineWarned,
    Opened,
    PoolCommand,
    PoolEvent,
    PoolLimits,
    Release,
    Rent,
    Scaled,
    SliceRequested,
    SliceReturned,
)
from rubberband.cloud.pool.state import Machine, PoolState, Slice
from rubberband.cloud.provider import ClusterProvider, Head, InstanceDescription, InstanceState, Provider
from rubberband.errors import NoCapacityError, ProviderError
from rubberband.values.plan import Market

_log = logging.getLogger(__name__)

COMPACT_EVENTS = 20_000
"""A longer journal is compacted, as each new broker reads it; that takes about a second."""
HISTORY_S = 35 * 24 * 3600.0
"""Compacted journals keep experiments and machines for this time after they ended; earlier ones are in the sums."""
EFFICIENCY_S = 90.0
"""A service says the efficiency of a pool that scales every half minute; an older one is not shown."""
_MOST_ROUNDS = 10
"""Time brings new events only a few times in a row."""

Start = Callable[[Callable[[], None]], None]
"""Runs a call to the provider, now or in a thread."""


def in_thread(work: Callable[[], None]) -> None:
    """Run `work` in a daemon thread."""
    threading.Thread(target=work, daemon=True, name="pool-command").start()


@dataclass(frozen=True, slots=True, kw_only=True)
class LentInstance:
    """A slice as its tenant sees it, and the machine that it is on."""

    status: InstanceDescription
    machine: str | None
    """Name of the machine; None while the request waits."""


class Pool:
    """Carries out the broker's commands on a provider, and feeds it what the provider shows."""

    def __init__(
        self,
        provider: Provider,
        journal: FileJournal,
        limits: PoolLimits,
        clock: Callable[[], float],
        *,
        start: Start = in_thread,
        compact_events: int = COMPACT_EVENTS,
    ) -> None:
        """Take the pool over from the journal, which is compacted after `compact_events` events.

        `provider` is this pool's alone.
        """
        self._compact_events, self._num_events = compact_events, 0
        self._provider, self._cluster = provider, cast(ClusterProvider, provider)
        self._journal = journal
        self._clock = clock
        self._start = start
        self._mutex = threading.RLock()
        self._busy: set[str] = set()
        """Machines for which a call to the provider is under way."""
        self._closed = False
        self._scaled: tuple[float, float] = (-math.inf, 0.0)
        """Instant of the latest word of a service on its size, and the efficiency then."""
        self._broker = Broker(limits)
        self._latest = -math.inf
        for event in journal.events():
            self._broker.handle(event)
            self._num_events += 1
            self._latest = max(self._latest, event.at)  # this machine's clock may have stepped back
        with self._mutex:
            self._broker.take_over(journal.leases(), self.now())
            self.take_in([Opened(at=self.now(), limits=limits)])
        self._repeat()

    @property
    def state(self) -> PoolState:
        """The broker's state, to be read under `locked`."""
        return self._broker.state

    @property
    def locked(self) -> threading.RLock:
        """The lock of the state."""
        return self._mutex

    def now(self) -> float:
        """Return the instant on the pool's clock, never before an earlier one."""
        with self._mutex:
            self._latest = max(self._latest, self._clock())
            return self._latest

    # What tenants ask for.

    def launch(
        self, tenant: str, experiment: str, instance: str, gpus: int, lease_s: float, market: Market = "on_demand"
    ) -> None:
        """Ask for `gpus` GPUs of one machine under the name `instance`; repeated calls ask once.

        Raises ProviderError for more GPUs than a machine has, and once the pool is closed.
        """
        with self._mutex:
            if self._closed:
                raise ProviderError("the pool is closed; start it again with `rubberband pool up`")
            if (why := self._broker.too_large(gpus)) is not None:
                raise ProviderError(f"instance {instance} refused: {why}")
            if (tenant, instance) not in self._broker.state.slices:
                asked = SliceRequested(
                    at=self.now(),
                    tenant=tenant,
                    experiment=experiment,
                    instance=instance,
                    gpus=gpus,
                    lease_s=lease_s,
                    market=market,
                )
                self.take_in([asked])

    def describe(self, tenant: str) -> list[LentInstance]:
        """Return all that a tenant has ever asked for, in order."""
        with self._mutex:
            self._expire(expiry for expiry in self._broker.expiries(self.now()) if expiry.tenant == tenant)
            return [lent(loan) for loan in self._broker.state.tenants.get(tenant, ())]

    def waiting(self) -> list[tuple[str, str]]:
        """Return the experiment and instance of each request that waits for a machine, in order."""
        with self._mutex:
            return [(asked.experiment, asked.instance) for asked in self._broker.state.waiting()]

    def month_usd(self) -> float:
        """Return the bill of the calendar month (UTC) so far."""
        with self._mutex:
            return self._broker.state.month_usd(self.now())

    def scale(self, machines: int, efficiency: float) -> None:
        """Take note that a service uses this many machines: idle ones beyond them do not wait for another request."""
        with self._mutex:
            self._scaled = (self.now(), efficiency)
            if self._broker.state.limits.autoscales and self._broker.state.in_use() != machines:
                self.take_in([Scaled(at=self.now(), machines=machines, efficiency=efficiency)])

    def efficiency(self) -> float | None:
        """Return the latest efficiency of a pool that scales; None if no service has said any for a while."""
        with self._mutex:
            scaled_at, latest = self._scaled
            return latest if self.now() <= scaled_at + EFFICIENCY_S else None

    def release(self, tenant: str, instance: str, fault: str = "") -> LentInstance:
        """Take a slice back, and return how it ended; idempotent. Raises ProviderError if it was never asked for.

        `fault`: why its machine is of no use to the tenant, if the machine is to blame.
        """
        with self._mutex:
            asked = self._broker.state.slices.get((tenant, instance))
            if asked is None:
                raise ProviderError(f"instance {instance} was never launched in this pool; nothing to release")
            key, lapsed = (tenant, instance), self._broker.lapsed(self.now())
            self._expire(expiry for expiry in lapsed if (expiry.tenant, expiry.instance) == key)
            if asked.ended_at is None:
                self.take_in([SliceReturned(at=self.now(), tenant=tenant, instance=instance, fault=fault)])
            return lent(asked)

    def renew(self, tenant: str, until: float) -> None:
        """Let what a tenant holds stay until `until`."""
        with self._mutex:
            lease = self._broker.renew(tenant, until, self.now())
        self._journal.renew(tenant, lease)

    def leave(self, tenant: str) -> None:
        """Take back all that a tenant holds or waits for. Idempotent."""
        with self._mutex:
            self._expire(expiry for expiry in self._broker.lapsed(self.now()) if expiry.tenant == tenant)
            slices = [loan for loan in self._broker.state.held.values() if loan.tenant == tenant]
            now = self.now()
            self.take_in([SliceReturned(at=now, tenant=tenant, instance=loan.instance) for loan in slices])

    def _expire(self, expired: Iterable[LeaseExpired]) -> None:
        """End what expired leases held: it is not billed until the next look, or the tenant's next call."""
        if ended := list(expired):
            self.take_in(ended)

    # The cluster; only pools of real machines have one.

    def head(self) -> Head | None:
        """Return the living head of the pool's Ray cluster, or None."""
        return self._cluster.head()

    def ensure_head(self) -> Head:
        """Return the living head; start one if there is none. Raises HeadError."""
        return self._cluster.ensure_head()

    def traits(self) -> dict[str, Any]:
        """Return the `device` of the trials, and whether machines are `remote`, as `ClusterProvider` has them."""
        return {"device": self._cluster.device, "remote": self._cluster.remote}

    def slowness(self, machine: str) -> float:
        """Return how many times as long as usual workers may take to start on a machine."""
        return self._cluster.slowness(machine)

    def last_words(self, machine: str) -> str:
        """Return the log line that best explains why a machine is not ready; empty without one."""
        return self._cluster.last_words(machine)

    # The provider's side.

    def look(self) -> None:
        """Compare with the provider's list, take in what the time brings, and renew the provider's lease."""
        with self._mutex:
            live = self._broker.state.live
            ordered = {name for name, machine in live.items() if machine.status == "ordered"} - self._busy
        try:
            statuses = self._provider.describe()
            unheard = ordered - {status.instance for status in statuses}
        except Exception as error:  # the next look retries
            _log.debug("the provider does not list its machines: %s", error)
            statuses, unheard = [], set()
        with self._mutex:
            for status in statuses:
                self._compare(status)
            silent_since = {seen.instance: seen.silent_since for seen in statuses if seen.silent_since is not None}
            if silent_since and (unreachable := list(self._broker.unreachable(silent_since, self.now()))):
                self.take_in(unreachable)
            for _ in range(_MOST_ROUNDS):
                due = self._broker.due(self.now())
                if not due:
                    break
                self.take_in(due)
            for name in unheard:
                if (machine := self._broker.state.live.get(name)) is not None and machine.status == "ordered":
                    self._execute(Rent(machine=name, market=machine.market))
            live = self._broker.state.live
            for name in [name for name, machine in live.items() if machine.status == "releasing"]:
                self._execute(Release(machine=name))
            self._compact()
            is_held = bool(self._broker.state.live)
        if is_held:
            self._renew_lease()

    def _compare(self, status: InstanceDescription) -> None:
        name, prices = status.instance, status.hour_prices_usd
        machine = self._broker.state.machines.get(name)
        if prices is not None and machine is not None and self._broker.hour_prices(prices) != machine.hour_prices_usd:
            # An ended machine may get its last prices late.
            self.take_in([MachinePriced(at=self.now(), machine=name, hour_prices_usd=prices)])
        if machine is None or not machine.is_live:
            if status.ended_at is None:
                self._execute(Release(machine=name))
            return
        now = self.now()
        if status.running_at is not None and machine.running_at is None and status.ended_at is None:
            self.take_in([_runs(status, status.running_at, now)])
        if status.interrupted_at is not None and machine.warned_at is None and status.ended_at is None:
            self.take_in([MachineWarned(at=now, machine=name, interrupted=True)])
        if status.ended_at is not None:
            self.take_in(self._seen_running(machine, status, now))
            self.take_in(
                [*self._broker.expired_before(machine, status.ended_at, now), _ended(status, status.ended_at, now)]
            )

    def _seen_running(self, machine: Machine, status: InstanceDescription, now: float) -> list[PoolEvent]:
        """Return the event of a machine that ran and ended between two looks."""
        if status.running_at is None or machine.running_at is not None:
            return []
        return [_runs(status, status.running_at, now)]

    def _renew_lease(self) -> None:
        with self._mutex:
            now, limits = self.now(), self._broker.state.limits
            ends_at = self._broker.hold_until(now) - limits.release_margin_s / 2.0
        try:
            self._provider.renew_lease(min(now + limits.lease_s, ends_at))
        except Exception as error:  # the lease is long enough for the next try
            _log.debug("the provider's lease was not renewed: %s", error)

    def take_in(self, events: Sequence[PoolEvent]) -> None:
        """Journal events, let them take effect, and begin to carry out what follows."""
        with self._mutex:
            self._journal.append(events)
            self._num_events += len(events)
            commands = [command for event in events for command in self._broker.handle(event)]
            for command in commands:
                self._execute(command)

    def _compact(self) -> None:
        """Replace a long journal by the state that it led to, with the history of a month."""
        if self._num_events >= self._compact_events:
            now = self.now()
            self._journal.replace(Compacted(at=now, state=self._broker.state.to_json(now - HISTORY_S)))
            self._num_events = 1

    def _execute(self, command: PoolCommand) -> None:
        """Begin to carry a command out, unless a call for its machine is under way; `look` repeats what failed."""
        name = command.machine
        if name in self._busy:
            return
        self._busy.add(name)
        try:
            self._start(lambda: self._rent(command) if isinstance(command, Rent) else self._release(name))
        except RuntimeError as error:  # there is no thread to be had
            _log.warning("the call for machine %s waits for the next look: %s", name, error)
            self._busy.discard(name)

    def _repeat(self) -> None:
        """Repeat the commands that the death of an earlier broker may have cut off."""
        with self._mutex:
            for machine in list(self._broker.state.live.values()):
                if machine.status == "ordered":
                    self._execute(Rent(machine=machine.name, market=machine.market))
                elif machine.status == "releasing":
                    self._execute(Release(machine=machine.name))

    def _rent(self, command: Rent) -> None:
        self._renew_lease()  # no first lease is longer than the latest one reaches ahead
        try:
            self._provider.launch(command.machine, command.market)
        except Exception as error:
            reason = str(error) if isinstance(error, ProviderError) else f"{type(error).__name__}: {error}"
            sold_out = isinstance(error, NoCapacityError)
            is_there = self._may_exist(command.machine)
            with self._mutex:
                now, name = self.now(), command.machine
                if is_there:  # a lost answer is no refusal: it is released, and billed until then
                    self.take_in([MachineRetired(at=now, machine=name, reason=reason, at_once=True)])
                else:
                    ended = MachineEnded(at=now, machine=name, ended_at=now, reason=reason, sold_out=sold_out)
                    self.take_in([ended])
        finally:
            with self._mutex:
                self._busy.discard(command.machine)

    def _release(self, name: str) -> None:
        try:
            status = self._provider.release(name)
        except Exception as error:
            _log.debug("machine %s is not released yet: %s", name, error)
            self._forget_unknown(name)
        else:
            with self._mutex:
                machine = self._broker.state.live.get(name)
                if machine is not None:
                    now = self.now()
                    ended_at = now if status.ended_at is None else status.ended_at
                    self.take_in([*self._seen_running(machine, status, now), _ended(status, ended_at, now)])
        finally:
            with self._mutex:
                self._busy.discard(name)

    def _forget_unknown(self, name: str) -> None:
        """Note the end of a machine that was never launched, as the broker died before."""
        with contextlib.suppress(Exception):
            if self._listed(name) is None:
                with self._mutex:
                    now = self.now()
                    self.take_in([MachineEnded(at=now, machine=name, ended_at=now, reason="it was never launched")])

    def _listed(self, name: str) -> InstanceDescription | None:
        return next((status for status in self._provider.describe() if status.instance == name), None)

    def _may_exist(self, name: str) -> bool:
        """Return whether the provider has the machine, or had it, or does not say."""
        try:
            status = self._listed(name)
        except Exception:
            return True
        return status is not None and (status.ended_at is None or status.running_at is not None)

    def close(self) -> None:
        """End every machine, and what tenants hold with them. Idempotent."""
        with self._mutex:
            self._closed = True
            now = self.now()
            names = list(self._broker.state.live)
            reason = "the pool was closed"
            self.take_in([MachineRetired(at=now, machine=name, reason=reason, at_once=True) for name in names])
            waits = list(self._broker.state.waiting())
            self.take_in([LeaseExpired(at=now, tenant=asked.tenant, instance=asked.instance) for asked in waits])
        self._provider.close()
        for status in self._provider.describe():
            with self._mutex:
                self._compare(status)
        with self._mutex:
            for name in list(self._broker.state.live):  # those that the provider never saw
                now = self.now()
                self.take_in([MachineEnded(at=now, machine=name, ended_at=now, reason="it was never launched")])


def _runs(status: InstanceDescription, running_at: float, now: float) -> MachineRuns:
    return MachineRuns(
        at=now,
        machine=status.instance,
        running_at=running_at,
        price_usd_per_hour=status.price_usd_per_hour,
        market=status.market,
        instance_type=status.instance_type,
        zone=status.zone,
    )


def _ended(status: InstanceDescription, ended_at: float, now: float) -> MachineEnded:
    return MachineEnded(
        at=now,
        machine=status.instance,
        ended_at=ended_at,
        running_at=status.running_at,
        reason=status.reason,
        preempted=status.preempted,
        sold_out=status.sold_out,
    )


def lent(loan: Slice) -> LentInstance:
    """Return a slice as a provider describes an instance."""
    state: InstanceState = "pending" if loan.running_at is None else "running"
    machine = loan.machine
    status = InstanceDescription(
        instance=loan.instance,
        experiment=loan.experiment,
        state="terminated" if loan.ended_at is not None else state,
        requested_at=loan.requested_at,
        running_at=loan.running_at,
        ended_at=loan.ended_at,
        reason=loan.reason,
        market="on_demand" if machine is None else machine.market,
        instance_type="" if machine is None else machine.instance_type,
        zone="" if machine is None else machine.zone,
        price_usd_per_hour=_price_usd_per_hour(loan),
        interrupted_at=None if machine is None else machine.warned_at,
        preempted=loan.preempted,
        sold_out=loan.sold_out,
    )
    return LentInstance(status=status, machine=None if machine is None else machine.name)


def _price_usd_per_hour(loan: Slice) -> float | None:
    """Return the price of a slice: as it began to run, or as it would begin now; None while it waits."""
    if loan.machine is None or loan.running_at is not None:
        return loan.usd_per_hour if loan.running_at is not None else None
    return loan.machine.price_now_usd_per_hour * loan.gpus / loan.machine.gpus
