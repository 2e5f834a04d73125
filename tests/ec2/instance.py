"""One rented instance of the fake: what was bought, and its states as a function of the time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

from tests.ec2.machine_types import MachineType

State = Literal["pending", "running", "shutting-down", "terminated", "stopping", "stopped"]
Market = Literal["on-demand", "spot"]
Behavior = Literal["stop", "terminate"]

STATE_CODES: Mapping[State, int] = {
    "pending": 0,
    "running": 16,
    "shutting-down": 32,
    "terminated": 48,
    "stopping": 64,
    "stopped": 80,
}
REMEMBERED_S = 3600.0
"""A terminated instance can be seen for so long."""
USER_INITIATED = "Client.UserInitiatedShutdown"
INSTANCE_INITIATED = "Client.InstanceInitiatedShutdown"
SPOT_TERMINATION = "Server.SpotInstanceTermination"
REASONS: Mapping[str, str] = {
    USER_INITIATED: "User initiated shutdown",
    INSTANCE_INITIATED: "Instance initiated shutdown",
    SPOT_TERMINATION: "Spot instance termination",
    "Server.InternalError": "Internal error on launch",
    "Server.InsufficientInstanceCapacity": "Insufficient capacity to launch the instance",
}


def as_datetime(at: float) -> datetime:
    """An instant as boto3 shows it: aware, to the second."""
    return datetime.fromtimestamp(int(at), UTC)


@dataclass(slots=True, kw_only=True)
class Instance:
    """Mutable: the world changes it, a caller only reads. Instants are seconds on the fake's clock."""

    instance_id: str
    reservation_id: str
    launch_index: int
    machine_type: MachineType
    image_id: str
    architecture: str
    zone: str
    subnet_id: str
    vpc_id: str
    market: Market
    price_usd_per_hour: float
    """At purchase."""
    client_token: str
    user_data: str
    """Decoded."""
    profile: str | None
    """Name of the instance profile."""
    profile_arn: str | None
    key_name: str | None
    groups: tuple[tuple[str, str], ...]
    """Ids and names of its security groups."""
    shutdown_behavior: Behavior
    metadata_options: Mapping[str, Any]
    root_device: str
    launched_at: float
    running_at: float
    visible_at: float
    shutting_down_s: float
    tags: dict[str, str]
    volume_tags: dict[str, str]
    volume_gb: int = 8
    """Of its root volume."""
    further_gb: int = 0
    """Of its other volumes."""
    further_iops: int = 0
    """Of its volumes, above those in the price of gp3."""
    """What its image costs, beside the rent."""
    public_address: bool = False
    """An instance of several interfaces gets none, whatever its subnet says."""
    fabric: tuple[int, ...] = ()
    """Network cards with an Elastic Fabric Adapter."""
    keeps_interfaces: bool = False
    """Whether a network interface is left when it has ended."""
    nat_gb: float = 0.0
    """What it gets through a NAT gateway."""
    placement_group: str | None = None
    reservation: str = ""
    """Capacity reservation that was asked for."""
    is_prepaid: bool = False
    """Whether it is of a capacity block: it costs no rent."""
    block_ends_at: float | None = None
    """When EC2 ends it, as its block ends."""
    max_price: str | None = None
    spot_request_id: str | None = None
    lease_until: float | None = None
    """It powers itself off then; None: what it runs does not do so."""
    hard_stop_at: float | None = None
    """It powers itself off then, whatever its lease."""
    notice_at: float | None = None
    """When the notice of its interruption could first be read on it."""
    outbid_until: float | None = None
    """Up to then the spot price was never above its maximum."""
    reclaim_at: float | None = None
    """When it is taken away."""
    guard_at: float | None = None
    """When a schedule of the account ends it."""
    protected: bool = False
    """Against termination by a call, as its user wanted in the console."""
    booted: bool = False
    ended_at: float | None = None
    """When it began to shut down; it is not billed from then on."""
    restarted_at: float | None = None
    """Of an earlier time of the same instance: when the next one began."""
    end_behavior: Behavior = "terminate"
    state_reason: str = ""

    def state(self, now: float) -> State:
        """What it is in at `now`, which is not before the latest change."""
        if self.ended_at is None:
            return "running" if now >= self.running_at else "pending"
        over = now >= self.ended_at + self.shutting_down_s
        if self.end_behavior == "stop":
            return "stopped" if over else "stopping"
        return "terminated" if over else "shutting-down"

    def lives(self) -> bool:
        return self.ended_at is None

    def is_visible(self, now: float) -> bool:
        if now < self.visible_at:
            return False
        gone = self.ended_at is not None and self.end_behavior == "terminate"
        return not gone or now < (self.ended_at or 0.0) + self.shutting_down_s + REMEMBERED_S

    def end(self, at: float, reason: str, behavior: Behavior = "terminate") -> None:
        """It shuts down at `at`, for good unless `behavior` is stop. Nothing happens if it has ended already."""
        if self.ended_at is None:
            self.ended_at, self.state_reason, self.end_behavior = at, reason, behavior
        elif self.end_behavior == "stop" and behavior == "terminate":
            self.state_reason, self.end_behavior = reason, behavior

    def restart(self, now: float, pending_s: float) -> Instance:
        """It begins to run again, after it was stopped. Return what it was until now."""
        before = replace(self, restarted_at=now)
        self.launched_at, self.running_at = now, now + pending_s
        self.ended_at, self.end_behavior, self.state_reason, self.booted = None, "terminate", "", False
        return before

    def due(self, now: float) -> tuple[float, str] | None:
        """The end that it comes to by `now` of itself: when, and the reason."""
        ends = [
            (at, reason)
            for at, reason in (
                (self.reclaim_at, SPOT_TERMINATION),
                (self.lease_until, INSTANCE_INITIATED),
                (self.hard_stop_at, INSTANCE_INITIATED),
                (self.guard_at, USER_INITIATED),
                (self.block_ends_at, "Server.ScheduledStop"),
            )
            if at is not None and at <= now and (reason != INSTANCE_INITIATED or now >= self.running_at)
        ]
        return min(ends, default=None)

    def as_of(self, when: float) -> Instance:
        """As it was at an earlier instant, at which it had been launched."""
        if self.ended_at is None or self.ended_at <= when:
            return self
        return replace(self, ended_at=None, state_reason="", end_behavior="terminate")

    def state_as_dict(self, now: float) -> dict[str, Any]:
        state = self.state(now)
        return {"Code": STATE_CODES[state], "Name": state}

    def as_dict(self, now: float) -> dict[str, Any]:
        """One of DescribeInstances' Instances."""
        described: dict[str, Any] = {
            "InstanceId": self.instance_id,
            "AmiLaunchIndex": self.launch_index,
            "ImageId": self.image_id,
            "InstanceType": self.machine_type.name,
            "Architecture": self.architecture,
            "State": self.state_as_dict(now),
            "StateTransitionReason": self._transition(),
            "LaunchTime": as_datetime(self.launched_at),
            "Placement": {"AvailabilityZone": self.zone, "GroupName": self.placement_group or "", "Tenancy": "default"},
            "MetadataOptions": {"State": "applied", **self.metadata_options},
            "ClientToken": self.client_token,
            "RootDeviceName": self.root_device,
            "ProductCodes": [],
            "SecurityGroups": [{"GroupId": group, "GroupName": name} for group, name in self.groups],
            "Tags": [{"Key": key, "Value": value} for key, value in self.tags.items()],
        }
        self._add_what_only_some_have(described, now)
        return described

    def _add_what_only_some_have(self, described: dict[str, Any], now: float) -> None:
        if self.key_name is not None:
            described["KeyName"] = self.key_name
        if self.profile_arn is not None:
            described["IamInstanceProfile"] = {"Arn": self.profile_arn, "Id": "AIPAFAKE" + self.reservation_id[-12:]}
        if self.market == "spot":
            described["InstanceLifecycle"] = "spot"
            described["SpotInstanceRequestId"] = self.spot_request_id
        if self.is_prepaid:
            described["InstanceLifecycle"] = "capacity-block"
        if self.reservation:
            described["CapacityReservationId"] = self.reservation
        if self.state_reason:
            message = f"{self.state_reason}: {REASONS.get(self.state_reason, 'ended')}"
            described["StateReason"] = {"Code": self.state_reason, "Message": message}
        if self.state(now) != "terminated":
            described |= {"SubnetId": self.subnet_id, "VpcId": self.vpc_id}

    def _transition(self) -> str:
        if self.ended_at is None:
            return ""
        if self.state_reason == USER_INITIATED:
            return f"User initiated ({as_datetime(self.ended_at):%Y-%m-%d %H:%M:%S} GMT)"
        return "Server.SpotInstanceTermination" if self.state_reason == SPOT_TERMINATION else "User initiated shutdown"
