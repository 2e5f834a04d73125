"""AWS's wire formats as the server side speaks them, by botocore's own service models: requests in, responses out.

It knows protocols (`ec2`, `query`, `json`, `rest-json`, `rest-xml`), not services: what it reads and writes follows
from the model alone, so an operation that the fake learns is on the wire at once.
"""

from __future__ import annotations

import base64
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from functools import cache
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import parse_qsl, unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import botocore.loaders
import botocore.model
import botocore.utils

Params: TypeAlias = dict[str, Any]
_Shape: TypeAlias = Any
_Names: TypeAlias = Callable[[_Shape, str], str]

_SIGNING_NAMES = {"servicequotas": "service-quotas"}
_CREDENTIAL = re.compile(r"Credential=([^/\s,]+)/\d{8}/([^/\s]+)/([^/\s]+)/aws4_request")


class MalformedRequest(Exception):
    """A request that no AWS client sends: no signature, an unknown service or operation, a value of the wrong type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """What the signature of a request says; the signature itself is not checked."""

    access_key: str
    region: str
    service: str
    """As boto3 names it (`ec2`, `service-quotas`, …)."""


def caller(headers: Mapping[str, str]) -> Caller | None:
    """Who signed the request, for which service and region; None if nobody did."""
    match = _CREDENTIAL.search(headers.get("Authorization") or "")
    if match is None:
        return None
    access_key, region, service = match.groups()
    return Caller(access_key=access_key, region=region, service=_SIGNING_NAMES.get(service, service))


@cache
def service_model(service: str) -> Any:
    """botocore's model of a service. Raises MalformedRequest if there is none."""
    try:
        description = botocore.loaders.Loader().load_service_model(service, "service-2")
    except Exception as error:
        raise MalformedRequest(f"no such service: {service}") from error
    return botocore.model.ServiceModel(description, service)


def decode(
    service: str, headers: Mapping[str, str], body: bytes, *, method: str = "POST", target: str = "/"
) -> tuple[str, Params]:
    """The operation that a request asks for, and its parameters as boto3 takes them. `target`: path and query.

    Raises MalformedRequest.
    """
    try:
        if _protocol(service).startswith("rest-"):
            return _decode_rest(service, method, target, headers, body)
        if _protocol(service) == "json":
            return _decode_json(service, headers, body)
        return _decode_form(service, body)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise MalformedRequest(f"cannot read the request to {service}: {error}") from error


def encode(service: str, operation: str, result: Mapping[str, Any]) -> Response:
    """What the service answers where boto3 returns `result`."""
    shape = _operation(service, operation).output_shape
    request_id = str(uuid.uuid4())
    protocol = _protocol(service)
    if protocol == "rest-xml":
        return _encode_rest(service, operation, result)
    if protocol.endswith("json"):
        return _json_response(service, 200, _to_json(shape, result) if shape else {}, request_id)
    inner = "".join(_xml_members(shape, result)) if shape else ""
    namespace = service_model(service).metadata.get("xmlNamespace", "")
    if protocol == "ec2":
        inner = f"<requestId>{request_id}</requestId>{inner}"
    else:
        wrapper = f"{operation}Result"
        inner = (
            f"<{wrapper}>{inner}</{wrapper}><ResponseMetadata><RequestId>{request_id}</RequestId></ResponseMetadata>"
        )
    return xml_response(200, f'<{operation}Response xmlns="{namespace}">{inner}</{operation}Response>')


def encode_error(service: str, code: str, message: str, status: int) -> Response:
    """What the service answers where boto3 raises a ClientError."""
    request_id = str(uuid.uuid4())
    protocol = _protocol(service)
    if protocol.endswith("json"):
        return _json_response(service, status, {"__type": code, "message": message}, request_id)
    error = f"<Code>{escape(code)}</Code><Message>{escape(message)}</Message>"
    if protocol == "rest-xml":
        return xml_response(status, f"<Error>{error}<RequestId>{request_id}</RequestId></Error>")
    if protocol == "ec2":
        return xml_response(
            status, f"<Response><Errors><Error>{error}</Error></Errors><RequestID>{request_id}</RequestID></Response>"
        )
    kind = "Sender" if status < 500 else "Receiver"
    return xml_response(
        status,
        f"<ErrorResponse><Error><Type>{kind}</Type>{error}</Error><RequestId>{request_id}</RequestId></ErrorResponse>",
    )


def xml_response(status: int, text: str) -> Response:
    """A response whose body is the XML element `text`."""
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'.encode()
    return Response(status=status, headers={"Content-Type": "text/xml;charset=UTF-8"}, body=body)


def xml_text(value: str) -> str:
    """`value` as the text of an XML element, which reads back as it was."""
    return escape(value, {"\r": "&#13;"})


def _protocol(service: str) -> str:
    protocol: str = service_model(service).metadata["protocol"]
    return protocol


def _operation(service: str, operation: str) -> Any:
    try:
        return service_model(service).operation_model(operation)
    except botocore.model.OperationNotFoundError as error:
        raise MalformedRequest(f"{service} has no operation {operation}") from error


def _json_response(service: str, status: int, body: Any, request_id: str) -> Response:
    version = service_model(service).metadata.get("jsonVersion")
    kind = "application/json" if version is None else f"application/x-amz-json-{version}"
    headers = {"Content-Type": kind, "x-amzn-RequestId": request_id}
    return Response(status=status, headers=headers, body=json.dumps(body).encode())


def _decode_json(service: str, headers: Mapping[str, str], body: bytes) -> tuple[str, Params]:
    operation = headers["X-Amz-Target"].rpartition(".")[2]
    shape = _operation(service, operation).input_shape
    values = json.loads(body or b"{}")
    return operation, _from_json(shape, values) if shape else {}


class _Route(NamedTuple):
    operation: str
    method: str
    path: re.Pattern[str]
    query: Mapping[str, str]
    """What the query has for this operation only."""
    needs: frozenset[tuple[str, str]]
    """(place, name) of the parameters without which the request is another operation's."""


@cache
def _routes(service: str) -> Sequence[_Route]:
    """The operations of a service, those first that ask for more."""
    found = []
    for name in service_model(service).operation_names:
        model = _operation(service, name)
        if model.deprecated:
            continue
        path, _, query = model.http["requestUri"].partition("?")
        shape = model.input_shape
        required = [(shape.members[each], each) for each in shape.required_members] if shape else []
        places = ((one.serialization.get("location", ""), _located(one, each)) for one, each in required)
        needs = frozenset(each for each in places if each[0] in ("querystring", "header"))
        wanted = dict(parse_qsl(query, keep_blank_values=True))
        found.append(_Route(name, model.http["method"], _path_pattern(path), wanted, needs))
    return sorted(found, key=lambda route: -len(route.needs) - len(route.query))


def _decode_rest(service: str, method: str, target: str, headers: Mapping[str, str], body: bytes) -> tuple[str, Params]:
    """By the method and the path; parameters are in the path, the query, the headers and the body."""
    path, _, query = target.partition("?")
    asked = dict(parse_qsl(query, keep_blank_values=True))
    body, trailers = _unframed(headers, body)
    known = {**{name.lower(): value for name, value in headers.items()}, **trailers}
    for route in _routes(service):
        found = route.path.fullmatch(path)
        if found is None or route.method != method or not route.query.items() <= asked.items():
            continue
        if not all(name in asked if place == "querystring" else name.lower() in known for place, name in route.needs):
            continue
        shape = _operation(service, route.operation).input_shape
        params: Params = _from_body(service, shape, body) if shape else {}
        places = {"uri": {key: unquote(value) for key, value in found.groupdict().items()}, "querystring": asked}
        for key, member in shape.members.items() if shape else ():
            place, located = member.serialization.get("location", ""), _located(member, key)
            values, name = (known, located.lower()) if place == "header" else (places.get(place, {}), located)
            if name in values:
                params[key] = _from_form(member, values[name], _located)
        return route.operation, params
    raise MalformedRequest(f"{service} has nothing at {method} {path}")


def _from_body(service: str, shape: _Shape, body: bytes) -> Params:
    payload = shape.serialization.get("payload")
    if _protocol(service) == "rest-json":
        params: Params = _from_json(shape, json.loads(body or b"{}"))
        return params
    if payload is not None and shape.members[payload].type_name == "blob":
        return {payload: body}
    return {payload: _from_xml(shape.members[payload], ElementTree.fromstring(body))} if payload and body else {}


def _from_xml(shape: _Shape, node: ElementTree.Element) -> Any:
    if shape.type_name != "structure":
        return _from_form(shape, node.text or "", _located)
    found: dict[str, Any] = {}
    for name, member in shape.members.items():
        nodes = [child for child in node if child.tag.rpartition("}")[2] == _located(member, name)]
        if nodes and member.type_name == "list":
            items = nodes if member.serialization.get("flattened") else list(nodes[0])
            found[name] = [_from_xml(member.member, item) for item in items]
        elif nodes:
            found[name] = _from_xml(member, nodes[0])
    return found


def _unframed(headers: Mapping[str, str], body: bytes) -> tuple[bytes, dict[str, str]]:
    """The content and the trailing headers of a body, which `aws-chunked` has in chunks after their sizes (hex)."""
    if "aws-chunked" not in headers.get("Content-Encoding", ""):
        return body, {}
    parts, position = [], 0
    while True:
        end = body.index(b"\r\n", position)
        size = int(body[position:end].split(b";")[0], 16)
        position = end + 2
        if size == 0:
            break
        parts.append(body[position : position + size])
        position += size + 2
    trailers = (line.partition(":") for line in body[position:].decode().split("\r\n") if ":" in line)
    return b"".join(parts), {name.strip().lower(): value.strip() for name, _, value in trailers}


def _encode_rest(service: str, operation: str, result: Mapping[str, Any]) -> Response:
    """In headers and a body, which is the payload alone where there is one."""
    model = _operation(service, operation)
    shape, headers, body, inner = model.output_shape, dict[str, str](), b"", ""
    for name, item in result.items():
        member = shape.members[name]
        if member.serialization.get("location") == "header":
            is_time = member.type_name == "timestamp"
            headers[_located(member, name)] = format_datetime(item, usegmt=True) if is_time else str(item)
        elif member.type_name == "blob":
            body = item.read()
        else:
            inner += _xml(member, _located(member, name), item)
    if inner:
        root = inner if shape.serialization.get("payload") else _element(f"{operation}Result", inner)
        body = root.encode()
    status = 206 if "ContentRange" in result else model.http.get("responseCode", 200)
    return Response(status=status, headers=headers, body=body)


@cache
def _path_pattern(template: str) -> re.Pattern[str]:
    plain = re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(template))
    return re.compile(re.sub(r"\\{(\w+)\\\+\\}", r"(?P<\1>.+)", plain))


def _from_json(shape: _Shape, value: Any) -> Any:
    match shape.type_name:
        case "structure":
            named = {_located(member, name): (name, member) for name, member in shape.members.items()}
            return {named[key][0]: _from_json(named[key][1], v) for key, v in value.items() if v is not None}
        case "list":
            return [_from_json(shape.member, item) for item in value]
        case "map":
            return {key: _from_json(shape.value, item) for key, item in value.items()}
        case "blob":
            return base64.b64decode(value)
        case "timestamp":
            return _instant(value)
    return value


def _to_json(shape: _Shape, value: Any) -> Any:
    match shape.type_name:
        case "structure":
            members = shape.members
            return {
                _located(members[name], name): _to_json(members[name], item)
                for name, item in value.items()
                if name in members and item is not None
            }
        case "list":
            return [_to_json(shape.member, item) for item in value]
        case "map":
            return {key: _to_json(shape.value, item) for key, item in value.items()}
        case "blob":
            return _base64(value)
        case "timestamp":
            return value.timestamp()
    return value


def _located(shape: _Shape, name: str) -> str:
    serialized: str = shape.serialization.get("name", name)
    return serialized


def _decode_form(service: str, body: bytes) -> tuple[str, Params]:
    pairs = dict(parse_qsl(body.decode(), keep_blank_values=True))
    operation = pairs.pop("Action")
    pairs.pop("Version", None)
    tree: dict[str, Any] = {}
    for key, value in pairs.items():
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    shape = _operation(service, operation).input_shape
    names = _ec2_name if _protocol(service) == "ec2" else _located
    return operation, _from_form(shape, tree, names) if shape else {}


def _ec2_name(shape: _Shape, name: str) -> str:
    """The EC2 protocol's name of a parameter: its query name, or its location name with a capital."""
    serialization = shape.serialization
    if "queryName" in serialization:
        query_name: str = serialization["queryName"]
        return query_name
    located: str = serialization.get("name", name)
    return located[0].upper() + located[1:] if "name" in serialization else name


def _from_form(shape: _Shape, value: Any, names: _Names) -> Any:
    match shape.type_name:
        case "structure":
            found = {name: value.get(names(member, name)) for name, member in shape.members.items()}
            return {
                name: _from_form(shape.members[name], item, names) for name, item in found.items() if item is not None
            }
        case "list":
            return [_from_form(shape.member, item, names) for item in _numbered(_list_items(shape, value, names))]
        case "integer" | "long":
            return int(value)
        case "float" | "double":
            return float(value)
        case "boolean":
            return {"true": True, "false": False}[value.lower()]
        case "timestamp":
            return _instant(value)
    return value


def _list_items(shape: _Shape, value: Any, names: _Names) -> Any:
    """The numbered elements of a list; EC2 sends them without a name in between, `query` sends '' for an empty one."""
    if value == "":
        return {}
    return value if names is _ec2_name else value[_located(shape.member, "member")]


def _numbered(items: Mapping[str, Any]) -> list[Any]:
    return [items[key] for key in sorted(items, key=int)]


def _xml_members(shape: _Shape, value: Mapping[str, Any]) -> list[str]:
    members = shape.members
    return [
        _xml(members[name], _located(members[name], name), item)
        for name, item in value.items()
        if name in members and item is not None
    ]


def _xml(shape: _Shape, name: str, value: Any) -> str:
    match shape.type_name:
        case "structure":
            return _element(name, "".join(_xml_members(shape, value)))
        case "list" if shape.serialization.get("flattened"):
            return "".join(_xml(shape.member, name, item) for item in value)
        case "list":
            item_name = _located(shape.member, "member")
            return _element(name, "".join(_xml(shape.member, item_name, item) for item in value))
        case "boolean":
            return _element(name, "true" if value else "false")
        case "timestamp":
            return _element(name, _iso8601(value))
    return _element(name, xml_text(str(value)))


def _element(name: str, content: str) -> str:
    return f"<{name}>{content}</{name}>"


def _base64(value: bytes | str) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()


def _instant(value: Any) -> datetime:
    instant: datetime = botocore.utils.parse_timestamp(value)
    return instant if instant.tzinfo else instant.replace(tzinfo=UTC)


def _iso8601(value: datetime) -> str:
    return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
