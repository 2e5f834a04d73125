"""The command line in this process: its exit code, what it says, and the example's file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rubberband import cli
from tests.builders.experiment_words import EXAMPLE


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "digits.yaml"
    path.write_text(EXAMPLE)
    return str(path)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["rubberband", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


class CommandLine:
    """`rubberband`, as a user types it; `err` is what the last command printed on stderr."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys, self.err = monkeypatch, capsys, ""

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """Return what it prints on stdout."""
        found = run(self._monkeypatch, *arguments)
        out, self.err = self._capsys.readouterr()
        assert found == code, self.err
        return out

    def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self(*arguments, "-o", "json", code=code))

    def refused(self, *arguments: str, code: int = 2) -> str:
        """Return the only line that it prints beside its steps: its error."""
        assert self(*arguments, code=code) == ""
        *steps, error = self.err.splitlines(keepends=True)
        assert error.startswith("error: ")
        assert all(step.startswith("reading ") for step in steps), self.err
        return error


@pytest.fixture
def rubberband(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)
