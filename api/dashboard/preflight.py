"""What a submission would do, and whether it may: told before it is asked for. It starts nothing and keeps nothing."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rubberband.api.experiment_body import read_experiment, require_allowed
from rubberband.api.problems import Problem
from rubberband.api.service import Service
from rubberband.api.store.records import Principal
from rubberband.errors import InputError
from rubberband.experiment import Experiment

_LONGEST_NAME = 63
_MOST_TRIED = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """A submission before it is made."""

    name: str
    free_name: str
    """The name itself; another one like it if there is an experiment of that name."""
    entrypoint: str
    provider: str
    region: str
    deadline_s: float | None
    """From now; None if there is none, or it has passed."""
    max_cost_usd: float | None
    measures: bool
    """Whether a profile is measured first."""
    reason: str
    """Why it cannot be submitted, as a clause; empty if it can be."""


def preflight(
    service: Service, principal: Principal, body: bytes, media_type: str, overrides: Sequence[str]
) -> Preflight:
    """What would come of submitting it. Raises Problem for what is no experiment."""
    experiment = read_experiment(body, media_type, overrides)
    resources = experiment.resources
    return Preflight(
        name=experiment.name,
        free_name=_free(service, experiment.name),
        entrypoint=str(experiment.entrypoint or ""),
        provider=resources.provider,
        region=resources.region,
        deadline_s=_left_s(experiment),
        max_cost_usd=experiment.constraints.max_cost_usd,
        measures=experiment.profile is None,
        reason=_reason(service, principal, experiment),
    )


def _reason(service: Service, principal: Principal, experiment: Experiment) -> str:
    if not principal.may("submit"):
        return f"the token {principal.name!r} may only read; sign in with one that has the scope submit"
    try:
        require_allowed(experiment, service.settings, to_run=True)
        experiment.constraints.deadline_from(time.time())
    except Problem as problem:
        return problem.detail
    except InputError as passed:
        return str(passed)
    return ""


def _left_s(experiment: Experiment) -> float | None:
    try:
        return experiment.constraints.deadline_from(time.time())
    except InputError:
        return None


def _free(service: Service, name: str) -> str:
    """`digits`, or `digits-2` where that is taken, and so on."""
    tried = (name if at == 1 else f"{name[: _LONGEST_NAME - 4].rstrip('-')}-{at}" for at in itertools.count(1))
    free = (one for one in itertools.islice(tried, _MOST_TRIED) if service.store.submission(one) is None)
    return next(free, name)
