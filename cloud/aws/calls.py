"""Requests to EC2 in its own terms: tokens, tags, launch parameters. Pure, but for `open_aws`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rubberband.installation import require
from rubberband.values.plan import Market


class AwsSession(Protocol):
    """AWS in one region, as one principal: boto3's clients, or the fake's, which take and return the same.

    A client raises botocore.exceptions.ClientError, or another BotoCoreError (no connection, time-out, no credentials).
    """

    @property
    def region(self) -> str:
        """Such as `us-east-1`."""
        ...

    def client(self, service: str) -> Any:
        """Return the client of a service (`ec2`, `ssm`, `sts`, `pricing`, `service-quotas`, `scheduler`, `s3`), always
        the same one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStart:
    """Values of one launch request that the UserData of its instances contains."""

    instances: tuple[str, ...]
    """Names of the requested instances, in the order of EC2's launch index; each is its label in Ray."""
    head_address: str
    """host:port of the Ray head."""
    gpus: int
    """Slots."""
    lease_s: float
    """An instance powers itself off this long after booting, unless the lease is renewed."""
    boot_s: float = 0.0
    """Longest time after booting for which it renews its own lease, until it has joined."""
    lifetime_s: float
    """Time after booting at which it powers itself off in any case (the hard stop)."""
    image_marker: str = ""
    """s3:// address at which a builder, which joins no head, reports that all is installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Capacity of one type in one zone that the account has reserved, as EC2 describes it."""

    reservation_id: str
    zone: str
    instances: int
    """All of them, used or not."""
    is_block: bool
    """Whether it is a capacity block, which is paid for in advance."""
    state: str
    """`active`, `scheduled`, `expired`, …"""
    begins_at: float
    ends_at: float | None
    """Unix time; None: open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """Launch parameters that all instances of an experiment share."""

    image: str
    """AMI id."""
    subnets: Mapping[str, str]
    """Zone -> subnet, in the order in which they are tried."""
    security_group: str
    instance_profile: str
    key_name: str | None
    owner: str
    volume_gb: int | None
    root_device: str
    """Device name of the image's root volume."""
    further_disks: tuple[str, ...] = ()
    """Device names of the image's volumes beside the root."""
    reservation: Reservation | None = None
    """Capacity in which instances on demand are launched; then `subnets` has its zone alone."""
    user_data: Callable[[NodeStart], str]
    """Returns the boot script of an instance: always the same text for the same arguments."""


EXPERIMENT_TAG = "rubberband:experiment"
RUN_TAG = "rubberband:run"
INSTANCE_TAG = "rubberband:instance"
OWNER_TAG = "rubberband:owner"
ROLE_TAG = "rubberband:role"

InstanceRole = Literal["worker", "head", "builder"]

_TAG_CHARACTERS = 256
_BURSTS = re.compile(r"t\d+[a-z]*\.")
"""Burstable types: EC2 charges CPU bursts separately, unless their credits are `standard`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchase:
    """Type, zone and market of one launch attempt, with its prices."""

    instance_type: str
    zone: str
    market: Market
    price_usd_per_hour: float = 0.0
    """Price on that market, as known before the launch; 0: no bill needs it."""
    on_demand_usd_per_hour: float = 0.0
    """Limit of the price on the spot market."""
    placement_group: str | None = None
    """Cluster in which it is close to others."""
    efa_cards: tuple[int, ...] = ()
    """Network cards with an Elastic Fabric Adapter."""


def client_token(experiment: str, run: str, instances: Sequence[str], attempt: int, choice: Purchase) -> str:
    """Return the token of one request (64 characters): the same in any process, and different for any other request."""
    words = (experiment, run, *instances, str(attempt), choice.instance_type, choice.zone, choice.market)
    return hashlib.sha256("\0".join(words).encode()).hexdigest()


def tags_of(
    experiment: str, run: str, instances: Sequence[str], owner: str, role: InstanceRole = "worker"
) -> dict[str, str]:
    """Return the tags that EC2 gives to all instances and volumes of one request."""
    own = f" {instances[0]}" if len(instances) == 1 else ""
    return {
        EXPERIMENT_TAG: experiment,
        RUN_TAG: run,
        INSTANCE_TAG: " ".join(instances),
        OWNER_TAG: owner,
        ROLE_TAG: role,
        "Name": f"rubberband {experiment}{own}",
    }


def share(instances: Sequence[str], market: Market) -> int:
    """Return how many of these names may be in one request: a tag of EC2 has at most 256 characters.

    Spot instances are requested one by one. Each has a spot request of its own, and nothing that AWS documents says
    that their launch indices differ, by which an instance of several knows its name.
    """
    if market == "spot":
        return 1
    count, length = 0, -1
    for name in instances:
        length += 1 + len(name)
        if length > _TAG_CHARACTERS:
            break
        count += 1
    return max(1, count)


def name_in(tags: Mapping[str, str], launch_index: int) -> str:
    """Return the name of the instance at this index of its request; empty if the tags have none."""
    return named(tags.get(INSTANCE_TAG, "").split(" "), launch_index)


def named(names: Sequence[str], launch_index: int) -> str:
    """Return the name at this index of a request; empty if it has none. A single instance has its name at any."""
    if len(names) == 1:
        return names[0]
    return names[launch_index] if launch_index < len(names) else ""


def name_of(machine: Mapping[str, Any]) -> str:
    """Return the name of an instance as `describe_instances` shows it."""
    return name_in(tags_in(machine), machine.get("AmiLaunchIndex", 0))


def launch_request(
    machines: Machines,
    choice: Purchase,
    *,
    token: str = "",
    tags: Mapping[str, str],
    user_data: str,
    instances: int = 1,
    at_least: int = 1,
) -> dict[str, Any]:
    """Return the parameters of `run_instances` for `at_least` to `instances`, as many as the zone has, or else none.

    `user_data` is plain text.
    """
    request: dict[str, Any] = {
        "ImageId": machines.image,
        "InstanceType": choice.instance_type,
        "MinCount": at_least,
        "MaxCount": instances,
        "SecurityGroupIds": [machines.security_group],
        "IamInstanceProfile": {"Name": machines.instance_profile},
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1, "HttpEndpoint": "enabled"},
        "UserData": user_data,
        "TagSpecifications": tag_specifications(tags, "instance", "volume"),
        "BlockDeviceMappings": _changed_disks(machines.root_device, machines.volume_gb, machines.further_disks),
    }
    if token:
        request["ClientToken"] = token
    if machines.key_name is not None:
        request["KeyName"] = machines.key_name
    if _BURSTS.match(choice.instance_type):
        request["CreditSpecification"] = {"CpuCredits": "standard"}
    subnet = machines.subnets[choice.zone]
    if choice.efa_cards:
        request["NetworkInterfaces"] = list(_interfaces(subnet, request.pop("SecurityGroupIds"), choice.efa_cards))
    else:
        request["SubnetId"] = subnet
    if choice.placement_group is not None:
        request["Placement"] = {"GroupName": choice.placement_group}
    return request | _market_options(choice, machines.reservation)


def _market_options(choice: Purchase, reservation: Reservation | None) -> dict[str, Any]:
    """Return the parameters that buy on spot, or in a reservation; none on demand."""
    if choice.market == "spot":
        options = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
        if choice.on_demand_usd_per_hour > 0.0:
            options["MaxPrice"] = f"{choice.on_demand_usd_per_hour:.6f}"
        return {"InstanceMarketOptions": {"MarketType": "spot", "SpotOptions": options}}
    if reservation is None:
        return {}
    target = {"CapacityReservationTarget": {"CapacityReservationId": reservation.reservation_id}}
    block = {"InstanceMarketOptions": {"MarketType": "capacity-block"}} if reservation.is_block else {}
    return {"CapacityReservationSpecification": target, **block}


def _interfaces(subnet: str, groups: list[str], efa_cards: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield network interfaces of which one has an IP address, as EC2's guide recommends ("Maximize network bandwidth
    on Amazon EC2 instances with multiple network cards"): so no route and no name of an interface is new."""
    many = [(0, 0, "interface"), *((card, 0 if card else 1, "efa-only") for card in efa_cards)]
    for card, device, kind in [(0, 0, "efa")] if list(efa_cards) == [0] else many:
        yield {
            "NetworkCardIndex": card,
            "DeviceIndex": device,
            "InterfaceType": kind,
            "SubnetId": subnet,
            "Groups": groups,
            "DeleteOnTermination": True,
        }


def tag_specifications(tags: Mapping[str, str], *kinds: str) -> list[dict[str, Any]]:
    """Return `TagSpecifications` that give these tags to new resources of each kind."""
    listed = [{"Key": key, "Value": value} for key, value in tags.items()]
    return [{"ResourceType": kind, "Tags": listed} for kind in kinds]


def _changed_disks(root_device: str, root_gb: int | None, further: Iterable[str]) -> list[dict[str, Any]]:
    """Return `BlockDeviceMappings` under which no volume outlives its instance and all are gp3 (gp2 costs a quarter
    more) with the IOPS and MiB/s that are in its price (an image may ask for others), the root volume of `root_gb` or
    the image's own size."""
    disk = {"VolumeType": "gp3", "Iops": 3000, "Throughput": 125, "DeleteOnTermination": True}
    size = {} if root_gb is None else {"VolumeSize": root_gb}
    disks = {**dict.fromkeys(further, disk), root_device: {**size, **disk}}
    return [{"DeviceName": device, "Ebs": ebs} for device, ebs in disks.items()]


def tags_in(machine: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags of an instance as `describe_instances` shows it."""
    return {tag["Key"]: tag["Value"] for tag in machine.get("Tags", ())}


def by_tags(**tags: str) -> list[dict[str, Any]]:
    """Return `Filters` of a describe call that require all these rubberband tags: `by_tags(owner="me")`."""
    return [{"Name": f"tag:rubberband:{name}", "Values": [value]} for name, value in tags.items()]


def mismatch(machine: Mapping[str, Any], choice: Purchase) -> str:
    """Return how a described instance differs from the requested one; empty if it does not."""
    bought_type = machine.get("InstanceType", choice.instance_type)
    if bought_type != choice.instance_type:
        return f"it is a {bought_type} and {choice.instance_type} was asked for"
    market: Market = "spot" if machine.get("InstanceLifecycle") == "spot" else "on_demand"
    if market != choice.market:
        return f"it was bought {_MARKETS[market]} and {_MARKETS[choice.market]} was asked for"
    if machine.get("MetadataOptions", {}).get("HttpTokens", "required") != "required":
        return "its metadata service answers without a token (HttpTokens is not `required`)"
    return ""


_MARKETS = {"spot": "on the spot market", "on_demand": "on demand"}


def open_aws(region: str) -> AwsSession:
    """Open AWS in `region`, for commands. Raises InputError if boto3 is missing, or if boto3 knows no such region."""
    require("AWS", "boto3")
    from rubberband.cloud.aws import client

    client.check_region(region)
    return client.open_session(region)
