"""Running an experiment on the virtual backend, every invariant checked after every event."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

from rubberband.executor import (
    Controller,
    Event,
    EventLog,
    Faults,
    Finish,
    Job,
    Journal,
    Observer,
    Phase,
    Requests,
    State,
    VirtualBackend,
    drive,
    replay,
)
from rubberband.executor.run.driver import Draw, Explore
from tests.builders.invariants import validate
from tests.builders.memory import MemoryJournal


def check(_event: Event, controller: Controller) -> None:
    validate(controller)


def run_virtual(
    job: Job,
    faults: Faults | None = None,
    journal: EventLog | None = None,
    backend: VirtualBackend | None = None,
    cancel_after: int | None = None,
    observers: Sequence[Observer] = (),
    draw: Draw | None = None,
    explore: Explore | None = None,
) -> tuple[Controller, VirtualBackend, Finish]:
    """Drive `job` to its end; the user cancels it after `cancel_after` rounds of events."""
    rounds = itertools.count()
    controller = Controller(job)
    backend = backend or VirtualBackend(job.name, job.offer, job.profile, metric=job.metric, faults=faults)
    log = MemoryJournal() if journal is None else journal
    watching = [check, *observers]
    finish = drive(
        controller,
        backend,
        log,
        observers=watching,
        cancelled=lambda: next(rounds) == cancel_after,
        draw=draw,
        explore=explore,
    )
    return controller, backend, finish


def jct_s(state: State) -> float:
    assert state.stages[-1].ended_at is not None
    return state.stages[-1].ended_at - state.started_at


class Killed(Exception):
    """Stands for kill -9."""


def run_until_killed(
    controller: Controller,
    backend: VirtualBackend,
    journal: EventLog,
    num_events: int,
    draw: Draw | None = None,
    requests: Requests | None = None,
    explore: Explore | None = None,
) -> None:
    left = [num_events]

    def kill(*_: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Killed

    with contextlib.suppress(Killed):
        drive(controller, backend, journal, observers=[kill], draw=draw, requests=requests, explore=explore)


def killed_and_resumed(
    job: Job, faults: Faults, events_before: int, checkpoint_every: int
) -> tuple[Controller, Controller, VirtualBackend]:
    """Kill the driver of a run after some events, and resume it; return the controllers of both, and the backend.

    A replay of the whole journal must end as the second one did.
    """
    with contextlib.closing(Journal("sqlite://", job.name, create=True)) as journal:
        backend = VirtualBackend(
            job.name, job.offer, job.profile, metric=job.metric, faults=faults, checkpoint_every=checkpoint_every
        )
        before, again = Controller(job), Controller(job)
        run_until_killed(before, backend, journal, events_before)
        after, _, _ = run_virtual(job, journal=journal, backend=backend)
        assert after.state.phase is Phase.FINISHED
        replay(again, journal)
        assert again.state == after.state
        return before, after, backend
