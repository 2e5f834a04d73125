"""The parameter store (ssm): public parameters that name images, and the account's own."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from tests.ec2.faults import FakeError
from tests.ec2.instance import as_datetime
from tests.ec2.request import Operation, Request
from tests.ec2.world import ACCOUNT

PUBLIC = "/aws/"
STANDARD_BYTES = 4096


def get_parameter(request: Request) -> dict[str, Any]:
    """GetParameter."""
    name = request.params["Name"]
    _check(request, "GetParameter", name)
    if name not in request.world.parameters:
        raise FakeError("ParameterNotFound", f"Parameter {name} not found.")
    return {"Parameter": _shown(request, name)}


def put_parameter(request: Request) -> dict[str, Any]:
    """PutParameter."""
    name, value = request.params["Name"], request.params["Value"]
    _check(request, "PutParameter", name)
    if request.params.get("Tags"):
        _check(request, "AddTagsToResource", name)
    if name.startswith(PUBLIC):
        raise FakeError("ValidationException", 'Parameter name: can\'t be prefixed with "aws" (case-insensitive).')
    before = request.world.parameters.get(name)
    if before is not None and not request.params.get("Overwrite"):
        message = "The parameter already exists. To overwrite this value, set the overwrite option in the request."
        raise FakeError("ParameterAlreadyExists", f"{message}")
    if len(value.encode()) > STANDARD_BYTES:
        message = "Standard tier parameters support a maximum parameter value of 4096 characters."
        raise FakeError("ValidationException", message)
    version = 1 if before is None else before["Version"] + 1
    kind = request.params.get("Type") or (before or {}).get("Type", "String")
    kept = {"Name": name, "Type": kind, "Value": value, "Version": version}
    request.world.parameters[name] = {**kept, "LastModifiedDate": as_datetime(request.now)}
    return {"Version": version, "Tier": "Standard"}


def delete_parameter(request: Request) -> dict[str, Any]:
    """DeleteParameter."""
    name = request.params["Name"]
    _check(request, "DeleteParameter", name)
    if request.world.parameters.pop(name, None) is None:
        raise FakeError("ParameterNotFound", f"Parameter {name} not found.")
    return {}


def _check(request: Request, action: str, name: str) -> None:
    request.access.check(f"ssm:{action}", _arn(request, name))


def _arn(request: Request, name: str) -> str:
    account = "" if name.startswith(PUBLIC) else ACCOUNT
    return f"arn:aws:ssm:{request.world.region}:{account}:parameter/{name.lstrip('/')}"


def _shown(request: Request, name: str) -> dict[str, Any]:
    kept = request.world.parameters[name]
    arn = {"ARN": _arn(request, name), "DataType": "text", "LastModifiedDate": as_datetime(request.now)}
    if kept["Type"] != "SecureString" or request.params.get("WithDecryption"):
        return {**arn, **kept}
    sealed = "AQICAH" + base64.b64encode(kept["Value"].encode()[::-1]).decode()
    return {**arn, **kept, "Value": sealed}


PARAMETERS: Mapping[tuple[str, str], Operation] = {
    ("ssm", "GetParameter"): get_parameter,
    ("ssm", "PutParameter"): put_parameter,
    ("ssm", "DeleteParameter"): delete_parameter,
}
