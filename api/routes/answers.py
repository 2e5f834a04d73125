"""How routes read and answer: in JSON, errors as problems, repeated requests once; and the OpenAPI document of it all.

The document is that of FastAPI, with problems, tokens and the schema of experiments. Queries that it does not name are
refused (see `only_documented`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Annotated, Any, ClassVar, TypeVar

import yaml
from fastapi import Depends, FastAPI, Header, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.concurrency import run_in_threadpool

import rubberband
from rubberband.api import problems
from rubberband.api.body import JSON_TYPE, json_object
from rubberband.api.problems import INVALID, KEY_BUSY, KEY_REUSED, MEDIA, MEDIA_TYPE, HttpProblem, Kind
from rubberband.api.store import Store
from rubberband.api.store.schema import KeptAnswer, Principal
from rubberband.client.models import ProblemAnswer
from rubberband.spec.experiment import Experiment
from rubberband.spec.loading import read_yaml
from rubberband.units import nearest, shown
from rubberband.views.experiment import to_bytes

_MOST_FAULTS = 20
"""Faults listed of one request."""


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a result of `plain` as an answer."""
    return Response(to_bytes(value), status, headers, "application/json")


def invalid(errors: Sequence[Any], *place: str) -> HttpProblem:
    """Return the problem of pydantic's errors; `place` (`query`, `body`) comes before their locations."""
    faults = [{"loc": [*place, *map(str, error["loc"])], "message": error["msg"]} for error in errors]
    first = faults[0]
    where = ".".join(first["loc"][1:]) or first["loc"][0]
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return HttpProblem(INVALID, f"{shown(where)}: {first['message']}{more}", errors=faults[:_MOST_FAULTS])


def require_json(media_type: str) -> None:
    """Raise Problem MEDIA for any other type of content."""
    if media_type.partition(";")[0].strip().lower() != JSON_TYPE:
        raise HttpProblem(MEDIA, f"Content-Type {shown(media_type)} is not supported; send {JSON_TYPE}")


_Asked = TypeVar("_Asked", bound=BaseModel)


def read_object(kind: type[_Asked], body: bytes, what: str) -> _Asked:
    """Parse the JSON object in a request's body; `what` it is, for problems. Raises Problem MALFORMED or INVALID."""
    words = json_object(body, what)
    try:
        return kind.model_validate(words)
    except ValidationError as error:
        raise invalid(error.errors(), "body") from None


async def body_of(request: Request) -> bytes:
    """Dependency: the raw body."""
    return await request.body()


Body = Annotated[bytes, Depends(body_of)]


def json_body(model: type[BaseModel], examples: dict[str, Any]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route whose body is read as JSON."""
    content = {"application/json": {"schema": model.model_json_schema(), "examples": examples}}
    return {"requestBody": {"required": True, "content": content}}


HEAD = "rubberband.head"
"""Key of the scope: the request was HEAD."""


# Repeated requests: the same Idempotency-Key has the same answer, and one effect.

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern="^[!-~]{1,255}$",
        description=(
            "A value that the client chooses, a new one for each new request. If a request is sent again with it "
            "(after a lost answer, say), nothing is done again: the service repeats its first answer, with "
            "`Idempotency-Replayed: true`."
        ),
        examples=["8e03978e-40d5-43dd-bc93-6894a57f9324"],
    ),
]
REPLAYED = "Idempotency-Replayed"
_KEPT_HEADERS = ("content-type", "location", "content-location", "cache-control")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedRequest:
    """Key of a request, and what a repeat with that key must share."""

    key: str | None
    owner: str
    """Id of the token; each token has its own keys."""
    digest: str

    @property
    def request(self) -> str:
        """Id that all repeats share; empty without a key."""
        if self.key is None:
            return ""
        return hashlib.sha256(f"{self.owner}\n{self.digest}\n{self.key}".encode()).hexdigest()[:32]


def asked(request: Request, principal: Principal, key: str | None, body: bytes = b"") -> KeyedRequest:
    """Return the key and digest of a request."""
    digest = hashlib.sha256()
    for part in (request.method, request.url.path, request.url.query, request.headers.get("content-type", "")):
        digest.update(part.encode() + b"\n")
    digest.update(body)
    return KeyedRequest(key=key, owner=principal.token, digest=digest.hexdigest())


async def once(
    store: Store, clock: Callable[[], float], request: KeyedRequest, act: Callable[[], Awaitable[Response]]
) -> Response:
    """Return the answer of `act`, or its earlier answer to the same request.

    Errors are not stored, so the request may be repeated. Raises Problem KEY_REUSED and KEY_BUSY.
    """
    key, owner = request.key, request.owner
    if key is None:
        return await act()
    found = await run_in_threadpool(store.claim_key, key, owner=owner, request_hash=request.digest, at=clock())
    if isinstance(found, KeptAnswer):
        return Response(found.body, found.status, {**found.headers, REPLAYED: "true"})
    if found == "reused":
        raise HttpProblem(KEY_REUSED, "another request had this Idempotency-Key; make a new one for each new request")
    if found == "busy":
        served = "the request with this Idempotency-Key is being served; ask again soon"
        raise HttpProblem(KEY_BUSY, served, headers={"Retry-After": "1"})
    try:
        answer = await act()
    except Exception:
        await run_in_threadpool(store.free_key, key, owner=owner)
        raise
    if answer.status_code >= 400:
        await run_in_threadpool(store.free_key, key, owner=owner)
    else:
        headers = {name: value for name, value in answer.headers.items() if name in _KEPT_HEADERS}
        kept = KeptAnswer(status=answer.status_code, headers=headers, body=bytes(answer.body))
        await run_in_threadpool(store.keep_answer, key, owner=owner, answer=kept, at=clock())
    return answer


# The OpenAPI document: that of FastAPI, with problems, tokens and the schema of experiments.

_REF = "#/components/schemas/{model}"
_EVERYWHERE = (problems.FOREIGN_HOST, problems.RATE, problems.INTERNAL)
_BEHIND_TOKEN = (problems.UNAUTHENTICATED, problems.FORBIDDEN, problems.UNAVAILABLE)
_WITH_BODY = (problems.MALFORMED, problems.TOO_SLOW, problems.TOO_LARGE)
TOKEN = "bearer"
"""Name of the security scheme."""
_DESCRIPTION = """\
Tunes hyperparameters in the cloud, by a deadline and within a budget: previews plans, runs experiments, and reports
their status. Times end in `_s` (seconds) or `_at` (Unix time in seconds), money in `_usd`. Errors are
`application/problem+json`. Where a token is needed, it has a scope: `read`, `submit` or `admin`; each includes those
before it.
"""
_TAGS = [
    {"name": "plans", "description": "Preview an experiment's time and cost. Nothing is started or spent."},
    {"name": "experiments", "description": "Start, watch, extend, resume and cancel experiments."},
    {"name": "events", "description": "Events of experiments, as they happen."},
    {"name": "prices", "description": "Resources and prices of instance types."},
    {"name": "pool", "description": "The pool that experiments share: allotments and promises."},
    {"name": "tokens", "description": "Tokens that give access to the service."},
    {"name": "service", "description": "Health and metrics of the service."},
]


def refusals(*kinds: Kind) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route for problems of these kinds."""
    statuses = sorted({kind.status for kind in kinds})
    return {status: _response([kind for kind in kinds if kind.status == status]) for status in statuses}


def _response(kinds: Sequence[Kind]) -> dict[str, Any]:
    examples = {kind.slug: {"value": problems.HttpProblem(kind, kind.example).to_json()} for kind in kinds}
    return {
        "description": "; or ".join(kind.title for kind in kinds),
        "content": {MEDIA_TYPE: {"schema": {"$ref": _REF.format(model="Problem")}, "examples": examples}},
    }


EXAMPLES: Mapping[str, Any] = yaml.safe_load(resources.files(__package__).joinpath("examples.yaml").read_text("utf-8"))
"""Name -> an example of an answer, or of an experiment file."""
_OF_SCHEMAS = {
    "PlanView": "plan",
    "OptionView": "option",
    "PoolView": "pool",
    "TokenView": "token",
    "MadeToken": "made_token",
    "TokenList": "tokens",
}
"""Schema -> its example."""


def example(description: str, name: str) -> dict[str, Any]:
    """Return the `responses` entry of an answer in JSON, with an example of `EXAMPLES`."""
    return {"description": description, "content": {"application/json": {"example": EXAMPLES[name]}}}


EXPERIMENT_BODY: dict[str, Any] = {
    "required": True,
    "description": "The experiment file: in JSON, or as the YAML text that the command line reads.",
    "content": {
        "application/json": {
            "schema": {"$ref": _REF.format(model="Experiment")},
            "examples": {"sha": {"summary": "Successive halving", "value": read_yaml(EXAMPLES["experiment_yaml"])[0]}},
        },
        "application/yaml": {
            "schema": {"type": "string"},
            "examples": {"sha": {"summary": "Successive halving", "value": EXAMPLES["experiment_yaml"]}},
        },
    },
}
"""Request body of routes that receive an experiment."""


class DocumentedApp(FastAPI):
    """App with a complete OpenAPI document."""

    _built: ClassVar[dict[str, Any]] = {}

    def openapi(self) -> dict[str, Any]:
        """Return the document, built once in a process: all apps have the same routes."""
        if not self._built:
            self._built.update(_document(self))
        return self._built

    def methods_of(self, path: str) -> list[str]:
        """Return the methods of a path in the document; empty for an unknown path."""
        for template, operations in self.openapi()["paths"].items():
            if re.fullmatch(re.sub(r"\\\{[^/]+\\\}", "[^/]+", re.escape(template)), path):
                methods = [method.upper() for method in operations]
                return sorted({*methods, "HEAD"} if "GET" in methods else methods)
        return []


async def only_documented(request: Request) -> None:
    """Dependency: `require_documented`. Async, or FastAPI would run it in a thread."""
    require_documented(request)


def require_documented(request: Request) -> None:
    """Raise Problem INVALID for a query parameter that the document does not name."""
    route = request.scope["route"]
    assert isinstance(route, APIRoute), "routers of routes depend on this"
    operation = request.app.openapi()["paths"].get(route.path_format, {}).get(request.method.lower(), {})
    known = [each["name"] for each in operation.get("parameters", []) if each["in"] == "query"]
    for name in request.query_params:
        if name not in known:
            hint = nearest(name, known) if known else "this path takes no parameters"
            fault = {"loc": ["query", name], "message": "unknown parameter"}
            raise problems.HttpProblem(
                problems.INVALID, f"query parameter {shown(name)} is unknown; {hint}", errors=[fault]
            )


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title="RubberBand",
        version=rubberband.__version__,
        openapi_version="3.1.0",
        description=_DESCRIPTION,
        routes=app.routes,
        tags=_TAGS,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
    )
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for gone in ("HTTPValidationError", "ValidationError"):
        schemas.pop(gone, None)
    schemas["Problem"] = TypeAdapter(ProblemAnswer).json_schema() | {"title": "Problem"}
    experiment = Experiment.model_json_schema(by_alias=True, ref_template=_REF)
    schemas.update(experiment.pop("$defs", {}))
    schemas["Experiment"] = experiment
    for name, example_name in _OF_SCHEMAS.items():
        schemas[name]["examples"] = [EXAMPLES[example_name]]
    schemas.update(sorted(schemas.items()))
    components["securitySchemes"] = {
        TOKEN: {"type": "http", "scheme": "bearer", "description": "`rubberband token create` makes one."}
    }
    shared: dict[str, Any] = {}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _complete(path, operation, shared)
    components["responses"] = dict(sorted(shared.items()))
    return document


def _complete(path: str, operation: dict[str, Any], shared: dict[str, Any]) -> None:
    """Add the problems that every operation may answer with, and whether it needs a token."""
    public = path in PUBLIC
    operation["security"] = [] if public else [{TOKEN: []}]
    kinds = [*_EVERYWHERE, *(() if public else _BEHIND_TOKEN)]
    responses = operation["responses"]
    if "requestBody" in operation:
        kinds += _WITH_BODY
    if "422" in responses and "content" in responses["422"] and MEDIA_TYPE not in responses["422"]["content"]:
        del responses["422"]
    if "422" not in responses and (operation.get("parameters") or "requestBody" in operation):
        kinds.append(problems.INVALID)
    for kind in kinds:
        if str(kind.status) not in responses:
            shared[kind.slug] = _response([kind])
            responses[str(kind.status)] = {"$ref": f"#/components/responses/{kind.slug}"}
    operation["responses"] = dict(sorted(responses.items()))


PUBLIC = frozenset({"/healthz", "/readyz"})
"""Documented paths that need no token."""
