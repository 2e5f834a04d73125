"""A trial's batch sizes over time and progress: what its reports told, laid out along the run. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rubberband.adaptive import BatchUse
from rubberband.executor.state import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStretch:
    """A stretch of a trial's training at one batch size; the symbols are those of `rubberband.adaptive`."""

    stage: int
    start_s: float
    """From the start of the run. Stretches of one iteration follow each other, up to its report."""
    end_s: float
    progress: float
    """Iterations done at its end; those of a stretch within one are in proportion to what its samples counted for."""
    instances: int
    gpus: int
    batch_size: int
    per_gpu: int
    accumulation: int
    steps: int
    noise_scale: float | None
    """phi at its end; None as long as there was no estimate."""
    efficiency: float
    """EFFICIENCY(M) at its end (Pollux, eq. 6)."""
    throughput: float | None
    """Samples per second (eq. 7); None if its steps took no time that could be measured."""
    goodput: float | None
    """Samples per second, counted by their efficiency (eq. 5)."""


def batch_history(reports: Sequence[Report], started_at: float) -> tuple[BatchStretch, ...]:
    """The stretches of all `reports`, in order; empty where the batch is fixed. `started_at`: of the run."""
    stretches: list[BatchStretch] = []
    told_at = started_at
    for report in reports:
        if report.batches:
            stretches += _stretches(report, told_at, started_at)
        told_at = report.reported_at
    return tuple(stretches)


def _stretches(report: Report, not_before: float, started_at: float) -> list[BatchStretch]:
    counted = [use.steps * use.batch_size * use.efficiency for use in report.batches]
    whole, so_far = sum(counted), 0.0
    later_s = sum(use.duration_s for use in report.batches)
    found = []
    for use, share in zip(report.batches, counted, strict=True):
        start_at = max(report.reported_at - later_s, not_before)
        later_s, so_far = later_s - use.duration_s, so_far + share
        end_at = max(report.reported_at - max(later_s, 0.0), start_at)
        progress = report.iterations - 1 + (so_far / whole if whole > 0.0 else 1.0)
        found.append(_stretch(use, report.stage, start_at - started_at, end_at - started_at, progress))
    return found


def _stretch(use: BatchUse, stage: int, start_s: float, end_s: float, progress: float) -> BatchStretch:
    throughput = use.throughput if use.step_s > 0.0 else None
    return BatchStretch(
        stage=stage,
        start_s=start_s,
        end_s=end_s,
        progress=progress,
        instances=use.instances,
        gpus=use.gpus,
        batch_size=use.batch_size,
        per_gpu=use.per_gpu,
        accumulation=use.accumulation,
        steps=use.steps,
        noise_scale=use.noise_scale,
        efficiency=use.efficiency,
        throughput=throughput,
        goodput=None if throughput is None else throughput * use.efficiency,
    )
