"""Backends carry out commands, on Ray with real instances or on a virtual clock: the protocol, and shared events."""

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
    """Carries out commands and returns events. One conformance suite (tests) holds for every implementation."""

    def now(self) -> float:
        """The backend's clock, in seconds."""

    def execute(self, command: Command) -> None:
        """Begin to carry out `command`, without blocking; its results arrive as events."""

    def hold_until(self, instant: float) -> None:
        """Hold nothing past `instant`, even if the driver dies: the budget ends there.

        Leases never reach beyond it. Called whenever it may have changed; infinite without a cap.
        """

    def next_events(self, wake_at: float | None) -> Sequence[Event]:
        """Wait for events and return them in order; return empty once the clock reaches `wake_at`.

        `occurred_at` never decreases from one event to the next. May also return empty early (so that the caller can
        check for a signal).
        """

    def reconcile(self, known: Collection[str]) -> DriverResumed:
        """Compare the instances in the journal (`known`) with the provider's, after a driver's death.

        Live instances that are not known are released. Live known ones are adopted: those that run are made ready again
        as after a launch (InstanceReady follows).
        """

    def close(self) -> None:
        """Release everything, and leave no process behind. Idempotent."""


def running(status: InstanceDescription, running_at: float, at: float) -> InstanceRunning:
    """Return the event that the instance runs since `running_at`, as of `at`, or ran until its end."""
    return InstanceRunning(
        occurred_at=at,
        instance=status.instance,
        running_at=running_at,
        price_usd_per_hour=status.price_usd_per_hour,
        instance_type=status.instance_type,
        zone=status.zone,
        hour_prices_usd=status.hour_prices_usd,
        ended_at=status.ended_at,
    )


def living(status: InstanceDescription) -> LiveInstance:
    """Return a live instance as a new driver finds it."""
    return LiveInstance(
        instance=status.instance,
        running_at=status.running_at,
        price_usd_per_hour=status.price_usd_per_hour,
        hour_prices_usd=status.hour_prices_usd,
    )


def ended(status: InstanceDescription) -> EndedInstance:
    """Return an instance that ran and has ended, as a new driver finds it."""
    assert status.running_at is not None, "it ran"
    assert status.ended_at is not None, "it has ended"
    return EndedInstance(
        instance=status.instance,
        running_at=status.running_at,
        ended_at=status.ended_at,
        price_usd_per_hour=status.price_usd_per_hour,
        preempted=status.preempted,
        hour_prices_usd=status.hour_prices_usd,
    )


def released(instance: str, status: InstanceDescription | None, at: float) -> InstanceReleased:
    """Return the event that the instance was released, as of `at`; without a status the provider does not know it."""
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
