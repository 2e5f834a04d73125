"""Clients in this process: boto3's calls, results and exceptions, without HTTP.

They do not retry: what the fake does to one call, one call of a client meets (boto3 would have retried some of it).
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import botocore.session
from botocore import xform_name
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    EndpointConnectionError,
    NoCredentialsError,
    OperationNotPageableError,
    ParamValidationError,
    ReadTimeoutError,
)
from botocore.paginate import Paginator, PaginatorModel
from botocore.validate import ParamValidator

from tests.ec2.faults import FakeDisconnect, FakeError
from tests.ec2.world import REGIONS

if TYPE_CHECKING:
    from tests.ec2.core import FakeAws

NOBODY = "nobody"
LOST = {
    "connect_timeout": ConnectTimeoutError,
    "read_timeout": ReadTimeoutError,
    "connection_closed": ConnectionClosedError,
}
REGIONAL = ("ec2", "ssm")
"""Services that have something of their own in each region of the fake."""
_VALIDATOR = ParamValidator()


class FakeSession:
    """A Session (rubberband.cloud.aws.calls) on a FakeAws."""

    def __init__(self, fake: FakeAws, principal: str, region: str) -> None:
        self.region = region
        self._fake, self._principal = fake, principal
        self._clients: dict[str, FakeClient] = {}

    def client(self, service: str) -> Any:
        if service not in self._clients:
            self._clients[service] = FakeClient(self._fake, service, self._principal, self.region)
        return self._clients[service]


class FakeClient:
    """Has a method for every operation of the service's model, under boto3's name."""

    def __init__(self, fake: FakeAws, service: str, principal: str, region: str) -> None:
        self.exceptions = SimpleNamespace(ClientError=ClientError)
        self._fake, self._service, self._principal, self._region = fake, service, principal, region

    def __getattr__(self, name: str) -> Callable[..., dict[str, Any]]:
        operation = operation_names(self._service).get(name)
        if operation is None:
            raise AttributeError(f"{self._service} has no operation {name}")

        def method(**params: Any) -> dict[str, Any]:
            return self._call(operation, params)

        method.__name__ = name
        setattr(self, name, method)
        return method

    def can_paginate(self, name: str) -> bool:
        return operation_names(self._service).get(name) in pagination(self._service)

    def get_paginator(self, name: str) -> Any:
        if not self.can_paginate(name):
            raise OperationNotPageableError(operation_name=name)
        operation = operation_names(self._service)[name]
        model = service_model(self._service).operation_model(operation)
        return Paginator(getattr(self, name), pagination(self._service)[operation], model)

    def close(self) -> None:
        """Nothing is open."""

    def _call(self, operation: str, params: dict[str, Any]) -> dict[str, Any]:
        self._check_reach()
        sent = self._sent(operation, params)
        fake = self._fake.in_region(self._region) if self._service in REGIONAL else self._fake
        try:
            result = fake.call(self._service, operation, sent, self._principal)
        except FakeError as error:
            raise ClientError(_error_response(error), operation) from error
        except FakeDisconnect as lost:
            raise LOST[lost.kind](endpoint_url=self._endpoint, error=lost.kind) from lost
        return {**_received(operation, result), "ResponseMetadata": _metadata(200)}

    def _sent(self, operation: str, params: dict[str, Any]) -> dict[str, Any]:
        """What boto3 would send: valid, with a token where the caller gives none, and UserData in base64."""
        model = service_model(self._service).operation_model(operation)
        if self._fake.validates and model.input_shape is not None:
            report = _VALIDATOR.validate(params, model.input_shape)
            if report.has_errors():
                raise ParamValidationError(report=report.generate_report())
        tokens = {name: str(uuid.uuid4()) for name in model.idempotent_members if name not in params}
        if operation == "RunInstances" and "UserData" in params:
            return {**params, **tokens, "UserData": _base64(params["UserData"])}
        return {**params, **tokens}

    @property
    def _endpoint(self) -> str:
        return f"https://{self._service}.{self._region}.amazonaws.com/"

    def _check_reach(self) -> None:
        if self._region not in REGIONS:
            raise EndpointConnectionError(endpoint_url=self._endpoint)
        if self._principal == NOBODY:
            raise NoCredentialsError


@lru_cache(maxsize=1)
def _loader() -> Any:
    return botocore.session.Session()


@lru_cache(maxsize=16)
def service_model(service: str) -> Any:
    return _loader().get_service_model(service)


@lru_cache(maxsize=16)
def operation_names(service: str) -> Mapping[str, str]:
    """boto3's name of each operation -> the API's."""
    return {xform_name(name): name for name in service_model(service).operation_names}


@lru_cache(maxsize=16)
def pagination(service: str) -> Mapping[str, Any]:
    """Operations that come in pages, by the API's names -> how."""
    model = PaginatorModel(_loader().get_component("data_loader").load_service_model(service, "paginators-1"))
    found = {}
    for name in service_model(service).operation_names:
        try:
            found[name] = model.get_paginator(name)
        except ValueError:
            continue
    return found


def _base64(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def _received(operation: str, result: dict[str, Any]) -> dict[str, Any]:
    if operation == "GetConsoleOutput":
        return {**result, "Output": base64.b64decode(result["Output"]).decode(errors="replace")}
    if operation == "GetTemplate":
        return {**result, "TemplateBody": json.loads(result["TemplateBody"])}
    return result


def _error_response(error: FakeError) -> dict[str, Any]:
    return {"Error": {"Code": error.code, "Message": error.message}, "ResponseMetadata": _metadata(error.http_status)}


def _metadata(http_status: int) -> dict[str, Any]:
    return {"RequestId": "fake", "HTTPStatusCode": http_status, "HTTPHeaders": {}, "RetryAttempts": 0}
