"""Scaling of the learning rate with the batch size: lambda multiplies the user's own schedule (Pollux §3.2).

It holds for one optimizer step at a time.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from rubberband.executor.training.failures import one_line, refused
from rubberband.executor.training.goodput.noise_scale import is_adaptive
from rubberband.executor.training.torch_trial import accepts
from rubberband.planner.goodput import gain
from rubberband.units import did_you_mean
from rubberband.values.adaptive import LR_SCALINGS, ScaleLr

Rule = Callable[[int, int, float, float], float]
"""(M0, M, phi, epochs) -> lambda."""


@dataclass(frozen=True, slots=True)
class LrScaling:
    """A rule with its name."""

    name: str
    rule: Rule

    def factor(self, initial: int, batch_size: int, noise_scale: float | None, epochs: float) -> float:
        """Return lambda for batches of M samples after `epochs`; 1 at M0 under every built-in rule.

        Without a noise scale phi is 0: AdaScale then leaves the learning rate as it is, and the others do not use phi.
        Raises TrialFailure if the rule raises, or returns anything but a positive finite number.
        """
        phi = 0.0 if noise_scale is None else noise_scale
        call = f"lr_scaling={self.name} for M0={initial}, M={batch_size}, phi={phi:g}"
        try:
            found = float(self.rule(initial, batch_size, phi, epochs))
        except Exception as error:
            raise refused(f"{call} failed: {one_line(error)}") from error
        if not (math.isfinite(found) and found > 0.0):
            raise refused(
                f"{call} gave {found}; it must give a positive number, by which the learning rate is multiplied"
            )
        return found


def make_lr_scaling(name: str | None, optimizer: Optimizer, warmup_epochs: float) -> LrScaling:
    """Return the rule of that name, one of `LR_SCALINGS` or `module:function`; `warmup_epochs` (at M0) are for legw.

    None: AdaScale, or sqrt for Adam and similar optimizers. Raises TrialFailure, in one line, if no rule has this name.
    """
    if name is None:
        name = "sqrt" if is_adaptive(optimizer) else "adascale"
    if name == "legw":
        return LrScaling(name, lambda initial, batch_size, _, epochs: _legw(initial, batch_size, epochs, warmup_epochs))
    if name in _RULES:
        return LrScaling(name, _RULES[name])
    function = _load(name)
    return LrScaling(name, lambda initial, batch_size, phi, _: function(initial, batch_size, phi))


def _legw(initial: int, batch_size: int, epochs: float, warmup_epochs: float) -> float:
    """Return sqrt(M / M0), reached linearly over `warmup_epochs` * M / M0 epochs (You et al. 2019).

    It starts from 1, the factor of M0, not from 0, because the trial has trained at M0 before. A schedule's own warm-up
    is the user's.
    """
    warmup = warmup_epochs * batch_size / initial
    done = 1.0 if warmup <= 0.0 else min(1.0, epochs / warmup)
    return 1.0 + (math.sqrt(batch_size / initial) - 1.0) * done


_RULES: dict[str, Rule] = {
    "linear": lambda initial, batch_size, phi, epochs: batch_size / initial,
    "sqrt": lambda initial, batch_size, phi, epochs: math.sqrt(batch_size / initial),
    "adascale": lambda initial, batch_size, phi, epochs: float(gain(phi, initial, batch_size)),
}


def _load(name: str) -> ScaleLr:
    module, separator, attribute = name.partition(":")
    if not separator or not all(part.isidentifier() for part in [*module.split("."), *attribute.split(".")]):
        raise refused(
            f"lr_scaling={name!r} is not known; use one of {', '.join(LR_SCALINGS)}, or module:function"
            f"{did_you_mean(name, LR_SCALINGS)}"
        )
    importlib.invalidate_caches()
    try:
        found: Any = pkgutil.resolve_name(name)
    except Exception as error:
        raise refused(f"lr_scaling={name} cannot be imported: {one_line(error)}") from error
    if not callable(found) or not accepts(found, 3):
        raise refused(f"lr_scaling={name} is no function of (M0, M, phi)")
    function: ScaleLr = found
    return function


@contextmanager
def scaled_lr(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Multiply every learning rate by `factor` for one optimizer step, and restore it."""
    if factor == 1.0:
        yield
        return
    rates = [_scale(group, factor) for group in optimizer.param_groups]
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if isinstance(rate, torch.Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate


def _scale(group: dict[str, Any], factor: float) -> Any:
    """Multiply the group's rate, a tensor in place since compiled steps refer to it; return the rate as it was."""
    rate = group["lr"]
    if isinstance(rate, torch.Tensor):
        before = rate.clone()
        rate.mul_(factor)
        return before
    group["lr"] = rate * factor
    return rate
