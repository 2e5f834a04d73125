"""States of an instance as EC2 shows them: its launch, its end and the reason; and its boot script's console."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from rubberband.cloud.aws.calls import AwsSession
from rubberband.cloud.aws.errors import FAILURES, code_of
from rubberband.cloud.provider import LEASE_EXPIRED

ALIVE = ("pending", "running", "stopping", "stopped")
"""States in which an instance costs money, or may again."""

_BY_A_CALL = "Client.UserInitiatedShutdown"
_BY_ITSELF = "Client.InstanceInitiatedShutdown"
_SOLD_OUT = ("Server.InsufficientInstanceCapacity", "Client.VolumeLimitExceeded")
_KEYS = ("Client.InternalError", "Client.InvalidKMSKey")
"""Codes of an instance whose volume EC2 cannot encrypt or open with a key of KMS."""
_NEVER_RAN = (*_SOLD_OUT, "Client.InvalidSnapshot", *_KEYS)
_KEY_REMEDY = (
    "if the account encrypts volumes with a key of its own (EC2 > EBS encryption), attach "
    "rubberband/cloud/aws/policies/kms.json to whoever launches (you for a head, its role for others), and for spot "
    "give the key to AWSServiceRoleForEC2Spot (rubberband/cloud/aws/policies/README.md, Keys of KMS)"
)
_TRANSITION = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)")


def launched_at(machine: Mapping[str, Any]) -> float | None:
    """Return the Unix time of the accepted launch, to the second. Billing begins later, with `running`."""
    found = machine.get("LaunchTime")
    return found.timestamp() if isinstance(found, datetime) else None


def transition_at(machine: Mapping[str, Any]) -> float | None:
    """Return when a requested termination began, to the second (rounded down); None if EC2 does not show it."""
    found = _TRANSITION.search(machine.get("StateTransitionReason", "") or "")
    if found is None:
        return None
    return datetime.strptime(found.group(1), "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()


def never_ran(machine: Mapping[str, Any]) -> bool:
    """Return whether the launch failed after it had been accepted: that costs nothing."""
    return _code(machine).startswith(_NEVER_RAN)


def sold_out(machine: Mapping[str, Any]) -> bool:
    """Return whether EC2 accepted the launch and had no room for the instance, or the account none for its volume."""
    return _code(machine).startswith(_SOLD_OUT)


def taken_back(machine: Mapping[str, Any]) -> bool:
    """Return whether EC2 interrupted a spot instance."""
    return _code(machine).startswith("Server.Spot")


def ended_by_a_call(machine: Mapping[str, Any]) -> bool:
    """Return whether a call, of this driver or another user, terminated it."""
    return _code(machine) in ("", _BY_A_CALL)


def why(machine: Mapping[str, Any], *, lease_over: bool) -> str:
    """Return why it ended without this driver. `lease_over`: whether its lease had expired by then."""
    code = _code(machine)
    said = machine.get("StateReason", {}).get("Message", "") or machine.get("StateTransitionReason", "")
    if taken_back(machine):
        return "EC2 took the spot instance back"
    if code == _BY_ITSELF and lease_over:
        return LEASE_EXPIRED
    if code == _BY_ITSELF:
        return (
            "it powered itself off: its lease expired, its boot script failed, or Ray ended there; see `aws ec2 "
            f"get-console-output --latest --instance-id {machine['InstanceId']}`"
        )
    if code == _BY_A_CALL:
        return "terminated by another user or process, or by its guard while AWS refused to move that"
    return f"EC2 ended it ({said or 'no reason given'}){_key_remedy(code)}"


def why_not_started(machine: Mapping[str, Any]) -> str:
    """Return EC2's reason why an instance ended before it ran, with the remedy."""
    code = _code(machine)
    said = machine.get("StateReason", {}).get("Message", "") or "no reason given"
    return f"{said}{_key_remedy(code) or '; try again'}"


def _key_remedy(code: str) -> str:
    return f"; {_KEY_REMEDY}" if code.startswith(_KEYS) else ""


def _code(machine: Mapping[str, Any]) -> str:
    return str(machine.get("StateReason", {}).get("Code", ""))


# Why an instance powered itself off, by its boot script's output on the console. For messages only, never a condition.


_STEP = re.compile(r"rubberband: \d\d:\d\d:\d\d (?P<step>.*)")
_ENDING, _JOINING, _LEASE = "ending", "joining ", "rubberband: the lease has ended"
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|\r")
_LONGEST = 200
_OLD_KIND = "UnsupportedOperation"
"""EC2's error for a type that shows no latest output, but only an earlier one."""


def why_ended(session: AwsSession, machine: Mapping[str, Any], *, lease_over: bool) -> str:
    """Return why it ended without this driver, by its console if it powered itself off early, else by `why`."""
    early = _code(machine) == _BY_ITSELF and not lease_over
    words = last_words(output(session, machine["InstanceId"])) if early else ""
    return words or why(machine, lease_over=lease_over)


def output(session: AwsSession, instance_id: str) -> str:
    """Return the console's output as far as EC2 has it; empty where the role may not read it."""
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
    """Return the step at which the boot script ended, and its last output; empty if the console shows none."""
    lines, steps = _steps_in(console)
    if any(line.endswith(_LEASE) for line in lines):
        return LEASE_EXPIRED
    if len(steps) < 2 or steps[-1][1] != _ENDING:
        return ""
    (begun, step), (ended, _) = steps[-2:]
    said = next((line for line in reversed(lines[begun + 1 : ended]) if line), "it said nothing")
    what = "Ray ended there" if step.startswith(_JOINING) else f"its boot script failed at `{_short(step)}`"
    return f"it powered itself off: {what}: {_short(said)}"


def current_step(console: str) -> str:
    """Return the step of the boot script, and its last output; empty if the console shows none."""
    lines, steps = _steps_in(console)
    if not steps:
        return ""
    begun, step = steps[-1]
    said = next((f": {_short(line)}" for line in reversed(lines[begun + 1 :]) if line), "")
    return f"its boot script is at `{_short(step)}`{said}"


def _steps_in(console: str) -> tuple[list[str], list[tuple[int, str]]]:
    """Return the console's lines, and (index of its line, text) of each step."""
    lines = [_ESCAPES.sub("", line).strip() for line in console.splitlines()]
    return lines, [(index, found["step"]) for index, line in enumerate(lines) if (found := _STEP.search(line))]


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
