"""Roles of IAM and their instance profiles: made, brought to their policies, deleted."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from rubberband.cloud.aws.calls import OWNER_TAG, AwsSession
from rubberband.cloud.aws.errors import code_of, ignoring
from rubberband.cloud.aws.rights import HEAD, POLICY, Document, Role, types_in
from rubberband.cloud.aws.steps import AccountChanges

SPOT_ROLE = "AWSServiceRoleForEC2Spot"
_GONE, _THERE = "NoSuchEntity", "EntityAlreadyExists"


def plan_role(session: AwsSession, role: Role, owner: str, plan: AccountChanges) -> None:
    """Add the steps that give the account this role. Raises botocore's errors."""
    iam = session.client("iam")
    found = _found(lambda: iam.get_role(RoleName=role.name)["Role"])
    if found is None:
        beside = "an instance profile, " if role.has_profile else ""
        held = f"policies: {', '.join(role.policies)}"
        plan.add(f"make role {role.name} ({beside}{held})", partial(_make, iam, role, owner))
        return
    amiss = [*_amiss(iam, role, found, owner)]
    if amiss:
        plan.add(f"change role {role.name}: {', '.join(amiss)}", partial(_make, iam, role, owner))
    else:
        plan.there.append(f"role {role.name}")


def _amiss(iam: Any, role: Role, found: Any, owner: str) -> list[str]:
    """Return what differs from the role as it should be."""
    amiss = []
    if _tags(found).get(OWNER_TAG) != owner:
        amiss.append(f"mark it with the tag {OWNER_TAG}")
    if found["AssumeRolePolicyDocument"] != role.trust:
        amiss.append("correct who may assume it")
    for name, document in role.policies.items():
        held = _found(partial(_policy, iam, role.name, name))
        if held != document:
            amiss.append(f"{'add' if held is None else 'correct'} policy {name}")
    amiss += [f"detach {arn.rpartition('/')[2]}" for arn in _attached(iam, role.name) if arn in _TOO_MUCH]
    if role.has_profile and not _holds(iam, role.name):
        amiss.append("complete its instance profile")
    return amiss


_TOO_MUCH = ("arn:aws:iam::aws:policy/AmazonSSMManagedInstanceCore",)
"""Managed policies that earlier instructions attached: this one reads every parameter of the account."""


def _make(iam: Any, role: Role, owner: str) -> None:
    """Make the role and its profile, or what is missing of them."""
    tags, trust = [{"Key": OWNER_TAG, "Value": owner}], json.dumps(role.trust, separators=(",", ":"))
    try:
        iam.create_role(RoleName=role.name, AssumeRolePolicyDocument=trust, Tags=tags)
    except iam.exceptions.ClientError as error:
        if code_of(error) != _THERE:
            raise
        iam.tag_role(RoleName=role.name, Tags=tags)
        iam.update_assume_role_policy(RoleName=role.name, PolicyDocument=trust)
    for name, document in role.policies.items():
        text = json.dumps(document, separators=(",", ":"))
        iam.put_role_policy(RoleName=role.name, PolicyName=name, PolicyDocument=text)
    for arn in _attached(iam, role.name):
        if arn in _TOO_MUCH:
            iam.detach_role_policy(RoleName=role.name, PolicyArn=arn)
    if role.has_profile:
        with ignoring(_THERE):
            iam.create_instance_profile(InstanceProfileName=role.name)
        if not _holds(iam, role.name):
            iam.add_role_to_instance_profile(InstanceProfileName=role.name, RoleName=role.name)


def plan_spot_role(session: AwsSession, plan: AccountChanges) -> None:
    """Add the step that gives the account the role with which EC2 serves its spot market. Raises botocore's errors."""
    iam = session.client("iam")
    if _found(lambda: iam.get_role(RoleName=SPOT_ROLE)) is None:
        plan.add(
            f"make role {SPOT_ROLE}, EC2's own for the spot market",
            partial(iam.create_service_linked_role, AWSServiceName="spot.amazonaws.com"),
        )
    else:
        plan.there.append(f"role {SPOT_ROLE}")


def plan_no_role(session: AwsSession, role: Role, owner: str, plan: AccountChanges) -> None:
    """Add the step that deletes the role, if it has the owner's tag, and its profile. Raises botocore's errors."""
    iam = session.client("iam")
    found = _found(lambda: iam.get_role(RoleName=role.name)["Role"])
    has_profile = role.has_profile and _found(lambda: iam.get_instance_profile(InstanceProfileName=role.name))
    if found is not None and _tags(found).get(OWNER_TAG) != owner:
        plan.there.append(f"role {role.name}, which `rubberband aws setup` did not make")
    elif found is not None or has_profile:
        beside = " and its instance profile" if has_profile else ""
        plan.add(f"delete role {role.name}{beside}", partial(_unmake, iam, role))


def _unmake(iam: Any, role: Role) -> None:
    if role.has_profile:
        with ignoring(_GONE):
            iam.remove_role_from_instance_profile(InstanceProfileName=role.name, RoleName=role.name)
        with ignoring(_GONE):
            iam.delete_instance_profile(InstanceProfileName=role.name)
    with ignoring(_GONE):
        for name in iam.list_role_policies(RoleName=role.name)["PolicyNames"]:
            iam.delete_role_policy(RoleName=role.name, PolicyName=name)
        for arn in _attached(iam, role.name):
            iam.detach_role_policy(RoleName=role.name, PolicyArn=arn)
        iam.delete_role(RoleName=role.name)


def held_types(session: AwsSession, owner: str) -> tuple[str, ...]:
    """Return the types to which the head's role is limited; empty: to none, or there is no role yet."""
    iam = session.client("iam")
    held = _found(partial(_policy, iam, f"{owner}-{HEAD}", POLICY))
    return () if held is None else types_in(held)


def _policy(iam: Any, role: str, name: str) -> Document:
    document: Document = iam.get_role_policy(RoleName=role, PolicyName=name)["PolicyDocument"]
    return document


def _attached(iam: Any, role: str) -> list[str]:
    return [one["PolicyArn"] for one in iam.list_attached_role_policies(RoleName=role)["AttachedPolicies"]]


def _holds(iam: Any, name: str) -> bool:
    """Return whether the instance profile has the role of its name."""
    found = _found(lambda: iam.get_instance_profile(InstanceProfileName=name)["InstanceProfile"])
    return found is not None and any(one["RoleName"] == name for one in found["Roles"])


def _tags(found: Any) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in found.get("Tags", ())}


def _found(ask: Callable[[], Any]) -> Any | None:
    """Return the answer; None if the entity does not exist."""
    with ignoring(_GONE):
        return ask()
    return None
