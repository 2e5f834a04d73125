"""What other limits bring for the rest of an experiment: the question, and how the process that plans answers it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rubberband.executor.extending import Extension, Limits
from rubberband.plan import Policy

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestQuestion:
    """Other limits for an experiment. All of it travels as JSON."""

    name: str
    limits: Limits = field(default_factory=Limits)
    """The other limits, as its driver counts them; of what has begun."""
    driven: bool = False
    """Whether a driver is at work on it."""
    words: Json = field(default_factory=dict)
    """Of what has not begun: the experiment as it waits; empty of what has."""
    other: Json = field(default_factory=dict)
    """Likewise, with the other limits."""
    policy: Policy = "optimal"
    is_granted: bool = False
    """Whether it was granted before, by the same request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestAnswer:
    """What they bring."""

    extension: Extension
    had: Limits
    """The limits that it had when this was reckoned; of what has begun."""


def answered(question: Json, home: Path) -> Json:
    """The answer to a question as JSON (infinities as Python has them). Raises RubberbandError and Problem.

    Of what has begun the journal is read, from a file in the home or from the store that RUBBERBAND_STORE names.
    """
    asked = TypeAdapter(RestQuestion).validate_python(question)
    found = _of_waiting(asked) if asked.words else _of_begun(asked, home)
    plain: Json = TypeAdapter(RestAnswer).dump_python(found, mode="json")
    return plain


def read_answer(answer: Json) -> RestAnswer:
    """What `answered` gave."""
    return TypeAdapter(RestAnswer).validate_python(answer)


def _of_waiting(asked: RestQuestion) -> RestAnswer:
    from rubberband.api.waiting import waiting_extension

    return RestAnswer(extension=waiting_extension(asked.words, asked.other, asked.policy, time.time()), had=Limits())


def _of_begun(asked: RestQuestion, home: Path) -> RestAnswer:
    # Most processes that plan are never asked this.
    from rubberband.api.observing import Observed, at_work
    from rubberband.executor.folder import open_folder

    folder = open_folder(asked.name, home)
    observed = Observed(folder)
    try:
        observed.refresh(live=at_work(folder))
        had = observed.limits_in_force
        return RestAnswer(extension=observed.extension(asked.limits, driven=asked.driven), had=had)
    finally:
        observed.close()
