"""Options of a `TorchTrial` about its step, checked; its optimizers, and its precision.

An option or an object that cannot be used is a TrialFailure of one line, with the fix.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from rubberband.executor.training.components import Component
from rubberband.executor.training.failures import TrialFailure, refused
from rubberband.executor.training.torch_trial import PrecisionName, SchedulerStep, TorchTrial, accepts, override_of
from rubberband.units import shown

T = TypeVar("T")

_FLAGS = ("compile", "channels_last", "find_unused_parameters", "static_graph")


def check_words(trial: TorchTrial) -> None:
    """Raise TrialFailure for a value that a word cannot have. Called once the model is built, which may set them."""
    _check_among("precision", trial.precision, get_args(PrecisionName))
    _check_among("scheduler_step", trial.scheduler_step, get_args(SchedulerStep))
    _check_among("sharding", trial.sharding, (None, "fsdp"))
    if trial.sharding != type(trial).sharding:
        raise refused(f"sharding={shown(trial.sharding)} was set on self, too late; set it in the class")
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


# Precision of a `TorchTrial`'s arithmetic, and the use of its gradients: autocast, loss scaling, clipping.
#
# Parameters, gradients and the optimizer's state stay as the user built them; autocast computes in 16 bits where that
# is safe. With fp16 the loss is multiplied by a scale, since small gradients would become 0. Steps whose gradients
# overflow are skipped, and the scale is halved (Micikevicius et al. 2018, §3.2).


MOST_SKIPPED = 40
"""The most steps in a row that are skipped: the scale, 65536 at first, is then 6e-8."""

_DTYPES: dict[PrecisionName, torch.dtype | None] = {"32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision(Component):
    """Computes losses in a precision, and gives their gradients to one optimizer."""

    def __init__(
        self, name: PrecisionName, device: torch.device, optimizer: Optimizer, clip_norm: float | None
    ) -> None:
        self._dtype = _DTYPES[name]
        self._device = device
        self._optimizer = optimizer
        self._clip_norm = clip_norm
        self._scaler: torch.amp.GradScaler | None = None
        self._skipped = 0
        if name == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
            card = torch.cuda.get_device_name(device)
            print(f'rubberband: {card} computes bf16 in software; precision = "fp16" is faster', file=sys.stderr)
        if name == "fp16":
            self._scaler = torch.amp.GradScaler(device.type)
            self._one = torch.ones((), device=device)
            self._has_stepped = False
            self._hook = optimizer.register_step_post_hook(self._note_step)

    def autocast(self, *, keeps_casts: bool = True) -> AbstractContextManager[Any]:
        """Return the context in which the model and the loss are computed.

        Unless `keeps_casts`, every use of a weight casts it anew, so that weights may change within the context.
        """
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._dtype, cache_enabled=keeps_casts)

    def scale(self) -> Tensor | None:
        """Return what the gradients are multiplied by until the step, on their device; None: nothing."""
        return None if self._scaler is None else self._scaler.scale(self._one)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of the loss, times the scale, to those of the parameters."""
        self.scaled(loss).backward()  # type: ignore[no-untyped-call]

    def scaled(self, loss: Tensor) -> Tensor:
        return loss if self._scaler is None else self._scaler.scale(loss)

    def step(self) -> bool:
        """Clip the gradients, and step; return False if the step is skipped because they overflow.

        Raises TrialFailure after `MOST_SKIPPED` of these in a row.
        """
        optimizer, scaler = self._optimizer, self._scaler
        if scaler is None:
            self._clip()
            optimizer.step()
            return True
        scaler.unscale_(optimizer)
        self._clip()
        self._has_stepped = False
        scaler.step(optimizer)
        has_stepped = self._has_stepped
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            # It looks at the overflow on the device, so that only the scale shows it.
            before = scaler.get_scale()
            scaler.update()
            has_stepped = scaler.get_scale() >= before
        else:
            scaler.update()
        self._skipped = 0 if has_stepped else self._skipped + 1
        if self._skipped >= MOST_SKIPPED:
            raise TrialFailure(
                "not_a_number",
                f'the gradients were not finite in {self._skipped} steps in a row with precision = "fp16"; use "bf16" '
                f'or "32", or a lower learning rate',
            )
        return has_stepped

    def _clip(self) -> None:
        if self._clip_norm is not None:
            parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, self._clip_norm)

    def _note_step(self, *_: Any) -> None:
        self._has_stepped = True

    def state_dict(self) -> dict[str, Any] | None:
        return None if self._scaler is None else self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue with the scale of the `state`; a checkpoint of another precision has none."""
        if self._scaler is not None and state is not None:
            self._scaler.load_state_dict(state)

    def close(self) -> None:
        if self._scaler is not None:
            self._hook.remove()
        del self._optimizer
