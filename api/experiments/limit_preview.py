"""What other limits bring for the rest of an experiment: the question, and how the process that plans answers it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rubberband.api.problems import CONFLICT, Problem
from rubberband.app.cases import cases
from rubberband.errors import InputError
from rubberband.executor.core.extending import Extension, Limits, Outlook
from rubberband.planner.estimate import Estimate, estimate
from rubberband.spec.experiment import Experiment
from rubberband.units import format_instant, parse_deadline
from rubberband.values.plan import Policy

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

    return RestAnswer(extension=waiting_extension(asked.words, asked.other, asked.policy, time.time()), had=Limits())


def _of_begun(asked: RestQuestion, home: Path) -> RestAnswer:
    # Most processes that plan are never asked this.
    from rubberband.executor.journal.folder import open_folder
    from rubberband.executor.observed import Observed, at_work

    folder = open_folder(asked.name, home)
    observed = Observed(folder)
    try:
        observed.refresh(live=at_work(folder))
        had = observed.limits_in_force
        return RestAnswer(extension=observed.extension(asked.limits, driven=asked.driven), had=had)
    finally:
        observed.close()


# What other limits change for an experiment that still waits: it is planned as it would be if it started now. Pure.


def with_instant(words: Mapping[str, Any], since: float) -> dict[str, Any]:
    """An experiment's words, its deadline as an instant: a duration counts from `since` (Unix time)."""
    constraints = dict(words.get("constraints", {}))
    if "deadline" in constraints:
        constraints["deadline"] = format_instant(instant_of(constraints["deadline"], since))
    return {**words, "constraints": constraints}


def instant_of(deadline: object, since: float) -> datetime:
    """A deadline as an instant: a duration counts from `since` (Unix time). Raises InputError."""
    parsed = parse_deadline(deadline)
    return parsed if isinstance(parsed, datetime) else datetime.fromtimestamp(since + parsed, UTC)


def with_limits(words: Mapping[str, Any], deadline: datetime | None, max_cost_usd: float | None) -> dict[str, Any]:
    """An experiment's words with other limits; None: as it was. Raises InputError for what is less than it has."""
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


def waiting_extension(words: Mapping[str, Any], other: Mapping[str, Any], policy: Policy, now: float) -> Extension:
    """What is expected by an experiment's words, and by other ones, if it starts at `now` (Unix time).

    Raises Problem CONFLICT where that is not known, InputError for what cannot be planned.
    """
    after = _estimate(other, policy, now)
    try:
        before = _estimate(words, policy, now)
    except InputError:  # its deadline has passed while it waited
        before = None
    found = _outlook(after, after)
    return Extension(before=found if before is None else _outlook(before, after), after=found, stage=0)


def _estimate(words: Mapping[str, Any], policy: Policy, now: float) -> Estimate:
    experiment = Experiment.kept(words)
    profiles = experiment.loaded_profiles()
    assert profiles is not None, "what waits without a profile is not extended"
    return estimate(
        experiment.brackets(),
        cases(experiment, profiles, now),
        policy,
        experiment.name,
        clock=time.perf_counter,
        objective=experiment.constraints.objective,
    )


def _outlook(found: Estimate, stand_in: Estimate) -> Outlook:
    job = found.job or stand_in.job
    if job is None:
        raise Problem(CONFLICT, f"with these limits no plan is feasible either: {stand_in.reason}")
    return Outlook(
        jct_s=job.prediction.jct_s,
        cost_usd=job.prediction.cost_usd,
        deadline_s=found.constraints.deadline_s,
        max_cost_usd=found.constraints.max_cost_usd,
        plan=job.plan,
        feasible=found.feasible,
        reason=found.reason or "it is queued; nothing has started",
    )
