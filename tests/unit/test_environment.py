"""Variables and secrets of trials' processes: their words, their values, and what is never written down."""

from __future__ import annotations

import os
import socket
import sys
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband import Experiment
from rubberband.api.body import require_allowed
from rubberband.api.problems import HttpProblem
from rubberband.api.settings import Settings, child_environment
from rubberband.errors import EntrypointError, InputError
from rubberband.executor import Entrypoint, TrialLog, describe
from rubberband.executor.logs import trial_log
from rubberband.executor.training.failures import MOST_DETAILS
from rubberband.running.check import named_entrypoint
from rubberband.running.profile import content_to_measure
from rubberband.values.environment import Environment

TOKEN = "hf_aVery$ecret/token"


def experiment(**resources: Any) -> Experiment:
    return Experiment(
        name="e",
        entrypoint="trials:train",
        search={
            "space": {"x": {"type": "uniform", "lower": 0, "upper": 1}},
            "scheduler": {"type": "sha", "num_samples": 4, "max_t": 4},
            "metric": "loss",
            "mode": "min",
        },
        constraints={"deadline": "1h"},
        resources={"provider": "local", "gpus_per_instance": 1, "price_per_hour": 1, **resources},
        profile={"seconds_per_iteration": {1: 1}},
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ({"env": {"N": 1}}, "resources.env.N: 1 is no text, and variables are texts; write it in quotes"),
        ({"env": {"N": True}}, "resources.env.N: True is no text"),
        ({"env": {"N": None}}, "resources.env.N: None is no text"),
        ({"env": {"my-data": "x"}}, "'my-data' is no name of a variable; use letters, digits and _"),
        ({"env": {"CUDA_VISIBLE_DEVICES": "0"}}, "CUDA_VISIBLE_DEVICES is set by rubberband itself; leave it out"),
        ({"env": {"RUBBERBAND_HOME": "/x"}}, "RUBBERBAND_HOME is set by rubberband itself"),
        ({"env": {"PYTHONPATH": "/x"}}, "PYTHONPATH is read when a process starts"),
        ({"env": {"PYTHONHASHSEED": "4294967296"}}, "PYTHONHASHSEED='4294967296' starts no process; write a number"),
        ({"env": {"LD_PRELOAD": "/x.so"}}, "LD_PRELOAD is read when a process starts"),
        ({"secrets": ["LD_PRELOAD"]}, "LD_PRELOAD is read when a process starts"),
        ({"env": {"TOKEN": "${HF_TOKEN}"}}, "resources.env.TOKEN: names another variable"),
        ({"env": "HF_TOKEN=hf_value"}, "resources.env: is no mapping; write {NAME: text}"),
        ({"secrets": ["HF_TOKEN=hf_value"]}, "resources.secrets: takes names only"),
        ({"secrets": {"HF_TOKEN": "hf_value"}}, "resources.secrets: takes names only; write [HF_TOKEN]"),
        ({"secrets": "HF_TOKEN"}, "resources.secrets: takes names only; write [HF_TOKEN]"),
        ({"secrets": ["A", "A"]}, "resources.secrets: A occurs twice; remove one"),
        ({"secrets": ["A"], "env": {"A": "x"}}, "resources.secrets: A is in env as well; keep one of the two"),
    ],
)
def test_words_that_no_process_would_get_are_refused(words: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as caught:
        experiment(**words)
    assert line in str(caught.value)
    assert "hf_value" not in str(caught.value)


@pytest.mark.parametrize(
    ("given_", "line"),
    [
        ({}, "resources.secrets: HF_TOKEN is not set; run `export HF_TOKEN=…` before this command"),
        ({"HF_TOKEN": ""}, "HF_TOKEN is not set"),
        ({"HF_TOKEN": "abc"}, "HF_TOKEN has 3 characters, and fewer than 4 cannot be masked in logs"),
    ],
)
def test_a_secret_without_a_value_is_refused(given_: dict[str, str], line: str) -> None:
    with pytest.raises(InputError) as caught:
        experiment(secrets=["HF_TOKEN"]).resources.environment(given_)
    assert line in str(caught.value)


def test_values_of_secrets_are_in_no_words_and_no_text_of_an_entry_point() -> None:
    found = experiment(env={"DATA": "/data"}, secrets=["HF_TOKEN"])
    environment = found.resources.environment({"HF_TOKEN": TOKEN})
    entrypoint = Entrypoint(module="trials", attribute="train", environment=environment)
    assert found.to_words()["resources"]["env"] == {"DATA": "/data"}
    assert found.to_words()["resources"]["secrets"] == ["HF_TOKEN"]
    assert TOKEN not in repr(entrypoint)
    assert TOKEN not in repr(environment)


def test_the_seed_of_hashes_follows_from_that_of_the_search() -> None:
    def hash_seed(**resources: Any) -> str:
        words = experiment(**resources).to_words()
        words["search"]["sampler"] = {"type": "random", "seed": 2**32 + 7}
        return Experiment(**words).environment({}).hash_seed

    assert hash_seed() == "7"
    assert hash_seed(env={"PYTHONHASHSEED": "random"}) == "random"


def test_a_function_that_holds_a_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    token = TOKEN

    def train(config: dict[str, Any]) -> None:
        print(token)

    whole = experiment(secrets=["HF_TOKEN"]).model_copy(update={"entrypoint": train})
    with pytest.raises(InputError, match="holds the value of a secret, which the journal would keep"):
        named_entrypoint(whole)


def test_a_process_of_a_service_has_no_secret_that_its_experiment_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert child_environment(None)["HF_TOKEN"] == TOKEN
    assert "HF_TOKEN" not in child_environment(None, {"HF_TOKEN"})


def test_a_profile_is_measured_again_for_other_variables(tmp_path: Path) -> None:
    (tmp_path / "trials.py").write_text("def train(config):\n    pass\n")
    entrypoint = Entrypoint.parse("trials:train", [tmp_path])
    found = [content_to_measure(experiment(env=env), entrypoint) for env in ({}, {"DATA": "/a"}, {"DATA": "/b"})]
    assert len({content.key for content in found if content is not None}) == 3
    renamed = experiment(secrets=["HF_TOKEN"])
    assert content_to_measure(renamed, entrypoint) == found[0]


def test_an_environment_is_put_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA", "before")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with Environment(variables={"DATA": "/data"}, secrets={"HF_TOKEN": TOKEN}).within():
        assert (os.environ["DATA"], os.environ["HF_TOKEN"]) == ("/data", TOKEN)
    assert os.environ["DATA"] == "before"
    assert "HF_TOKEN" not in os.environ


def test_a_driver_imports_a_module_with_its_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("DATA_OF_IMPORT", raising=False)
    (tmp_path / "reads_data.py").write_text("import os\nos.environ['DATA_OF_IMPORT']\ndef train(config): pass\n")
    entrypoint = Entrypoint.parse("reads_data:train", [tmp_path])
    with pytest.raises(EntrypointError, match="cannot be imported: KeyError: 'DATA_OF_IMPORT'"):
        entrypoint.check(1)
    replace(entrypoint, environment=Environment(variables={"DATA_OF_IMPORT": "/data"})).check(1)
    assert "DATA_OF_IMPORT" not in os.environ


def test_a_secret_is_masked_as_it_is_in_json_and_in_a_url() -> None:
    secret = 'two "quoted" words/\nand a second line'
    masked = Environment(secrets={"KEY": secret, "HF_TOKEN": TOKEN}).masked
    assert masked(f"{secret}, {TOKEN}") == "***, ***"
    assert masked('{"key": "two \\"quoted\\" words/\\nand a second line"}') == '{"key": "***"}'
    assert masked("https://x:hf_aVery%24ecret%2Ftoken@host") == "https://x:***@host"
    for space, slash in [("%20", "%2F"), ("%20", "/"), ("+", "%2F")]:
        quoted = f"two %22quoted%22 words{slash}%0Aand a second line".replace(" ", space)
        assert masked(f"https://host/?key={quoted}") == "https://host/?key=***"
    assert masked("  and a second line") == "  ***"
    assert masked("nothing of it") == "nothing of it"


TEXTS = st.text(alphabet="ab\n", min_size=4, max_size=8).filter(lambda text: text.strip() == text)


@given(
    secrets=st.lists(TEXTS, min_size=1, max_size=3),
    around=st.lists(st.one_of(st.text(alphabet="abc\n", max_size=6), st.just("")), min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 60), max_size=6),
)
def test_a_log_gets_no_secret_however_it_is_printed_in_parts(
    tmp_path_factory: pytest.TempPathFactory, secrets: list[str], around: list[str], cuts: list[int]
) -> None:
    content = "".join(part + secrets[n % len(secrets)] for n, part in enumerate(around)).encode()
    masks = [secret.encode() for secret in secrets]
    path = tmp_path_factory.mktemp("logs") / "trial-0.log"
    log = trial_log.Masked(trial_log.Appender(TrialLog(path=path, limit_bytes=10**6)), masks)
    places = sorted({0, len(content), *(cut for cut in cuts if cut < len(content))})
    for begin, end in pairwise(places):
        log.write(content[begin:end])
    log.write(b"")
    log.close()
    kept = path.read_bytes()
    assert not any(mask in kept for mask in masks)
    if len(masks) == 1:
        assert kept == content.replace(masks[0], trial_log.MASK)


def test_the_process_of_a_log_masks_secrets(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    pump = threading.Thread(target=trial_log.pump, args=(theirs,))
    pump.start()
    reading, writing = os.pipe()
    with ours:
        ours.sendall(trial_log.masking(TOKEN))
        socket.send_fds(ours, [trial_log.opening(TrialLog(path=tmp_path / "a.log", limit_bytes=10**6))], [reading])
        os.close(reading)
        os.write(writing, f"token {TOKEN[:4]}".encode())
        os.write(writing, f"{TOKEN[4:]} is here\n".encode())
        os.close(writing)
    pump.join()
    theirs.close()
    assert (tmp_path / "a.log").read_text() == "token *** is here\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            {"env": {"PATH": "/x"}},
            "resources.env: PATH is not allowed here; allowed is none; ask the operator to list it "
            "(rubberband serve --env)",
        ),
        ({"secrets": ["AWS_SECRET"]}, "resources.secrets: AWS_SECRET is not allowed here; allowed is HF_TOKEN"),
    ],
)
def test_a_service_takes_only_variables_that_its_operator_lists(
    tmp_path: Path, words: dict[str, Any], line: str
) -> None:
    settings = Settings(home=tmp_path, entrypoints=("trials:*",), secrets=("HF_TOKEN",))
    with pytest.raises(HttpProblem) as caught:
        require_allowed(experiment(**words), settings)
    assert str(caught.value.detail) == line
    require_allowed(experiment(env={"DATA": "/d"}, secrets=["HF_TOKEN"]), replace(settings, env=("DATA",)))


@pytest.mark.parametrize("length", [*range(258, 290, 4), *range(MOST_DETAILS // 2 - 400, MOST_DETAILS // 2, 9)])
def test_a_failure_that_is_cut_has_no_part_of_a_secret(length: int) -> None:
    environment = Environment(secrets={"HF_TOKEN": TOKEN})
    try:
        raise ValueError("-" * length + TOKEN + "-" * MOST_DETAILS)
    except ValueError as error:
        found = describe(error, in_gang=False, environment=environment)
    for part in (TOKEN[:6], TOKEN[-6:]):
        assert part not in found.message + found.details
