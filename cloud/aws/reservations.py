"""Capacity that the user has reserved (`resources.aws.reservation`), and capacity blocks that are on offer.

Nothing is reserved or bought here. An on-demand capacity reservation is billed as on demand, used or not. A capacity
block is paid for in advance: its instances cost no rent, and EC2 ends them shortly before its end (EC2 User Guide,
"Capacity Blocks for ML").
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from rubberband.cloud.aws.calls import AwsSession, Reservation
from rubberband.cloud.aws.client import pages
from rubberband.cloud.aws.errors import FAILURES, code_of, explain, ignoring
from rubberband.cloud.catalogue import types_of
from rubberband.cloud.prices import LiveTable
from rubberband.errors import InputError
from rubberband.spec.resources import Resources
from rubberband.units import counted, format_duration, format_usd

BLOCK_ENDS_S = 1800.0
"""EC2 begins to end a block's instances this long before the block ends."""
_BLOCK_FAMILIES = ("p4", "p5", "p6", "trn")
"""Families that are sold in capacity blocks."""
_SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of instances of a block."""
_DAY_S = 86_400.0
_KEY = "resources.aws.reservation"


def reservation_of(session: AwsSession, reservation_id: str | None, instance_type: str) -> Reservation | None:
    """Return the reservation that the user names; None without one.

    Raises InputError if it does not exist, is of another type, or is not for Linux on shared hardware; botocore's
    errors.
    """
    if reservation_id is None:
        return None
    found = []
    with ignoring("InvalidCapacityReservationId"):
        answer = session.client("ec2").describe_capacity_reservations(CapacityReservationIds=[reservation_id])
        found = answer["CapacityReservations"]
    if not found:
        raise InputError(
            f"{_KEY}: this account has no {reservation_id} in {session.region}; correct it, or leave it out"
        )
    shown = found[0]
    if shown["InstanceType"] != instance_type:
        raise InputError(
            f"{_KEY}: {reservation_id} is of {shown['InstanceType']}, and {instance_type} is asked for; set "
            f"resources.instance_type: {shown['InstanceType']}"
        )
    kind = shown.get("InstancePlatform", "Linux/UNIX"), shown.get("Tenancy", "default")
    if kind != ("Linux/UNIX", "default"):
        raise InputError(
            f"{_KEY}: {reservation_id} is for {kind[0]} ({kind[1]} tenancy); name one for Linux/UNIX on shared hardware"
        )
    end = shown.get("EndDate")
    return Reservation(
        reservation_id=reservation_id,
        zone=shown["AvailabilityZone"],
        instances=int(shown["TotalInstanceCount"]),
        is_block=shown.get("ReservationType") == "capacity-block",
        state=shown.get("State", "active"),
        begins_at=shown["StartDate"].timestamp() if "StartDate" in shown else 0.0,
        ends_at=None if end is None else end.timestamp(),
    )


def last_use_at(held: Reservation) -> float:
    """Return when it is of no more use (Unix time), infinite if never: EC2 ends the instances of a block then, and
    launches no more in another one."""
    if held.ends_at is None:
        return math.inf
    return held.ends_at - (BLOCK_ENDS_S if held.is_block else 0.0)


def check_size(held: Reservation, resources: Resources) -> None:
    """Raise InputError if the experiment may ask for more instances than are reserved."""
    if resources.max_instances > held.instances:
        raise InputError(
            f"resources.max_instances: {resources.max_instances} are more than the "
            f"{counted(held.instances, 'instance')} of {held.reservation_id}; lower it to {held.instances}"
        )


def check_time(held: Reservation, now: float, until: float | None = None) -> Iterator[str]:
    """Yield notes on its rent and its end. `until`: when the experiment must be done, if that is known; infinite
    without a deadline.

    Raises InputError if it cannot be used now, or not `until` then.
    """
    name, ends_at = held.reservation_id, last_use_at(held)
    if held.state == "scheduled":
        raise InputError(f"{_KEY}: {name} begins at {_instant(held.begins_at)}; start then")
    if held.state != "active" or ends_at <= now:
        over = f"ends its instances since {_instant(ends_at)}" if held.state == "active" else f"is {held.state}"
        raise InputError(f"{_KEY}: {name} {over}; name one that is active, or leave it out")
    if held.is_block:
        yield f"the rent in {name} counts as 0: a capacity block is paid for in advance"
    if math.isinf(ends_at):
        return
    what = f"EC2 ends the instances of {name}" if held.is_block else f"EC2 launches no more instances in {name}"
    left = f"{what} {'at' if held.is_block else 'from'} {_instant(ends_at)}, in {format_duration(ends_at - now)}"
    if until is not None and until > ends_at:
        missing = "and constraints.deadline is missing; set one before that"
        late = missing if math.isinf(until) else "before constraints.deadline; set an earlier deadline"
        raise InputError(f"{_KEY}: {left}, {late}")
    yield left


def with_reservation(table: LiveTable, held: Reservation, resources: Resources) -> LiveTable:
    """Return the table with the rent of what the user has reserved: none for a capacity block, which is paid for."""
    rows, name = dict(table), types_of(resources)[0]
    if not held.is_block or name not in rows:
        return table
    rows[name] = replace(rows[name], prices_usd_per_hour={**rows[name].prices_usd_per_hour, resources.region: 0.0})
    return LiveTable(rows, table.notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOffer:
    """A capacity block that is on offer."""

    offering_id: str
    instance_type: str
    instances: int
    duration_s: float
    begins_at: float
    zone: str
    usd: float

    def note(self, on_demand_usd: float) -> str:
        """Return a line that compares it with the same plan's instances on demand."""
        days = counted(round(self.duration_s / _DAY_S), "day")
        return (
            f"on demand the instances cost {format_usd(on_demand_usd)}; a capacity block of {days} with "
            f"{self.instances} x {self.instance_type} costs {format_usd(self.usd)}, from "
            f"{_instant(self.begins_at)} in {self.zone}. It is paid at once and cannot be given back: `aws ec2 "
            f"purchase-capacity-block --capacity-block-offering-id {self.offering_id} --instance-platform Linux/UNIX`, "
            f"then {_KEY}: cr-…"
        )


def cheapest_block(session: AwsSession, instance_type: str, instances: int, lasts_s: float) -> BlockOffer | None:
    """Return the cheapest block on offer with `instances` or more for `lasts_s` seconds or more; None without one.

    Blocks last whole days up to 14, then whole weeks up to 26. Raises botocore's errors.
    """
    days = math.ceil((lasts_s + BLOCK_ENDS_S) / _DAY_S)
    days = days if days <= 14 else 7 * math.ceil(days / 7)
    count = next((size for size in _SIZES if size >= instances), None)
    if not instance_type.startswith(_BLOCK_FAMILIES) or count is None or days > 182:
        return None
    try:
        found = list(
            pages(
                session.client("ec2").describe_capacity_block_offerings,
                "CapacityBlockOfferings",
                InstanceType=instance_type,
                InstanceCount=count,
                CapacityDurationHours=24 * days,
            )
        )
    except Exception as error:
        if code_of(error) in ("InvalidParameterValue", "Unsupported"):  # this region sells none of this type
            return None
        raise
    in_usd = [_offer(one) for one in found if one.get("CurrencyCode", "USD") == "USD"]
    return min(in_usd, key=lambda block: (block.usd, block.begins_at), default=None)


def block_note(
    session: AwsSession, instance_type: str, instances: int, lasts_s: float, on_demand_usd: float
) -> str | None:
    """Return the line that compares a plan on demand with the cheapest capacity block; None if none is on offer."""
    try:
        block = cheapest_block(session, instance_type, instances, lasts_s)
    except FAILURES as error:
        return f"capacity blocks are not compared: {explain(error)}"
    return None if block is None else block.note(on_demand_usd)


def _offer(shown: Any) -> BlockOffer:
    return BlockOffer(
        offering_id=shown["CapacityBlockOfferingId"],
        instance_type=shown["InstanceType"],
        instances=int(shown["InstanceCount"]),
        duration_s=3600.0 * int(shown["CapacityBlockDurationHours"]),
        begins_at=shown["StartDate"].timestamp(),
        zone=shown["AvailabilityZone"],
        usd=float(shown["UpfrontFee"]),
    )


def _instant(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC"
