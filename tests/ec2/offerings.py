"""What a region has to offer: instance types and where they are, images, zones, regions, key pairs, spot prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from tests.ec2.faults import FakeError
from tests.ec2.filters import Reader, filtered, page
from tests.ec2.instance import as_datetime
from tests.ec2.machine_types import MachineType, as_described
from tests.ec2.request import Request, operation
from tests.ec2.spot_prices import SpotMarket
from tests.ec2.world import ACCOUNT, Image

LINUX = "Linux/UNIX"
DAY_S = 86_400.0
AMAZON = "898082745236"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offering:
    instance_type: str
    location: str


class SpotPrice(NamedTuple):
    """Price of a type in a zone, from `at` on."""

    machine: MachineType
    zone: str
    at: float


@operation("ec2", "DescribeInstanceTypes", checked=True)
def describe_instance_types(request: Request) -> dict[str, Any]:
    known, asked = request.world.sold(), request.params.get("InstanceTypes", ())
    if asked and "MaxResults" in request.params:
        message = "The parameter InstanceTypes cannot be used with the parameter MaxResults"
        raise FakeError("InvalidParameterCombination", message)
    if unknown := [name for name in asked if name not in known]:
        message = f"The following supplied instance types do not exist: [{', '.join(unknown)}]"
        raise FakeError("InvalidInstanceType", message)
    chosen = [machine for machine in known.values() if not asked or machine.name in asked]
    shown, following = page(filtered(chosen, request.params, _TYPE_READERS), request.params, at_least=5, at_most=100)
    return {"InstanceTypes": [as_described(machine) for machine in shown], **following}


@operation("ec2", "DescribeInstanceTypeOfferings", checked=True)
def describe_instance_type_offerings(request: Request) -> dict[str, Any]:
    world, by = request.world, request.params.get("LocationType", "region")
    offerings = [
        Offering(instance_type=machine.name, location=zone)
        for machine in world.sold().values()
        for zone in ((world.region,) if by == "region" else world.zones)
        if by == "region" or world.offers(machine, zone)
    ]
    shown, following = page(filtered(offerings, request.params, _OFFERING_READERS), request.params)
    described = [{"InstanceType": one.instance_type, "LocationType": by, "Location": one.location} for one in shown]
    return {"InstanceTypeOfferings": described, **following}


@operation("ec2", "DescribeImages", checked=True)
def describe_images(request: Request) -> dict[str, Any]:
    images, asked = request.world.images, request.params.get("ImageIds", ())
    for image_id in asked:
        if not image_id.startswith("ami-"):
            raise FakeError("InvalidAMIID.Malformed", f'Invalid id: "{image_id}" (expecting "ami-...")')
        if image_id not in images:
            raise FakeError("InvalidAMIID.NotFound", f"The image id '[{image_id}]' does not exist")
    owners = request.params.get("Owners")
    chosen = [
        image
        for image in images.values()
        if (not asked or image.image_id in asked)
        and (not owners or {image.owner, AMAZON if image.owner != "self" else ACCOUNT} & set(owners))
    ]
    readers = {**_IMAGE_READERS, "state": lambda image: (_image_state(image, request.now),)}
    shown, following = page(filtered(chosen, request.params, readers), request.params)
    return {"Images": [_shown_image(image, request.now) for image in shown], **following}


@operation("ec2", "DescribeSpotPriceHistory", checked=True)
def describe_spot_price_history(request: Request) -> dict[str, Any]:
    """DescribeSpotPriceHistory: the price in force at StartTime and its changes until EndTime, latest first.

    Without StartTime, those of a day (AWS: of 90).
    """
    world, params = request.world, request.params
    end = min(request.now, _instant(params.get("EndTime"), request.now))
    start = min(end, _instant(params.get("StartTime"), end - DAY_S))
    types, zone = params.get("InstanceTypes"), params.get("AvailabilityZone")
    if params.get("ProductDescriptions") and LINUX not in params["ProductDescriptions"]:
        return {"SpotPriceHistory": []}
    prices = [
        SpotPrice(machine, one, at)
        for machine in world.machine_types.values()
        for one in world.zones
        if (not types or machine.name in types) and zone in (None, one) and world.offers(machine, one)
        for at in (world.spot.changes(machine, one, start, end) if machine.has_spot else ())
    ]
    prices.sort(key=lambda price: -price.at)
    shown, following = page(filtered(prices, params, _SPOT_READERS), params)
    return {"SpotPriceHistory": [_shown_price(price, world.spot) for price in shown], **following}


def _instant(asked: Any, otherwise: float) -> float:
    if asked is None:
        return otherwise
    if isinstance(asked, int | float):
        return float(asked)
    moment = datetime.fromisoformat(asked) if isinstance(asked, str) else asked
    return float((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())


def _shown_price(price: SpotPrice, market: SpotMarket) -> dict[str, Any]:
    price_usd = market.price_usd(price.machine, price.zone, price.at)
    return {
        "InstanceType": price.machine.name,
        "AvailabilityZone": price.zone,
        "SpotPrice": f"{price_usd:.6f}",
        "Timestamp": as_datetime(price.at),
    }


def _image_state(image: Image, now: float) -> str:
    return "available" if now >= image.available_at else "pending"


def _shown_image(image: Image, now: float) -> dict[str, Any]:
    volume = {
        "SnapshotId": image.snapshot_id or f"snap-{image.image_id[4:]}",
        "VolumeSize": image.volume_gb,
        "VolumeType": "gp3",
        "Iops": image.iops,
        "DeleteOnTermination": True,
    }
    return {
        "ImageId": image.image_id,
        "Name": image.name,
        "Description": image.name,
        "Architecture": image.architecture,
        "CreationDate": f"{as_datetime(image.created_at):%Y-%m-%dT%H:%M:%S}.000Z",
        "State": _image_state(image, now),
        "Public": image.owner != "self",
        "Tags": [{"Key": key, "Value": value} for key, value in image.tags.items()],
        "RootDeviceName": image.root_device,
        "PlatformDetails": LINUX if image.usage == "RunInstances" else "Red Hat Enterprise Linux",
        "UsageOperation": image.usage,
        "ProductCodes": [{"ProductCodeId": code, "ProductCodeType": "marketplace"} for code in image.product_codes],
        "BlockDeviceMappings": [
            {"DeviceName": image.root_device, "Ebs": volume},
            *({"DeviceName": name, "Ebs": {**volume, "DeleteOnTermination": False}} for name in image.lasting_disks),
        ],
    }


_TYPE_READERS: Mapping[str, Reader] = {"instance-type": lambda machine: (machine.name,)}
_OFFERING_READERS: Mapping[str, Reader] = {"instance-type": lambda offering: (offering.instance_type,)}
_IMAGE_READERS: Mapping[str, Reader] = {"architecture": lambda image: (image.architecture,)}
_SPOT_READERS: Mapping[str, Reader] = {
    "availability-zone": lambda price: (price.zone,),
    "instance-type": lambda price: (price.machine.name,),
}
