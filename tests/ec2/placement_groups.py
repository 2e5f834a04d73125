"""Placement groups: made and deleted by name, and what a launch into a cluster meets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.ec2.faults import FakeError
from tests.ec2.filters import Reader, filtered
from tests.ec2.launch_order import tags_of
from tests.ec2.launch_rights import arn, request_tags, resource_tags
from tests.ec2.request import Request, operation
from tests.ec2.world import PlacementGroup


@operation("ec2", "CreatePlacementGroup")
def create_placement_group(request: Request) -> dict[str, Any]:
    """CreatePlacementGroup: a name is taken once in a region."""
    world, params = request.world, request.params
    name, tags = params["GroupName"], tags_of(params).get("placement-group", {})
    asked = {"ec2:Region": world.region, "ec2:PlacementGroupStrategy": params["Strategy"], **request_tags(tags)}
    request.access.check("ec2:CreatePlacementGroup", arn(world, f"placement-group/{name}"), asked)
    if tags:
        created = {**asked, "ec2:CreateAction": "CreatePlacementGroup"}
        request.access.check("ec2:CreateTags", arn(world, f"placement-group/{name}"), created)
    request.end_dry_run()
    if name in world.placement_groups:
        raise FakeError("InvalidPlacementGroup.Duplicate", f"The Placement Group '{name}' already exists.")
    group = PlacementGroup(name=name, group_id=world.new_id("pg"), strategy=params["Strategy"], tags=tags)
    world.placement_groups[name] = group
    return {"PlacementGroup": _shown(group)}


@operation("ec2", "DeletePlacementGroup")
def delete_placement_group(request: Request) -> dict[str, Any]:
    """DeletePlacementGroup: refused while an instance that is not terminated is in it."""
    world, name = request.world, request.params["GroupName"]
    group = world.placement_groups.get(name)
    keys = {"ec2:Region": world.region, **resource_tags(group.tags if group is not None else {})}
    request.access.check("ec2:DeletePlacementGroup", arn(world, f"placement-group/{name}"), keys)
    request.end_dry_run()
    if group is None:
        raise FakeError("InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown.")
    inside = [one for one in world.instances.values() if one.placement_group == name]
    if any(one.state(request.now) != "terminated" for one in inside):
        message = f"The placement group '{name}' is in use and may not be deleted."
        raise FakeError("InvalidPlacementGroup.InUse", message)
    del world.placement_groups[name]
    return {}


@operation("ec2", "DescribePlacementGroups", checked=True)
def describe_placement_groups(request: Request) -> dict[str, Any]:
    known, names = request.world.placement_groups, request.params.get("GroupNames", ())
    for name in names:
        if name not in known:
            raise FakeError("InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown.")
    chosen = filtered([one for one in known.values() if not names or one.name in names], request.params, _READERS)
    return {"PlacementGroups": [_shown(group) for group in chosen]}


def _shown(group: PlacementGroup) -> dict[str, Any]:
    return {
        "GroupName": group.name,
        "GroupId": group.group_id,
        "Strategy": group.strategy,
        "State": "available",
        "Tags": [{"Key": key, "Value": value} for key, value in group.tags.items()],
    }


_READERS: Mapping[str, Reader] = {
    "group-name": lambda group: (group.name,),
    "state": lambda group: ("available",),
    "strategy": lambda group: (group.strategy,),
}
