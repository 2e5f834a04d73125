"""Models whose parameters have no memory: for workers that get theirs from others, and to count them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn


def empty(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter of that shape and dtype, with its attributes, on the device "meta"."""
    made = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))
    return made


def swap_parameters(model: nn.Module, change: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Replace each parameter, in all places where it is."""
    known: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for part in model.modules():
        for name, each in part._parameters.items():
            if each is not None:
                part._parameters[name] = known.setdefault(id(each), (each, change(each)))[1]


@contextmanager
def weightless() -> Iterator[None]:
    """Let modules that are built meanwhile have parameters without memory; their other tensors are as ever."""
    register, known = nn.Module.register_parameter, dict[int, tuple[Any, nn.Parameter]]()

    def put(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is None or parameter.is_meta or nn.parameter.is_lazy(parameter):
            return
        alive, made = known.get(id(parameter), (lambda: None, None))
        if alive() is not parameter:  # the same one may be in two layers
            alive, made = known[id(parameter)] = ref(parameter), empty(parameter)
        module._parameters[name] = made

    nn.Module.register_parameter = put  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def without_weights(build: Callable[[], nn.Module]) -> nn.Module | None:
    """Return a model without memory for its parameters, but with all else that it has; None if that cannot be.

    Numbers that are drawn for parameters are not drawn then. So a model with others, in a buffer that checkpoints do
    not have or in an attribute, would be another one.
    """
    before = torch.get_rng_state()
    try:
        with weightless():
            model = build()
    except Exception as error:  # such as one that looks at its weights; if it is at fault itself, it will be again
        print(
            f"rubberband: build_model() needs its weights ({type(error).__name__}), so workers build in turn",
            flush=True,
        )
        return None
    if torch.equal(torch.get_rng_state(), before) or not any(map(_has_others, model.modules())):
        return model
    print("rubberband: build_model() draws what checkpoints do not have, so workers build in turn", flush=True)
    return None


def _has_others(part: nn.Module) -> bool:
    return bool(part._non_persistent_buffers_set) or any(isinstance(each, Tensor) for each in vars(part).values())
