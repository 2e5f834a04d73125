"""Filters of trials, as people write them: `loss<0.2 "weight decay">1e-3 status="cut short"`. Pure."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rubberband.errors import InputError
from rubberband.units import nearest, shown
from rubberband.views.charts.parallel_coordinates import is_number
from rubberband.views.formatting import setting

_ORDERS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_SIGN = r"<=|>=|!=|=|<|>"
_TEXT = r"[^\s<>=!\"]+|\"[^\"]*\""
_CONDITION = re.compile(rf"(?P<name>{_TEXT})(?P<sign>{_SIGN})(?P<value>{_TEXT})")
_QUOTED_OR_SIGN = re.compile(rf'("[^"]*")|\s*({_SIGN})\s*')
_WORD = re.compile(r'(?:"[^"]*"|\S)+')


@dataclass(frozen=True, slots=True)
class Condition:
    """Condition of a column; a trial without a value there does not pass."""

    name: str
    sign: str
    value: str

    def holds(self, found: Any) -> bool:
        """Whether a value passes. Numbers are compared as numbers, and all values as they are shown."""
        number = _number(self.value)
        if found is None or (isinstance(found, float) and found != found):
            return False
        if self.sign in _ORDERS:
            return is_number(found) and number is not None and _ORDERS[self.sign](found, number)
        is_same = self.value in (found, setting(found)) or (isinstance(found, bool) and self.value == str(found))
        return (is_same or (is_number(found) and found == number)) == (self.sign == "=")


def conditions(text: str, columns: Mapping[str, Any]) -> list[Condition]:
    """Return the conditions of a filter, all of which have to hold; `columns` has their names. Quotes keep blanks.

    Raises InputError for what is no condition, an unknown column, and an order of what is no number.
    """
    found = []
    for word in _WORD.findall(_QUOTED_OR_SIGN.sub(lambda part: part[1] or part[2], text)):
        part = _CONDITION.fullmatch(word)
        if part is None:
            raise InputError(f'{shown(word)} is no condition; write NAME<0.2, status=completed or "TWO WORDS">=3')
        name, sign, value = part["name"].strip('"'), part["sign"], part["value"].strip('"')
        if name not in columns:
            raise InputError(f"{shown(name)} is no column; {nearest(name, columns)}")
        if sign in _ORDERS and _number(value) is None:
            raise InputError(f"{shown(word)}: {shown(value)} is no number; compare words with = or !=")
        found.append(Condition(name, sign, value))
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
