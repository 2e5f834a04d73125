"""What other limits change for an experiment that still waits: it is planned as it would be if it started now. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from rubberband.api.problems import CONFLICT, Problem
from rubberband.cases import cases
from rubberband.errors import InputError
from rubberband.executor.extending import Extension, Outlook
from rubberband.experiment import Experiment
from rubberband.plan import Policy
from rubberband.planner.estimate import Estimate, estimate
from rubberband.units import format_instant, parse_deadline


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
        raise InputError("deadline: it has none, so that there is none to be extended; leave it out")
    if isinstance(before := parse_deadline(has), datetime) and deadline <= before:
        raise InputError(f"deadline: {format_instant(deadline)} is not later than {has}; give a later one")


def _require_more(constraints: Mapping[str, Any], max_cost_usd: float) -> None:
    has = constraints.get("max_cost")
    if has is None:
        raise InputError("max_cost: it has none, so that there is none to be raised; leave it out")
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
        reason=found.reason or "it waits; nothing has begun",
    )
