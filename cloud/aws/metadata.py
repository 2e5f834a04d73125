"""Where the driver's own machine is in EC2, as its instance metadata service tells; nothing is asked of the API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rubberband.cloud import node


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An instance of EC2 that this process runs on."""

    instance_id: str
    address: str
    """Its private IPv4 address."""
    region: str
    zone: str
    vpc: str
    subnet: str
    security_groups: tuple[str, ...] = ()


def own_place(read: Callable[[str], str | None] | None = None) -> Place | None:
    """Where this machine is; None outside EC2, or where the metadata service does not answer.

    `read` gives the text at a path below `/latest/meta-data/`, or None.
    """
    ask = read or node.metadata
    zone = ask("placement/availability-zone")
    mac = ask("mac") if zone else None
    if not zone or not mac:
        return None
    interface = f"network/interfaces/macs/{mac.strip('/')}"
    vpc, address = ask(f"{interface}/vpc-id"), ask("local-ipv4")
    if not vpc or not address:
        return None
    return Place(
        instance_id=ask("instance-id") or "",
        address=address,
        region=ask("placement/region") or zone[:-1],
        zone=zone,
        vpc=vpc,
        subnet=ask(f"{interface}/subnet-id") or "",
        security_groups=tuple((ask(f"{interface}/security-group-ids") or "").split()),
    )
