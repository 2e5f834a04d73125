"""Backends carry out commands, on Ray with real instances or on a virtual clock: the protocol, and a resume."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from rubberband.cloud.provider import InstanceDescription
from rubberband.executor.core.events import (
    Command,
    DriverResumed,
    EndedInstance,
    Event,
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


def resumed(
    found: Iterable[InstanceDescription],
    known: Collection[str],
    release: Callable[[str], InstanceDescription],
    at: float,
) -> DriverResumed:
    """Release the live instances that are not `known`, and return what a new driver finds: what lives, what ended."""
    live, ended = list[LiveInstance](), list[EndedInstance]()
    for shown in found:
        status = release(shown.instance) if shown.ended_at is None and shown.instance not in known else shown
        if status.ended_at is None:
            lives = LiveInstance(
                instance=status.instance,
                running_at=status.running_at,
                price_usd_per_hour=status.price_usd_per_hour,
                hour_prices_usd=status.hour_prices_usd,
            )
            live.append(lives)
        elif status.running_at is not None:
            ran = EndedInstance(
                instance=status.instance,
                running_at=status.running_at,
                ended_at=status.ended_at,
                price_usd_per_hour=status.price_usd_per_hour,
                preempted=status.preempted,
                hour_prices_usd=status.hour_prices_usd,
            )
            ended.append(ran)
    return DriverResumed(occurred_at=at, live=tuple(live), ended=tuple(ended))
