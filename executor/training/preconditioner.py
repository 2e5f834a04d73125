"""P, by which an optimizer multiplies a gradient before its step, from the optimizer's own state (Pollux §3.1).

It is the state before the step, which the gradient to come has no part in. Only what scales each coordinate counts:
momentum, weight decay and the learning rate do not.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, Adamax, NAdam, Optimizer, RAdam, RMSprop

State = dict[str, Any]

LEAST_STEPS = 10
"""Second moments of fewer steps are no measure: 1 / v of one squared gradient has not even a mean."""

_log = logging.getLogger(__name__)


def flat(tensor: Tensor) -> Tensor:
    """Its real coordinates in one dimension, in single precision or better; a view where that is possible."""
    return real(tensor).reshape(-1)


def real(tensor: Tensor) -> Tensor:
    """Its real coordinates, in single precision or better; itself where it has no others."""
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor.float()


def _adam(state: State, group: State) -> Tensor:
    """sqrt(v_hat) + eps; with amsgrad the largest v so far is the one in use."""
    second = state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"]
    corrected: Tensor = flat(second) / (1.0 - group["betas"][1] ** state["step"])
    return corrected.sqrt_().add_(group["eps"])


def _radam(state: State, group: State) -> Tensor:
    """Its corrections are common factors (Liu et al. 2020); they are defined after `LEAST_STEPS`."""
    return flat(state["exp_avg_sq"]).sqrt().add_(group["eps"])


def _adamax(state: State, _: State) -> Tensor:
    """eps is in it."""
    return flat(state["exp_inf"]).clone()


def _rmsprop(state: State, group: State) -> Tensor:
    second = flat(state["square_avg"])
    variance = second - flat(state["grad_avg"]).square() if group["centered"] else second.clone()
    return variance.clamp_(min=0.0).sqrt_().add_(group["eps"])


def _adagrad(state: State, group: State) -> Tensor:
    return flat(state["sum"]).sqrt().add_(group["eps"])


Denominator = Callable[[State, State], Tensor]

_DENOMINATORS: tuple[tuple[type[Optimizer], str, Denominator], ...] = (
    (Adam, "adam", _adam),
    (NAdam, "adam", _adam),
    (RAdam, "radam", _radam),
    (Adamax, "adamax", _adamax),
    (RMSprop, "rmsprop", _rmsprop),
    (Adagrad, "adagrad", _adagrad),
)
"""1 / P by kind of optimizer, up to a common factor (AdamW is an Adam)."""


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

        Parameters that the optimizer does not train, or has too little state of, and sparse gradients are left out.
        """
        values, divisors = [], []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter in self._denominators and (gradient is None or gradient.layout == torch.strided):
                values.append(real(torch.zeros_like(parameter).detach() if gradient is None else gradient))
                denominator = self._denominators[parameter]
                if denominator is not None:
                    divisors.append(denominator)
        if not values:
            return None
        vector: Tensor = torch._C._nn.flatten_dense_tensors(values)
        if len(values) == 1:
            vector = vector.clone()
        return vector.div_(torch.cat(divisors)) if divisors else vector


class Preconditioner:
    """How an optimizer scales gradients; unknown optimizers are taken to scale none, and the log says so."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        found = [(kind, function) for owner, kind, function in _DENOMINATORS if isinstance(optimizer, owner)]
        self.kind: str = found[0][0] if found else "identity"
        """A word for the rule; estimates under different rules cannot be averaged."""
        self._denominator: Denominator | None = found[0][1] if found else None
        self._settled: set[Tensor] = set()
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
                if parameter.requires_grad and self._is_settled(parameter):
                    denominators[parameter] = self._denominator_of(parameter, group)
        return Preconditioning(denominators) if denominators else None

    def _is_settled(self, parameter: Tensor) -> bool:
        if self._denominator is not None and parameter not in self._settled:
            # Asked no more than needed: some optimizers keep it on the device.
            if float(self._optimizer.state.get(parameter, {}).get("step", 0.0)) < LEAST_STEPS:
                return False
            self._settled.add(parameter)
        return True

    def _denominator_of(self, parameter: Tensor, group: State) -> Tensor | None:
        if self._denominator is None:
            return None
        denominator = self._denominator(self._optimizer.state[parameter], group)
        # A coordinate that never had a gradient has no state yet: its P would be 1 / eps.
        return denominator.masked_fill_(denominator <= group["eps"], math.inf)


def is_adaptive(optimizer: Optimizer) -> bool:
    """Whether the optimizer scales each coordinate by the gradients so far, as Adam does."""
    kinds = (*(owner for owner, _, _ in _DENOMINATORS), torch.optim.Adadelta)
    return isinstance(optimizer, kinds)
