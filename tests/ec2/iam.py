"""IAM, as far as an account is set up with it: roles with their policies, instance profiles, roles of services."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from tests.ec2.faults import FakeError
from tests.ec2.request import Request, operation
from tests.ec2.world import ACCOUNT, World

_SCHEDULER = "scheduler.amazonaws.com"


@dataclass(slots=True, kw_only=True)
class Role:
    trust: str
    tags: dict[str, str] = field(default_factory=dict)
    policies: dict[str, str] = field(default_factory=dict)
    attached: set[str] = field(default_factory=set)
    """ARNs of managed policies."""


def _roles(world: World) -> dict[str, Role]:
    return world.roles


def _missing(kind: str, name: str) -> FakeError:
    return FakeError("NoSuchEntity", f"The {kind} with name {name} cannot be found.", 404)


def _exists(kind: str, name: str) -> FakeError:
    return FakeError("EntityAlreadyExists", f"{kind} with name {name} already exists.", 409)


def _role(request: Request, action: str) -> Role:
    name = request.params["RoleName"]
    request.access.check(f"iam:{action}", f"arn:aws:iam::{ACCOUNT}:role/{name}")
    if name not in _roles(request.world):
        raise _missing("role", name)
    return _roles(request.world)[name]


def _shown(name: str, role: Role) -> dict[str, Any]:
    arn = f"arn:aws:iam::{ACCOUNT}:role/{name}"
    tags = [{"Key": key, "Value": value} for key, value in role.tags.items()]
    trust = quote(role.trust)
    return {"RoleName": name, "Arn": arn, "Path": "/", "AssumeRolePolicyDocument": trust, "Tags": tags}


@operation("iam", "CreateRole")
def create_role(request: Request) -> dict[str, Any]:
    name, trust = request.params["RoleName"], request.params["AssumeRolePolicyDocument"]
    request.access.check("iam:CreateRole", f"arn:aws:iam::{ACCOUNT}:role/{name}")
    if name in _roles(request.world):
        raise _exists("Role", name)
    role = Role(trust=_document(trust), tags={one["Key"]: one["Value"] for one in request.params.get("Tags", ())})
    _roles(request.world)[name] = role
    _trusted(request.world, name, role)
    return {"Role": _shown(name, role)}


@operation("iam", "GetRole")
def get_role(request: Request) -> dict[str, Any]:
    name = request.params["RoleName"]
    if name.startswith("AWSServiceRoleFor"):
        request.access.check("iam:GetRole")
        if name.removeprefix("AWSServiceRoleFor") not in request.world.service_roles:
            raise _missing("role", name)
        return {"Role": _shown(name, Role(trust="{}"))}
    return {"Role": _shown(name, _role(request, "GetRole"))}


@operation("iam", "TagRole")
def tag_role(request: Request) -> dict[str, Any]:
    _role(request, "TagRole").tags.update({one["Key"]: one["Value"] for one in request.params["Tags"]})
    return {}


@operation("iam", "UpdateAssumeRolePolicy")
def update_trust(request: Request) -> dict[str, Any]:
    role = _role(request, "UpdateAssumeRolePolicy")
    role.trust = _document(request.params["PolicyDocument"])
    _trusted(request.world, request.params["RoleName"], role)
    return {}


@operation("iam", "PutRolePolicy")
def put_policy(request: Request) -> dict[str, Any]:
    role = _role(request, "PutRolePolicy")
    role.policies[request.params["PolicyName"]] = _document(request.params["PolicyDocument"])
    return {}


@operation("iam", "GetRolePolicy")
def get_policy(request: Request) -> dict[str, Any]:
    role, name = _role(request, "GetRolePolicy"), request.params["PolicyName"]
    if name not in role.policies:
        raise _missing("role policy", name)
    document = quote(role.policies[name])
    return {"RoleName": request.params["RoleName"], "PolicyName": name, "PolicyDocument": document}


@operation("iam", "ListRolePolicies")
def list_policies(request: Request) -> dict[str, Any]:
    return {"PolicyNames": sorted(_role(request, "ListRolePolicies").policies), "IsTruncated": False}


@operation("iam", "DeleteRolePolicy")
def delete_policy(request: Request) -> dict[str, Any]:
    role, name = _role(request, "DeleteRolePolicy"), request.params["PolicyName"]
    if role.policies.pop(name, None) is None:
        raise _missing("role policy", name)
    return {}


@operation("iam", "ListAttachedRolePolicies")
def list_attached(request: Request) -> dict[str, Any]:
    attached = sorted(_role(request, "ListAttachedRolePolicies").attached)
    shown = [{"PolicyName": arn.rpartition("/")[2], "PolicyArn": arn} for arn in attached]
    return {"AttachedPolicies": shown, "IsTruncated": False}


@operation("iam", "DetachRolePolicy")
def detach(request: Request) -> dict[str, Any]:
    role, arn = _role(request, "DetachRolePolicy"), request.params["PolicyArn"]
    if arn not in role.attached:
        raise _missing("policy", arn)
    role.attached.remove(arn)
    return {}


@operation("iam", "DeleteRole")
def delete_role(request: Request) -> dict[str, Any]:
    """DeleteRole, which wants it bare."""
    role, name = _role(request, "DeleteRole"), request.params["RoleName"]
    if role.policies or role.attached:
        raise FakeError("DeleteConflict", "Cannot delete entity, must delete policies first.", 409)
    if name in request.world.profiles.values():
        raise FakeError("DeleteConflict", "Cannot delete entity, must remove roles from instance profile first.", 409)
    del _roles(request.world)[name]
    request.world.scheduler_roles.discard(name)
    return {}


def _profile(request: Request, action: str) -> str:
    name: str = request.params["InstanceProfileName"]
    request.access.check(f"iam:{action}", f"arn:aws:iam::{ACCOUNT}:instance-profile/{name}")
    if action != "CreateInstanceProfile" and name not in request.world.profiles:
        raise FakeError("NoSuchEntity", f"Instance Profile {name} cannot be found.", 404)
    return name


def _shown_profile(request: Request, name: str) -> dict[str, Any]:
    role = request.world.profiles[name]
    roles = [_shown(role, _roles(request.world).get(role, Role(trust="{}")))] if role else []
    return {"InstanceProfile": {"InstanceProfileName": name, "Roles": roles}}


@operation("iam", "CreateInstanceProfile")
def create_profile(request: Request) -> dict[str, Any]:
    name = _profile(request, "CreateInstanceProfile")
    if name in request.world.profiles:
        raise _exists("Instance Profile", name)
    request.world.profiles[name] = ""
    return _shown_profile(request, name)


@operation("iam", "GetInstanceProfile")
def get_profile(request: Request) -> dict[str, Any]:
    return _shown_profile(request, _profile(request, "GetInstanceProfile"))


@operation("iam", "AddRoleToInstanceProfile")
def add_role(request: Request) -> dict[str, Any]:
    """AddRoleToInstanceProfile: it has one at most."""
    name, role = _profile(request, "AddRoleToInstanceProfile"), request.params["RoleName"]
    if request.world.profiles[name]:
        message = "Cannot exceed quota for InstanceSessionsPerInstanceProfile: 1"
        raise FakeError("LimitExceeded", message, 409)
    if role not in _roles(request.world):
        raise _missing("role", role)
    request.world.profiles[name] = role
    return {}


@operation("iam", "RemoveRoleFromInstanceProfile")
def remove_role(request: Request) -> dict[str, Any]:
    name, role = _profile(request, "RemoveRoleFromInstanceProfile"), request.params["RoleName"]
    if request.world.profiles[name] != role:
        raise _missing("role", role)
    request.world.profiles[name] = ""
    return {}


@operation("iam", "DeleteInstanceProfile")
def delete_profile(request: Request) -> dict[str, Any]:
    """DeleteInstanceProfile, which wants it without a role."""
    name = _profile(request, "DeleteInstanceProfile")
    if request.world.profiles[name]:
        message = "Cannot delete entity, must remove roles from instance profile first."
        raise FakeError("DeleteConflict", message, 409)
    del request.world.profiles[name]
    return {}


@operation("iam", "CreateServiceLinkedRole", checked=True)
def create_service_role(request: Request) -> dict[str, Any]:
    """CreateServiceLinkedRole, of EC2's spot market only."""
    if request.params["AWSServiceName"] != "spot.amazonaws.com":
        raise FakeError("InvalidInput", "The fake knows the spot market's role only.")
    name = "EC2Spot"
    if name in request.world.service_roles:
        message = f"Service role name AWSServiceRoleFor{name} has been taken in this account."
        raise FakeError("InvalidInput", message)
    request.world.service_roles.add(name)
    return {"Role": _shown(f"AWSServiceRoleFor{name}", Role(trust="{}"))}


def _document(text: str) -> str:
    try:
        json.loads(text)
    except ValueError:
        raise FakeError("MalformedPolicyDocument", "Syntax errors in policy.") from None
    return text


def _trusted(world: World, name: str, role: Role) -> None:
    if _SCHEDULER in role.trust:
        world.scheduler_roles.add(name)
    else:
        world.scheduler_roles.discard(name)
