"""The protocol of a cloud: rent, look, give back. One conformance suite (tests) holds for every implementation.

A provider knows instances, not trials: it starts machines that join the head's cluster, and says what exists. Instances
carry the experiment's name as a tag, so that a driver that comes back (or `rubberband sweep`) finds what was left.
Instants are seconds on the provider's clock (Unix time on real ones).

Every instance has a lease, an instant at which it ends itself unless the driver has put it off: so whatever becomes of
the driver, nothing costs more than what was reserved for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from rubberband.errors import ProviderError
from rubberband.values.plan import Market

InstanceState = Literal["pending", "running", "terminated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceDescription:
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

    def describe(self) -> Sequence[InstanceDescription]:
        """All instances of this experiment that live, or have ended, in the order of their launch."""
        ...

    def release(self, instance: str) -> InstanceDescription:
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


# What a provider offers beyond `Provider` if its instances form a Ray cluster: the head that they join.


INSTANCE_LABEL = "rubberband/instance"
"""Label of a Ray node; its value is the name of the instance that the node is."""


class HeadError(ProviderError):
    """The head that instances join did not start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """How a driver attaches to a cluster. The head has no slots and is not one of the instances."""

    address: str
    """`host:port` of its control store."""
    temp_dir: str | None
    """Ray's temporary directory on the head: tells the head from instances on the same machine. None: no matter."""
    environment: Mapping[str, str]
    """What the driver's environment must hold for the cluster to let it in."""


class ClusterProvider(Provider, Protocol):
    """A provider whose instances are nodes of one Ray cluster, labelled with `INSTANCE_LABEL`."""

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """What trials run on."""
        ...

    @property
    def clock(self) -> Callable[[], float]:
        """By which instances are held: Unix time that no step of this machine's clock moves."""
        ...

    @property
    def remote(self) -> bool:
        """Whether instances are other machines: they see neither this one's files nor its leases.

        The driver then sends the code along, and renews leases and hears of interruptions through Ray
        (see `rubberband.cloud.node`).
        """
        ...

    @property
    def look_s(self) -> float:
        """How often `describe` may be asked, in seconds."""
        ...

    def slowness(self, instance: str) -> float:
        """How many times as long as usual workers may take to start on an instance; 1 where nothing is known."""
        ...

    def last_words(self, instance: str) -> str:
        """The line of a living instance's boot or node log that tells best why it is not of use; empty if none does."""
        ...

    def head(self) -> Head | None:
        """The living head, or None."""
        ...

    def ensure_head(self) -> Head:
        """The living head, which is started if there is none; returns once it answers.

        Raises HeadError if it does not start.
        """
        ...
