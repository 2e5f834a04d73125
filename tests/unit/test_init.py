"""`rubberband init`, as a new user meets it: what it writes is estimated, checked and run as it is."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
from click.testing import Result
from typer.testing import CliRunner

from rubberband import cli
from rubberband.errors import EntrypointError, InputError
from rubberband.spec.loading import load_experiment
from rubberband.spec.space import Domain

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of a user's own; its modules are forgotten afterwards, as others have the same names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("my_trial", None)
    yield tmp_path
    for name in ("my_trial", "mydigits", "plain", "train", "sgd"):
        sys.modules.pop(name, None)


def rubberband(*arguments: str, exit_code: int = 0) -> Result:
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == exit_code, (done.output, done.exception)
    return done


@pytest.mark.parametrize("has_torch", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_new_user_starts_from_nothing(has_torch: bool, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import util

    find = util.find_spec
    monkeypatch.setattr(
        util, "find_spec", lambda name, *more: find(name, *more) if has_torch or name != "torch" else None
    )
    first = rubberband("init")
    assert ("TorchTrial" in (here / "my_trial.py").read_text()) == has_torch
    assert "Next: adapt the ranges in experiment.yaml, then rubberband estimate experiment.yaml" in first.stdout
    experiment = load_experiment("experiment.yaml")
    schema = re.match(r"# yaml-language-server: \$schema=(.*)\n", (here / "experiment.yaml").read_text())
    assert schema is not None
    jsonschema.validate(experiment.to_words(), json.loads(Path(schema[1]).read_text()))
    name = experiment.name
    assert here.name.replace("_", "-").startswith(name), (
        "neither my_trial nor MyTrial is a name of a project: the folder is"
    )
    assert rubberband("estimate", "experiment.yaml").stdout.startswith(f"{name}: ")
    assert "experiment.yaml passes" in rubberband("check", "experiment.yaml").stdout
    assert f"{name}: done in " in rubberband("run", "experiment.yaml", "-s", "resources.provider=virtual").stdout


def test_the_parameters_and_metrics_of_a_trial_are_found(here: Path) -> None:
    shutil.copy(ROOT / "examples/digits.py", here / "mydigits.py")
    rubberband("init", "mydigits:DigitsTrial", "d.yaml", "--no-check")
    found = load_experiment("d.yaml")
    assert (found.name, found.entrypoint) == ("digits", "mydigits:DigitsTrial")
    assert (found.search.metric, found.search.mode) == ("accuracy", "max")
    kinds = {name: domain.kind for name, domain in found.search.space.items() if isinstance(domain, Domain)}
    assert kinds == {"lr": "loguniform", "momentum": "uniform", "weight_decay": "loguniform", "width": "choice"}
    assert "seconds_per_iteration: {1: 10}" in Path("d.yaml").read_text()
    rubberband("estimate", "d.yaml")


def test_the_metric_that_an_iteration_reports_is_used_and_problems_are_listed(here: Path) -> None:
    (here / "plain.py").write_text(
        "import rubberband\n"
        "def train(config):\n"
        "    state = {'top-1 accuracy': config['x'], 'on': config.get('flag', True), 'n': config.get('n', 0.5)}\n"
        "    while True:\n        rubberband.report(state, checkpoint=1)\n"
        "def broken(config):\n    raise ValueError('no data here')\n"
    )
    rubberband("init", "plain:train")
    assert load_experiment("experiment.yaml").search.metric == "top-1 accuracy"
    rubberband("check", "experiment.yaml")
    broken = rubberband("init", "plain:broken", "broken.yaml")
    assert "problem: iteration: ValueError: no data here" in broken.stderr
    assert "then rubberband check broken.yaml" in broken.stdout
    rubberband("estimate", "broken.yaml")


def test_a_module_in_place_of_a_program_names_its_trial(here: Path) -> None:
    (here / "train.py").write_text("import rubberband\ndef train(config):\n    rubberband.report({'loss': 1})\n")
    for command in ("init", "check"):
        refused = rubberband(command, "train.py", exit_code=1)
        assert str(refused.exception) == "train.py defines train, a trial in Python: rubberband init train:train"
        assert isinstance(rubberband(command, "train:main", exit_code=1).exception, InputError)
    assert [path.name for path in here.iterdir() if path.suffix == ".yaml"] == []


def test_an_experiment_is_named_by_its_trial_module_or_folder(here: Path) -> None:
    (here / "train.py").write_text("import rubberband\ndef train(config): rubberband.report({'loss': config['lr']})\n")
    (here / "sgd.py").write_text("from train import train\n")
    for trial in ("train:train", "sgd:train"):
        rubberband("init", trial, f"{trial[:3]}.yaml", "--no-check")
    assert load_experiment("tra.yaml").name == here.name.replace("_", "-")
    assert load_experiment("sgd.yaml").name == "sgd"


def test_an_interrupted_start_leaves_no_trial_behind(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rubberband.commands.init._tried", interrupt)
    rubberband("init", exit_code=130)
    assert [path.name for path in here.iterdir() if path.name != "__pycache__"] == [], "its import may be compiled"


def test_nothing_is_overwritten(here: Path) -> None:
    (here / "my_trial.py").write_text("mine")
    refused = rubberband("init", "one.yaml", exit_code=1)
    assert isinstance(refused.exception, InputError)
    assert "my_trial.py exists" in str(refused.exception)
    (here / "two.yaml").write_text("mine")
    refused = rubberband("init", "my_trial:Mine", "two.yaml", exit_code=1)
    assert "two.yaml exists" in str(refused.exception)
    assert isinstance(rubberband("init", "nosuch:Trial", exit_code=1).exception, EntrypointError)
    assert sorted(path.name for path in here.iterdir()) == ["my_trial.py", "two.yaml"]
    assert {path.read_text() for path in here.iterdir()} == {"mine"}
