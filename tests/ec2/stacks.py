"""CloudFormation, as far as an account is set up with it: a stack of roles, instance profiles, and a bucket.

A change is made at once, and shown as under way when it is first looked at. One that would fail leaves all as it was.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tests.ec2.buckets import Files
from tests.ec2.faults import FakeError
from tests.ec2.iam import Role
from tests.ec2.request import Request, operation
from tests.ec2.world import ACCOUNT, World

_NAMES = {
    "AWS::IAM::Role": "RoleName",
    "AWS::IAM::InstanceProfile": "InstanceProfileName",
    "AWS::S3::Bucket": "BucketName",
}


@dataclass(slots=True, kw_only=True)
class Stack:
    stack_id: str
    tags: list[dict[str, str]]
    template: str = '{"Resources": {}}'
    change: str = "CREATE"
    result: str = "CREATE_COMPLETE"
    looked_at: bool = False
    reason: dict[str, str] = field(default_factory=dict)
    """Resource -> why it could not be made or deleted."""


@operation("cloudformation", "CreateStack", checked=True)
def create_stack(request: Request) -> dict[str, Any]:
    name = request.params["StackName"]
    if _living(request.world, name) is not None:
        raise FakeError("AlreadyExistsException", f"Stack [{name}] already exists")
    stack_id = f"arn:aws:cloudformation:{request.world.region}:{ACCOUNT}:stack/{name}/{len(request.world.stacks)}"
    stack = request.world.stacks[stack_id] = Stack(stack_id=stack_id, tags=request.params["Tags"])
    failure = "DELETE_COMPLETE" if request.params.get("OnFailure") == "DELETE" else "ROLLBACK_COMPLETE"
    _change(request, stack, "CREATE", failure)
    return {"StackId": stack_id}


@operation("cloudformation", "UpdateStack", checked=True)
def update_stack(request: Request) -> dict[str, Any]:
    stack = _found(request)
    if not stack.result.endswith("_COMPLETE"):
        raise FakeError("ValidationError", f"Stack:{stack.stack_id} is in {stack.result} state and can not be updated.")
    if json.loads(stack.template) == json.loads(request.params["TemplateBody"]):
        raise FakeError("ValidationError", "No updates are to be performed.")
    _change(request, stack, "UPDATE", "UPDATE_ROLLBACK_COMPLETE")
    return {"StackId": stack.stack_id}


@operation("cloudformation", "DeleteStack", checked=True)
def delete_stack(request: Request) -> dict[str, Any]:
    """DeleteStack, which stops at a bucket that is not empty."""
    stack = _found(request)
    stack.change, stack.looked_at, stack.reason = "DELETE", False, {}
    for name, resource in json.loads(stack.template)["Resources"].items():
        if (reason := _unmake(request.world, resource)) is not None:
            stack.reason[name] = reason
    stack.result = "DELETE_FAILED" if stack.reason else "DELETE_COMPLETE"
    return {}


@operation("cloudformation", "DescribeStacks", checked=True)
def describe_stacks(request: Request) -> dict[str, Any]:
    stack = _found(request, deleted=True)
    status = stack.result if stack.looked_at else f"{stack.change}_IN_PROGRESS"
    stack.looked_at = True
    name = stack.stack_id.split("/")[1]
    shown = {"StackId": stack.stack_id, "StackName": name, "StackStatus": status, "Tags": stack.tags}
    return {"Stacks": [shown]}


@operation("cloudformation", "DescribeStackEvents", checked=True)
def describe_events(request: Request) -> dict[str, Any]:
    """DescribeStackEvents, the newest first: what failed is preceded by what was cancelled because of it."""
    stack = _found(request, deleted=True)
    failed = [("Other", "Resource creation cancelled"), *stack.reason.items()]
    events = [
        {"LogicalResourceId": name, "ResourceStatus": f"{stack.change}_FAILED", "ResourceStatusReason": reason}
        for name, reason in failed
    ]
    begun = {"PhysicalResourceId": stack.stack_id, "ResourceStatus": f"{stack.change}_IN_PROGRESS"}
    before = {"LogicalResourceId": "Earlier", "ResourceStatus": "CREATE_FAILED", "ResourceStatusReason": "of before"}
    return {"StackEvents": [{"PhysicalResourceId": "", **one} for one in (*events, begun, before)]}


@operation("cloudformation", "GetTemplate", checked=True)
def get_template(request: Request) -> dict[str, Any]:
    return {"TemplateBody": _found(request).template}


def _living(world: World, name: str) -> Stack | None:
    """The stack of a name or id that is not deleted."""
    return next((one for one in world.stacks.values() if one.result != "DELETE_COMPLETE" and _is(one, name)), None)


def _is(stack: Stack, name: str) -> bool:
    return name in (stack.stack_id, stack.stack_id.split("/")[1])


def _found(request: Request, *, deleted: bool = False) -> Stack:
    """The stack that is asked about; `deleted`: one that is gone is shown by its id."""
    name = request.params["StackName"]
    stack = _living(request.world, name) or (request.world.stacks.get(name) if deleted else None)
    if stack is None:
        raise FakeError("ValidationError", f"Stack with id {name} does not exist")
    return stack


def _change(request: Request, stack: Stack, change: str, failure: str) -> None:
    if "CAPABILITY_NAMED_IAM" not in request.params.get("Capabilities", ()):
        raise FakeError("InsufficientCapabilitiesException", "Requires capabilities : [CAPABILITY_NAMED_IAM]")
    world, old, new = request.world, json.loads(stack.template)["Resources"], json.loads(request.params["TemplateBody"])
    stack.change, stack.looked_at = change, False
    stack.reason = {
        name: f"{_name(one)} already exists"
        for name, one in new["Resources"].items()
        if name not in old and _exists(world, one)
    }
    stack.result = failure if stack.reason else f"{change}_COMPLETE"
    if not stack.reason:
        for name, one in new["Resources"].items():
            if old.get(name) != one:
                _make(world, one, request.params["Tags"])
        for name, one in old.items():
            if name not in new["Resources"]:
                _unmake(world, one)
        stack.template = request.params["TemplateBody"]


def _name(resource: Any) -> str:
    return str(resource["Properties"][_NAMES[resource["Type"]]])


def _exists(world: World, resource: Any) -> bool:
    """Whether the name is taken; a profile of the fake's beginning is taken over."""
    known = {"AWS::IAM::Role": world.roles, "AWS::S3::Bucket": world.buckets}
    return _name(resource) in known.get(resource["Type"], ())


def _make(world: World, resource: Any, tags: list[dict[str, str]]) -> None:
    name, kind, properties = _name(resource), resource["Type"], resource["Properties"]
    if kind == "AWS::IAM::Role":
        trust = json.dumps(properties["AssumeRolePolicyDocument"])
        documents = {one["PolicyName"]: json.dumps(one["PolicyDocument"]) for one in properties["Policies"]}
        world.roles[name] = Role(trust=trust, policies=documents, tags={one["Key"]: one["Value"] for one in tags})
        if "scheduler.amazonaws.com" in trust:
            world.scheduler_roles.add(name)
    elif kind == "AWS::IAM::InstanceProfile":
        world.profiles[name] = name
    else:
        world.buckets.setdefault(name, world.new_bucket(name))
        world.facts(name).public_block = properties["PublicAccessBlockConfiguration"]
        world.facts(name).lifecycle = properties["LifecycleConfiguration"]["Rules"]


def _unmake(world: World, resource: Any) -> str | None:
    """Delete it, if it is there; return why it stays."""
    name, kind = _name(resource), resource["Type"]
    if kind == "AWS::S3::Bucket":
        if world.buckets.get(name) or world.facts(name).deleted:
            return "The bucket you tried to delete is not empty"
        if isinstance(gone := world.buckets.pop(name, None), Files):
            gone.folder.rmdir()
        world.bucket_facts.pop(name, None)
    elif kind == "AWS::IAM::Role":
        world.roles.pop(name, None)
        world.scheduler_roles.discard(name)
    else:
        world.profiles.pop(name, None)
    return None
