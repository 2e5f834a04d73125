"""Adaptive batch sizes in words and figures: what the headline and the table say of a trial. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rubberband.executor.result import BatchStretch, TrialResult
from rubberband.views.words import counted


def change(first: float, last: float) -> str:
    """`64 -> 512`, or `64` where it stayed; as many digits as say something."""
    before, after = amount(first), amount(last)
    return after if before == after else f"{before} -> {after}"


def amount(value: float) -> str:
    """A noise scale, a speed: as many digits as say something."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def noise_scales(stretches: Sequence[BatchStretch]) -> list[float]:
    """Those that were known."""
    return [stretch.noise_scale for stretch in stretches if stretch.noise_scale is not None]


def first_and_last(
    stretches: Sequence[BatchStretch], value: Callable[[BatchStretch], float | None]
) -> tuple[float, float] | None:
    """The mean throughput or goodput over time, of all training at the first batch and GPUs, and at the last ones.

    None if none was measured.
    """
    measured = [stretch for stretch in stretches if stretch.throughput is not None]
    if not measured:
        return None
    return _mean(measured, measured[0], value), _mean(measured, measured[-1], value)


def _mean(measured: Sequence[BatchStretch], like: BatchStretch, value: Callable[[BatchStretch], float | None]) -> float:
    alike = [s for s in measured if (s.gpus, s.batch_size) == (like.gpus, like.batch_size)]
    times_s = [max(1, s.steps) * s.batch_size / (s.throughput or 1.0) for s in alike]
    return math.fsum(time_s * (value(s) or 0.0) for time_s, s in zip(times_s, alike, strict=True)) / math.fsum(times_s)


def throughput(stretch: BatchStretch) -> float | None:
    """Samples per second."""
    return stretch.throughput


def goodput(stretch: BatchStretch) -> float | None:
    """Samples per second, counted by their efficiency."""
    return stretch.goodput


def gain(values: tuple[float, float] | None) -> str:
    """How many times the first the last one is; `-` where there is none."""
    return f"{values[1] / values[0]:.1f}x" if values and values[0] > 0.0 else "-"


def mean_efficiency(stretches: Sequence[BatchStretch]) -> float:
    """The part of all its samples that counted."""
    samples = [stretch.steps * stretch.batch_size for stretch in stretches]
    counted_for = [count * stretch.efficiency for count, stretch in zip(samples, stretches, strict=True)]
    return math.fsum(counted_for) / sum(samples) if sum(samples) else 1.0


def batch_line(trial: TrialResult) -> str:
    """How the trial's batch came to change, for a headline; empty where it did not."""
    stretches = trial.batches
    if not stretches or stretches[0].batch_size == stretches[-1].batch_size:
        return ""
    first, last = stretches[0], stretches[-1]
    gpus = counted(last.gpus, "GPU") if first.gpus == last.gpus else f"{first.gpus} -> {last.gpus} GPUs"
    parts = [f"batch size: {change(first.batch_size, last.batch_size)} on {gpus}"]
    noise, faster = noise_scales(stretches), first_and_last(stretches, throughput)
    parts += [f"noise scale {change(noise[0], noise[-1])}"] if noise else []
    better = gain(first_and_last(stretches, goodput))
    parts += [f"{gain(faster)} the samples/s, {better} the goodput"] if faster else []
    return "; ".join(parts)
