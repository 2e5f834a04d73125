"""Which batches a trial may choose among: what the user allows and what the trial itself says, checked.

Which of them it chooses is the agent's business.
"""

from __future__ import annotations

from rubberband.adaptive import MAX_GROWTH, AdaptiveBatch, BatchLimits
from rubberband.executor.training.failures import TrialFailure
from rubberband.planner.goodput.choice import candidates


def resolve_limits(
    batch: AdaptiveBatch, *, batch_size: int, per_gpu: int | None, num_samples: int, samples_per_iteration: int
) -> BatchLimits:
    """The limits of one trial, whose own batch size and limit per GPU stand in for what the user does not say.

    Where M0 is not, no batch is larger than the training set of `num_samples`, or than an iteration, which would have
    no step then. Raises TrialFailure where no size is left.
    """
    initial = batch.initial or batch_size
    whose = "batch.initial" if batch.initial else "the trial's own batch size"
    if initial > num_samples:
        raise refused(
            f"{whose} ({initial}) is more than the {num_samples} samples of train_dataset(); "
            f"set batch.initial to {num_samples} or less"
        )
    largest = MAX_GROWTH * initial if batch.max is None else batch.max
    if largest < initial:
        raise refused(f"batch.max ({largest}) is less than {whose} ({initial}); raise it, or lower batch.initial")
    return BatchLimits(
        initial=initial,
        max=max(initial, min(largest, num_samples, samples_per_iteration)),
        max_per_gpu=batch.max_per_gpu or per_gpu,
        accumulation=batch.accumulation,
    )


def check_gang(limits: BatchLimits, num_workers: int, least_per_gpu: int) -> None:
    """Raises TrialFailure where no batch can be split over the workers, each of which needs `least_per_gpu` samples."""
    try:
        candidates(limits, num_workers, least_per_gpu=least_per_gpu)
    except ValueError as error:
        raise refused(str(error)) from None


def refused(line: str) -> TrialFailure:
    """The failure of a trial whose user asked for what cannot be."""
    return TrialFailure("raised", line)
