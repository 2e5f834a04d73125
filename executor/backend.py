"""The protocol between the driver loop and whatever carries commands out: Ray on real instances, or a virtual clock."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from rubberband.executor.core.events import Command, DriverResumed, Event


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
