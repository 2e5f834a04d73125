"""P, by which an optimizer multiplies a gradient before its step, from the optimizer's own state (Pollux §3.1).

It is the state before the step, which the gradient to come has no part in. Only what scales each coordinate counts:
momentum, weight decay and the learning rate do not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, Adamax, NAdam, Optimizer, RAdam, RMSprop

State = dict[str, Any]

_log = logging.getLogger(__name__)


def flat(tensor: Tensor) -> Tensor:
    """Its real coordinates in one dimension, in single precision or better; a view where that is possible."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    values = real.detach().reshape(-1)
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _adam(state: State, group: State) -> Tensor | None:
    """sqrt(v_hat) + eps; with amsgrad the largest v so far is the one in use."""
    second = state.get("max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq")
    if second is None:
        return None
    corrected: Tensor = flat(second) / (1.0 - group["betas"][1] ** state["step"])
    return corrected.sqrt_().add_(group["eps"])


def _radam(state: State, group: State) -> Tensor | None:
    """RAdam does without second moments as long as their rectification is undefined."""
    second = state.get("exp_avg_sq")
    if second is None:
        return None
    step, beta = float(state["step"]), group["betas"][1]
    length = 2.0 / (1.0 - beta) - 1.0 - 2.0 * step * beta**step / (1.0 - beta**step)
    return flat(second).sqrt().add_(group["eps"]) if length > 5.0 else None


def _adamax(state: State, _: State) -> Tensor | None:
    largest = state.get("exp_inf")
    return None if largest is None else flat(largest)


def _rmsprop(state: State, group: State) -> Tensor | None:
    second = state.get("square_avg")
    if second is None:
        return None
    variance = flat(second) - flat(state["grad_avg"]).square() if group["centered"] else flat(second).clone()
    return variance.clamp_(min=0.0).sqrt_().add_(group["eps"])


def _adagrad(state: State, group: State) -> Tensor | None:
    """The state exists from the start, and means nothing before the first step."""
    return flat(state["sum"]).sqrt().add_(group["eps"]) if float(state.get("step", 0.0)) > 0.0 else None


Denominator = Callable[[State, State], Tensor | None]

_DENOMINATORS: tuple[tuple[type[Optimizer], str, Denominator], ...] = (
    (Adam, "adam", _adam),
    (NAdam, "adam", _adam),
    (RAdam, "radam", _radam),
    (Adamax, "adamax", _adamax),
    (RMSprop, "rmsprop", _rmsprop),
    (Adagrad, "adagrad", _adagrad),
)
"""1 / P by kind of optimizer, None while there is no state (AdamW is an Adam)."""


class Preconditioning:
    """P of one step: for every parameter that takes part the denominators 1 / P; None for P = I."""

    def __init__(self, denominators: dict[Tensor, Tensor | None]) -> None:
        self._denominators = denominators

    @property
    def parameters(self) -> Iterable[Tensor]:
        """Those that take part."""
        return self._denominators

    def apply(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor | None:
        """P g in one new vector, zero where there is no gradient; None where no parameter takes part.

        Parameters that the optimizer does not train, or has no state of yet, and sparse gradients are left out.
        """
        values, denominators = [], []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter in self._denominators and (gradient is None or gradient.layout == torch.strided):
                values.append(flat(torch.zeros_like(parameter) if gradient is None else gradient))
                denominators.append(self._denominators[parameter])
        if not values:
            return None
        vector = torch.cat(values)
        divisors = [denominator for denominator in denominators if denominator is not None]
        return vector.div_(torch.cat(divisors)) if divisors else vector


class Preconditioner:
    """How an optimizer scales gradients; unknown optimizers are taken to scale none, and the log says so."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        found = [(kind, function) for owner, kind, function in _DENOMINATORS if isinstance(optimizer, owner)]
        self.kind: str = found[0][0] if found else "identity"
        """A word for the rule; estimates under different rules cannot be averaged."""
        self._denominator: Denominator | None = found[0][1] if found else None
        if not found and not isinstance(optimizer, SGD):
            _log.warning(
                "the gradient noise scale is that of plain gradients: how %s scales them is not known",
                type(optimizer).__name__,
            )

    def now(self) -> Preconditioning | None:
        """P for the step to come; None as long as the optimizer has no state to tell it by."""
        denominators: dict[Tensor, Tensor | None] = {}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    continue
                if self._denominator is None:
                    denominators[parameter] = None
                    continue
                denominator = self._denominator(self._optimizer.state.get(parameter, {}), group)
                if denominator is not None:
                    denominators[parameter] = denominator
        return Preconditioning(denominators) if denominators else None


def is_adaptive(optimizer: Optimizer) -> bool:
    """Whether the optimizer scales each coordinate by the gradients so far, as Adam does."""
    kinds = (*(owner for owner, _, _ in _DENOMINATORS), torch.optim.Adadelta)
    return isinstance(optimizer, kinds)
