"""The table of adaptive batch sizes. Pure."""

from __future__ import annotations

from rubberband.executor.result import Result, TrialResult
from rubberband.views.batch_words import (
    amount,
    change,
    first_and_last,
    gain,
    goodput,
    mean_efficiency,
    noise_scales,
    throughput,
)
from rubberband.views.tables import Row, Table, ranked
from rubberband.views.words import counted


def batch_sizes(result: Result, most: int | None) -> Table:
    """One row a trial, best first; those beyond `most` are counted. No rows where the batch is fixed."""
    order = [trial for trial in ranked(result) if trial.batches]
    shown = order[:most]
    left = len(order) - len(shown)
    more = (f"{counted(left, 'more trial')} not shown.",) if left else ()
    return Table(
        title="Batch sizes, best trial first",
        header=("trial", "GPUs", "batch size", "noise scale", "efficiency", "samples/s", "gain", "goodput"),
        rows=tuple(_row(trial) for trial in shown),
        notes=(
            "From the first stretch of training to the last. Efficiency: the part of all its samples that counted.",
            "Samples/s: at the last batch size. Gain: against at the first; goodput: likewise, of what samples count.",
            *more,
        ),
    )


def _row(trial: TrialResult) -> Row:
    stretches = trial.batches
    first, last = stretches[0], stretches[-1]
    noise, speeds = noise_scales(stretches), first_and_last(stretches, throughput)
    return (
        str(trial.trial),
        change(first.gpus, last.gpus),
        change(first.batch_size, last.batch_size),
        change(noise[0], noise[-1]) if noise else "-",
        f"{100 * mean_efficiency(stretches):.0f} %",
        amount(speeds[1]) if speeds else "-",
        gain(speeds),
        gain(first_and_last(stretches, goodput)),
    )
