"""SSM's Run Command (ssm): shell scripts on running instances, whose agents come late, and whose answers come later."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.ec2.faults import FakeError
from tests.ec2.instance import as_datetime
from tests.ec2.launch_rights import arn, resource_tags
from tests.ec2.request import Request, operation

MOST_CHARACTERS = 24_000
DOCUMENT = "AWS-RunShellScript"
Result = Callable[[], tuple[int, str, str] | None]
"""Returns the exit code, output and errors of a script; None while it runs."""
_CUT = "--output truncated--"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    instance_id: str
    sent_at: float
    known_at: float
    """GetCommandInvocation knows it from then on."""
    done_at: float
    result: Result


@operation("ssm", "SendCommand")
def send_command(request: Request) -> dict[str, Any]:
    """SendCommand, of a shell script to one instance. It has no client token: what is sent twice runs twice."""
    world, params = request.world, request.params
    (instance_id,) = params["InstanceIds"]
    instance = world.instances.get(instance_id)
    tags = {} if instance is None else instance.tags
    request.access.check("ssm:SendCommand", arn(world, f"instance/{instance_id}"), resource_tags(tags))
    if params["DocumentName"] != DOCUMENT:
        raise FakeError("InvalidDocument", f"Document with name {params['DocumentName']} does not exist.")
    online = instance is not None and instance.state(request.now) == "running"
    if not online or instance is None or request.now < instance.running_at + world.agent_s:
        raise FakeError("InvalidInstanceId", "Instances [[" + instance_id + "]] not in a valid state for account")
    result = world.runs_command(instance_id, "\n".join(params["Parameters"]["commands"]))
    command_id = str(uuid.UUID(int=world.rng.getrandbits(128)))
    world.commands[command_id] = Command(
        instance_id=instance_id,
        sent_at=request.now,
        known_at=request.now + world.command_known_s,
        done_at=request.now + world.command_s,
        result=result,
    )
    shown = {"CommandId": command_id, "DocumentName": DOCUMENT, "InstanceIds": [instance_id], "Status": "Pending"}
    return {"Command": {**shown, "RequestedDateTime": as_datetime(request.now)}}


@operation("ssm", "GetCommandInvocation", checked=True)
def get_command_invocation(request: Request) -> dict[str, Any]:
    command = request.world.commands.get(request.params["CommandId"])
    if command is None or command.instance_id != request.params["InstanceId"] or request.now < command.known_at:
        raise FakeError("InvocationDoesNotExist", "An error occurred: the invocation does not exist.")
    found = {"CommandId": request.params["CommandId"], "InstanceId": command.instance_id, "DocumentName": DOCUMENT}
    result = command.result()
    if request.now < command.done_at or result is None:
        return {**found, "Status": "InProgress", "ResponseCode": -1}
    code, out, err = result
    status = "Failed" if code else "Success"
    outputs = {"StandardOutputContent": _cut(out), "StandardErrorContent": _cut(err)}
    return {**found, "Status": status, "ResponseCode": code, **outputs}


def _cut(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - len(_CUT)] + _CUT
