"""What the user asks of a driver while it drives, as events: by a signal, or by a request in the experiment's inbox."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from rubberband.executor.core import rules
from rubberband.executor.core.controller import Controller
from rubberband.executor.core.events import CancelRequested, Event, LimitsChanged
from rubberband.executor.core.state import Job
from rubberband.executor.journal.inbox import DriverRequest, Requests

POLL_S = 0.5
"""How long a request lies in the inbox at most while a driver is at work."""


def asked_limits(requests: Requests, controller: Controller, now: float) -> list[LimitsChanged]:
    """The limits that are asked for and not taken in yet."""
    extends = (asked for asked in requests.pending(controller.state.requests) if asked.kind == "extend")
    return [event for event in _as_events(extends, controller.job, now) if isinstance(event, LimitsChanged)]


class Desk:
    """Takes requests in for one driver. They are let go of once the journal has them, not before."""

    def __init__(self, requests: Requests, cancelled: Callable[[], bool]) -> None:
        self._requests = requests
        self._cancelled = cancelled
        self._is_signalled = False
        self._look_at = -math.inf
        self._taken: list[str] = []

    def open(self, controller: Controller, now: float) -> list[LimitsChanged]:
        """What counts before anything else does: limits. What an earlier driver had taken in is let go of."""
        for id in controller.state.requests:
            self._requests.discard(id)
        limits = asked_limits(self._requests, controller, now)
        self._taken += [event.request for event in limits]
        return limits

    def asked(self, controller: Controller, now: float, *, at_once: bool) -> list[Event]:
        """What is asked since, to be journalled in this order; `at_once` where it cannot wait for the next poll."""
        events: list[Event] = []
        if not self._is_signalled and self._cancelled():
            self._is_signalled = True
            events.append(CancelRequested(occurred_at=now))
        if at_once or now >= self._look_at:
            self._look_at = now + POLL_S
            pending = self._requests.pending(controller.state.requests)
            self._taken += [request.id for request in pending]
            events += _as_events(pending, controller.job, now)
        return events

    def journalled(self) -> None:
        """Everything that was asked is in the journal."""
        for id in self._taken:
            self._requests.discard(id)
        self._taken.clear()

    def close(self) -> None:
        """The experiment has ended: whoever asks for that has it."""
        self._requests.withdraw_cancels()


def _as_events(requests: Iterable[DriverRequest], job: Job, now: float) -> list[Event]:
    events: list[Event] = []
    for asked in requests:
        if asked.kind == "cancel":
            events.append(CancelRequested(occurred_at=now, request=asked.id))
            continue
        deadline_s = job.deadline_s if asked.deadline_s is None else asked.deadline_s
        max_cost_usd = job.max_cost_usd if asked.max_cost_usd is None else asked.max_cost_usd
        event = LimitsChanged(
            occurred_at=now,
            request=asked.id,
            deadline_s=rules.raised(job.deadline_s, deadline_s),
            max_cost_usd=rules.raised(job.max_cost_usd, max_cost_usd),
        )
        job = rules.granted(job, event)
        events.append(event)
    return events
