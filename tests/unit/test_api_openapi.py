"""The OpenAPI document, frozen: what changes it changes it on purpose."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from rubberband.api.problems import KINDS, MEDIA_TYPE
from tests.builders.fake_runs import FakeService, fake_service, virtual_result

FROZEN = Path(__file__).with_name("openapi.txt")
Operation = tuple[str, str, dict[str, Any]]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeService]:
    with fake_service(tmp_path_factory.mktemp("home")) as made:
        yield made


@pytest.fixture(scope="module")
def document(service: FakeService) -> dict[str, Any]:
    found: dict[str, Any] = service.client.get("/openapi.json").json()
    return found


def operations(document: Mapping[str, Any]) -> list[Operation]:
    return [
        (path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


def test_it_is_the_frozen_one(document: dict[str, Any]) -> None:
    text = outline(document)
    if os.environ.get("RUBBERBAND_FREEZE_OPENAPI"):
        FROZEN.write_text(text, encoding="utf-8")
    assert text == FROZEN.read_text(encoding="utf-8"), (
        "the OpenAPI document changed; if that is meant, write it anew: "
        "RUBBERBAND_FREEZE_OPENAPI=1 python -m pytest tests/unit/test_api_openapi.py"
    )


def outline(document: Mapping[str, Any]) -> str:
    """The document without its words and examples: operations and types, with all that a client can depend on."""
    lines = list[str]()
    for path, method, operation in operations(document):
        opened = "token" if operation["security"] else "public"
        lines.append(f"{method.upper()} {path} {operation['operationId']} {opened}")
        for each in operation.get("parameters", ()):
            lines.append(f"  {each['in']} {_field(each['name'], each['schema'], each['required'])}")
        bodies = operation.get("requestBody", {}).get("content", {})
        lines += _folded(*(f"takes {kind} {_type(body['schema'])}" for kind, body in bodies.items()))
        lines += _folded(*(_answer(status, each) for status, each in operation["responses"].items()))
    for name, schema in document["components"]["schemas"].items():
        fields = _fields(schema)
        lines.append(f"{name} {_type({key: schema[key] for key in schema.keys() - {'properties', 'required'}})}")
        lines += _folded(*fields)
    return "\n".join([*lines, ""])


def _folded(*parts: str) -> list[str]:
    return textwrap.wrap("; ".join(parts), 116, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def _answer(status: str, answer: Mapping[str, Any]) -> str:
    if "$ref" in answer:
        return f"{status} {answer['$ref'].rpartition('/')[2]}"
    bodies = [f"{kind} {_type(body['schema'])}" for kind, body in answer.get("content", {}).items()]
    return " ".join([status, *bodies, *answer.get("headers", ())])


def _fields(schema: Mapping[str, Any]) -> list[str]:
    required = schema.get("required", ())
    return [_field(name, value, name in required) for name, value in schema.get("properties", {}).items()]


def _field(name: str, schema: Mapping[str, Any], required: bool) -> str:
    default = f" = {json.dumps(schema['default'])}" if "default" in schema else ""
    return f"{name}{'' if required else '?'}: {_type(schema)}{default}"


_WORDS = {"title", "description", "example", "examples", "default"}


def _type(schema: Mapping[str, Any]) -> str:
    """A type with all of its limits, on one line."""
    parts, rest = list[str](), {key: schema[key] for key in sorted(schema.keys() - _WORDS)}
    if "$ref" in rest:
        parts.append(rest.pop("$ref").rpartition("/")[2])
    for choice in ("anyOf", "oneOf", "allOf"):
        if choice in rest:
            parts.append(" | ".join(map(_type, rest.pop(choice))))
    if "items" in rest:
        parts.append(f"[{_type(rest.pop('items'))}]")
    if isinstance(rest.get("additionalProperties"), dict):
        parts.append(f"{{{_type(rest.pop('additionalProperties'))}}}")
    if "properties" in rest:
        parts.append(f"{{{'; '.join(_fields(schema))}}}")
        rest = {key: value for key, value in rest.items() if key not in ("properties", "required")}
    for values in (rest.pop("enum", None), [rest.pop("const")] if "const" in rest else None):
        if values is not None:
            parts.append(" | ".join(map(json.dumps, values)))
    kind = rest.pop("type", None)
    if kind is not None and not parts:
        parts.append(kind)
    if rest:
        parts.append(f"({', '.join(f'{key} {json.dumps(value)}' for key, value in rest.items())})")
    return " ".join(parts)


def test_it_is_openapi_3_1(document: dict[str, Any]) -> None:
    assert document["openapi"] == "3.1.0"
    assert document["info"]["title"] == "RubberBand"
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_every_reference_leads_to_a_schema(document: dict[str, Any]) -> None:
    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                yield value["$ref"]
            value = list(value.values())
        for inner in value if isinstance(value, list) else ():
            yield from references(inner)

    found = set(references(document))
    assert found
    parts = {f"#/components/{kind}/{name}" for kind, named in document["components"].items() for name in named}
    assert found <= parts


def test_every_operation_is_reported_in_full(document: dict[str, Any]) -> None:
    ids = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(ids) == len(set(ids))
    tags = {tag["name"] for tag in document["tags"]}
    for path, method, operation in operations(document):
        where = f"{method} {path}"
        assert operation["summary"], where
        assert operation["description"], where
        assert set(operation["tags"]) <= tags, where
        assert "security" in operation, where
        for parameter in operation.get("parameters", []):
            assert parameter.get("description") or parameter["schema"].get("description"), (where, parameter)


def _resolved(document: dict[str, Any], response: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in response:
        found: dict[str, Any] = document["components"]["responses"][response["$ref"].rpartition("/")[2]]
        return found
    return response


def test_every_answer_has_an_example_that_fits_its_schema(document: dict[str, Any]) -> None:
    checked = 0
    for path, method, operation in operations(document):
        bodies = [operation["requestBody"]] if "requestBody" in operation else []
        for part in [*bodies, *(_resolved(document, each) for each in operation["responses"].values())]:
            for media_type, content in part.get("content", {}).items():
                for example in _examples(document, content):
                    schema = content["schema"] | {"components": document["components"]}
                    jsonschema.Draft202012Validator(schema).validate(example)
                    checked += 1
                if media_type == "application/json":
                    assert _examples(document, content), (method, path)
    assert checked > 100


def _examples(document: dict[str, Any], content: dict[str, Any]) -> list[Any]:
    if "example" in content:
        return [content["example"]]
    if "examples" in content:
        return [example["value"] for example in content["examples"].values()]
    schema = content["schema"]
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return list(schema.get("examples", []))


def test_errors_are_problems_and_every_kind_is_reported(document: dict[str, Any]) -> None:
    expected: set[str] = set()
    for path, method, operation in operations(document):
        for status, response in operation["responses"].items():
            content = _resolved(document, response).get("content", {})
            if int(status) >= 400 and path != "/readyz":
                assert set(content) == {MEDIA_TYPE}, (method, path, status)
                expected |= set(content[MEDIA_TYPE]["examples"])
    assert {kind.slug for kind in KINDS} - expected <= {"foreign-origin", "method-not-allowed"}


def test_tokens_are_asked_for_but_where_there_is_nothing_to_tell(document: dict[str, Any]) -> None:
    public = {path for path, _, operation in operations(document) if not operation["security"]}
    assert public == {"/healthz", "/readyz"}


def test_requests_that_spend_money_or_delete_take_a_key(document: dict[str, Any]) -> None:
    keyed = {
        operation["operationId"]
        for _, _, operation in operations(document)
        if any(parameter["name"] == "Idempotency-Key" for parameter in operation.get("parameters", []))
    }
    acts = ("submit", "cancel", "resume", "extend", "limit", "delete")
    assert keyed == {f"{act}Experiment" for act in acts} | {"stopTrial", "addTrial"}


MADE_UP = {"/v1/pool", "/v1/plans/{id}", "/v1/plans/{id}/options/{scheduler}", "/v1/tokens/{id}"}
"""Their examples are random ids: nothing is there."""
REFUSED = {"getCheckpoint", "deleteExperiment", "stopTrial"}
"""A virtual run has no checkpoint, and an experiment that waits is not deleted; none of its trials is stopped."""


def test_every_example_of_a_request_is_answered_as_the_document_says(
    service: FakeService, document: dict[str, Any]
) -> None:
    service.runs.results["digits-sha"] = virtual_result()
    for path, method, operation in sorted(operations(document), key=_order):
        if operation["operationId"] == "streamEvents":
            continue
        for number, content in enumerate(_contents(document, operation)):
            query = _parameters(operation, "query")
            if operation["operationId"] == "submitExperiment" and number:
                query["set"] = "name=another"
            to = path.format(**_parameters(operation, "path"))
            answer = service.client.request(method, to, params=query, **content)
            answers = [int(status) for status in operation["responses"] if status.startswith("2")]
            is_missing = path in MADE_UP or operation["operationId"] == "getArtifact"
            expected = [404] if is_missing else [409] if operation["operationId"] in REFUSED else answers
            assert answer.status_code in expected, (method, to, query, answer.text)


def _order(operation: Operation) -> tuple[bool, str]:
    path, method, _ = operation
    return (method != "post", path)


def _contents(document: dict[str, Any], operation: dict[str, Any]) -> list[dict[str, Any]]:
    """What makes requests of the examples of an operation's bodies; one without a body, where it has none."""
    if "requestBody" not in operation:
        return [{}]
    return [
        {"content": example if isinstance(example, str) else json.dumps(example), "headers": {"content-type": kind}}
        for kind, content in operation["requestBody"]["content"].items()
        for example in _examples(document, content)
    ]


def _parameters(operation: dict[str, Any], where: str) -> dict[str, Any]:
    """The first examples of an operation's parameters."""
    given = [each for each in operation.get("parameters", []) if each["in"] == where]
    return {each["name"]: each["schema"]["examples"][0] for each in given if each["schema"].get("examples")}
