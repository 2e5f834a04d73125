"""The optional methods of a `TorchTrial`: which of them a class overrides, and whether they can be called.

They are looked up in the class alone. So an attribute `self.weight` or `self.step` of a trial is its own.
Importing this module does not import torch.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

from rubberband.executor.training.torch_trial import TorchTrial
from rubberband.values.asynchronous import AsyncTraining

_ARGUMENTS = {
    "step": ("model", "optimizers", "batch"),
    "weight": ("batch",),
    "train_mode": ("model",),
    "on_iteration": ("model", "iterations"),
    "on_step": ("model", "step", "batch_size"),
    "state_dict": (),
    "load_state_dict": ("state",),
}
"""Optional methods, with what they are called with."""


FIXED = (
    "overrides step(), so its batches are fixed and batch.policy: goodput cannot change them; set batch.policy to "
    "fixed, or write loss() in place of step()"
)
"""Refusal of adaptive batches."""


def override_of(trial: TorchTrial, name: str) -> Callable[..., Any] | None:
    """Return the trial's own method of that name; None if its class has only the default."""
    function = _override(type(trial), name)
    return None if function is None else types.MethodType(function, trial)


def lacks_loss(target: type) -> bool:
    """Return whether a class is one of torch trials, and has neither `loss` nor `step`."""
    if not issubclass(target, TorchTrial):
        return False
    return target.loss is TorchTrial.loss and not has_own_step(target)


def has_own_step(target: type[TorchTrial]) -> bool:
    """Return whether a class of trials overrides `step`."""
    return has_override(target, "step")


def has_override(target: type[TorchTrial], name: str) -> bool:
    """Return whether a class of trials overrides the optional method of that name."""
    return _override(target, name) is not None


def fault_of(target: type[TorchTrial]) -> str | None:
    """Return what is wrong with the optional methods of a class, in one line with the fix; None if nothing is."""
    for name, arguments in _ARGUMENTS.items():
        function = _override(target, name)
        if function is not None and not accepts(function, 1 + len(arguments)):
            given = ", ".join(("self", *arguments))
            own = inspect.signature(function)
            return (
                f"{name}{own} cannot be called by rubberband, which calls {name}({given}): write it so, or rename it "
                "if it is for your own use"
            )
    saves, loads = (_override(target, name) is not None for name in ("state_dict", "load_state_dict"))
    if saves != loads:
        has, lacks = ("state_dict", "load_state_dict") if saves else ("load_state_dict", "state_dict")
        return f"{has}() is there without {lacks}(): write both, so that what is saved is restored"
    return None


def _override(target: type[TorchTrial], name: str) -> Callable[..., Any] | None:
    found = inspect.getattr_static(target, name)
    if not isinstance(found, types.FunctionType) or found is inspect.getattr_static(TorchTrial, name):
        return None
    return found


def accepts(function: Callable[..., Any], arguments: int) -> bool:
    """Return whether a function, or a class, can be called with that many arguments by their places."""
    try:
        inspect.signature(function).bind(*[None] * arguments)
    except TypeError:
        return False
    except ValueError:  # some built-in functions have no signature
        return True
    return True


# Why a trial cannot be trained asynchronously, in one line with a fix.


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
