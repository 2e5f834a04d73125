"""What a session needs beside its job, and a driver that dies after some events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from rubberband.executor.core.controller import Controller
from rubberband.executor.core.events import Event
from rubberband.executor.core.state import Job
from rubberband.executor.run.driver import Observer
from rubberband.executor.run.session import Setup
from tests.builders.virtual_runs import Killed


def setup(**changes: object) -> Setup:
    plain: dict[str, object] = {
        "provider": "virtual",
        "configurations": [{"x": trial} for trial in range(4)],
        "seeds": [0, 1, 2, 3],
        "entrypoint": None,
        "checkpoints": "",
        "lease_s": 60.0,
        "experiment": {},
    }
    return Setup(**{**plain, **changes})  # type: ignore[arg-type]


def dying_after(num_events: int) -> Callable[[Job, Callable[[], float], ExitStack], Sequence[Observer]]:
    left = [num_events]

    def observe(_event: Event, _controller: Controller) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Killed

    return lambda *_: [observe]
