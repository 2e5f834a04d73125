"""What a provider shows of an instance, as the events that the controller hears. Pure."""

from __future__ import annotations

from rubberband.cloud.provider import InstanceStatus
from rubberband.executor.core.events import EndedInstance, InstanceReleased, InstanceRunning, LiveInstance


def running(status: InstanceStatus, running_at: float, at: float) -> InstanceRunning:
    """That the instance runs since `running_at`, as of `at`."""
    return InstanceRunning(
        occurred_at=at,
        instance=status.instance,
        running_at=running_at,
        price_usd_per_hour=status.price_usd_per_hour,
        instance_type=status.instance_type,
        zone=status.zone,
        hour_prices_usd=status.hour_prices_usd,
    )


def living(status: InstanceStatus) -> LiveInstance:
    """What a new driver finds that lives."""
    return LiveInstance(
        instance=status.instance,
        running_at=status.running_at,
        price_usd_per_hour=status.price_usd_per_hour,
        hour_prices_usd=status.hour_prices_usd,
    )


def ended(status: InstanceStatus) -> EndedInstance:
    """What a new driver finds that ran, and has ended."""
    assert status.running_at is not None, "what never ran has not ended"
    assert status.ended_at is not None, "what lives has not ended"
    return EndedInstance(
        instance=status.instance,
        running_at=status.running_at,
        ended_at=status.ended_at,
        price_usd_per_hour=status.price_usd_per_hour,
        preempted=status.preempted,
        hour_prices_usd=status.hour_prices_usd,
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
