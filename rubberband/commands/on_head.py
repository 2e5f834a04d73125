"""`--on head`: a run that a head on EC2 drives, without a session or a terminal there, and the commands that ask it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rubberband.commands.common import confirm_bill
from rubberband.errors import InputError
from rubberband.installation import default_home
from rubberband.units import format_duration

if TYPE_CHECKING:
    from rubberband.cloud.aws.calls import AwsSession
    from rubberband.cloud.aws.remote import RemoteHead
    from rubberband.spec.experiment import Experiment

_FOLLOW_S = 3.0


def run_on_head(
    file: Path, experiment: Experiment, overrides: Sequence[str], words: list[str], *, no_cap: bool, yes: bool
) -> int:
    """Check, ask, start or find the head, send the folder, start the run there and follow it. Return its exit code."""
    from rubberband.app.allowance import require_rate, require_runnable
    from rubberband.app.run import bound_of
    from rubberband.app.terms import cloud_terms
    from rubberband.cloud.aws.calls import open_aws
    from rubberband.cloud.aws.head import ensure_head, upload_folder
    from rubberband.executor.ray.code import pack

    resources, home, name = experiment.resources, default_home(), experiment.name
    if not resources.kind.is_rented:
        raise InputError(
            f"resources.provider: {resources.provider} needs no head; leave --on head out, or write provider: aws"
        )
    require_runnable(experiment, home, no_cap=no_cap)
    session = open_aws(resources.region)
    require_rate(experiment, home, cloud_terms(experiment, home, _note, on_head=False).table)
    path = Path(os.path.abspath(file))
    root = root_of(path)
    most = bound_of(experiment.constraints.max_cost_usd)
    idle = format_duration(resources.aws.head_idle_s) if resources.aws.head_idle_s else ""
    until = f"stops itself {idle} after the run" if idle else "runs until `rubberband down`"
    confirm_bill(f"{most}, beside the head, which {until}", "run", yes=yes)
    packed = upload_folder(session, resources.checkpoints, name, pack([str(root)]).archive)
    if packed is None or resources.checkpoints is None:
        raise InputError("resources.checkpoints: --on head sends the folder through a bucket; give s3://bucket/prefix")
    head = ensure_head(session, resources)
    _remember(home, name, region=resources.region, owner=resources.aws.owner, checkpoints=resources.checkpoints)
    remote = remote_head(session, head.instance_id, resources.checkpoints)
    _note(f"head {head.instance_id} ({head.instance_type}, {head.zone})")
    try:
        remote.wait_until_ready(_note)
        settings = [word for override in overrides for word in ("-s", override)]
        command = ["run", str(path.relative_to(root)), *settings, *words, "--yes"]
        key = remote.start(name, command, packed)
    except KeyboardInterrupt:
        _note(f"nothing was started; the head {head.instance_id} is left")
        raise
    return _followed(remote, name, key)


def forward(command: str, name: str, typed: list[str]) -> int:
    """Run `rubberband COMMAND`, as typed but for `--on head`, on the head, and return its exit code."""
    words = _without_on(typed)
    if command == "resume":
        confirm_bill(f"{name} goes on on the head, within its max_cost", "go on", yes=bool({"-y", "--yes"} & {*words}))
    if command == "logs" and {"-f", "--follow"} & {*words}:
        raise InputError(f"--follow: the head is asked call by call; use `rubberband status {name} --on head --watch`")
    remote = _found(name)
    if command == "resume":
        return _followed(remote, name, remote.start(name, ["resume", *words, "--yes"], None))
    if command == "status" and {"-w", "--watch"} & {*words}:
        return _followed(remote, name, None)
    words, written = _with_file(words)
    answer = remote.ask([command, *words])
    print(answer.out, end="", flush=True)
    print(answer.err, end="", file=sys.stderr)
    if written is not None and answer.file is not None:
        written.write_bytes(answer.file)
        _note(f"written to {written.absolute()}")
    return answer.exit_code


def root_of(path: Path) -> Path:
    """Return the folder with the code: the working folder if the file is in it, else the file's own."""
    here = Path.cwd()
    return here if path.is_relative_to(here) else path.parent


def _without_on(typed: Sequence[str]) -> list[str]:
    words = list(typed)
    if "--on" in words:
        at = words.index("--on")
        return [*words[:at], *words[at + 2 :]]
    return [word for word in words if not word.startswith("--on=")]


def _with_file(words: list[str]) -> tuple[list[str], Path | None]:
    """Return the words with FILE for the file that `--html` names, and that file."""
    from rubberband.cloud.aws.on_head import NEEDS_FILE

    for at, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option == "--html" and equals:
            return [*words[:at], option, NEEDS_FILE, *words[at + 1 :]], Path(value)
        if option == "--html" and at + 1 < len(words):
            return [*words[: at + 1], NEEDS_FILE, *words[at + 2 :]], Path(words[at + 1])
    return words, None


def _followed(remote: RemoteHead, name: str, key: str | None) -> int:
    """Print the output of a run until it ends, and return its exit code. Ctrl-C ends only this."""
    offset = 0
    try:
        while True:
            seen = remote.look(name, key, offset)
            sys.stdout.buffer.write(seen.log)
            sys.stdout.flush()
            offset += len(seen.log)
            if seen.more:
                continue
            if seen.exit_code is not None:
                return seen.exit_code
            if not seen.lives:
                raise InputError(
                    f"the head went off while {name} ran; `rubberband resume {name} --on head` continues it"
                )
            time.sleep(_FOLLOW_S)
    except KeyboardInterrupt:
        _note(
            f"{name} goes on on the head: `rubberband status {name} --on head --watch` follows it, `rubberband cancel "
            f"{name} --on head` ends it"
        )
        raise


def _found(name: str) -> RemoteHead:
    """Return the head on which an experiment was started, started again if it has stopped. Raises InputError."""
    from rubberband.cloud.aws.calls import open_aws
    from rubberband.cloud.aws.head import running_head
    from rubberband.spec.remembered import remembered
    from rubberband.spec.resources import Resources

    home, plain = default_home(), Resources()
    known = remembered(home)
    words: dict[str, Any] = {
        "region": plain.region if known is None else known.region,
        "owner": plain.aws.owner,
        "checkpoints": None if known is None else f"s3://{known.bucket}",
    }
    with suppress(OSError, ValueError):  # it was started elsewhere, or by hand on the head
        words |= json.loads((home / "heads" / f"{name}.json").read_text(encoding="utf-8"))
    if words["checkpoints"] is None:
        raise InputError(f"{name} was not started from here, and no bucket is known; run `rubberband aws setup`")
    session = open_aws(words["region"])
    remote = remote_head(session, running_head(session, words["owner"], _note), words["checkpoints"])
    remote.wait_until_ready(_note)
    return remote


def remote_head(session: AwsSession, instance_id: str, checkpoints: str) -> RemoteHead:
    """Return a head whose long answers and copies go to the bucket of this checkpoint store."""
    from rubberband.cloud.aws.remote import RemoteHead
    from rubberband.cloud.aws.s3 import place_in

    return RemoteHead(session=session, instance_id=instance_id, store=f"s3://{place_in(checkpoints, '')[0]}/heads")


def _remember(home: Path, name: str, **words: str | None) -> None:
    from rubberband.atomic import make_directories, write_atomically

    make_directories(home / "heads")
    write_atomically(home / "heads" / f"{name}.json", json.dumps(words).encode(), durable=True)


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
