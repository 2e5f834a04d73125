"""What is asked of EC2, in its own words: tokens, tags, launch requests. Pure; it calls nothing."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rubberband.distribution import install_hint
from rubberband.errors import InputError
from rubberband.values.plan import Market

# What every instance of an experiment has in common on EC2: plain values, resolved before anything is rented.


class AwsSession(Protocol):
    """AWS in one region, as one principal: boto3's clients, or the fake's, which take and return the same.

    A client raises botocore.exceptions.ClientError, or another BotoCoreError (no connection, time-out, no credentials).
    """

    @property
    def region(self) -> str:
        """Such as `us-east-1`."""
        ...

    def client(self, service: str) -> Any:
        """The client of a service (`ec2`, `ssm`, `sts`, `pricing`, `service-quotas`, `scheduler`, `s3`), always the
        same one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStart:
    """What differs from one request to the next, as the UserData of its instances must know it."""

    instances: tuple[str, ...]
    """The names of all that one request asks for, in the order of EC2's launch index; each is its label in Ray."""
    head_address: str
    """host:port of the Ray head."""
    gpus: int
    """Slots."""
    lease_s: float
    """It powers itself off so long after booting, unless the lease is renewed."""
    boot_s: float = 0.0
    """While it installs and has not joined, it renews the lease itself; so long after booting at most."""
    lifetime_s: float
    """It powers itself off so long after booting, whatever happens (the hard stop)."""
    image_marker: str = ""
    """Of a builder, which joins no head: where it says that all is installed (s3:// address)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """How the instances of an experiment are launched."""

    image: str
    """AMI id."""
    subnets: Mapping[str, str]
    """Zone -> subnet, in the order in which they are tried."""
    security_group: str
    instance_profile: str
    """Name of the instance profile."""
    key_name: str | None
    owner: str
    volume_gb: int | None
    root_device: str
    """Device name of the image's root volume."""
    lasting_disks: tuple[str, ...] = ()
    """Device names of the image's volumes that outlive an instance (and are paid for) unless told not to."""
    user_data: Callable[[NodeStart], str]
    """The script that an instance runs when it boots. The same arguments give the same text, always."""


EXPERIMENT_TAG = "rubberband:experiment"
RUN_TAG = "rubberband:run"
INSTANCE_TAG = "rubberband:instance"
OWNER_TAG = "rubberband:owner"
ROLE_TAG = "rubberband:role"

Role = Literal["worker", "head", "builder"]

_TAG_CHARACTERS = 256
_BURSTS = re.compile(r"t\d+[a-z]*\.")
"""Types that may use more of the CPU than is paid for by the hour: EC2 charges that apart, unless told not to."""


def bursts(instance_type: str) -> bool:
    """Whether a type is charged for bursts, unless its credits are `standard`."""
    return _BURSTS.match(instance_type) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchase:
    """What one attempt tries to buy."""

    instance_type: str
    zone: str
    market: Market
    price_usd_per_hour: float
    """What it costs on that market, as far as is known before."""
    on_demand_usd_per_hour: float
    """The most that is paid on the spot market."""
    placement_group: str | None = None
    """The cluster in which it is close to others."""


def client_token(experiment: str, run: str, instances: Sequence[str], attempt: int, choice: Purchase) -> str:
    """The token of one request: the same for the same one, in any process, and for no other (64 characters)."""
    words = (experiment, run, *instances, str(attempt), choice.instance_type, choice.zone, choice.market)
    return hashlib.sha256("\0".join(words).encode()).hexdigest()


def tags_of(experiment: str, run: str, instances: Sequence[str], owner: str, role: Role = "worker") -> dict[str, str]:
    """The tags of what one request launches, and of the volumes: EC2 gives them to all of it alike."""
    own = f" {instances[0]}" if len(instances) == 1 else ""
    return {
        EXPERIMENT_TAG: experiment,
        RUN_TAG: run,
        INSTANCE_TAG: " ".join(instances),
        OWNER_TAG: owner,
        ROLE_TAG: role,
        "Name": f"rubberband {experiment}{own}",
    }


def share(instances: Sequence[str]) -> int:
    """How many of these names fit into one request: EC2 takes 256 characters in a tag."""
    count, length = 0, -1
    for name in instances:
        length += 1 + len(name)
        if length > _TAG_CHARACTERS:
            break
        count += 1
    return max(1, count)


def name_in(tags: Mapping[str, str], launch_index: int) -> str:
    """The name of the instance that is at this place in its request; empty if the tags do not say."""
    names = tags.get(INSTANCE_TAG, "").split(" ")
    return names[launch_index] if launch_index < len(names) else ""


def name_of(machine: Mapping[str, Any]) -> str:
    """The name of an instance as `describe_instances` shows it."""
    return name_in(tags_in(machine), machine.get("AmiLaunchIndex", 0))


def launch_request(
    machines: Machines,
    choice: Purchase,
    *,
    token: str,
    tags: dict[str, str],
    user_data: str,
    instances: int = 1,
    at_least: int = 1,
) -> dict[str, Any]:
    """The parameters of `run_instances` for as many as the zone has, `at_least` to `instances`, or else none.

    `user_data` is plain text.
    """
    listed = [{"Key": key, "Value": value} for key, value in tags.items()]
    request: dict[str, Any] = {
        "ImageId": machines.image,
        "InstanceType": choice.instance_type,
        "MinCount": at_least,
        "MaxCount": instances,
        "ClientToken": token,
        "SubnetId": machines.subnets[choice.zone],
        "SecurityGroupIds": [machines.security_group],
        "IamInstanceProfile": {"Name": machines.instance_profile},
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1, "HttpEndpoint": "enabled"},
        "UserData": user_data,
        "TagSpecifications": [{"ResourceType": kind, "Tags": listed} for kind in ("instance", "volume")],
    }
    if choice.placement_group is not None:
        request["Placement"] = {"GroupName": choice.placement_group}
    if machines.key_name is not None:
        request["KeyName"] = machines.key_name
    request["BlockDeviceMappings"] = changed_disks(machines.root_device, machines.volume_gb, machines.lasting_disks)
    if bursts(choice.instance_type):
        request["CreditSpecification"] = {"CpuCredits": "standard"}
    if choice.market == "spot":
        request["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": _spot_options(choice)}
    return request


def changed_disks(root_device: str, root_gb: int | None, lasting: Iterable[str]) -> list[dict[str, Any]]:
    """`BlockDeviceMappings`: the root volume is gp3, whatever the image's is (gp2 costs a quarter more), and of another
    size if it is not to be the image's; and no volume is to last."""
    disks: dict[str, dict[str, Any]] = {device: {"DeleteOnTermination": True} for device in lasting}
    size = {} if root_gb is None else {"VolumeSize": root_gb}
    disks[root_device] = {**size, "VolumeType": "gp3", "DeleteOnTermination": True}
    return [{"DeviceName": device, "Ebs": disk} for device, disk in disks.items()]


def _spot_options(choice: Purchase) -> dict[str, str]:
    options = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
    if choice.on_demand_usd_per_hour > 0.0:
        options["MaxPrice"] = f"{choice.on_demand_usd_per_hour:.6f}"
    return options


def tags_in(machine: Mapping[str, Any]) -> dict[str, str]:
    """The tags of an instance as `describe_instances` shows it."""
    return {tag["Key"]: tag["Value"] for tag in machine.get("Tags", ())}


def by_tags(**tags: str) -> list[dict[str, Any]]:
    """`Filters` of a describe call that keep what carries all these rubberband tags: `by_tags(owner="me")`."""
    return [{"Name": f"tag:rubberband:{name}", "Values": [value]} for name, value in tags.items()]


def amiss(machine: Mapping[str, Any], choice: Purchase) -> str:
    """How a described instance differs from what was asked for, in words; empty if it does not."""
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


# The way in for commands: AWS if boto3 is installed, and one line that says how to install it if it is not.
#
# It imports nothing of AWS's itself.


def open_aws(region: str) -> AwsSession:
    """A session in `region`. Raises InputError if boto3 is missing, or if boto3 knows no such region."""
    try:
        from rubberband.cloud.aws import client as session
        from rubberband.cloud.aws.client import check_region
    except ModuleNotFoundError as error:
        if error.name not in ("boto3", "botocore"):
            raise
        raise InputError(f"boto3, which talks to AWS, is not installed; run {install_hint('aws')}") from None
    check_region(region)
    return session.open_session(region)
