"""The page of the REST API, from the OpenAPI document."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from markupsafe import Markup, escape

from rubberband.api.dashboard.frame import prose, render
from rubberband.api.routes import Reader

Words = Mapping[str, Any]
_BODIES = ("application/yaml", "application/json")
"""Media types of bodies, the one of the examples first."""
_REF = "#/components/{}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """Parameter of a request, or value of an object."""

    name: str
    place: str
    """Part of the request that has it: path, query or header; empty for a value of an object."""
    type: Markup
    is_required: bool
    text: Markup


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentedAnswer:
    """Answer to a request."""

    status: str
    text: Markup
    type: Markup
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Method at a path."""

    id: str
    method: str
    path: str
    summary: str
    text: Markup
    is_open: bool
    """Whether it needs no token."""
    command: str
    parameters: tuple[Field, ...]
    body: Markup
    """Type of the body; empty without one."""
    answers: tuple[DocumentedAnswer, ...]
    problems: tuple[DocumentedAnswer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationGroup:
    """Operations of a tag."""

    name: str
    text: Markup
    operations: tuple[Operation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """Type that has a name."""

    name: str
    text: Markup
    type: Markup
    fields: tuple[Field, ...]


def groups(document: Words, address: str) -> list[OperationGroup]:
    """Return the operations by their tags; `address` is the service's in commands."""
    found: dict[str, list[Operation]] = {tag["name"]: [] for tag in document["tags"]}
    for path, methods in document["paths"].items():
        for method, words in methods.items():
            found[words["tags"][0]].append(_operation(document, address, path, method.upper(), words))
    return [
        OperationGroup(name=tag["name"], text=prose(tag["description"]), operations=tuple(found[tag["name"]]))
        for tag in document["tags"]
        if found[tag["name"]]
    ]


def schemas(document: Words) -> list[Schema]:
    """Return the types that have a name."""
    return [
        Schema(
            name=name,
            text=prose(words.get("description", "")),
            type=Markup() if "properties" in words else type_of(words),
            fields=tuple(_fields(words)),
        )
        for name, words in sorted(document["components"]["schemas"].items())
    ]


def type_of(words: Words) -> Markup:
    """Return a type in words, its names led to where they are explained."""
    if reference := words.get("$ref"):
        name = reference.removeprefix(_REF.format("schemas"))
        return Markup('<a href="#type-{0}">{0}</a>').format(name)
    if choices := words.get("anyOf") or words.get("oneOf"):
        return Markup(" or ").join(dict.fromkeys(type_of(one) for one in choices))
    if "const" in words or "enum" in words:
        values = words.get("enum", [words.get("const")])
        return Markup(" or ").join(Markup("<code>{}</code>").format(_json(one)) for one in values)
    if words.get("type") == "array":
        return Markup("list of ") + type_of(words.get("items", {}))
    more = words.get("additionalProperties")
    if words.get("type") == "object" and isinstance(more, Mapping):
        return Markup("text -> ") + type_of(more)
    name = words.get("type", "any")
    return Markup("{}{}").format("text" if name == "string" else name, _bounds(words))


def _bounds(words: Words) -> str:
    named = [("minimum", "from"), ("exclusiveMinimum", "above"), ("maximum", "to"), ("exclusiveMaximum", "below")]
    said = [f"{word} {words[key]:g}" for key, word in named if key in words]
    said += [f"up to {words['maxLength']} characters"] if "maxLength" in words else []
    return f" {' '.join(said)}" if said else ""


def _fields(words: Words) -> Iterator[Field]:
    for name, value in words.get("properties", {}).items():
        yield Field(
            name=name,
            place="",
            type=type_of(value),
            is_required=name in words.get("required", ()),
            text=_explained(value),
        )


def _explained(words: Words, text: str = "") -> Markup:
    default = words.get("default")
    said = prose(text or words.get("description", ""))
    if default in (None, "", [], {}):
        return said
    return said + Markup("<p>Default: <code>{}</code></p>").format(_json(default))


def _operation(document: Words, address: str, path: str, method: str, words: Words) -> Operation:
    bodies = words.get("requestBody", {}).get("content", {})
    parameters = [
        Field(
            name=one["name"],
            place=one["in"],
            type=type_of(one["schema"]),
            is_required=one.get("required", False),
            text=_explained(one["schema"], one.get("description", "")),
        )
        for one in words.get("parameters", ())
    ]
    answers = [_answer(document, status, one) for status, one in sorted(words["responses"].items())]
    is_open = words.get("security") == []
    return Operation(
        id=words["operationId"],
        method=method,
        path=path,
        summary=words["summary"],
        text=prose(words.get("description", "")),
        is_open=is_open,
        command=_command(address + path, method, words, is_open=is_open),
        parameters=tuple(parameters),
        body=type_of(bodies["application/json"]["schema"]) if bodies else Markup(),
        answers=tuple(one for one in answers if one.status < "400"),
        problems=tuple(one for one in answers if one.status >= "400"),
    )


def _answer(document: Words, status: str, words: Words) -> DocumentedAnswer:
    if reference := words.get("$ref"):
        words = document["components"]["responses"][reference.removeprefix(_REF.format("responses"))]
    contents: Mapping[str, Words] = words.get("content", {})
    kind, content = next(iter(contents.items()), ("", {}))
    example = _example(content)
    text = "" if example is None else example if isinstance(example, str) else json.dumps(example, indent=2)
    typed = type_of(content["schema"]) if "$ref" in content.get("schema", {}) else Markup(escape(kind))
    return DocumentedAnswer(status=status, text=prose(words.get("description", "")), type=typed, example=text)


def _example(content: Words) -> Any:
    several = list(content.get("examples", {}).values())
    return several[0]["value"] if several else content.get("example")


def _command(url: str, method: str, words: Words, *, is_open: bool) -> str:
    """Return the request as a command of curl, with parameters in upper case: braces have a meaning there."""
    url = re.sub(r"\{(\w+)\}", lambda found: found[1].upper(), url)
    parts = [f"-X {method}"] if method not in ("GET", "POST") else []
    parts += [] if is_open else ['-H "Authorization: Bearer $RUBBERBAND_TOKEN"']
    bodies = words.get("requestBody", {}).get("content", {})
    kind = next((kind for kind in _BODIES if kind in bodies), "")
    if kind == "application/yaml":
        parts += ["-H 'Content-Type: application/yaml'", "--data-binary @experiment.yaml"]
    elif kind:
        parts += [f"--json {shlex.quote(_json(_example(bodies[kind]) or {}))}"]
    elif method == "POST":
        parts += ["-X POST"]
    answers = words["responses"].get("200", {}).get("content", {})
    parts += ["-N"] if "text/event-stream" in answers else ["-OJ"] if "application/octet-stream" in answers else []
    return " \\\n  ".join([f"curl {shlex.quote(url)}", *parts])


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


router = APIRouter(include_in_schema=False)


@router.get("/docs")
def docs(request: Request, _reader: Reader) -> Response:
    """The REST API, as /openapi.json describes it."""
    document = request.app.openapi()
    found = groups(document, str(request.base_url).rstrip("/"))
    return render(request, "docs.html", info=document["info"], groups=found, schemas=schemas(document))
