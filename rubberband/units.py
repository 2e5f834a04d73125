"""Words of time and money: durations, deadlines and dollars, as people write them and as the program reckons.

Inside the program a duration is a float of seconds and an instant is Unix time in seconds. This module reads what a
user wrote and writes what a user reads; it reads no clock.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime

from rubberband.errors import InputError

MAX_DURATION_S = 10 * 365 * 86400.0
"""Ten years: what is longer is a slip of the pen."""

MAX_BYTES = 10**15
"""A petabyte: what is larger is a slip of the pen."""

_UNIT_S = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_NUMBER = r"\d+(?:\.\d+)?"
_PARTS = re.compile(rf"(?:({_NUMBER})d)?(?:({_NUMBER})h)?(?:({_NUMBER})m)?(?:({_NUMBER})s)?", re.ASCII)
_PLAIN = re.compile(rf"{_NUMBER}(?:[eE][-+]?\d+)?", re.ASCII)
_HOW = "write it as 90s, 20m, 1h30m, 1d or plain seconds"


def parse_duration(value: object) -> float:
    """Seconds of a duration: `90s`, `20m`, `1h30m`, `1d`, or a number of seconds (as a number or as text).

    Raises InputError if it is not a duration, not finite, negative, or longer than ten years.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise InputError(f"{shown(value)} is not a duration; {_HOW}")
    seconds = _seconds_of_text(value) if isinstance(value, str) else _seconds_of_number(value)
    if not 0.0 <= seconds <= MAX_DURATION_S:
        raise InputError(f"{shown(value)} is not a duration from 0s to {MAX_DURATION_S / 86400:.0f}d; {_HOW}")
    return seconds


def _seconds_of_number(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _seconds_of_text(text: str) -> float:
    compact = text.strip().replace(" ", "")
    if _PLAIN.fullmatch(compact):
        return float(compact)
    match = _PARTS.fullmatch(compact)
    if not compact or match is None:
        raise InputError(f"{shown(text)} is not a duration; {_HOW}")
    return sum(float(part) * unit_s for part, unit_s in zip(match.groups(), _UNIT_S.values(), strict=True) if part)


def format_duration(seconds: float) -> str:
    """A duration as text that `parse_duration` reads: `1h30m`, `28m11s`, `0.25s`.

    Tenths (or less) of a second are kept below one minute only; longer ones are rounded to the second.
    """
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    if not math.isfinite(seconds):
        return "for ever" if seconds > 0 else "unknown"
    if seconds < 59.95:
        return f"{seconds:.3g}s" if seconds >= 1e-4 or seconds == 0 else f"{seconds:.6f}s"
    left, text = round(seconds), ""
    for unit, unit_s in _UNIT_S.items():
        count, left = divmod(left, int(unit_s))
        text += f"{count}{unit}" if count else ""
    return text


_UNIT_BYTES = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for base, suffix in ((1000, "B"), (1024, "IB"))
    for power, prefix in enumerate("KMGT", 1)
}
_SIZE = re.compile(rf"({_NUMBER})([A-Z]*)", re.ASCII)


def parse_bytes(value: object) -> int:
    """Bytes of a size: `64MB` (millions), `10MiB` (of 1,048,576), or a number of bytes (as a number or as text).

    Raises InputError if it is no size, not finite, negative, or more than a petabyte.
    """
    how = "write it as 64MB, 10MiB or plain bytes"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise InputError(f"{shown(value)} is not a size; {how}")
    size_bytes: float = -1.0
    if not isinstance(value, str):
        size_bytes = value
    elif (match := _SIZE.fullmatch(value.strip().replace(" ", "").upper())) and match[2] in _UNIT_BYTES:
        size_bytes = float(match[1]) * _UNIT_BYTES[match[2]]
    if not 0 <= size_bytes <= MAX_BYTES:
        raise InputError(f"{shown(value)} is not a size from 0 to 1000TB; {how}")
    return round(size_bytes)


def format_bytes(size_bytes: float) -> str:
    """A size as text: `152 KB`, `63.9 MB`."""
    for unit in ("bytes", "KB", "MB"):
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} GB"


def parse_deadline(value: object) -> float | datetime:
    """A deadline: a duration in seconds (float) from the start, or an instant (datetime with a zone).

    Raises InputError if it is neither, is not positive, or is an instant without a zone.
    """
    if isinstance(value, str) and re.match(r"\s*\d{4}-\d", value):
        return _parse_instant(value)
    if isinstance(value, datetime):
        return _zoned(value, value.isoformat())
    duration_s = parse_duration(value)
    if duration_s == 0.0:
        raise InputError("a deadline of 0s is over before it began; give the time that you have, such as 20m")
    return duration_s


def _parse_instant(text: str) -> datetime:
    try:
        instant = datetime.fromisoformat(text.strip())
    except ValueError:
        raise InputError(f"{shown(text)} is not a time; write it as 2026-11-21T20:00:00Z, or as a duration") from None
    return _zoned(instant, text)


def _zoned(instant: datetime, text: str) -> datetime:
    if instant.tzinfo is None or instant.utcoffset() is None:
        raise InputError(f"{shown(text)} has no time zone; add one, such as 2026-11-21T20:00:00Z or +01:00")
    try:
        return instant.astimezone(UTC)
    except OverflowError:
        raise InputError(f"{shown(text)} is out of range; give a time such as 2026-11-21T20:00:00Z") from None


def format_instant(instant: datetime) -> str:
    """An instant in UTC as `parse_deadline` reads it: 2026-11-21T20:00:00Z."""
    return instant.astimezone(UTC).isoformat().replace("+00:00", "Z")


def format_usd(amount_usd: float) -> str:
    """An amount of money: `12.84 USD`; below ten cents with four decimals."""
    decimals = 2 if amount_usd == 0 or abs(amount_usd) >= 0.1 else 4
    return f"{amount_usd:,.{decimals}f} USD"


def shown(value: object) -> str:
    """A value as an error message shows it: on one line, quoted as Python would, cut after 60 characters."""
    try:
        text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def nearest(word: str, known: Iterable[str]) -> str:
    """What an error adds about a word that is not among the `known` ones: the nearest one, or all of them."""
    import difflib

    options = list(known)
    close = difflib.get_close_matches(word[:100], options, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(options)}"
