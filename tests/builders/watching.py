"""A virtual run as the live view tells it."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

from rubberband.executor import Controller, Faults, Job, Journal, Observer, VirtualBackend, drive
from rubberband.views.live.view import Progress, observe, open_view
from tests.builders.results import a_job


def watch(
    job: Job,
    observers: Sequence[Observer],
    faults: Faults | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> None:
    backend = VirtualBackend(job.name, job.offer, job.profile, metric=job.metric, faults=faults)
    journal = Journal("sqlite://", job.name, create=True)
    try:
        drive(Controller(job), backend, journal, observers=observers, cancelled=cancelled)
    finally:
        journal.close()


def narration(
    job: Job | None = None, faults: Faults | None = None, cancelled: Callable[[], bool] = lambda: False
) -> str:
    stream, job = io.StringIO(), job or a_job()
    with open_view(job, lambda: 0.0, stream, is_terminal=False) as view:
        watch(job, [view], faults, cancelled)
    return "".join(line.strip() + "\n" for line in stream.getvalue().splitlines())


def pictures(job: Job, faults: Faults | None = None) -> list[tuple[float, Progress]]:
    taken: list[tuple[float, Progress]] = []
    watch(job, [lambda event, controller: taken.append((event.occurred_at, observe(job, controller.state)))], faults)
    return taken
