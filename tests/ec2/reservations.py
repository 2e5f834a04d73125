"""Capacity that is reserved: on-demand capacity reservations, capacity blocks, and the blocks on offer."""

from __future__ import annotations

from typing import Any

from tests.ec2.faults import FakeError
from tests.ec2.filters import page
from tests.ec2.instance import as_datetime
from tests.ec2.request import Request, operation
from tests.ec2.world import Reservation

SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of instances that a block may have."""
DAY_S = 86_400.0


@operation("ec2", "DescribeCapacityReservations", checked=True)
def describe_capacity_reservations(request: Request) -> dict[str, Any]:
    known, asked = request.world.reservations, request.params.get("CapacityReservationIds", ())
    for name in asked:
        if name not in known:
            message = f"The capacity reservation '{name}' does not exist"
            raise FakeError("InvalidCapacityReservationId.NotFound", message)
    chosen = [one for one in known.values() if not asked or one.reservation_id in asked]
    shown, following = page(chosen, request.params)
    return {"CapacityReservations": [_shown(request, one) for one in shown], **following}


def _shown(request: Request, one: Reservation) -> dict[str, Any]:
    ends = {} if one.ends_at is None else {"EndDate": as_datetime(one.ends_at)}
    return {
        "CapacityReservationId": one.reservation_id,
        "InstanceType": one.instance_type,
        "InstancePlatform": "Linux/UNIX",
        "AvailabilityZone": one.zone,
        "Tenancy": "default",
        "TotalInstanceCount": one.instances,
        "State": one.state(request.now),
        "StartDate": as_datetime(one.begins_at),
        "ReservationType": one.kind,
        **ends,
    }


@operation("ec2", "DescribeCapacityBlockOfferings", checked=True)
def describe_capacity_block_offerings(request: Request) -> dict[str, Any]:
    """DescribeCapacityBlockOfferings: of the types that are sold in blocks, by days, from the next 11:30 UTC on."""
    world, params = request.world, request.params
    name, hours = str(params.get("InstanceType")), int(params["CapacityDurationHours"])
    if name not in world.block_usd_per_hour:
        raise FakeError("InvalidParameterValue", f"Instance type {name} is not supported for Capacity Blocks.")
    count = int(params.get("InstanceCount", 1))
    if hours % 24 or count not in SIZES:
        raise FakeError("InvalidParameterValue", "The instance count or the duration is not supported.")
    begins_at = (request.now // DAY_S + 1) * DAY_S + 11.5 * 3600.0
    offerings = [
        {
            "CapacityBlockOfferingId": f"cb-{day:017x}",
            "InstanceType": name,
            "AvailabilityZone": world.zones[0],
            "InstanceCount": count,
            "StartDate": as_datetime(begins_at + day * DAY_S),
            "EndDate": as_datetime(begins_at + day * DAY_S + hours * 3600.0),
            "CapacityBlockDurationHours": hours,
            "UpfrontFee": f"{world.block_usd_per_hour[name] * hours * count * factor:.3f}",
            "CurrencyCode": world.block_currency,
            "Tenancy": "default",
        }
        for day, factor in ((0, 1.2), (2, 1.0))
    ]
    shown, following = page(offerings, params)
    return {"CapacityBlockOfferings": shown, **following}
