"""RunInstances: idempotent by its client token, refused for want of quota, capacity or money, and else filled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.ec2.faults import FakeError
from tests.ec2.instance import Instance
from tests.ec2.launch_order import Order, order_of, profile_arn
from tests.ec2.launch_rights import check_launch
from tests.ec2.quota_codes import quota_code
from tests.ec2.request import Request, operation
from tests.ec2.world import BLOCK_ENDS_S, Reservation, World, drawn


@operation("ec2", "RunInstances")
def run_instances(request: Request) -> dict[str, Any]:
    world, token = request.world, request.params.get("ClientToken", "")
    _check_token(token)
    order = order_of(world, request.params, request.now)
    check_launch(world, request.access, order)
    request.end_dry_run()
    launched = _launched_before(request, token)
    if launched is None:
        count = _granted(world, order, request.now, request.fault.launches_at_most)
        launched = _launch(request, order, count)
        if token:
            world.launched_by_token[token] = (_compared(request.params), launched)
    return {"Groups": [], "Instances": [one.as_dict(request.now) for one in launched]}


def _check_token(token: str) -> None:
    if len(token) > 64 or not token.isascii():
        message = f"Value ({token}) for parameter clientToken is invalid. It is limited to 64 ASCII characters"
        raise FakeError("InvalidParameterValue", message)


def _compared(params: Mapping[str, Any]) -> str:
    """As text, so that the caller may change what it passed, and a tuple is as good as a list."""
    asked = {key: value for key, value in params.items() if key not in ("ClientToken", "DryRun")}
    return json.dumps(asked, sort_keys=True, default=str)


def _launched_before(request: Request, token: str) -> tuple[Instance, ...] | None:
    known = request.world.launched_by_token.get(token)
    if known is None:
        return None
    if known[0] != _compared(request.params):
        message = "Arguments on this idempotent request are inconsistent with arguments used in previous request(s)."
        raise FakeError("IdempotentParameterMismatch", message)
    if any(one.state(request.now) == "terminated" for one in known[1]):  # since January 2025: boto/boto3#4406
        message = (
            "The client token you have provided is associated with a terminated instance. Please use a different "
            "client token."
        )
        raise FakeError("IdempotentInstanceTerminated", message)
    return known[1]


def _granted(world: World, order: Order, now: float, has: int | None) -> int:
    if not world.offers(order.machine, order.subnet.zone):
        raise _unsupported(world, order)
    _check_bid(world, order, now)
    if order.reservation is not None:
        return _reserved(world, order, order.reservation)
    at_most = world.quotas_vcpus[quota_code(order.machine.family, order.market)] // order.machine.vcpus
    if order.count > max(1, at_most):  # as the model says of MaxCount: between 1 and the quota
        raise _over_quota(world, order, order.count) or _no_capacity(order)
    over: FakeError | None = None
    for count in range(order.count if has is None else min(has, order.count), order.at_least - 1, -1):
        over = _over_quota(world, order, count)
        there = world.has_capacity(order.machine.name, order.subnet.zone, order.market, count)
        if over is None and there and world.cluster_has_capacity(order.placement_group, order.subnet.zone, count):
            return count
    raise over or _no_capacity(order)


def _reserved(world: World, order: Order, reservation: Reservation) -> int:
    """Reserved capacity counts against no quota again."""
    left = reservation.instances - world.reserved(reservation)
    if left < order.at_least:
        message = f"{reservation.reservation_id} does not have sufficient compatible and available capacity."
        raise FakeError("ReservationCapacityExceeded", message)
    return min(left, order.count)


def _unsupported(world: World, order: Order) -> FakeError:
    name, zone = order.machine.name, order.subnet.zone
    others = ", ".join(one for one in world.zones if world.offers(order.machine, one))
    return FakeError(
        "Unsupported",
        f"Your requested instance type ({name}) is not supported in your requested Availability Zone ({zone}). Please "
        f"retry your request by not specifying an Availability Zone or choosing {others}.",
    )


def _check_bid(world: World, order: Order, now: float) -> None:
    if order.max_price is None or world.ignores_spot:
        return
    price_usd = world.spot.price_usd(order.machine, order.subnet.zone, now)
    if float(order.max_price) < price_usd:
        raise FakeError(
            "SpotMaxPriceTooLow",
            f"Your Spot request price of {order.max_price} is lower than the minimum required Spot request fulfillment "
            f"price of {price_usd}.",
        )


def _over_quota(world: World, order: Order, count: int) -> FakeError | None:
    code = quota_code(order.machine.family, order.market)
    taken = sum(
        one.machine_type.vcpus for one in world.living() if quota_code(one.machine_type.family, one.market) == code
    )
    limit = world.quotas_vcpus[code]
    if taken + count * order.machine.vcpus <= limit:
        return None
    if order.market == "spot":
        return FakeError("MaxSpotInstanceCountExceeded", "Max spot instance count exceeded")
    return FakeError(
        "VcpuLimitExceeded",
        f"You have requested more vCPU capacity than your current vCPU limit of {limit:g} allows for the instance "
        "bucket that the specified instance type belongs to. Please visit "
        "http://aws.amazon.com/contact-us/ec2-request to request an adjustment to this limit.",
    )


def _no_capacity(order: Order) -> FakeError:
    name, zone = order.machine.name, order.subnet.zone
    message = (
        "There is no Spot capacity available that matches your request."
        if order.market == "spot"
        else f"We currently do not have sufficient {name} capacity in the Availability Zone you requested ({zone}). "
        "Our system will be working on provisioning additional capacity."
    )
    return FakeError("InsufficientInstanceCapacity", message, 500)


def _launch(request: Request, order: Order, count: int) -> tuple[Instance, ...]:
    reservation_id = request.world.new_id("r")
    launched = tuple(_instance(request, order, reservation_id, index) for index in range(count))
    for instance in launched:
        request.world.add(instance)
    return launched


def _instance(request: Request, order: Order, reservation_id: str, index: int) -> Instance:
    world, now, fault = request.world, request.now, request.fault
    spot = order.market == "spot" and not world.ignores_spot
    pending_s = drawn(world.pending_s, world.rng)
    invisible_s = drawn(world.visible_after_s, world.rng) if fault.visible_after_s is None else fault.visible_after_s
    held = order.reservation
    public = order.subnet.public and len(order.interfaces) < 2
    block = held if held is not None and held.kind == "capacity-block" else None
    return Instance(
        reservation="" if held is None else held.reservation_id,
        is_prepaid=block is not None,
        block_ends_at=None if block is None or block.ends_at is None else block.ends_at - BLOCK_ENDS_S,
        instance_id=world.new_id("i"),
        reservation_id=reservation_id,
        launch_index=0 if spot else index,
        machine_type=order.machine,
        image_id=order.image.image_id,
        architecture=order.image.architecture,
        zone=order.subnet.zone,
        subnet_id=order.subnet.subnet_id,
        vpc_id=order.subnet.vpc_id,
        market="spot" if spot else "on-demand",
        price_usd_per_hour=_price_usd(world, order, spot, now),
        client_token=request.params.get("ClientToken", ""),
        user_data=order.user_data,
        profile=order.profile,
        profile_arn=None if order.profile is None else profile_arn(order.profile),
        key_name=order.key_name,
        groups=tuple((one.group_id, one.name) for one in order.groups),
        shutdown_behavior=order.shutdown_behavior,
        metadata_options=order.metadata_options,
        root_device=order.image.root_device,
        launched_at=now,
        running_at=now + pending_s,
        visible_at=now + invisible_s,
        shutting_down_s=drawn(world.shutting_down_s, world.rng),
        tags=dict(order.tags.get("instance", {})),
        volume_tags=dict(order.tags.get("volume", {})),
        volume_gb=order.volume_gb,
        further_gb=order.image.volume_gb * len(order.image.lasting_disks),
        further_iops=order.further_iops,
        public_address=public,
        nat_gb=0.0 if public else world.downloads_gb,
        fabric=tuple(one.get("NetworkCardIndex", 0) for one in order.interfaces if "efa" in one["InterfaceType"]),
        keeps_interfaces=not all(one.get("DeleteOnTermination") for one in order.interfaces),
        placement_group=order.placement_group,
        max_price=order.max_price if spot else None,
        spot_request_id=world.new_id("sir") if spot else None,
    )


def _price_usd(world: World, order: Order, spot: bool, now: float) -> float:
    if spot:
        return world.spot.price_usd(order.machine, order.subnet.zone, now)
    return order.machine.price_usd_per_hour
