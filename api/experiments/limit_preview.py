"""Expected effect of other limits on an experiment: the question, and the answer of a planning process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rubberband.api.web.problems import CONFLICT, HttpProblem
from rubberband.errors import InputError
from rubberband.executor.core.extending import Extension, Limits, Outlook
from rubberband.executor.training.entrypoint import with_trial
from rubberband.planner.estimate import Estimate
from rubberband.planning.feasible import Terms, planned
from rubberband.spec.experiment import Experiment
from rubberband.units import format_instant, parse_deadline
from rubberband.values.plan import Policy

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestQuestion:
    """Other limits for an experiment; serialised as JSON."""

    name: str
    limits: Limits = field(default_factory=Limits)
    """Other limits of a started experiment, as its driver counts them."""
    driven: bool = False
    """Whether a driver runs it."""
    words: Json = field(default_factory=dict)
    """Settings of an experiment that has not started; empty for a started one."""
    other: Json = field(default_factory=dict)
    """The same settings with the other limits."""
    policy: Policy = "optimal"
    is_granted: bool = False
    """Whether the same request was granted before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestAnswer:
    """Expected effect of other limits."""

    extension: Extension
    had: Limits
    """Limits of a started experiment when this was planned."""


def answered(question: Json, home: Path, code: Sequence[str] = ()) -> Json:
    """Return the answer to a question as JSON (infinities as Python has them). Raises RubberbandError and Problem.

    The journal of a started experiment is read from the home, or from the store in RUBBERBAND_STORE.
    """
    asked = TypeAdapter(RestQuestion).validate_python(question)
    if asked.words:
        extension = waiting_extension(asked.words, asked.other, asked.policy, time.time(), code)
        found = RestAnswer(extension=extension, had=Limits())
    else:
        found = _of_begun(asked, home)
    plain: Json = TypeAdapter(RestAnswer).dump_python(found, mode="json")
    return plain


def read_answer(answer: Json) -> RestAnswer:
    """Parse a result of `answered`."""
    return TypeAdapter(RestAnswer).validate_python(answer)


def _of_begun(asked: RestQuestion, home: Path) -> RestAnswer:
    # Imported here: most planning processes never need it.
    from rubberband.executor.journal.folder import open_folder
    from rubberband.executor.run.follower import JournalFollower, at_work

    folder = open_folder(asked.name, home)
    with closing(JournalFollower(folder)) as follower:
        follower.refresh(live=at_work(folder))
        had = follower.limits_in_force
        return RestAnswer(extension=follower.extension(asked.limits, driven=asked.driven), had=had)


# Queued experiments are planned as if they started now. Pure.


def with_instant(words: Mapping[str, Any], since: float) -> dict[str, Any]:
    """Return settings with the deadline as an instant: a duration counts from `since` (Unix time)."""
    constraints = dict(words.get("constraints", {}))
    if "deadline" in constraints:
        constraints["deadline"] = format_instant(instant_of(constraints["deadline"], since))
    return {**words, "constraints": constraints}


def instant_of(deadline: object, since: float) -> datetime:
    """Return a deadline as an instant: a duration counts from `since` (Unix time). Raises InputError."""
    parsed = parse_deadline(deadline)
    return parsed if isinstance(parsed, datetime) else datetime.fromtimestamp(since + parsed, UTC)


def with_limits(words: Mapping[str, Any], deadline: datetime | None, max_cost_usd: float | None) -> dict[str, Any]:
    """Return settings with other limits; None keeps one. Raises InputError for a tighter limit."""
    constraints = dict(words.get("constraints", {}))
    if deadline is not None:
        _require_later(constraints, deadline)
        constraints["deadline"] = format_instant(deadline)
    if max_cost_usd is not None:
        _require_more(constraints, max_cost_usd)
        constraints["max_cost"] = max_cost_usd
    return {**words, "constraints": constraints}


def _require_later(constraints: Mapping[str, Any], deadline: datetime) -> None:
    has = constraints.get("deadline")
    if has is None:
        raise InputError("deadline: the experiment has none to extend; leave it out")
    if isinstance(before := parse_deadline(has), datetime) and deadline <= before:
        raise InputError(f"deadline: {format_instant(deadline)} is not later than {has}; give a later one")


def _require_more(constraints: Mapping[str, Any], max_cost_usd: float) -> None:
    has = constraints.get("max_cost")
    if has is None:
        raise InputError("max_cost: the experiment has none to raise; leave it out")
    if max_cost_usd <= has:
        raise InputError(f"max_cost={max_cost_usd:g} USD is not more than it has ({has:g} USD); give more")


def waiting_extension(
    words: Mapping[str, Any], other: Mapping[str, Any], policy: Policy, now: float, code: Sequence[str] = ()
) -> Extension:
    """Return what is expected under both settings if the experiment starts at `now` (Unix time).

    Raises Problem CONFLICT if no plan is feasible, InputError for settings that cannot be planned.
    """
    after = _estimate(other, policy, now, code)
    try:
        before = _estimate(words, policy, now, code)
    except InputError:  # its deadline passed in the queue
        before = None
    found = _outlook(after, after)
    return Extension(before=found if before is None else _outlook(before, after), after=found, stage=0)


def _estimate(words: Mapping[str, Any], policy: Policy, now: float, code: Sequence[str]) -> Estimate:
    experiment = with_trial(Experiment.kept(words), code)
    profiles = experiment.loaded_profiles()
    assert profiles is not None, "what waits without a profile is not extended"
    return planned(experiment, profiles, Terms(), now=now, policy=policy, advise=False).estimate


def _outlook(found: Estimate, stand_in: Estimate) -> Outlook:
    job = found.job or stand_in.job
    if job is None:
        raise HttpProblem(CONFLICT, f"with these limits no plan is feasible either: {stand_in.reason}")
    return Outlook(
        jct_s=job.prediction.jct_s,
        cost_usd=job.prediction.cost_usd,
        deadline_s=found.constraints.deadline_s,
        max_cost_usd=found.constraints.max_cost_usd,
        plan=job.plan,
        feasible=found.feasible,
        reason=found.reason or "it is queued; nothing has started",
    )
