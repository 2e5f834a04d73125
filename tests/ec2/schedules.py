"""EventBridge Scheduler, as far as it ends instances: schedules that run once and delete themselves."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Any

from tests.ec2.faults import FakeError
from tests.ec2.request import Request, operation
from tests.ec2.world import ACCOUNT, Schedule

END = "arn:aws:scheduler:::aws-sdk:ec2:terminateInstances"
_ONCE = re.compile(r"at\((\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\)")


@operation("scheduler", "CreateSchedule")
def create_schedule(request: Request) -> dict[str, Any]:
    name = _allowed(request, "CreateSchedule")
    schedule = _schedule(request)
    if name in request.world.schedules:
        raise FakeError("ConflictException", f"Schedule {name} already exists.", 409)
    request.world.set_schedule(name, schedule)
    return {"ScheduleArn": _arn(request, name)}


@operation("scheduler", "UpdateSchedule")
def update_schedule(request: Request) -> dict[str, Any]:
    """UpdateSchedule, which replaces all of it."""
    name = _allowed(request, "UpdateSchedule")
    schedule = _schedule(request)
    _check_known(request, name)
    if request.now < request.world.schedules[name].changed_at + request.world.schedule_settles_s:
        raise FakeError("ConflictException", f"Schedule {name} is being changed. Try again later.", 409)
    request.world.set_schedule(name, schedule)
    return {"ScheduleArn": _arn(request, name)}


@operation("scheduler", "DeleteSchedule")
def delete_schedule(request: Request) -> dict[str, Any]:
    name = _allowed(request, "DeleteSchedule")
    _check_known(request, name)
    request.world.set_schedule(name, None)
    return {}


def _allowed(request: Request, action: str) -> str:
    name = str(request.params["Name"])
    request.access.check(f"scheduler:{action}", _arn(request, name))
    return name


def _check_known(request: Request, name: str) -> None:
    if name not in request.world.schedules:
        raise FakeError("ResourceNotFoundException", f"Schedule {name} does not exist.", 404)


def _arn(request: Request, name: str) -> str:
    group = request.params.get("GroupName", "default")
    return f"arn:aws:scheduler:{request.world.region}:{ACCOUNT}:schedule/{group}/{name}"


def _schedule(request: Request) -> Schedule:
    params, target = request.params, request.params["Target"]
    role = target["RoleArn"].rpartition("/")[2]
    request.access.check("iam:PassRole", target["RoleArn"], {"iam:PassedToService": "scheduler.amazonaws.com"})
    if role not in request.world.scheduler_roles:
        message = "The execution role you provide must allow AWS EventBridge Scheduler to assume the role."
        raise FakeError("ValidationException", message)
    once = _ONCE.fullmatch(params["ScheduleExpression"])
    if once is None:
        raise FakeError("ValidationException", f"Invalid Schedule Expression {params['ScheduleExpression']}.")
    at = datetime.fromisoformat(once.group(1)).replace(tzinfo=UTC).timestamp()
    if at <= request.now:
        raise FakeError("ValidationException", "The schedule expression is in the past.")
    if target["Arn"] != END or params.get("ActionAfterCompletion") != "DELETE":
        raise FakeError("ValidationException", "The fake's schedules end instances, and are deleted afterwards.")
    return Schedule(at=at, changed_at=request.now, instances=tuple(json.loads(target["Input"])["InstanceIds"]))
