"""Parameters that a worker's pass does not use, such as those of an expert to which no sample goes.

FSDP sums the gradients of a part of the model as one vector, of those parameters that have one. Where workers use
others, it would add gradients of different parameters, or hang. So those that a worker has not used get a
gradient of 0 before the sum, and lose it after the step if no worker has used them: the optimizer passes over them
then, as it does without `sharding`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_flatten, tree_unflatten

from rubberband.executor.training.failures import refused
from rubberband.executor.training.gang import Gang

_Places = list[tuple[str, nn.Module, str]]
"""Name of a parameter in the root, the layer that has it, and its name there."""


class Unused:
    """Watches the passes of a divided model."""

    def __init__(self, root: nn.Module) -> None:
        """`root`: a module after `fully_shard`, and its parts."""
        from torch.distributed.fsdp import FSDPModule

        parts: dict[str, Any] = {name: part for name, part in root.named_modules() if isinstance(part, FSDPModule)}
        self._places: dict[str, _Places] = {
            name: list(_of_part(part, name, set(parts))) for name, part in parts.items()
        }
        self._used = set[str]()
        self._calls = 0
        """Checksum of the names of the parts that were called, in their order."""
        for name, part in parts.items():
            if part is not root:
                part.register_forward_pre_hook(self._watching(name), with_kwargs=True)

    def watched(self, loss: Tensor) -> Tensor:
        """Return a loss whose backward pass fills in the gradients that FSDP sums at its end."""

        def at_the_end() -> None:
            for name in self._places:
                self._fill(name)

        def begin() -> None:
            Variable._execution_engine.queue_callback(at_the_end)  # before FSDP's own

        return _Then.apply(begin, loss)[0] if loss.requires_grad else loss  # type: ignore[no-untyped-call]

    def drop(self, gang: Gang) -> None:
        """Take the gradient from the parameters that no worker has used since the last call.

        Raises TrialFailure if workers have called different parts, whose weights and gradients FSDP has mixed then.
        """
        trained = [
            (name, layer._parameters[inner])
            for places in self._places.values()
            for name, layer, inner in places
            if (each := layer._parameters.get(inner)) is not None and each.requires_grad
        ]
        row = [*(float(name in self._used) for name, _ in trained), float(self._calls)]
        *uses, calls = gang.sum(torch.tensor(row, dtype=torch.float64, device="cpu")).tolist()
        if calls != gang.num_workers * self._calls:
            raise refused(
                "workers call different parts of the model, as parts are whole on a GPU only while all workers call "
                "them; write shard() with parts that every worker calls, such as a layer with all of its experts"
            )
        self._used.clear()
        for (_, parameter), use in zip(trained, uses, strict=True):
            if not use and parameter is not None:
                parameter.grad = None

    def _watching(self, name: str) -> Callable[..., Any]:
        def watch(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            """Fill in gradients when those of the part's inputs are there, which is when FSDP sums the part's."""
            self._calls = zlib.crc32(name.encode(), self._calls)
            values, form = tree_flatten((args, kwargs))
            places = [at for at, each in enumerate(values) if isinstance(each, Tensor) and each.requires_grad]
            if not places or not torch.is_grad_enabled():
                return None
            found = _Then.apply(lambda: self._fill(name), *(values[at] for at in places))  # type: ignore[no-untyped-call]
            for at, each in zip(places, found, strict=True):
                values[at] = each
            return tree_unflatten(values, form)

        disabled: Callable[..., Any] = torch.compiler.disable(watch)  # type: ignore[no-untyped-call]
        return disabled

    def _fill(self, name: str) -> None:
        from torch.distributed.tensor import DTensor

        for place, layer, inner in self._places[name]:
            parameter = layer._parameters.get(inner)
            if parameter is None or not parameter.requires_grad or isinstance(parameter, DTensor):
                continue  # it is divided again: its gradient has been summed
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                self._used.add(place)


class _Then(torch.autograd.Function):
    """Returns tensors as they are, and calls a function when their gradients are there."""

    @staticmethod
    def forward(ctx: Any, then: Callable[[], None], *tensors: Tensor) -> Any:
        ctx.then = then
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.then()
        return None, *gradients


def _of_part(part: nn.Module, name: str, parts: set[str]) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the parameters of a part of the model that are in none of its inner `parts`."""
    for inner, _ in part.named_parameters(recurse=False):
        yield f"{name}.{inner}", part, inner
    for child, layer in part.named_children():
        if (path := f"{name}.{child}".lstrip(".")) not in parts:
            yield from _of_part(layer, path, parts)
