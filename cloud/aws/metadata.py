"""Where the driver's own machine is: in EC2, as its instance metadata service tells, or as it is told to be.

Nothing is asked of the API.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rubberband.cloud import node
from rubberband.cloud.local.ray_node import free_port
from rubberband.errors import InputError
from rubberband.units import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnInstance:
    """An instance of EC2 that this process runs on."""

    instance_id: str
    address: str
    """Its private IPv4 address."""
    region: str
    zone: str
    vpc: str
    subnet: str
    security_groups: tuple[str, ...] = ()


def own_place(read: Callable[[str], str | None] | None = None) -> OwnInstance | None:
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
    return OwnInstance(
        instance_id=ask("instance-id") or "",
        address=address,
        region=ask("placement/region") or zone[:-1],
        zone=zone,
        vpc=vpc,
        subnet=ask(f"{interface}/subnet-id") or "",
        security_groups=tuple((ask(f"{interface}/security-group-ids") or "").split()),
    )


def own_address(address: str) -> str:
    """`resources.aws.driver_address`. Raises InputError unless this machine has it, as the Ray head listens there."""
    try:
        free_port(address)
    except (OSError, UnicodeError) as error:
        raise InputError(
            f"resources.aws.driver_address: {shown(address)} is no address of this machine ({error}); give one that "
            "`ip address` lists, or run on a head (`rubberband up FILE`)"
        ) from None
    return address
