"""Number of instances that an account may hold: EC2's quotas, in vCPUs by family and market, less current use.

A quota is a limit and promises no capacity. `rubberband estimate --live` and the checks before a run read it here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rubberband.cloud.aws.calls import AwsSession
from rubberband.cloud.aws.client import described_types, instances
from rubberband.cloud.aws.errors import FAILURES, explain, ignoring
from rubberband.errors import ProviderError
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
            f"and '{quota.name}' ({quota.code}) allows {quota.vcpus:g}, {_used(quota)}; {ask_for_more(quota, asked)}"
        )


_MARKET: Mapping[Market, str] = {"on_demand": "on demand", "spot": "on spot"}


def _used(quota: Quota) -> str:
    return "use not known" if quota.used_vcpus is None else f"{quota.used_vcpus:g} in use"


def ask_for_more(quota: Quota, vcpus: int) -> str:
    """Return the remedy: the command that requests a quota of `vcpus`."""
    return (
        "end running instances, or request more: aws service-quotas request-service-quota-increase --service-code "
        f"ec2 --quota-code {quota.code} --desired-value {vcpus} --region {quota.region}"
    )


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
    vcpus = vcpus_of(session, sorted({*types, *(name for name, _ in living or ())}))
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


def vcpus_of(session: AwsSession, types: Sequence[str]) -> dict[str, int]:
    """Return type -> vCPUs, without types that EC2 does not know."""
    return {one["InstanceType"]: int(one["VCpuInfo"]["DefaultVCpus"]) for one in described_types(session, types)}


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
