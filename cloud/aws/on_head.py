"""Work on the head for commands with `--on head`: start one as a unit of systemd, show its output, answer short ones.

This module runs on the head, as `python3 -m rubberband.cloud.aws.on_head WHAT JSON`, by SSM's Run Command. It prints
one line of JSON. SSM cuts output at 24,000 characters, so an answer that is longer goes through the bucket. Each call
may be repeated: SSM knows no tokens, and an answer may be lost.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from rubberband.cloud.aws.client import open_session
from rubberband.cloud.aws.handover import take_secrets
from rubberband.cloud.aws.network import own_place
from rubberband.cloud.aws.s3 import S3Folder
from rubberband.errors import InputError, RubberbandError

CHUNK_BYTES = 12_000
"""Most of a log in one answer: 16,000 characters in base64."""
MOST_CHARACTERS = 20_000
"""A longer answer goes through the bucket."""
NEEDS_FILE = "{file}"
"""Begin of a command's word for the file that it writes, and whose content the answer has; its suffix may follow."""
_LOG, _EXIT, _PID, _NAME = "log", "exit", "pid", "name"
_KEPT = ("HOME", "PATH", "AWS_DEFAULT_REGION", "RUBBERBAND_DEVICE")
"""Variables that a run gets."""


def folder() -> Path:
    """Return the head's folder of experiments and runs."""
    return Path(f"{os.environ.get('RUBBERBAND_ROOT', '')}/opt/rubberband")


def start(
    *, key: str, name: str, words: list[str], packed: str | None, made_of: str | None = None, secrets: str | None = None
) -> dict[str, Any]:
    """Start `rubberband WORDS` in the folder of experiment `name`, which it fetches from the s3:// address `packed`.

    It outlives the call. The same key starts once. `secrets`: see `drive`. Raises InputError while another command runs
    for that name, and if the head is not `made_of` what the caller saw.
    """
    run = folder() / "runs" / key
    if run.exists():
        return {"started": False}
    if (other := _latest(name)) is not None and _lives(other):
        raise InputError(f"{name} runs on the head already; `rubberband status {name} --on head --watch` follows it")
    if made_of is not None and made_of != (folder() / "made-of").read_text().strip():
        raise InputError("the head was given other code or packages just now; run the command again")
    run.mkdir(parents=True)
    try:
        (run / _NAME).write_text(name)
        if packed is not None:
            _run(["rubberband-fetch", packed])
        where = folder() / name
        where.mkdir(exist_ok=True)
        command = shlex.join(_command(words, secrets))
        (run / "script").write_text(
            f"cd {shlex.quote(str(where))}\necho $$ > {shlex.quote(str(run / _PID))}\n"
            f"{command} > {shlex.quote(str(run / _LOG))} 2>&1 < /dev/null\n"
            f"echo $? > {shlex.quote(str(run / '.exit'))}\n"
            f"mv {shlex.quote(str(run / '.exit'))} {shlex.quote(str(run / _EXIT))}\n"
        )
        kept = [f"--setenv={key}={value}" for key, value in os.environ.items() if key in _KEPT]
        _run(["systemd-run", f"--unit=rubberband-{key}", "--collect", *kept, "/bin/bash", str(run / "script")])
    except BaseException:
        shutil.rmtree(run, ignore_errors=True)
        raise
    return {"started": True}


def _command(words: list[str], secrets: str | None) -> list[str]:
    if secrets is None:
        return [sys.executable, "-m", "rubberband.cli", *words]
    here = json.dumps({"words": words, "secrets": secrets})
    return [sys.executable, "-m", "rubberband.cloud.aws.on_head", "drive", here]


def drive(*, words: list[str], secrets: str) -> NoReturn:
    """Become `rubberband WORDS`, with the variables that the parameter `secrets` of SSM has, which is deleted."""
    try:
        given = take_secrets(open_session(os.environ["AWS_DEFAULT_REGION"]), secrets)
    except RubberbandError as error:
        raise SystemExit(f"error: {error}") from None
    os.execve(sys.executable, _command(words, None), {**os.environ, **given})


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise InputError(f"{command[0]} failed on the head (exit code {done.returncode}): {said[-1]}")


def look(*, key: str | None, name: str, offset: int) -> dict[str, Any]:
    """Return the output of a run (by default of the latest of `name`) from a place on, and its exit code."""
    run = _latest(name) if key is None else folder() / "runs" / key
    if run is None or not run.exists():
        raise InputError(f"nothing was started for {name} on the head; `rubberband run FILE --on head` starts it")
    ended = (run / _EXIT).exists()  # before the log, which is whole then
    lives = ended or not (run / _PID).exists() or _lives(run)
    log = run / _LOG
    piece = b""
    if log.exists():
        with open(log, "rb") as file:
            file.seek(offset)
            piece = file.read(CHUNK_BYTES)
    code = int((run / _EXIT).read_text()) if ended else None
    return {"log": base64.b64encode(piece).decode(), "more": len(piece) == CHUNK_BYTES, "exit": code, "lives": lives}


def ask(*, words: list[str], store: str) -> dict[str, Any]:
    """Run `rubberband WORDS`; return its exit code and output, and the content of the file that it writes as FILE."""
    with tempfile.TemporaryDirectory() as place:
        command = [word.replace(NEEDS_FILE, f"{place}/answer") for word in words]
        done = subprocess.run(
            [sys.executable, "-m", "rubberband.cli", *command],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        written = next(Path(place).iterdir(), None)
        answer = {
            "exit": done.returncode,
            "out": done.stdout.decode(errors="replace"),
            "err": done.stderr.decode(errors="replace"),
            "file": base64.b64encode(written.read_bytes()).decode() if written else None,
        }
    text = json.dumps(answer)
    if len(text) <= MOST_CHARACTERS:
        return answer
    name = f"answers/{uuid.uuid4().hex}.json"
    return {"at": S3Folder.parse(store).put(name, text.encode())}


def keep(*, store: str) -> dict[str, Any]:
    """Copy the head's home, with all journals and reports, to the bucket; return the address of the copy."""
    place = own_place()
    with tempfile.TemporaryDirectory() as scratch:
        copied = Path(scratch) / "backup"
        _run([sys.executable, "-m", "rubberband.cli", "backup", str(copied)])
        packed = Path(shutil.make_archive(f"{scratch}/home", "zip", copied))
        name = f"copies/{'head' if place is None else place.instance_id}.zip"
        return {"at": S3Folder.parse(store).put(name, packed)}


def _month() -> list[float] | None:
    """Return what the head's home has spent or may spend this month, and what it still may; None if not known."""
    command = [sys.executable, "-m", "rubberband.executor.run.allowance"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    return list(json.loads(done.stdout)) if done.returncode == 0 else None


def _latest(name: str) -> Path | None:
    runs = [path.parent for path in (folder() / "runs").glob(f"*/{_NAME}") if path.read_text() == name]
    return max(runs, key=lambda run: run.stat().st_ctime_ns, default=None)


def _lives(run: Path) -> bool:
    """Return whether the unit of a run is there; one that has just been started has no process yet."""
    try:
        command = Path(f"/proc/{int((run / _PID).read_text())}/cmdline").read_bytes()
        return not (run / _EXIT).exists() and str(run).encode() in command
    except (OSError, ValueError):
        return False


_WORK: Mapping[str, Callable[..., dict[str, Any]]] = {
    "start": start,
    "look": look,
    "ask": ask,
    "keep": keep,
    "drive": drive,
}


def main(what: str, words: str) -> None:
    """Do it, and print the answer, or an error in one line."""
    try:
        answer = _WORK[what](**json.loads(words))
        if what in ("ask", "keep") or answer.get("exit") is not None:
            answer["month"] = _month()
    except (RubberbandError, OSError) as error:
        answer = {"error": " ".join(str(error).split())}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
