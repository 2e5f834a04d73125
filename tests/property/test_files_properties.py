from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rubberband.errors import InputError
from rubberband.spec.experiment import Experiment
from rubberband.spec.loading import dump_experiment, parse_experiment, read_yaml
from rubberband.spec.space import parse
from tests.builders.budget import examples
from tests.builders.experiment_strategies import (
    experiments,
    yaml_like,
)
from tests.builders.experiment_words import EXAMPLE


def is_an_experiment_or_told_in_one_line(content: str | bytes) -> bool:
    try:
        return isinstance(parse_experiment(content), Experiment)
    except InputError as error:
        return b"\n" not in str(error).encode()


@given(st.binary(max_size=200) | st.text(max_size=200) | yaml_like)
@settings(max_examples=examples(300), deadline=None)
def test_any_text_is_an_experiment_or_an_input_error(content: str | bytes) -> None:
    assert is_an_experiment_or_told_in_one_line(content)


@given(st.integers(0, len(EXAMPLE)), st.integers(0, 40), yaml_like)
@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_slip_in_the_example_is_an_experiment_or_an_input_error(start: int, length: int, typed: str) -> None:
    assert is_an_experiment_or_told_in_one_line(EXAMPLE[:start] + typed + EXAMPLE[start + length :])


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
