"""Values of any type with every field set, none to its default; and any value as plain ones that can be compared."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import sys
import types
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch

_numbers = itertools.count(3)
_under_way: list[Any] = []
"""Kinds that are being filled: one within itself has no further one."""


def filled(kind: Any, /, **given: Any) -> Any:
    """Return an instance of a dataclass; every field but those `given` has another value than by default."""
    hints = get_type_hints(kind, vars(sys.modules[kind.__module__]) | vars(types), include_extras=True)
    is_within = kind in _under_way
    _under_way.append(kind)
    for each in dataclasses.fields(kind):
        if each.init and each.name not in given and not (is_within and kind in get_args(hints[each.name])):
            default = each.default_factory() if callable(each.default_factory) else each.default
            given[each.name] = value_of(hints[each.name], default)
    _under_way.pop()
    return kind(**given)


def value_of(kind: Any, default: Any = None) -> Any:
    """Return a value of a type that differs from `default`, and from all that were returned before where it can."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return value_of(arguments[0], default)
    if origin in (Union, types.UnionType):
        return value_of(next(each for each in arguments if each is not type(None)), default)
    if origin is Literal:
        return next(each for each in reversed(arguments) if each != default)
    if kind is bool:
        return default is not True
    if kind is int:
        return next(_numbers)
    if kind is float:
        return next(_numbers) + 0.25
    if kind is str:
        return f"text-{next(_numbers)}"
    if kind is bytes:
        return f"\x00bytes-{next(_numbers)}".encode()
    if kind is Any:
        return {"any": [next(_numbers), None, "x"]}
    if kind is Path:
        return Path(f"/path/{next(_numbers)}")
    if origin is tuple or kind is tuple:
        if len(arguments) == 2 and arguments[1] is ...:
            return value_of(arguments[0]), value_of(arguments[0])
        return tuple(map(value_of, arguments))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {value_of(arguments[0]): value_of(arguments[1]) for _ in range(2)}
    if isinstance(origin, type) and issubclass(origin, frozenset):
        return frozenset({value_of(arguments[0])})
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return [value_of(arguments[0]), value_of(arguments[0])]
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return next(each for each in reversed(kind) if each != default)
    if dataclasses.is_dataclass(kind):
        return filled(kind)
    raise TypeError(f"tests/builders/filled.py makes no value of {kind}; add how")


def plain(value: Any, skip: Collection[str] = (), seen: tuple[int, ...] = ()) -> Any:
    """Return a value, objects of the packages with all their attributes but `skip`, as plain ones for `==`."""
    if id(value) in seen:
        return "itself"
    seen = (*seen, id(value))
    if isinstance(value, torch.Tensor):
        whole = value.detach().cpu()
        return [str(value.dtype), plain((whole.float() if whole.dtype == torch.bfloat16 else whole).numpy())]
    if isinstance(value, np.ndarray | np.generic):
        return [str(value.dtype), repr(value.tolist())]
    if isinstance(value, float | bool):
        return repr(value)  # nan is itself, and True is not 1
    if isinstance(value, Mapping):
        return {key: plain(each, skip, seen) for key, each in value.items()}
    if isinstance(value, list | tuple | deque):
        return [type(value).__name__, *(plain(each, skip, seen) for each in value)]
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        return plain(value.state_dict())
    if type(value).__module__.startswith(("rubberband.", "tests.")) and not callable(value):
        own = {name: plain(getattr(value, name), skip, seen) for name in _attributes(value) if name not in skip}
        return {"of": type(value).__name__, **own}
    return value if isinstance(value, int | str | bytes | frozenset | type(None) | enum.Enum) else type(value).__name__


def _attributes(value: Any) -> list[str]:
    slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
    return [name for name in (*getattr(value, "__dict__", ()), *slots) if hasattr(value, name)]
