"""The place of an experiment in the queue of a service, in words. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rubberband.units import format_duration, instant_text

if TYPE_CHECKING:
    from rubberband.client.models import QueueView

NO_PLAN_AHEAD = "its start is not known, as one ahead of it has no plan yet"
_SOON_S = 5.0
_STEPS_S = ((90.0, 5.0), (3600.0, 60.0), (86400.0, 300.0), (math.inf, 3600.0))
"""Time below which a duration that is about right is a multiple of the second number."""
_DRIFT = 0.05
"""Share by which a deadline is later than it would have to be: plans ahead may take longer."""


def queue_view(
    *,
    place: int,
    ahead: int,
    start_at: float | None,
    last_start_at: float | None,
    deadline_at: float | None,
    created_at: float,
    now: float,
    is_submitted: bool = True,
) -> QueueView:
    """Return the place of an experiment that was submitted at `created_at`, as it is at `now` (both Unix time).

    Without `is_submitted` it is the one that it would have if it were submitted now.
    """
    latest_at = start_at if start_at is not None else now
    is_late = last_start_at is not None and max(now, latest_at) > last_start_at
    deadline, warning = None, ""
    starts = NO_PLAN_AHEAD if start_at is None else f"starts {_when(start_at - now)}"
    text = f"{ordinal(place)} in the queue; {starts}"
    if not is_submitted:
        text = f"{ahead} {'is' if ahead == 1 else 'are'} ahead; {starts if start_at is None else f'it {starts}'}"
    if is_late and deadline_at is not None and last_start_at is not None:
        if start_at is not None:
            needs_s = max(start_at, now) - created_at + deadline_at - last_start_at
            # Never one that is not later than the present one.
            deadline = format_duration(_up(max(needs_s * (1.0 + _DRIFT), deadline_at - created_at + 1.0)))
        if is_submitted:
            fails = "can no longer be met" if now > last_start_at else "cannot be met then"
            warning = f"its deadline {instant_text(deadline_at)} {fails}, so it is refused at its turn unless extended"
        else:
            warning = f"so the deadline of {format_duration(round(deadline_at - created_at))} cannot be met"
    return {
        "place": place,
        "ahead": ahead,
        "start_at": start_at,
        "last_start_at": last_start_at,
        "text": text,
        "warning": warning,
        "deadline": deadline,
    }


def queue_line(name: str, queue: QueueView) -> str:
    """Return the place of a queued experiment in one line, with a warning and its remedy."""
    if not queue["warning"]:
        return queue["text"]
    remedy = f"`rubberband extend {name} --deadline {queue['deadline'] or 'TIME'}`"
    return f"{queue['text']}; {queue['warning']}: {remedy}"


def submitted_line(name: str, queue: QueueView) -> str:
    """Return `queue_line` for one that was just submitted, with the setting that avoids the warning next time."""
    later = f"; next time: -s constraints.deadline={queue['deadline']}" if queue["deadline"] else ""
    return queue_line(name, queue) + later


def _when(wait_s: float) -> str:
    return "within seconds" if wait_s < _SOON_S else f"in about {about(wait_s)}"


def about(seconds: float) -> str:
    """Return a duration that is about right: 45s, 9m, 2h15m."""
    step_s = _step_s(seconds)
    return format_duration(max(1, round(seconds / step_s)) * step_s)


def _up(seconds: float) -> float:
    """Return the next duration that people would write."""
    step_s = _step_s(seconds)
    return math.ceil(seconds / step_s) * step_s


def _step_s(seconds: float) -> float:
    return next(step_s for most_s, step_s in _STEPS_S if seconds < most_s)


def ordinal(number: int) -> str:
    """Return 1st, 2nd, 3rd, 11th."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
