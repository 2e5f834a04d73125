"""A slip is answered with the word that was meant: a file, a module, a class, an experiment, a key or a metric."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rubberband import cli
from rubberband.errors import EntrypointError, InputError
from rubberband.executor import Entrypoint, describe, open_folder
from rubberband.executor.ray.code import pack
from rubberband.running.programs.options import program_of
from rubberband.spec.loading import load_experiment, load_policy, load_pool, parse_experiment
from rubberband.spec.profile_file import load_profile
from rubberband.units import did_you_mean, parse_deadline
from tests.builders.journalled_runs import recorded

ROOT = Path(__file__).parents[2]
EXAMPLE = (ROOT / "examples/digits.yaml").read_text()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "slip_trial.py").write_text("def train(config): ...\nclass Helper: ...\n")
    (tmp_path / "experiment.yaml").write_text(EXAMPLE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "slip_trial", raising=False)
    return tmp_path


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "experiment.yaml": (EXAMPLE, load_experiment),
    "pool.yaml": ("{instances: 2, gpus_per_instance: 4}\n", load_pool),
    "policy.yaml": ("max_usd_per_run: 4\n", lambda path: load_policy(path.parent)),
    "profile.json": ('{"schema": "rubberband.profile/1", "seconds_per_iteration": {"1": 2.0}}\n', load_profile),
    "train.py": ('print("val_loss=", 1.0)\n', lambda path: program_of(f"python {path.name} ${{lr}}", path.parent)),
    ".rubberbandignore": ("data.csv\n", lambda path: pack([str(path.parent)]).archive),
}


@pytest.mark.parametrize("name", READERS)
def test_a_file_that_an_editor_of_windows_has_saved_says_the_same(name: str, tmp_path: Path) -> None:
    text, read = READERS[name]
    (tmp_path / "data.csv").write_text("1")
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    plain = read(path)
    assert plain
    path.write_text(text, encoding="utf-8-sig", newline="\r\n")
    assert read(path) == plain


@pytest.mark.parametrize(
    ("word", "hint"), [("los", "; did you mean 'loss'?"), ("LOSS", "; did you mean 'loss'?"), ("banana", ""), ("", "")]
)
def test_the_nearest_word_is_meant_whatever_its_case(word: str, hint: str) -> None:
    assert did_you_mean(word, ["accuracy", "loss"]) == hint


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("rum", "there is no command 'rum'; did you mean 'run' or 'rm'?"),
        ("submitt", "there is no command 'submitt'; did you mean 'submit'?"),
        ("cancl", "there is no command 'cancl'; `rubberband --help` lists them"),
        ("cloud dwn", "there is no command 'dwn'; `rubberband cloud --help` lists them"),
        ("cloud price", "there is no command 'price'; did you mean 'prices'?"),
        ("aws teardwn", "there is no command 'teardwn'; `rubberband aws --help` lists them"),
    ],
)
def test_a_destructive_command_is_never_the_only_one_that_is_meant(words: str, hint: str) -> None:
    found = CliRunner().invoke(cli.app, words.split(), prog_name="rubberband")
    assert found.exit_code == 2
    assert hint in found.stderr


def test_a_file_beside_the_missing_one_is_meant(here: Path) -> None:
    with pytest.raises(InputError, match=r"no experiment file 'experment.yaml'; did you mean 'experiment.yaml'\?"):
        load_experiment("experment.yaml")
    with pytest.raises(InputError, match=r"; did you mean .*/experiment.yaml"):
        load_experiment(here / "experment.yaml")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("slip_trail:train", "no module 'slip_trail' in {here}; did you mean 'slip_trial'?"),
        ("nosuch:train", "no module 'nosuch' in {here}; start in the folder that has it, or put it beside the exp"),
        ("slip_trial:trian", "slip_trial.py has no 'trian'; did you mean 'train'?"),
        ("slip_trial:Foo", "slip_trial.py has no 'Foo'; it has train, Helper"),
    ],
)
def test_a_module_and_its_trial_are_meant(text: str, line: str, here: Path) -> None:
    with pytest.raises(EntrypointError) as caught:
        Entrypoint.parse(text, (here,)).load()
    assert line.format(here=here) in str(caught.value)


def test_an_experiment_is_meant(tmp_path: Path) -> None:
    recorded().put(tmp_path)
    with pytest.raises(InputError, match=r"'digit-sha' not found in .*; did you mean 'digits-sha'\?"):
        open_folder("digit-sha", tmp_path).require()


def _raised(train: Any, config: dict[str, Any]) -> str:
    try:
        train(config)
    except KeyError as error:
        return describe(error, in_gang=False).message
    return "nothing"


def test_a_parameter_of_the_configuration_is_meant() -> None:
    assert _raised(lambda config: config["learning_rate"], {"lr_rate": 1, "learning_rates": 2}) == (
        "KeyError: 'learning_rate' is not in the configuration, which search.space gives; "
        "did you mean 'learning_rates'?"
    )
    assert _raised(lambda config: config["depth"], {"lr": 1}).endswith("search.space gives; it has lr")
    assert _raised(lambda config: {"a": config["lr"]}["b"], {"lr": 1, "b": 2}) == "KeyError: 'b'"
    assert _raised(lambda config: {"é": config["lr"]}["b"] + config["c"], {"lr": 1}) == "KeyError: 'b'"

    def looks_up(config: dict[str, Any]) -> None:
        raise KeyError(f"no sample for {config}")

    assert _raised(looks_up, {"lr": 1}) == "KeyError: \"no sample for {'lr': 1}\""


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "search.scheduler.type=bohb",
            "'bohb' is not one of sha, asha, hyperband, none, stages, pbt; write one of them",
        ),
        ("search.sampler.type=tpe", "quasi, optuna; write {type: optuna, sampler: tpe}"),
        ("search.space=null", "search.space: nothing is not a mapping; write one, as {key: 1}"),
        ("constraints.deadline=soon", "1d or plain seconds, or as a time with its zone, such as 2026-11-21T20:00:00Z"),
    ],
)
def test_values_are_refused_once_with_the_words_to_write(override: str, line: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_experiment(EXAMPLE, overrides=[override])
    assert str(caught.value).endswith(line)


def test_a_time_without_a_unit_is_refused_with_both_forms() -> None:
    with pytest.raises(InputError, match=r"'tomorrow' is not a duration; .* or as a time with its zone"):
        parse_deadline("tomorrow")


def test_a_pool_is_not_made_of_an_experiment_file(here: Path) -> None:
    with pytest.raises(InputError, match=r"experiment.yaml is an experiment file; give .* of a pool: instances"):
        load_pool("experiment.yaml")
