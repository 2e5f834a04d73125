from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

import rubberband
from rubberband.errors import InputError, ProfileMissingError
from rubberband.spec.experiment import Experiment
from rubberband.spec.loading import (
    default_profile_path,
    dump_experiment,
    experiment_schema,
    load_experiment,
    parse_experiment,
    save_profile,
)
from rubberband.values.profile import Profile
from tests.builders import experiment_types
from tests.builders.experiment_words import EXAMPLE, words
from tests.builders.tables import cases

ROOT = Path(__file__).parents[2]
SCHEMA = Path(rubberband.__file__).with_name("experiment.schema.json")


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "digits.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def refusal(content: str | bytes) -> str:
    with pytest.raises(InputError) as caught:
        parse_experiment(content, source="digits.yaml")
    assert all(line.startswith("digits.yaml") for line in str(caught.value).splitlines())
    return str(caught.value)


def test_the_example_of_the_design(tmp_path: Path) -> None:
    experiment = load_experiment(write(tmp_path, EXAMPLE))
    assert experiment.name == "digits-sha"
    assert experiment.search.space["lr"] == rubberband.loguniform(1e-4, 1e-1)
    assert [stage.trials for stage in experiment.brackets()[0]] == [32, 10, 3, 1]
    profile = experiment.loaded_profile()
    assert profile is not None
    assert profile.seconds_per_iteration == {1: 110, 2: 57, 4: 30, 8: 18, 16: 13, 32: 11}
    assert profile.trial_startup_s == 2.0


def test_the_published_schema_is_current_and_holds_the_example() -> None:
    assert SCHEMA.read_text(encoding="utf-8") == experiment_schema()
    assert experiment_types.PATH.read_text(encoding="utf-8") == experiment_types.formatted()
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    example = yaml.safe_load(EXAMPLE.replace("1e-4", "0.0001").replace("1e-1", "0.1"))
    example["profile"]["seconds_per_iteration"] = {"1": 110}
    jsonschema.validate(example, schema)
    jsonschema.validate(Experiment(**words()).to_words(), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**example, "nam": "x"}, schema)


def test_each_key_of_the_schema_has_an_example_that_fits() -> None:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    for name, each in {"the file": schema, **schema["$defs"]}.items():
        for key, value in each.get("properties", {}).items():
            says_itself = {"const", "enum", "$ref"} & value.keys() or value.get("type") == "boolean"
            kinds = [kind for kind in value.get("anyOf", ()) if "enum" in kind]
            if "examples" not in value:
                assert says_itself or kinds or "$ref" in json.dumps(value), f"{name}.{key} has no example"
            for example in value.get("examples", ()):
                jsonschema.Draft202012Validator({**value, "$defs": schema["$defs"]}).validate(example)


def test_the_example_files_name_the_schema() -> None:
    for path in (ROOT / "examples").rglob("*.yaml"):
        if path.parent.name == "deploy":  # of Docker
            continue
        named = re.match(r"# yaml-language-server: \$schema=(.*)\n", path.read_text(encoding="utf-8"))
        assert named is not None, path
        assert (path.parent / named[1]).resolve() == SCHEMA.resolve()


def test_the_whole_file_at_the_head_of_its_page_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mkdocs", reason="the pages are made by MkDocs; pip install -e '.[docs]'")
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    reference = importlib.import_module("reference")
    text = reference.whole_file()
    assert set(yaml.safe_load(text)) == set(Experiment.model_json_schema()["properties"])
    assert parse_experiment(text).constraints.deadline == 7200.0
    assert max(len(line) for line in text.splitlines()) <= 110


def test_an_installation_without_sources_has_a_schema_without_descriptions(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(model: object) -> str:
        raise OSError("could not get source code")

    monkeypatch.setattr("inspect.getsource", gone)
    found = json.loads(experiment_schema())["properties"]["batch"]
    monkeypatch.undo()
    answer = json.loads(SCHEMA.read_text(encoding="utf-8"))["properties"]["batch"]
    assert answer.pop("description")
    assert found == answer


def test_the_published_schema_holds_what_can_only_be_planned() -> None:
    types = ["p3.2xlarge", "p3.8xlarge"]
    document = words(
        search__scheduler={"type": "hyperband", "max_t": 27},
        resources={
            "provider": "aws",
            "instance_types": types,
            "market": "spot",
            "spot": {"interruptions_per_hour": 0.1, "restart": "2m"},
            "provision_delay": {"mean": "30s", "cv": 0.5},
            "init_delay": {"samples": ["12s", 15, "31s"]},
        },
        profile={"by_instance_type": {types[0]: "a.json", types[1]: {"seconds_per_iteration": {"1": 3}}}},
    )
    experiment = Experiment(**document)
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema.validate(document, schema)
    jsonschema.validate(experiment.to_words(), schema)
    assert parse_experiment(dump_experiment(experiment)) == experiment


def test_python_and_yaml_take_the_same_words_and_a_dump_reads_back(tmp_path: Path) -> None:
    assert load_experiment(write(tmp_path, json.dumps(words()))) == Experiment(**words())
    experiment = Experiment(
        **words(search__space={"a": "on", "b": "1e-4", "c": "~", "d": "0x1", "e": [None, 1.5], "f": "é"})
    )
    assert parse_experiment(dump_experiment(experiment)) == experiment


@pytest.mark.parametrize("text", ["\x85", "a\x85b", "\u2028x", "x\u2029", "\ufeff", "Zürich"])
def test_line_breaks_of_other_alphabets_survive_a_dump(text: str) -> None:
    experiment = Experiment(**words(search__space={text: text, "list": [text]}))
    dumped = dump_experiment(experiment)
    assert parse_experiment(dumped) == experiment
    assert ("ü" in dumped) == (text == "Zürich")


def test_numbers_and_booleans_are_those_of_yaml_1_2() -> None:
    text = dump_experiment(Experiment(**words(search__space={}))).replace(
        "space: {}", "space: {a: 1e-4, b: 'no', c: none, d: 1:30, e: 2026-01-01, f: true, g: 1e2, h: 0x10, i: .5, j: ~}"
    )
    found = [1e-4, "no", "none", "1:30", "2026-01-01", True, 100.0, 16, 0.5, None]
    assert parse_experiment(text).search.space == dict(zip("abcdefghij", found, strict=True))


@cases("value", "reason")
def test_a_plain_text_that_is_mostly_meant_as_something_else_is_refused(value: str, reason: str) -> None:
    assert refusal(f"name: a\nsearch:\n  space:\n    k: {value}\n").startswith(f"digits.yaml:4: {reason}")
    quoted = f"search: {{space: {{k: '{value}'}}, scheduler: {{type: sha, num_samples: 2, max_t: 2}}, metric: a}}"
    assert "'k'" not in refusal(f"name: a\n{quoted}"), "in quotes it is the text that it looks like"


def test_a_colon_without_a_space_is_named() -> None:
    assert "'lr:0.1' has no value; put a space after its colon: lr: 0.1" in refusal("search: {space: {lr:0.1}}")


def test_a_whole_number_may_be_written_with_an_exponent() -> None:
    scheduler = {"type": "sha", "num_samples": 1e2, "max_t": 9.0, "grace_period": 1, "reduction_factor": 3.0}
    space = {"k": {"type": "randint", "lower": 1, "upper": 1e3}, "n": 1e2}
    text = dump_experiment(Experiment(**words(search__space=space, search__scheduler=scheduler)))
    experiment = parse_experiment(text)
    search = experiment.search
    assert experiment.brackets()[0][0].trials == 100
    assert repr(search.space["k"].arguments) == "{'lower': 1, 'upper': 1000}"
    assert repr(search.space["n"]) == "100.0", "a constant keeps the kind that is written"
    with pytest.raises(InputError, match=r"num_samples: 1\.5 is not a whole number"):
        parse_experiment(text.replace("num_samples: 100", "num_samples: 1.5"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "digits.yaml is empty; write an experiment"),
        ("# nothing\n", "digits.yaml is empty; write an experiment"),
        ("x", "digits.yaml:1: 'x' is not a mapping"),
        ("[1]", "digits.yaml:1: [1] is not a mapping"),
        ("name: a\nname: b", "digits.yaml:2: key 'name' occurs twice (first in line 1); remove one"),
        ("name: &x a\nentrypoint: *x", "digits.yaml:1: aliases and anchors ('x') are not read; write the value out"),
        ("name: !!python/name:os.system a", "digits.yaml:1: tags ("),
        ("name: [", "digits.yaml:1: not YAML: expected the node content"),
        ("name: 'a", "digits.yaml:1: not YAML: found unexpected end of stream"),
        ("name: a\nsearch:\n  mode: max\n  spac: 1", "digits.yaml:4: search.spac: unknown key; did you mean 'space'?"),
        (
            "name: a\n\nsearch: {}\n",
            "digits.yaml:3: search.scheduler: is required; add it, and search.metric, search.mode",
        ),
        ("a: .inf", "digits.yaml:1: .inf is not a finite number; write one that is"),
        ("a: .nan", "digits.yaml:1: .nan is not a finite number; write one that is"),
        ("a: 1e999", "digits.yaml:1: 1e999 is not a finite number; write one that is"),
        ("a: " + "9" * 5000, "has too many digits; write a smaller number"),
        ('a: "\\ud800"', "digits.yaml:1: '\\ud800' holds half of a surrogate pair"),
        ('a: "\\U00110000"', "digits.yaml:1: not YAML: chr() arg not in range"),
        ("a: \x01", "digits.yaml:1: character '\\x01' is not allowed; remove it"),
        (b"name: a\nb: \xff", "digits.yaml:2: not UTF-8 (byte 11); save the file as UTF-8"),
        ("[" * 10_000, "digits.yaml:1: nested more than 32 deep; flatten it"),
        ("{a: " * 10_000, "digits.yaml:1: nested more than 32 deep; flatten it"),
        ("? [a]\n: 1", "digits.yaml:1: a list or mapping cannot be a key"),
        ("true: 1", "digits.yaml:1: key True is neither a text nor a whole number; put it in quotes"),
        ("<<: {name: a}", "digits.yaml:1: <<: unknown key"),
        ("a: 1\n---\nb: 2", "digits.yaml:2: not YAML: but found another document"),
        (b"#" * (300 << 10), "digits.yaml is larger than 256 KiB"),
    ],
)
def test_invalid_experiment_files(content: str | bytes, message: str) -> None:
    assert message in refusal(content)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no experiment file .*; check the path"):
        load_experiment(tmp_path / "none.yaml")
    with pytest.raises(InputError, match="is a folder; give the experiment file in it"):
        load_experiment(tmp_path)
    with pytest.raises(InputError, match="cannot be read"):
        load_experiment("a\0b")


def test_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, EXAMPLE)
    changes = ["constraints.deadline=30m", "name=x", "profile.seconds_per_iteration.1=99", "search.space.lr=1e-3"]
    experiment = load_experiment(path, changes)
    assert (experiment.constraints.deadline_s, experiment.name) == (1800.0, "x")
    assert experiment.search.space["lr"] == 1e-3
    profile = experiment.loaded_profile()
    assert profile is not None
    assert profile.seconds_per_iteration[1] == 99
    assert load_experiment(path, ["profile="]).profile is None


WRONG = """
n_trials: 3
budget: 5
name: digits
search:
  metric: accuracy
  direction: maximize
  space: {lr: {type: uniform, lower: 0}}
  scheduler: {type: sha, num_samples: 4, max_t: 4, eta: 3}
constraints: {deadlin: soon, max_cost: -1}
resources: {provider: slurm, gpus: 4}
"""


def test_all_faults_of_a_file_are_listed_a_line_for_each() -> None:
    assert refusal(WRONG).splitlines() == [
        "digits.yaml:2: n_trials: unknown key; write search.scheduler.num_samples",
        "digits.yaml:3: budget: unknown key; write constraints.max_cost",
        "digits.yaml:7: search.direction: unknown key; write mode",
        "digits.yaml:10: constraints.deadlin: unknown key; did you mean 'deadline'?",
        "digits.yaml:11: resources.gpus: unknown key; write gpus_per_instance",
        "digits.yaml:8: search.space.lr: a uniform needs upper; add it",
        "digits.yaml:9: search.scheduler.eta: unknown key; write reduction_factor",
        "digits.yaml:5: search.mode: 'maximize' is not one of min, max; write max",
        "digits.yaml:10: constraints.deadline: 'soon' is not a duration; write it as 90s, 20m, 1h30m, 1d or plain "
        "seconds, or as a time with its zone, such as 2026-11-21T20:00:00Z",
        "digits.yaml:10: constraints.max_cost: -1 is not an amount from 0 to 1,000,000,000 USD; write US dollars as 5, "
        "0.50, $5 or 5 USD",
        "digits.yaml:11: resources.provider: 'slurm' is no provider; start Ray there, and write provider: ray with its "
        "address",
    ]


@cases("word", "written")
def test_a_key_of_another_tool_is_answered_with_ours(word: str, written: str) -> None:
    line = refusal(f"{EXAMPLE}\n{word}: 3\n")
    assert f": {word}: unknown key; write {written}" in line
    assert "\n" not in line


@cases("override", "message")
def test_overrides_that_are_refused(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        load_experiment(write(tmp_path, EXAMPLE), [override])
    assert message in str(caught.value)


def test_a_profile_is_found_beside_the_file(tmp_path: Path) -> None:
    document = words()
    del document["profile"]
    path = write(tmp_path, json.dumps(document))
    assert load_experiment(path).loaded_profile() is None
    profile = Profile(seconds_per_iteration={1: 2.0}, source="file")
    save_profile(profile, default_profile_path(path))
    assert load_experiment(path).loaded_profile() == profile
    save_profile(profile, tmp_path / "other.json")
    assert load_experiment(path, ["profile=other.json"]).loaded_profile() == profile
    with pytest.raises(ProfileMissingError, match=r"there is no profile at .*/none.json"):
        load_experiment(path, ["profile=none.json"]).loaded_profile()


def test_paths_in_a_file_are_taken_from_its_folder(tmp_path: Path) -> None:
    types = {"by_instance_type": {"a": "a.json", "b": {"seconds_per_iteration": {1: 2}}}}
    document = words(profile=types, resources={"instance_types": ["a", "b"], "catalogue": "mine.csv"})
    save_profile(Profile(seconds_per_iteration={1: 3.0}, source="file"), tmp_path / "a.json")
    experiment = load_experiment(write(tmp_path, json.dumps(document)))
    assert experiment.resources.catalogue == str(tmp_path / "mine.csv")
    profile = experiment.loaded_profile("a")
    assert profile is not None
    assert profile.seconds_per_iteration == {1: 3.0}


@pytest.mark.parametrize("profile", ["3", "[a.json]", "{by_instance_type: 3}", "{by_instance_type: {a: 3}}"])
def test_an_invalid_profile_is_reported_with_its_line(tmp_path: Path, profile: str) -> None:
    document = words()
    del document["profile"]
    path = write(tmp_path, f"profile: {profile}\n" + dump_experiment(Experiment(**document)))
    with pytest.raises(InputError, match=r"^digits.yaml:1: profile.* is not a mapping"):
        load_experiment(path)
