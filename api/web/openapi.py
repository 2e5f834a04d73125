"""The OpenAPI document: that of FastAPI, with problems, tokens and the schema of experiments.

Queries that the document does not name are refused (see `only_documented`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

import rubberband
from rubberband.api.web import problems
from rubberband.api.web.models import ProblemAnswer
from rubberband.api.web.problems import MEDIA_TYPE, Kind
from rubberband.spec.experiment import Experiment
from rubberband.spec.loading import read_yaml
from rubberband.units import nearest, shown

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


_DETAILS: Mapping[str, str] = {
    "malformed": "the body is not JSON: Expecting ',' delimiter (line 3, column 5); check quotes and commas",
    "unauthenticated": "a token is needed; send it as Authorization: Bearer rb_…",
    "forbidden": "this needs the scope submit; the token 'ci' has read",
    "foreign-host": "this service does not answer for the host 'example.org'",
    "not-found": "experiment 'digits-sha' not found",
    "too-slow": "the body did not arrive within 30 s; send it faster",
    "too-large": "the body has more than 1,048,576 bytes",
    "unsupported-media-type": "Content-Type 'text/csv' is not supported; send application/json",
    "invalid": "constraints.deadline: '20 bananas' is not a duration; write 90s, 20m, 1h30m or seconds",
    "not-allowed-here": "entrypoint: 'os:system' is not allowed here",
    "profile-missing": "planning needs a profile",
    "infeasible": "no plan meets deadline 10m; the fastest takes 14m2s and costs 18.40 USD",
    "name-taken": "the name 'digits-sha' is taken by another experiment; choose another",
    "conflict": "experiment 'digits-sha' is done; there is nothing to resume",
    "idempotency-key-reused": "another request had this Idempotency-Key; make a new one for each new request",
    "idempotency-key-busy": "the request with this Idempotency-Key is being served; ask again soon",
    "too-many-requests": "more than 200 requests a second; wait a second",
    "provider": "EC2 refused: RequestLimitExceeded; try again later",
    "unavailable": "the store does not answer; try again soon",
    "planning-too-long": "planning took more than 30s; allow fewer instances or types",
    "internal": "an internal error occurred; the service's log has details under 5f0c1d2e3a4b",
}
"""Kind of problem -> example of a detail."""


def refusals(*kinds: Kind) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route for problems of these kinds."""
    statuses = sorted({kind.status for kind in kinds})
    return {status: _response([kind for kind in kinds if kind.status == status]) for status in statuses}


def _response(kinds: Sequence[Kind]) -> dict[str, Any]:
    examples = {
        kind.slug: {"value": problems.HttpProblem(kind, _DETAILS.get(kind.slug, "…")).to_json()} for kind in kinds
    }
    return {
        "description": "; or ".join(kind.title for kind in kinds),
        "content": {MEDIA_TYPE: {"schema": {"$ref": _REF.format(model="Problem")}, "examples": examples}},
    }


EXPERIMENT_YAML = """\
version: 1
name: digits-sha
entrypoint: examples.digits:DigitsTrial
search:
  space:
    lr: {type: loguniform, lower: 1e-3, upper: 0.3}
    momentum: {type: uniform, lower: 0.5, upper: 0.95}
    weight_decay: {type: loguniform, lower: 1e-6, upper: 1e-3}
    width: {type: choice, values: [8, 12, 16]}
  scheduler: {type: sha, num_samples: 8, grace_period: 1, max_t: 9, reduction_factor: 3}
  metric: accuracy
  mode: max
constraints: {deadline: 20m, max_cost: 40}
resources: {provider: local, price_per_hour: 3.6, max_instances: 8}
profile: {seconds_per_iteration: {1: 10, 2: 6}}
"""
EXPERIMENT_EXAMPLE: Any = read_yaml(EXPERIMENT_YAML)[0]

EXPERIMENT_BODY: dict[str, Any] = {
    "required": True,
    "description": "The experiment file: in JSON, or as the YAML text that the command line reads.",
    "content": {
        "application/json": {
            "schema": {"$ref": _REF.format(model="Experiment")},
            "examples": {"sha": {"summary": "Successive halving", "value": EXPERIMENT_EXAMPLE}},
        },
        "application/yaml": {
            "schema": {"type": "string"},
            "examples": {"sha": {"summary": "Successive halving", "value": EXPERIMENT_YAML}},
        },
    },
}
"""Request body of routes that receive an experiment."""


class DocumentedApp(FastAPI):
    """App with a complete OpenAPI document."""

    def openapi(self) -> dict[str, Any]:
        """Return the document, built once."""
        if not self.openapi_schema:
            self.openapi_schema = _document(self)
        return self.openapi_schema

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
    schemas["Problem"] = ProblemAnswer.model_json_schema() | {"title": "Problem"}
    experiment = Experiment.model_json_schema(by_alias=True, ref_template=_REF)
    schemas.update(experiment.pop("$defs", {}))
    schemas["Experiment"] = experiment
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
