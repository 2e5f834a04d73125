"""The fleet of a job: every instance that was asked for, and which lane may use it. Plain data.

Lanes share one fleet, one budget and one market. A lane uses the instances that are assigned to it, and no others; one
that it gives back may be handed on, warm, to another lane. The controller writes all this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from rubberband.executor.core.events import Recall
from rubberband.values.plan import Market

if TYPE_CHECKING:
    from rubberband.executor.core.bill import RunSpending


class InstanceStatus(StrEnum):
    """Status of an instance."""

    REQUESTED = "requested"
    RUNNING = "running"
    """Billed, its workers not yet warm."""
    READY = "ready"
    LEAVING = "leaving"
    """Interrupted, and taken away soon: trials on it go on until their next report, and no other trial starts. Or
    recalled, since the instance cap shrank: trials on it stop at their next checkpoint. Or too slow or silent, and left
    once another one is ready."""
    RELEASING = "releasing"
    ENDED = "ended"
    REFUSED = "refused"


LIVE = frozenset({InstanceStatus.REQUESTED, InstanceStatus.RUNNING, InstanceStatus.READY})
"""An instance that is held, or on its way."""
GONE = frozenset({InstanceStatus.ENDED, InstanceStatus.REFUSED})
"""An instance that costs nothing any more."""


@dataclass(slots=True, kw_only=True)
class InstanceRecord:
    """One rented instance and its instants, from which the bill follows."""

    instance: str
    requested_at: float
    status: InstanceStatus = InstanceStatus.REQUESTED
    running_at: float | None = None
    ready_at: float | None = None
    ended_at: float | None = None
    reason: str = ""
    market: Market = "on_demand"
    instance_type: str = ""
    """Purchased type; empty: the offer's."""
    zone: str = ""
    price_usd_per_hour: float | None = None
    """At purchase; None: the offer's, for the market."""
    hour_prices_usd: tuple[float, ...] | None = None
    """USD per hour of each hour since it began to run, as far as is known; None: its price stays."""
    first_lease_s: float | None = None
    """How long it may live, once it runs, before the driver can shorten its lease; None: as long as any lease."""
    leased_until: float | None = None
    """End of its lease if it is being released, or was held by another driver: its lease is not shortened any more."""
    interrupted_at: float | None = None
    """Instant of the provider's notice that it takes the instance away."""
    left_until: float = -math.inf
    """Instant until which it is left to the provider, which may take it away for free."""
    recalled_at: float | None = None
    """Instant since which it is to be given back, as the instance cap shrank; None: it is not."""
    preempted: bool = False
    """Whether it ended because the provider took it away."""
    instead_of_spot: bool = False
    """Whether it was bought on demand in a stage that is planned on spot, since there was no spot capacity."""
    failed_start: bool = False
    """Whether it was started and never got ready, by a fault of its own: neither released nor taken away."""
    lane: int = 0
    """The lane that may use it now."""
    lanes_before: tuple[tuple[int, float], ...] = ()
    """The lanes that it was handed on by, each with the instant."""

    @property
    def is_left_as_slow(self) -> bool:
        """Whether trials leave it only since it is slow: it stays until they have."""
        return self.status is InstanceStatus.LEAVING and self.interrupted_at is None and self.recalled_at is None

    @property
    def was_interrupted(self) -> bool:
        """Whether the provider reclaimed it, or gave notice of it."""
        return self.preempted or self.interrupted_at is not None


@dataclass(slots=True)
class Held:
    """Instances that are assigned to one lane."""

    live: list[InstanceRecord]
    leaving: list[InstanceRecord]
    ready: list[InstanceRecord]


@dataclass(slots=True, kw_only=True)
class Fleet:
    """All instances of a job, and what is known of the bill."""

    instances: dict[str, InstanceRecord] = field(default_factory=dict)
    reassigned: int = 0
    """How often lanes were assigned other instances, or another share of the cap."""
    recall: Recall = "at_checkpoint"
    """Time at which trials stop on the instances beyond the instance cap."""
    failed_starts: int = 0
    """Instances in a row that never got ready, since the last one that did."""
    spot_dry_until: float = -math.inf
    """Until then spot counts as not to be had: it was refused, or taken away too often."""
    spot_dry_reason: str = ""
    slow_anywhere: set[int] = field(default_factory=set)
    """Ranks that stayed slow on another instance, so that it is not the instances' fault."""
    spending: RunSpending | None = field(default=None, init=False, repr=False, compare=False)
    """The bill since the rent last changed; None: to be computed again."""
    settled_usd: float = field(default=0.0, init=False, repr=False, compare=False)
    """Cost of the instances that are gone and were added to the spending."""
    _current: list[InstanceRecord] | None = field(default=None, init=False, repr=False, compare=False)
    _is_current: bool = field(default=False, init=False, repr=False, compare=False)
    _gone: list[InstanceRecord] = field(default_factory=list, init=False, repr=False, compare=False)
    _live: list[InstanceRecord] | None = field(default=None, init=False, repr=False, compare=False)
    _leaving: list[InstanceRecord] | None = field(default=None, init=False, repr=False, compare=False)
    held_by_lane: dict[int, Held] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Lane -> its instances, as far as they were asked for since the rent changed."""
    _ready: dict[int, list[InstanceRecord]] = field(default_factory=dict, init=False, repr=False, compare=False)

    # Whoever changes an instance's record says so, since views of them are kept.

    def rent_changed(self) -> None:
        """Something about an instance, or about what is paid for, is not as it was."""
        self.spending = self._live = self._leaving = None
        self._is_current = False
        self.held_by_lane.clear()

    def add(self, record: InstanceRecord) -> None:
        """Keep the record of an instance that is asked for."""
        self.instances[record.instance] = record
        if self._current is not None:
            self._current.append(record)
        self.rent_changed()

    def hand_on(self, record: InstanceRecord, lane: int, at: float) -> None:
        """Assign an instance that one lane gives back to another."""
        record.lanes_before = (*record.lanes_before, (record.lane, at))
        record.lane = lane
        self.reassigned += 1
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

    def price_gone_again(self) -> None:
        """Compute the cost of all ended instances anew, as one of them has another price."""
        self._gone, self.settled_usd = [r for r in self.instances.values() if r.status in GONE], 0.0
        self.rent_changed()

    def live(self) -> list[InstanceRecord]:
        """Instances held or on their way, longest billed first, then as they were asked for; not those that leave."""
        if self._live is None:
            found = [record for record in self.current() if record.status in LIVE]
            found.sort(key=lambda record: _or_never(record.running_at))
            self._live = found
        return self._live

    def leaving(self) -> list[InstanceRecord]:
        """Instances that are taken away soon."""
        if self._leaving is None:
            self._leaving = [r for r in self.current() if r.status is InstanceStatus.LEAVING]
        return self._leaving

    def ready(self) -> list[InstanceRecord]:
        """Instances that trials can start on, of all lanes."""
        return [record for record in self.live() if record.status is InstanceStatus.READY]

    def of_lane(self, lane: int) -> Held:
        """Return the instances of a lane; its ready ones are the same list, as long as they are the same."""
        held = self.held_by_lane.get(lane)
        if held is None:
            live = [record for record in self.live() if record.lane == lane]
            ready = [record for record in live if record.status is InstanceStatus.READY]
            before = self._ready.get(lane)
            ready = self._ready[lane] = ready if before is None or ready != before else before
            held = self.held_by_lane[lane] = Held(live, [r for r in self.leaving() if r.lane == lane], ready)
        return held

    def lanes_of(self, record: InstanceRecord) -> Sequence[tuple[int, float]]:
        """The lanes that have used an instance, in order, each with the instant until which; infinite for the last."""
        return (*record.lanes_before, (record.lane, math.inf))


def _or_never(instant: float | None) -> float:
    return math.inf if instant is None else instant
