"""`rubberband run --new`: a run under the next free name."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rubberband import cli
from rubberband.errors import NameTakenError
from rubberband.executor.journal.folder import ExperimentFolder, open_folder

SCALING = str(Path(__file__).parents[2] / "examples/scaling.yaml")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path))
    return tmp_path


def test_the_next_free_name_is_used_and_said(home: Path) -> None:
    arguments = ["run", SCALING, "-s", "resources.provider=virtual"]
    for name in ("scaling", "scaling-2", "scaling-3"):
        done = CliRunner().invoke(cli.app, [*arguments, "--new"])
        assert done.exit_code == 0, done.output
        assert f"{name}: done in " in done.stdout
        assert ("taken: this run is" in done.stderr) == (name != "scaling")
        assert open_folder(name).exists
    refused = CliRunner().invoke(cli.app, arguments)
    assert isinstance(refused.exception, NameTakenError)
    assert "--new" in str(refused.exception)


def test_a_folder_without_an_experiment_is_left_alone_and_long_names_stay_names(home: Path) -> None:
    long = ExperimentFolder(home=home, name="a" * 63)
    long.path.mkdir(parents=True)
    assert long.next_free() == long
    long.journal.touch()
    assert long.next_free().name == "a" * 61 + "-2"
    long.next_free().path.mkdir()
    assert long.next_free().name == "a" * 61 + "-3"
