from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest

from rubberband.errors import InputError
from rubberband.units import (
    counted,
    duration,
    format_bytes,
    format_duration,
    format_instant,
    format_usd,
    nearest,
    parse_bytes,
    parse_deadline,
    parse_duration,
    parse_usd,
    shown,
)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("90s", 90),
        ("20m", 1200),
        ("1h30m", 5400),
        ("1d", 86400),
        ("1d 2h", 93600),
        ("90", 90),
        (90, 90),
        (0.5, 0.5),
        ("1.5h", 5400),
        (".5h", 1800),
        ("5 mins", 300),
        ("5m", 300),
        ("1 minute", 60),
        ("90 s", 90),
        ("90 Seconds", 90),
        ("2 hours", 7200),
        ("2 hrs 5 mins", 7500),
        ("1h 30m", 5400),
        ("3 days", 259200),
    ],
)
def test_durations(written: object, seconds: float) -> None:
    assert parse_duration(written) == seconds


@pytest.mark.parametrize(
    "written",
    [
        "",
        "x",
        "-5s",
        -1,
        "1m1h",
        "5 parsecs",
        "5 ms",
        "1 5m",
        "5 min s",
        float("nan"),
        float("inf"),
        "nan",
        "inf",
        True,
        None,
        [1],
        "99999d",
        10**400,
    ],
)
def test_an_invalid_duration_is_refused_with_the_remedy(written: object) -> None:
    with pytest.raises(InputError, match="write it as 90s, 20m, 1h30m"):
        parse_duration(written)


@pytest.mark.parametrize(
    ("written", "remedy"),
    [("1:30", "write 1h30m, or 1m30s"), ("1h30", "write 1h30m"), ("1,5h", "write 1.5h"), ("1,5 h", "write 1.5 h")],
)
def test_a_duration_of_another_notation_is_refused_with_what_to_write(written: str, remedy: str) -> None:
    with pytest.raises(InputError, match=f"{written!r} is not a duration; {remedy}$"):
        parse_duration(written)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.25, "0.25s"), (59.96, "1m"), (90, "1m30s"), (1691, "28m11s"), (5400, "1h30m"), (90061, "1d1h1m1s")],
)
def test_durations_as_text(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("written", "size_bytes"),
    [
        ("64MB", 64_000_000),
        ("10MiB", 10 * 2**20),
        ("1.5 kB", 1500),
        ("2gib", 2**31),
        ("700", 700),
        (700, 700),
        ("9B", 9),
    ],
)
def test_sizes(written: object, size_bytes: int) -> None:
    assert parse_bytes(written) == size_bytes


@pytest.mark.parametrize("written", ["", "MB", "64M B x", "-1MB", -1, True, None, "inf", float("nan"), 10**400, "9PB"])
def test_an_invalid_size_is_refused_with_the_remedy(written: object) -> None:
    with pytest.raises(InputError, match="write it as 64MB, 10MiB or plain bytes"):
        parse_bytes(written)


@pytest.mark.parametrize(("size_bytes", "text"), [(0, "0 bytes"), (152_300, "152 KB"), (64e6, "64 MB"), (2e9, "2 GB")])
def test_sizes_as_text(size_bytes: float, text: str) -> None:
    assert format_bytes(size_bytes) == text


def test_an_absolute_deadline_is_an_instant() -> None:
    assert parse_deadline("2026-11-21T20:00:00Z") == datetime(2026, 11, 21, 20, tzinfo=UTC)
    assert parse_deadline("2026-11-21T20:00:00+01:00") == datetime(2026, 11, 21, 19, tzinfo=UTC)
    assert format_instant(datetime(2026, 11, 21, 20, tzinfo=UTC)) == "2026-11-21T20:00:00Z"


def test_a_deadline_may_be_a_duration() -> None:
    assert parse_deadline("20m") == 1200.0


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("2026-11-21T20:00:00", "has no time zone; add one"),
        (datetime(2026, 11, 21), "has no time zone; add one"),
        ("2026-13-21T20:00:00Z", "is not a time"),
        ("0s", "over before it started"),
    ],
)
def test_deadlines_that_are_refused(written: object, why: str) -> None:
    with pytest.raises(InputError, match=why):
        parse_deadline(written)


@pytest.mark.parametrize(
    ("amount_usd", "text"), [(12.835, "12.84 USD"), (0, "0.00 USD"), (0.0123, "0.0123 USD"), (1234.5, "1,234.50 USD")]
)
def test_money(amount_usd: float, text: str) -> None:
    assert format_usd(amount_usd) == text


@pytest.mark.parametrize(
    ("written", "amount_usd"),
    [
        (5, 5),
        (0.5, 0.5),
        ("5", 5),
        ("$5", 5),
        ("5$", 5),
        ("5 USD", 5),
        ("5 usd", 5),
        ("USD 5", 5),
        ("US$5", 5),
        ("0.50 usd", 0.5),
        ("$.50", 0.5),
        ("5 dollars", 5),
        ("1,234.50 USD", 1234.5),
        ("1e3", 1000),
    ],
)
def test_amounts_of_money(written: object, amount_usd: float) -> None:
    assert parse_usd(written) == amount_usd


@pytest.mark.parametrize(
    "written",
    ["", "$", "5 EUR", "€5", "-5", "-$5", -1, "$5 USD", "1,5", "5k", "5 $ 6", "1e999", 10**400, float("nan"), True],
)
def test_an_invalid_amount_is_refused_with_the_remedy(written: object) -> None:
    with pytest.raises(InputError, match=r"write US dollars as 5, 0\.50, \$5 or 5 USD$"):
        parse_usd(written)


def test_nearest_names_the_likeliest_or_all() -> None:
    assert nearest("deadlin", ["deadline", "max_cost"]) == "did you mean 'deadline'?"
    assert nearest("zzz", ["deadline", "max_cost"]) == "known are deadline, max_cost"


@pytest.mark.parametrize("value", ["a\nb", "x" * 1000, pytest.param(10**5000, id="huge"), "\ud800", [["a\n"]]])
def test_values_are_shown_on_one_short_line(value: object) -> None:
    assert "\n" not in shown(value)
    assert len(shown(value)) <= 60
    shown(value).encode()


@pytest.mark.parametrize("zone", ["America/Los_Angeles", "Pacific/Kiritimati"])
def test_an_instant_is_written_in_utc_wherever_it_is_read(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert format_instant(datetime(2026, 11, 21, 20, tzinfo=UTC)) == "2026-11-21T20:00:00Z"
        assert parse_deadline("2026-11-21T20:00:00+01:00") == datetime(2026, 11, 21, 19, tzinfo=UTC)
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 trials"), (1, "1 trial"), (2, "2 trials"), (1000, "1000 trials"), (10_000, "10,000 trials")],
)
def test_counts_with_a_noun(count: int, text: str) -> None:
    assert counted(count, "trial") == text


@pytest.mark.parametrize(("seconds", "text"), [(9.4, "9.4s"), (9.6, "10s"), (26.3, "26s"), (7199.6, "2h")])
def test_measured_durations_as_text(seconds: float, text: str) -> None:
    assert duration(seconds) == text
