"""What a shell completes, asked of bash by the script that `rubberband --show-completion` prints."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders.tables import cases

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A folder with the program as `rubberband`, and a home with two experiments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "rubberband").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m rubberband.cli "$@"\n')
    (folder / "rubberband").chmod(0o755)
    for name in ("digits-one", "scaling"):
        (tmp_path / "home/experiments" / name).mkdir(parents=True)
        (tmp_path / "home/experiments" / name / "journal.db").touch()
    return folder


def completed(program: Path, *words: str) -> list[str]:
    """What bash offers for the last of the `words` after the program's name."""
    line = shlex.join(["rubberband", *words])
    script = (
        'eval "$(_RUBBERBAND_COMPLETE=source_bash rubberband)"; '
        f"COMP_WORDS=({line}); COMP_CWORD={len(words)}; "
        "_rubberband_completion rubberband; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    environment = {
        **os.environ,
        "PATH": f"{program}{os.pathsep}{os.environ['PATH']}",
        "RUBBERBAND_HOME": str(program.parent / "home"),
    }
    done = subprocess.run(
        ["bash", "--norc", "-c", script], env=environment, capture_output=True, text=True, check=True, cwd=program
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.by_default(2)
@cases("words", "offered")
def test_bash_completes(program: Path, words: list[str], offered: list[str]) -> None:
    assert completed(program, *words) == offered
