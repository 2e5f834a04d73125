from __future__ import annotations

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
from tests.builders.tables import cases


@cases("written", "seconds")
def test_durations(written: object, seconds: float) -> None:
    assert parse_duration(written) == seconds


@cases("written")
def test_an_invalid_duration_is_refused_with_the_remedy(written: object) -> None:
    with pytest.raises(InputError, match="write it as 90s, 20m, 1h30m"):
        parse_duration(written)


@cases("written", "remedy")
def test_a_duration_of_another_notation_is_refused_with_what_to_write(written: str, remedy: str) -> None:
    with pytest.raises(InputError, match=f"{written!r} is not a duration; {remedy}$"):
        parse_duration(written)


@cases("seconds", "text")
def test_durations_as_text(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@cases("written", "size_bytes")
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


@cases("written", "amount_usd")
def test_amounts_of_money(written: object, amount_usd: float) -> None:
    assert parse_usd(written) == amount_usd


@cases("written")
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


@pytest.mark.usefixtures("zone")
def test_an_instant_is_written_in_utc_wherever_it_is_read() -> None:
    assert format_instant(datetime(2026, 11, 21, 20, tzinfo=UTC)) == "2026-11-21T20:00:00Z"
    assert parse_deadline("2026-11-21T20:00:00+01:00") == datetime(2026, 11, 21, 19, tzinfo=UTC)


@cases("count", "text")
def test_counts_with_a_noun(count: int, text: str) -> None:
    assert counted(count, "trial") == text


@pytest.mark.parametrize(("seconds", "text"), [(9.4, "9.4s"), (9.6, "10s"), (26.3, "26s"), (7199.6, "2h")])
def test_measured_durations_as_text(seconds: float, text: str) -> None:
    assert duration(seconds) == text
