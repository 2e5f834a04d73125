"""What a provider shows of an instance, as the events that the controller hears. Pure."""

from __future__ import annotations

from rubberband.cloud.provider import InstanceStatus
from rubberband.executor.events import InstanceReleased, InstanceRunning


def running(status: InstanceStatus, running_at: float, at: float) -> InstanceRunning:
    """That the instance runs since `running_at`, as of `at`."""
    return InstanceRunning(
        occurred_at=at,
        instance=status.instance,
        running_at=running_at,
        price_usd_per_hour=status.price_usd_per_hour,
        instance_type=status.instance_type,
        zone=status.zone,
    )


def released(instance: str, status: InstanceStatus | None, at: float) -> InstanceReleased:
    """That the provider took the instance back, as of `at`; it knows of none where there is no status."""
    if status is None:
        return InstanceReleased(occurred_at=at, instance=instance, ended_at=at)
    return InstanceReleased(
        occurred_at=at,
        instance=instance,
        ended_at=at if status.ended_at is None else status.ended_at,
        running_at=status.running_at,
        price_usd_per_hour=status.price_usd_per_hour,
        instance_type=status.instance_type,
        zone=status.zone,
    )
