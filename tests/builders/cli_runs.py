"""The command line in this process: its exit code, and the example's file."""

from __future__ import annotations

import sys
from pathlib import Path

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
