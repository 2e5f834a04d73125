"""Units of time, money and size: durations, deadlines, dollars and bytes, as people write them.

Inside the program a duration is a float of seconds and an instant is Unix time in seconds. This module reads no clock.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from rubberband.errors import InputError

MONEY_SLACK_USD = 1e-9
"""Sums of the same parts in another order may differ by this much."""

_ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception)(: |$)")

MAX_DURATION_S = 10 * 365 * 86400.0
"""Ten years. More than these limits is taken for a typing error."""
MAX_BYTES = 10**15
"""A petabyte."""
MAX_USD = 1e9
"""A billion."""

_UNIT_S = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_NUMBER = r"\d+(?:\.\d+)?|\.\d+"
_PARTS = re.compile(
    rf"(?:({_NUMBER}) ?(?:days?|d))? ?(?:({_NUMBER}) ?(?:hours?|hrs?|h))? ?"
    rf"(?:({_NUMBER}) ?(?:minutes?|mins?|m))? ?(?:({_NUMBER}) ?(?:seconds?|secs?|s))?",
    re.ASCII | re.IGNORECASE,
)
_PLAIN = re.compile(rf"-?(?:{_NUMBER})(?:[eE][-+]?\d+)?", re.ASCII)
_HOW = "write it as 90s, 20m, 1h30m, 1d or plain seconds"


def month_begin(instant: float) -> float:
    """Return the Unix time of the begin of the calendar month (UTC) of `instant`."""
    return datetime.fromtimestamp(instant, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()


def month_end(instant: float) -> float:
    """Return the Unix time of the end of the calendar month (UTC) of `instant`."""
    # 32 days from its begin, each month is over and the next one is not.
    return month_begin(month_begin(instant) + 32 * _UNIT_S["d"])


def parse_duration(value: object) -> float:
    """Return the seconds of a duration: `90s`, `5 mins`, `1h30m`, `2 hours`, `1d`, or a number (also as text).

    Units go from large to small, in any case. Raises InputError if it is not a duration, not finite, negative, or
    longer than ten years.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise InputError(f"{shown(value)} is not a duration; {_HOW}")
    seconds = _seconds_of_text(value) if isinstance(value, str) else _number(value)
    if not 0.0 <= seconds <= MAX_DURATION_S:
        raise InputError(f"{shown(value)} is not a duration from 0s to {MAX_DURATION_S / 86400:.0f}d; {_HOW}")
    return seconds


def _number(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _seconds_of_text(text: str) -> float:
    written = " ".join(text.split())
    if _PLAIN.fullmatch(written):
        return float(written)
    match = _PARTS.fullmatch(written)
    if not written or match is None:
        raise InputError(f"{shown(text)} is not a duration; {_meant(written) or _HOW}")
    return sum(float(part) * unit_s for part, unit_s in zip(match.groups(), _UNIT_S.values(), strict=True) if part)


def _meant(written: str) -> str:
    """Return the fix for `1:30`, `1h30` or `1,5h`; empty for other texts."""
    if match := re.fullmatch(r"(\d{1,3}):(\d\d)", written, re.ASCII):
        return f"write {match[1]}h{match[2]}m, or {match[1]}m{match[2]}s"
    if match := re.fullmatch(r"(\d{1,3})h(\d\d?)", written, re.ASCII):
        return f"write {match[1]}h{match[2]}m"
    if re.fullmatch(r"\d{1,6},\d{1,6} ?[dhms]", written, re.ASCII):
        return f"write {written.replace(',', '.')}"
    return ""


def format_duration(seconds: float) -> str:
    """Return a duration as text that `parse_duration` reads: `1h30m`, `28m11s`, `0.25s`.

    Tenths (or less) of a second are kept below one minute only; longer ones are rounded to the second.
    """
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    if not math.isfinite(seconds):
        return "unlimited" if seconds > 0 else "unknown"
    if seconds < 59.95:
        return f"{seconds:.3g}s" if seconds >= 1e-4 or seconds == 0 else f"{seconds:.6f}s"
    left, text = round(seconds), ""
    for unit, unit_s in _UNIT_S.items():
        count, left = divmod(left, int(unit_s))
        text += f"{count}{unit}" if count else ""
    return text


def duration(seconds: float) -> str:
    """Return a duration that was measured or predicted, from ten seconds on in whole seconds.

    Each is written by this wherever it is shown. `format_duration` is for what users write, such as a deadline.
    """
    # Equal times look equal: rounded first, so that floating point does not tell 12.5 from 12.499999999.
    return format_duration(round(round(seconds, 6)) if seconds >= 9.5 else seconds)


_UNIT_BYTES = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for base, suffix in ((1000, "B"), (1024, "IB"))
    for power, prefix in enumerate("KMGT", 1)
}
_SIZE = re.compile(rf"({_NUMBER})([A-Z]*)", re.ASCII)


def parse_bytes(value: object) -> int:
    """Return the bytes of a size: `64MB` (millions), `10MiB` (of 1,048,576), or a number (also as text).

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
    """Return a size as text: `152 KB`, `63.9 MB`."""
    for unit in ("bytes", "KB", "MB"):
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} GB"


def parse_deadline(value: object) -> float | datetime:
    """Return a deadline: a duration in seconds (float) from the start, or an instant (datetime with a zone).

    Raises InputError if it is neither, is not positive, or is an instant without a zone.
    """
    if isinstance(value, str) and re.match(r"\s*\d{4}-\d", value):
        return _parse_instant(value)
    if isinstance(value, datetime):
        return _zoned(value, value.isoformat())
    try:
        duration_s = parse_duration(value)
    except InputError as error:
        raise InputError(f"{error}, or as a time with its zone, such as 2026-11-21T20:00:00Z") from None
    if duration_s == 0.0:
        raise InputError("a deadline of 0s is over before it started; give the time that you have, such as 20m")
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


def instant_text(at: float) -> str:
    """Return an instant (Unix time) for people, in UTC to the second: 2026-11-21T20:00:00Z."""
    return format_instant(datetime.fromtimestamp(int(at), UTC))


def deadline_text(at: float, submitted_at: float | None) -> str:
    """Return a deadline (Unix time) for people: 2026-11-21T20:00:00Z (4m after its submission)."""
    after = "" if submitted_at is None else f" ({duration(at - submitted_at)} after its submission)"
    return instant_text(round(at, 3)) + after


def format_instant(instant: datetime) -> str:
    """Return an instant in UTC as `parse_deadline` reads it: 2026-11-21T20:00:00Z."""
    return instant.astimezone(UTC).isoformat().replace("+00:00", "Z")


_MONEY = re.compile(
    r"(?P<before>(?:us)?\$|usd)? ?(?P<amount>\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)"
    r"(?P<exponent>e[-+]?\d+)? ?(?P<after>(?:us)?\$|usd|dollars?)?",
    re.ASCII | re.IGNORECASE,
)


def parse_usd(value: object) -> float:
    """Return the US dollars of an amount: `$5`, `5 USD`, `5$`, `1,234.50 USD`, or a number (also as text).

    Raises InputError if it is no amount, in another currency, not finite, negative, or more than a billion.
    """
    how = "write US dollars as 5, 0.50, $5 or 5 USD"
    amount_usd = math.nan
    if isinstance(value, str):
        if (match := _MONEY.fullmatch(" ".join(value.split()))) and not (match["before"] and match["after"]):
            amount_usd = float(match["amount"].replace(",", "") + (match["exponent"] or ""))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        amount_usd = _number(value)
    if math.isnan(amount_usd):
        raise InputError(f"{shown(value)} is not an amount of money; {how}")
    if not 0.0 <= amount_usd <= MAX_USD:
        raise InputError(f"{shown(value)} is not an amount from 0 to {MAX_USD:,.0f} USD; {how}")
    return amount_usd


def format_usd(amount_usd: float) -> str:
    """Return an amount of money: `12.84 USD`; below ten cents with four decimals."""
    decimals = 2 if amount_usd == 0 or abs(amount_usd) >= 0.1 else 4
    return f"{amount_usd:,.{decimals}f} USD"


_USD = re.compile(
    r"""(?<=[\d}]\ )USD\b  # 1.25 USD; the place of a number in a chart's text
    | (?<=\()USD(?=[)/])  # cost (USD)
    | (?<="text":")USD(?=")  # an axis
    | (?P<head>(?:<th[^>]*>|data-label="|^)expected\ |<th[^>]*>|data-label=")USD\b
    | ^USD(?=$|:|\ plan$)
    | (?:(?<=>)|(?<=\.\ ))USD(?=:)  # the note below a table""",
    re.VERBOSE,
)
"""USD after a number, in parentheses, or as the head of a column or an axis. Elsewhere it may be a user's word."""


def in_unit(text: str, unit: str) -> str:
    """Return a text whose amounts count another unit than US dollars with that unit."""
    return text if unit == "USD" else _USD.sub(lambda match: f"{match['head'] or ''}{unit}", text)


def counted(count: int, what: str) -> str:
    """Return `1 trial`, `2 trials`, `10,000 trials`: every count with a noun is written by this."""
    return f"{count:{',' if count >= 10_000 else ''}} {what}{'' if count == 1 else 's'}"


def gpus_each(gpus: int, trials_per_gpu: int) -> str:
    """Return the GPUs of a trial: `2`, or `1/4` where four trials share one."""
    return str(gpus) if trials_per_gpu == 1 else f"{gpus}/{trials_per_gpu}"


TURNING = {*map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2066, 0x206A))}
"""Characters that set the direction of the text after them, on a page or a terminal."""


def shown(value: object) -> str:
    """Return a value for an error message: on one line, quoted as in Python, at most 60 characters."""
    try:
        text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def whole(value: Any) -> Any:
    """Return a float without a fraction, such as `1e2`, as the whole number; other values as they are."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the hint for a word that is not among the `known` ones: the nearest one, or all of them."""
    options = list(known)
    close = near(word, options)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(options)}"


def near(word: str, known: Iterable[str], most: int = 1) -> list[str]:
    """Return up to `most` of the known words that `word` may be a slip of, the nearest one first."""
    import difflib

    by_word = {name.lower(): name for name in known}
    return [by_word[name] for name in difflib.get_close_matches(word[:100].lower(), by_word, n=most, cutoff=0.6)]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'loss'?`, to end a message; empty if no known word is near."""
    close = near(word, known)
    return f"; did you mean {close[0]!r}?" if close else ""


def error_line(text: str) -> str:
    """Return the line of an output that says what failed: that of the last error in it, else its last one.

    Messages may have more lines: those of CUDA end with general advice.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next(filter(_ERROR.match, reversed(lines)), lines[-1] if lines else "")


def short_time(seconds: float) -> str:
    """Return a time of less than a minute or so in ms or s: `31.4 ms`."""
    return f"{1000.0 * seconds:.3g} ms" if seconds < 1.0 else f"{seconds:.3g} s"
