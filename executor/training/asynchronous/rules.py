"""Refusals of trials that cannot be trained asynchronously, in one line with a fix. It does not import torch."""

from __future__ import annotations

from rubberband.executor.training.hooks import has_override
from rubberband.executor.training.torch_trial import TorchTrial
from rubberband.values.training import AsyncTraining

_ELSE = "or set training.mode to sync"


def fault_of_class(target: type[TorchTrial]) -> str | None:
    """Return why trials of a class cannot be trained asynchronously; None if they can."""
    if has_override(target, "step"):
        return (
            "overrides step(), which needs the gradients of all workers, and training.mode: async has one optimizer "
            f"on the parameter servers; write loss() in place of step(), {_ELSE}"
        )
    if has_override(target, "on_step"):
        return (
            "overrides on_step(), which runs after every optimizer step, and with training.mode: async the parameter "
            f"servers take them; leave it out, {_ELSE}"
        )
    return None


def fault_of_words(trial: TorchTrial, training: AsyncTraining, workers: int) -> str | None:
    """Return which word of a trial cannot be kept by training asynchronously on `workers`; None if all can."""
    if trial.precision == "fp16":
        return f'precision = "fp16" scales losses by steps that all workers take; use "bf16" or "32", {_ELSE}'
    if trial.gradient_compression is not None:
        return f"gradient_compression is for gangs that average gradients; leave it out, {_ELSE}"
    if trial.static_graph or trial.find_unused_parameters:
        word = "static_graph" if trial.static_graph else "find_unused_parameters"
        return f"{word} is for DistributedDataParallel, which is not used; leave it out, {_ELSE}"
    if trial.gradient_clip_norm is not None and training.max_staleness == 0 and workers > 1:
        return (
            "gradient_clip_norm needs the gradient of all workers, and with max_staleness: 0 the servers add them up; "
            f"leave it out, raise training.max_staleness, {_ELSE}"
        )
    return None
