"""What exists in the fake's account: machines, networks, images, parameters and quotas, and how time moves them.

The state behind the operations; it knows no calls, no faults and no principals.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tests.ec2.instance import INSTANCE_INITIATED, Behavior, Instance, Market
from tests.ec2.machine_types import MACHINE_TYPES, Architecture, MachineType
from tests.ec2.quota_codes import DEFAULT_VCPUS, QUOTAS
from tests.ec2.spot_prices import SpotMarket

if TYPE_CHECKING:
    from tests.ec2.commands import Command, Result

ACCOUNT = "123456789012"
REGIONS = (
    "ap-northeast-1",
    "ap-south-1",
    "ap-southeast-1",
    "ap-southeast-2",
    "ca-central-1",
    "eu-central-1",
    "eu-north-1",
    "eu-west-1",
    "eu-west-2",
    "eu-west-3",
    "sa-east-1",
    "us-east-1",
    "us-east-2",
    "us-west-1",
    "us-west-2",
)
"""Those that an account has without opting in."""
NOTICE_S = 120.0
"""From the notice of a spot instance's interruption until it is taken away."""
Delay = float | Callable[[random.Random], float]
"""Seconds, or what draws them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    image_id: str
    name: str
    architecture: Architecture
    root_device: str
    volume_gb: int
    owner: str = "amazon"
    lasting_disks: tuple[str, ...] = ()
    """Devices of further volumes as large as the first, which outlive an instance unless it is launched with other
    words."""
    iops: int = 3000
    """Of each of its volumes, unless it is launched with others; those above 3,000 are charged."""
    usage: str = "RunInstances"
    """UsageOperation: another one than Linux's is charged beside the rent."""
    product_codes: tuple[str, ...] = ()
    """Of AWS Marketplace; charged as well."""
    snapshot_id: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    created_at: float = 1_767_571_200.0
    available_at: float = 0.0
    """It is pending until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    snapshot_id: str
    volume_gb: int
    tags: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subnet:
    """One of a zone; `default` where instances go that name none."""

    subnet_id: str
    vpc_id: str
    zone: str
    cidr: str
    default: bool
    public: bool = True
    """Whether instances get public addresses and a route to the Internet's gateway; else there is a NAT gateway."""
    free_addresses: int = 4091
    s3_endpoint: bool = False
    """Whether a gateway endpoint of S3 is in its route table."""
    tags: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vpc:
    """A network; `default` where what names none goes."""

    vpc_id: str
    cidr: str
    default: bool
    tenancy: Literal["default", "dedicated"] = "default"
    tags: dict[str, str] = field(default_factory=dict)


class Rule(NamedTuple):
    """What a security group lets through, from or to one peer."""

    protocol: str
    """`tcp`, `udp`, …, or `-1` for everything."""
    from_port: int
    """-1 where the protocol has no ports."""
    to_port: int
    peer_kind: Literal["group", "cidr"]
    peer: str


ALL_OUT = Rule("-1", -1, -1, "cidr", "0.0.0.0/0")


@dataclass(slots=True, kw_only=True)
class Group:
    group_id: str
    name: str
    description: str
    vpc_id: str
    ingress: list[Rule] = field(default_factory=list)
    egress: list[Rule] = field(default_factory=lambda: [ALL_OUT])
    tags: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementGroup:
    """Where instances are close to each other, or apart."""

    name: str
    group_id: str
    strategy: str
    tags: dict[str, str] = field(default_factory=dict)


BLOCK_ENDS_S = 1800.0
"""EC2 ends the instances of a capacity block so long before the block's end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Capacity of the account: an on-demand reservation, or a block that was paid for in advance."""

    reservation_id: str
    instance_type: str
    zone: str
    instances: int
    kind: Literal["default", "capacity-block"] = "default"
    begins_at: float = 0.0
    ends_at: float | None = None

    def state(self, now: float) -> str:
        """As DescribeCapacityReservations has it."""
        if now < self.begins_at:
            return "scheduled"
        return "expired" if self.ends_at is not None and now >= self.ends_at else "active"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Machines that share a limit; None stands for any."""

    instance_type: str | None
    zone: str | None
    market: Market | None

    def holds(self, instance_type: str, zone: str, market: Market) -> bool:
        mine = (self.instance_type, self.zone, self.market)
        return all(own in (None, asked) for own, asked in zip(mine, (instance_type, zone, market), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Of EventBridge Scheduler: these instances are ended then, if its role may end them."""

    at: float
    changed_at: float
    instances: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class BucketFacts:
    """What is known of a bucket beside its objects."""

    region: str
    owner: str = ACCOUNT
    public: bool = False
    """Whether other accounts may read and write in it, when its owner is another one."""
    public_block: Any = None
    lifecycle: Any = None
    keeps_versions: bool = False
    kms_key: str | None = None
    """ARN of the customer's key with which it encrypts."""
    written_at: dict[str, float] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)
    """Keys of deleted objects of which it keeps a marker, as a bucket with versions does."""


def drawn(delay: Delay, rng: random.Random) -> float:
    return delay(rng) if callable(delay) else delay


class World:
    """Mutable state; all of its methods take the time as an argument. Attributes may be changed by a test at any time.

    `pending_s`, `shutting_down_s`, `visible_after_s` and `boot_s` are drawn anew for each instance.
    """

    def __init__(self, region: str, seed: int) -> None:
        self.region, self.account = region, ACCOUNT
        self.spot = SpotMarket(seed=seed)
        self.rng = random.Random(f"{region} {seed}")
        self.zones = tuple(region + letter for letter in ("abcdef" if region == "us-east-1" else "abc"))
        self.pending_s: Delay = 20.0
        self.shutting_down_s: Delay = 30.0
        self.visible_after_s: Delay = 0.0
        self.boot_s: Delay = 0.0
        self.ignores_spot = False
        self.free_plan = False
        """Whether the account is on the Free plan, which may launch a few small types."""
        self.downloads_gb = 4.0
        """What an instance without a public address gets through the NAT gateway."""
        self.machine_types: dict[str, MachineType] = dict(MACHINE_TYPES)
        self.quotas_vcpus: dict[str, float] = dict.fromkeys(QUOTAS, DEFAULT_VCPUS)
        self.capacity: dict[Pool, int] = {}
        self.reservations: dict[str, Reservation] = {}
        self.block_usd_per_hour: dict[str, float] = {"p4d.24xlarge": 11.8, "p5.48xlarge": 31.464}
        """Types that are sold in capacity blocks, and what an instance costs on average."""
        self.block_currency = "USD"
        self.placement_groups: dict[str, PlacementGroup] = {}
        self.cluster_capacity: int | None = None
        """Instances that one cluster placement group has room for; None: for any number."""
        self.profiles: dict[str, str] = {name: name for name in ("rubberband-worker", "rubberband-head")}
        """Instance profile -> its role."""
        self.scheduler_roles: set[str] = {"rubberband-guard"}
        """Roles that EventBridge Scheduler may assume."""
        self.guard_may_end: Callable[[Instance], bool] = lambda instance: True
        self.schedules: dict[str, Schedule] = {}
        self.schedule_settles_s = 3.0
        """A schedule can be moved again so long after it was made or moved."""
        self.agent_s = 15.0
        """SSM's agent on an instance is online so long after it runs."""
        self.command_known_s, self.command_s = 1.0, 2.0
        """A command is known, and done, so long after it was sent."""
        self.commands: dict[str, Command] = {}
        self.runs_command: Callable[[str, str], Result] = lambda instance_id, script: lambda: (0, "", "")
        """Starts a script on an instance."""
        self.key_pairs: set[str] = {"me"}
        self.parameters: dict[str, dict[str, Any]] = {}
        """As GetParameter shows them, with their value in clear text."""
        self.buckets: dict[str, MutableMapping[str, bytes]] = {}
        """Bucket -> its objects."""
        self.new_bucket: Callable[[str], MutableMapping[str, bytes]] = lambda name: {}
        self.bucket_of_policies: str | None = None
        """What policies are asked about, whatever the bucket; None: each has its own name."""
        self.uploads: dict[str, tuple[str, str, dict[int, bytes]]] = {}
        """Uploads under way: bucket, key and parts."""
        self.bucket_facts: dict[str, BucketFacts] = {}
        self.roles: dict[str, Any] = {}
        """Roles of IAM (`iam.Role`) that were made here; the profiles above have theirs without that."""
        self.stacks: dict[str, Any] = {}
        """Id -> a stack of CloudFormation (`stacks.Stack`)."""
        self.service_roles: set[str] = {"EC2Spot"}
        self.quota_requests: list[dict[str, Any]] = []
        self.budgets: dict[str, Any] = {}
        self.images: dict[str, Image] = {}
        self.snapshots: dict[str, Snapshot] = {}
        self.vpcs: dict[str, Vpc] = {}
        self.subnets: dict[str, Subnet] = {}
        self.groups: dict[str, Group] = {}
        self.instances: dict[str, Instance] = {}
        self.earlier: list[Instance] = []
        """What instances that were stopped and started again had been until then."""
        self.launched_by_token: dict[str, tuple[str, tuple[Instance, ...]]] = {}
        """Client token -> the parameters that it came with, and what was launched."""
        self.console: Callable[[str], str] = lambda instance_id: ""
        """What an instance's console shows."""
        self.reads: Callable[[str], tuple[float, float]] | None = None
        """From UserData to its lease and lifetime, in seconds: instances then power themselves off."""
        self._living: dict[str, Instance] = {}
        self._changes: list[tuple[str, Instance]] = []
        self._add_vpc("172.31", default=True)

    def new_id(self, prefix: str) -> str:
        """Such as `i-0a1b2c3d4e5f60718`."""
        return f"{prefix}-{self.rng.getrandbits(68):017x}"

    def fabric_works(self, instance: Instance) -> bool:
        """Whether others of its groups reach its Elastic Fabric Adapters, whose traffic is neither TCP nor UDP: a rule
        for addresses does not let it through."""
        for group_id, _ in instance.groups:
            group = self.groups[group_id]
            rules = [Rule("-1", -1, -1, "group", group_id)]
            if all(rule in group.ingress and rule in group.egress for rule in rules):
                return True
        return False

    def offers(self, machine: MachineType, zone: str) -> bool:
        """Whether a zone has such machines: us-east-1e has old ones only, the largest are in the first three zones."""
        if machine.gpus and zone == "us-east-1e":
            return False
        return machine.family not in ("p4d", "p4de", "p5", "p3dn") or zone in self.zones[:3]

    def sold(self) -> dict[str, MachineType]:
        """The types that a zone of this region has: EC2 describes no others here."""
        known = self.machine_types
        return {name: one for name, one in known.items() if any(self.offers(one, zone) for zone in self.zones)}

    def add(self, instance: Instance) -> None:
        if self.reads is not None:
            lease_s, lifetime_s = self.reads(instance.user_data)
            booted_at = instance.running_at + drawn(self.boot_s, self.rng)
            instance.lease_until = booted_at + lease_s
            instance.hard_stop_at = booted_at + lifetime_s
        self.instances[instance.instance_id] = self._living[instance.instance_id] = instance

    def set_schedule(self, name: str, schedule: Schedule | None) -> None:
        """Make, replace or delete it."""
        self._guard(self.schedules.pop(name, None), None)
        if schedule is not None:
            self.schedules[name] = schedule
            self._guard(schedule, schedule.at)

    def _guard(self, schedule: Schedule | None, at: float | None) -> None:
        for instance_id in () if schedule is None else schedule.instances:
            instance = self.instances.get(instance_id)
            if instance is not None and instance.lives():
                instance.guard_at = at if self.guard_may_end(instance) else None

    def facts(self, bucket: str) -> BucketFacts:
        return self.bucket_facts.setdefault(bucket, BucketFacts(region=self.region))

    def empty(self) -> None:
        """Make it a new account: no roles, no bucket, and quotas for machines without GPUs only."""
        self.profiles.clear()
        self.scheduler_roles.clear()
        self.service_roles.clear()
        self.buckets.clear()
        self.quotas_vcpus = {code: 5.0 if "Standard" in name else 0.0 for code, name in QUOTAS.items()}

    def living(self) -> Iterator[Instance]:
        return iter(self._living.values())

    def settle(self, now: float) -> None:
        """Let everything happen that was due by `now`."""
        self.schedules = {name: one for name, one in self.schedules.items() if one.at > now}
        for instance in list(self._living.values()):
            self._outbid(instance, now)
            due = instance.due(now)
            self._boot(instance, min(now, due[0]) if due else now)
            if due is not None:
                at, reason = due
                self.end(
                    instance, at, reason, instance.shutdown_behavior if reason == INSTANCE_INITIATED else "terminate"
                )

    def _outbid(self, instance: Instance, now: float) -> None:
        """EC2 takes a spot instance back once the price is above its maximum, two minutes after it says so."""
        if instance.max_price is None or instance.reclaim_at is not None:
            return
        most_usd, since = float(instance.max_price), instance.outbid_until or instance.launched_at
        instance.outbid_until = now
        machine, zone = instance.machine_type, instance.zone
        for at in sorted(self.spot.changes(machine, zone, since, now)):
            if at >= instance.launched_at and self.spot.price_usd(machine, zone, at) > most_usd:
                instance.notice_at, instance.reclaim_at = at, at + NOTICE_S
                return

    def end(self, instance: Instance, at: float, reason: str, behavior: Behavior = "terminate") -> None:
        if self._living.pop(instance.instance_id, None) is not None:
            self._changes.append(("end", instance))
        instance.end(at, reason, behavior)

    def start(self, instance: Instance, now: float) -> None:
        self.earlier.append(instance.restart(now, drawn(self.pending_s, self.rng)))
        self._living[instance.instance_id] = instance

    def changes(self) -> list[tuple[str, Instance]]:
        """What booted (`boot`) or ended (`end`) since this was last asked, in order."""
        changes, self._changes = self._changes, []
        return changes

    def has_capacity(self, instance_type: str, zone: str, market: Market, instances: int) -> bool:
        """Whether every pool that such machines come from has so many left."""
        return all(
            taken + instances <= limit
            for pool, limit in self.capacity.items()
            if pool.holds(instance_type, zone, market)
            for taken in [sum(pool.holds(one.machine_type.name, one.zone, one.market) for one in self.living())]
        )

    def reserved(self, reservation: Reservation) -> int:
        return sum(one.reservation == reservation.reservation_id for one in self.living())

    def cluster_has_capacity(self, group: str | None, zone: str, instances: int) -> bool:
        """Whether a cluster placement group has room: it is in one zone, that of the instances which are in it."""
        if group is None:
            return True
        inside = [one for one in self.living() if one.placement_group == group]
        fits = self.cluster_capacity is None or len(inside) + instances <= self.cluster_capacity
        return fits and all(one.zone == zone for one in inside)

    def add_vpc(self, prefix: str = "10.0") -> str:
        """Another VPC, not the default one, with a subnet in each zone and its default security group; its id."""
        return self._add_vpc(prefix, default=False)

    def _add_vpc(self, prefix: str, *, default: bool) -> str:
        vpc_id = self.new_id("vpc")
        self.vpcs[vpc_id] = Vpc(vpc_id=vpc_id, cidr=f"{prefix}.0.0/16", default=default)
        for index, zone in enumerate(self.zones):
            subnet_id = self.new_id("subnet")
            cidr = f"{prefix}.{16 * index}.0/20"
            self.subnets[subnet_id] = Subnet(
                subnet_id=subnet_id, vpc_id=vpc_id, zone=zone, cidr=cidr, default=default, public=default
            )
        group_id = self.new_id("sg")
        description = "default VPC security group"
        group = Group(group_id=group_id, name="default", description=description, vpc_id=vpc_id)
        group.ingress.append(Rule("-1", -1, -1, "group", group_id))
        self.groups[group_id] = group
        return vpc_id

    def _boot(self, instance: Instance, by: float) -> None:
        if not instance.booted and instance.running_at <= by:
            instance.booted = True
            self._changes.append(("boot", instance))
