"""How a trial's batch size, its division among the workers, and its use of the machine changed over its training.

All is from its reports. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from rubberband.executor.core.events import Gang
from rubberband.executor.core.state import GangRun
from rubberband.executor.core.trial_state import TrialReport
from rubberband.values.balance import BalanceUse
from rubberband.values.machine_use import MachineUse

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# Copies of dataclasses: as another one with the same fields, and as plain values.

_Kind = TypeVar("_Kind", bound="DataclassInstance")
_ATOMS = frozenset({float, int, str, bool, type(None)})


def copied(kind: type[_Kind], source: object, **changed: object) -> _Kind:
    """Return a `kind` with the fields of `source` that have the same names, and the changed ones."""
    same = {name: getattr(source, name) for name in kind.__dataclass_fields__ if name not in changed}
    return kind(**same, **changed)


def plain_of(value: Any) -> Any:
    """Return plain values, like `dataclasses.asdict` but without copying every number."""
    if type(value) in _ATOMS:
        return value
    if isinstance(value, tuple | list):
        return [plain_of(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain_of(item) for key, item in value.items()}
    if is_dataclass(value):
        return {name: plain_of(getattr(value, name)) for name in value.__dataclass_fields__}
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStretch:
    """A stretch of a trial's training at one batch size; the symbols are those of `rubberband.values.adaptive`."""

    stage: int
    start_s: float
    """From the start of the run. Stretches of one iteration follow each other, up to its report."""
    end_s: float
    progress: float
    """Iterations done at its end; within an iteration, in proportion to the samples' efficiency."""
    instances: int
    gpus: int
    batch_size: int
    per_gpu: int
    accumulation: int
    steps: int
    noise_scale: float | None
    """phi at its end; None without an estimate."""
    efficiency: float
    """EFFICIENCY(M) at its end (Pollux, eq. 6)."""
    throughput: float | None
    """Samples per second (eq. 7); None if its steps took no measurable time."""
    goodput: float | None
    """Samples per second, counted by their efficiency (eq. 5)."""


def batch_history(reports: Sequence[TrialReport], started_at: float) -> tuple[BatchStretch, ...]:
    """Return the stretches of all `reports`, in order; empty if the batch is fixed. `started_at` is that of the run."""
    stretches: list[BatchStretch] = []
    reported_at = started_at
    for report in reports:
        if report.batches:
            stretches += _stretches(report, reported_at, started_at)
        reported_at = report.reported_at
    return tuple(stretches)


def _stretches(report: TrialReport, not_before: float, started_at: float) -> list[BatchStretch]:
    counted = [use.steps * use.batch_size * use.efficiency for use in report.batches]
    whole, so_far = sum(counted), 0.0
    later_s = sum(use.duration_s for use in report.batches)
    stretches = []
    for use, share in zip(report.batches, counted, strict=True):
        start_at = max(report.reported_at - later_s, not_before)
        later_s, so_far = later_s - use.duration_s, so_far + share
        end_at = max(report.reported_at - max(later_s, 0.0), start_at)
        progress = report.iterations - 1 + (so_far / whole if whole > 0.0 else 1.0)
        throughput = use.throughput if use.step_s > 0.0 else None
        stretches.append(
            copied(
                BatchStretch,
                use,
                stage=report.stage,
                start_s=start_at - started_at,
                end_s=end_at - started_at,
                progress=progress,
                throughput=throughput,
                goodput=None if throughput is None else throughput * use.efficiency,
            )
        )
    return stretches


# How the workers of a trial divided its batches over its training, from its reports. Pure.


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceStretch(BalanceUse):
    """The shares and times of the workers over an iteration in which they were unequal."""

    stage: int
    iterations: int
    """Iterations done at its end."""
    end_s: float
    """Its report, from the start of the run."""
    workers: Gang
    """The slot of each worker, by rank."""


def balance_history(
    reports: Sequence[TrialReport], uses: Iterable[GangRun], started_at: float
) -> tuple[BalanceStretch, ...]:
    """Return the stretches of unequal workers in `reports`, in order; empty where all are equal.

    `uses` are the trial's stretches on gangs, `started_at` is the start of the run.
    """
    balanced = [report for report in reports if report.balance is not None]
    gangs = list(uses) if balanced else []
    return tuple(
        copied(
            BalanceStretch,
            report.balance,
            stage=report.stage,
            iterations=report.iterations,
            end_s=report.reported_at - started_at,
            # The latest gang that had begun.
            workers=next((use.gang for use in reversed(gangs) if use.started_at <= report.reported_at), ()),
        )
        for report in balanced
    )


# How a trial used its machine over its training, from its reports. Pure.


@dataclass(frozen=True, slots=True, kw_only=True)
class UseStretch(MachineUse):
    """The use of machines over a stretch of a trial's training: the mean over the workers of its gang."""

    stage: int
    end_s: float
    """From the start of the run."""


def use_history(reports: Sequence[TrialReport], started_at: float) -> tuple[UseStretch, ...]:
    """Return the stretches in which the use was measured, in order. `started_at` is the start of the run."""
    return tuple(
        copied(UseStretch, use, stage=report.stage, end_s=report.reported_at - started_at - use.ago_s)
        for report in reports
        for use in report.use
    )
