"""A result as a notebook shows it: outcome, best configuration, stages and best trials. Pure."""

from __future__ import annotations

import json
from typing import Any

from rubberband import markup
from rubberband.executor.result import Result, StageResult, TrialResult
from rubberband.units import format_duration, format_usd

_MOST_TRIALS = 10


def result_html(result: Result) -> str:
    """Return the result as HTML."""
    told = [_cost(result), *([result.reason] if result.reason else [])]
    tables = [_stages(result), _trials(result)]
    return markup.card(f"{result.name}: {_outcome(result)}", markup.lines([*told, *_best(result)]), *tables)


def _outcome(result: Result) -> str:
    took = format_duration(round(result.actual_jct_s))
    if result.deadline_s is None or result.outcome != "done":
        return f"{'not finished' if result.outcome == 'unfinished' else result.outcome}, {took}"
    return f"done in {took}, deadline {format_duration(result.deadline_s)} {'missed' if result.late else 'met'}"


def _cost(result: Result) -> str:
    charged = "" if result.is_charged else "; nothing was charged"
    limit = "" if result.max_cost_usd is None else f" of {format_usd(result.max_cost_usd)}"
    return f"{format_usd(result.actual_cost_usd)}{limit}, planned {format_usd(result.planned_cost_usd)}{charged}"


def _best(result: Result) -> list[str]:
    best = result.best
    if best is None:
        return ["no trial has reported"]
    metrics = {result.metric: best.metrics[result.metric], **best.metrics}
    found = ", ".join(f"{name}={_value(value)}" for name, value in metrics.items())
    told = [f"best: {found} (trial {best.trial}, {best.iterations} iterations)"]
    if result.also:
        objectives = [f"{result.metric} ({result.mode})", *(one.title for one in result.also)]
        trials = ", ".join(str(trial.trial) for trial in result.pareto[:_MOST_TRIALS])
        more = len(result.pareto) - _MOST_TRIALS
        told.append(f"best in {' and '.join(objectives)}: trials {trials}{f' and {more} more' if more > 0 else ''}")
    return told


def _stages(result: Result) -> str:
    header = ("stage", "trials", "iterations", "instances", "GPUs per trial", "time", "planned", "USD", "planned")
    return markup.table(header, [_stage(stage) for stage in result.stages])


def _stage(stage: StageResult) -> list[str]:
    is_begun = stage.actual_s is not None
    return [
        stage.name,
        str(stage.trials),
        str(stage.iterations),
        f"{stage.instances} / {stage.planned_instances}",
        str(stage.gpus_per_trial),
        format_duration(round(stage.actual_s or 0.0)) if is_begun else "",
        format_duration(round(stage.planned_s)),
        f"{stage.actual_cost_usd or 0.0:.4f}" if is_begun else "",
        f"{stage.planned_cost_usd:.4f}",
    ]


def _trials(result: Result) -> str:
    sign = -1.0 if result.mode == "max" else 1.0
    most = max((trial.iterations for trial in result.trials), default=0)

    def rank(trial: TrialResult) -> tuple[bool, int, float]:
        metric = trial.metrics.get(result.metric)
        return trial != result.best, most - trial.iterations, float("inf") if metric is None else sign * metric

    trials = sorted(result.trials, key=rank)[:_MOST_TRIALS]
    names = list(dict.fromkeys(name for trial in trials for name in trial.configuration))
    rows = [
        [
            str(trial.trial),
            _value(trial.metrics[result.metric]) if result.metric in trial.metrics else "",
            str(trial.iterations),
            trial.status,
            *(_value(trial.configuration[name]) if name in trial.configuration else "" for name in names),
        ]
        for trial in trials
    ]
    return markup.table(("trial", result.metric, "iterations", "status", *names), rows, words=(3,))


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
