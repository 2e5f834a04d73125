"""Experiments and their results as the JSON of the REST contract. Pure.

What is no finite number becomes null: JSON has no other word for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from rubberband.executor.result import Result, StageResult, TrialResult
from rubberband.states import ACTIVE
from rubberband.values.submission import Submission, Summary

if TYPE_CHECKING:
    from rubberband.executor.core.extending import Extension, Outlook


def plain(value: Any) -> Any:
    """A value as JSON holds it: dataclasses and mappings as objects, infinities and NaN as null."""
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
    """A value of `plain` as JSON text."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


def slack_s(submission: Submission) -> float | None:
    """Seconds between the (expected) end of an experiment and its deadline; None without a deadline or a start."""
    summary = submission.summary
    if summary.deadline_s is None or summary.started_at is None:
        return None
    expected_s = summary.forecast_jct_s if submission.state in ACTIVE else None
    return summary.deadline_s - (summary.jct_s if expected_s is None else expected_s)


def experiment_view(submission: Submission) -> dict[str, Any]:
    """An experiment in a list."""
    words = submission.words
    resources = words.get("resources")
    entrypoint = words.get("entrypoint")
    return {
        "name": submission.name,
        "state": submission.state.value,
        "owner": submission.owner,
        "created_at": submission.created_at,
        "changed_at": submission.changed_at,
        "reason": submission.reason,
        "policy": submission.policy,
        "plan": submission.plan,
        "attempt": submission.attempt,
        "entrypoint": None if entrypoint is None else str(entrypoint),
        "provider": resources.get("provider") if isinstance(resources, Mapping) else None,
        "slack_s": plain(slack_s(submission)),
        "summary": plain(submission.summary),
    }


def experiment_detail(submission: Submission, result: Result | None) -> dict[str, Any]:
    """An experiment on its own."""
    summary = submission.summary
    return experiment_view(submission) | {
        "words": plain(submission.words),
        "stages": [] if result is None else plain(result.stages),
        "planned": _planned(summary, result),
        "forecast": _expectation(summary.forecast_jct_s, summary.forecast_cost_usd),
        "best": None if result is None or result.best is None else _best(result.best, result.metric),
        "extensions": [] if result is None else extensions(result),
    }


def _planned(summary: Summary, result: Result | None) -> dict[str, Any]:
    if result is None:
        return _expectation(summary.planned_jct_s, summary.planned_cost_usd)
    return _expectation(result.planned_jct_s, result.planned_cost_usd)


def _expectation(jct_s: float | None, cost_usd: float | None) -> dict[str, Any]:
    return {"jct_s": plain(jct_s), "cost_usd": plain(cost_usd)}


def _best(trial: TrialResult, metric: str) -> dict[str, Any]:
    found: dict[str, Any] = plain(
        {
            "trial": trial.trial,
            "value": trial.metrics.get(metric),
            "iterations": trial.iterations,
            "configuration": trial.configuration,
            "metrics": trial.metrics,
        }
    )
    return found


def extensions(result: Result) -> list[Any]:
    """How the limits were changed, in order."""
    found: list[Any] = plain(result.extensions)
    return found


def trial_view(trial: TrialResult, *, curves: bool) -> dict[str, Any]:
    """A trial; its learning curve and its batch sizes as well if `curves`."""
    names = ("trial", "status", "configuration", "iterations", "metrics", "failures", "failure", "checkpoint")
    wanted = (*names, "curve", "batches") if curves else names
    return {name: plain(getattr(trial, name)) for name in wanted}


def allocations(result: Result | None) -> dict[str, Any]:
    """Which instances were held and busy when, and what was planned."""
    if result is None:
        return {"instances": [], "busy": [], "planned": []}
    return {
        "instances": plain(result.instances),
        "busy": plain(result.busy),
        "planned": plain(list(planned_uses(result.stages))),
    }


def planned_uses(stages: Sequence[StageResult]) -> Iterator[dict[str, Any]]:
    """What the first plan held in each stage, in seconds from the start."""
    start_s = 0.0
    for stage in stages:
        yield {
            "stage": stage.stage,
            "start_s": start_s,
            "end_s": start_s + stage.planned_s,
            "instances": stage.planned_instances,
            "gpus_per_trial": stage.gpus_per_trial,
        }
        start_s += stage.planned_s


def costs(submission: Submission, result: Result | None) -> dict[str, Any]:
    """The bill so far, against the plan and the cap."""
    summary = submission.summary
    if result is None:
        return {
            "cost_usd": summary.cost_usd,
            "planned_cost_usd": summary.planned_cost_usd,
            "max_cost_usd": summary.max_cost_usd,
            "forecast_cost_usd": plain(summary.forecast_cost_usd),
            "profiling_cost_usd": 0.0,
            "head_cost_usd": 0.0,
            "bill": [],
            "paid": {},
            "stages": [],
            "instances": [],
        }
    spent = [_stage_cost(stage) for stage in result.stages]
    return {
        "cost_usd": result.actual_cost_usd,
        "planned_cost_usd": plain(result.planned_cost_usd),
        "max_cost_usd": plain(result.max_cost_usd),
        "forecast_cost_usd": plain(summary.forecast_cost_usd),
        "profiling_cost_usd": result.profiling_cost_usd,
        "head_cost_usd": result.head_cost_usd,
        "bill": plain(result.bill),
        "paid": plain(asdict(result.paid)),
        "stages": spent,
        "instances": plain(result.instances),
    }


def _stage_cost(stage: StageResult) -> dict[str, Any]:
    return {
        "stage": stage.stage,
        "planned_cost_usd": plain(stage.planned_cost_usd),
        "actual_cost_usd": plain(stage.actual_cost_usd),
    }


def decisions(result: Result | None) -> dict[str, Any]:
    """What was decided at each SYNC, and how limits were changed."""
    if result is None:
        return {"items": [], "extensions": []}
    return {"items": plain(result.decisions), "extensions": extensions(result)}


def extension_view(extension: Extension) -> dict[str, Any]:
    """What other limits change."""
    return {
        "before": _outlook(extension.before),
        "after": _outlook(extension.after),
        "stage": extension.stage,
        "added_s": plain(extension.added_s),
        "added_usd": plain(extension.added_usd),
        "applied": extension.applied,
    }


def _outlook(outlook: Outlook) -> dict[str, Any]:
    found: dict[str, Any] = plain(outlook)
    return found
