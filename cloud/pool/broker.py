"""The broker of a pool: a pure state machine that lends machines to experiments. It reads no clock and no network.

`handle(event)` returns commands, and the state is the fold of the events: after a crash the journal gives it back.
Only leases are kept outside (`renew`): they change every few seconds, and a lost one ends a little early or late.

* A request takes the machine with the fewest free GPUs that fits it, so that whole machines stay free: a warm one, else
  one that boots, else a new one within the caps. Otherwise it waits its turn: no later request overtakes it. How much
  each experiment may hold is not the broker's to decide: a service sends it to their drivers.
* A machine whose tenant let its lease expire is not lent again: that driver may be frozen, and not dead.
* Money is reserved: a machine is rented only if the caps cover it, and what is live, until all could be released.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from rubberband.cloud.pool.journal import (
    Compacted,
    Lease,
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
    SliceRefused,
    SliceRequested,
    SliceReturned,
)
from rubberband.cloud.pool.state import Machine, PoolState, Slice
from rubberband.cloud.provider import LEASE_EXPIRED
from rubberband.spec.pool import CAP_SLACK_USD
from rubberband.units import counted, month_end
from rubberband.values.offer import SECONDS_PER_HOUR
from rubberband.values.plan import Market

MOST_BLAMED, BLAME_S = 3, 3600.0
"""Machines that are retired in this time because one tenant found them faulty; its own code may be what fails."""
SILENT_S = 60.0
"""A machine is lent no more after this time without an answer to the broker, while others answered."""
NOTICE_S = 60.0
"""Tenants are warned this long before the month's budget ends."""
LOOK_S = 2.0
"""Longest time between two looks of a broker that is well; the caps reserve it."""
GRACE_S = 15.0
"""Time for tenants to renew their leases with a new broker."""


class Broker:
    """Lends the machines of one pool."""

    def __init__(self, limits: PoolLimits | None = None) -> None:
        """`limits` hold until an `Opened` brings others."""
        self.state = PoolState(limits=limits or PoolLimits(instances=1, gpus=1))
        self.leases: dict[str, Lease] = {}
        """By tenant, as the tenants renewed them."""
        self._grace_until = -math.inf
        """Until then leases that no budget cut do not expire."""
        self._heard: dict[str, tuple[float, float]] = {}
        """Machine -> since when it has been silent at the latest look, and when it was last seen to answer."""
        self._listened_at = self._cut_off_at = -math.inf
        """Latest instants at which it looked who answers, and at which too few did to blame those that did not."""

    # Events.

    def handle(self, event: PoolEvent) -> list[PoolCommand]:
        """Take an event in, and return the commands that follow from it."""
        match event:
            case Opened():
                self.state.limits = event.limits
            case Compacted():
                self.state = PoolState.from_json(event.state)
                return []  # what followed was carried out, or is repeated
            case SliceRequested():
                self._requested(event)
            case SliceReturned():
                self._blame(event)
                self._end(event.tenant, event.instance, event.at, "")
            case SliceRefused():
                self._end(event.tenant, event.instance, event.at, event.reason)
            case LeaseExpired():
                self._expired(event)
            case Scaled():
                self.state.scales.append((event.at, event.machines, event.efficiency))
            case MachineRuns():
                self._runs(event)
            case MachinePriced():  # a compacted journal may lack the machine
                if (priced := self.state.machines.get(event.machine)) is not None:
                    priced.hour_prices_usd = self.hour_prices(event.hour_prices_usd)
            case MachineWarned():
                if (warned := self.state.machines.get(event.machine)) is not None:
                    warned.warned_at = event.at
                    warned.interrupted_at = event.at if event.interrupted else None
                    warned.retired = warned.retired or "it will be lost soon"
            case MachineEnded():
                self._ended(event)
            case MachineRetired():
                self._retired(event)
        return [*self._place(event.at), *self._releases(event.at)]

    def _requested(self, event: SliceRequested) -> None:
        key = (event.tenant, event.instance)
        if key not in self.state.slices:
            asked = Slice(
                tenant=event.tenant,
                experiment=event.experiment,
                instance=event.instance,
                gpus=event.gpus,
                requested_at=event.at,
                lease_s=event.lease_s,
                market=event.market if self.state.limits.market == "spot" else "on_demand",
            )
            self.state.slices[key] = self.state.held[key] = asked
            self.state.tenants.setdefault(event.tenant, []).append(asked)

    def _expired(self, event: LeaseExpired) -> None:
        expired = self.state.held.get((event.tenant, event.instance))
        if expired is not None:
            if expired.machine is not None:
                expired.machine.retired = expired.machine.retired or f"the lease of {expired.experiment} expired"
            until = event.at if event.until is None else min(event.at, event.until)
            ended_at = max(until, expired.running_at or expired.requested_at)
            self._end(event.tenant, event.instance, ended_at, LEASE_EXPIRED)

    def _blame(self, event: SliceReturned) -> None:
        """Retire a machine that a tenant found faulty. One that blames many in an hour is at fault itself."""
        returned = self.state.held.get((event.tenant, event.instance))
        if not event.fault or returned is None or returned.machine is None:
            return
        blamed = {
            loan.machine.name
            for loan in self.state.tenants[event.tenant]
            if loan.fault and loan.machine is not None and (loan.ended_at or -math.inf) > event.at - BLAME_S
        }
        if returned.machine.name in blamed or len(blamed) < MOST_BLAMED:
            returned.fault = event.fault
            returned.machine.retired = returned.machine.retired or event.fault

    def _end(self, tenant: str, instance: str, at: float, reason: str, *, preempted: bool = False) -> None:
        ended = self.state.held.pop((tenant, instance), None)
        if ended is None:
            return
        ended.ended_at, ended.reason, ended.preempted = at, reason, preempted
        if ended.machine is not None:
            ended.machine.slices.remove(ended)
            ended.machine.free_since = max(at, ended.machine.free_since)

    def _runs(self, event: MachineRuns) -> None:
        machine = self.state.live.get(event.machine)
        if machine is None or machine.running_at is not None:
            return
        machine.running_at = event.running_at
        machine.market, machine.instance_type, machine.zone = event.market, event.instance_type, event.zone
        if event.price_usd_per_hour is not None:
            machine.usd_per_hour = event.price_usd_per_hour + self.state.limits.side_usd_per_hour
            machine.cap_usd_per_hour = max(
                machine.usd_per_hour, machine.cap_usd_per_hour if event.market == "spot" else 0.0
            )
        if machine.status == "ordered":
            machine.status = "running"
        machine.free_since = max(machine.free_since, event.running_at)
        for held in machine.slices:
            held.begin(event.running_at)

    def hour_prices(self, rents_usd: Sequence[float]) -> tuple[float, ...]:
        """Return the prices of a machine's hours with its side costs."""
        return tuple(rent_usd + self.state.limits.side_usd_per_hour for rent_usd in rents_usd)

    def _ended(self, event: MachineEnded) -> None:
        machine = self.state.live.pop(event.machine, None)
        if machine is None:
            return
        if machine.running_at is None and event.running_at is not None:  # it ran unseen
            machine.running_at = event.running_at
            for held in machine.slices:
                held.begin(event.running_at)
        machine.status, machine.ended_at = "ended", event.ended_at
        machine.reason, machine.preempted = event.reason, event.preempted
        reason = event.reason or machine.retired or "the pool released its machine"
        for held in list(machine.slices):
            held.sold_out = event.sold_out
            ended_at = max(event.ended_at, held.running_at or held.requested_at)
            self._end(held.tenant, held.instance, ended_at, reason, preempted=event.preempted)
        for given in self.state.slices.values():  # given back after it had ended, before that was seen
            if given.machine is machine and given.ended_at is not None and given.ended_at > event.ended_at:
                given.ended_at = max(event.ended_at, given.running_at or given.requested_at)

    def _retired(self, event: MachineRetired) -> None:
        machine = self.state.live.get(event.machine)
        if machine is None:
            return
        machine.retired = machine.retired or event.reason
        if event.at_once:
            machine.interrupted_at = None  # it is given back now, free or not
            for held in list(machine.slices):
                self._end(held.tenant, held.instance, event.at, event.reason, preempted=True)

    # Placement.

    def _place(self, at: float) -> list[PoolCommand]:
        """Give the requests that wait their machines, in order, as far as there are any."""
        commands: list[PoolCommand] = []
        for asked in list(self.state.waiting()):
            machine = self._best_fit(asked)
            if machine is None:
                if asked.gpus > self.state.limits.gpus:
                    break
                if self.refusal(at) is not None:
                    self._make_room(asked.market)
                    break
                machine = self._order(asked.market, at)
                commands.append(Rent(machine=machine.name, market=machine.market))
            asked.machine = machine
            machine.slices.append(asked)
            if machine.running_at is not None:
                asked.begin(max(at, machine.running_at))
        return commands

    def _best_fit(self, asked: Slice) -> Machine | None:
        """Return the machine with the fewest free GPUs that has enough: a running one first, else one that boots."""
        fitting = [
            machine
            for machine in self.state.live.values()
            if not machine.retired and machine.market == asked.market and asked.gpus <= machine.free_gpus
        ]
        return min(fitting, key=lambda machine: (machine.running_at is None, machine.free_gpus), default=None)

    def _make_room(self, market: Market) -> None:
        """Retire an idle machine of the other market, unless one ends already."""
        idle = [machine for machine in self.state.live.values() if not machine.slices]
        other = [machine for machine in idle if machine.market != market]
        if other and not any(machine.retired for machine in idle):
            other[0].retired = "an instance of another market is wanted"

    def _order(self, market: Market, at: float) -> Machine:
        limits = self.state.limits
        name = f"m{self.state.past_machines + len(self.state.machines) + 1}"
        machine = Machine(
            name=name,
            gpus=limits.gpus,
            market=market,
            ordered_at=at,
            usd_per_hour=limits.price_usd_per_hour,
            cap_usd_per_hour=limits.price_usd_per_hour,
            once_usd=limits.once_usd,
            minimum_billed_s=limits.minimum_billed_s,
            free_since=at,
        )
        self.state.machines[name] = self.state.live[name] = machine
        return machine

    def _releases(self, at: float) -> list[PoolCommand]:
        """Release the machines that are lent no more, and are free; not those that the provider takes away for free."""
        commands: list[PoolCommand] = []
        for machine in self.state.live.values():
            if machine.retired and not machine.slices and machine.status != "releasing" and machine.left_until <= at:
                machine.status = "releasing"
                commands.append(Release(machine=machine.name))
        return commands

    # Money.

    def refusal(self, at: float) -> str | None:
        """Return why no further machine may be rented now; None: one may be."""
        limits, state = self.state.limits, self.state
        if len(state.live) >= limits.instances:
            return f"all {counted(limits.instances, 'instance')} of the pool are in use"
        rate = state.usd_per_hour() + limits.price_usd_per_hour
        if limits.max_usd_per_hour is not None and rate > limits.max_usd_per_hour + CAP_SLACK_USD:
            return (
                f"max_usd_per_hour={limits.max_usd_per_hour:.2f} USD does not cover another instance "
                f"({rate:.2f} USD with it)"
            )
        cap = limits.max_usd_per_month
        if cap is not None and self._reserved_usd(at) + self.first_usd() > cap + CAP_SLACK_USD:
            return f"max_usd_per_month={cap:.2f} USD does not cover another instance until it could be released"
        return None

    def too_large(self, gpus: int) -> str | None:
        """Return why no machine of the pool has this number of GPUs; None: one has."""
        has = self.state.limits.gpus
        if gpus <= has:
            return None
        return f"it needs {gpus} GPUs and an instance of the pool has {has}; lower resources.gpus_per_instance"

    def first_usd(self) -> float:
        """Return what a new machine costs at least, until it could be released."""
        limits = self.state.limits
        held_s = max(limits.minimum_billed_s, self._stop_s())
        return limits.price_usd_per_hour * held_s / SECONDS_PER_HOUR + limits.once_usd

    def _stop_s(self) -> float:
        """Return the time from the decision to end a machine until it has ended."""
        return self.state.limits.release_margin_s + LOOK_S

    def _reserved_usd(self, at: float) -> float:
        """Return the month's bill if every live machine is released from now on, as late as that may take."""
        return self.state.ended_month_usd(at) + self._live_usd(at, at + self._stop_s())

    def _live_usd(self, at: float, until: float) -> float:
        """Return what live machines cost this month by `until`, if those that boot run from now on."""
        minimum_s = self.state.limits.minimum_billed_s
        boots = math.fsum(
            machine.cap_usd_per_hour * max(minimum_s, until - at) / SECONDS_PER_HOUR + machine.once_usd
            for machine in self.state.live.values()
            if machine.running_at is None
        )
        return self.state.live_month_usd(at, until) + boots

    def hold_until(self, at: float) -> float:
        """Return the instant at which the month's budget ends if all goes on; infinite without a cap.

        No machine may live beyond it, also if the broker dies.
        """
        cap = self.state.limits.max_usd_per_month
        if cap is None or not self.state.live:
            return math.inf
        left_usd = cap - self.state.ended_month_usd(at) - self._live_usd(at, at)
        if left_usd < 0.0:
            return at
        until, usd_per_s = at, 0.0
        for begins_at, more_usd_per_s in sorted(self._rates(at)):
            if usd_per_s * (begins_at - until) >= left_usd:
                break
            left_usd -= usd_per_s * (begins_at - until)
            until, usd_per_s = begins_at, usd_per_s + more_usd_per_s
        until = until + left_usd / usd_per_s if usd_per_s > 0.0 else math.inf
        return math.inf if until >= month_end(at) else until

    def _rates(self, at: float) -> Iterator[tuple[float, float]]:
        """Yield from when each live machine costs more than it does at `at`, and how much in USD per second."""
        for machine in self.state.live.values():
            began_at = at if machine.running_at is None else machine.running_at
            yield max(at, began_at + machine.minimum_billed_s), machine.cap_usd_per_hour / SECONDS_PER_HOUR

    # Time.

    def renew(self, tenant: str, until: float, at: float) -> Lease:
        """Let what a tenant holds stay until `until`, unless this is called again. One that is over stays over."""
        before = self.leases.get(tenant)  # one that asks for no time to come pays for none that is past
        if before is not None and max(before.until, until) <= at:
            return before
        length_s = max(until - at, 0.0 if before is None else before.length_s)
        self.leases[tenant] = Lease(until=until, renewed_at=at, length_s=length_s)
        return self.leases[tenant]

    def take_over(self, leases: Mapping[str, Lease], at: float) -> None:
        """Take over an earlier broker's leases, after a time without one in which they could not be renewed."""
        self.leases.update(leases)
        self._grace_until = at + GRACE_S

    def due(self, at: float) -> Sequence[PoolEvent]:
        """Return the events that the time brings: leases that expired, idle machines, the end of the budget."""
        return [
            *self.expiries(at),
            *self._idle(at),
            *self._not_taken(at),
            *self._budget_ends(at),
            *self._blocked(at),
            *self._hopeless(at),
        ]

    def expiries(self, at: float) -> Iterator[LeaseExpired]:
        """Yield the leases that have expired by `at`, and have no grace."""
        for expired in self.lapsed(at):
            lease = self.leases.get(expired.tenant)
            # A new broker gives tenants time to renew; leases that a budget cut, and first ones, get none.
            has_grace = lease is not None and not lease.is_cut and lease.until == expired.until
            if at > self._grace_until or not has_grace:
                yield expired

    def lapsed(self, at: float) -> Iterator[LeaseExpired]:
        """Yield the leases that are over by `at`, also those with grace: who gives back has no use for it."""
        for held in self.state.held.values():
            until = self.lease_until(held)
            if at > until:
                yield LeaseExpired(at=at, tenant=held.tenant, instance=held.instance, until=until)

    def expired_before(self, machine: Machine, ended_at: float, at: float) -> Iterator[PoolEvent]:
        """Yield the expiries of leases on a machine that ended after them, while no broker looked."""
        for held in machine.slices:
            until = self.lease_until(held)
            if until < ended_at:
                yield LeaseExpired(at=at, tenant=held.tenant, instance=held.instance, until=until)

    def lease_until(self, held: Slice) -> float:
        """Return the end of a slice's lease, without the grace of a new broker; its first lease begins when it runs."""
        renewed = self.leases.get(held.tenant)
        if held.running_at is None:
            first = held.requested_at + held.lease_s
            return math.inf if renewed is None else max(first, renewed.until)
        if renewed is None or renewed.renewed_at < held.running_at:
            return held.running_at + held.lease_s
        return renewed.until

    def _idle(self, at: float) -> Iterator[PoolEvent]:
        limits, in_use = self.state.limits, self.state.in_use()
        lent_out = [machine for machine in self.state.live.values() if not machine.retired]
        beyond = len(lent_out) - in_use if in_use else 0  # without experiments they wait for the next one
        for machine in lent_out:
            if machine.slices or machine.status == "releasing":
                continue
            paid_until = 0.0 if machine.running_at is None else machine.running_at + machine.minimum_billed_s
            idle_s = 0.0 if beyond > 0 else limits.idle_s
            if at >= max(machine.free_since + idle_s, paid_until - limits.release_margin_s):
                beyond -= 1
                yield MachineRetired(at=at, machine=machine.name, reason="it was idle")

    def _not_taken(self, at: float) -> Iterator[PoolEvent]:
        for machine in self.state.live.values():
            due = machine.interrupted_at is not None and machine.left_until <= at
            if due and not machine.slices and machine.status != "releasing":
                yield MachineRetired(at=at, machine=machine.name, reason="it will be lost soon")

    def unreachable(self, silent_since: Mapping[str, float], at: float) -> Iterator[PoolEvent]:
        """Yield the end of lending of machines that do not answer (see `InstanceDescription.silent_since`).

        Where most of them fall silent, the network or the head has failed, or the broker itself: none is blamed, and
        each gets its time again from when most answer. So it is after a while in which the broker did not look.
        """
        due = {
            name: since
            for name, since in silent_since.items()
            if since <= at and name in self.state.live and not self.state.live[name].retired
        }
        before, self._heard = self._heard, {}
        for name, since in silent_since.items():
            was, heard_at = before.get(name, (since, -math.inf))
            self._heard[name] = since, heard_at if since == was else at  # it stays, of one that has never answered
        silent = [name for name in due if at - self._heard[name][1] > SILENT_S / 2.0]
        if 2 * len(silent) > len(due) or at - self._listened_at > SILENT_S / 2.0:
            self._cut_off_at = at
        self._listened_at = at
        for name, since in due.items():
            if at - max(since, self._cut_off_at) > SILENT_S:
                reason = f"it has not answered the pool for {SILENT_S:.0f} s"
                yield MachineRetired(at=at, machine=name, reason=reason)

    def _budget_ends(self, at: float) -> Iterator[PoolEvent]:
        ends_at = self.hold_until(at)
        if ends_at == math.inf:
            return
        cap = self.state.limits.max_usd_per_month or 0.0
        for machine in self.state.live.values():
            if machine.status == "releasing":
                continue
            if at >= ends_at - self._stop_s():
                reason = f"the pool's max_usd_per_month={cap:.2f} USD is used up"
                yield MachineRetired(at=at, machine=machine.name, reason=reason, at_once=True)
            elif machine.warned_at is None and at >= ends_at - self._stop_s() - NOTICE_S:
                yield MachineWarned(at=at, machine=machine.name)

    def _blocked(self, at: float) -> Iterator[PoolEvent]:
        """Yield the loss of retired machines where a request waits, and no other may be rented beside them.

        A tenant on one may itself wait for more before it goes on: without a notice both would wait on and on.
        """
        if any(self.state.waiting()) and self.refusal(at) is not None:
            for machine in self.state.live.values():
                if machine.retired and machine.slices and machine.warned_at is None:
                    yield MachineWarned(at=at, machine=machine.name)

    def _hopeless(self, at: float) -> Iterator[PoolEvent]:
        """Yield a refusal for the requests that wait if there is no machine, and money for none.

        Likewise for one that was asked of larger machines than the pool has now: it would block all behind it.
        """
        waiting = list(self.state.waiting())
        why = self.refusal(at) if waiting and not self.state.live else None
        for asked in waiting:
            reason = self.too_large(asked.gpus) or why
            if reason is not None:
                yield SliceRefused(at=at, tenant=asked.tenant, instance=asked.instance, reason=reason)
