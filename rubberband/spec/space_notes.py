"""Remarks on constants of a search space that look like something else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from rubberband.spec.space import NUMBER, Domain, SubSpace, canonical, domain_meant, range_meant
from rubberband.units import shown

_WORDS_IN_QUOTES = ("true", "false", "null", "none", "yes", "no", "on", "off")


def constant_notes(space: Mapping[str, Any], *, is_typed: bool, at: str = "space") -> Iterator[str]:
    """Yield remarks on constants and options that look like something else: a list of values, a text like a number.

    `is_typed`: trials get values, not words of a command line, which are all texts.
    """
    for name, value in space.items():
        here = f"{at}.{name}"
        if isinstance(value, list) and (advice := _list_meant(value)):
            yield f"{here}: {shown(value)} is a constant: each trial gets the whole list; {advice}."
        options = value.options if isinstance(value, Domain) else (value,)
        of_texts = (note for text in options if isinstance(text, str) for note in _text_notes(here, text, is_typed))
        yield from islice(of_texts, 1)
        for option in options:
            if isinstance(option, SubSpace):
                yield from constant_notes(option.space, is_typed=is_typed, at=f"{here}.{option.name}")
            elif any(isinstance(part, Mapping) and {"lower", "upper"} <= part.keys() for part in _parts(option)):
                yield f"{here}: {shown(option)} is a constant; for a range write {{type: uniform, lower: …, upper: …}}."


def _parts(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else (value,)


def _list_meant(values: list[Any]) -> str:
    """Return the lines to write for a list of different numbers or texts; "" for other lists."""
    if not values or not all(isinstance(value, bool | int | float | str) for value in values):
        return ""
    texts = list(map(canonical, values))
    if len(set(texts)) < len(texts):
        return ""
    advice = f"to draw one of its values, write {{type: choice, values: {shown(values)}}}"
    if len(values) == 2 and all(re.fullmatch(NUMBER, text) for text in texts):
        advice += f", and to draw between them {range_meant(*texts)}"
    return advice


def _text_notes(at: str, text: str, is_typed: bool) -> Iterator[str]:
    if is_typed and re.fullmatch(NUMBER, text, re.ASCII):
        yield f"{at}: {shown(text)} is a text, not a number; write {text} without quotes if the number is meant."
    elif is_typed and text.lower() in _WORDS_IN_QUOTES and (text.lower() != "none" or text == "None"):
        yield f"{at}: {shown(text)} is a text, which Python takes for true; write true, false or null without quotes."
    elif line := domain_meant(text):
        yield f"{at}: {shown(text)} is a constant, not a domain; write {line} if that is meant."
