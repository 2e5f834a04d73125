"""Precision of a `TorchTrial`'s arithmetic, and the use of its gradients: autocast, loss scaling, clipping.

Parameters, gradients and the optimizer's state stay as the user built them; autocast computes in 16 bits where that is
safe. With fp16 the loss is multiplied by a scale, since small gradients would become 0. Steps whose gradients overflow
are skipped, and the scale is halved (Micikevicius et al. 2018, §3.2).
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rubberband.executor.training.runner import TrialFailure
from rubberband.executor.training.torch_trial import PrecisionName

MOST_SKIPPED = 40
"""The most steps in a row that are skipped: the scale, 65536 at first, is then 6e-8."""

_DTYPES: dict[PrecisionName, torch.dtype | None] = {"32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
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
        """Return the loss, times the scale."""
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

    def state(self) -> dict[str, Any] | None:
        """Return plain values for `restore`; None if there are none."""
        return None if self._scaler is None else self._scaler.state_dict()

    def restore(self, state: dict[str, Any] | None) -> None:
        """Continue with the scale of the `state`; a checkpoint of another precision has none."""
        if self._scaler is not None and state is not None:
            self._scaler.load_state_dict(state)

    def close(self) -> None:
        """Drop the optimizer."""
        if self._scaler is not None:
            self._hook.remove()
        del self._optimizer
