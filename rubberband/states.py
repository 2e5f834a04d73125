"""States of an experiment, and the table of the actions that each allows.

The service, its page, the client and the commands all read this table. It decides by the state and a few facts; the
operator's limits (providers, code, amounts) are checked elsewhere. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Literal, NamedTuple, get_args


class ExperimentState(StrEnum):
    """State of an experiment, as users see it."""

    QUEUED = "queued"
    """Accepted; it waits for a free slot."""
    STARTING = "starting"
    """Its process measures a profile, plans, or waits for its checkpoint store."""
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    """Its process is gone and it is not over: resume it."""
    DONE = "done"
    CANCELLED = "cancelled"
    BUDGET = "budget"
    """max_cost ended it; extend and resume it."""
    FAILED = "failed"
    REFUSED = "refused"
    """Never began: no plan met the constraints, or a check failed; only profiling may have cost money."""
    UNREADABLE = "unreadable"
    """Its journal cannot be read."""


State = Literal[
    "queued", "starting", "running", "interrupted", "done", "cancelled", "budget", "failed", "refused", "unreadable"
]
"""The same states as they are written in JSON. `budget`: max_cost ended it; `refused`: it never began."""

AT_WORK = frozenset({ExperimentState.STARTING, ExperimentState.RUNNING})
"""A process is running it."""
ACTIVE = AT_WORK | {ExperimentState.QUEUED}
"""States that change by themselves; any other state changes only by a resume, at the service or by hand."""
OVER = frozenset(ExperimentState) - ACTIVE - {ExperimentState.INTERRUPTED, ExperimentState.UNREADABLE}
"""States at the end: no process runs the experiment, and none is expected."""

EXPLAINED = frozenset(ExperimentState) - {ExperimentState.RUNNING, ExperimentState.DONE, ExperimentState.CANCELLED}
"""States whose reason says more than the state."""

Action = Literal["cancel", "resume", "extend", "add", "limit", "stop", "delete"]
Fact = Literal["here", "measured", "begun", "targeted", "open", "asked", "ended"]
"""Facts that a state does not have.

here: it did not begin in another home. measured: no profile was lost that would be paid for again. begun: its journal
has begun, or it waits with a profile, so that the rest can be planned. targeted: a trial that reached the target ended
it. open: a resume continues it, with the limits granted since. asked: trials or limits were asked for since it has had
a process, and are in no journal yet. ended: its journal says so, if it has one.
"""


class Condition(NamedTuple):
    """A condition of an action, and the remedy if it does not hold."""

    fact: Fact | None
    """None: it never holds."""
    remedy: str


def _never(remedy: str) -> tuple[Condition]:
    return (Condition(None, remedy),)


_NEW = "it is over; to run it again under another name: `rubberband run FILE --new`"
_OVER = _never(_NEW)
_REFUSED = _never("it never started; submit it again under another name")
_UNREADABLE = _never("its journal cannot be read")
_UNDER_WAY = _never("it is already running")
_HERE = Condition("here", "it was started in another home; resume it there")
_THERE = Condition("here", "it was started in another home; delete it there")
_INSTANCES = "it may still hold instances; resume it and cancel it or await its end, and delete it then"
_RELEASED = (_THERE, Condition("ended", _INSTANCES))
_RUNS = _never("only an experiment that has ended is deleted; cancel it, and delete it then")
_MEASURED = Condition("measured", "it ended while its profile was measured; submit it again")
_BEGUN = Condition("begun", "it has not started, so its rest cannot be planned; try again once it runs")
_TARGETED = Condition("targeted", _NEW)
_STILL = _never("it is not running; resume it first")
_SOON = _never("it has not started; try again once it runs")
_ENDED_EARLY = _never("it ended early; resume it, and add trials then")
_AGAIN = Condition(
    "open", "it is over; extend it first (--num-samples, or a harder --target), or run it under another name"
)
_WITHDRAWN = Condition("asked", "a resume that was cut off has added its trials; resume it, and cancel it then")
_RAISED = Condition("open", "raise max_cost first (extend), then resume it")
_BLAMELESS = Condition("open", "its trials failed in their own code; fix it, then: `rubberband run FILE --new`")

_ACTIONS: tuple[Action, ...] = get_args(Action)
_Rules = Mapping[Action, tuple[Condition, ...]]
_SOONER: _Rules = {"cancel": (), "extend": (_BEGUN,), "add": _SOON, "limit": _SOON, "stop": _SOON, "delete": _RUNS}
"""Before it runs."""
_LATER: _Rules = {"cancel": _OVER, "add": _ENDED_EARLY, "limit": _STILL, "stop": _STILL, "delete": _RELEASED}
"""After it ran, where a resume may continue it."""
_CONDITIONS: Mapping[ExperimentState, _Rules] = {
    ExperimentState.QUEUED: {**_SOONER, "resume": _never("it starts automatically as soon as a slot is free")},
    ExperimentState.STARTING: {**_SOONER, "resume": _UNDER_WAY},
    ExperimentState.RUNNING: {**_SOONER, "resume": _UNDER_WAY, "add": (), "limit": (), "stop": ()},
    ExperimentState.INTERRUPTED: {
        "cancel": _never("it is not running; to end what is left at once, resume it and then cancel it"),
        "resume": (_HERE, _MEASURED),
        "extend": (_BEGUN,),
        "add": (_HERE, _BEGUN),
        "limit": _STILL,
        "stop": _STILL,
        "delete": _never(_INSTANCES),
    },
    ExperimentState.DONE: {
        **dict.fromkeys(_ACTIONS, _OVER),
        "cancel": (Condition("open", _NEW), _WITHDRAWN),
        "extend": (_TARGETED,),
        "add": (_HERE,),
        "resume": (_HERE, _AGAIN),
        "delete": _RELEASED,
    },
    # To cancel it again is answered as before (the same request may arrive twice), and is not offered.
    ExperimentState.CANCELLED: {**_LATER, "resume": (_HERE, _MEASURED), "extend": (_BEGUN,)},
    ExperimentState.BUDGET: {**_LATER, "resume": (_HERE, _RAISED), "extend": ()},
    ExperimentState.FAILED: {**_LATER, "resume": (_HERE, _BLAMELESS), "extend": (_BLAMELESS,)},
    ExperimentState.REFUSED: {**dict.fromkeys(_ACTIONS, _REFUSED), "delete": _RELEASED},
    ExperimentState.UNREADABLE: dict.fromkeys(_ACTIONS, _UNREADABLE),
}


REHEARSAL = "nothing was trained: the metric is invented"
"""Remark on a run on the virtual clock, in place of its best trial."""


def obstacle(state: ExperimentState, action: Action, holds: Callable[[Fact], bool]) -> str:
    """Return why the action is not possible and what to do instead; empty where it is possible.

    `holds` is asked for a fact only where the answer depends on it.
    """
    for fact, remedy in _CONDITIONS[state][action]:
        if fact is None or not holds(fact):
            return remedy
    return ""


def pool_sets_instances(pool: str) -> str:
    """Return why an experiment that shares a pool takes no limit of instances, and what to do instead."""
    return f"pool {pool} allots its instances; change its weight instead"


def possible(state: ExperimentState, holds: Callable[[Fact], bool]) -> frozenset[Action]:
    """Return the actions that are possible now."""
    return frozenset(action for action in _ACTIONS if not obstacle(state, action, holds))
