"""The price list (pricing): products of AmazonEC2 as JSON texts, among them those that a reader must tell apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from tests.ec2.faults import FakeError
from tests.ec2.filters import page
from tests.ec2.machine_types import MachineType
from tests.ec2.request import Request, operation

LOCATIONS: Mapping[str, str] = {
    "ap-northeast-1": "Asia Pacific (Tokyo)",
    "ap-south-1": "Asia Pacific (Mumbai)",
    "ap-southeast-1": "Asia Pacific (Singapore)",
    "ap-southeast-2": "Asia Pacific (Sydney)",
    "ca-central-1": "Canada (Central)",
    "eu-central-1": "EU (Frankfurt)",
    "eu-north-1": "EU (Stockholm)",
    "eu-west-1": "EU (Ireland)",
    "eu-west-2": "EU (London)",
    "eu-west-3": "EU (Paris)",
    "sa-east-1": "South America (Sao Paulo)",
    "us-east-1": "US East (N. Virginia)",
    "us-east-2": "US East (Ohio)",
    "us-west-1": "US West (N. California)",
    "us-west-2": "US West (Oregon)",
}
ELSEWHERE = 1.1
"""Price factor of machines in another region than the account's."""
VARIANTS: tuple[tuple[Mapping[str, str], float], ...] = (
    ({}, 1.0),
    ({"operatingSystem": "Windows", "licenseModel": "Windows"}, 1.5),
    ({"operatingSystem": "RHEL"}, 1.2),
    ({"preInstalledSw": "SQL Std"}, 2.0),
    ({"tenancy": "Dedicated"}, 1.05),
    ({"capacitystatus": "UnusedCapacityReservation"}, 1.0),
    ({"capacitystatus": "AllocatedCapacityReservation"}, 0.0),
)
"""What differs from Linux on shared hardware, and its share of that price."""


@operation("pricing", "GetProducts", checked=True)
def get_products(request: Request) -> dict[str, Any]:
    """GetProducts, of AmazonEC2's instances."""
    params = request.params
    if params["ServiceCode"] != "AmazonEC2":
        raise FakeError("InvalidParameterException", f"The service code {params['ServiceCode']} is not valid.")
    only = {asked["Field"]: asked["Value"] for asked in params.get("Filters", ()) if asked["Type"] == "TERM_MATCH"}
    products = [
        (attributes, price_usd)
        for attributes, price_usd in _products(request, only)
        if all(_matches(attributes, asked) for asked in params.get("Filters", ()))
    ]
    shown, following = page(products, params, at_most=100)
    texts = [_as_text(attributes, price_usd) for attributes, price_usd in shown]
    return {"FormatVersion": "aws_v1", "PriceList": texts, **following}


def _products(request: Request, only: Mapping[str, str]) -> Iterator[tuple[dict[str, str], float]]:
    """Of the region and type in `only`, where they are there: the list is long."""
    for region, location in LOCATIONS.items():
        if only.get("regionCode", region) != region:
            continue
        factor = 1.0 if region == request.world.region else ELSEWHERE
        for machine in request.world.machine_types.values():
            if only.get("instanceType", machine.name) != machine.name:
                continue
            for differs, share in VARIANTS:
                attributes = {**_attributes(machine, region, location), **differs}
                yield attributes, round(machine.price_usd_per_hour * factor * share, 10)


def _attributes(machine: MachineType, region: str, location: str) -> dict[str, str]:
    gpu = {"gpu": str(machine.gpus), "gpuMemory": f"{machine.gpus * machine.gpu_memory_mib // 1024} GB"}
    return {
        "instanceType": machine.name,
        "regionCode": region,
        "location": location,
        "operatingSystem": "Linux",
        "preInstalledSw": "NA",
        "tenancy": "Shared",
        "capacitystatus": "Used",
        "marketoption": "OnDemand",
        "operation": "RunInstances",
        "vcpu": str(machine.vcpus),
        "memory": f"{machine.memory_mib // 1024} GiB",
        **(gpu if machine.gpus else {}),
    }


def _matches(attributes: Mapping[str, str], asked: Mapping[str, str]) -> bool:
    return attributes.get(asked["Field"]) == asked["Value"]


def _as_text(attributes: Mapping[str, str], price_usd: float) -> str:
    sku = hashlib.sha256(repr(sorted(attributes.items())).encode()).hexdigest()[:16].upper()
    term, rate = f"{sku}.JRTCKXETXF", f"{sku}.JRTCKXETXF.6YS6EN2CT7"
    dimension = {
        "unit": "Hrs",
        "description": f"${price_usd} per On Demand {attributes['operatingSystem']} {attributes['instanceType']} Hour",
        "pricePerUnit": {"USD": f"{price_usd:.10f}"},
    }
    on_demand = {term: {"sku": sku, "priceDimensions": {rate: dimension}}}
    product = {"productFamily": "Compute Instance", "sku": sku, "attributes": attributes}
    published = {"serviceCode": "AmazonEC2", "version": "20260105", "publicationDate": "2026-01-05T00:00:00Z"}
    return json.dumps({"product": product, "terms": {"OnDemand": on_demand}, **published})
