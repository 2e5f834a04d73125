"""A result in other forms: rows of trials or reports, for data frames and files; as a notebook shows it; as a study."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from rubberband import markup
from rubberband.errors import InputError
from rubberband.executor.core.trial_state import TrialStatus
from rubberband.executor.result.parts import Busy, StageResult, TrialResult
from rubberband.executor.result.result import Result, best_iteration
from rubberband.installation import require
from rubberband.spec.space import canonical
from rubberband.states import REHEARSAL
from rubberband.units import counted, duration, format_usd, gpus_each, in_unit
from rubberband.values.ranking import Merit

if TYPE_CHECKING:
    import pandas
    from optuna import Study
    from optuna.distributions import BaseDistribution

Row = dict[str, Any]
_OF_TRIALS = (
    "trial",
    "status",
    "iterations",
    "ended",
    "feasible",
    "repeat_of",
    "mean",
    "spread",
    "repeats",
    "stopped_s",
    "failures",
    "failure",
    "bracket",
    "gpu_s",
    "cost_usd",
    "checkpoint",
    "elapsed_s",
)
"""Columns that are no metrics; a metric of one of these names is in `metrics.NAME`."""


def trial_rows(result: Result) -> list[Row]:
    """Return a row for each trial: `config.NAME`, metrics of its latest report, iterations, and its share of the bill.

    `gpu_s` is the time in which GPUs were its own, start-up included, and a share of a GPU counts as that.
    """
    gpu_s, cost_usd = defaultdict[int, float](float), defaultdict[int, float](float)
    for use, usd_per_s in paid_uses(result):
        gpu_s[use.trial] += (use.end_s - use.start_s) / result.trials_per_gpu
        cost_usd[use.trial] += usd_per_s * (use.end_s - use.start_s)
    metrics = _metrics(result, (trial.metrics for trial in result.trials))
    several = any(trial.bracket is not None for trial in result.trials)
    rows = []
    for trial in result.trials:
        row: Row = {"trial": trial.trial, "status": trial.status}
        row |= {"bracket": trial.bracket} if several else {}
        row |= {f"config.{name}": value for name, value in _flat(trial.configuration)}
        row |= {_column(name): trial.metrics.get(name) for name in metrics}
        row |= {"iterations": trial.iterations, "ended": trial.ended, "stopped_s": trial.stopped_s}
        row |= {} if trial.feasible is None else {"feasible": trial.feasible}
        if trial.standing is not None and result.repeats > 1:
            of = trial.standing
            configuration = trial.trial // result.repeats
            row |= {"repeat_of": configuration, "mean": of.mean, "spread": of.spread, "repeats": of.repeats}
        row |= {"failures": trial.failures, "failure": trial.failure}
        row |= {"gpu_s": gpu_s[trial.trial], "cost_usd": cost_usd[trial.trial]}
        row["checkpoint"] = None if trial.checkpoint is None else trial.checkpoint.url
        rows.append(row)
    return _aligned(rows)


def report_rows(result: Result) -> list[Row]:
    """Return a row for each report of each trial: iterations done, seconds from the start, and its metrics."""
    metrics = _metrics(result, (found for trial in result.trials for _, _, found in trial.curve))
    return [
        {"trial": trial.trial, "iterations": iterations, "elapsed_s": at_s}
        | {_column(name): found.get(name) for name in metrics}
        for trial in result.trials
        for at_s, iterations, found in trial.curve
    ]


def _metrics(result: Result, reports: Iterable[Mapping[str, float]]) -> list[str]:
    """Return all metrics in the order in which they are first reported, the experiment's own first."""
    return list(dict.fromkeys([result.metric, *(name for metrics in reports for name in metrics)]))


def _column(metric: str) -> str:
    return f"metrics.{metric}" if metric in _OF_TRIALS or metric.startswith("config.") else metric


def _flat(configuration: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a configuration; those of a mapping within it as `outer.inner`."""
    for name, value in configuration.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _aligned(rows: Sequence[Row]) -> list[Row]:
    """Give every row the columns of all, as conditional parameters are not in every configuration."""
    columns: dict[str, None] = {}
    for row in rows:
        if any(name not in columns for name in row):
            columns = dict.fromkeys(_merged(list(columns), list(row)))
    return [{name: row.get(name) for name in columns} for row in rows]


def _merged(known: list[str], names: list[str]) -> list[str]:
    """Return `known` with each new name right after the one that it follows in `names`."""
    merged, last = list(known), ""
    for name in names:
        if name not in merged:
            merged.insert(merged.index(last) + 1 if last else 0, name)
        last = name
    return merged


def paid_uses(result: Result) -> Iterator[tuple[Busy, float]]:
    """Iterate over the stretches in which trials held GPUs, with what a second of each costs, in US dollars.

    An instance's cost is divided by the GPU time of its trials; the rest (idle instances, the head) by all GPU time, so
    that the shares add up to the bill once a trial has trained.
    """
    held_s: dict[str, float] = {}
    for use in result.busy:
        held_s[use.instance] = held_s.get(use.instance, 0.0) + use.end_s - use.start_s
    own = {one.instance: one.cost_usd for one in result.instances if held_s.get(one.instance) and one.cost_usd > 0.0}
    rest_usd, all_s = result.actual_cost_usd - sum(own.values()), sum(held_s.values())
    for use in result.busy:
        if held_s[use.instance] > 0.0:
            yield use, own.get(use.instance, 0.0) / held_s[use.instance] + rest_usd / all_s


def to_dataframe(rows: Sequence[Row]) -> pandas.DataFrame:
    """Return rows as a data frame. Raises InputError without pandas."""
    require("to_dataframe()", "pandas")
    import pandas

    return pandas.DataFrame(rows)


def to_csv(rows: Sequence[Row]) -> str:
    """Return rows as CSV with a header; lists are JSON texts, and what is missing is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else ["trial"], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def to_json(rows: Sequence[Row]) -> str:
    """Return rows as a JSON array of objects."""
    return json.dumps(rows, indent=2, ensure_ascii=False, allow_nan=False, default=str) + "\n"


def to_parquet(rows: Sequence[Row]) -> bytes:
    """Return rows as a Parquet file. A column of several types is text. Raises InputError without pyarrow."""
    require("Parquet", "pyarrow")
    import pyarrow
    from pyarrow import parquet

    columns = {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table({name: _of_one_type(values) for name, values in columns.items()}), buffer)
    return buffer.getvalue()


def _of_one_type(values: list[Any]) -> list[Any]:
    kinds = {float if type(value) in (int, float) else type(value) for value in values if value is not None}
    if len(kinds) <= 1 and not kinds & {list, dict}:
        return [float(value) for value in values] if _mixes_numbers(values) else values
    return [None if value is None else str(_cell(value)) for value in values]


def _mixes_numbers(values: list[Any]) -> bool:
    return {type(value) for value in values} == {int, float}


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list | dict | bool) else value


def best_of(result: Result) -> TrialResult:
    """Return the best trial. Raises InputError if none has reported yet, and for a rehearsal."""
    if result.rehearsal:
        raise InputError(
            f"experiment {result.name!r} has no best trial: {REHEARSAL}; use another provider than virtual"
        )
    if result.best is None:
        raise InputError(
            f"experiment {result.name!r} ({result.outcome}) has no best trial: none has reported; "
            f"`rubberband logs {result.name}` shows why"
        )
    return result.best


def trial_of(result: Result, trial: int | None) -> TrialResult:
    """Return a trial by its number, by default the best one. Raises InputError if there is none."""
    if trial is None:
        return best_of(result)
    if not 0 <= trial < len(result.trials):
        raise InputError(f"experiment {result.name!r} has no trial {trial}; it has 0 to {len(result.trials) - 1}")
    return result.trials[trial]


def trial_at(result: Result, trial: TrialResult, iteration: int | Literal["best", "latest"]) -> TrialResult:
    """Return a trial as it was after an iteration whose checkpoint is kept.

    Raises InputError if that was not kept.
    """
    if iteration == "latest":
        return trial
    curve = {done: metrics for _, done, metrics in trial.present_curve}
    done = best_iteration(result.ranking, curve.items()) if iteration == "best" else iteration
    saved = next((one for one in trial.checkpoints if one.iterations == done and done in curve), None)
    if saved is not None:
        return replace(trial, checkpoint=saved.checkpoint, iterations=saved.iterations, metrics=curve[saved.iterations])
    kept = " and ".join(str(one.iterations) for one in trial.checkpoints) or "none"
    what = f"trial {trial.trial} was best after {done} iterations" if iteration == "best" else f"iteration {iteration}"
    if done is None:
        what = f"trial {trial.trial} has evaluated no iteration"
    fix = "; set resources.keep: best to keep it from the start" if iteration == "best" else ""
    raise InputError(f"{what}: its checkpoint was not kept (kept: {kept}){fix}")


# A result as `print` and a notebook show it: outcome, best configuration, stages and best trials. Pure.

_MOST_TRIALS = 10
_MOST_STAGES = 5


def result_text(result: Result) -> str:
    """Return the result in about ten lines."""
    lines = [f"{result.name}: {_outcome(result)}", *_lines(result)]
    if result.best is not None:
        settings = " ".join(f"{name}={_value(value)}" for name, value in _flat(result.best.configuration))
        lines.append(f"configuration: {settings}")
    for stage in result.stages[:_MOST_STAGES]:
        took = "not started" if stage.actual_s is None else duration(stage.actual_s)
        work = f"{counted(stage.trials, 'trial')} x {counted(stage.iterations, 'iteration')}"
        lines.append(f"{stage.title}: {work}, {took} (planned {duration(stage.planned_s)})")
    if (more := len(result.stages) - _MOST_STAGES) > 0:
        lines.append(f"and {counted(more, 'stage')} more; `rubberband report {result.name}` shows all")
    return in_unit("\n".join(lines), result.unit)


def result_html(result: Result) -> str:
    """Return the result as HTML."""
    tables = [_stages(result), _trials(result)]
    card = markup.card(f"{result.name}: {_outcome(result)}", markup.lines(_lines(result)), *tables)
    return in_unit(card, result.unit)


def _lines(result: Result) -> list[str]:
    return [*_failures(result), _cost(result), *([result.reason] if result.reason else []), *_best(result)]


def _failures(result: Result) -> list[str]:
    """Return how many trials failed, and why the first one did."""
    failed = [trial for trial in result.trials if trial.status == "failed"]
    if not failed:
        return []
    cause = (failed[0].failure or "").partition("; its last lines: ")[0]
    if cause and cause in result.reason:
        return []
    return [f"{len(failed)} of {counted(len(result.trials), 'trial')} failed; trial {failed[0].trial}: {cause}"]


def _outcome(result: Result) -> str:
    took = duration(result.actual_jct_s)
    if result.deadline_s is None or result.outcome != "done":
        return f"{'not finished' if result.outcome == 'unfinished' else result.outcome}, {took}"
    return f"done in {took}, deadline {result.deadline} {'missed' if result.late else 'met'}"


def _cost(result: Result) -> str:
    charged = "" if result.is_charged else "; nothing was charged"
    limit = "" if result.asked_max_cost_usd is None else f" of {format_usd(result.asked_max_cost_usd)}"
    return f"{format_usd(result.whole_cost_usd)}{limit}, planned {format_usd(result.whole_planned_usd)}{charged}"


def _best(result: Result) -> list[str]:
    best = result.best
    if best is None:
        return [REHEARSAL if result.rehearsal else "no trial has reported"]
    metrics = {result.metric: best.metrics[result.metric], **best.metrics}
    found = ", ".join(f"{name}={_value(value)}" for name, value in metrics.items())
    lines = [f"best: {found} (trial {best.trial}, {counted(best.iterations, 'iteration')})"]
    lines += [result.infeasible] if result.infeasible else []
    if result.also:
        objectives = [f"{result.metric} ({result.mode})", *(one.title for one in result.also)]
        trials = ", ".join(str(trial.trial) for trial in result.pareto[:_MOST_TRIALS])
        more = len(result.pareto) - _MOST_TRIALS
        lines.append(f"best in {' and '.join(objectives)}: trials {trials}{f' and {more} more' if more > 0 else ''}")
    return lines


def _stages(result: Result) -> str:
    each = f"{result.place}s per trial"
    header = ("stage", "trials", "iterations", "instances", each, "time", "planned", "USD", "planned")
    return markup.table(header, [_stage(stage) for stage in result.stages])


def _stage(stage: StageResult) -> list[str]:
    is_begun = stage.actual_s is not None
    return [
        stage.name,
        str(stage.trials),
        str(stage.iterations),
        f"{stage.instances} / {stage.planned_instances}",
        gpus_each(stage.gpus_per_trial, stage.trials_per_gpu),
        duration(stage.actual_s or 0.0) if is_begun else "",
        duration(stage.planned_s),
        f"{stage.actual_cost_usd or 0.0:.4f}" if is_begun else "",
        f"{stage.planned_cost_usd:.4f}",
    ]


def _trials(result: Result) -> str:
    ranking = result.ranking
    most = max((trial.iterations for trial in result.trials), default=0)

    def rank(trial: TrialResult) -> tuple[bool, int, Merit]:
        return trial != result.best, most - trial.iterations, ranking.merit(trial.metrics)

    trials = sorted(result.trials, key=rank)[:_MOST_TRIALS]
    metrics = () if result.rehearsal else (result.metric,)
    names = list(dict.fromkeys(name for trial in trials for name in trial.configuration))
    rows = [
        [
            str(trial.trial),
            *(_value(trial.metrics[name]) if name in trial.metrics else "" for name in metrics),
            str(trial.iterations),
            trial.status_text,
            *(_value(trial.configuration[name]) if name in trial.configuration else "" for name in names),
        ]
        for trial in trials
    ]
    return markup.table(("trial", *metrics, "iterations", "status", *names), rows, words=(2 + len(metrics),))


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


# A result as an Optuna study, for Optuna's charts, importances and dashboard. The study has no search space: the range
# of a parameter is that of the values that were tried.

_STATES = {
    TrialStatus.COMPLETED: "COMPLETE",
    TrialStatus.STOPPED: "PRUNED",
    TrialStatus.FAILED: "FAIL",
    TrialStatus.QUEUED: "WAITING",
}
"""Status of a trial -> its state in Optuna; the others are running."""
_WIDE = 100.0
"""Largest value over the smallest from which on a parameter counts as drawn on a logarithmic scale."""


def to_study(result: Result, storage: str | None = None) -> Study:
    """Return the study, kept at `storage` (an URL such as sqlite:///study.db) or in memory.

    A trial that was stopped early is pruned. Its reports are intermediate values by iterations; its other metrics, its
    GPU time and its share of the bill are user attributes. Raises InputError without Optuna, for a storage that cannot
    be written, and where it has a study of this name.
    """
    require("a study", "optuna")
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    try:
        rows = trial_rows(result)
        names = [name for name in rows[0] if _is_parameter(name)] if rows else []
        columns = {name: [row[name] for row in rows if row[name] is not None] for name in names}
        distributions = {name: _distribution(values) for name, values in columns.items()}
        categories = {name: _categories(columns[name]) for name in names if not _is_numeric(columns[name])}
        trials = [
            _frozen(result, trial, row, distributions, categories)
            for trial, row in zip(result.trials, rows, strict=True)
        ]
        study = optuna.create_study(
            storage=storage, study_name=result.name, direction="minimize" if result.mode == "min" else "maximize"
        )
        study.add_trials(trials)
    except optuna.exceptions.DuplicatedStudyError:
        raise InputError(f"{_shown(storage)} has a study {result.name!r} already; give another database") from None
    except (optuna.exceptions.StorageInternalError, SQLAlchemyError, ImportError, ValueError, OSError) as error:
        raise InputError(f"{_shown(storage)} cannot be written as a study: {' '.join(str(error).split())}") from None
    return study


def _shown(storage: str | None) -> str:
    """Return a storage without its password."""
    if storage is None:
        return "the result"
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        return make_url(storage).render_as_string(hide_password=True)
    except ArgumentError:
        return storage


def _is_parameter(column: str) -> bool:
    return column.startswith("config.")


def _is_numeric(values: Sequence[Any]) -> bool:
    return bool(values) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _distribution(known: Sequence[Any]) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not _is_numeric(known):
        return CategoricalDistribution(list(_categories(known).values()) or ["-"])
    low, high = min(known), max(known)
    is_log = low > 0 and high >= _WIDE * low
    if all(isinstance(value, int) for value in known):
        return IntDistribution(low, high, log=is_log)
    return FloatDistribution(low, high, log=is_log)


def _categories(values: Iterable[Any]) -> dict[str, Any]:
    """Return text of a value -> its category, in the order of the texts.

    That is the value itself, or all texts where Optuna would confuse two values: it takes 1 for true, and has no lists.
    """
    known = {canonical(value): value for value in values}
    own = {text: value if isinstance(value, bool | int | float | str) else text for text, value in known.items()}
    return dict(sorted(own.items() if len(set(own.values())) == len(own) else zip(own, own, strict=True)))


def _frozen(
    result: Result,
    trial: TrialResult,
    row: Row,
    distributions: Mapping[str, BaseDistribution],
    categories: Mapping[str, Mapping[str, Any]],
) -> Any:
    """Return the trial as Optuna keeps it."""
    from optuna.trial import TrialState, create_trial

    has = [name for name in distributions if row[name] is not None]
    params = {name: categories[name][canonical(row[name])] if name in categories else row[name] for name in has}
    value = trial.metrics.get(result.metric)
    value = value if value is not None and math.isfinite(value) else None
    state = _STATES.get(TrialStatus(trial.status), "RUNNING")
    if state == "COMPLETE" and value is None:  # Optuna has no complete trial without a value
        state = "FAIL"
    if state == "FAIL":
        value = None
    return create_trial(
        state=TrialState[state],
        value=value,
        params={name.removeprefix("config."): value for name, value in params.items()},
        distributions={name.removeprefix("config."): distributions[name] for name in has},
        intermediate_values={
            done: metrics[result.metric]
            for _, done, metrics in trial.present_curve
            if math.isfinite(metrics.get(result.metric, math.nan))
        },
        user_attrs={
            name: value
            for name, value in row.items()
            if value is not None and name not in ("trial", "status", result.metric) and not _is_parameter(name)
        },
    )
