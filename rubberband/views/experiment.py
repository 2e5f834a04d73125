"""Experiments and their results as the JSON of the REST API. Pure.

Infinities and NaN become null, as JSON cannot write them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rubberband.client import models
from rubberband.executor.result.parts import TrialResult
from rubberband.executor.result.result import Result
from rubberband.values.command import entrypoint_text
from rubberband.values.offer import PROFILE_LINE, BillLine
from rubberband.values.submission import Submission
from rubberband.views.story import planned_spans, story
from rubberband.views.trial import gang_uses, lead, rank

if TYPE_CHECKING:
    from rubberband.executor.core.extending import Extension
    from rubberband.executor.run.removing import Removal

Wire = TypeVar("Wire")


def plain(value: Any) -> Any:
    """Return a value as plain JSON: dataclasses and mappings as objects, infinities and NaN as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [plain(inner) for inner in value]
    return str(value)


def to_bytes(value: Any) -> bytes:
    """Return a value of `plain` as JSON text."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


def slack_s(submission: Submission) -> float | None:
    """Return the time from the (expected) end of an experiment to its deadline; None without a deadline or a start."""
    return None if submission.summary.started_at is None else submission.slack_s()


def wire(model: type[Wire], source: object, **others: Any) -> Wire:
    """Return a wire model: each field from `others`, else the attribute of `source` of its name."""
    names = model.__annotations__
    return cast(Wire, {name: plain(others[name] if name in others else getattr(source, name)) for name in names})


def experiment_view(submission: Submission, queue: models.QueueView | None = None) -> models.ExperimentView:
    """Return an experiment as lists show it; `queue` is its place where it waits for a slot of a service."""
    words = submission.words
    resources = words.get("resources")
    view = wire(
        models.ExperimentView,
        submission,
        entrypoint=entrypoint_text(words.get("entrypoint")),
        provider=resources.get("provider") if isinstance(resources, Mapping) else None,
        slack_s=slack_s(submission),
        queue=queue,
        **plain(submission.labels),
    )
    if queue is None:
        del view["queue"]
    return view


def removal_view(going: Removal, *, is_deleted: bool) -> models.RemovalView:
    """Return the effect of deleting an experiment."""
    return wire(models.RemovalView, going, deleted=is_deleted)


def experiment_detail(
    submission: Submission, result: Result | None, queue: models.QueueView | None = None
) -> models.ExperimentDetail:
    """Return an experiment with its stages, plan and forecast."""
    summary = submission.summary
    planned, best = (summary.planned_jct_s, summary.planned_cost_usd), None if result is None else result.best
    if result is not None:
        planned = result.planned_jct_s, result.whole_planned_usd
    return {
        **experiment_view(submission, queue),
        "words": plain(submission.words),
        "stages": [] if result is None else plain(result.stages),
        "rungs": [] if result is None else plain(result.rungs),
        "planned": _expectation(*planned),
        "forecast": _expectation(summary.forecast_jct_s, summary.forecast_cost_usd),
        "best": None
        if result is None or best is None
        else wire(models.Best, best, value=best.metrics.get(result.metric)),
        "extensions": [] if result is None else plain(result.extensions),
        "story": [] if result is None else plain(story(result)),
    }


def _expectation(jct_s: float | None, cost_usd: float | None) -> models.Expectation:
    return {"jct_s": plain(jct_s), "cost_usd": plain(cost_usd)}


def trial_view(trial: TrialResult, *, curves: bool) -> models.TrialView:
    """Return a trial, with its learning curve, batch sizes, shares of its workers and use of machines if `curves`."""
    names = (*models.TrialView.__annotations__, *(("curve", "batches", "balance", "updates", "use") if curves else ()))
    return cast(models.TrialView, {name: plain(getattr(trial, name)) for name in names})


def trial_detail(result: Result, trial: TrialResult) -> models.TrialDetail:
    """Return a trial with its place among the others, its gangs and their cost."""
    uses = gang_uses(result, trial.trial)
    more = {
        "rank": rank(result, trial),
        "lead": lead(result, trial),
        "gpu_s": sum(use.gpu_s for use in uses),
        "cost_usd": sum(use.cost_usd for use in uses),
        "gangs": plain(uses),
    }
    return cast(models.TrialDetail, {**trial_view(trial, curves=True), **more})


def allocations(result: Result | None) -> models.Allocations:
    """Return the instances, their use over time, and the plan."""
    if result is None:
        return {"instances": [], "busy": [], "planned": []}
    planned = [
        wire(models.PlannedUse, stage, start_s=start_s, end_s=end_s, instances=stage.planned_instances)
        for stage, start_s, end_s in planned_spans(result.stages)
    ]
    return wire(models.Allocations, result, planned=planned)


def costs(submission: Submission, result: Result | None) -> models.Costs:
    """Return the bill so far, that of its profile included, against the plan and the budget."""
    summary = submission.summary
    if result is None:
        return wire(models.Costs, summary, head_cost_usd=0.0, bill=(), paid={}, stages=(), instances=())
    return wire(
        models.Costs,
        result,
        cost_usd=result.whole_cost_usd,
        planned_cost_usd=result.whole_planned_usd,
        max_cost_usd=result.asked_max_cost_usd,
        forecast_cost_usd=summary.forecast_cost_usd,
        bill=_bill(result),
        stages=[wire(models.StageCost, stage) for stage in result.stages],
    )


def _bill(result: Result) -> tuple[BillLine, ...]:
    profile = BillLine(line=PROFILE_LINE, usd=result.profiling_cost_usd)
    return (*result.bill, profile) if profile.usd else result.bill


def decisions(result: Result | None) -> models.Decisions:
    """Return the decisions at each SYNC, the changes of the limits, and what the rest might bring."""
    if result is None:
        return {"items": [], "extensions": [], "worths": []}
    return {"items": plain(result.decisions), "extensions": plain(result.extensions), "worths": plain(result.worths)}


def extension_view(extension: Extension) -> models.ExtensionView:
    """Return the effect of other limits."""
    return wire(models.ExtensionView, extension)
