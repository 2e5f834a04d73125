"""RunInstances against the caller's policies: EC2 asks about every kind of resource that a launch touches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.ec2.access import Access
from tests.ec2.faults import FakeError
from tests.ec2.instance import Instance
from tests.ec2.launch_order import Order, profile_arn
from tests.ec2.world import ACCOUNT, World

Keys = dict[str, str | Sequence[str]]


def arn(world: World, resource: str, *, account: str = ACCOUNT) -> str:
    """Of one of EC2's resources, such as `instance/*`."""
    return f"arn:aws:ec2:{world.region}:{account}:{resource}"


def request_tags(tags: Mapping[str, str]) -> Keys:
    keys: Keys = {f"aws:RequestTag/{key}": value for key, value in tags.items()}
    return keys | {"aws:TagKeys": tuple(tags)} if tags else keys


def resource_tags(tags: Mapping[str, str]) -> Keys:
    return {f"{prefix}:ResourceTag/{key}": value for key, value in tags.items() for prefix in ("aws", "ec2")}


def check_launch(world: World, access: Access, order: Order) -> None:
    """Raises FakeError for the first right that is missing: to launch, to tag what is launched, to pass the role."""
    for resource, keys in _touched(world, order):
        access.check("ec2:RunInstances", resource, {"ec2:Region": world.region, **keys})
    for kind, tags in order.tags.items():
        keys = {**request_tags(tags), "ec2:CreateAction": "RunInstances", "ec2:Region": world.region}
        access.check("ec2:CreateTags", arn(world, f"{kind}/*"), keys)
    if order.market == "spot" and "EC2Spot" not in world.service_roles:
        try:
            access.check("iam:CreateServiceLinkedRole")
        except FakeError:
            message = "The provided credentials may not create the service-linked role for EC2 Spot Instances."
            raise FakeError("AuthFailure.ServiceLinkedRoleCreationNotPermitted", message, 403) from None
    if order.profile is not None:
        role = f"arn:aws:iam::{ACCOUNT}:role/{world.profiles[order.profile]}"
        access.check("iam:PassRole", role, {"iam:PassedToService": "ec2.amazonaws.com"})


def check_end(world: World, access: Access, instance: Instance) -> None:
    """Raises FakeError unless the caller may end the instance."""
    keys = {"ec2:Region": world.region, **resource_tags(instance.tags)}
    access.check("ec2:TerminateInstances", arn(world, f"instance/{instance.instance_id}"), keys)


def _touched(world: World, order: Order) -> list[tuple[str, Keys]]:
    zone: Keys = {"ec2:AvailabilityZone": order.subnet.zone}
    vpc: Keys = {"ec2:Vpc": arn(world, f"vpc/{order.subnet.vpc_id}")}
    subnet = arn(world, f"subnet/{order.subnet.subnet_id}")
    image = arn(world, f"image/{order.image.image_id}", account="")
    touched: list[tuple[str, Keys]] = [
        (arn(world, "instance/*"), {**zone, **_of_instance(order)}),
        (image, {"ec2:Owner": order.image.owner, "ec2:RootDeviceType": "ebs", "ec2:ImageType": "machine"}),
        (subnet, {**zone, **vpc}),
        (arn(world, "network-interface/*"), {**zone, **vpc, "ec2:Subnet": subnet}),
        (arn(world, "volume/*"), {**zone, **request_tags(order.tags.get("volume", {}))}),
    ]
    touched += [(arn(world, f"security-group/{one.group_id}"), vpc | resource_tags(one.tags)) for one in order.groups]
    if order.placement_group is not None:
        tags = world.placement_groups[order.placement_group].tags
        touched.append((arn(world, f"placement-group/{order.placement_group}"), resource_tags(tags)))
    if order.reservation is not None:
        touched.append((arn(world, f"capacity-reservation/{order.reservation.reservation_id}"), {}))
    if order.key_name is not None:
        touched.append((arn(world, f"key-pair/{order.key_name}"), {}))
    if "spot-instances-request" in order.tags:
        asked = order.tags["spot-instances-request"]
        touched.append((arn(world, "spot-instances-request/*"), request_tags(asked)))
    return touched


def _of_instance(order: Order) -> Keys:
    keys: Keys = {
        "ec2:InstanceType": order.machine.name,
        "ec2:InstanceMarketType": order.market,
        "ec2:MetadataHttpTokens": str(order.metadata_options["HttpTokens"]),
        "ec2:MetadataHttpEndpoint": str(order.metadata_options["HttpEndpoint"]),
        "ec2:MetadataHttpPutResponseHopLimit": str(order.metadata_options["HttpPutResponseHopLimit"]),
        "ec2:RootDeviceType": "ebs",
        "ec2:Tenancy": "default",
    }
    if order.profile is not None:
        keys["ec2:InstanceProfile"] = profile_arn(order.profile)
    return keys | request_tags(order.tags.get("instance", {}))
