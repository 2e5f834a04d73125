from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rubberband.api.body import allows_code, read_experiment, require_allowed, require_no_paths
from rubberband.api.problems import INVALID, MALFORMED, MEDIA, REFUSED, TOO_LARGE, HttpProblem, Kind
from rubberband.api.settings import ServiceLimits, Settings
from rubberband.spec.experiment import Experiment
from rubberband.spec.loading import MAX_BYTES, dump_experiment, parse_experiment
from tests.builders.budget import examples
from tests.builders.experiment_strategies import experiments, yaml_like
from tests.builders.experiment_words import EXAMPLE, words
from tests.builders.tables import cases

OPEN = Settings(
    home=Path("/nowhere"),
    entrypoints=("examples.digits:DigitsTrial", "mine:*"),
    checkpoints=("s3://b/p", "/shared/team"),
)


def body_of(document: Any) -> bytes:
    return json.dumps(document).encode()


def problem(body: bytes, media_type: str = "application/json", *overrides: str) -> HttpProblem:
    with pytest.raises(HttpProblem) as caught:
        read_experiment(body, media_type, overrides)
    assert "\n" not in caught.value.detail
    return caught.value


def test_json_and_yaml_say_the_same() -> None:
    written = read_experiment(EXAMPLE.encode(), "application/yaml; charset=UTF-8")
    assert written == parse_experiment(EXAMPLE)
    assert read_experiment(body_of(written.to_words()), "application/json") == written
    assert read_experiment(b"\xef\xbb\xbf" + body_of(written.to_words()), "application/json") == written


@given(experiments)
@settings(max_examples=examples(50), deadline=None)
def test_any_experiment_survives_its_words(document: dict[str, Any]) -> None:
    experiment = Experiment(**document)
    assert read_experiment(body_of(experiment.to_words()), "application/json") == experiment
    assert read_experiment(dump_experiment(experiment).encode(), "text/yaml") == experiment


@pytest.mark.parametrize("section", ["batch", "training", "constraints", "resources"])
def test_an_empty_section_is_previewed(section: str) -> None:
    """A preview keeps the words that were given, and no defaults."""
    asked = Experiment(**words(**{section: {}}))
    written = asked.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)
    assert Experiment(**written) == asked


def test_single_values_are_set_as_on_the_command_line() -> None:
    overrides = ("constraints.deadline=30m", "profile.seconds_per_iteration.1=20", "resources.gpus_per_trial.max=2")
    for body, media_type in ((body_of(words()), "application/json"), (EXAMPLE.encode(), "text/plain")):
        experiment = read_experiment(body, media_type, overrides)
        assert experiment.constraints.deadline_s == 1800.0
        assert experiment.resources.gpus_per_trial.max == 2
        profile = experiment.loaded_profile()
        assert profile is not None
        assert profile.seconds_per_iteration[1] == 20.0


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        (b"", MALFORMED, "not JSON"),
        (b"{", MALFORMED, "line 1, column 2"),
        (b"[]", INVALID, "send an object"),
        (b"null", INVALID, "send an object"),
        (b'{"name": NaN}', MALFORMED, "NaN"),
        (b'{"name": -Infinity}', MALFORMED, "-Infinity"),
        (b'{"name": 1e999}', MALFORMED, "1e999"),
        (b'{"name": ' + b"9" * 5000 + b"}", MALFORMED, "too many digits"),
        (b'{"name": "a", "search": {"mode": "min", "mode": "max"}}', MALFORMED, "'mode' occurs twice"),
        (b'{"name": "\\ud800"}', MALFORMED, "surrogate"),
        (b'{"\\udfff": 1}', MALFORMED, "surrogate"),
        (b'{"name": "\xff"}', MALFORMED, "UTF-8"),
        ("{}".encode("utf-16"), MALFORMED, "UTF-8"),
        (b'{"a":' * 40 + b"1" + b"}" * 40, MALFORMED, "nested more than 32"),
        (b'{"a":' + b"[" * 100_000, MALFORMED, "nested more than 32"),
        (b" " * (MAX_BYTES + 1), TOO_LARGE, "262,144"),
        (body_of(words(constraints__deadlin=3)), INVALID, "constraints.deadlin: unknown key"),
        (body_of(words(constraints__deadline="soon")), INVALID, "constraints.deadline: 'soon'"),
    ],
)
def test_invalid_experiments_in_json_are_reported(body: bytes, kind: Kind, text: str) -> None:
    found = problem(body)
    assert found.kind is kind
    assert text in found.detail


def test_invalid_experiments_in_yaml_are_reported_with_their_line() -> None:
    found = problem(EXAMPLE.replace("deadline: 20m", "deadline: soon").encode(), "text/yaml")
    assert found.kind is INVALID
    assert "experiment:15: constraints.deadline: 'soon'" in found.detail


@cases("media_type")
def test_other_types_are_not_read(media_type: str) -> None:
    assert problem(b"{}", media_type).kind is MEDIA


@cases("override", "text")
def test_a_value_that_cannot_be_set_is_reported(override: str, text: str) -> None:
    found = problem(body_of(words()), "application/json", override)
    assert found.kind is INVALID
    assert text in found.detail


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
keys = st.sampled_from(
    [
        *("name", "search", "search__space", "search__scheduler", "constraints", "constraints__deadline", "resources"),
        *("resources__aws", "resources__spot", "profile", "profile__seconds_per_iteration", "batch", "version"),
        "entrypoint",
    ]
)


@given(
    st.binary(max_size=80)
    | yaml_like.map(str.encode)
    | st.builds(lambda key, value: body_of(words(**{key: value})), keys, json_values),
    st.sampled_from(["application/json", "text/yaml"]) | st.text(max_size=20),
    st.lists(st.text(max_size=20) | st.builds("{}={}".format, keys.map(lambda key: key.replace("__", ".")), yaml_like)),
)
@settings(max_examples=examples(300), deadline=None)
def test_any_request_is_an_experiment_or_a_problem(body: bytes, media_type: str, overrides: list[str]) -> None:
    found = None
    try:
        require_allowed(read_experiment(body, media_type, overrides), OPEN)
    except HttpProblem as raised:
        found = raised
    if found is not None:
        assert "\n" not in found.detail
        json.dumps(found.to_json(), allow_nan=False).encode()


def refusal(to_run: bool = True, settings: Settings = OPEN, **changes: Any) -> HttpProblem | None:
    experiment = Experiment(**words(**({"entrypoint": "examples.digits:DigitsTrial"} | changes)))
    found = None
    try:
        require_allowed(experiment, settings) if to_run else require_no_paths(experiment)
    except HttpProblem as raised:
        found = raised
    assert found is None or found.kind is REFUSED
    return found


@pytest.mark.parametrize("to_run", [True, False])
@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"profile": "/etc/passwd"}, "profile"),
        ({"profile": {"by_instance_type": {"p3.2xlarge": "../x"}}}, "profile.by_instance_type.p3.2xlarge"),
        ({"resources__catalogue": "prices.yaml"}, "resources.catalogue"),
    ],
)
def test_no_request_names_a_file_of_the_server(changes: dict[str, Any], key: str, to_run: bool) -> None:
    found = refusal(to_run, **changes)
    assert found is not None
    assert found.to_json()["key"] == key


@cases("changes", "key")
def test_a_forbidden_entry_point_is_previewed_and_not_run(changes: dict[str, Any], key: str) -> None:
    found = refusal(**changes)
    assert found is not None
    assert found.to_json()["key"] == key
    assert refusal(to_run=False, **changes) is None


@cases("changes")
def test_an_allowed_entry_point_is_run(changes: dict[str, Any]) -> None:
    assert refusal(**changes) is None


def test_a_command_is_run_only_where_the_operator_allows_commands() -> None:
    command = {"command": "python train.py", "metrics": "stdout"}
    found = refusal(entrypoint=command)
    assert found is not None
    assert found.detail == (
        "entrypoint.command: commands are not allowed here, as each is a shell on the service's machine; name a "
        "module:attribute, or ask the operator (rubberband serve --allow-commands)"
    )
    assert refusal(False, OPEN, entrypoint=command) is None, "a preview runs nothing"
    assert refusal(True, replace(OPEN, allow_commands=True), entrypoint=command) is None


def test_spending_is_limited_by_true_prices() -> None:
    limited = Settings(
        home=Path("/nowhere"),
        entrypoints=("mine:*",),
        providers=("aws", "virtual"),
        limits=ServiceLimits(max_cost_usd=10.0),
    )

    def key(**changes: Any) -> str | None:
        found = refusal(True, limited, **({"entrypoint": "mine:Trial", "resources__provider": "virtual"} | changes))
        return None if found is None else str(found.to_json()["key"])

    assert key() == "constraints.max_cost"
    assert key(constraints__max_cost=11) == "constraints.max_cost"
    assert key(constraints__max_cost=10) is None
    assert key(constraints__max_cost=10, resources__provider="aws") == "resources.price_per_hour"
    assert key(constraints__max_cost=10, resources={"provider": "aws", "instance_type": "p3.8xlarge"}) is None


def test_a_star_stands_for_what_a_module_holds_in_the_open() -> None:
    assert allows_code("mine:Trial", ("mine:*",))
    assert not allows_code("mine:_Trial", ("mine:*",))
    assert not allows_code("mine.more:Trial", ("mine:*",))
    assert not allows_code("mine:*", ())
