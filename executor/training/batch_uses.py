"""What an iteration tells of its batches: few stretches, however many decisions there were."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from rubberband.adaptive import BatchUse

MOST_USES = 16
"""Of an iteration; neighbours of one size are put together beyond that."""


def append(uses: list[BatchUse], use: BatchUse) -> None:
    """Add a stretch; where there are many, put the shortest two neighbours together, if possible of one size."""
    uses.append(use)
    if len(uses) > MOST_USES:
        pairs = [(_size(one) != _size(next_one), one.steps + next_one.steps) for one, next_one in pairwise(uses)]
        at = pairs.index(min(pairs))
        uses[at : at + 2] = [_joined(uses[at], uses[at + 1])]


def _size(use: BatchUse) -> tuple[int, int, int]:
    return use.batch_size, use.per_gpu, use.accumulation


def _joined(first: BatchUse, second: BatchUse) -> BatchUse:
    """Both in steps of the size that took in more samples, which are counted right, like their progress and time."""
    samples = first.steps * first.batch_size, second.steps * second.batch_size
    main = first if samples[0] > samples[1] else second
    steps = max(1, round(sum(samples) / main.batch_size))
    return replace(
        main,
        steps=steps,
        duration_s=first.duration_s + second.duration_s,
        step_s=(first.steps * first.step_s + second.steps * second.step_s) / steps,
        noise_scale=second.noise_scale,
        efficiency=(samples[0] * first.efficiency + samples[1] * second.efficiency) / sum(samples),
    )
