"""Copies of dataclasses: as another one with the same fields, and as plain values. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Kind = TypeVar("_Kind", bound="DataclassInstance")
_ATOMS = frozenset({float, int, str, bool, type(None)})


def copied(kind: type[_Kind], source: object, **changed: object) -> _Kind:
    """Return a `kind` with the fields of `source` that have the same names, and the changed ones."""
    same = {name: getattr(source, name) for name in kind.__dataclass_fields__ if name not in changed}
    return kind(**same, **changed)


def plain_of(value: Any) -> Any:
    """Return plain values, like `dataclasses.asdict` but without copying every number."""
    if type(value) in _ATOMS:
        return value
    if isinstance(value, tuple | list):
        return [plain_of(one) for one in value]
    if isinstance(value, Mapping):
        return {key: plain_of(one) for key, one in value.items()}
    if is_dataclass(value):
        return {name: plain_of(getattr(value, name)) for name in value.__dataclass_fields__}
    return value
