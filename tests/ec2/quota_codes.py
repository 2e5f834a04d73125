"""EC2's quotas of running instances: a number of vCPUs for each family of types and market."""

from __future__ import annotations

from collections.abc import Mapping

from tests.ec2.instance import Market

DEFAULT_VCPUS = 768.0
QUOTAS: Mapping[str, str] = {
    "L-1216C47A": "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances",
    "L-34B43A08": "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests",
    "L-DB2E81BA": "Running On-Demand G and VT instances",
    "L-3819A6DF": "All G and VT Spot Instance Requests",
    "L-417A185B": "Running On-Demand P instances",
    "L-7212CCBC": "All P4, P3 and P2 Spot Instance Requests",
    "L-C4BD4855": "All P5 Spot Instance Requests",
    "L-2C3B7624": "Running On-Demand Trn instances",
    "L-6B0D517C": "All Trn Spot Instance Requests",
    "L-1945791B": "Running On-Demand Inf instances",
    "L-B5D1601B": "All Inf Spot Instance Requests",
    "L-6E869C2A": "Running On-Demand DL instances",
    "L-85EED4F7": "All DL Spot Instance Requests",
}


def quota_code(family: str, market: Market) -> str:
    """The code of the quota that a family of types (`p3dn`) counts against."""
    spot = market == "spot"
    for prefixes, on_demand_code, spot_code in (
        (("p5",), "L-417A185B", "L-C4BD4855"),
        (("p",), "L-417A185B", "L-7212CCBC"),
        (("trn",), "L-2C3B7624", "L-6B0D517C"),
        (("inf",), "L-1945791B", "L-B5D1601B"),
        (("dl",), "L-6E869C2A", "L-85EED4F7"),
        (("g", "vt"), "L-DB2E81BA", "L-3819A6DF"),
    ):
        if family.startswith(prefixes):
            return spot_code if spot else on_demand_code
    return "L-34B43A08" if spot else "L-1216C47A"
