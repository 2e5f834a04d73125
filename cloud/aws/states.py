"""What EC2 tells of the states of an instance: when it was launched, when it ended and why. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

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
        return "terminated by somebody else"
    return f"EC2 ended it ({said or 'it does not say why'})"


def _code(machine: Mapping[str, Any]) -> str:
    return str(machine.get("StateReason", {}).get("Code", ""))
