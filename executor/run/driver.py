"""The driver loop: events into the journal, then into the controller; its commands to the backend.

The driver makes some events itself: after a SYNC trials may take over others' checkpoints, and it plans the rest again,
also where the instance cap changed; before a bracket begins it may draw configurations; and where nothing is planned
again, it looks at the worth of the rest. It journals all of them: a replay needs neither planner nor sampler, and a
resume by a newer version repeats the old decisions, not its own.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rubberband.errors import StoreAwayError
from rubberband.executor.core.backend import Backend
from rubberband.executor.core.controller import Controller
from rubberband.executor.core.events import (
    Command,
    DriverStopped,
    Event,
    Finish,
    LaunchInstance,
    ReleaseInstance,
    Started,
    Tick,
    TrialForked,
    TrialReported,
    TrialsDrawn,
)
from rubberband.executor.core.fleet import GONE
from rubberband.executor.core.forking import takers
from rubberband.executor.core.replanning import decide, decide_within
from rubberband.executor.core.state import LaneState, State
from rubberband.executor.core.trial_state import TrialStatus
from rubberband.executor.core.worth import is_due, value_rest
from rubberband.executor.journal.inbox import Add, Asked, RequestQueue, Requests
from rubberband.executor.journal.journal import EventLog

Observer = Callable[[Event, Controller], None]
"""Called with every event after the controller has handled it."""
Draw = Callable[[State, Mapping[int, Mapping[str, Any]], Sequence[int], Callable[[], float]], TrialsDrawn]
"""Draws configurations of consecutive trials: (state, all that were drawn before, trials, clock) -> the event."""
Explore = Callable[[LaneState, Callable[[], float]], Sequence[TrialForked]]
"""Says how the trials go on that take over checkpoints at a lane's SYNC: (lane, clock) -> an event for each."""
_RENT = (LaunchInstance, ReleaseInstance)
_STORY_EVENTS = 20
"""Events in the story of an impossible transition."""


def replay(controller: Controller, journal: EventLog) -> int:
    """Fold the journal into `controller`; return the number of events."""
    count = 0
    for _, event in journal.events():
        _handle(event, controller, journal)
        count += 1
    return count


def _handle(event: Event, controller: Controller, journal: EventLog) -> list[Command]:
    """Let the event take effect; to an error of that, add the story of its trial or instance, or else of the run."""
    try:
        return controller.handle(event)
    except Exception as error:
        about = {name: getattr(event, name) for name in ("trial", "instance") if hasattr(event, name)}
        whose = " ".join(f"{name} {value}" for name, value in about.items()) or controller.job.name
        alike = (
            f"  {seq}: {other}"
            for seq, other in journal.events()
            if all(getattr(other, name, None) == value for name, value in about.items())
        )
        error.add_note("\n".join([f"at {event}", f"the story of {whose}:", *deque(alike, maxlen=_STORY_EVENTS)]))
        raise


def drive(
    controller: Controller,
    backend: Backend,
    journal: EventLog,
    *,
    observers: Sequence[Observer] = (),
    cancelled: Callable[[], bool] = lambda: False,
    requests: Requests | None = None,
    draw: Draw | None = None,
    explore: Explore | None = None,
    add: Add | None = None,
) -> Finish:
    """Run an experiment to its end, from the beginning or from the end of its journal. Returns how it ended.

    `draw` is for a job that draws configurations, `explore` for one whose trials take over others' checkpoints, `add`
    for requests for trials. `cancelled` and `requests` are polled between events. The caller closes the backend, also
    after a StoreAwayError, which is journalled: a resume continues then.
    """
    try:
        desk = RequestQueue(requests or Requests(), cancelled, add)
        return _drive(controller, backend, journal, observers, desk, draw, explore)
    except StoreAwayError as error:
        _take_in([DriverStopped(occurred_at=backend.now(), reason=str(error))], controller, journal, observers)
        raise


def _drive(
    controller: Controller,
    backend: Backend,
    journal: EventLog,
    observers: Sequence[Observer],
    desk: RequestQueue,
    draw: Draw | None,
    explore: Explore | None,
) -> Finish:
    is_new = replay(controller, journal) == 0
    for event in desk.open(controller, backend.now()):  # trials follow from what was asked for before
        _take_in([event], controller, journal, observers)
    held = [record.instance for record in controller.state.instances.values() if record.status not in GONE]
    drawn = _first_draws(controller, backend, draw)
    events: Sequence[Event] = [*drawn, Started(occurred_at=backend.now()) if is_new else backend.reconcile(held)]
    while True:
        commands, hold_until = _take_in(events, controller, journal, observers)
        desk.journalled()
        state = controller.state
        while decided := _decision(controller, backend, draw, explore):
            more, hold_until = _take_in(decided, controller, journal, observers)
            commands += more
        backend.hold_until(hold_until)
        for command in commands:
            if isinstance(command, Finish):
                desk.close()
                return command
            backend.execute(command)
        if (added := desk.added(controller, backend.now())) is not None:
            events = [added, Tick(occurred_at=backend.now())]
            continue
        wake_at = controller.wake_at()
        events = [marked_if_late(event, state) for event in backend.next_events(wake_at)]
        is_due = wake_at is not None and backend.now() >= wake_at
        if asked := desk.asked(controller, backend.now(), at_once=is_due):
            events = [*events, *asked]
            is_due = is_due or any(isinstance(event, Asked) for event in asked)
        if is_due:
            events = [*events, Tick(occurred_at=backend.now())]


def marked_if_late(event: Event, state: State) -> Event:
    """Return the event, marked if it is the report of an attempt that the experiment's end has just stopped."""
    if state.course != "ending" or not isinstance(event, TrialReported):
        return event
    trial = state.trials[event.trial]
    is_late = trial.status is TrialStatus.QUEUED and trial.attempt == event.attempt
    return replace(event, late=True) if is_late else event


def _first_draws(controller: Controller, backend: Backend, draw: Draw | None) -> list[Event]:
    """Return the configurations of the brackets that begin at once, unless the journal has them."""
    state, events = controller.state, list[Event]()
    drawn = dict(state.sampled_configs)
    for lane in state.lanes:
        if trials := state.configs_due_before(lane.brackets[0].first_stage):
            assert draw is not None, "a job that draws comes with a sampler"
            event = draw(state, drawn, trials, backend.now)
            drawn.update(enumerate(event.configurations, start=event.first_trial))
            events.append(event)
    return events


def _decision(controller: Controller, backend: Backend, draw: Draw | None, explore: Explore | None) -> Sequence[Event]:
    """Return the configurations that the first lane without a stage needs, or else its plan; nothing if none is due."""
    state = controller.state
    lane = state.planning()
    if lane is not None and takers(lane):
        assert explore is not None, "a job whose trials are exchanged comes with what changes them"
        return explore(lane, backend.now)
    if trials := state.configs_due() or (() if lane is None else state.configs_due_before(lane.next_stage)):
        assert draw is not None, "a job that draws comes with a sampler"
        return [draw(state, state.sampled_configs, trials, backend.now)]
    if lane is not None:
        return [decide(state, backend.now())]
    if state.resizing() is not None:
        return [decide_within(state, backend.now())]
    return [value_rest(state, backend.now())] if is_due(state) else []


def _take_in(
    events: Sequence[Event], controller: Controller, journal: EventLog, observers: Sequence[Observer]
) -> tuple[list[Command], float]:
    """Journal the events before they take effect; return the commands, and the instant at which the budget ends.

    That is the earliest after any launch or release: no lease gets longer than its reservation.
    """
    journal.append(events)
    commands: list[Command] = []
    hold_until = math.inf
    for event in events:
        orders = _handle(event, controller, journal)
        commands += orders
        if orders and any(isinstance(order, _RENT) for order in orders):
            hold_until = min(hold_until, controller.hold_until())
        for observe in observers:
            with suppress(OSError):  # a closed terminal or a full disk must not end a paid run
                observe(event, controller)
    return commands, min(hold_until, controller.hold_until())
