"""A result as an Optuna study, for Optuna's charts, importances and dashboard.

The study has no search space: the range of a parameter is that of the values that were tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from rubberband.errors import InputError
from rubberband.executor.core.state import TrialStatus
from rubberband.executor.result.result import Result, TrialResult
from rubberband.executor.result.rows import Row, trial_rows
from rubberband.installation import require
from rubberband.spec.space import canonical

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution

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
            for _, done, metrics in trial.curve
            if math.isfinite(metrics.get(result.metric, math.nan))
        },
        user_attrs={
            name: value
            for name, value in row.items()
            if value is not None and name not in ("trial", "status", result.metric) and not _is_parameter(name)
        },
    )
