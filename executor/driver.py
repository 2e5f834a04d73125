"""The driver loop: events into the journal, then into the controller; its commands to the backend. Nothing else.

One event is of the driver's own making: after a SYNC it plans the rest again and journals what came of it. So a replay
needs no planner, and a resume by a newer version repeats the decisions that were carried out, not its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rubberband.errors import StoreAwayError
from rubberband.executor.backend import Backend
from rubberband.executor.core.controller import Controller
from rubberband.executor.core.events import (
    Command,
    DriverResumed,
    DriverStopped,
    Event,
    Finish,
    LaunchInstance,
    LimitsChanged,
    ReleaseInstance,
    Started,
    Tick,
)
from rubberband.executor.core.extending import decide
from rubberband.executor.core.state import GONE, Phase
from rubberband.executor.journal.inbox import Desk, NoRequests, Requests
from rubberband.executor.journal.journal import EventLog

Observer = Callable[[Event, Controller], None]
"""Is shown every event after the controller has taken it in."""


_RENT = (LaunchInstance, ReleaseInstance)


def replay(controller: Controller, journal: EventLog) -> int:
    """Fold the journal into `controller`; return how many events there were."""
    count = 0
    for _, event in journal.events():
        controller.handle(event)
        count += 1
    return count


def drive(
    controller: Controller,
    backend: Backend,
    journal: EventLog,
    *,
    observers: Sequence[Observer] = (),
    cancelled: Callable[[], bool] = lambda: False,
    requests: Requests | None = None,
) -> Finish:
    """Run an experiment to its end, from the beginning or from where its journal stops. Returns how it ended.

    `cancelled` is asked between events, and what lies in `requests` is taken in. The caller closes the backend, also
    if this raises StoreAwayError: the journal says so, and a resume goes on.
    """
    try:
        return _drive(controller, backend, journal, observers, Desk(requests or NoRequests(), cancelled))
    except StoreAwayError as error:
        _take_in([DriverStopped(occurred_at=backend.now(), reason=str(error))], controller, journal, observers)
        raise


def _drive(
    controller: Controller, backend: Backend, journal: EventLog, observers: Sequence[Observer], desk: Desk
) -> Finish:
    is_new = replay(controller, journal) == 0
    events: Sequence[Event] = desk.open(controller, backend.now())
    events = [*events, Started(occurred_at=backend.now()) if is_new else _resumed(controller, backend)]
    while True:
        commands, hold_until = _take_in(events, controller, journal, observers)
        desk.journalled()
        if controller.state.phase is Phase.PLANNING:
            decision = decide(controller.job, controller.state, backend.now())
            more, hold_until = _take_in([decision], controller, journal, observers)
            commands += more
        backend.hold_until(hold_until)
        for command in commands:
            if isinstance(command, Finish):
                desk.close()
                return command
            backend.execute(command)
        wake_at = controller.wake_at()
        events = backend.next_events(wake_at)
        is_due = wake_at is not None and backend.now() >= wake_at
        if asked := desk.asked(controller, backend.now(), at_once=is_due):
            events = [*events, *asked]
            is_due = is_due or any(isinstance(event, LimitsChanged) for event in asked)
        if is_due:
            events = [*events, Tick(occurred_at=backend.now())]


def _resumed(controller: Controller, backend: Backend) -> DriverResumed:
    records = controller.state.instances.values()
    return backend.reconcile([record.instance for record in records if record.status not in GONE])


def _take_in(
    events: Sequence[Event], controller: Controller, journal: EventLog, observers: Sequence[Observer]
) -> tuple[list[Command], float]:
    """Journal the events before anything is done about them; the orders, and until when the budget reaches.

    That is the least after any order to launch or release: no lease gets longer than what is reserved for it.
    """
    journal.append(events)
    commands: list[Command] = []
    hold_until = math.inf
    for event in events:
        orders = controller.handle(event)
        commands += orders
        if orders and any(isinstance(order, _RENT) for order in orders):
            hold_until = min(hold_until, controller.hold_until())
        for observe in observers:
            try:
                observe(event, controller)
            except OSError:
                continue  # a closed terminal or a full disk must not end what is paid for
    return commands, min(hold_until, controller.hold_until())
