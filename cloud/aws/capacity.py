"""Capacity that an account may hold: EC2's quotas less current use, and capacity that the user has reserved.

Quotas are in vCPUs by family and market; a quota is a limit and promises no capacity. Nothing is reserved or bought
here. An on-demand capacity reservation is billed as on demand, used or not. A capacity block is paid for in advance:
its instances cost no rent, and EC2 ends them shortly before its end (EC2 User Guide, "Capacity Blocks for ML").
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from rubberband.cloud.aws.calls import AwsSession, Reservation
from rubberband.cloud.aws.client import described_types, instances, pages
from rubberband.cloud.aws.errors import FAILURES, code_of, explain, ignoring, in_one_line
from rubberband.cloud.catalogue import LiveTable, types_of
from rubberband.errors import InputError, ProviderError
from rubberband.spec.resources import Resources
from rubberband.units import counted, format_duration, format_usd
from rubberband.values.plan import Market

_STANDARD = "Standard (A, C, D, H, I, M, R, T, Z)"
_CODES: Mapping[str, Mapping[Market, tuple[str, str]]] = {
    "standard": {
        "on_demand": ("L-1216C47A", f"Running On-Demand {_STANDARD} instances"),
        "spot": ("L-34B43A08", f"All {_STANDARD} Spot Instance Requests"),
    },
    "g": {
        "on_demand": ("L-DB2E81BA", "Running On-Demand G and VT instances"),
        "spot": ("L-3819A6DF", "All G and VT Spot Instance Requests"),
    },
    "p": {
        "on_demand": ("L-417A185B", "Running On-Demand P instances"),
        "spot": ("L-7212CCBC", "All P4, P3 and P2 Spot Instance Requests"),
    },
    "p5": {
        "on_demand": ("L-417A185B", "Running On-Demand P instances"),
        "spot": ("L-C4BD4855", "All P5 Spot Instance Requests"),
    },
    "p6": {"on_demand": ("L-417A185B", "Running On-Demand P instances")},
    "trn": {
        "on_demand": ("L-2C3B7624", "Running On-Demand Trn instances"),
        "spot": ("L-6B0D517C", "All Trn Spot Instance Requests"),
    },
    "inf": {
        "on_demand": ("L-1945791B", "Running On-Demand Inf instances"),
        "spot": ("L-B5D1601B", "All Inf Spot Instance Requests"),
    },
    "dl": {
        "on_demand": ("L-6E869C2A", "Running On-Demand DL instances"),
        "spot": ("L-85EED4F7", "All DL Spot Instance Requests"),
    },
    "f": {
        "on_demand": ("L-74FC7D96", "Running On-Demand F instances"),
        "spot": ("L-88CF9481", "All F Spot Instance Requests"),
    },
    "x": {
        "on_demand": ("L-7295265B", "Running On-Demand X instances"),
        "spot": ("L-E3A00192", "All X Spot Instance Requests"),
    },
}
"""Family -> market -> code and name of its quota in Service Quotas, under `ec2`. That of p6 on spot is missing."""
_FAMILIES = {"g": "g", "gr": "g", "vt": "g", "p": "p", **dict.fromkeys("acdhimrtz", "standard")}
_FAMILIES |= {"im": "standard", "is": "standard", **{family: family for family in ("trn", "inf", "dl", "f", "x")}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Limit of an account for some families of types on one market of a region, in vCPUs."""

    code: str
    name: str
    region: str
    market: Market
    vcpus: float
    used_vcpus: float | None
    """Held now, by any user of the account; None where the role may not see it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Number of instances of one type that an account may hold on one market."""

    instance_type: str
    vcpus: int
    """vCPUs of one instance."""
    quota: Quota

    @property
    def market(self) -> Market:
        """Market on which they are bought."""
        return self.quota.market

    @property
    def instances(self) -> int:
        """Number of instances that may be rented in addition now."""
        return int(max(0.0, self.quota.vcpus - (self.quota.used_vcpus or 0.0)) // self.vcpus)

    def note(self) -> str:
        """Return a note for users, without a full stop: the number, and its quota."""
        return (
            f"quota: {self.instances} more {self.instance_type} {_MARKET[self.market]} in {self.quota.region} "
            f"({self.quota.vcpus:g} vCPUs of '{self.quota.name}', {self.quota.code}, {_used(self.quota)})"
        )

    def refusal(self, instances: int) -> str:
        """Return one line: why not even one may be rented, and how to request `instances` of them."""
        quota = self.quota
        asked = int((quota.used_vcpus or 0) + instances * self.vcpus)
        return (
            f"no quota for {self.instance_type} {_MARKET[self.market]} in {quota.region}: it has {self.vcpus} vCPUs, "
            f"and '{quota.name}' ({quota.code}) allows {quota.vcpus:g}, {_used(quota)}; end running instances, or "
            "request more: aws service-quotas request-service-quota-increase --service-code ec2 --quota-code "
            f"{quota.code} --desired-value {asked} --region {quota.region}"
        )


_MARKET: Mapping[Market, str] = {"on_demand": "on demand", "spot": "on spot"}


def _used(quota: Quota) -> str:
    return "use not known" if quota.used_vcpus is None else f"{quota.used_vcpus:g} in use"


def quota_code(instance_type: str, market: Market) -> tuple[str, str] | None:
    """Code and name of the quota that a type counts against on a market; None for families that are not known."""
    found = re.match(r"([a-z]+)(\d*)", instance_type)
    if found is None:
        return None
    letters, generation = found.groups()
    family = _FAMILIES.get(letters)
    if family == "p" and generation.isdigit() and int(generation) >= 5:
        family = "p5" if generation == "5" else "p6"
    return _CODES.get(family or "", {}).get(market)


def quotas(session: AwsSession, types: Sequence[str], markets: Sequence[Market]) -> tuple[Room, ...]:
    """Return the room for each type on each market, but none for an unknown type or a family without a known quota.

    Raises ProviderError if the quotas cannot be read; current use is unknown if the role may not see it.
    """
    try:
        return _rooms(session, types, markets)
    except FAILURES as error:
        raise ProviderError(explain(error)) from error


def _rooms(session: AwsSession, types: Sequence[str], markets: Sequence[Market]) -> tuple[Room, ...]:
    wanted = {(name, market): quota_code(name, market) for name in dict.fromkeys(types) for market in markets}
    codes = {code: market for (_, market), code in wanted.items() if code is not None}
    if not codes:
        return ()
    living = _living(session)
    described = described_types(session, sorted({*types, *(name for name, _ in living or ())}))
    vcpus = {one["InstanceType"]: int(one["VCpuInfo"]["DefaultVCpus"]) for one in described}
    found = {}
    for (code, name), market in codes.items():
        used = None if living is None else _used_vcpus(living, vcpus, code, market)
        allowed = allowed_vcpus(session, code)
        found[code] = Quota(code=code, name=name, region=session.region, market=market, vcpus=allowed, used_vcpus=used)
    return tuple(
        Room(instance_type=name, vcpus=vcpus[name], quota=found[code[0]])
        for (name, _), code in wanted.items()
        if code is not None and name in vcpus
    )


def allowed_vcpus(session: AwsSession, code: str) -> float:
    """Return the limit of a quota, in vCPUs. Raises botocore's errors."""
    client = session.client("service-quotas")
    with ignoring("NoSuchResourceException"):
        return float(client.get_service_quota(ServiceCode="ec2", QuotaCode=code)["Quota"]["Value"])
    # A quota that was never changed may have no applied value of its own.
    return float(client.get_aws_default_service_quota(ServiceCode="ec2", QuotaCode=code)["Quota"]["Value"])


def _living(session: AwsSession) -> list[tuple[str, Market]] | None:
    """Return type and market of all that runs; None where the role may not see it."""
    try:
        found = instances(session, [], "pending", "running")
    except FAILURES:
        return None
    return [(one["InstanceType"], "spot" if one.get("InstanceLifecycle") == "spot" else "on_demand") for one in found]


def _used_vcpus(living: Sequence[tuple[str, Market]], vcpus: Mapping[str, int], code: str, market: Market) -> float:
    return float(
        sum(
            vcpus.get(name, 0)
            for name, on in living
            if on == market and (quota_code(name, market) or ("", ""))[0] == code
        )
    )


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

    Raises InputError if it does not exist, or is of another type.
    """
    if reservation_id is None:
        return None
    with in_one_line():
        answer = session.client("ec2").describe_capacity_reservations(CapacityReservationIds=[reservation_id])
    (shown,) = answer["CapacityReservations"]
    if shown["InstanceType"] != instance_type:
        raise InputError(
            f"{_KEY}: {reservation_id} is of {shown['InstanceType']}, and {instance_type} is asked for; set "
            f"resources.instance_type: {shown['InstanceType']}"
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
