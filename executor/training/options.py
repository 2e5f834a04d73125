"""The words of a `TorchTrial` about its step, checked; and the optimizer and LR schedule that it builds.

A word or an object that cannot be used is a TrialFailure of one line, with the remedy.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar, get_args

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from rubberband.executor.training.hooks import accepts, override_of
from rubberband.executor.training.runner import refused
from rubberband.executor.training.torch_trial import PrecisionName, SchedulerStep, TorchTrial
from rubberband.units import shown

T = TypeVar("T")

_FLAGS = ("compile", "channels_last", "find_unused_parameters", "static_graph")


def check_words(trial: TorchTrial) -> None:
    """Raise TrialFailure for a value that a word cannot have. Called once the model is built, which may set them."""
    _check_among("precision", trial.precision, get_args(PrecisionName))
    _check_among("scheduler_step", trial.scheduler_step, get_args(SchedulerStep))
    _check_among("gradient_compression", trial.gradient_compression, (None, "bf16"))
    _check_among("cudnn_benchmark", trial.cudnn_benchmark, (None, False, True))
    for name in _FLAGS:
        _check_among(name, getattr(trial, name), (False, True))
    norm: Any = trial.gradient_clip_norm
    is_number = isinstance(norm, (int, float)) and not isinstance(norm, bool)
    if norm is not None and not (is_number and math.isfinite(norm) and norm > 0.0):
        raise refused(f"gradient_clip_norm={shown(norm)} is no positive number; use one such as 1.0, or None")


def _check_among(name: str, value: Any, allowed: Sequence[Any]) -> None:
    if not any(type(value) is type(each) and value == each for each in allowed):
        *others, last = map(repr, allowed)
        raise refused(f"{name}={shown(value)} is not known; use {', '.join(others)} or {last}")


class Group(Generic[T]):
    """An object that `build_optimizer` or `build_scheduler` returned, or several in a list, tuple or mapping."""

    def __init__(self, built: Any) -> None:
        self.built = built
        self._several: Mapping[Any, T] | None = None
        if isinstance(built, Mapping):
            self._several = dict(built)
        elif isinstance(built, (list, tuple)):
            self._several = dict(enumerate(built))
        self.members: list[T] = [built] if self._several is None else list(self._several.values())

    def state_dict(self) -> Any:
        """Return the state of the object, or those of several by name or number."""
        if self._several is None:
            return self.built.state_dict()
        return {name: each.state_dict() for name, each in self._several.items()}  # type: ignore[attr-defined]

    def load_state_dict(self, state: Any) -> None:
        """Restore what `state_dict` returned. Raises ValueError for that of other objects."""
        if self._several is None:
            self.built.load_state_dict(state)
            return
        if state.keys() != self._several.keys():
            raise ValueError(f"it has the states of {list(state)}, and the trial builds {list(self._several)}")
        for name, each in self._several.items():
            each.load_state_dict(state[name])  # type: ignore[attr-defined]


def build_optimizer(trial: TorchTrial, config: Mapping[str, Any], module: torch.nn.Module) -> Group[Optimizer]:
    """Return the trial's optimizer, or those of an own step.

    Raises TrialFailure for several, or for one that needs a closure, if the step is not its own.
    """
    optimizer: Any = trial.build_optimizer(config, module)
    if override_of(trial, "step") is not None:
        return _several(optimizer)
    if isinstance(optimizer, (list, tuple, Mapping)):
        raise refused(
            f"build_optimizer() returned a {type(optimizer).__name__} of {len(optimizer)}; return one optimizer with "
            "several parameter groups, or override step() for several optimizers"
        )
    if not isinstance(optimizer, Optimizer):
        raise refused(f"build_optimizer() returned {shown(optimizer)}; return a torch.optim.Optimizer")
    if not accepts(type(optimizer).step, 1):  # a schedule wraps that of the object
        raise refused(
            f"{type(optimizer).__name__} needs a closure, which computes the loss again within a step; use another "
            "optimizer such as AdamW, or override step()"
        )
    return Group(optimizer)


def _several(optimizers: Any) -> Group[Optimizer]:
    group = Group[Optimizer](optimizers)
    if not group.members or not all(isinstance(each, Optimizer) for each in group.members):
        raise refused(
            f"build_optimizer() returned {shown(optimizers)}; return a torch.optim.Optimizer, or several in a list, "
            "tuple or mapping"
        )
    return group


def build_scheduler(
    trial: TorchTrial, config: Mapping[str, Any], optimizers: Group[Optimizer], total_steps: int
) -> Group[LRScheduler] | None:
    """Return the trial's LR schedules, None without one; `total_steps` is passed if its method has the parameter.

    Raises TrialFailure for anything that is no schedule, or needs the metric after every batch.
    """
    build: Any = trial.build_scheduler
    parameters = inspect.signature(build).parameters
    wants_total = "total_steps" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    scheduler: Any = build(config, optimizers.built, **({"total_steps": total_steps} if wants_total else {}))
    if scheduler is None:
        return None
    group = Group[LRScheduler](scheduler)
    are_schedules = all(hasattr(each, "step") and hasattr(each, "state_dict") for each in group.members)
    if not are_schedules or (group.members != [scheduler] and override_of(trial, "step") is None):
        raise refused(f"build_scheduler() returned {shown(scheduler)}; return a schedule of torch.optim, or None")
    if any(isinstance(each, ReduceLROnPlateau) for each in group.members) and trial.scheduler_step == "batch":
        raise refused(
            'ReduceLROnPlateau needs the metric, which is there once an iteration; use scheduler_step = "iteration"'
        )
    return group


def fixed_steps(
    iterations: int, *, num_samples: int, batch_size: int, samples_per_iteration: int, drop_last: bool = False
) -> int:
    """Return the batches of that many iterations: the last one of an epoch is smaller, and each iteration has one.

    With `drop_last`, a smaller one is left out.
    """
    per_epoch = num_samples // batch_size if drop_last else math.ceil(num_samples / batch_size)
    steps = 0
    for iteration in range(1, iterations + 1):
        epochs, rest = divmod(iteration * samples_per_iteration, num_samples)
        steps = max(steps + 1, epochs * per_epoch + min(per_epoch, math.ceil(rest / batch_size)))
    return steps
