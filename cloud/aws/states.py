"""What EC2 tells of the states of an instance: when it was launched, when it ended and why. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from rubberband.cloud.aws.calls import AwsSession
from rubberband.cloud.aws.errors import FAILURES, code_of

ALIVE = ("pending", "running", "stopping", "stopped")
"""States in which an instance costs money, or may again."""

_BY_A_CALL = "Client.UserInitiatedShutdown"
_BY_ITSELF = "Client.InstanceInitiatedShutdown"
_NEVER_RAN = (
    "Server.InsufficientInstanceCapacity",
    "Client.VolumeLimitExceeded",
    "Client.InvalidSnapshot",
    "Client.InternalError",
)
_TRANSITION = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)")


def launched_at(machine: Mapping[str, Any]) -> float | None:
    """When the launch was accepted; Unix time, to the second. Billing begins later, with `running`."""
    told = machine.get("LaunchTime")
    return told.timestamp() if isinstance(told, datetime) else None


def transition_at(machine: Mapping[str, Any]) -> float | None:
    """When an end that was asked for began, to the second (rounded down); None if EC2 does not tell."""
    found = _TRANSITION.search(machine.get("StateTransitionReason", "") or "")
    if found is None:
        return None
    return datetime.strptime(found.group(1), "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()


def never_ran(machine: Mapping[str, Any]) -> bool:
    """Whether the launch failed after it had been accepted: that costs nothing."""
    return _code(machine).startswith(_NEVER_RAN)


def taken_back(machine: Mapping[str, Any]) -> bool:
    """Whether EC2 took a spot instance away."""
    return _code(machine).startswith("Server.Spot")


def ended_by_a_call(machine: Mapping[str, Any]) -> bool:
    """Whether somebody asked for its end, which may have been us."""
    return _code(machine) in ("", _BY_A_CALL)


def ended_by_itself(machine: Mapping[str, Any]) -> bool:
    """Whether it was shut down from within."""
    return _code(machine) == _BY_ITSELF


def why(machine: Mapping[str, Any], *, lease_over: bool) -> str:
    """Why it ended without us, in words. `lease_over`: whether its lease cannot have lasted longer."""
    code = _code(machine)
    said = machine.get("StateReason", {}).get("Message", "") or machine.get("StateTransitionReason", "")
    if taken_back(machine):
        return "EC2 took the spot instance back"
    if code == _BY_ITSELF and lease_over:
        return "lease expired"
    if code == _BY_ITSELF:
        return (
            "it powered itself off: its lease expired, its boot script failed, or Ray ended there; see `aws ec2 "
            f"get-console-output --latest --instance-id {machine['InstanceId']}`"
        )
    if code == _BY_A_CALL:
        return "terminated by another user or process"
    return f"EC2 ended it ({said or 'no reason given'})"


def _code(machine: Mapping[str, Any]) -> str:
    return str(machine.get("StateReason", {}).get("Code", ""))


# Why an instance powered itself off, by what its boot script wrote on its console. A look, never a condition.


_STEP = re.compile(r"rubberband: \d\d:\d\d:\d\d (?P<step>.*)")
_ENDING, _JOINING, _LEASE = "ending", "joining ", "rubberband: the lease has ended"
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|\r")
_LONGEST = 200
_OLD_KIND = "UnsupportedOperation"
"""What EC2 answers where a type cannot tell its latest output, but only that of a while ago."""


def why_ended(session: AwsSession, machine: Mapping[str, Any], *, lease_over: bool) -> str:
    """Why it ended without us, in words; as `states.why` has it, where the console does not tell more."""
    asks = ended_by_itself(machine) and not lease_over
    words = last_words(output(session, machine["InstanceId"])) if asks else ""
    return words or why(machine, lease_over=lease_over)


def output(session: AwsSession, instance_id: str) -> str:
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
