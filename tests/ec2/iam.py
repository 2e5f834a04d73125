"""IAM, as far as an account is set up with it: roles, which stacks make, and the one of EC2's spot market."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.ec2.faults import FakeError
from tests.ec2.request import Request, operation


@dataclass(slots=True, kw_only=True)
class Role:
    trust: str
    tags: dict[str, str] = field(default_factory=dict)
    policies: dict[str, str] = field(default_factory=dict)


_SPOT = "AWSServiceRoleForEC2Spot"


@operation("iam", "GetRole", checked=True)
def get_role(request: Request) -> dict[str, Any]:
    """GetRole, of EC2's spot market only."""
    if request.params["RoleName"] != _SPOT or "EC2Spot" not in request.world.service_roles:
        raise FakeError("NoSuchEntity", f"The role with name {request.params['RoleName']} cannot be found.", 404)
    return {"Role": {"RoleName": _SPOT}}


@operation("iam", "CreateServiceLinkedRole", checked=True)
def create_service_role(request: Request) -> dict[str, Any]:
    """CreateServiceLinkedRole, of EC2's spot market only."""
    if request.params["AWSServiceName"] != "spot.amazonaws.com":
        raise FakeError("InvalidInput", "The fake knows the spot market's role only.")
    if "EC2Spot" in request.world.service_roles:
        raise FakeError("InvalidInput", f"Service role name {_SPOT} has been taken in this account.")
    request.world.service_roles.add("EC2Spot")
    return {"Role": {"RoleName": _SPOT}}
