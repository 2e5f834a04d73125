"""View of a run in a notebook: a display of HTML that is updated in place, with the content of the terminal's view."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Self

from rubberband import markup
from rubberband.executor.core.controller import Controller
from rubberband.executor.core.events import Event
from rubberband.executor.core.state import Job
from rubberband.views.live import Pictures, Progress, stage_cells, stamped, summary
from rubberband.views.narration import Narrator
from rubberband.views.words import usd_decimals

REFRESH_S = 1.0
_MOST_LINES = 8
_HEADER = (
    *("stage", "running", "waiting", "done", "failed", "iterations", "instances / plan"),
    *("GPUs per trial", "USD", "time", "plan"),
)
Show = Callable[[str], Callable[[str], None]]
"""Shows HTML, and returns the function that replaces it."""


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def show_in_cell(text: str) -> Callable[[str], None]:
    """Display HTML in the current cell."""
    from IPython.display import HTML, display

    handle: Any = display(HTML(text), display_id=True)
    return lambda later: handle.update(HTML(later))


class NotebookView:
    """View that redraws once a second, also between events, until it is left."""

    def __init__(
        self, job: Job, clock: Callable[[], float], *, details: bool = False, show: Show = show_in_cell
    ) -> None:
        """`clock` is the backend's."""
        self._job, self._clock, self._show = job, clock, show
        self._narrator, self._pictures = Narrator(job, details=details), Pictures()
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._redraw, name="rubberband notebook", daemon=True)
        self._update: Callable[[str], None] = lambda _text: None

    def __call__(self, event: Event, controller: Controller) -> None:
        """Take a picture of the state, and keep the lines about `event`."""
        self._pictures.take(controller)
        self._lines.extend(stamped(line, controller) for line in self._narrator.lines(event, controller))

    def __enter__(self) -> Self:
        self._update = self._show(self._picture())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._update(self._picture())

    def _redraw(self) -> None:
        drawn = ""
        while not self._over.wait(REFRESH_S):
            text = self._picture()
            if text != drawn:
                self._update(text)
                drawn = text

    def _picture(self) -> str:
        progress = self._pictures.latest
        if progress is None:
            return markup.card(self._job.name, markup.lines(["starting"]))
        return progress_html(progress, self._clock(), tuple(self._lines))


def progress_html(progress: Progress, now: float, said: tuple[str, ...] = ()) -> str:
    """Return the stages, time and cost, and the latest lines."""
    decimals = usd_decimals(max(progress.spent_usd(now), progress.expected(now).cost_usd))
    rows = [stage_cells(progress, stage, now, decimals) for stage in progress.stages]
    told = [line.plain for line in summary(progress, now)]
    return markup.card(progress.job.name, markup.table(_HEADER, rows), markup.lines(told), markup.lines(said))
