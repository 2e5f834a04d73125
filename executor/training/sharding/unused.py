"""Parameters that a worker's pass does not use, such as those of an expert to which no sample goes.

FSDP sums the gradients of a part of the model as one vector, of those parameters that have one. Where workers use
others, it would add gradients of different parameters, or hang. So those that a worker has not used get a
gradient of 0 before the sum, and lose it after the step if no worker has used them: the optimizer passes over them
then, as it does without `sharding`.

A part that was called, and whose output the loss of one worker does not use, gets gradients of 0 too: else the others
would wait for that worker in its backward pass.
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
        self._outputs: list[tuple[str, Any, Tensor]] = []
        """Part, node of the graph and value of what the parts returned in this pass."""
        self._idle = set[str]()
        """Parts whose output the loss of this pass does not use."""
        self._is_backward = False
        for name, part in parts.items():
            if part is not root:
                part.register_forward_pre_hook(self._watching(name), with_kwargs=True)
                part.register_forward_pre_hook(self._ending(name), with_kwargs=True, prepend=True)  # before FSDP's
                part.register_forward_hook(self._noting(name))

    def watched(self, loss: Tensor) -> Tensor:
        """Return a loss whose backward pass fills in the gradients that FSDP sums at its end."""

        def at_the_end() -> None:
            for name in self._places:
                self._fill(name)
            self._is_backward = False

        def begin(*gradients: Tensor) -> tuple[Tensor, ...]:
            self._is_backward = True
            Variable._execution_engine.queue_callback(at_the_end)  # before FSDP's own
            return gradients

        noted, self._outputs = self._outputs, []
        if not loss.requires_grad:
            return loss
        used = _nodes(loss)
        unused = [(name, value) for name, node, value in noted if node not in used]
        self._idle = {name for name, _ in unused} - {name for name, node, _ in noted if node in used}
        return _Then.apply(begin, loss, *(value for _, value in unused))[0]  # type: ignore[no-untyped-call, no-any-return]

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
        def fill(*gradients: Tensor) -> tuple[Tensor, ...]:
            """Fill in gradients when those of the part's inputs are there, which is when FSDP sums the part's."""
            if not self._is_backward:
                raise refused(
                    "loss() computes gradients itself, such as by torch.autograd.grad, and parts of a divided model "
                    "have theirs only after it; leave that out, or train without sharding"
                )
            self._fill(name)
            return gradients

        def watch(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._calls = zlib.crc32(name.encode(), self._calls)
            return _with_gradients(fill, args, kwargs)

        return _disabled(watch)

    def _ending(self, name: str) -> Callable[..., Any]:
        def end(*gradients: Tensor) -> tuple[Tensor | None, ...]:
            return tuple(None if name in self._idle else each for each in gradients)

        return _disabled(lambda part, args, kwargs: _with_gradients(end, args, kwargs))

    def _noting(self, name: str) -> Callable[..., Any]:
        def note(part: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not self._is_backward:  # else it is computed again
                values = [each for each in tree_flatten(output)[0] if isinstance(each, Tensor) and each.requires_grad]
                self._outputs += [(name, each.grad_fn, each) for each in values]

        return _disabled(note)

    def _fill(self, name: str) -> None:
        from torch.distributed.tensor import DTensor

        for place, layer, inner in self._places[name]:
            parameter = layer._parameters.get(inner)
            if parameter is None or not parameter.requires_grad or isinstance(parameter, DTensor):
                continue  # it is divided again: its gradient has been summed
            if parameter.grad is None or name in self._idle:
                parameter.grad = torch.zeros_like(parameter)
            else:
                self._used.add(place)


def _disabled(hook: Callable[..., Any]) -> Callable[..., Any]:
    made: Callable[..., Any] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return made


def _with_gradients(then: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the inputs of a part, whose gradients are then as `then` makes them; None if they have none."""
    values, form = tree_flatten((args, kwargs))
    places = [at for at, each in enumerate(values) if isinstance(each, Tensor) and each.requires_grad]
    if not places or not torch.is_grad_enabled():
        return None
    found = _Then.apply(then, *(values[at] for at in places))  # type: ignore[no-untyped-call]
    for at, each in zip(places, found, strict=True):
        values[at] = each
    return tree_unflatten(values, form)


class _Then(torch.autograd.Function):
    """Returns tensors as they are, and their gradients as a function makes them."""

    @staticmethod
    def forward(ctx: Any, then: Callable[..., tuple[Tensor | None, ...]], *tensors: Tensor) -> Any:
        ctx.then = then
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *ctx.then(*gradients)


def _nodes(loss: Tensor) -> set[Any]:
    """Return the nodes of the graph that a backward pass of the loss goes through."""
    found, left = set[Any](), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [each for each, _ in node.next_functions]
    return found


def _of_part(part: nn.Module, name: str, parts: set[str]) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the parameters of a part of the model that are in none of its inner `parts`."""
    for inner, _ in part.named_parameters(recurse=False):
        yield f"{name}.{inner}", part, inner
    for child, layer in part.named_children():
        if (path := f"{name}.{child}".lstrip(".")) not in parts:
            yield from _of_part(layer, path, parts)
