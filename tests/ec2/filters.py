"""EC2's filters and pages, alike in every Describe operation."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from tests.ec2.faults import FakeError

Reader = Callable[[Any], Iterable[str]]
"""From a thing to the values that it has under a filter's name; several where it has several."""
PAGE = 1000
shown_at_once = PAGE
"""AWS may show fewer than are asked for; a test may lower it."""


def filtered(things: Iterable[Any], params: Mapping[str, Any], readers: Mapping[str, Reader]) -> list[Any]:
    """Those that match every one of `Filters`. `tag:KEY` and `tag-key` read an attribute `tags`.

    Raises FakeError for a filter's name that the operation does not know.
    """
    chosen = list(things)
    for asked in params.get("Filters", ()):
        reader = _reader(asked["Name"], readers)
        matches = _matcher(tuple(asked.get("Values", ())))
        chosen = [thing for thing in chosen if any(map(matches, reader(thing)))]
    return chosen


def page(
    things: Sequence[Any], params: Mapping[str, Any], *, at_least: int = 1, at_most: int = PAGE
) -> tuple[list[Any], dict[str, str]]:
    """The page that is asked for, and {"NextToken": …} if more follow; `at_most` on a page, also where none is asked.

    Raises FakeError for a token that was not given out, or a page's size out of its bounds.
    """
    size = params.get("MaxResults", at_most)
    if not at_least <= size <= at_most:
        raise FakeError(
            "InvalidParameterValue",
            f"Value ( {size} ) for parameter maxResults is invalid. Expecting {at_least} to {at_most}.",
        )
    size, start = min(size, shown_at_once), _start(params.get("NextToken"))
    more = start + size < len(things)
    following = {"NextToken": base64.b64encode(str(start + size).encode()).decode()} if more else {}
    return list(things[start : start + size]), following


def _start(token: str | None) -> int:
    if not token:
        return 0
    try:
        return int(base64.b64decode(token, validate=True))
    except (ValueError, binascii.Error):
        raise FakeError("InvalidNextToken", "The token is invalid.") from None


def _reader(name: str, readers: Mapping[str, Reader]) -> Reader:
    if name.startswith("tag:"):
        key = name[4:]
        return lambda thing: (thing.tags[key],) if key in thing.tags else ()
    if name == "tag-key" and "tag-key" not in readers:
        return lambda thing: tuple(thing.tags)
    if name not in readers:
        raise FakeError("InvalidParameterValue", f"The filter '{name}' is invalid")
    return readers[name]


@lru_cache(maxsize=4096)
def _matcher(values: tuple[str, ...]) -> Callable[[str], bool]:
    if not any("*" in value or "?" in value for value in values):
        return frozenset(values).__contains__
    pattern = re.compile("|".join(_as_pattern(value) for value in values), re.DOTALL)
    return lambda text: pattern.fullmatch(text) is not None


def _as_pattern(value: str) -> str:
    return "".join({"*": ".*", "?": "."}.get(letter, re.escape(letter)) for letter in value)
