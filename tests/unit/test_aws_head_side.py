"""The work that a head does for commands with `--on head`: runs that outlive a call, and short answers."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rubberband.cloud.aws import on_head
from rubberband.cloud.aws.s3 import S3Folder
from rubberband.errors import InputError
from tests.builders.waiting import eventually


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    programs = tmp_path / "bin"
    programs.mkdir()
    fetches = 'mkdir -p "$RUBBERBAND_ROOT/opt/rubberband/digits"'
    runs = 'shift 2; while [[ $1 == --* ]]; do shift; done; setsid "$@" &'
    for name, body in {"systemd-run": runs, "rubberband-fetch": fetches}.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("RUBBERBAND_ROOT", str(tmp_path / "root"))
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path / "home"))
    return tmp_path / "root"


def whole(key: str) -> tuple[bytes, int]:
    log = b""
    while True:
        seen = on_head.look(key=key, name="digits", offset=len(log))
        log += base64.b64decode(seen["log"])
        if seen["exit"] is not None and not seen["more"]:
            return log, seen["exit"]


def test_a_command_is_started_once_and_its_output_comes_in_pieces(root: Path) -> None:
    first = {"key": "0" * 8, "name": "digits", "words": ["--version"], "packed": "s3://b/digits.zip"}
    assert on_head.start(**first) == {"started": True}
    assert on_head.start(**first) == {"started": False}
    log, code = whole("0" * 8)
    assert code == 0
    assert log.startswith(b"rubberband ")
    (root / "opt/rubberband/runs" / ("0" * 8) / "log").write_bytes(b"\xc3\xa4" * 20_000)
    assert whole("0" * 8)[0] == b"\xc3\xa4" * 20_000


def test_a_head_that_was_made_anew_meanwhile_starts_nothing(root: Path) -> None:
    on_head.folder().mkdir(parents=True, exist_ok=True)
    (on_head.folder() / "made-of").write_text("other\n")
    words: dict[str, Any] = {"key": "c" * 8, "name": "digits", "words": ["ps"], "packed": None}
    with pytest.raises(InputError, match="given other code or packages just now"):
        on_head.start(**words, made_of="this")
    assert on_head.start(**words, made_of="other") == {"started": True}


def test_a_second_run_of_a_name_is_refused_while_the_first_runs(root: Path) -> None:
    run = root / "opt/rubberband/runs" / ("1" * 8)
    run.mkdir(parents=True)
    (run / "name").write_text("digits")
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()", str(run / "script")], stdin=subprocess.PIPE
    )
    try:
        (run / "pid").write_text(str(process.pid))
        eventually(lambda: str(run) in Path(f"/proc/{process.pid}/cmdline").read_text(), "the program that it is to be")
        with pytest.raises(InputError, match="digits runs on the head already"):
            on_head.start(key="2" * 8, name="digits", words=["--version"], packed=None)
        assert on_head.look(key=None, name="digits", offset=0)["lives"]
    finally:
        process.kill()
        process.communicate()
    assert not on_head.look(key=None, name="digits", offset=0)["lives"]


def test_a_folder_that_cannot_be_fetched_is_an_error_and_may_be_tried_again(root: Path, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "rubberband-fetch"
    fetch = program.read_text()
    program.write_text("#!/bin/bash\necho 'it is not what the driver put there' >&2; exit 1\n")
    first = {"key": "3" * 8, "name": "digits", "words": ["--version"], "packed": "s3://b/digits.zip"}
    with pytest.raises(InputError, match="not what the driver put there"):
        on_head.start(**first)
    program.write_text(fetch)
    assert on_head.start(**first) == {"started": True}
    assert whole("3" * 8)[1] == 0


def test_a_long_answer_goes_through_the_bucket(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put: dict[str, bytes] = {}
    monkeypatch.setattr(S3Folder, "put", lambda self, name, payload: put.setdefault(name, payload) and f"s3://{name}")
    assert on_head.ask(words=["--version"], store="s3://b/heads")["out"].startswith("rubberband ")
    found = on_head.ask(words=["--help"], store="s3://b/heads")
    assert found.keys() == {"exit", "out", "err", "file"}
    monkeypatch.setattr(on_head, "MOST_CHARACTERS", 100)
    (name,) = [on_head.ask(words=["--help"], store="s3://b/heads")["at"].removeprefix("s3://")]
    assert json.loads(put[name]) == found


def test_an_error_is_one_line_of_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on_head.main("look", json.dumps({"key": None, "name": "digits", "offset": 0}))
    assert json.loads(capsys.readouterr().out)["error"].startswith("nothing was started for digits on the head")


def test_a_head_reports_the_bill_of_its_month(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on_head.main("ask", json.dumps({"words": ["ps"], "store": "s3://b/heads"}))
    assert json.loads(capsys.readouterr().out)["month"] == [0.0, 0.0]
