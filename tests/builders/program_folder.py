"""A folder of programs in which `rubberband init`, `check` and others are run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from rubberband import cli


def enter(folder: Path, monkeypatch: pytest.MonkeyPatch, **variables: str) -> Path:
    """Go to a folder, with a home of its own and this Python first on the path; return it."""
    monkeypatch.chdir(folder)
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    for name, value in {"RUBBERBAND_HOME": str(folder / "home"), "PATH": path, **variables}.items():
        monkeypatch.setenv(name, value)
    return folder


def rubberband(*arguments: str) -> Result:
    """Run a command that succeeds."""
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0, (done.output, done.exception)
    return done
