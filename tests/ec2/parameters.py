"""The parameter store (ssm): public parameters that name images, and the account's own."""

from __future__ import annotations

import base64
import json
import math
from datetime import datetime
from typing import Any

from tests.ec2.faults import FakeError
from tests.ec2.instance import as_datetime
from tests.ec2.request import Request, operation
from tests.ec2.world import ACCOUNT

PUBLIC = "/aws/"
MOST_BYTES = {"Standard": 4096, "Advanced": 8192}
"""By tier; only an advanced parameter has policies."""


@operation("ssm", "GetParameter")
def get_parameter(request: Request) -> dict[str, Any]:
    name = request.params["Name"]
    _check(request, "GetParameter", name)
    _expire(request)
    if name not in request.world.parameters:
        raise FakeError("ParameterNotFound", f"Parameter {name} not found.")
    return {"Parameter": _shown(request, name)}


@operation("ssm", "PutParameter")
def put_parameter(request: Request) -> dict[str, Any]:
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
    tier, policies = request.params.get("Tier", "Standard"), json.loads(request.params.get("Policies") or "[]")
    if len(value.encode()) > MOST_BYTES[tier]:
        message = f"{tier} tier parameters support a maximum parameter value of {MOST_BYTES[tier]} characters."
        raise FakeError("ValidationException", message)
    if policies and tier != "Advanced":
        raise FakeError("ValidationException", "Parameter policies are supported by advanced parameters only.")
    if "{{" in value:
        message = 'Parameter value can\'t nest another parameter. Do not use "{{}}" in the value.'
        raise FakeError("ValidationException", message)
    version = 1 if before is None else before["Version"] + 1
    kind = request.params.get("Type") or (before or {}).get("Type", "String")
    kept = {"Name": name, "Type": kind, "Value": value, "Version": version}
    for ends in (one["Attributes"]["Timestamp"] for one in policies if one["Type"] == "Expiration"):
        kept[_EXPIRES] = datetime.fromisoformat(ends).timestamp()
    request.world.parameters[name] = {**kept, "LastModifiedDate": as_datetime(request.now)}
    return {"Version": version, "Tier": tier}


@operation("ssm", "DeleteParameter")
def delete_parameter(request: Request) -> dict[str, Any]:
    name = request.params["Name"]
    _check(request, "DeleteParameter", name)
    _expire(request)
    if request.world.parameters.pop(name, None) is None:
        raise FakeError("ParameterNotFound", f"Parameter {name} not found.")
    return {}


_EXPIRES = "expires at"


def _expire(request: Request) -> None:
    parameters = request.world.parameters
    for name in [name for name, one in parameters.items() if one.get(_EXPIRES, math.inf) <= request.now]:
        del parameters[name]


def _check(request: Request, action: str, name: str) -> None:
    request.access.check(f"ssm:{action}", _arn(request, name))


def _arn(request: Request, name: str) -> str:
    account = "" if name.startswith(PUBLIC) else ACCOUNT
    return f"arn:aws:ssm:{request.world.region}:{account}:parameter/{name.lstrip('/')}"


def _shown(request: Request, name: str) -> dict[str, Any]:
    kept = {key: value for key, value in request.world.parameters[name].items() if key != _EXPIRES}
    arn = {"ARN": _arn(request, name), "DataType": "text", "LastModifiedDate": as_datetime(request.now)}
    if kept["Type"] != "SecureString" or request.params.get("WithDecryption"):
        return {**arn, **kept}
    sealed = "AQICAH" + base64.b64encode(kept["Value"].encode()[::-1]).decode()
    return {**arn, **kept, "Value": sealed}
