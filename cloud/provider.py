"""The protocol of a cloud: launch, describe, release. One suite (`rubberband/testing`) holds for all of them.

A provider knows instances, not trials: it starts machines that join the head's cluster, and describes them. Instances
carry the experiment's name as a tag, so that a resumed driver (or `rubberband cleanup`) finds the remaining ones. Times
are seconds on the provider's clock (Unix time on real ones).

Every instance has a lease, a time at which it ends itself unless the driver has renewed it. So even without its driver
it costs no more than was reserved for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from rubberband.cloud.catalogue import Table
from rubberband.errors import ProviderError
from rubberband.spec.resources import Resources
from rubberband.values.offer import Offer, SideCost
from rubberband.values.plan import Market

InstanceState = Literal["pending", "running", "terminated"]

LEASE_EXPIRED = "lease expired"
OVERSLEPT_S = 60.0
"""A driver that is awake sees the end of an instance sooner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceDescription:
    """One instance as the provider shows it."""

    instance: str
    """Name of its launch."""
    experiment: str
    state: InstanceState
    requested_at: float
    running_at: float | None = None
    """Instant at which it began to run and to be billed; None while pending, or if it never ran."""
    ended_at: float | None = None
    """Instant at which it was released or lost; None while it lives."""
    reason: str = ""
    """Why it ended, if it was not released: `LEASE_EXPIRED`, 'process died', …"""
    market: Market = "on_demand"
    instance_type: str = ""
    """The type bought; empty: the requested one."""
    zone: str = ""
    price_usd_per_hour: float | None = None
    """Price at purchase; None: the offer's."""
    hour_prices_usd: tuple[float, ...] | None = None
    """USD per hour of each hour since it began to run, as far as is known; None: its price stays."""
    interrupted_at: float | None = None
    """Instant at which the provider announced its interruption; None without a notice."""
    preempted: bool = False
    """Whether the provider interrupted it (spot)."""
    sold_out: bool = False
    """Whether it never ran because the provider has none."""
    silent_since: float | None = None
    """Instant since which it has not answered who attends it: its latest answer, or the end of the time in which it
    should have joined, which may be to come. None: no pool watches it."""

    def overslept(self, now: float) -> bool:
        """Whether its lease expired long before `now`: its driver's machine slept, and renewed none."""
        return self.reason == LEASE_EXPIRED and self.ended_at is not None and now - self.ended_at > OVERSLEPT_S


class Provider(Protocol):
    """Rents instances of one type for one experiment."""

    def launch(self, instance: str, market: Market = "on_demand", *, first_lease_s: float | None = None) -> None:
        """Request an instance under the name `instance`. The name is the client token: a repeated call rents once.

        Returns once the request is accepted, before the instance runs. Its first lease is as long as the latest
        `renew_lease` was ahead of the launch, and at most `first_lease_s`; it begins when the instance runs.
        Raises ProviderError for a permanent refusal (no capacity, no quota, …): then nothing was rented, nor will be.
        """

    def describe(self) -> Sequence[InstanceDescription]:
        """Return all instances of this experiment, living or ended, in the order of launch."""

    def release(self, instance: str, *, fault: str = "") -> InstanceDescription:
        """End the instance and return its final status; idempotent. Billing has ended once this returns.

        `fault`: why it is of no use to the caller, if it is to blame; a pool then lends its machine no more.

        Raises ProviderError if the instance was never launched.
        """

    def renew_lease(self, until: float) -> None:
        """Let instances end themselves at the time `until`, unless this is called again.

        `until` may be earlier than before, if the budget ends sooner.
        """

    def close(self) -> None:
        """Release all that the provider holds for this experiment. Idempotent."""


INSTANCE_LABEL = "rubberband/instance"
"""Label of a Ray node that was started as an instance; its value is the instance's name."""
NODE_LABEL = "ray.io/node-id"
"""Label that Ray itself gives to every node."""


class NoRecordError(ProviderError):
    """The provider's record of its instances is damaged: asking again does not help, and leases end them."""


class HeadError(ProviderError):
    """The head that instances join did not start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Connection of a driver to a cluster. The head has no slots and is not one of the instances."""

    address: str
    """`host:port` of its control store."""
    temp_dir: str | None
    """Ray's temporary directory on the head, which no instance on the same machine shares. None: not needed."""
    environment: Mapping[str, str]
    """Environment variables with which the cluster accepts the driver."""
    namespace: str = "rubberband"
    """Ray's namespace of the driver; each experiment of a pool has its own."""


class ClusterProvider(Provider, Protocol):
    """A provider whose instances are nodes of one Ray cluster, or parts of them.

    One that is derived from it has nodes of its own on other machines, until it says something else.
    """

    device: Literal["cpu", "cuda"]
    """Device of the trials."""
    clock: Callable[[], float]
    """Clock of the leases: Unix time that no step of this machine's clock moves."""
    look_s: float
    """Shortest interval between calls of `describe`, in seconds."""
    remote: bool = True
    """Whether instances are other machines, which see neither this one's files nor its leases.

    The driver then sends the code, renews leases and receives interruption notices through Ray (see
    `rubberband.cloud.node`).
    """
    is_lent: bool = False
    """Whether instances are on machines of a pool, whose broker renews the leases of the machines."""
    is_borrowed: bool = False
    """Whether the cluster was there before, and stays.

    The driver connects before it launches, and may have been connected; it disconnects after `close`. Ray itself frees
    what a driver that died had, so that no lease is renewed. An instance is a placement group (`group`).
    """
    node_label: str = INSTANCE_LABEL
    """Key of the Ray label by which `node` names nodes: `INSTANCE_LABEL`, or `NODE_LABEL`."""

    def launch_early(self, instance: str) -> None:
        """Start an instance of this machine that is rented, and metered, from its `launch`; others start no earlier."""
        return

    def node(self, instance: str) -> str:
        """Return the value of the label `node_label` of the Ray node that the instance is, or is a part of."""
        return instance

    def group(self, instance: str) -> Any | None:
        """Return Ray's placement group that a running instance is, with one bundle for each slot.

        None: its workers make one on its node.
        """
        return None

    def slowness(self, instance: str) -> float:
        """Return how many times as long as usual workers may take to start on an instance; 1 if unknown."""
        return 1.0

    def last_words(self, instance: str) -> str:
        """Return the log line that best explains why a living instance is not ready; empty without one."""
        return ""

    def head(self) -> Head | None:
        """Return the living head, or None."""

    def ensure_head(self) -> Head:
        """Return the living head once it answers; start one if there is none.

        Raises HeadError if it does not start.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """One living node."""

    node: str
    """Ray's id."""
    address: str
    gpus: int
    free_gpus: int
    cpus: int
    free_cpus: int
    accelerator: str
    """Type of its GPUs, such as A100; empty: it has none, or they are only counted."""
    labels: Mapping[str, str]


Bundle = Mapping[str, float]
"""Amounts of Ray's resources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of a cluster that an experiment may use."""

    address: str
    """HOST:PORT of its head."""
    gpus_per_instance: int
    """Without GPUs: the trials that train at a time on an instance."""
    bundle: Bundle
    """Ray's resources for each of them."""
    fitting: int
    """Instances that the nodes have room for when they are idle."""
    nodes: tuple[ClusterNode, ...]
    line: str
    """The cluster in words: `10.0.0.5: 8 nodes x 4 GPUs, 6 free now`."""

    @property
    def free_together(self) -> int:
        """Most instances that have room on one machine now, where they slow each other; 0 if all are taken."""
        room: Counter[str] = Counter()
        for node in self.nodes:
            free = fitting({"GPU": node.free_gpus, "CPU": node.free_cpus}, self.bundle)
            room[node.address] += free // self.gpus_per_instance
        return max(room.values(), default=0)


def fitting(amounts: Mapping[str, int], bundle: Bundle) -> int:
    """Return how often a bundle fits into amounts of Ray's resources."""
    return min(int(amounts[key] / amount) for key, amount in bundle.items())


class BorrowedProvider(ClusterProvider, Protocol):
    """A provider of a cluster that was there before: its nodes are asked whether they can train."""

    @property
    def nodes(self) -> Sequence[ClusterNode]:
        """Nodes that were there when it was opened, and may be used."""

    @property
    def joined(self) -> Collection[str]:
        """Ids of further nodes that instances ran on."""

    @property
    def slots_on_machine(self) -> int:
        """Most slots that instances may have on one of its nodes, whose CPUs they share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRequest:
    """A run of an experiment, for which `open_cluster` of a record returns the provider (`rubberband.values.kinds`).

    It raises InputError for what cannot be used as the file asks, before anything is rented.
    """

    experiment: str
    run: str
    """Made once for each experiment: others of the same name have another one. Empty: that of the records in
    `directory`, or a new one."""
    directory: Path
    """Folder of the provider's records, which may not exist. A driver that resumes is given the same."""
    home: Path
    """Folder of all experiments, such as for a cache of prices."""
    resources: Resources
    offer: Offer
    """The type to rent, with its GPUs and its price."""
    not_before: float = 0.0
    """The provider's clock goes on from there at least."""
    largest_gang: int = 1
    """Most GPUs that a trial may have: where trials may span instances, these need a fast network."""
    highest_price_usd_per_hour: float | None = None
    """Highest price of an instance of another type that is used instead; None: the offer's."""
    speeds: Mapping[str, float] = field(default_factory=dict)
    """Type with other GPUs that may be used instead -> their speed over that of the offer's."""
    hash_seed: str = "0"
    """PYTHONHASHSEED of the instances' processes: sets of texts have one order in all starts then."""
    join_s: Callable[[str], float | None] = lambda address: None
    """Takes the address of a borrowed cluster, and returns the time that a node which joins is expected to take; None:
    that is not known."""
    on_join: Callable[[str, float], None] = lambda address, waited_s: None
    """Gets the address, and the time that each such node took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """Result of `extras` of a record: what an instance of a type costs and takes beside its rent."""

    init_s: float = 0.0
    """Time that the type takes to initialise beyond the record's `init_s`."""
    side_costs: tuple[SideCost, ...] = ()
    head_price_usd_per_hour: float | None = None
    """Price of the machine that drives the run, with its `head_side_usd_per_hour`; None: the file's."""
    head_side_usd_per_hour: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Today:
    """Result of `prices` and `preflight` of a record: what its cloud says today of the types of an experiment."""

    table: Table | None = None
    """Types with today's prices; None: those of the record."""
    room: Mapping[str, Mapping[Market, int]] | None = None
    """Instance type -> market -> instances that the account may rent now; unknown where it is missing."""
    notes: Sequence[str] = ()
    """Remarks, a sentence each."""
    blocks: Callable[[str, int, float, float], str | None] | None = None
    """Takes a plan's instance type, its most instances, seconds and rent in US dollars, and returns the remark that
    compares it with capacity that is sold in advance; None: there is none on offer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanedUp:
    """Result of `clean_up` of a record."""

    ended: Sequence[object] = ()
    """Each is shown by its text."""
    notes: Sequence[str] = ()
    """Remarks, a line each."""
    troubles: Sequence[str] = ()
    """Instances that may still run, a line each."""
