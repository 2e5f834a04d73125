"""Why an instance powered itself off, by what its boot script wrote on its console. A look, never a condition."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rubberband.cloud.aws import states
from rubberband.cloud.aws.errors import FAILURES, code_of
from rubberband.cloud.aws.machines import Session

_STEP = re.compile(r"rubberband: \d\d:\d\d:\d\d (?P<step>.*)")
_ENDING, _JOINING, _LEASE = "ending", "joining ", "rubberband: the lease has ended"
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|\r")
_LONGEST = 200
_OLD_KIND = "UnsupportedOperation"
"""What EC2 answers where a type cannot tell its latest output, but only that of a while ago."""


def why_ended(session: Session, machine: Mapping[str, Any], *, lease_over: bool) -> str:
    """Why it ended without us, in words; as `states.why` has it, where the console does not tell more."""
    asks = states.ended_by_itself(machine) and not lease_over
    words = last_words(output(session, machine["InstanceId"])) if asks else ""
    return words or states.why(machine, lease_over=lease_over)


def output(session: Session, instance_id: str) -> str:
    """What the console shows, as far as EC2 has it; nothing where it may not be read."""
    ec2 = session.client("ec2")
    try:
        try:
            shown = ec2.get_console_output(InstanceId=instance_id, Latest=True)
        except FAILURES as error:
            if code_of(error) != _OLD_KIND:
                return ""
            shown = ec2.get_console_output(InstanceId=instance_id)
    except FAILURES:
        return ""
    return str(shown.get("Output") or "")


def last_words(console: str) -> str:
    """What the boot script was at when it ended, and the last that was said there; nothing if it does not tell."""
    lines = [_ESCAPES.sub("", line).strip() for line in console.splitlines()]
    if any(line.endswith(_LEASE) for line in lines):
        return "lease expired"
    steps = [(index, found["step"]) for index, line in enumerate(lines) if (found := _STEP.search(line))]
    if len(steps) < 2 or steps[-1][1] != _ENDING:
        return ""
    (begun, step), (ended, _) = steps[-2:]
    said = next((line for line in reversed(lines[begun + 1 : ended]) if line), "it said nothing")
    what = "Ray ended there" if step.startswith(_JOINING) else f"its boot script failed at `{_short(step)}`"
    return f"it powered itself off: {what}: {_short(said)}"


def at_work_on(console: str) -> str:
    """What the boot script does, and the last that was said there; nothing if it does not tell."""
    lines = [_ESCAPES.sub("", line).strip() for line in console.splitlines()]
    steps = [(index, found["step"]) for index, line in enumerate(lines) if (found := _STEP.search(line))]
    if not steps:
        return ""
    begun, step = steps[-1]
    said = next((f": {_short(line)}" for line in reversed(lines[begun + 1 :]) if line), "")
    return f"its boot script is at `{_short(step)}`{said}"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
