"""Backends carry out commands, on Ray or on a virtual clock: their protocol, a resume, and an instance's lifecycle."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rubberband.cloud.provider import InstanceDescription
from rubberband.executor.core.events import (
    Command,
    DriverResumed,
    EndedInstance,
    Event,
    InstanceInterrupted,
    InstanceLost,
    InstancePriced,
    InstanceReady,
    InstanceRefused,
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


LAST_EVENTS = (InstanceRefused, InstanceLost, InstanceReleased)


@dataclass(slots=True, kw_only=True)
class Lifecycle:
    """State of one instance as its driver sees it, and the events of each transition: every fleet gets its events here.

      requested -> running -> ready        `see`, `ready`; a notice of its interruption comes at most once, `interrupt`
      any of them -> ending                `end`: it gets no more work, and its last event follows
      ending -> refused | lost | released  `lose`, `release`: exactly one of them, and it costs no more
      refused | released -> ending         `came_late`: its launch was carried out after it was given up

    A fleet says what the provider shows and when, and passes the events on; it does the input and output itself. All
    instants are seconds on the driver's clock.
    """

    instance: str
    running_at: float | None = None
    """Instant since which it is billed; None: it is not known to run."""
    hour_prices_usd: tuple[float, ...] | None = None
    """Prices of its hours, as reported last."""
    interrupted: bool = False
    """Whether the provider has given notice that it reclaims it."""
    same_fault: bool = False
    """Whether another instance on its machine was given up while this one was held."""
    over: bool = False
    """Released, refused or lost, or about to be: it gets no more work."""
    ended_at: float | None = None
    """Instant until which it is billed, once its last event is out; None: it may still cost."""

    def see(self, status: InstanceDescription, at: float, *, free_if_taken: bool) -> list[Event]:
        """Return the news of an instance that the provider shows; of one that is over, only its prices."""
        events = [] if self.over else self._running(status, at)
        events += self._priced(status, at)
        if status.interrupted_at is not None:
            events += self.interrupt(at, free_if_taken=free_if_taken)
        return events

    def ready(self, at: float) -> list[Event]:
        """Return the event that its workers are warm, unless it is over."""
        if self.over or self.running_at is None:
            return []
        return [InstanceReady(occurred_at=at, instance=self.instance)]

    def interrupt(self, at: float, *, free_if_taken: bool) -> list[Event]:
        """Return the event that the provider gave notice of its interruption, once."""
        if self.over or self.interrupted or self.running_at is None:
            return []
        self.interrupted = True
        return [InstanceInterrupted(occurred_at=at, instance=self.instance, free_if_taken=free_if_taken)]

    def end(self) -> bool:
        """Give it no more work; return False if that was so before. The caller then reports its last event."""
        was_over, self.over = self.over, True
        return not was_over

    def lose_ended(self, status: InstanceDescription, at: float, *, began_at: float) -> list[Event]:
        """Return the events of an end without an order.

        Only a start that was requested after `began_at`, by this driver, counts as failed.
        """
        failed_start = not (status.preempted or status.sold_out) and status.requested_at >= began_at
        reason = status.reason or "ended by another user or process"
        return self.lose(status, reason, at, failed_start=failed_start, sold_out=status.sold_out)

    def lose(
        self,
        status: InstanceDescription | None,
        reason: str,
        at: float,
        *,
        failed_start: bool = False,
        sold_out: bool = False,
    ) -> list[Event]:
        """Return the events of a failed launch, or of an instance that is of no use.

        `status` is its last; None: the provider does not know it. An instance that never ran was refused. Others are
        lost, and reported as running before if they ran unseen. After a notice, what its workers show is no cause.
        """
        if self.ended_at is not None:
            return []
        if self.interrupted and (status is None or reason != status.reason):
            reason = "taken away after a notice"
        events = self._running(status, at) + self._priced(status, at)
        ended_at = self._close(status, at)
        if self.running_at is None:
            refused = InstanceRefused(
                occurred_at=at, instance=self.instance, reason=reason, failed_start=failed_start, sold_out=sold_out
            )
            return [*events, refused]
        lost = InstanceLost(
            occurred_at=at,
            instance=self.instance,
            ended_at=ended_at,
            reason=reason,
            preempted=self.interrupted or (status is not None and status.preempted),
            overslept=status is not None and status.overslept(at),
            same_fault=self.same_fault,
        )
        return [*events, lost]

    def release(self, status: InstanceDescription | None, at: float) -> list[Event]:
        """Return the events of a release; `status` is its last, None if the provider does not know it."""
        if self.ended_at is not None:
            return []
        events = self._priced(status, at)
        ended_at = self._close(status, at)
        if status is not None and self.running_at is None:
            self.running_at = status.running_at
        released = InstanceReleased(
            occurred_at=at,
            instance=self.instance,
            ended_at=ended_at,
            running_at=self.running_at,
            price_usd_per_hour=None if status is None else status.price_usd_per_hour,
            instance_type="" if status is None else status.instance_type,
            zone="" if status is None else status.zone,
        )
        return [*events, released]

    def came_late(self, status: InstanceDescription) -> bool:
        """Return whether it ran although its last event said that it did not: it must be released again."""
        late = self.ended_at is not None and self.running_at is None and status.running_at is not None
        if late:
            self.running_at, self.ended_at = status.running_at, None
        return late

    def _running(self, status: InstanceDescription | None, at: float) -> list[Event]:
        if status is None or status.running_at is None or self.running_at is not None:
            return []
        self.running_at, self.hour_prices_usd = status.running_at, status.hour_prices_usd
        running = InstanceRunning(
            occurred_at=at,
            instance=self.instance,
            running_at=status.running_at,
            price_usd_per_hour=status.price_usd_per_hour,
            instance_type=status.instance_type,
            zone=status.zone,
            hour_prices_usd=status.hour_prices_usd,
            ended_at=status.ended_at,
        )
        return [running]

    def _priced(self, status: InstanceDescription | None, at: float) -> list[Event]:
        prices = None if status is None or status.running_at is None else status.hour_prices_usd
        if prices is None or prices == self.hour_prices_usd:
            return []
        self.hour_prices_usd = prices
        return [InstancePriced(occurred_at=at, instance=self.instance, hour_prices_usd=prices)]

    def _close(self, status: InstanceDescription | None, at: float) -> float:
        """Return the instant of its end, from which on nothing but its prices is news."""
        self.over = True
        self.ended_at = at if status is None or status.ended_at is None else status.ended_at
        return self.ended_at
