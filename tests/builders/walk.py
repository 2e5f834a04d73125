"""Every module, class and function of the packages: what tests by kind are about, so that a new one is found."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any

import rubberband


@cache
def modules() -> tuple[ModuleType, ...]:
    found = pkgutil.walk_packages(rubberband.__path__, "rubberband.")
    return tuple(importlib.import_module(each.name) for each in found if not each.name.endswith("__main__"))


@cache
def classes() -> tuple[type[Any], ...]:
    """Return all classes that they define, in order of their names."""
    return tuple(each for each in _owned() if inspect.isclass(each))


@cache
def functions() -> tuple[Any, ...]:
    """Return all functions that they define at the top of a module, in order of their names."""
    return tuple(each for each in _owned() if inspect.isfunction(each))


def _owned() -> Iterator[Any]:
    found = {
        name_of(each): each
        for module in modules()
        for each in vars(module).values()
        if getattr(each, "__module__", None) == module.__name__ and hasattr(each, "__qualname__")
    }
    return (found[name] for name in sorted(found))


def name_of(found: Any) -> str:
    """Return `package.module.Name` without `rubberband.`: the key of tables of examples."""
    return f"{found.__module__}.{found.__qualname__}".removeprefix("rubberband.")
