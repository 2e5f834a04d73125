"""A virtual run as the live view tells it."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

from rubberband.executor import Controller, DriverRequest, Event, Faults, Job, Journal, Observer, VirtualBackend, drive
from rubberband.views.live.view import Progress, observe, open_view
from tests.builders.results import a_job
from tests.builders.timed_requests import TimedInbox


def watch(
    job: Job,
    observers: Sequence[Observer],
    faults: Faults | None = None,
    cancelled: Callable[[], bool] = lambda: False,
    backend: VirtualBackend | None = None,
    requests: Sequence[DriverRequest] = (),
) -> None:
    backend = backend or VirtualBackend(job.name, job.offer, job.profile, metric=job.metric, faults=faults)
    journal = Journal("sqlite://", job.name, create=True)
    inbox = TimedInbox(backend.now, *requests)
    try:
        drive(Controller(job), backend, journal, observers=observers, cancelled=cancelled, requests=inbox)
    finally:
        journal.close()


def narration(job: Job | None = None, faults: Faults | None = None, **watched: Any) -> str:
    stream, job = io.StringIO(), job or a_job()
    with open_view(job, lambda: 0.0, stream, is_terminal=False) as view:
        watch(job, [view], faults, **watched)
    return "".join(line.strip() + "\n" for line in stream.getvalue().splitlines())


def pictures(job: Job, faults: Faults | None = None, **watched: Any) -> list[tuple[float, Progress]]:
    taken: list[tuple[float, Progress]] = []

    def look(event: Event, controller: Controller) -> None:
        taken.append((event.occurred_at, observe(job, controller.state)))

    watch(job, [look], faults, **watched)
    return taken
