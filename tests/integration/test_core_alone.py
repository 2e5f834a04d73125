"""An installation of the core alone: what it cannot do, it says in one line with the command that installs the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import rubberband
from rubberband import installation
from rubberband.installation import remedy_of
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
