"""How a trial's batch size changed over its training, from its reports. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rubberband.executor.copying import copied
from rubberband.executor.core.state import TrialReport


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
    found = []
    for use, share in zip(report.batches, counted, strict=True):
        start_at = max(report.reported_at - later_s, not_before)
        later_s, so_far = later_s - use.duration_s, so_far + share
        end_at = max(report.reported_at - max(later_s, 0.0), start_at)
        progress = report.iterations - 1 + (so_far / whole if whole > 0.0 else 1.0)
        throughput = use.throughput if use.step_s > 0.0 else None
        found.append(
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
    return found
