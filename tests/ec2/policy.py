"""IAM's evaluation of identity-based policies, as far as ours need it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

Context = Mapping[str, str | Sequence[str]]
"""Condition key -> its value, or its values; a key that the request lacks is missing."""
Decision = Literal["allowed", "denied", "not allowed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One operator on one key: all of a statement's must hold."""

    operator: str
    key: str
    values: tuple[str, ...]

    def holds(self, context: Context) -> bool:
        """Whether the request meets it. Raises ValueError for an operator that none of our policies has."""
        compared = _OPERATORS.get(self.operator)
        if compared is None:
            raise ValueError(f"condition operator {self.operator!r} is not known to the fake")
        present = context.get(self.key.lower(), ())
        return any(compared(one, self.values) for one in ((present,) if isinstance(present, str) else present))


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    allows: bool
    actions: tuple[str, ...]
    resources: tuple[str, ...]
    conditions: tuple[Condition, ...]

    def applies(self, action: str, resource: str, context: Context) -> bool:
        return (
            _listed(self.actions, action)
            and any(_like(resource, one) for one in self.resources)
            and all(condition.holds(context) for condition in self.conditions)
        )


def statements(document: Mapping[str, Any]) -> tuple[Statement, ...]:
    """A policy's statements, from its JSON. Raises KeyError for a statement without an effect."""
    written = document["Statement"]
    return tuple(_statement(one) for one in ([written] if isinstance(written, Mapping) else written))


def decided(policy: Sequence[Statement], action: str, resource: str, context: Context) -> Decision:
    """A deny wins; what nothing allows is not allowed. Condition keys are compared regardless of case."""
    known = {key.lower(): value for key, value in context.items()}
    speaking = [one for one in policy if one.applies(action, resource, known)]
    if any(not one.allows for one in speaking):
        return "denied"
    return "allowed" if speaking else "not allowed"


def _statement(written: Mapping[str, Any]) -> Statement:
    return Statement(
        allows=written["Effect"] == "Allow",
        actions=_texts(written.get("Action", ())),
        resources=_texts(written.get("Resource", "*")),
        conditions=tuple(
            Condition(operator=operator, key=key, values=_texts(values))
            for operator, keys in written.get("Condition", {}).items()
            for key, values in keys.items()
        ),
    )


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, bool):
        return (str(value).lower(),)
    return (
        (str(value),) if isinstance(value, str | int | float) else tuple(text for one in value for text in _texts(one))
    )


@lru_cache(maxsize=4096)
def _listed(actions: tuple[str, ...], action: str) -> bool:
    return any(_like(action.lower(), one.lower()) for one in actions)


@lru_cache(maxsize=4096)
def _pattern(pattern: str) -> re.Pattern[str]:
    return re.compile("".join({"*": ".*", "?": "."}.get(letter, re.escape(letter)) for letter in pattern), re.DOTALL)


def _like(text: str, pattern: str) -> bool:
    return _pattern(pattern).fullmatch(text) is not None


_OPERATORS: Mapping[str, Callable[[str, tuple[str, ...]], bool]] = {
    "StringEquals": lambda given, values: given in values,
    "StringLike": lambda given, values: any(_like(given, value) for value in values),
    "Bool": lambda given, values: given.lower() in {value.lower() for value in values},
}
