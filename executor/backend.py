"""What carries commands out, on Ray with real instances or by a virtual clock: the protocol, and the events of both."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from rubberband.cloud.provider import InstanceDescription
from rubberband.executor.core.events import (
    Command,
    DriverResumed,
    EndedInstance,
    Event,
    InstanceReleased,
    InstanceRunning,
    LiveInstance,
)


class Backend(Protocol):
    """Carries out commands and brings back events. One conformance suite (tests) holds for every implementation."""

    def now(self) -> float:
        """The backend's clock, in seconds."""
        ...

    def execute(self, command: Command) -> None:
        """Begin to carry out `command`; never blocks on it. What comes of it arrives as events."""
        ...

    def hold_until(self, instant: float) -> None:
        """Hold nothing past `instant`, whatever becomes of the driver: that is how far the budget reaches.

        Leases never reach beyond it. Called whenever it may have changed; infinite without a cap.
        """
        ...

    def next_events(self, wake_at: float | None) -> Sequence[Event]:
        """Wait for events and return them in order; return empty once the clock reaches `wake_at`.

        `occurred_at` never decreases from one event to the next. May also return empty early (to let the caller look
        for a signal).
        """
        ...

    def reconcile(self, known: Collection[str]) -> DriverResumed:
        """Compare the instances that the journal knows (`known`) with what the provider shows, after a driver's death.

        Live instances that are not known are released. Live known ones are adopted: those that run are brought to
        readiness again as after a launch (InstanceReady follows).
        """
        ...

    def close(self) -> None:
        """Release everything that is still held, and leave no process behind. Idempotent."""
        ...


# What a provider shows of an instance, as the events that the controller hears. Pure.


def running(status: InstanceDescription, running_at: float, at: float) -> InstanceRunning:
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


def living(status: InstanceDescription) -> LiveInstance:
    """What a new driver finds that lives."""
    return LiveInstance(
        instance=status.instance,
        running_at=status.running_at,
        price_usd_per_hour=status.price_usd_per_hour,
        hour_prices_usd=status.hour_prices_usd,
    )


def ended(status: InstanceDescription) -> EndedInstance:
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


def released(instance: str, status: InstanceDescription | None, at: float) -> InstanceReleased:
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
