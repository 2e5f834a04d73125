from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.errors import InputError
from rubberband.units import MAX_DURATION_S, format_duration, parse_deadline, parse_duration
from rubberband.views.words import rounded


@given(st.floats(0, MAX_DURATION_S - 60))
def test_a_formatted_duration_reads_back_to_what_is_shown(seconds: float) -> None:
    again = parse_duration(format_duration(seconds))
    assert again == pytest.approx(seconds, abs=0.5 if seconds >= 59.95 else 0.06)


@given(st.text() | st.floats() | st.integers() | st.none() | st.binary() | st.datetimes())
def test_anything_is_a_deadline_or_an_input_error(value: object) -> None:
    try:
        parse_deadline(value)
    except InputError as error:
        message = str(error)
    else:
        message = ""
    assert "\n" not in message


@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=20), st.sampled_from([0.0001, 0.01, 1.0]))
def test_rounded_parts_add_up(parts: list[float], unit: float) -> None:
    steps = rounded(parts, unit)
    assert sum(steps) == pytest.approx(sum(parts), abs=unit * 0.51 + 1e-6)
    assert all(abs(step - part) <= unit * 1.01 + 1e-6 for step, part in zip(steps, parts, strict=True))
