"""Images of one's own: CreateImage, which reboots the machine, DeregisterImage, and the snapshots that they leave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tests.ec2.faults import FakeError
from tests.ec2.filters import Reader, filtered, page
from tests.ec2.instance import as_datetime
from tests.ec2.launch_order import tags_of
from tests.ec2.launch_rights import arn, request_tags, resource_tags
from tests.ec2.request import Request, operation
from tests.ec2.world import Image, Snapshot

SELF = "self"
PENDING_S = 240.0
"""From CreateImage until the image can be launched."""
REBOOT_S = 60.0
"""Until the machine has booted again, and a boot script that ends it then has."""


@operation("ec2", "CreateImage")
def create_image(request: Request) -> dict[str, Any]:
    """CreateImage. There is no client token: what keeps a second one from being made is that its name is taken.

    EC2 shuts the machine down and starts it again (unless NoReboot): its timers are gone. One whose UserData arms a
    lease has a script that ends it when it is booted again.
    """
    world, params = request.world, request.params
    instance = world.instances.get(params["InstanceId"])
    if instance is None or not instance.is_visible(request.now):
        raise FakeError("InvalidInstanceID.NotFound", f"The instance ID '{params['InstanceId']}' does not exist")
    keys = {"ec2:Region": world.region}
    tags = tags_of(params)
    resource = arn(world, f"instance/{instance.instance_id}")
    request.access.check("ec2:CreateImage", resource, {**keys, **resource_tags(instance.tags)})
    for kind, account in (("image", ""), ("snapshot", "")):
        asked = {**keys, **request_tags(tags.get(kind, {}))}
        request.access.check("ec2:CreateImage", arn(world, f"{kind}/*", account=account), asked)
        if tags.get(kind):
            created = {**asked, "ec2:CreateAction": "CreateImage"}
            request.access.check("ec2:CreateTags", arn(world, f"{kind}/*", account=account), created)
    request.end_dry_run()
    if instance.state(request.now) not in ("running", "stopped"):
        message = f"Instance '{instance.instance_id}' is not in state 'running' or 'stopped'."
        raise FakeError("IncorrectInstanceState", message)
    taken = next((image for image in world.images.values() if image.name == params["Name"]), None)
    if taken is not None:
        message = f"AMI name {params['Name']} is already in use by AMI {taken.image_id}"
        raise FakeError("InvalidAMIName.Duplicate", message)
    snapshot = Snapshot(snapshot_id=world.new_id("snap"), volume_gb=instance.volume_gb, tags=tags.get("snapshot", {}))
    image = replace(
        world.images[instance.image_id],
        image_id=world.new_id("ami"),
        name=params["Name"],
        owner=SELF,
        volume_gb=instance.volume_gb,
        snapshot_id=snapshot.snapshot_id,
        tags=tags.get("image", {}),
        created_at=request.now,
        available_at=request.now + PENDING_S,
    )
    world.snapshots[snapshot.snapshot_id] = snapshot
    world.images[image.image_id] = image
    if not params.get("NoReboot") and instance.lease_until is not None:
        instance.lease_until = request.now + REBOOT_S
    return {"ImageId": image.image_id}


@operation("ec2", "DeregisterImage")
def deregister_image(request: Request) -> dict[str, Any]:
    """DeregisterImage: its snapshots stay, and cost, until each is deleted."""
    image = _own(request)
    keys = {"ec2:Region": request.world.region, **resource_tags(image.tags)}
    request.access.check("ec2:DeregisterImage", arn(request.world, f"image/{image.image_id}", account=""), keys)
    request.end_dry_run()
    del request.world.images[image.image_id]
    return {"Return": True}


def _own(request: Request) -> Image:
    image = request.world.images.get(request.params["ImageId"])
    if image is None:
        raise FakeError("InvalidAMIID.NotFound", f"The image id '[{request.params['ImageId']}]' does not exist")
    if image.owner != SELF:
        raise FakeError("AuthFailure", f"Not authorized for image: {image.image_id}")
    return image


@operation("ec2", "DescribeSnapshots", checked=True)
def describe_snapshots(request: Request) -> dict[str, Any]:
    chosen = filtered(request.world.snapshots.values(), request.params, _SNAPSHOT_READERS)
    shown, following = page(chosen, request.params, at_least=5)
    return {"Snapshots": [_shown(snapshot) for snapshot in shown], **following}


def _shown(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "SnapshotId": snapshot.snapshot_id,
        "State": "completed",
        "VolumeSize": snapshot.volume_gb,
        "StartTime": as_datetime(0.0),
        "Tags": [{"Key": key, "Value": value} for key, value in snapshot.tags.items()],
    }


@operation("ec2", "DeleteSnapshot")
def delete_snapshot(request: Request) -> dict[str, Any]:
    world, snapshot_id = request.world, request.params["SnapshotId"]
    snapshot = world.snapshots.get(snapshot_id)
    if snapshot is None:
        raise FakeError("InvalidSnapshot.NotFound", f"The snapshot '{snapshot_id}' does not exist.")
    keys = {"ec2:Region": world.region, **resource_tags(snapshot.tags)}
    request.access.check("ec2:DeleteSnapshot", arn(world, f"snapshot/{snapshot_id}", account=""), keys)
    request.end_dry_run()
    user = next((image for image in world.images.values() if image.snapshot_id == snapshot_id), None)
    if user is not None:
        raise FakeError("InvalidSnapshot.InUse", f"The snapshot {snapshot_id} is currently in use by {user.image_id}")
    del world.snapshots[snapshot_id]
    return {}


_SNAPSHOT_READERS: Mapping[str, Reader] = {
    "snapshot-id": lambda snapshot: (snapshot.snapshot_id,),
    "status": lambda snapshot: ("completed",),
}
