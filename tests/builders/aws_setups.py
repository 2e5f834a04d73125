"""`rubberband aws` in an account with nothing in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rubberband.cli import app
from tests.builders.aws_account import Account


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:9")
    return tmp_path / "home"


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch, home: Path) -> Account:
    """One with nothing in it, open to an administrator."""
    account = Account()
    account.fake.world.empty()
    account.session = account.fake.session("admin")
    monkeypatch.setattr("rubberband.cloud.aws.calls.open_aws", lambda region: account.fake.session("admin"))
    return account


def say(*words: str, answer: str = "") -> tuple[int, str]:
    result = CliRunner().invoke(app, ["aws", *words], input=answer)
    return result.exit_code, result.output if result.exception is None else f"{result.output}\n{result.exception}"
