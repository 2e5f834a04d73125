"""End everything of one owner in one region: instances, head, published token, groups. Idempotent."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rubberband.cloud.aws.calls import by_tags, name_of, tags_in
from rubberband.cloud.aws.machines import Session
from rubberband.cloud.aws.metadata import Place, own_place
from rubberband.cloud.aws.network import delete_clusters, delete_groups
from rubberband.cloud.aws.pages import pages
from rubberband.cloud.aws.resolving import in_one_line
from rubberband.cloud.aws.token import delete_token
from rubberband.cloud.steady import elapsed_s
from rubberband.errors import ProviderError

_LIVING = ("pending", "running", "stopping", "stopped")
_LOOK_S = 5.0
_PATIENCE_S = 900.0
_LOOKS = 2
"""EC2 is eventually consistent: nothing left is believed after so many looks."""
_VISIBLE_S = 300.0
"""After so long EC2 shows whatever was launched. A security group in use tells of something that it does not yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """An instance that carries the owner's tag."""

    instance_id: str
    role: str
    experiment: str
    name: str
    instance_type: str

    def __str__(self) -> str:
        what = f"{self.name} of {self.experiment}" if self.experiment else self.role or "an instance"
        return f"{what} ({self.instance_id}, {self.instance_type})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What `end_everything` has ended."""

    instances: tuple[Owned, ...]
    token: bool
    security_groups: tuple[str, ...]
    kept_groups: tuple[str, ...] = ()
    """Security groups that something still uses."""
    placement_groups: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.instances or self.token or self.security_groups or self.placement_groups)


def living(session: Session, owner: str) -> tuple[Owned, ...]:
    """Every instance of the owner that lives, in the order of their launch. Raises InputError."""
    with in_one_line():
        return tuple(_owned(one) for one in _described(session, owner, _LIVING))


def end_everything(
    session: Session,
    owner: str,
    *,
    place: Place | None = None,
    clock: Callable[[], float] = elapsed_s,
    sleep: Callable[[float], None] = time.sleep,
) -> Ended:
    """End all of the owner's instances, wait until they are gone, then delete the token and our groups.

    The machine that this runs on, if it is one of them, comes last, and its security group stays. Raises InputError if
    the role lacks rights, ProviderError if something does not end.
    """
    place = place or own_place()
    own = place.instance_id if place is not None else ""
    before = clock() + _VISIBLE_S
    with in_one_line():
        ended = _end_instances(session, owner, own, clock, sleep)
        token = delete_token(session, owner)
        last = [one for one in living(session, owner) if one.instance_id == own]
        groups, kept = delete_groups(session, owner)
        while kept and not last and clock() < before:
            sleep(_LOOK_S)
            ended |= _end_instances(session, owner, own, clock, sleep)
            deleted, kept = delete_groups(session, owner)
            groups += deleted
        clusters = delete_clusters(session, owner)
        if last:
            session.client("ec2").terminate_instances(InstanceIds=[own])
    return Ended(
        instances=(*ended.values(), *last),
        token=token,
        security_groups=groups,
        kept_groups=kept,
        placement_groups=clusters,
    )


def _end_instances(
    session: Session, owner: str, own: str, clock: Callable[[], float], sleep: Callable[[float], None]
) -> dict[str, Owned]:
    ended: dict[str, Owned] = {}
    looks, before = 0, clock() + _PATIENCE_S
    while looks < _LOOKS:
        left = [one for one in _described(session, owner, (*_LIVING, "shutting-down")) if one["InstanceId"] != own]
        alive = [one for one in left if one["State"]["Name"] != "shutting-down"]
        if alive:
            session.client("ec2").terminate_instances(InstanceIds=[one["InstanceId"] for one in alive])
            ended |= {one["InstanceId"]: _owned(one) for one in alive}
        looks = 0 if left else looks + 1
        if clock() > before:
            names = ", ".join(one["InstanceId"] for one in left)
            raise ProviderError(f"{names} did not end within {_PATIENCE_S:g} s; run `rubberband down` again")
        if looks < _LOOKS:
            sleep(_LOOK_S)
    return ended


def _described(session: Session, owner: str, states: tuple[str, ...]) -> list[Any]:
    filters = [*by_tags(owner=owner), {"Name": "instance-state-name", "Values": list(states)}]
    shown = pages(session.client("ec2").describe_instances, "Reservations", Filters=filters)
    return sorted((one for each in shown for one in each["Instances"]), key=lambda one: one["LaunchTime"])


def _owned(instance: Any) -> Owned:
    tags = tags_in(instance)
    return Owned(
        instance_id=instance["InstanceId"],
        role=tags.get("rubberband:role", ""),
        experiment=tags.get("rubberband:experiment", ""),
        name=name_of(instance),
        instance_type=instance["InstanceType"],
    )
