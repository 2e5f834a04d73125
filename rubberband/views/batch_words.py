"""Adaptive batch sizes in words and figures: what the headline and the table say of a trial. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rubberband.executor.batch_history import BatchStretch
from rubberband.executor.result import TrialResult
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


def throughputs(stretches: Sequence[BatchStretch]) -> list[float]:
    """Those that were measured."""
    return [stretch.throughput for stretch in stretches if stretch.throughput is not None]


def goodputs(stretches: Sequence[BatchStretch]) -> list[float]:
    """Those that were measured."""
    return [stretch.goodput for stretch in stretches if stretch.goodput is not None]


def gain(values: Sequence[float]) -> str:
    """How many times the first the last one is; `-` where there is none."""
    return f"{values[-1] / values[0]:.1f}x" if values and values[0] > 0.0 else "-"


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
    noise, fast, good = noise_scales(stretches), throughputs(stretches), goodputs(stretches)
    parts += [f"noise scale {change(noise[0], noise[-1])}"] if noise else []
    parts += [f"{gain(fast)} the samples/s, {gain(good)} the goodput"] if fast else []
    return "; ".join(parts)
