"""Places in the queue as answers show them: of experiments that wait, and of one that would be submitted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import partial

from rubberband.api.experiments.admission import PlanOf, planned_of
from rubberband.api.experiments.queueing import Line, Turn, Waiting, waiting_of
from rubberband.api.experiments.starting import raised_as_problems
from rubberband.api.plans.previews import PlanAnswer, PreviewOptions
from rubberband.api.problems import HttpProblem
from rubberband.api.routes import Service
from rubberband.client import models
from rubberband.spec.experiment import Experiment
from rubberband.states import ExperimentState
from rubberband.values.plan import Policy
from rubberband.values.submission import Submission
from rubberband.views import experiment as views_json
from rubberband.views.queueing import queue_view


def experiment_views(service: Service, submissions: Sequence[Submission]) -> list[models.ExperimentView]:
    """Return experiments as lists show them, with their places in the queue."""
    places = queue_views(service, submissions)
    return [views_json.experiment_view(row, places.get(row.name)) for row in submissions]


def queue_views(service: Service, submissions: Sequence[Submission]) -> dict[str, models.QueueView]:
    """Return the places of those that wait for a slot."""
    queued = [row for row in submissions if row.state is ExperimentState.QUEUED and not row.home]
    if not queued:
        return {}
    now, line = service.settings.clock(), service.runs.line
    turns = {name: turn for name, turn in line.turns(now).items() if not line.has_slot(turn.ahead)}
    return {row.name: _shown(turns[row.name], row.created_at, now) for row in queued if row.name in turns}


def place_of(service: Service, made: Submission) -> models.QueueView | None:
    """Return the place of an experiment that was submitted just now: the queue may not have it yet.

    None where a slot is free.
    """
    line, now = service.runs.line, service.settings.clock()
    if made.state is not ExperimentState.QUEUED:
        return None
    if made.name not in line.waiting:
        line = line.joined(made.name, made.owner, waiting_of(made))
    turn = line.turns(now)[made.name]
    return None if line.has_slot(turn.ahead) else _shown(turn, made.created_at, now)


async def place_if_submitted(
    service: Service, experiment: Experiment, plan: PlanOf, *, owner: str, answer: PlanAnswer | None = None
) -> models.QueueView | None:
    """Return the place that an experiment would have if it were submitted now; None where a slot is free.

    None, too, for one that is promised instances of a pool, or that has no plan. `answer` is its plan, if that is
    known. Raises Problem.
    """
    line: Line = service.runs.line
    if line.is_free or _is_promised(service, experiment):
        return None
    if experiment.profile is not None and answer is None:
        answer = await plan(experiment)
    if answer is not None and answer.status != 200:
        return None
    now = service.settings.clock()
    with raised_as_problems():
        deadline_s = experiment.constraints.deadline_from(now)
    waiting = Waiting(
        takes_s=None if answer is None else _takes_s(experiment, answer),
        shortest_s=0.0 if answer is None else await shortest_s(experiment, plan) or 0.0,
        deadline_at=None if deadline_s is None else now + deadline_s,
    )
    joined = line.joined(experiment.name if experiment.name not in line.waiting else "", owner, waiting)
    turns = await asyncio.to_thread(joined.turns, now)
    turn = next(turn for turn in turns.values() if turn.waiting is waiting)
    return _shown(turn, now, now, is_submitted=False)


def _is_promised(service: Service, experiment: Experiment) -> bool:
    is_lent = service.admission is not None and service.admission.lends(experiment)
    return is_lent and experiment.constraints.deadline is not None


def previewing(service: Service, policy: Policy, caller: str) -> PlanOf:
    """Return how an experiment is planned that would be submitted with `policy`."""
    return partial(service.plans.preview, options=PreviewOptions(policy=policy), caller=caller)


async def shortest_s(experiment: Experiment, plan: PlanOf) -> float | None:
    """Return the time of the shortest plan within the budget, with 95 % probability.

    None without a deadline, or where the size of the search follows from it: then any time that is left is enough.
    """
    if experiment.constraints.deadline is None:
        return None
    free = experiment.constraints.model_copy(update={"deadline": None, "objective": "min_time"})
    try:
        answer = await plan(experiment.model_copy(update={"constraints": free}))
    except HttpProblem:  # a search without a limit to be sized to, say
        return None
    found = json.loads(answer.body)
    if answer.status != 200 or found.get("size") is not None:
        return None
    jct_s = found["prediction"]["jct_s"]
    return max(float(jct_s["mean"]), float(jct_s["p95"]))


def _takes_s(experiment: Experiment, answer: PlanAnswer) -> float | None:
    return 0.0 if experiment.resources.kind.is_simulated else planned_of(json.loads(answer.body)).planned_jct_s


def _shown(turn: Turn, created_at: float, now: float, *, is_submitted: bool = True) -> models.QueueView:
    return queue_view(
        place=turn.place,
        ahead=turn.ahead,
        start_at=turn.start_at,
        last_start_at=turn.waiting.last_start_at,
        deadline_at=turn.waiting.deadline_at,
        created_at=created_at,
        now=now,
        is_submitted=is_submitted,
    )
