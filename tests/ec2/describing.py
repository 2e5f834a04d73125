"""What EC2 shows of instances, and their end: Describe-, TerminateInstances, consoles, CreateTags, spot requests."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from tests.ec2.faults import FakeError
from tests.ec2.filters import Reader, filtered, page
from tests.ec2.instance import USER_INITIATED, Instance, as_datetime
from tests.ec2.launch_rights import arn, check_end, request_tags, resource_tags
from tests.ec2.request import Request, operation
from tests.ec2.world import REGIONS


@operation("ec2", "DescribeInstances", checked=True)
def describe_instances(request: Request) -> dict[str, Any]:
    params, now = request.params, request.now - request.fault.stale_s
    if params.get("InstanceIds") and "MaxResults" in params:
        message = "The parameter instancesSet cannot be used with the parameter maxResults"
        raise FakeError("InvalidParameterCombination", message)
    chosen = filtered(_visible(request), params, {**_READERS, "instance-state-name": lambda one: (one.state(now),)})
    shown, following = page(chosen, params, at_least=5)
    reservations: dict[str, list[Instance]] = {}
    for instance in shown:
        reservations.setdefault(instance.reservation_id, []).append(instance)
    found = [{"Groups": [], "Instances": [one.as_dict(now) for one in ones]} for ones in reservations.values()]
    return {"Reservations": found, **following}


@operation("ec2", "TerminateInstances")
def terminate_instances(request: Request) -> dict[str, Any]:
    """TerminateInstances: none if one is not to be found; none in a zone where one is protected."""
    instances = [_found(request, instance_id) for instance_id in request.params["InstanceIds"]]
    for instance in instances:
        check_end(request.world, request.access, instance)
    request.end_dry_run()
    protected = [one for one in instances if one.protected]
    closed = {one.zone for one in protected}
    ended = [_terminated(request, instance) for instance in instances if instance.zone not in closed]
    for one in protected:
        message = f"The instance '{one.instance_id}' may not be terminated. Modify its 'disableApiTermination' "
        raise FakeError("OperationNotPermitted", f"{message}instance attribute and try again.")
    return {"TerminatingInstances": ended}


@operation("ec2", "StartInstances")
def start_instances(request: Request) -> dict[str, Any]:
    """StartInstances, of one that is stopped; one that runs stays as it is."""
    started = []
    for instance in [_found(request, instance_id) for instance_id in request.params["InstanceIds"]]:
        keys = {"ec2:Region": request.world.region, **resource_tags(instance.tags)}
        request.access.check("ec2:StartInstances", arn(request.world, f"instance/{instance.instance_id}"), keys)
        request.end_dry_run()
        before = instance.state_as_dict(request.now)
        if before["Name"] not in ("stopped", "pending", "running"):
            message = f"The instance '{instance.instance_id}' is not in a state from which it can be started."
            raise FakeError("IncorrectInstanceState", message)
        if before["Name"] == "stopped":
            name, zone, market = instance.machine_type.name, instance.zone, instance.market
            if not request.world.has_capacity(name, zone, market, 1):
                message = f"We currently do not have sufficient {name} capacity in zone {zone}."
                raise FakeError("InsufficientInstanceCapacity", message, 500)
            request.world.start(instance, request.now)
        current = instance.state_as_dict(request.now)
        started.append({"InstanceId": instance.instance_id, "PreviousState": before, "CurrentState": current})
    return {"StartingInstances": started}


@operation("ec2", "DescribeRegions", checked=True)
def describe_regions(request: Request) -> dict[str, Any]:
    shown = [
        {"RegionName": name, "Endpoint": f"ec2.{name}.amazonaws.com", "OptInStatus": "opt-in-not-required"}
        for name in REGIONS
    ]
    return {"Regions": shown}


@operation("ec2", "GetConsoleOutput")
def get_console_output(request: Request) -> dict[str, Any]:
    instance = _found(request, request.params["InstanceId"])
    keys = {"ec2:Region": request.world.region, **resource_tags(instance.tags)}
    request.access.check("ec2:GetConsoleOutput", arn(request.world, f"instance/{instance.instance_id}"), keys)
    request.end_dry_run()
    shown = base64.b64encode(request.world.console(instance.instance_id).encode()).decode()
    return {"InstanceId": instance.instance_id, "Timestamp": as_datetime(request.now), "Output": shown}


@operation("ec2", "CreateTags")
def create_tags(request: Request) -> dict[str, Any]:
    tags = {tag["Key"]: tag.get("Value", "") for tag in request.params["Tags"]}
    owned = [_tags_of(request, resource) for resource in request.params["Resources"]]
    for kind, resource, before in owned:
        keys = {"ec2:Region": request.world.region, **request_tags(tags), **resource_tags(before)}
        request.access.check("ec2:CreateTags", arn(request.world, f"{kind}/{resource}"), keys)
    request.end_dry_run()
    for _, _, before in owned:
        before.update(tags)
    return {}


def _visible(request: Request) -> Sequence[Instance]:
    asked, when = request.params.get("InstanceIds"), request.now - request.fault.stale_s
    if asked:
        return [_found(request, instance_id).as_of(when) for instance_id in asked]
    return [one.as_of(when) for one in request.world.instances.values() if one.is_visible(when)]


def _found(request: Request, instance_id: str) -> Instance:
    if not instance_id.startswith("i-"):
        message = f'Invalid id: "{instance_id}" (expecting "i-...")'
        raise FakeError("InvalidInstanceID.Malformed", message)
    instance = request.world.instances.get(instance_id)
    if instance is None or not instance.is_visible(request.now - request.fault.stale_s):
        raise FakeError("InvalidInstanceID.NotFound", f"The instance ID '{instance_id}' does not exist")
    return instance


def _terminated(request: Request, instance: Instance) -> dict[str, Any]:
    before = instance.state_as_dict(request.now)
    request.world.end(instance, request.now, USER_INITIATED)
    current = instance.state_as_dict(request.now)
    return {"InstanceId": instance.instance_id, "PreviousState": before, "CurrentState": current}


def _tags_of(request: Request, resource: str) -> tuple[str, str, dict[str, str]]:
    if resource in request.world.groups:
        return "security-group", resource, request.world.groups[resource].tags
    return "instance", resource, _found(request, resource).tags


_READERS: Mapping[str, Reader] = {
    "availability-zone": lambda one: (one.zone,),
    "client-token": lambda one: (one.client_token,),
    "instance-id": lambda one: (one.instance_id,),
    "instance-lifecycle": lambda one: ("spot",) if one.market == "spot" else (),
    "instance-type": lambda one: (one.machine_type.name,),
}
