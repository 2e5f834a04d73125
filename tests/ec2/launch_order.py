"""What a RunInstances call asks for, checked against what exists: the order that is then authorised and filled."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.ec2.faults import FakeError
from tests.ec2.instance import Behavior, Market
from tests.ec2.machine_types import FREE_PLAN, MachineType
from tests.ec2.world import ACCOUNT, Group, Image, Reservation, Subnet, World

USER_DATA_BYTES = 16_384
DEFAULT_TYPE = "t3.micro"
DEFAULT_METADATA: Mapping[str, Any] = {
    "HttpTokens": "optional",
    "HttpPutResponseHopLimit": 1,
    "HttpEndpoint": "enabled",
    "HttpProtocolIpv6": "disabled",
    "InstanceMetadataTags": "disabled",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be launched; everything that it names exists."""

    machine: MachineType
    image: Image
    volume_gb: int
    """Of the root volume."""
    further_iops: int
    """Of all volumes, above those in the price of gp3."""
    subnet: Subnet
    groups: tuple[Group, ...]
    count: int
    at_least: int
    market: Market
    max_price: str | None
    placement_group: str | None
    interfaces: tuple[Mapping[str, Any], ...]
    """Those that were asked for one by one; empty: one, as the subnet has it."""
    reservation: Reservation | None
    profile: str | None
    key_name: str | None
    user_data: str
    shutdown_behavior: Behavior
    metadata_options: Mapping[str, Any]
    tags: Mapping[str, Mapping[str, str]]
    """Kind of resource (`instance`, `volume`, …) -> its tags."""


def order_of(world: World, params: Mapping[str, Any], now: float) -> Order:
    """Raises FakeError, with EC2's codes, for what does not exist or does not fit."""
    machine = _machine(world, params.get("InstanceType", DEFAULT_TYPE))
    if world.free_plan and machine.name not in FREE_PLAN:
        message = (
            "The specified instance type is not eligible for Free Tier. For a list of Free Tier instance types, run "
            "'describe-instance-types' with the filter 'free-tier-eligible=true'."
        )
        raise FakeError("InvalidParameterCombination", message)
    image = _image(world, params.get("ImageId"), machine, now)
    volume_gb = _root_gb(params, image)
    subnet = _subnet(world, params, machine)
    at_least, count = _counts(params)
    market, max_price = _market(params)
    return Order(
        machine=machine,
        image=image,
        volume_gb=volume_gb,
        further_iops=_further_iops(params, image),
        subnet=subnet,
        groups=_groups(world, params, subnet),
        count=count,
        at_least=at_least,
        market=market,
        max_price=max_price,
        placement_group=_placement_group(world, params, machine),
        interfaces=_interfaces(params, machine),
        reservation=_reservation(world, params, machine, subnet, now),
        profile=_profile(world, params.get("IamInstanceProfile", {})),
        key_name=_key(world, params.get("KeyName")),
        user_data=_user_data(params.get("UserData", "")),
        shutdown_behavior=params.get("InstanceInitiatedShutdownBehavior", "stop"),
        metadata_options={**DEFAULT_METADATA, **params.get("MetadataOptions", {})},
        tags=tags_of(params),
    )


def tags_of(params: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """TagSpecifications as a mapping: kind of resource -> key -> value. Raises FakeError for tags that AWS forbids."""
    tags: dict[str, dict[str, str]] = {}
    for specification in params.get("TagSpecifications", ()):
        of_kind = tags.setdefault(specification["ResourceType"], {})
        for tag in specification.get("Tags", ()):
            if tag["Key"].lower().startswith("aws:"):
                raise FakeError("InvalidParameterValue", "Tag keys starting with 'aws:' are reserved for internal use")
            of_kind[tag["Key"]] = tag.get("Value", "")
        if len(of_kind) > 50:
            raise FakeError("TagLimitExceeded", "The maximum number of Tags for a resource has been reached.")
    return tags


def profile_arn(name: str) -> str:
    return f"arn:aws:iam::{ACCOUNT}:instance-profile/{name}"


def _machine(world: World, name: str) -> MachineType:
    if name not in world.machine_types:
        raise FakeError("InvalidParameterValue", f"Invalid value '{name}' for InstanceType.")
    return world.machine_types[name]


def _image(world: World, image_id: str | None, machine: MachineType, now: float) -> Image:
    if image_id is None:
        raise FakeError("MissingParameter", "The request must contain the parameter ImageId")
    if not image_id.startswith("ami-"):
        raise FakeError("InvalidAMIID.Malformed", f'Invalid id: "{image_id}" (expecting "ami-...")')
    if image_id not in world.images:
        raise FakeError("InvalidAMIID.NotFound", f"The image id '[{image_id}]' does not exist")
    image = world.images[image_id]
    if now < image.available_at:  # in these words: hashicorp/packer#12162
        raise FakeError("InvalidAMIID.Unavailable", f"AMI '{image_id}' is pending, and cannot be run")
    if image.architecture != machine.architecture:
        raise FakeError(
            "InvalidParameterValue",
            f"The architecture '{machine.architecture}' of the specified instance type does not match the architecture "
            f"'{image.architecture}' of the specified AMI. Specify an instance type and an AMI that have matching "
            "architectures, and try again. You can use 'describe-instance-types' or 'describe-images' to discover the "
            "architecture of the instance type or AMI.",
        )
    return image


def _root_gb(params: Mapping[str, Any], image: Image) -> int:
    root_gb = image.volume_gb
    for mapping in params.get("BlockDeviceMappings", ()):
        size_gb = mapping.get("Ebs", {}).get("VolumeSize", image.volume_gb)
        if mapping.get("DeviceName") == image.root_device and size_gb < image.volume_gb:
            raise FakeError(
                "InvalidBlockDeviceMapping",
                f"Volume of size {size_gb}GB is smaller than snapshot 'snap-{image.image_id[4:]}', expect size >= "
                f"{image.volume_gb}GB",
            )
        if mapping.get("DeviceName") == image.root_device:
            root_gb = size_gb
    return int(root_gb)


def _further_iops(params: Mapping[str, Any], image: Image) -> int:
    iops = dict.fromkeys((image.root_device, *image.lasting_disks), image.iops)
    for mapping in params.get("BlockDeviceMappings", ()):
        iops[mapping["DeviceName"]] = mapping.get("Ebs", {}).get("Iops", iops.get(mapping["DeviceName"], 3000))
    return sum(max(0, each - 3000) for each in iops.values())


def _subnet(world: World, params: Mapping[str, Any], machine: MachineType) -> Subnet:
    subnet_id = params.get("SubnetId") or _interface(params).get("SubnetId")
    zone = params.get("Placement", {}).get("AvailabilityZone")
    if zone is not None and zone not in world.zones:
        raise FakeError("InvalidParameterValue", f"Invalid availability zone: [{zone}]")
    if subnet_id is None:
        return _default_subnet(world, zone, machine)
    if subnet_id not in world.subnets:
        raise FakeError("InvalidSubnetID.NotFound", f"The subnet ID '{subnet_id}' does not exist")
    subnet = world.subnets[subnet_id]
    if zone not in (None, subnet.zone):
        message = "The specified availability zone and the subnet's availability zone do not match"
        raise FakeError("InvalidParameterValue", message)
    return subnet


def _default_subnet(world: World, zone: str | None, machine: MachineType) -> Subnet:
    of_default = [subnet for subnet in world.subnets.values() if subnet.default]
    fitting = [one for one in of_default if zone == one.zone or (zone is None and world.offers(machine, one.zone))]
    if not fitting:
        raise FakeError("MissingInput", "No subnets found for the default VPC. Please specify a subnet.")
    return fitting[0]


def _interface(params: Mapping[str, Any]) -> Mapping[str, Any]:
    interfaces = params.get("NetworkInterfaces", ())
    if interfaces and (params.get("SubnetId") or params.get("SecurityGroupIds")):
        message = "Network interfaces and an instance-level subnet ID may not be specified on the same request"
        raise FakeError("InvalidParameterCombination", message)
    return interfaces[0] if interfaces else {}


def _interfaces(params: Mapping[str, Any], machine: MachineType) -> tuple[Mapping[str, Any], ...]:
    interfaces = tuple(params.get("NetworkInterfaces", ()))
    places = [(one.get("NetworkCardIndex", 0), one.get("DeviceIndex")) for one in interfaces]
    if any(device is None for _, device in places):
        raise FakeError("MissingParameter", "The request must contain the parameter deviceIndex")
    if len(interfaces) > 1 and any("AssociatePublicIpAddress" in one for one in interfaces):
        message = "The associatePublicIPAddress parameter cannot be specified when launching with multiple network "
        raise FakeError("InvalidParameterCombination", f"{message}interfaces.")
    if interfaces and (len(set(places)) < len(places) or (0, 0) not in places):
        message = "Each network interface requires a unique network card and device index, the primary one 0 and 0."
        raise FakeError("InvalidParameterCombination", message)
    for one, (card, device) in zip(interfaces, places, strict=True):
        kind = one.get("InterfaceType", "interface")
        if card >= machine.network_cards:
            message = f"Network card index {card} exceeds the limit for '{machine.name}'."
            raise FakeError("InvalidParameterValue", message)
        if kind != "interface" and card not in machine.efa_cards:
            message = f"Network card index {card} of '{machine.name}' does not support the interface type '{kind}'."
            raise FakeError("InvalidParameterCombination", message)
        if (card, device, kind) == (0, 0, "efa-only"):
            raise FakeError("InvalidParameterCombination", "The primary network interface cannot be efa-only.")
    return tuple({"InterfaceType": "interface", **one} for one in interfaces)


def _groups(world: World, params: Mapping[str, Any], subnet: Subnet) -> tuple[Group, ...]:
    asked = params.get("SecurityGroupIds") or _interface(params).get("Groups", ())
    if not asked:
        return tuple(one for one in world.groups.values() if one.vpc_id == subnet.vpc_id and one.name == "default")
    for group_id in asked:
        if group_id not in world.groups:
            raise FakeError("InvalidGroup.NotFound", f"The security group '{group_id}' does not exist")
        if world.groups[group_id].vpc_id != subnet.vpc_id:
            message = f"Security group {group_id} and subnet {subnet.subnet_id} belong to different networks."
            raise FakeError("InvalidParameter", message)
    return tuple(world.groups[group_id] for group_id in asked)


def _counts(params: Mapping[str, Any]) -> tuple[int, int]:
    at_least, count = params["MinCount"], params["MaxCount"]
    if not 1 <= at_least <= count:
        message = f"Value ({at_least}) for parameter minCount is invalid. It must be from 1 to maxCount ({count})."
        raise FakeError("InvalidParameterValue", message)
    return at_least, count


def _market(params: Mapping[str, Any]) -> tuple[Market, str | None]:
    options = params.get("InstanceMarketOptions", {})
    if options.get("MarketType") != "spot":
        return "on-demand", None
    spot = options.get("SpotOptions", {})
    one_time = spot.get("SpotInstanceType", "one-time") == "one-time"
    if one_time and spot.get("InstanceInterruptionBehavior", "terminate") != "terminate":
        message = "Interruption behavior is not supported for one-time Spot instance requests"
        raise FakeError("InvalidParameterCombination", message)
    return "spot", _bid(spot.get("MaxPrice"))


def _bid(max_price: str | None) -> str | None:
    try:
        valid = max_price is None or float(max_price) > 0.0
    except ValueError:
        valid = False
    if not valid:
        raise FakeError("InvalidParameterValue", f"Value ({max_price}) for parameter maxPrice is invalid.")
    return max_price


def _placement_group(world: World, params: Mapping[str, Any], machine: MachineType) -> str | None:
    name = params.get("Placement", {}).get("GroupName")
    if not name:
        return None
    if name not in world.placement_groups:
        raise FakeError("InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown.")
    strategy = world.placement_groups[name].strategy
    if strategy not in machine.placement_strategies:
        message = f"{strategy.capitalize()} placement groups are not supported by the '{machine.name}' instance type."
        raise FakeError("InvalidParameterCombination", message)
    return str(name)


def _reservation(
    world: World, params: Mapping[str, Any], machine: MachineType, subnet: Subnet, now: float
) -> Reservation | None:
    asked = params.get("CapacityReservationSpecification", {}).get("CapacityReservationTarget", {})
    block_market = params.get("InstanceMarketOptions", {}).get("MarketType") == "capacity-block"
    if not asked:
        if block_market:
            raise FakeError("MissingParameter", "You must specify a Capacity Reservation ID for a Capacity Block.")
        return None
    name = asked.get("CapacityReservationId", "")
    if name not in world.reservations:
        raise FakeError("InvalidCapacityReservationId.NotFound", f"The capacity reservation '{name}' does not exist")
    found = world.reservations[name]
    if (found.instance_type, found.zone) != (machine.name, subnet.zone):
        raise FakeError("InvalidParameterValue", f"The attributes of {name} do not match those of the launch.")
    if (found.kind == "capacity-block") != block_market:
        raise FakeError("InvalidParameterCombination", f"The market type does not match that of {name}.")
    if params.get("Placement", {}).get("GroupName"):
        raise FakeError("InvalidParameterCombination", f"{name} is not in the placement group.")
    if found.state(now) != "active":
        raise FakeError("InvalidCapacityReservationState", f"{name} is {found.state(now)}.")
    return found


def _profile(world: World, asked: Mapping[str, str]) -> str | None:
    if not asked:
        return None
    field, given = ("name", asked["Name"]) if "Name" in asked else ("arn", asked.get("Arn", ""))
    name = given if field == "name" else given.rpartition("/")[2]
    if not world.profiles.get(name):
        message = f"Value ({given}) for parameter iamInstanceProfile.{field} is invalid. Invalid IAM Instance Profile"
        raise FakeError("InvalidParameterValue", f"{message} {'name' if field == 'name' else 'ARN'}")
    return name


def _key(world: World, name: str | None) -> str | None:
    if name is not None and name not in world.key_pairs:
        raise FakeError("InvalidKeyPair.NotFound", f"The key pair '{name}' does not exist")
    return name


def _user_data(encoded: str) -> str:
    try:
        decoded = base64.b64decode(encoded, validate=True)
    except (ValueError, binascii.Error):
        raise FakeError("InvalidParameterValue", "Invalid BASE64 encoding of user data.") from None
    if len(decoded) > USER_DATA_BYTES:
        raise FakeError("InvalidParameterValue", f"User data is limited to {USER_DATA_BYTES} bytes")
    return decoded.decode(errors="replace")
