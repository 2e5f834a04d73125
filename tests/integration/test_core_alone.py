"""The core alone: without the packages of the extras, and without the folders of the features.

What it cannot do, it says in one line, with the command that installs the rest or the name of the feature.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rubberband
from rubberband import installation
from rubberband.features import feature_of
from rubberband.installation import remedy_of
from rubberband.states import REHEARSAL
from tests.builders import processes

COMMANDS = processes.FOLDER / "core_commands.py"
_HIDE = f"""\
import sys
from importlib.machinery import PathFinder

EXTRAS = {sorted(installation.EXTRA_OF)}

class Core:
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in EXTRAS else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Core
"""


@pytest.mark.long
def test_every_command_works_or_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CI runs the same where the wheel is installed without extras."""
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden/sitecustomize.py").write_text(_HIDE)
    (tmp_path / "here").mkdir()
    path = [str(tmp_path / "hidden"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    done = subprocess.run([sys.executable, COMMANDS], cwd=tmp_path / "here", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_public_name_that_needs_an_extra_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(module: str) -> None:
        raise ModuleNotFoundError("No module named 'httpx'", name="httpx")

    monkeypatch.setattr("rubberband.importlib.import_module", lacking)
    monkeypatch.delitem(vars(rubberband), "Client", raising=False)
    with pytest.raises(ImportError, match=r"Client needs httpx; run pip install 'rubberband-tune\[client\]'"):
        _ = rubberband.Client


def test_a_module_that_no_extra_brings_has_no_remedy() -> None:
    assert remedy_of(ModuleNotFoundError("No module named 'theirs'", name="theirs")) is None
    assert remedy_of(ValueError("ray")) is None


SMALL = ("experiment.yaml", "-s", "search.scheduler.num_samples=4", "-s", "search.scheduler.max_t=4")


def without_features(folder: Path) -> Path:
    """Copy the package, and leave out every folder and file that the table of features has."""
    package = Path(rubberband.__file__).parent

    def of_features(path: str, names: list[str]) -> list[str]:
        below = ("rubberband", *Path(path).relative_to(package).parts)
        return [name for name in names if feature_of(".".join((*below, name.removesuffix(".py")))) is not None]

    shutil.copytree(package, folder / "rubberband", ignore=of_features)
    return folder


@pytest.mark.ray
def test_the_core_without_any_feature_estimates_runs_and_reports(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    changed = {"PYTHONPATH": str(without_features(tmp_path / "core")), "RUBBERBAND_HOME": str(tmp_path / "home")}

    def ran(*words: str, code: int = 0) -> str:
        line = [sys.executable, "-m", "rubberband.cli", *words]
        done = subprocess.run(line, cwd=here, capture_output=True, text=True, env={**os.environ, **changed})
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    assert "pool" not in ran("--help")
    ran("init")
    assert "chosen" in ran("estimate", *SMALL)
    assert "winner" in ran("run", *SMALL, "-s", "name=real")
    assert REHEARSAL in ran("run", *SMALL, "-s", "name=simulated", "-s", "resources.provider=virtual")
    assert "winner" in ran("report", "real", "--verbose")
    ran("report", "real", "--html", "report.html")
    ran("cleanup")
    lines = [ran("estimate", *SMALL, "-s", words, code=2) for words in ("resources.provider=aws", "track=csv")]
    assert lines == [
        "error: resources.provider: aws: EC2 (docs/ec2.md) is not part of this installation\n",
        "error: track: Trackers (docs/results.md) is not part of this installation\n",
    ]
