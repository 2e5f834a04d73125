"""The protocol of a cloud: rent, look, give back. One conformance suite (tests) holds for every implementation.

A provider knows instances, not trials: it starts machines that join the head's cluster, and says what exists. Instances
carry the experiment's name as a tag, so that a driver that comes back (or `rubberband sweep`) finds what was left.
Instants are seconds on the provider's clock (Unix time on real ones).

Every instance has a lease, an instant at which it ends itself unless the driver has put it off: so whatever becomes of
the driver, nothing costs more than what was reserved for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from rubberband.plan import Market

InstanceState = Literal["pending", "running", "terminated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceStatus:
    """What the provider shows of one instance."""

    instance: str
    """The name that it was launched under."""
    experiment: str
    state: InstanceState
    requested_at: float
    running_at: float | None = None
    """When it began to run and to be billed; None while pending, or if it never ran."""
    ended_at: float | None = None
    """When it was released or lost; None while it lives."""
    reason: str = ""
    """Why it ended, if not because it was released: 'lease expired', 'process died', …"""
    market: Market = "on_demand"
    instance_type: str = ""
    """What was bought; empty: what was asked for."""
    zone: str = ""
    price_usd_per_hour: float | None = None
    """At purchase; None: that of the offer."""
    hour_prices_usd: tuple[float, ...] | None = None
    """USD per hour of each hour since it began to run, as far as is known; None: its price stays."""
    interrupted_at: float | None = None
    """When the provider gave notice that it takes the instance away; None without a notice."""
    preempted: bool = False
    """Whether it ended because the provider took it away (spot)."""


class Provider(Protocol):
    """Rents instances of one type for one experiment."""

    def launch(self, instance: str, market: Market = "on_demand", *, first_lease_s: float | None = None) -> None:
        """Ask for an instance under the name `instance`. The name is the client token: asking twice rents once.

        Returns once the request is accepted, not when the instance runs. Its first lease ends as long after it began
        to run as the latest `renew_lease` was ahead of the launch; with `first_lease_s` no later than so long after.
        Raises ProviderError if it is refused for good (no capacity, no quota, …): then nothing was rented, nor will be.
        """
        ...

    def describe(self) -> Sequence[InstanceStatus]:
        """All instances of this experiment that live, or have ended, in the order of their launch."""
        ...

    def release(self, instance: str) -> InstanceStatus:
        """End the instance and return its final status; idempotent. It is billed no longer once this returns.

        Raises ProviderError if no such instance was ever launched.
        """
        ...

    def renew_lease(self, until: float) -> None:
        """Say that the driver lives: instances end themselves at the instant `until`, unless this is called again.

        `until` may be earlier than it was: the budget then ends sooner.
        """
        ...

    def close(self) -> None:
        """Release every instance of this experiment, and whatever else the provider holds for it. Idempotent."""
        ...
