"""What every instance of an experiment has in common on EC2: plain values, resolved before anything is rented."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Session(Protocol):
    """AWS in one region, as one principal: boto3's clients, or the fake's, which take and return the same.

    A client raises botocore.exceptions.ClientError, or another BotoCoreError (no connection, time-out, no credentials).
    """

    @property
    def region(self) -> str:
        """Such as `us-east-1`."""
        ...

    def client(self, service: str) -> Any:
        """The client of a service (`ec2`, `ssm`, `sts`, `pricing`, `service-quotas`, `scheduler`, `s3`), always the
        same one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStart:
    """What differs from one request to the next, as the UserData of its instances must know it."""

    instances: tuple[str, ...]
    """The names of all that one request asks for, in the order of EC2's launch index; each is its label in Ray."""
    head_address: str
    """host:port of the Ray head."""
    gpus: int
    """Slots."""
    lease_s: float
    """It powers itself off so long after booting, unless the lease is renewed."""
    boot_s: float = 0.0
    """While it installs and has not joined, it renews the lease itself; so long after booting at most."""
    lifetime_s: float
    """It powers itself off so long after booting, whatever happens (the hard stop)."""
    image_marker: str = ""
    """Of a builder, which joins no head: where it says that all is installed (s3:// address)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """How the instances of an experiment are launched."""

    image: str
    """AMI id."""
    subnets: Mapping[str, str]
    """Zone -> subnet, in the order in which they are tried."""
    security_group: str
    instance_profile: str
    """Name of the instance profile."""
    key_name: str | None
    owner: str
    volume_gb: int | None
    root_device: str
    """Device name of the image's root volume."""
    lasting_disks: tuple[str, ...] = ()
    """Device names of the image's volumes that outlive an instance (and are paid for) unless told not to."""
    user_data: Callable[[NodeStart], str]
    """The script that an instance runs when it boots. The same arguments give the same text, always."""
