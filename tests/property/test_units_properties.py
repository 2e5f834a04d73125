from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rubberband.errors import InputError
from rubberband.spec.experiment import Experiment
from rubberband.spec.loading import dump_experiment, parse_experiment, read_yaml
from rubberband.spec.space import parse
from rubberband.units import (
    MAX_DURATION_S,
    MAX_USD,
    format_duration,
    format_usd,
    parse_bytes,
    parse_deadline,
    parse_duration,
    parse_usd,
)
from rubberband.views.formatting import rounded
from tests.builders.budget import examples
from tests.builders.experiment_strategies import experiments, yaml_like
from tests.builders.experiment_words import EXAMPLE


@given(st.floats(0, MAX_DURATION_S - 60))
def test_a_formatted_duration_reads_back_to_what_is_shown(seconds: float) -> None:
    again = parse_duration(format_duration(seconds))
    assert again == pytest.approx(seconds, abs=0.5 if seconds >= 59.95 else 0.06)


@given(st.integers(0, 10**11), st.sampled_from(["{} USD", "${}", "{}$", "US$ {}", "usd{}", "{}"]))
def test_written_cents_read_back_exactly(cents: int, notation: str) -> None:
    assert parse_usd(notation.format(f"{cents // 100}.{cents % 100:02d}")) == pytest.approx(cents / 100, rel=1e-15)


@given(st.floats(0, MAX_USD))
def test_a_formatted_amount_reads_back_to_what_is_shown(amount_usd: float) -> None:
    assert parse_usd(format_usd(amount_usd)) == pytest.approx(amount_usd, abs=0.00501 if amount_usd >= 0.1 else 5.01e-5)


PARTS = {"d": ["d", "day", " days"], "h": ["h", "hr", " hours"], "m": ["m", " min", "mins"], "s": ["s", " sec", "secs"]}


@given(st.lists(st.integers(0, 99), min_size=4, max_size=4), st.data())
def test_every_spelling_of_the_units_is_the_same_duration(counts: list[int], data: st.DataObject) -> None:
    written = [f"{count}{data.draw(st.sampled_from(PARTS[unit]))}" for count, unit in zip(counts, PARTS, strict=True)]
    days, hours, minutes, seconds = counts
    text = data.draw(st.sampled_from(["", " "])).join(written)
    assert parse_duration(data.draw(st.sampled_from([text, text.upper()]))) == (
        days * 86400 + hours * 3600 + minutes * 60 + seconds
    )


NEARLY = st.text("0123456789.,:$-+eE dhmsinrusecaytolUSDKMGB\u00a0€", max_size=20)


@given(
    st.sampled_from([parse_deadline, parse_duration, parse_usd, parse_bytes]),
    NEARLY | st.text() | st.floats() | st.integers() | st.none() | st.binary() | st.datetimes() | st.booleans(),
)
def test_anything_is_a_value_or_an_input_error_of_one_line(parse: Callable[[object], object], value: object) -> None:
    try:
        parse(value)
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


def is_an_experiment_or_refused_in_one_line(content: str | bytes) -> bool:
    try:
        return isinstance(parse_experiment(content), Experiment)
    except InputError as error:
        return b"\n" not in str(error).encode()


@given(st.binary(max_size=200) | st.text(max_size=200) | yaml_like)
@settings(max_examples=examples(300), deadline=None)
def test_any_text_is_an_experiment_or_an_input_error(content: str | bytes) -> None:
    assert is_an_experiment_or_refused_in_one_line(content)


@given(st.integers(0, len(EXAMPLE)), st.integers(0, 40), yaml_like)
@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_slip_in_the_example_is_an_experiment_or_an_input_error(start: int, length: int, typed: str) -> None:
    assert is_an_experiment_or_refused_in_one_line(EXAMPLE[:start] + typed + EXAMPLE[start + length :])


NUMBERS = st.floats(-1e6, 1e6).map("{:g}".format) | st.integers(0, 10**6).map(str)


@given(NUMBERS, st.sampled_from(["..", "...", " to ", " ~ ", ".. "]), NUMBERS)
def test_a_range_is_refused_with_a_line_that_is_a_domain(one: str, sign: str, other: str) -> None:
    assume(float(one) != float(other))
    with pytest.raises(InputError) as caught:
        parse(f"{one}{sign}{other}")
    line = str(caught.value).partition("write ")[2].partition(", or {")[0]
    arguments = parse(read_yaml(line)[0]).arguments
    lower, upper = arguments["lower"], arguments["upper"]
    assert {float(one), float(other)} <= {lower, upper, upper - 1}


@given(st.text("0123456789.,-+eE~ to…–()[]=loguniformchoice", max_size=30) | st.text())
def test_any_text_is_a_constant_or_refused_with_what_to_write(text: str) -> None:
    try:
        message = parse(text) and ""
    except InputError as error:
        message = str(error)
    assert not message or ("; write {type: " in message and "\n" not in message)


@given(experiments)
@settings(max_examples=examples(100), deadline=None)
def test_an_experiment_survives_its_file(document: dict[str, Any]) -> None:
    experiment = Experiment(**document)
    again = parse_experiment(dump_experiment(experiment))
    assert again == experiment
    assert again.configurations() == experiment.configurations()
